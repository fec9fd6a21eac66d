"""How sure the model was of each token of a reply, as it was measured while they were sampled: what a page draws."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from engine.errors import NotFound
from engine.sampling.params import check_whole
from sessions.errors import NotStored
from sessions.models import Measure, Message
from ui.chat import ChatService

MAX_COLUMNS = 512
SHOWN_TOKENS = 8
"""Of a column that stands for more, only the first ones are spelled out."""


def certainty(chat: ChatService, session_id: str, message_id: str, columns: int) -> dict[str, Any]:
    """The body of `GET /api/sessions/{id}/certainty`.

    Lists of at most `columns` stretches of tokens: `columns` (the first and last token of each), the mean `entropy` in
    nats, the mean probability of the likeliest token (`top1`), and the `text`. All are empty where nothing was
    measured, as of a reply that was imported. Raises `NotFound` and `InvalidRequest`.
    """
    check_whole("columns", columns, 1, MAX_COLUMNS)
    try:
        message, measured = chat.store.message(message_id), chat.store.measures(message_id)
    except NotStored:
        message = measured = None
    if message is None or message.session_id != session_id:
        raise NotFound("There is no message with this id in this session.")
    measures = () if measured is None else measured.measures[: len(message.token_ids or ())]
    stretches = _stretches(len(measures), columns)
    return {
        "session_id": session_id,
        "message_id": message_id,
        "total": len(measures),
        "columns": [[first, end - 1] for first, end in stretches],
        "entropy": [_mean(measures, 2, first, end) for first, end in stretches],
        "top1": [_mean(measures, 3, first, end) for first, end in stretches],
        "text": [_text(chat, message, first, end) for first, end in stretches],
    }


def _stretches(count: int, columns: int) -> list[tuple[int, int]]:
    """`(first, end)` of each: as many tokens in each as in the others, but for one."""
    columns = min(count, columns)
    return list(pairwise(index * count // columns for index in range(columns + 1))) if columns else []


def _mean(measures: Sequence[Measure], field: int, first: int, end: int) -> float:
    return round(sum(measure[field] for measure in measures[first:end]) / (end - first), 4)


def _text(chat: ChatService, message: Message, first: int, end: int) -> str:
    """Ids of another model mean other text, which is not known here."""
    if message.model != chat.engine.capabilities()["model"]:
        return ""
    ids = (message.token_ids or ())[first : min(end, first + SHOWN_TOKENS)]
    return "".join(map(chat.engine.tokenizer.token_text, ids))
