"""What an open page asks for several times a second, and the acts it sends. Both are short requests: no page holds a
connection, so any number of tabs works within a browser's limit of six connections per host.

Acts come by one route rather than through Gradio's event queue: an act is answered at once (the reply is then seen by
polling), an error has a status and one sentence, Stop never waits behind anything, and a text is only taken out of its
box once it is stored.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Generic, TypeVar

from engine.errors import NotFound
from sessions.errors import NotStored
from sessions.models import Session
from ui import view_models
from ui.chat import ChatService
from ui.panel import PanelSource, Selection
from ui.reply_html import Blocks, GrowingReply, delta
from ui.turn import Turn, TurnView

RENDER_SHARE = 6
"""Rendering a reply may take 1 / RENDER_SHARE of the time: a very long paragraph is updated less often."""
KEPT_STATES = 64
KEPT_BRANCHES = 256
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Cursor:
    """What a page has: names of the parts it was sent last. It comes back as the next request's `since`."""

    app: str = ""
    session: str = ""
    sessions: str = ""
    branch: str = ""
    panel: str = ""
    turn: str = ""
    length: str = ""

    @classmethod
    def parse(cls, text: str) -> Cursor:
        parts = text.split(".")
        return cls(*parts) if len(parts) == len(cls.__slots__) else cls()

    def __str__(self) -> str:
        return ".".join(astuple(self))


@dataclass(frozen=True, slots=True)
class LiveQuery:
    """What the page wants to know beside the chat: the panel (if it is open), the session list (now and then)."""

    since: str = ""
    panel: bool = False
    tensor: str = "k"
    layer: int = 0
    head: int = 0
    sessions: bool = False
    search: str = ""


class Recent(Generic[K, V]):
    """The last few values by key; callers hold their own lock."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def put(self, key: K, value: V) -> V:
        self._items[key] = value
        self._items.move_to_end(key)
        while len(self._items) > self._size:
            self._items.popitem(last=False)
        return value


class LiveReply:
    """A running reply's HTML, shared by all pages that watch it. States are named by the length of their text."""

    def __init__(self) -> None:
        self._growing = GrowingReply()
        self._states: Recent[int, Blocks] = Recent(KEPT_STATES)
        self._states.put(0, ())
        self._newest = 0
        self._free_at = 0.0
        self._lock = threading.Lock()

    def changes(self, view: TurnView, length: int) -> dict[str, Any]:
        """`{length, at, keep, add}`: how to get from the state at `length` to a newer one (see `reply_html.delta`)."""
        with self._lock:
            started = time.monotonic()
            if len(view.text) != self._newest and (started >= self._free_at or view.done):
                self._newest = len(view.text)
                self._states.put(self._newest, self._growing.update(view.text))
                self._free_at = started + RENDER_SHARE * (time.monotonic() - started)
            old = self._states.get(length)
            new = self._states.get(self._newest) or ()
        # A state that is no longer kept, or never was, is replaced as a whole.
        change = {"at": 0, "keep": 0, "add": list(new)} if old is None else delta(old, new)
        return {"length": self._newest, **change}


@dataclass(slots=True)
class LivePage:
    """Answers `GET /api/sessions/{id}/live` for all pages."""

    chat: ChatService
    panel: PanelSource = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _replies: Recent[str, LiveReply] = field(default_factory=lambda: Recent(KEPT_STATES))
    _entries: Recent[str, tuple[tuple[Any, ...], list[dict[str, Any]], tuple[str, ...]]] = field(
        default_factory=lambda: Recent(16)
    )
    _sent: Recent[str, tuple[str, ...]] = field(default_factory=lambda: Recent(KEPT_BRANCHES))

    def __post_init__(self) -> None:
        self.panel = PanelSource(self.chat)

    def answer(self, session_id: str | None, query: LiveQuery) -> dict[str, Any]:
        """Only what is new since `query.since`. Raises `NotFound` or `InvalidRequest` for a session that isn't."""
        had = Cursor.parse(query.since)
        app = self._app()
        parts: dict[str, Any] = {"app": app}
        turn, running = None, False
        branch: dict[str, Any] = {}
        if session_id is not None:
            turn = self.chat.running(session_id)
            session, branch = self._conversation(session_id, turn, had.branch)
            running = turn is not None
            if turn is None and branch["unfinished"]:
                # A reply is stored before its turn runs, which runs before the act that began it is over.
                running = self.chat.acting(session_id)
                turn = self.chat.running(session_id)
                running |= turn is not None
                session, branch = self._conversation(session_id, turn, had.branch, running)
            parts["session"] = view_models.session_part(session)
        if query.sessions:
            parts["sessions"] = view_models.list_part(self.chat.store.list(query.search))
        names = {name: view_models.signature(part) for name, part in parts.items()}
        answer: dict[str, Any] = {name: parts[name] for name in parts if names[name] != getattr(had, name)}
        answer["running"] = running
        answer |= branch.get("answer", {})
        turn_answer = self._turn(turn, had) if turn is not None else {}
        answer |= {"turn": turn_answer} if turn_answer else {}
        panel = self._panel(session_id, query, had, running) if query.panel and app["status"] == "ok" else None
        if panel is not None:
            answer["panel"] = panel
        since = Cursor(
            app=names["app"],
            session=names.get("session", ""),
            sessions=names.get("sessions", had.sessions),
            branch=branch.get("name", ""),
            panel=str(panel["id"]) if panel is not None else had.panel,
            turn=turn.id if turn is not None else "",
            length=str(turn_answer.get("length", "")),
        )
        return answer | {"since": str(since)}

    def _session(self, session_id: str) -> Session:
        try:
            return self.chat.store.get(session_id)
        except NotStored:
            raise NotFound("This chat does not exist (any more).") from None

    def _app(self) -> dict[str, Any]:
        """State of the engine and what the page's frame shows of the model."""
        status = self.chat.engine.status()
        part: dict[str, Any] = {"status": status, "defaults": view_models.settings({})}
        if status == "ok":
            part["model"] = view_models.model_section(self.chat.engine.capabilities())
        return part

    def _conversation(
        self, session_id: str, turn: Turn | None, had: str, begins: bool = False
    ) -> tuple[Session, dict[str, Any]]:
        """The session and `_branch` of it; without a `turn`, its last message is the reply of one that `begins`."""
        session = self._session(session_id)
        live_id = turn.message_id if turn is not None else session.head_id if begins else None
        return session, self._branch(session_id, (session.head_id, session.updated_at), live_id, had)

    def _branch(self, session_id: str, state: tuple[Any, ...], live_id: str | None, had: str) -> dict[str, Any]:
        """`{name, unfinished, answer}`: the name of the branch's present state, whether its last message is a reply
        that nothing says to be running, and an answer if the page has another state.

        A session's row changes whenever its messages do, so the branch is read and rendered only then.
        """
        key = (*state, live_id)
        with self._lock:
            known = self._entries.get(session_id)
        if known is None or known[0] != key:
            stats = {record.message_id: record.stats for record in self.chat.store.turns(session_id)}
            entries = view_models.message_entries(self.chat.store.branch(session_id), stats, live_id)
            known = (key, entries, tuple(view_models.signature(entry) for entry in entries))
        _, entries, names = known
        found: dict[str, Any] = {"name": view_models.signature(names)}
        found["unfinished"] = bool(entries) and "partial" in entries[-1]
        with self._lock:
            self._entries.put(session_id, known)
            self._sent.put(found["name"], names)
            if found["name"] == had:
                return found
            before = self._sent.get(had) or ()
        keep = 0
        while keep < min(len(before), len(names)) and before[keep] == names[keep]:
            keep += 1
        return found | {"answer": {"branch": {"keep": keep, "add": entries[keep:]}}}

    def _turn(self, turn: Turn, had: Cursor) -> dict[str, Any]:
        view = turn.view()
        with self._lock:
            reply = self._replies.get(turn.id) or self._replies.put(turn.id, LiveReply())
        length = int(had.length) if had.turn == turn.id and had.length.isdigit() else 0
        answer = {"id": turn.id, "message": turn.message_id, "tokens": view.token_count, **reply.changes(view, length)}
        if view.stats is not None:
            answer["cache_pos"] = view.stats.cache_pos
        if view.stats is not None and not view.token_count:
            answer["prefill"] = [view.stats.cache_pos, view.stats.prompt_tokens]
        if view.stats is not None and view.stats.loop is not None:
            answer["loop"] = asdict(view.stats.loop)
        if turn.dropped:
            # The oldest messages of the branch: their number says which.
            answer["dropped"] = len(turn.dropped)
        return answer

    def _panel(self, session_id: str | None, query: LiveQuery, had: Cursor, running: bool) -> dict[str, Any] | None:
        selection = Selection(session_id, query.tensor, query.layer, query.head)
        return self.panel.changes(selection, int(had.panel) if had.panel.isdigit() else None, running)
