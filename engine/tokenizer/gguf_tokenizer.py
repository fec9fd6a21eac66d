"""A tokenizer out of a GGUF file's metadata, by transformers' own converter; what that passes over silently is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.errors import ModelFileError
from engine.weights.gguf_container import read_container

PRE_KEY = "tokenizer.ggml.pre"
TEMPLATE_KEY = "tokenizer.chat_template"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Values of `tokenizer.ggml.pre` that transformers' table leaves out because the byte-level default serves them.
_BYTE_LEVEL_TYPES = frozenset(
    ("gpt-2", "gpt2", "smollm", "mpt", "olmo", "jais", "phi-2", "starcoder", "refact", "command-r", "exaone")
)
# Which known split a vocabulary was trained with, told by (letters split where case changes, digits per token).
_SPLIT_BY_TRAITS = {(False, 3): "llama-bpe", (False, 1): "qwen2", (True, 3): "gpt-4o", (True, 1): "tekken"}
_MAX_CROSSING_SHARE = 0.002


def load_gguf_tokenizer(path: Path) -> tuple[PreTrainedTokenizerFast, frozenset[int], list[str]]:
    """`(tokenizer, end ids named by the file, warnings)`. Raises `ModelFileError` if no tokenizer can be made of it.

    Splitting rules that the file does not name, or names by an unknown name, are found from the vocabulary and told
    as a warning; where the vocabulary fits no known rules the file is refused, because wrong splitting lowers a
    model's quality without a sign.
    """
    try:
        _, metadata, _ = read_container(path)
        architecture, parts, config = get_gguf_tokenizer(str(path))
        warnings: list[str] = []
        if parts.get("tokenizer_type") == "gpt2":
            parts["pre_tokenizer_type"] = _splitting(parts, warnings)
        backend, extra = convert_gguf_tokenizer(architecture, parts)
    except ModelFileError:
        raise
    except Exception as error:  # damaged files fail in many ways inside the reader
        raise ModelFileError(f"The tokenizer in {path.name} can't be read ({type(error).__name__}).") from error
    named = {key: value for key, value in config.items() if value is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named, **extra)
    ends = {metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS}
    return tokenizer, frozenset(end for end in ends if isinstance(end, int)), warnings


def _splitting(parts: dict[str, Any], warnings: list[str]) -> str:
    named = parts.get("pre_tokenizer_type")
    if named in GGUF_PRE_TOKENIZER_SPLITS or named in _BYTE_LEVEL_TYPES:
        return str(named)
    found = infer_splitting(parts["tokens"])
    says = "is missing" if named is None else f"is {named!r}, which is unknown"
    if found is None:
        raise ModelFileError(f"The model file's {PRE_KEY} {says}, and its vocabulary fits no known way to split text.")
    warnings.append(f"The model file's {PRE_KEY} {says}; from its vocabulary, text is split as for {found!r}.")
    return found


def infer_splitting(tokens: list[str]) -> str | None:
    """The `tokenizer.ggml.pre` value that a byte-level vocabulary was trained with; None if none fits.

    Merges never cross the pieces that text was split into in training. So tokens of punctuation with a line feed, of
    several digits, or of lower case followed by upper case each exclude some rules; the rest must cut hardly a token.
    """
    if not any(re.fullmatch(r"[!-/:-@\[-`{-~]+Ċ+", token) for token in tokens):
        return "gpt-2"
    digits = max((len(token) for token in tokens if re.fullmatch(r"[0-9]+", token)), default=1)
    by_case = sum(1 for token in tokens if re.fullmatch(r"Ġ?[a-z]+[A-Z][a-z]+", token)) < len(tokens) / 10_000
    found = _SPLIT_BY_TRAITS.get((by_case, digits))
    if found is None:
        return None
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[found]), behavior="isolated")
    words = [token.replace("Ġ", " ").replace("Ċ", "\n") for token in tokens if token.isascii() or token[0] in "ĠĊ"]
    # Beginnings of "we'll" are tokens that some rules would cut; control tokens were never split at all.
    words = [word for word in words if word.isascii() and "'" not in word and not word.startswith(("<", "["))]
    crossing = sum(1 for word in words if len(split.pre_tokenize_str(word)) > 1)
    return found if crossing <= len(words) * _MAX_CROSSING_SHARE else None
