"""Mamba-2 and hybrid decoders against transformers on the same weights, however the tokens reach them."""

from __future__ import annotations

import json

import gguf
import pytest
import torch

from engine.errors import ModelFileError
from engine.kv_cache.checkpoints import CLEARED
from engine.kv_cache.ssm_state import SSMStatePool
from engine.models.registry import DecoderModel, load_model
from kernels.dispatch import operations
from tests.support.batches import make_cache, make_metadata
from tests.support.tiny_models import RECURRENT_KINDS, VOCAB, save_safetensors, tiny_model

CPU = torch.device("cpu")
LENGTH = 75


@pytest.fixture(scope="module", params=sorted(RECURRENT_KINDS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def reference(kind):
    return tiny_model(kind)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(reference, ids):
    with torch.no_grad():
        return reference(ids[None]).logits[0]


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    return save_safetensors(reference, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder, CPU, "float32")


class Run:
    """A model with a cache and states that hold NaN, so that whatever is read before it is written shows."""

    def __init__(self, model: DecoderModel, slots: int = 8) -> None:
        self.model, self.cache = model, make_cache(model, blocks=80, blocks_per_extent=7)
        assert model.state_spec is not None
        self.states = SSMStatePool(model.state_spec, CPU)
        for slot in range(slots):
            one = self.states.take((slot,))
            one.conv.fill_(torch.nan)
            one.ssm.fill_(torch.nan)
        self.states.copy([(CLEARED, slot) for slot in range(1, slots)])

    def __call__(self, token_ids: torch.Tensor, *items: tuple[int, int, int]) -> torch.Tensor:
        """Logits of a step of sequences given as (slot, tokens before, tokens now); slot n has blocks 10 n and on."""
        batch = [(start, count, list(range(10 * slot - 9, 10 * slot + 11))) for slot, start, count in items]
        meta = make_metadata(batch, state_slots=tuple(slot for slot, _, _ in items))
        return self.model.forward(token_ids, self.cache, meta, self.states)


@pytest.mark.parametrize("chunks", [[LENGTH], [33, 1, 30, 11], [1] * 20], ids=["one-go", "chunks", "single"])
def test_logits_equal_transformers(loaded, ids, expected, chunks):
    run, start, rows = Run(loaded), 0, []
    for count in chunks:
        rows.append(run(ids[start : start + count], (1, start, count)))
        start += count
    assert (torch.cat(rows) - expected[:start]).abs().max() < 1e-3


def test_mixed_batch_equals_sequences_alone(loaded, ids, expected):
    """Two decodes, a chunk in mid-prompt and a fresh prompt in one step, then a step of decodes in another order."""
    run = Run(loaded)
    for slot, count in ((1, 30), (3, 7), (5, 20)):
        run(ids[:count], (slot, 0, count))
    for items in (
        [(1, 30, 1), (3, 7, 1), (5, 20, 13), (7, 0, 9)],
        [(7, 9, 1), (1, 31, 1), (5, 33, 1)],
    ):
        batch = torch.cat([ids[start : start + count] for _, start, count in items])
        wanted = torch.cat([expected[start : start + count] for _, start, count in items])
        assert (run(batch, *items) - wanted).abs().max() < 1e-3


def test_greedy_ids_equal_transformers(reference, loaded, ids):
    with torch.no_grad():
        out = reference.generate(ids[None, :20], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    run, start, found = Run(loaded), 0, ids[:20].tolist()
    while len(found) < 44:
        logits = run(torch.tensor(found[start:]), (1, start, len(found) - start))
        start = len(found)
        found.append(int(logits[-1].argmax()))
    assert found == out[0].tolist()


def test_a_copied_state_goes_on_as_the_one_it_was_copied_from(loaded, ids, expected):
    """Also by way of the host, which is how it is stored."""
    run = Run(loaded)
    run(ids[:10], (1, 0, 10))
    run.states.copy([(1, 2)])
    run.states.import_state(3, run.states.export_state(1))
    run(ids[30:40], (1, 10, 10))  # goes another way with the original, and leaves the copies alone
    if loaded.config.num_attention_layers:
        run.cache.copy_blocks([(1 + i, 11 + i) for i in range(3)] + [(1 + i, 21 + i) for i in range(3)])
    for slot in (2, 3):
        assert (run(ids[10:20], (slot, 10, 10)) - expected[10:20]).abs().max() < 1e-3


@pytest.mark.parametrize(("dtype", "error"), [("auto", 0.12), ("bfloat16", 0.04)])
def test_other_weight_formats_run_close_to_float32(folder, dtype, error, ids, expected):
    """Root mean squares; `auto` keeps matrices, and rounds what they are given, in 8 bits."""
    difference = Run(load_model(folder, CPU, dtype))(ids, (1, 0, LENGTH)) - expected
    assert difference.square().mean() < error**2 * expected.square().mean()


@pytest.mark.parametrize("kind", ["mamba2", "bamba"])
def test_time_steps_are_held_between_their_limits(kind, tmp_path, ids):
    """In one go, because transformers leaves the limits out where it decodes."""
    model = tiny_model(kind, time_step_limit=(0.6, 0.9))
    with torch.no_grad():
        expected, free = model(ids[None]).logits[0], tiny_model(kind)(ids[None]).logits[0]
    assert (expected - free).abs().max() > 0.1
    logits = Run(load_model(save_safetensors(model, tmp_path), CPU, "float32"))(ids, (1, 0, LENGTH))
    assert (logits - expected).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["mamba2"], scope="module")
def test_the_recurrence_runs_its_kernels_where_triton_does(folder, ids, expected):
    """Interpreted: a chunk, and a decoded token beside another sequence's. Matrices would take the interpreter long."""
    model = load_model(folder, CPU, "float32")
    model._operations = operations(CPU, triton=True)
    run = Run(model)
    assert (run(ids[[0, 1, 2, 3, 0, 1]], (1, 0, 4), (2, 0, 2)) - expected[[0, 1, 2, 3, 0, 1]]).abs().max() < 1e-3
    assert (run(ids[[4, 2]], (1, 4, 1), (2, 2, 1)) - expected[[4, 2]]).abs().max() < 1e-3


def test_a_gguf_file_is_refused_in_one_sentence(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelFileError, match=r"^The model's architecture 'mamba2' is not supported in GGUF files; llam"
    ):
        load_model(tmp_path / "m.gguf", CPU)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("bamba", {"attn_layer_indices": [9]}, "no usable attn_layer_indices"),
        ("mamba2", {"time_step_limit": [0.0, "soon"]}, "no usable time_step_limit"),
        ("mamba2", {"n_groups": 3}, "impossible layer or head counts"),
        ("mamba2", {"state_size": 8}, r"in_proj.weight has shape \[324, 64\], not \[292, 64\]"),
        ("bamba", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "such a part of each head"),
        ("bamba", {"hidden_act": "relu"}, "activation 'relu'"),
    ],
)
def test_an_impossible_configuration_is_refused(kind, changes, sentence, tmp_path):
    save_safetensors(tiny_model(kind), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelFileError, match=sentence):
        load_model(tmp_path, CPU, "float32")
