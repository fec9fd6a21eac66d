"""One registered operation per kernel, so that eager code, CUDA graphs and `torch.compile` all see the same op.

On CUDA an op runs its Triton launcher, or its reference once `use_reference` named it. On a CPU it runs the reference,
and the launcher where Triton interprets kernels (`TRITON_INTERPRET=1`, as the tests do).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

NAMESPACE = "kvscope"
_library = torch.library.Library(NAMESPACE, "DEF")


@dataclass(slots=True)
class RegisteredOp:
    """An out-variant op: it writes the tensors its schema marks and returns nothing."""

    name: str
    launcher: Callable[..., None]
    reference: Callable[..., None]
    chosen: Callable[..., None]

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.chosen(*args, **kwargs)


OPS: dict[str, RegisteredOp] = {}


def register(
    name: str, schema: str, launcher: Callable[..., None], reference: Callable[..., None]
) -> Callable[..., None]:
    """Define `kvscope::name` with `schema`, e.g. `(Tensor x, float eps, Tensor(a!) out) -> ()`; returns the op."""
    op = RegisteredOp(name, launcher, reference, chosen=launcher)
    OPS[name] = op
    _library.define(name + schema)
    _library.impl(name, op.run, "CUDA")
    _library.impl(name, op.run if triton.knobs.runtime.interpret else reference, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _nothing, lib=_library)
    operation: Callable[..., None] = getattr(getattr(torch.ops, NAMESPACE), name)
    return operation


def use_reference(name: str) -> None:
    """From now on run the plain torch definition of an op whose kernel can't be trusted on this card."""
    OPS[name].chosen = OPS[name].reference


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What an op that only writes its arguments tells a tracer."""
