"""Tokenizers out of GGUF files: the same ids as transformers makes of them, and nothing wrong in silence."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.errors import ModelFileError
from engine.protocol import ChatMessage
from engine.tokenizer import ChatTokenizer
from engine.weights.catalog import ModelSource
from tests.support import tiny_tokenizer as tiny
from tests.support.reference_model import load_reference_tokenizer

SAMPLE = "Hello  world 12345 don't\n\n日本 x=1"
TEXTS = [SAMPLE, "getName(x);\n\nif (a12 == 3456)\r\n  toString() it's I'LL", "  a\t b\n \n c", "ÀÉ世界 12 ok", ""]
CODE = (
    "def getName(userName):\n    return toString(userName);\n\n\nfor (int i = 0; i < 1234; i++) {\n};\n it's don't "
    "we'll THE END parseInt('12345') 678 90 2024 2023 1999 camelCase HTTPServer.\n\nYes!\n\n日本語 世界 été naïve\r\n"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]


def trained(split: str | None) -> dict[str, Any]:
    """A byte-level vocabulary trained with this splitting rule, as the arrays of a GGUF file."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=CONTROL, min_frequency=1, show_progress=False
    )
    backend.train_from_iterator([CODE] * 3, trainer)
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return {"tokens": tokens, "merges": merges, "types": [3 if token in CONTROL else 1 for token in tokens]}


def write(
    path: Path, vocab: dict[str, Any], pre: str | None, template: str | None = tiny.CHATML, **ids: int
) -> ModelSource:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab["tokens"])
    writer.add_token_types(vocab["types"])
    writer.add_token_merges(vocab["merges"])
    for name, value in {"eos": 2, **ids}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_context_length(64)
    writer.add_tensor("token_embd.weight", np.zeros((len(vocab["tokens"]), 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(path, "gguf", path.stem)


FAMILIES = {"gpt-2": None} | {
    name: GGUF_PRE_TOKENIZER_SPLITS[name] for name in ("llama-bpe", "qwen2", "gpt-4o", "tekken")
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> tuple[str, dict[str, Any]]:
    return request.param, trained(FAMILIES[request.param])


@pytest.mark.parametrize("pre", [None, "nonesuch"])
def test_missing_or_unknown_splitting_is_told_and_gives_the_original_ids(tmp_path, family, pre):
    """Old files name no splitting rule; text was then split wrongly, and nobody saw it."""
    name, vocab = family
    original = ChatTokenizer.from_source(write(tmp_path / "whole.gguf", vocab, name))
    assert original.warnings == ()
    tokenizer = ChatTokenizer.from_source(write(tmp_path / "old.gguf", vocab, pre))
    assert len(tokenizer.warnings) == 1
    assert "tokenizer.ggml.pre" in tokenizer.warnings[0] and repr(name) in tokenizer.warnings[0]
    for text in (*TEXTS, CODE):
        assert tokenizer.encode(text) == original.encode(text)


def test_vocabulary_that_fits_no_known_rule_is_refused(tmp_path):
    vocab = trained(r"\p{N}{1,5}|[^\p{N}]{1,9}")
    write(tmp_path / "odd.gguf", vocab, "llama-bpe")
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.pre"):
        ChatTokenizer.from_source(write(tmp_path / "odd.gguf", vocab, None))


def test_ids_equal_transformers_own(tmp_path, family):
    name, vocab = family
    tokenizer = ChatTokenizer.from_source(write(tmp_path / "m.gguf", vocab, name))
    reference = load_reference_tokenizer(tmp_path / "m.gguf")
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("ids", [{"eos": 0, "eot": 3}, {"eos": 3, "eot": 0}, {"eos": 0, "eom": 3}, {"eos": 0}])
def test_every_end_id_of_the_file_counts(tmp_path, ids):
    tokenizer = ChatTokenizer.from_source(write(tmp_path / "m.gguf", trained(None), "gpt-2", **ids))
    assert tokenizer.eos_ids == {*ids.values(), 2}
    assert tokenizer.decode([*ids.values()]) == ""


def test_missing_template_is_told_and_the_markers_are_single_ids(tmp_path):
    tokenizer = ChatTokenizer.from_source(write(tmp_path / "m.gguf", trained(None), "gpt-2", template=None, eos=0))
    assert tokenizer.template_name == "chatml"
    assert any("tokenizer.chat_template" in warning and "chatml" in warning for warning in tokenizer.warnings)
    prompt = tokenizer.render([ChatMessage("user", "Hi")], datetime(2031, 1, 1))
    assert list(prompt.token_ids).count(1) == 2 and list(prompt.token_ids).count(2) == 1
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.with_template("zephyr").template_name == "zephyr"


@pytest.mark.parametrize("length", [0, 4, 24, 300, 3000])
def test_damaged_files_give_one_sentence(tmp_path, length):
    write(tmp_path / "m.gguf", trained(None), "gpt-2")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:length])
    with pytest.raises(ModelFileError, match=r"m\.gguf"):
        ChatTokenizer.from_source(ModelSource(tmp_path / "m.gguf", "gguf", "m"))


@pytest.mark.model
def test_default_model_equals_transformers(default_model):
    if default_model.kind != "gguf":
        pytest.skip("the default model came from the hub")
    tokenizer = ChatTokenizer.from_source(default_model)
    reference = load_reference_tokenizer(default_model.path)
    assert tokenizer.warnings == () and tokenizer.template_name == "model"
    for text in (*TEXTS, CODE, "A 世界 e\u0301 👩‍👩‍👧‍👦 🇫🇷 end"):
        ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    chat = [("user", "Hi"), ("assistant", "Hello!\n\n1. One"), ("user", "And 12  34?")]
    prompt = tokenizer.render([ChatMessage(role, text) for role, text in chat], datetime(2031, 1, 1))
    plain = [{"role": role, "content": text} for role, text in chat]
    expected = reference.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert list(prompt.token_ids) == expected
    assert tokenizer.eos_ids == {reference.eos_token_id}
