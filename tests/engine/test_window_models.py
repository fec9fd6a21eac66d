"""Decoders some layers of which see a window, against transformers; all that is out of sight is gone or NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import ModelFileError
from engine.models.registry import DecoderModel, load_model
from engine.models.windows import windows_from_json
from tests.support.batches import make_cache, make_metadata, poison_unseen
from tests.support.tiny_models import VOCAB, WINDOW, WINDOW_KINDS, save_gguf, save_safetensors, tiny_model

CPU = torch.device("cpu")
LENGTH = 200
IDS = torch.randint(0, VOCAB, (LENGTH + 20,), generator=torch.Generator().manual_seed(1))
TABLE = (torch.randperm(60, generator=torch.Generator().manual_seed(0)) + 1).tolist()
FILES = [(kind, "safetensors") for kind in sorted(WINDOW_KINDS)] + [("gemma3", "gguf")]


@pytest.fixture(scope="module", params=FILES, ids=["-".join(file) for file in FILES])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """transformers' logits of all ids, and our model of the same file."""
    (kind, container), folder = request.param, tmp_path_factory.mktemp("model")
    # GGUF files do not say how queries are scaled: by the head size, the largest model apart.
    model = tiny_model(kind, **({"query_pre_attn_scalar": 32} if container == "gguf" else {}))
    path = save_gguf(model, folder / "m.gguf") if container == "gguf" else save_safetensors(model, folder)
    with torch.no_grad():
        return model(IDS[None]).logits[0], load_model(path, CPU, "float32")


def run(model: DecoderModel, chunks: list[int]) -> torch.Tensor:
    cache, start, rows = make_cache(model), 0, []
    for count in chunks:
        meta = make_metadata([(start, count, TABLE)], cache=cache)
        rows.append(model.forward(IDS[start : start + count], cache, meta))
        start += count
        poison_unseen(cache, TABLE, start)
    return torch.cat(rows)


@pytest.mark.parametrize(
    "chunks",
    [[LENGTH], [48] * 4 + [8], [LENGTH] + [1] * 20, [7] * 3 + [1] * 40],
    ids=["one go", "chunks of 48", "a turn after 200", "token by token past the window"],
)
def test_logits_equal_transformers(both, chunks):
    expected, model = both
    logits = run(model, chunks)
    assert (logits - expected[: len(logits)]).abs().max() <= 1e-3
    assert torch.equal(logits.argmax(-1), expected[: len(logits)].argmax(-1))


def test_sequences_of_a_batch_are_each_alone(both):
    expected, model = both
    cache, tables = make_cache(model, blocks=64, blocks_per_extent=5), [TABLE[i * 15 : (i + 1) * 15] for i in range(4)]
    before, counts = (50, 7, 20, 0), (1, 1, 13, 9)
    for table, count in zip(tables, before, strict=True):
        if count:
            model.forward(IDS[:count], cache, make_metadata([(0, count, table)], cache=cache))
    items = list(zip(before, counts, tables, strict=True))
    logits = model.forward(torch.cat([IDS[s : s + n] for s, n, _ in items]), cache, make_metadata(items, cache=cache))
    assert (logits - torch.cat([expected[s : s + n] for s, n, _ in items])).abs().max() <= 1e-3


WANTED = {
    "mistral-window": [WINDOW] * 4,
    "qwen2-window": [None, None, WINDOW, WINDOW],
    "qwen3-window": [WINDOW, None] * 2,
    "gemma3": [WINDOW, None] * 2,
    "gemma3n": [WINDOW, None, WINDOW] * 2,
}


@pytest.mark.parametrize("kind", sorted(WANTED))
def test_windows_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    assert list(load_model(save_safetensors(tiny_model(kind), tmp_path), CPU, "float32").config.windows) == WANTED[kind]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"sliding_window": None}, (None, ())),
        ({"sliding_window": 8}, (8, ())),
        ({"sliding_window": 8, "max_window_layers": 1}, (None, ())),
        ({"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}, (8, (0,))),
        ({"sliding_window": 8, "max_window_layers": 3, "use_sliding_window": True}, (None, (0, 1, 2))),
        ({"sliding_window": 8, "use_sliding_window": False}, (None, ())),
    ],
)
def test_windows_of_older_files(values, expected):
    assert windows_from_json(values, 3) == expected


@pytest.mark.parametrize(
    "values", [{"sliding_window": "8"}, {"sliding_window": 0}, {"sliding_window": 8, "layer_types": ["chunked"] * 3}]
)
def test_unusable_windows_are_refused(values):
    with pytest.raises(ModelFileError):
        windows_from_json(values, 3)
