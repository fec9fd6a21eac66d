"""The live panel's data. Reading the cache waits for the engine's current step, so it happens on a thread of its own:
an answer to a page carries the newest reading that is ready and never waits for the next."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.debugging.protocol import ProbeQuery
from engine.errors import KVScopeError
from engine.prompt import effective_max_tokens
from sessions.errors import StoreError
from ui import view_models
from ui.chat import ChatService

PROBE_POSITIONS = 10
OF_SESSION = ("kv_format", "bytes_per_token", "max_seq_len")
"""Facts of the model that a chat with a KV format of its own has other values of."""
READ_EVERY_S = 1.0
"""A running turn itself tells where the cache ends (`LivePage`); the engine computes nothing while it is read."""
IDLE_READ_EVERY_S = 1.5
STALE_AFTER_S = 5.0
"""A reading this old is from before the page was opened or came back: better nothing for a moment."""
KEPT_READINGS = 64
log = logging.getLogger("kvscope.panel")


@dataclass(frozen=True, slots=True)
class Selection:
    """Whose cache is shown, and which tensor of it the probe reads. `session_id` None: a chat not stored yet."""

    session_id: str | None
    tensor: str = "k"
    layer: int = 0
    head: int = 0


@dataclass(slots=True)
class _Slot:
    """What is known of one selection; `asked` while a reading is under way."""

    number: int | None = None
    read_at: float = 0.0
    asked: bool = False
    running: bool = False


@dataclass(slots=True)
class PanelSource:
    """Readings for all pages. Only what some page shows is ever read."""

    chat: ChatService
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="kvscope-panel"))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _slots: OrderedDict[Selection, _Slot] = field(default_factory=OrderedDict)
    _readings: OrderedDict[int, dict[str, Any]] = field(default_factory=OrderedDict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def changes(self, selection: Selection, since: int | None, running: bool) -> dict[str, Any] | None:
        """`{id, ...}` with the sections that differ from reading `since`; None where there is nothing newer."""
        every = READ_EVERY_S if running else IDLE_READ_EVERY_S
        with self._lock:
            slot = self._slots.setdefault(selection, _Slot())
            self._slots.move_to_end(selection)
            age = time.monotonic() - slot.read_at
            if not slot.asked and (age >= every or running != slot.running):
                slot.asked, slot.running = True, running
                self._pool.submit(self._read_into, slot, selection)
            if age > STALE_AFTER_S:
                return None
            while len(self._slots) > KEPT_READINGS:
                self._slots.popitem(last=False)
            if slot.number is None or slot.number == since:
                return None
            new = self._readings.get(slot.number)
            old = self._readings.get(since or 0, {})
            if new is None:
                slot.read_at = 0.0
                return None
            return {"id": slot.number, **view_models.changed_sections(old, new)}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_into(self, slot: _Slot, selection: Selection) -> None:
        reading: dict[str, Any] | None = None
        try:
            reading = self.read(selection)
        except (KVScopeError, StoreError) as error:
            log.debug("nothing to show: %s", error)
        except Exception:
            log.exception("the panel could not be read")
        with self._lock:
            slot.asked, slot.read_at = False, time.monotonic()
            if reading is None or (slot.number is not None and self._readings.get(slot.number) == reading):
                return
            slot.number = next(self._numbers)
            self._readings[slot.number] = reading
            while len(self._readings) > KEPT_READINGS:
                self._readings.popitem(last=False)

    def read(self, selection: Selection) -> dict[str, Any]:
        """All sections, now. Raises `EngineStopped` while there is no engine to ask."""
        engine = self.chat.engine
        capabilities = engine.capabilities()
        reading: dict[str, Any] = {
            "model": view_models.model_section(capabilities),
            "memory": {name: value for name, value in engine.memory().items() if name != "sessions"},
        }
        if selection.session_id is None:
            return reading | {"turn": None, "cache": None, "audit": None, "blocks": [], "head": [], "tail": []}
        report = engine.inspect(selection.session_id)
        layer = min(selection.layer, capabilities["num_layers"] - 1)
        head = min(selection.head, capabilities["num_kv_heads"] - 1)
        cache_pos = report["cache_pos"]
        tail = max(cache_pos - PROBE_POSITIONS, PROBE_POSITIONS)

        def probe(start: int) -> list[list[Any]]:
            if not capabilities["num_layers"]:
                return []
            query = ProbeQuery(selection.tensor, layer, head, start, PROBE_POSITIONS)
            return view_models.probe_rows(engine.probe(selection.session_id or "", query))

        own = {name: report[name] for name in OF_SESSION}
        return reading | {
            "model": view_models.model_section({**capabilities, **own}),
            "turn": self._turn(selection.session_id, capabilities),
            "cache": view_models.cache_section(report),
            "audit": view_models.audit_section(report["audit"]),
            "blocks": view_models.block_cells(report["blocks"]),
            "head": probe(0) if cache_pos else [],
            "tail": probe(tail) if cache_pos > tail else [],
        }

    def _turn(self, session_id: str, capabilities: Mapping[str, Any]) -> dict[str, Any] | None:
        def token_text(token_id: int) -> str:
            # A stored turn may be another model's.
            known = token_id < capabilities["vocab_size"]
            return self.chat.engine.tokenizer.token_text(token_id) if known else f"id {token_id}"

        turn = self.chat.running(session_id)
        if turn is not None:
            live = turn.view().stats
            return view_models.turn_section(asdict(live) if live else None, True, turn.max_new_tokens, token_text)
        records = self.chat.store.turns(session_id)
        if not records or not view_models.sound_stats(records[-1].stats):
            return None
        stats = records[-1].stats
        wanted = view_models.settings(self.chat.store.get(session_id).params)["max_tokens"]
        limit = wanted if isinstance(wanted, int) else None
        most = effective_max_tokens(stats["prompt_tokens"], capabilities["max_seq_len"], limit)
        return view_models.turn_section(stats, False, most, token_text)
