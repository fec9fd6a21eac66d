"""Padded decode steps from tensors that stay are the steps without padding; on a card also when they are replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

from engine.cuda_graph import DecodeGraphs
from engine.models.registry import load_model
from kernels.gpu import tuning
from tests.support.batches import make_cache, make_metadata
from tests.support.tiny_models import save_safetensors, tiny_model

PROMPTS = ((40, 41, 42, 43, 44), (90, 91, 92), (7,))
TABLES = ([5, 2, 9], [8, 3, 41], [12, 20, 33])
ROWS = ((0, 1, 2), (2,), (1, 0, 2))
"""Which sequences take part in each step: buckets of 4, 1 and again 4, in another order."""


def run(folder: Path, device: torch.device, graphs: bool, sinks: int = 0) -> torch.Tensor:
    """The logits of all steps."""
    model = load_model(folder, device, "float32", triton=True)
    cache = make_cache(model, blocks=64, blocks_per_extent=16, sinks=sinks)
    for extent in cache.extents[:1]:
        extent[0] = 0  # of the null block: padding rows write there
    lens = [0, 0, 0]
    prefill = make_metadata([(0, len(p), t) for p, t in zip(PROMPTS, TABLES, strict=True)], cache=cache).to(device)
    model.forward(torch.tensor([token for prompt in PROMPTS for token in prompt], device=device), cache, prefill)
    lens = [len(prompt) for prompt in PROMPTS]
    captured, seen = DecodeGraphs(model, cache, max_seq_len=12), []
    for step, rows in enumerate(ROWS):
        ids = torch.tensor([50 + 10 * step + row for row in rows], device=device)
        meta = make_metadata([(lens[row], 1, TABLES[row]) for row in rows], cache=cache).to(device)
        assert captured.fits(meta)
        logits = captured.run(ids, meta)[1] if graphs else model.forward(ids, cache, meta)
        seen.append(logits.clone())
        for row in rows:
            lens[row] += 1
    return torch.cat(seen).cpu()


@pytest.mark.parametrize(("kind", "sinks"), [("llama", 0), ("qwen3-window", 1), ("gemma3", 0)])
def test_padding_changes_nothing(kind: str, sinks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are not interpreted here")
    for name, capability in list(tuning._TABLE):
        if capability == 80 and name.startswith("dequant_ge"):
            monkeypatch.setitem(
                tuning._TABLE, (name, capability), {**tuning._TABLE[name, capability], "BLOCK_N": 64, "BLOCK_K": 64}
            )
    changes = {"sliding_window": 3, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    folder = save_safetensors(tiny_model(kind, **(changes if sinks else {})), tmp_path)
    plain, padded = (run(folder, torch.device("cpu"), graphs, sinks) for graphs in (False, True))
    assert torch.isfinite(padded).all() and (padded - plain).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_replayed_step_is_the_eager_step(tmp_path: Path) -> None:
    folder = save_safetensors(tiny_model("llama"), tmp_path)
    eager, replayed = (run(folder, torch.device("cuda"), graphs) for graphs in (False, True))
    assert torch.isfinite(replayed).all() and (replayed - eager).abs().max() < 1e-4
