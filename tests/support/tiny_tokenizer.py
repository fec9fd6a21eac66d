"""Small tokenizers of the two kinds that models use, made on the spot: no files, no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine.tokenizer import ChatTokenizer

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>",
)  # fmt: skip
THINK = ("<think>", "</think>")
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. Hello there, what is your name? You are a helpful assistant. "
    "Paris is the capital of France. user assistant system INST SYS one two three four five, 世界 日本語 ok\n"
)


def byte_level(
    *,
    merges: Sequence[tuple[str, str]] = (),
    special: Sequence[str] = SPECIAL,
    template: str | None = None,
    **names: Any,
) -> PreTrainedTokenizerFast:
    """One entry per byte, special tokens, and what the merges make; with no merges, 270 or so entries."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in THINK])
    return _wrapped(backend, template, names)


def merged_byte_level(template: str | None = None, **names: Any) -> PreTrainedTokenizerFast:
    """Byte-level with the merges that a few sentences give: tokens of several characters, some across characters."""
    merges: list[tuple[str, str]] = []
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(_CORPUS)
    known: set[str] = set()
    for piece, _ in pieces:
        for length in range(2, len(piece) + 1):
            if piece[:length] not in known:
                known.add(piece[:length])
                merges.append((piece[: length - 1], piece[length - 1]))
    return byte_level(merges=merges, template=template, **names)


def sentencepiece_like(
    template: str | None = None, legacy: bool = False, add_bos: bool = False, **names: Any
) -> PreTrainedTokenizerFast:
    """Leading-space marker and <0xNN> byte tokens; `legacy` puts the space before every piece of text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges: list[tuple[str, str]] = []
    for char in sorted(set(_CORPUS.replace(" ", "\u2581"))):
        if char not in ("世", "界"):
            tokens.append(char)
    for word in _CORPUS.split():
        pieces = "\u2581" + word
        for length in range(2, len(pieces) + 1):
            if pieces[:length] not in tokens and set(pieces) <= set(tokens):
                tokens.append(pieces[:length])
                merges.append((pieces[: length - 1], pieces[length - 1]))
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    extra = [token for token in SPECIAL if token not in ("<s>", "</s>")]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<s>", "</s>", *extra)])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return _wrapped(backend, template, {"bos_token": "<s>", "eos_token": "</s>", **names})


def chat_tokenizer(template: str | None = None, **options: Any) -> ChatTokenizer:
    """A ready `ChatTokenizer` over bytes, ChatML unless told otherwise."""
    return ChatTokenizer(byte_level(template=template or CHATML, eos_token="<|im_end|>"), **options)


def _wrapped(backend: Tokenizer, template: str | None, names: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}"
    "{% for m in rest %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = false %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.first and system %}{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content %}"
    "{% else %}{% set text = m.content %}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% endif %}{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% elif m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
