"""What the debugging view remembers of sessions: ids that an edit replaced, and what audits found. No tensors."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from engine.kv_cache.prefixes import common_prefix_len
from engine.sequence import Sequence

VERSIONS = 4
"""Earlier histories that are kept of a session."""
SESSIONS = 256
BlockContent = tuple[str | None, tuple[int, ...]]
"""What tells a block from what it held before: the turn that wrote it, and its ids so far."""


@dataclass(slots=True)
class SessionRecord:
    """`audits`: by block index, when its content was audited last and with which verdict."""

    earlier: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=VERSIONS))
    audits: dict[int, tuple[BlockContent, dict[str, Any]]] = field(default_factory=dict)
    last: dict[str, Any] | None = None


class Records:
    """Of the sessions that were used last. Lives on the engine thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, SessionRecord] = OrderedDict()

    def find(self, session_id: str) -> SessionRecord:
        """The session's record; an unknown session gets an empty one."""
        record = self._known.setdefault(session_id, SessionRecord())
        self._known.move_to_end(session_id)
        while len(self._known) > SESSIONS:
            self._known.popitem(last=False)
        return record

    def replaced(self, session_id: str, cached: SequenceOf[int], wanted: SequenceOf[int]) -> None:
        """A session's next prompt is about to take the place of what is cached; kept if the two part somewhere."""
        if common_prefix_len(cached, wanted) < min(len(cached), len(wanted)):
            self.find(session_id).earlier.appendleft(tuple(cached))

    def earlier(self, session_id: str, ids: SequenceOf[int]) -> list[tuple[int, ...]]:
        """Histories that the session had before, newest first, as far as they differ from `ids`."""
        known = self._known.get(session_id)
        return [] if known is None else [old for old in known.earlier if common_prefix_len(old, ids) < len(old)]

    def audited(self, session_id: str, result: dict[str, Any], blocks: Iterable[tuple[int, BlockContent, str]]) -> None:
        """Keep an audit's answer, and of each block it looked at `(index, content, verdict)`."""
        record, now = self.find(session_id), time.time()
        record.last = {**result, "at": now}
        for index, content, verdict in blocks:
            record.audits[index] = (content, {"at": now, "verdict": verdict, "scope": result["scope"]})

    def spot_audited(self, sequence: Sequence, compared: SequenceOf[tuple[int, int, float]], tolerance: float) -> None:
        """A session was restored, and some of its positions `(first, count, error)` were computed anew and agreed."""
        worst, count = max(error for *_, error in compared), sum(count for _, count, _ in compared)
        sentence = f"{count} positions that were computed again after the restore agree, within {worst:.2g}."
        result = {
            "verdict": "clean", "scope": "restore", "noise_floor": tolerance, "max_error": worst, "state_error": None,
            "logits_error": None, "faults": [], "since_turn": None, "follows": [], "checked_tokens": count,
            "cache_pos": sequence.cache_pos, "heat": {"columns": [], "values": []}, "sentence": sentence, "ms": None,
        }  # fmt: skip
        contents = block_contents(sequence)
        indices = {first // sequence.block_size for first, *_ in compared}
        found = [(index, contents[index], "clean") for index in sorted(indices) if index < len(contents)]
        self.audited(sequence.session_id or "", result, found)

    def block_audit(self, session_id: str, index: int, content: BlockContent) -> dict[str, Any] | None:
        """The last audit of a block; None where it holds something else by now."""
        known = self._known.get(session_id)
        kept, found = known.audits.get(index, (None, None)) if known is not None else (None, None)
        return found if kept == content else None

    def last_audit(self, session_id: str) -> dict[str, Any] | None:
        known = self._known.get(session_id)
        return known.last if known is not None else None

    def changed(self, session_id: str) -> None:
        """What audits said no longer holds: the blocks were damaged, or repaired."""
        known = self._known.get(session_id)
        if known is not None:
            known.audits.clear()
            known.last = None

    def forget(self, session_id: str) -> None:
        self._known.pop(session_id, None)


def block_contents(sequence: Sequence) -> list[BlockContent]:
    """Of each block, who wrote it and its ids so far."""
    size, end = sequence.block_size, sequence.cache_pos
    return [
        (turn, tuple(sequence.token_ids[index * size : min((index + 1) * size, end)]))
        for index, turn in enumerate(sequence.block_turns)
    ]
