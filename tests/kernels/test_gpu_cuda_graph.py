"""Padded decode steps from tensors that stay are the steps without padding; on a card also when they are replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import triton

from engine.cuda_graph import DecodeGraphs
from engine.kv_cache.checkpoints import CLEARED
from engine.kv_cache.ssm_state import SSMStatePool
from engine.models.registry import load_model
from kernels.gpu import tuning
from tests.support.batches import make_cache, make_metadata
from tests.support.tiny_models import save_safetensors, tiny_model

PROMPTS = ((40, 41, 42, 43, 44), (90, 91, 92), (7,))
TABLES = ([5, 2, 9], [8, 3, 41], [12, 20, 33])
ROWS = ((0, 1, 2), (2,), (1, 0, 2))
"""Which sequences take part in each step: buckets of 4, 1 and again 4, in another order."""


class Steps:
    """Prefills all prompts, and then decodes, with states that hold NaN wherever none were asked for."""

    def __init__(self, folder: Path, device: torch.device, graphs: bool, sinks: int = 0) -> None:
        self.model, self.device = load_model(folder, device, "float32", triton=True), device
        self.cache = make_cache(self.model, blocks=64, blocks_per_extent=16, sinks=sinks)
        for extent in self.cache.extents[:1]:
            extent[0] = 0  # of the null block: padding rows write there
        self.states = None if self.model.state_spec is None else SSMStatePool(self.model.state_spec, device)
        if self.states is not None:
            self.states.copy([(CLEARED, row + 1) for row in range(len(PROMPTS))])
        self.graphs = DecodeGraphs(self.model, self.cache, max_seq_len=12) if graphs else None
        self.lens = [0] * len(PROMPTS)

    def logits(self) -> torch.Tensor:
        """Of all decode steps."""
        self.step(tuple(range(len(PROMPTS))), [token for prompt in PROMPTS for token in prompt], PROMPTS)
        return torch.cat(
            [
                self.step(rows, [50 + 10 * step + row for row in rows], [(0,)] * len(PROMPTS)).clone()
                for step, rows in enumerate(ROWS)
            ]
        ).cpu()

    def step(self, rows: tuple[int, ...], tokens: list[int], new: Sequence[Sequence[int]]) -> torch.Tensor:
        items = [(self.lens[row], len(new[row]), TABLES[row]) for row in rows]
        slots = tuple(row + 1 for row in rows) if self.states is not None else ()
        meta = make_metadata(items, cache=self.cache, state_slots=slots).to(self.device)
        ids = torch.tensor(tokens, device=self.device)
        for row in rows:
            self.lens[row] += len(new[row])
        if self.graphs is not None and self.graphs.fits(meta):
            return self.graphs.run(ids, meta, states=self.states)[1]
        return self.model.forward(ids, self.cache, meta, self.states)


@pytest.mark.parametrize(
    ("kind", "sinks"),
    [("llama", 0), ("qwen3-window", 1), ("gemma3", 0), ("mamba2", 0), ("bamba", 0), ("gemma3n", 0)],
)
def test_padding_changes_nothing(kind: str, sinks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are not interpreted here")
    # The interpreter takes its time by program, not by element.
    tiles = {"dequant_ge": {"BLOCK_N": 512, "BLOCK_K": 64}, "ssm_": {"BLOCK_P": 64}, "causal": {"BLOCK_C": 1024}}
    for name, capability in list(tuning._TABLE):
        for prefix, values in tiles.items():
            if capability == 80 and name.startswith(prefix):
                monkeypatch.setitem(tuning._TABLE, (name, capability), tuning._TABLE[name, capability] | values)
    changes = {"sliding_window": 3, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    folder = save_safetensors(tiny_model(kind, **(changes if sinks else {})), tmp_path)
    plain, padded = (Steps(folder, torch.device("cpu"), graphs, sinks).logits() for graphs in (False, True))
    assert torch.isfinite(padded).all() and (padded - plain).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma3n", "mamba2", "bamba"])
def test_a_replayed_step_is_the_eager_step(kind: str, tmp_path: Path) -> None:
    folder = save_safetensors(tiny_model(kind), tmp_path)
    eager, replayed = (Steps(folder, torch.device("cuda"), graphs) for graphs in (False, True))
    assert replayed.model.stays_on_device
    expected, found = eager.logits(), replayed.logits()
    assert replayed.graphs is not None and all(one.graph is not None for one in replayed.graphs._captured.values())
    assert torch.isfinite(found).all() and (found - expected).abs().max() < 1e-4
