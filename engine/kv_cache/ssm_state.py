"""The tensors of recurrent states: a slot holds what all Mamba-2 layers remember of one sequence, in constant size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.kv_cache.checkpoints import CLEARED


@dataclass(frozen=True, slots=True)
class SSMStateSpec:
    """Shape of one sequence's state: per layer the convolution's last inputs, [channels, width - 1] in `conv_dtype`,
    and the recurrence's state, float32 [heads, head_dim, state_size]."""

    num_layers: int
    conv_shape: tuple[int, int]
    ssm_shape: tuple[int, int, int]
    conv_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return self.num_layers * (math.prod(self.conv_shape) * self.conv_dtype.itemsize + 4 * math.prod(self.ssm_shape))


@dataclass(frozen=True, slots=True)
class StateBatch:
    """States of S sequences: conv [layers, S, channels, width - 1], ssm [layers, S, heads, head_dim, state_size].

    Each layer's part is contiguous, and kernels update it in place.
    """

    slots: tuple[int, ...]
    conv: Tensor
    ssm: Tensor


class States(Protocol):
    """Where a step's layers find the states of its sequences."""

    def take(self, slots: tuple[int, ...], apart: bool = False) -> StateBatch:
        """The states side by side, for kernels to move on."""

    def put_back(self, batch: StateBatch) -> None:
        """Keep what the step made of them."""


class FixedStates:
    """Rows of states at an address that stays, for steps that are captured: `load` before one, `save` after it."""

    def __init__(self, batch: StateBatch) -> None:
        self.batch = batch

    def take(self, slots: tuple[int, ...], apart: bool = False) -> StateBatch:
        return self.batch

    def put_back(self, batch: StateBatch) -> None:
        """They lie where the step left them."""

    def load(self, states: SSMStatePool, slots: tuple[int, ...]) -> None:
        """Rows beyond the slots keep what they hold, which means nothing."""
        for row, slot in enumerate(slots):
            found = states.take((slot,))
            self.batch.conv[:, row : row + 1].copy_(found.conv)
            self.batch.ssm[:, row : row + 1].copy_(found.ssm)

    def save(self, states: SSMStatePool, slots: tuple[int, ...]) -> None:
        states.put_back(StateBatch(slots, self.batch.conv, self.batch.ssm))


class SSMStatePool:
    """Slot `s` has memory from its first use until `trim`. Slot 0 only pads batches: what it holds means nothing.

    Which slot belongs to whom is the business of `StateCheckpoints` and the sequences.
    """

    def __init__(self, spec: SSMStateSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self._slots: dict[int, StateBatch] = {}
        self._scratch: StateBatch | None = None
        self._fixed = self._empty(())
        self._fixed_rows = 0

    @property
    def reserved_bytes(self) -> int:
        """Slots that have memory."""
        return len(self._slots) * self.spec.nbytes

    @property
    def workspace_bytes(self) -> int:
        scratch = 0 if self._scratch is None else len(self._scratch.slots)
        return (scratch + self._fixed_rows) * self.spec.nbytes

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole states in order, pairs of (source, target) slots; a source `CLEARED` sets the target to zero."""
        for source, target in pairs:
            into = self._slot(target)
            if source == CLEARED:
                into.conv.zero_()
                into.ssm.zero_()
            else:
                into.conv.copy_(self._slot(source).conv)
                into.ssm.copy_(self._slot(source).ssm)

    def take(self, slots: tuple[int, ...], apart: bool = False) -> StateBatch:
        """The states of a batch, side by side, to be put back once a step has moved them on.

        Of a single one no copy is made unless `apart`: then a step that is given up leaves its slot as it was, which is
        so for several in any case.
        """
        found = [self._slot(slot) for slot in slots]
        if len(found) == 1 and not apart:
            return found[0]
        if self._scratch is None or len(self._scratch.slots) != len(slots):
            self._scratch = self._empty(slots)
        batch = StateBatch(slots, self._scratch.conv, self._scratch.ssm)
        torch.cat([one.conv for one in found], dim=1, out=batch.conv)
        torch.cat([one.ssm for one in found], dim=1, out=batch.ssm)
        return batch

    def put_back(self, batch: StateBatch) -> None:
        """Let the slots hold what a step made of them."""
        if batch is self._slots.get(batch.slots[0]):
            return
        for index, slot in enumerate(batch.slots):
            self._slot(slot).conv.copy_(batch.conv[:, index : index + 1])
            self._slot(slot).ssm.copy_(batch.ssm[:, index : index + 1])

    def fixed(self, rows: int) -> FixedStates:
        """`rows` rows at an address that stays until more are asked for; all such share their memory."""
        if rows > self._fixed_rows:
            self._fixed, self._fixed_rows = self._empty((0,) * rows), rows
        shapes = (self.spec.conv_shape, self.spec.ssm_shape)
        parts = zip((self._fixed.conv, self._fixed.ssm), shapes, strict=True)
        own = [
            whole.view(-1)[: rows * self.spec.num_layers * math.prod(shape)].view(self.spec.num_layers, rows, *shape)
            for whole, shape in parts
        ]
        return FixedStates(StateBatch((0,) * rows, *own))

    def trim(self, limit: int) -> None:
        """Give back the memory of slots from `limit` on, and the scratch memory."""
        self._slots = {slot: state for slot, state in self._slots.items() if slot < limit}
        self._scratch = None

    def export_state(self, slot: int) -> dict[str, Tensor]:
        """A slot as named tensors on the host: "conv" [layers, channels, width - 1] and "ssm" [layers, heads, head_dim,
        state_size]."""
        state = self._slot(slot)
        return {name: getattr(state, name)[:, 0].cpu().clone() for name in ("conv", "ssm")}

    def import_state(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill a slot from what `export_state` gave. Raises ValueError, before anything is written, for tensors of
        other names, shapes or dtypes, or with values that are not finite."""
        state = self._slot(slot)
        if set(tensors) != {"conv", "ssm"}:
            raise ValueError(f"a state has the tensors conv and ssm, not {', '.join(sorted(tensors))}")
        for name, tensor in tensors.items():
            own = getattr(state, name)[:, 0]
            if tensor.shape != own.shape or tensor.dtype != own.dtype:
                raise ValueError(
                    f"{name} must be {own.dtype} {list(own.shape)}, not {tensor.dtype} {list(tensor.shape)}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} holds values that are not finite")
        for name, tensor in tensors.items():
            getattr(state, name)[:, 0].copy_(tensor)

    def _slot(self, slot: int) -> StateBatch:
        if slot not in self._slots:
            self._slots[slot] = self._empty((slot,))
        return self._slots[slot]

    def _empty(self, slots: tuple[int, ...]) -> StateBatch:
        spec, count = self.spec, len(slots)
        conv = torch.zeros((spec.num_layers, count, *spec.conv_shape), dtype=spec.conv_dtype, device=self.device)
        ssm = torch.zeros((spec.num_layers, count, *spec.ssm_shape), dtype=torch.float32, device=self.device)
        return StateBatch(slots, conv, ssm)
