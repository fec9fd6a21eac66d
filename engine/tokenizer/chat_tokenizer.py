"""The chat tokenizer: text to ids and back, conversations to prompts. Safe to call from any thread."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import InvalidRequest, ModelFileError
from engine.protocol import ChatMessage, Prompt, Span
from engine.tokenizer.chat_template import OWN, ROLES, ChatTemplate, bundled_names, fallback_name
from engine.tokenizer.gguf_tokenizer import TEMPLATE_KEY, load_gguf_tokenizer
from engine.tokenizer.rendering import Region, RenderedChat, render_chat
from engine.tokenizer.vocabulary import Vocabulary
from engine.weights.catalog import ModelSource

_REPLIES_KEPT = 2048
_PROBE = "\ufdd5"


class ChatTokenizer:
    """Tokenizer and chat template of one model.

    `decode` shows what a person should read: control tokens (end markers, role markers) are left out wherever they
    stand, also in mid-reply; thinking tags stay. It never ends in half a character: bytes of one that is not complete
    are left out, bytes that can't become one show as U+FFFD.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: str | None = None,
        end_ids: frozenset[int] = frozenset(),
        warnings: Sequence[str] = (),
    ) -> None:
        """`template` names one of `template_names()`; None takes the model's own, or a fallback if it has none."""
        own_end = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
        self._tokenizer = tokenizer
        self._end_ids = end_ids | own_end
        self._vocabulary = Vocabulary(tokenizer, self._end_ids)
        self._reply_bytes = lru_cache(_REPLIES_KEPT)(self._reply_bytes_uncached)
        self._file_warnings = tuple(warnings)
        self.vocab_size = self._vocabulary.size
        self._use_template(template)

    @classmethod
    def from_source(cls, source: ModelSource, template: str | None = None) -> ChatTokenizer:
        """Tokenizer and template of a model on disk. Raises `ModelFileError`."""
        if source.kind == "gguf":
            tokenizer, ends, warnings = load_gguf_tokenizer(source.path)
            return cls(tokenizer, template, ends, warnings)
        try:
            loaded = AutoTokenizer.from_pretrained(str(source.path), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # broken folders fail in many ways inside the loader
            raise ModelFileError(f"The tokenizer of {source.name} can't be loaded ({type(error).__name__}).") from error
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise ModelFileError(f"The tokenizer of {source.name} has no fast form (tokenizer.json).")
        return cls(loaded, template, _end_ids_in(source.path))

    # -- templates --------------------------------------------------------------------------------------------------

    @property
    def template_name(self) -> str:
        return self._template.name

    @property
    def template_digest(self) -> str:
        return self._template.digest

    @property
    def vocabulary_digest(self) -> str:
        """Equal for equal tokenizers. Takes about a twentieth of a second at the first call."""
        return self._vocabulary.digest

    def template_names(self) -> tuple[str, ...]:
        """Templates to choose from: the model's own ("model") first if there is one, then the bundled ones."""
        return ((OWN,) if self._own_template() else ()) + bundled_names()

    def with_template(self, name: str | None) -> ChatTokenizer:
        """The same vocabulary with another template; None as at the start. Raises `InvalidRequest` if unknown."""
        twin = copy(self)
        twin._use_template(name)
        return twin

    def _use_template(self, name: str | None) -> None:
        self._template, told = self._choose_template(name)
        self.warnings = (*self._file_warnings, *told)
        self.eos_ids = self._end_ids | self._end_of_turn()

    def _own_template(self) -> str | None:
        found: Any = self._tokenizer.chat_template
        return found.get("default") if isinstance(found, dict) else found

    def _choose_template(self, name: str | None) -> tuple[ChatTemplate, tuple[str, ...]]:
        """`(template, warnings)`."""
        own, tokens = self._own_template(), _text_of(self._tokenizer.special_tokens_map)
        if own and name in (None, OWN):
            return ChatTemplate(OWN, own, tokens), ()
        chosen = fallback_name(self._vocabulary.control_ids) if name is None else name
        template = ChatTemplate.bundled(chosen, tokens, self._vocabulary.adds_bos)
        if name is not None:
            return template, ()
        return template, (f"The model has no {TEMPLATE_KEY}; the bundled template {chosen!r} is used instead.",)

    def _end_of_turn(self) -> frozenset[int]:
        """The control token that the template puts right behind a reply."""
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._template.render(chat, datetime(2000, 1, 1), False)
        except InvalidRequest:
            return frozenset()
        match = self._vocabulary.control_pattern.match(text.rpartition(_PROBE)[2].lstrip())
        return frozenset() if match is None else frozenset({self._vocabulary.control_ids[match[0]]})

    # -- text and ids -----------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = False, control_tokens: bool = True) -> list[int]:
        """Ids of a text that stands alone. `add_special_tokens`: with BOS where the model wants one.

        Without `control_tokens`, a control token's name in the text is ordinary text.
        """
        if control_tokens:
            return self._vocabulary.encode(text, add_special_tokens=add_special_tokens)
        return list(self._vocabulary.encode_literal(text, at_start=True)[0])

    def encode_following(self, text: str) -> list[int]:
        """Ids of ordinary text behind other tokens: no space is put before it, no name is a control token.

        They decode to exactly this text, or are empty if the vocabulary can't spell it.
        """
        return self._vocabulary.encode_exact(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        shown = self._vocabulary.shown_bytes
        return self._vocabulary.start_of_text(b"".join(shown(token_id) for token_id in token_ids))

    @property
    def strips_first_space(self) -> bool:
        return self._vocabulary.strips_first_space

    def shown_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, as bytes; nothing for control tokens."""
        return self._vocabulary.shown_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        r"""One token made visible: spaces and line feeds as they are, bytes that are no whole character as \xNN."""
        return self._vocabulary.raw_bytes(token_id).decode("utf-8", "backslashreplace")

    # -- conversations ----------------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[ChatMessage],
        date: datetime,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
    ) -> Prompt:
        """The ids of a conversation as the template writes it, with stored reply ids where their text stands.

        `date` is all the template learns of the time. `continue_last` leaves the last message open, to be continued.
        A model whose template knows no system role gets the system text before the first user message. Raises
        `InvalidRequest` if the template refuses the messages.
        """
        rendered, kept = self._render_text(messages, date, add_generation_prompt, continue_last)
        ids: list[int] = []
        spans: list[Span] = []
        position = 0
        merged: list[Region] = []
        for region in rendered.regions:
            message = kept[region.message]
            reply = message.token_ids if message.role == "assistant" else None
            if not reply or self._reply_text(reply) != message.content:
                merged.append(region)
                continue
            spliced, lead = self._splice(reply, rendered.text, region)
            self._append(ids, spans, rendered, position, region.start - lead, merged)
            merged = []
            spans.append(Span(region.message, len(ids), len(ids) + len(spliced)))
            ids += spliced
            position = region.end
        self._append(ids, spans, rendered, position, len(rendered.text), merged)
        shift = len(messages) - len(kept)
        return Prompt(tuple(ids), tuple(Span(s.message + shift, s.start, s.end) for s in spans))

    def _render_text(
        self, messages: Sequence[ChatMessage], date: datetime, add_generation_prompt: bool, continue_last: bool
    ) -> tuple[RenderedChat, Sequence[ChatMessage]]:
        for message in messages:
            if message.role not in ROLES:
                raise InvalidRequest(f"A message's role is one of {', '.join(ROLES)}, not {message.role!r}.")
        if not messages:
            raise InvalidRequest("The conversation has no messages.")
        kept = messages if self._template.supports_system else _system_into_user(messages)
        roles = ["system" if message.role == "developer" else message.role for message in kept]

        def render_with(prompted: bool, texts: Sequence[str]) -> str:
            chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            return self._template.render(chat, date, prompted)

        rendered = render_chat(
            [message.content for message in kept],
            lambda texts: render_with(False, texts),
            self._vocabulary.control_pattern,
            None if continue_last else (lambda texts: render_with(add_generation_prompt, texts)),
        )
        return rendered, kept

    def _reply_text(self, reply: tuple[int, ...]) -> str:
        return self._vocabulary.start_of_text(self._reply_bytes(reply)[0])

    def _reply_bytes_uncached(self, reply: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
        """`(shown bytes of a reply, offset in them behind each token)`."""
        shown = bytearray()
        ends = []
        for token_id in reply:
            shown += self.shown_bytes(token_id)
            ends.append(len(shown))
        return bytes(shown), tuple(ends)

    def _splice(self, reply: tuple[int, ...], text: str, region: Region) -> tuple[list[int], int]:
        """`(ids for the region, characters before it that they cover too)`.

        The cover: a first token that holds the space which the template writes before the reply. Of an altered reply,
        the ids that stand for what is left are kept, and the rest of it is tokenised.
        """
        shown, ends = self._reply_bytes(reply)
        if region.verbatim:
            spaced = self.strips_first_space and shown.startswith(b" ") and text[: region.start].endswith(" ")
            return list(reply), int(spaced)
        wanted = text[region.start : region.end].encode()
        start = shown.rfind(wanted) if wanted else -1
        if start < 0:
            return self._encode_part(wanted), 0
        first = bisect_right(ends, start - 1) + 1 if start else 0
        last = bisect_right(ends, start + len(wanted))
        if first >= last:
            return self._encode_part(wanted), 0
        head_end = ends[first - 1] - start if first else 0
        head, tail = wanted[:head_end], wanted[ends[last - 1] - start :]
        return [*self._encode_part(head), *reply[first:last], *self._encode_part(tail)], 0

    def part_of_reply(self, reply: tuple[int, ...], text: str) -> tuple[int, ...]:
        """Ids of a text that stands in a reply: the reply's own as far as they spell it, none for no text."""
        ids, _ = self._splice(reply, text, Region(0, 0, len(text), verbatim=False))
        return tuple(ids)

    def _encode_part(self, part: bytes) -> list[int]:
        return list(self._vocabulary.encode_literal(part.decode("utf-8", "replace"), at_start=False)[0])

    def _append(
        self, ids: list[int], spans: list[Span], chat: RenderedChat, start: int, end: int, regions: Sequence[Region]
    ) -> None:
        """Tokenise characters `start:end`, cut before each control token that the template wrote."""
        literals = [literal for literal in chat.literals if start <= literal[0] < end]
        typed = {position for literal in literals for position in range(*literal)}
        cuts = [match.start() + start for match in self._vocabulary.cut_pattern.finditer(chat.text[start:end])]
        edges = [start, *(cut for cut in cuts if cut > start and cut not in typed), end]
        firsts, ends = [], []
        for left, right in pairwise(edges):
            inside = tuple((a - left, b - left) for a, b in literals if left <= a < right)
            segment_ids, segment_ends = self._vocabulary.encode_segment(chat.text[left:right], inside, left == 0)
            firsts.append(len(ids))
            ends.append(segment_ends)
            ids += segment_ids

        def token_behind(position: int) -> int:
            """The first token that ends behind a character position of the chat."""
            segment = max(bisect_right(edges, position, hi=len(firsts)) - 1, 0)
            return firsts[segment] + bisect_right(ends[segment], position - edges[segment])

        for region in regions:
            opening = token_behind(region.start)
            closing = opening if region.end == region.start else min(token_behind(region.end - 1) + 1, len(ids))
            spans.append(Span(region.message, opening, closing))


def _text_of(tokens: Any) -> dict[str, str]:
    return {name: str(value) for name, value in tokens.items() if isinstance(value, str | AddedToken)}


def _end_ids_in(folder: Path) -> frozenset[int]:
    """End ids from generation_config.json and config.json, each one id or a list."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        found.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
    return frozenset(found)


def _system_into_user(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """For templates without a system role: its text goes before the first user message."""
    if messages[0].role not in ("system", "developer"):
        return messages
    for index, message in enumerate(messages[1:], start=1):
        if message.role == "user":
            text = f"{messages[0].content}\n\n{message.content}" if messages[0].content else message.content
            return [*messages[1:index], ChatMessage("user", text), *messages[index + 1 :]]
    return [ChatMessage("user", messages[0].content), *messages[1:]]
