"""A model's vocabulary: text to ids, ids to text, and which ids are control tokens. Safe to call from any thread."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from functools import cached_property, lru_cache

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from engine.tokenizer.token_bytes import TokenBytes, decode_complete, well_formed

_SEGMENTS_KEPT = 8192
_ALWAYS_SHOWN = ("<think>", "</think>")
_ROLE_MARKER = re.compile(r"<\|.*\|>")

Encoded = tuple[tuple[int, ...], tuple[int, ...]]
"""`(ids, end offset of each id's text in characters)`."""


class Vocabulary:
    """Wraps the fast tokenizer; `end_ids` are hidden from the text like control tokens.

    `control_ids` maps names to ids; `control_pattern` matches the names that must not be typed by a person;
    `cut_pattern` matches those before which a text can be cut without changing its ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, end_ids: frozenset[int]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._lock = threading.Lock()
        self._bytes = TokenBytes(self._backend)
        self.size = len(tokenizer)
        self.strips_first_space = self._bytes.strips_first_space
        control = self._find_control_tokens()
        self.control_ids = {token.content: token_id for token_id, token in control.items()}
        shown = {self.control_ids.get(text) for text in _ALWAYS_SHOWN}
        self.hidden_ids = frozenset(token_id for token_id in control if token_id not in shown) | end_ids
        self.control_pattern = _any_of([t.content for token_id, t in control.items() if token_id in self.hidden_ids])
        self.cut_pattern = _any_of([t.content for t in control.values() if not (t.lstrip or t.single_word)])
        self.adds_bos = self.encode("a", add_special_tokens=True)[:1] == [tokenizer.bos_token_id]
        self.encode_segment = lru_cache(_SEGMENTS_KEPT)(self._encode_segment)

    @cached_property
    def digest(self) -> str:
        """Hex digest of the whole tokenizer: vocabulary, merges, normalisation, control tokens."""
        with self._lock:
            return hashlib.sha256(self._backend.to_str().encode()).hexdigest()[:32]

    # -- text to ids ------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text that stands alone; names of control tokens in it become control tokens."""
        with self._lock:
            return list(self._backend.encode(well_formed(text), add_special_tokens=add_special_tokens).ids)

    def encode_literal(self, text: str, at_start: bool) -> Encoded:
        """Ids of ordinary text: no name in it becomes a control token. `at_start`: nothing stands before it."""
        text = well_formed(text)
        with self._lock:
            self._backend.encode_special_tokens = True
            try:
                ids, ends = self._encode_unlocked(text, at_start)
            finally:
                self._backend.encode_special_tokens = False
        match = self.control_pattern.search(text)
        if match is not None and not self.hidden_ids.isdisjoint(ids):
            # Some vocabularies build a control token from its letters; cut inside its name, they can't.
            cut = match.start() + 1
            ids, ends = self.encode_literal(text[:cut], at_start)
            more_ids, more_ends = self.encode_literal(text[cut:], False)
            return ids + more_ids, ends + tuple(end + cut for end in more_ends)
        return ids, ends

    def encode_exact(self, text: str) -> list[int]:
        """Ordinary ids whose bytes are exactly the text's, for text behind other tokens.

        Where a normaliser would alter the text, it is spelled in smaller pieces, down to single bytes. Empty if the
        vocabulary can't spell it.
        """
        text = well_formed(text)
        wanted = text.encode()
        for pieces in ([text], list(text)):
            ids = [token_id for piece in pieces for token_id in self.encode_literal(piece, at_start=False)[0]]
            if b"".join(map(self.shown_bytes, ids)) == wanted:
                return ids
        spelled = [self._bytes.id_of_byte(byte) for byte in wanted]
        return [token_id for token_id in spelled if token_id is not None] if None not in spelled else []

    def _encode_segment(self, text: str, literals: tuple[tuple[int, int], ...], at_start: bool) -> Encoded:
        """Part of a rendered chat; in the ranges `literals` control tokens' names are plain text."""
        if not literals:
            with self._lock:
                return self._encode_unlocked(text, at_start)
        match = self.cut_pattern.match(text)
        head = match[0] if match is not None and literals[0][0] >= match.end() else ""
        with self._lock:
            head_ids, head_ends = self._encode_unlocked(head, at_start)
        ids, ends = self.encode_literal(text[len(head) :], at_start and not head)
        return head_ids + ids, head_ends + tuple(end + len(head) for end in ends)

    def _encode_unlocked(self, text: str, at_start: bool) -> Encoded:
        if not text:
            return (), ()
        if at_start or not self.strips_first_space or self.cut_pattern.match(text):
            encoding = self._backend.encode(text, add_special_tokens=False)
            return tuple(encoding.ids), tuple(end for _, end in encoding.offsets)
        # Behind a line feed the tokenizer puts no space before the text; the line feed's own ids go again.
        lead = len(self._backend.encode("\n", add_special_tokens=False).ids)
        encoding = self._backend.encode("\n" + text, add_special_tokens=False)
        return tuple(encoding.ids[lead:]), tuple(end - 1 for _, end in encoding.offsets[lead:])

    # -- ids to text ------------------------------------------------------------------------------------------------

    def raw_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def shown_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, as bytes; nothing for control tokens."""
        return b"" if token_id in self.hidden_ids else self._bytes[token_id]

    def start_of_text(self, shown: bytes) -> str:
        """The text that begins with these bytes, without a last character that is not complete."""
        if self.strips_first_space and shown.startswith(b" "):
            shown = shown[1:]
        return decode_complete(shown)

    def _find_control_tokens(self) -> dict[int, AddedToken]:
        """Special tokens, and role markers that a model's maker added without calling them special."""
        added = self._backend.get_added_tokens_decoder().values()
        forgotten = [token for token in added if not token.special and _ROLE_MARKER.fullmatch(token.content)]
        if forgotten:
            self._backend.add_special_tokens(forgotten)
        decoder = self._backend.get_added_tokens_decoder()
        return {token_id: token for token_id, token in decoder.items() if token.special}


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Any of these, the longest first; with none, a pattern that never matches."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
