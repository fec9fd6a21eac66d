"""What each token id stands for, as bytes: a text is its tokens' bytes joined, whatever their neighbours are."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"
_SURROGATES = re.compile("[\ud800-\udfff]")


class TokenBytes:
    """Bytes per token id, for byte-level and SentencePiece-like vocabularies; found on first use, then kept.

    `strips_first_space`: the tokenizer puts a space before a text and takes it off again when it decodes a whole text.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        steps = _steps(backend.decoder)
        kinds = [step["type"] for step in steps]
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._space_mark = "Metaspace" in kinds or any(
            step["type"] == "Replace" and step["pattern"].get("String") == _SPACE_MARK for step in steps
        )
        self.strips_first_space = any(
            (step["type"] == "Strip" and step["start"] > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; empty for ids outside the vocabulary (models may have more rows than tokens)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._convert(token_id)
        return found

    def id_of_byte(self, byte: int) -> int | None:
        """The token that stands for this byte alone, if the vocabulary has one."""
        name = _CHAR_OF_BYTE[byte] if self._byte_level else f"<0x{byte:02X}>"
        token_id: int | None = self._backend.token_to_id(name)
        return token_id

    def _convert(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:
                return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._space_mark:
            return token.replace(_SPACE_MARK, " ").encode()
        if self._backend.decoder is None:
            return token.encode()
        return str(self._backend.decoder.decode([token])).encode()


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _byte_of_char() -> dict[str, int]:
    """Byte-level vocabularies spell printable bytes as themselves and the others as characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
_CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}


def well_formed(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which JSON can bring in and UTF-8 can't hold; of the same length."""
    return _SURROGATES.sub("\ufffd", text)


def decode_complete(data: bytes) -> str:
    """UTF-8 text; a last character of which bytes are missing is left out, bytes that are no text show as U+FFFD."""
    return utf8_decoder().decode(data)


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Takes bytes in pieces of any size; keeps back those of a character that is not complete yet."""
    return codecs.getincrementaldecoder("utf-8")("replace")
