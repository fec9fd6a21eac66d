"""A whole tiny model through the interpreted Triton kernels says what it says through torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from gguf import GGMLQuantizationType

from engine.loader import pick_kv_format
from engine.models.registry import DecoderModel, load_model
from kernels.gpu import tuning
from kernels.registry import OPS
from tests.support.batches import make_cache, make_metadata
from tests.support.tiny_models import WINDOW_KINDS, save_gguf, save_safetensors, tiny_model

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="on a card the gpu tests do this")
CPU = torch.device("cpu")
PROMPTS = (tuple(range(40, 53)), tuple(range(90, 97)))
TABLES = ([5, 2, 9, 11, 30, 17], [8, 3, 41, 12, 6, 44])
STEPS = 3
INTERPRETED = 80  # the capability whose launch parameters the interpreter takes


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time by program, not by element."""
    for name, capability in list(tuning._TABLE):
        if capability == INTERPRETED and name.startswith("dequant_ge"):
            values = {**tuning._TABLE[name, capability], "BLOCK_N": 512}
            monkeypatch.setitem(tuning._TABLE, (name, capability), values)


def decode(
    model: DecoderModel, shared: bool = False, balanced: bool = False, **layers: int
) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    """Greedy ids of both prompts decoded together after one prefill, and all logits in turn."""
    cache = make_cache(model, blocks=64, blocks_per_extent=16, **layers)
    if shared:
        object.__setattr__(cache.spec, "places", cache.spec.places[:1] * 2)
    if balanced:
        shape = (model.config.num_layers, model.config.num_kv_heads, model.config.head_dim)
        cache.balance = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([token for prompt in PROMPTS for token in prompt])
    items = [(0, len(prompt), table) for prompt, table in zip(PROMPTS, TABLES, strict=True)]
    logits = model.forward(tokens, cache, make_metadata(items, cache=cache))
    seen, ids = [logits], [[], []]
    last = logits[[len(PROMPTS[0]) - 1, -1]]
    for step in range(STEPS):
        for row, token in enumerate(last.argmax(-1).tolist()):
            ids[row].append(token)
        if step == STEPS - 1:
            break
        items = [(len(p) + step, 1, table) for p, table in zip(PROMPTS, TABLES, strict=True)]
        last = model.forward(torch.tensor([row[-1] for row in ids]), cache, make_metadata(items, cache=cache))
        seen.append(last)
    return [tuple(row) for row in ids], torch.cat(seen)


def _noted(used: set[str], name: str, launcher: Callable[..., None], *arguments: Any) -> None:
    used.add(name)
    launcher(*arguments)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_greedy_ids_and_logits_are_those_of_torch(kind: str, tmp_path: Path) -> None:
    path = save_safetensors(tiny_model(kind), tmp_path)
    model = load_model(path, CPU, "float32", triton=True)
    # By this name the cache becomes float32 too.
    assert model.weight_format == "float32" and pick_kv_format("auto", model.weight_format, model.dtype) == "fp32"
    ids, logits = decode(model)
    expected_ids, expected = decode(load_model(path, CPU, "float32", triton=False))
    assert ids == expected_ids
    assert (logits - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("qwen3", {"window": 6, "sinks": 2}),
        ("qwen3-window", {"sinks": 3}),
        ("qwen2", {"shared": True, "window": 8}),
        ("gemma3", {}),
    ],
    ids=["sinks", "sinks of some layers", "layers at one place", "gemma3"],
)
def test_windows_are_those_of_torch(kind: str, layers: dict[str, int], tmp_path: Path) -> None:
    """What is out of sight is not in the tables, or NaN in the null block."""
    changes = {"sliding_window": 6, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    path = save_safetensors(tiny_model(kind, **(changes if kind in WINDOW_KINDS else {})), tmp_path)
    model = load_model(path, CPU, "float32", triton=True)
    # Norms behind the parts, GELU and two ropes took the way of plain torch, without a CUDA graph.
    assert model._fused is not None
    ids, logits = decode(model, **layers)
    expected_ids, expected = decode(load_model(path, CPU, "float32", triton=False), **layers)
    assert ids == expected_ids
    assert (logits - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("qwen3", {"window": 6, "sinks": 2, "balanced": True}), ("qwen2", {"shared": True, "balanced": True})],
    ids=["sinks", "layers at one place"],
)
def test_layers_that_are_run_one_by_one_say_what_they_say_together(
    kind: str, layers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of other architectures are; norms, gates and attention were plain torch."""
    model = load_model(save_safetensors(tiny_model(kind), tmp_path), CPU, "float32", triton=True)
    expected_ids, expected = decode(model, **layers)
    model._fused = None
    used: set[str] = set()
    for name, op in OPS.items():
        monkeypatch.setattr(op, "chosen", partial(_noted, used, name, op.launcher))
    ids, logits = decode(model, **layers)
    assert used >= {"rms_norm", "swiglu", "store_kv", "paged_decode", "paged_prefill", "dequant_gemv", "dequant_gemm"}
    assert ids == expected_ids
    assert (logits - expected).abs().max() < 1e-3


def test_the_files_blocks_are_kept(tmp_path: Path) -> None:
    """Quantised matrices stay in the bits they come in, and the numbers are those of the widened ones."""
    path = save_gguf(tiny_model("llama"), tmp_path / "m.gguf", GGMLQuantizationType.Q4_0)
    kept = load_model(path, CPU, "auto", triton=True)
    assert "q4_0" in kept.weight_format
    ids, logits = decode(kept)
    expected_ids, expected = decode(load_model(path, CPU, "float32", triton=False))
    assert ids == expected_ids
    assert (logits - expected).abs().max() < 1e-3
