"""A model whose last layers have no K and V and read those of earlier ones: what that saves, and that all goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention_layout import attention_layout
from engine.config import EngineConfig
from engine.debugging.protocol import FaultRequest
from engine.errors import ConfigError, ModelFileError
from engine.loader import assemble
from engine.memory.model_plan import PlannedWeights, plan_model, planned_weights
from engine.models.gemma3n import config_from_gemma3n, kv_owners
from engine.models.layers import pick_format
from engine.models.registry import load_model, read_config
from engine.weights.safetensors_reader import SafetensorsSource
from kernels.layer_groups import owners
from tests.engine.test_snapshots import PROMPT, A, B, engine_over, logprobs, turn
from tests.support.batches import make_cache, make_metadata
from tests.support.tiny_models import save_safetensors, tiny_model
from tests.support.tiny_tokenizer import chat_tokenizer

CPU = torch.device("cpu")
OWNERS = (0, 1, 2, 2, 1, 2)
"""Of layers local, global, local, local, global, local, the last three of which share."""


def test_the_last_layers_read_what_the_last_of_their_kind_stores() -> None:
    assert kv_owners((16, None, 16, 16, None, 16), 3) == OWNERS
    assert kv_owners((16, None, 16), 0) == (0, 1, 2)
    with pytest.raises(ModelFileError, match="last 2 layers share keys and values that no layer before them has"):
        kv_owners((16, 16, None), 2)


def test_shared_layers_take_no_memory(tmp_path: Path) -> None:
    """Half of the layers have K and V: 2 KV heads of 32 channels in float32."""
    path = save_safetensors(tiny_model("gemma3n"), tmp_path)
    config = EngineConfig(tmp_path, str(path), device="cpu", dtype="float32", kv_budget=2**22)
    model = load_model(path, CPU, "float32")
    layout = attention_layout(config, model.config)
    assert owners(layout.places) == OWNERS
    parts, planned = assemble(config, model, chat_tokenizer(), "m"), plan_model(config).plan
    assert parts.cache.spec.bytes_per_token == planned.kv_bytes_per_token == 3 * 2 * 2 * 32 * 4
    assert planned.max_seq_len == parts.max_seq_len
    with pytest.raises(ConfigError, match="own layers share keys and values"):
        attention_layout(EngineConfig(tmp_path, str(path), share_layers=2), model.config)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_weights_are_planned_as_they_are_loaded(tmp_path: Path, dtype: str) -> None:
    source = SafetensorsSource(save_safetensors(tiny_model("gemma3n"), tmp_path))
    loaded = load_model(source.path, CPU, dtype)
    planned = planned_weights(source, read_config(source)[1], pick_format(CPU, dtype))
    assert planned == PlannedWeights(loaded.weight_bytes, loaded.weight_format)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "auto"])
def test_rounded_weights_stay_close(tmp_path: Path, dtype: str) -> None:
    """`auto` is int8 with a scale per 32, of weights and of what they are multiplied with."""
    reference, ids = tiny_model("gemma3n"), torch.arange(60) * 5 % 320
    model = load_model(save_safetensors(reference, tmp_path), CPU, dtype)
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    cache = make_cache(model, kv_format="fp16")
    logits = model.forward(ids, cache, make_metadata([(0, 60, list(range(1, 16)))], cache=cache))
    eps = {"float16": torch.finfo(torch.float16).eps, "bfloat16": torch.finfo(torch.bfloat16).eps, "auto": 0.02}[dtype]
    assert (logits - expected).abs().max() < 16 * eps * expected.abs().max()


def test_the_text_part_of_a_model_that_also_sees_is_the_same_model(tmp_path: Path) -> None:
    """Such files hold K and V matrices of the shared layers too, which nothing reads."""
    plain = save_safetensors(tiny_model("gemma3n"), tmp_path / "text")
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = load_file(plain / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    named["model.vision_tower.conv.weight"] = torch.randn(4, 4)
    named["model.language_model.layers.5.self_attn.k_proj.weight"] = torch.randn(64, 64)
    save_file(named, whole / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": text}))
    ids, results = torch.arange(40), []
    for path in (plain, whole):
        model = load_model(path, CPU, "float32")
        cache = make_cache(model)
        meta = make_metadata([(0, 40, list(range(1, 11)))], cache=cache)
        results.append(model.forward(ids, cache, meta))
        source = SafetensorsSource(path)
        assert planned_weights(source, read_config(source)[1], pick_format(CPU, "float32")).nbytes == model.weight_bytes
    assert torch.equal(*results)


def test_a_turn_goes_on_where_the_last_one_ended_and_after_a_restart(tmp_path: Path) -> None:
    with engine_over(tmp_path / "one", kind="gemma3n") as engine:
        first = turn(engine, A, PROMPT)
        going_on = (*PROMPT, *first.token_ids, 7)
        assert engine.snapshot(A)["tokens"] == first.stats.cache_pos
    with engine_over(tmp_path / "one", kind="gemma3n") as engine:
        assert engine.restore(A) == first.stats.cache_pos and engine.audit(A)["verdict"] == "clean"
        restored = logprobs(engine, A, going_on)
        assert engine.metrics()["tokens"]["computed"] == 2
    with engine_over(tmp_path / "two", kind="gemma3n") as engine:
        turn(engine, B, PROMPT)
        assert logprobs(engine, B, going_on) == restored, "bit for bit"
    with engine_over(tmp_path / "three", kind="gemma3n") as engine:
        fresh = logprobs(engine, None, going_on)
    found, expected = ([one[0].logprob for one in rows] for rows in (restored, fresh))
    assert len(found) == 24 and found == pytest.approx(expected, abs=1e-4)


def test_damage_to_a_store_is_told_of_all_layers_that_read_it(tmp_path: Path) -> None:
    with engine_over(tmp_path, kind="gemma3n", fault_injection=True) as engine:
        turn(engine, A, PROMPT)
        engine.inject(FaultRequest(A, "overwrite", 1, 20, 4))
        found = engine.audit(A)
        assert found["verdict"] == "fault" and found["faults"][0]["first_position"] == 20
        assert found["faults"][0]["layers"] == [1, 4]


@pytest.mark.parametrize(
    "change",
    [{"intermediate_size": [96, 96, 96, 96, 96, 64]}, {"activation_sparsity_pattern": [1.0] * 6},
     {"num_kv_shared_layers": 6}],
    ids=str,
)  # fmt: skip
def test_what_can_not_be_run_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = save_safetensors(tiny_model("gemma3n"), tmp_path)
    values = json.loads((path / "config.json").read_text())
    with pytest.raises(ModelFileError):
        config_from_gemma3n({**values, **change})
