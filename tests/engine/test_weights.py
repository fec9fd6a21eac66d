"""Model files: tied embeddings in every variant, damaged and foreign files, configurations of both containers."""

from __future__ import annotations

import json
import shutil

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

from engine.errors import ConfigError, ModelFileError
from engine.models.config import config_from_gguf, config_from_json
from engine.models.layers import BlockEmbedding
from engine.models.registry import load_model
from engine.weights.gguf_container import read_container
from engine.weights.gguf_reader import GGUFSource
from engine.weights.safetensors_reader import SafetensorsSource
from tests.support.batches import make_cache, make_metadata
from tests.support.tiny_models import KINDS, save_gguf, save_safetensors, tiny_model

CPU = torch.device("cpu")
IDS = torch.arange(12)


def logits_of(path, dtype="float32"):
    model = load_model(path, CPU, dtype)
    return model, model.forward(IDS, make_cache(model), make_metadata([(0, len(IDS), [3, 1, 2])]))


def rewrite_gguf(source, target, *, drop=(), replace=None, keep=lambda key: True):
    """Copy a GGUF file with some tensors or keys left out or exchanged, as `gguf`'s reader and writer do it."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and keep(key):
            writer.add_key_value(key, field.contents(), field.types[0])
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors if tensor.name not in drop}
    for name, values in {**tensors, **(replace or {})}.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope="module")
def tied_gguf(tmp_path_factory):
    return save_gguf(tiny_model("llama"), tmp_path_factory.mktemp("tied") / "tied.gguf")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_gguf_heads(tied_gguf, tmp_path, dtype):
    """C32: a missing head is the embedding, an equal one is the same matrix, a different one is used."""
    embedding = GGUFSource(tied_gguf).load("embed.weight").numpy()
    copied = rewrite_gguf(tied_gguf, tmp_path / "copied.gguf", replace={"output.weight": embedding.copy()})
    other = rewrite_gguf(tied_gguf, tmp_path / "other.gguf", replace={"output.weight": embedding[::-1].copy()})
    model, logits = logits_of(tied_gguf, dtype)
    copied_model, copied_logits = logits_of(copied, dtype)
    other_model, other_logits = logits_of(other, dtype)
    assert (logits - copied_logits).abs().max() <= 1e-5
    torch.testing.assert_close(other_logits, logits.flip(-1), atol=1e-4, rtol=1e-4)
    assert model.weight_bytes == copied_model.weight_bytes
    assert dtype == "auto" or model.weight_bytes < other_model.weight_bytes
    assert not model.warnings and not other_model.warnings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_matrix_is_held_once(tied_gguf, dtype):
    weights = load_model(tied_gguf, CPU, dtype).weights
    assert weights.embedding.weight.data_ptr() == weights.head.weight.data_ptr()


def test_tied_matrix_of_packed_weights_is_held_once(tied_gguf):
    """Embedding rows come from the mapped file; only the head's packed copy takes memory."""
    weights = load_model(tied_gguf, CPU, "float16").weights
    assert weights.embedding.nbytes == 0
    assert weights.head.nbytes == 320 * 64 * 2


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_tied_blocks_of_a_file_are_held_once_and_give_the_same_rows(tmp_path, kind):
    file = save_gguf(tiny_model("llama"), tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    weights, ids = load_model(file, CPU, "auto").weights, torch.tensor([5, 0, 319, 5])
    assert isinstance(weights.embedding, BlockEmbedding)
    assert weights.embedding.matrix is weights.head.parts[0]
    assert torch.equal(weights.embedding(ids), GGUFSource(file).rows("embed.weight", ids))


@pytest.mark.parametrize("equal", [True, False])
def test_safetensors_tied_flag_goes_before_a_stray_head(tmp_path, equal):
    model = tiny_model("llama")
    save_safetensors(model, tmp_path)
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if equal else embedding.flip(0).contiguous()
    safetensors.torch.save_file(tensors, file)
    loaded, logits = logits_of(tmp_path)
    assert (logits - expected).abs().max() < 1e-3
    assert loaded.weights.embedding.weight.data_ptr() == loaded.weights.head.weight.data_ptr()
    assert len(loaded.warnings) == (0 if equal else 1)


def test_untied_safetensors_use_their_head_and_need_it(tmp_path):
    model = tiny_model("qwen2")
    save_safetensors(model, tmp_path)
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    assert (logits_of(tmp_path)[1] - expected).abs().max() < 1e-3
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ModelFileError, match=r"lacks 1 tensors.*head\.weight"):
        load_model(tmp_path, CPU, "float32")


def test_shards_named_by_an_index(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    assert (logits_of(tmp_path)[1] - expected).abs().max() < 1e-3
    sorted(tmp_path.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(ModelFileError, match="lacks the file"):
        load_model(tmp_path, CPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_files_load_as_they_are(tmp_path, dtype):
    model = tiny_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
        expected = model(IDS[None]).logits[0]
    save_safetensors(model.to(dtype), tmp_path)
    assert (logits_of(tmp_path)[1] - expected).abs().max() < 1e-3


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.02), ("auto", 0.05)])
def test_weights_beyond_float16_keep_their_size(tmp_path, dtype, bound):
    """`auto` may be int8 with a scale per 32 weights, which rounds more coarsely than float16; neither may clip."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e6)
        expected = model(IDS[None]).logits[0]
    save_safetensors(model, tmp_path)
    assert (logits_of(tmp_path, dtype)[1] - expected).abs().max() < bound * expected.abs().max()


# -- files that are no model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 not a model", b"GGUF" + b"\xff" * 200])
def test_a_file_that_is_no_gguf(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as error:
        load_model(path, CPU)
    assert str(error.value).startswith("The file x.gguf") and str(tmp_path) not in str(error.value)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.999])
def test_a_gguf_that_is_cut_short(tied_gguf, tmp_path, share):
    path = tmp_path / "cut.gguf"
    data = tied_gguf.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFileError, match=r"cut\.gguf is (damaged or )?cut short"):
        load_model(path, CPU)


@pytest.mark.parametrize("position", range(4, 600, 7))
def test_damaged_headers_end_in_one_sentence(tied_gguf, tmp_path, position):
    data = bytearray(tied_gguf.read_bytes())
    data[position : position + 4] = b"\xff\xff\xff\xff"
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    try:
        load_model(path, CPU)
    except (ModelFileError, ConfigError) as error:
        assert len(str(error)) < 300 and "\n" not in str(error)


def test_missing_tensors_are_counted(tied_gguf, tmp_path):
    path = rewrite_gguf(tied_gguf, tmp_path / "m.gguf", drop=("blk.1.ffn_up.weight", "output_norm.weight"))
    with pytest.raises(ModelFileError, match=r"lacks 2 tensors, the first is norm\.weight"):
        load_model(path, CPU)


def test_wrong_shapes_are_named(tied_gguf, tmp_path):
    wrong = {"blk.0.attn_output.weight": np.zeros((64, 32), np.float32)}
    with pytest.raises(ModelFileError, match=r"layers\.0\.o\.weight has shape \[64, 32\], not \[64, 64\]"):
        load_model(rewrite_gguf(tied_gguf, tmp_path / "m.gguf", replace=wrong), CPU)


def test_unsupported_architectures_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="'mamba' is not supported; llama, qwen2, qwen3, gemma3 are"):
        load_model(tmp_path / "m.gguf", CPU)


def test_damaged_folders(tmp_path):
    save_safetensors(tiny_model("llama"), tmp_path / "good")
    for name, damage in {
        "no config": lambda folder: (folder / "config.json").unlink(),
        "bad config": lambda folder: (folder / "config.json").write_text("{"),
        "no weights": lambda folder: (folder / "model.safetensors").unlink(),
        "cut weights": lambda folder: _cut(folder / "model.safetensors", 0.5),
        "cut header": lambda folder: _cut(folder / "model.safetensors", 0.001),
        "empty weights": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    }.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        damage(folder)
        with pytest.raises(ModelFileError) as error:
            load_model(folder, CPU)
        assert "\n" not in str(error.value) and str(tmp_path) not in str(error.value), name


def _cut(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def test_unknown_dtype_is_a_configuration_error(tied_gguf):
    with pytest.raises(ConfigError, match="--dtype int3 is unknown"):
        load_model(tied_gguf, CPU, "int3")


# -- containers agree -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_both_containers_give_the_same_tensors(kind, tmp_path):
    model = tiny_model(kind)
    first = SafetensorsSource(save_safetensors(model, tmp_path))
    second = GGUFSource(save_gguf(model, tmp_path / "m.gguf"))
    names = set(second.shapes()) - {"rope.divisors"}
    assert set(first.shapes()) == names
    for name in names:
        assert torch.equal(first.load(name), second.load(name)), name
    ids = torch.tensor([5, 0, 319])
    assert torch.equal(first.rows("embed.weight", ids), second.rows("embed.weight", ids))
    a, b = config_from_json(first.metadata), config_from_gguf(second.metadata, 320)
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position_embeddings"):
        assert getattr(a, field) == getattr(b, field), field


def test_container_agrees_with_the_gguf_package(tied_gguf):
    _, metadata, tensors = read_container(tied_gguf)
    reader = gguf.GGUFReader(tied_gguf)
    assert metadata == {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert {(t.name, t.data_offset, t.n_bytes) for t in reader.tensors} == {
        (name, info.offset, info.nbytes) for name, info in tensors.items()
    }


@pytest.mark.parametrize("quant", ["Q4_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_rows_equal_the_whole_tensor(quant, tmp_path):
    path = save_gguf(tiny_model("llama"), tmp_path / "m.gguf", getattr(gguf.GGMLQuantizationType, quant))
    source = GGUFSource(path)
    ids = torch.tensor([7, 7, 300])
    assert torch.equal(source.rows("embed.weight", ids), source.load("embed.weight")[ids].float())


OLD_STYLE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "rope_theta": 5e5,
    "rope_scaling": {"type": "linear", "factor": 2.0},
}


def test_configuration_of_older_files():
    config = config_from_json(OLD_STYLE)
    assert (config.rope.base, config.rope.kind, config.rope.factor) == (5e5, "linear", 2.0)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ from layer to layer"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"hidden_size": None}, "no usable hidden_size"),
        ({"num_hidden_layers": "many"}, "no usable num_hidden_layers"),
        ({"hidden_act": "relu"}, "'relu' is not supported"),
    ],
)
def test_configurations_that_are_refused(change, message):
    with pytest.raises(ModelFileError, match=message):
        config_from_json({**OLD_STYLE, **change})
