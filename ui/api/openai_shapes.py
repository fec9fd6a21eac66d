"""The JSON shapes of OpenAI's two completion routes, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.protocol import TokenLogprob, TurnStats
from ui.api.generation import Reply


@dataclass(slots=True)
class Shape(ABC):
    """One answer's constant parts; subclasses say what a choice looks like."""

    model: str
    prefix = ""
    whole = ""
    chunk_object = ""
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def answer(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [self.choice(index, reply) for index, reply in enumerate(replies)]
        return {**self._head(self.whole), "choices": choices, **closing(replies)}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": choices}

    @abstractmethod
    def choice(self, index: int, reply: Reply) -> dict[str, Any]:
        """A choice of a whole answer."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first chunk, if it has one before its first text."""

    @abstractmethod
    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """New text of a choice."""

    @abstractmethod
    def end(self, index: int, finish_reason: str) -> dict[str, Any]:
        """A choice's last chunk."""

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


@dataclass(slots=True)
class ChatShape(Shape):
    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, reply: Reply) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(reply.text), "refusal": None}
        logprobs = _chat_logprobs(reply.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reply.finish_reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        delta = {"content": text}
        return {"index": index, "delta": delta, "logprobs": _chat_logprobs(logprobs), "finish_reason": None}

    def end(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}


@dataclass(slots=True)
class CompletionShape(Shape):
    """`echo` is the prompt's text where it was asked for."""

    echo: str = ""
    prefix = "cmpl"
    whole = "text_completion"
    chunk_object = "text_completion"
    _offsets: dict[int, int] = field(default_factory=dict)

    def choice(self, index: int, reply: Reply) -> dict[str, Any]:
        text = self.echo + "".join(reply.text)
        logprobs = _completion_logprobs(reply.logprobs, len(self.echo))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reply.finish_reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        self._offsets[index] = len(self.echo)
        return self.delta(index, self.echo, ()) if self.echo else None

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        start = self._offsets.get(index, 0)
        self._offsets[index] = start + sum(len(item.token) for item in logprobs)
        return {
            "index": index,
            "text": text,
            "logprobs": _completion_logprobs(logprobs, start),
            "finish_reason": None,
        }

    def end(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}


def kvscope(stats: TurnStats | None) -> dict[str, Any] | None:
    """The numbers of a turn as every answer to one carries them."""
    return None if stats is None else asdict(stats)


def closing(replies: Sequence[Reply]) -> dict[str, Any]:
    """`usage` over all choices, and the first choice's numbers."""
    first = replies[0].stats
    prompt = first.prompt_tokens if first is not None else 0
    generated = sum(reply.stats.generated_tokens for reply in replies if reply.stats is not None)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": first.reused_tokens if first is not None else 0},
    }
    return {"usage": usage, "kvscope": kvscope(first)}


def _chat_logprobs(items: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not items:
        return None
    content = []
    for item in items:
        top = [_scored(text, value) for _, text, value in item.top]
        content.append({**_scored(item.token, item.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _scored(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": _token_bytes(token)}


def _token_bytes(token: str) -> list[int]:
    r"""Bytes of a token's text, in which those that are no whole character stand as \xNN."""
    data = token.encode("utf-8", "surrogatepass")
    if b"\\x" not in data:
        return list(data)
    pieces = data.split(b"\\x")
    found = bytearray(pieces[0])
    for piece in pieces[1:]:
        try:
            found.append(int(piece[:2], 16))
            found += piece[2:]
        except ValueError:
            found += b"\\x" + piece
    return list(found)


def _completion_logprobs(items: Sequence[TokenLogprob], start: int) -> dict[str, Any] | None:
    if not items:
        return None
    offsets = []
    for item in items:
        offsets.append(start)
        start += len(item.token)
    return {
        "tokens": [item.token for item in items],
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [{text: value for _, text, value in item.top} for item in items],
        "text_offset": offsets,
    }
