"""The conversation: what a person's act does to the stored messages, the prompt and the running turn.

Page and HTTP routes both come through here. The engine's cache is never told what changed: every prompt is compared
with it from the start.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.debugging.protocol import PrecisionQuery
from engine.errors import Conflict, InvalidRequest, KVScopeError, NotFound
from engine.local import LocalEngine
from engine.prompt import effective_max_tokens
from engine.protocol import ChatMessage, GenerateRequest, TimedSpan
from engine.sampling.beam import BeamParams
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import fresh_seed
from sessions.errors import NotStored
from sessions.models import DEFAULT_TITLE, FAILED, PARTIAL, Message, Session, TurnRecord
from sessions.store import SessionStore
from ui.api.params import parse_params
from ui.price import ACTIONS, miss_cards, price
from ui.prompt_plan import PromptPlan, PromptPlanner
from ui.recorder import record
from ui.turn import Turn

MAX_MESSAGE_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class PromptPreview:
    """What sending a text would cost: tokens of the prompt, how many of them are cached, which messages would leave."""

    prompt_tokens: int
    reused_tokens: int
    context_limit: int
    dropped: tuple[str, ...]


class ChatService:
    """Acts on stored conversations and owns their running turns; at most one turn per session. Thread-safe."""

    def __init__(self, store: SessionStore, engine: LocalEngine) -> None:
        self.store = store
        self.engine = engine
        self._planner = PromptPlanner(engine)
        self._turns: dict[str, Turn] = {}
        self._claimed: set[str] = set()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._causes: dict[str, str] = {}
        engine.asked_format = self._asked_format

    def _asked_format(self, session_id: str) -> str | None:
        try:
            own = self.store.get(session_id).params.get("kv_format")
        except NotStored:
            return None
        return None if own is None else str(own)

    # -- acts that produce a reply ----------------------------------------------------------------------------------

    def send(self, session_id: str, content: str, params: SamplingParams | None = None) -> Turn:
        """Append a user message to the current branch and answer it."""
        _check_content(content)
        with self._claim(session_id) as session:
            branch = self.store.branch(session_id)
            plan = self._planner.plan(session, branch.messages, params, content)
            user = self.store.add_message(session_id, session.head_id, "user", content)
            self._name_after(session, content)
            return self._answer(session, user, plan, None)

    def edit(self, session_id: str, message_id: str, content: str, params: SamplingParams | None = None) -> Turn:
        """Answer another version of a user message; the old one and what followed it stay as a sibling branch."""
        _check_content(content)
        with self._claim(session_id) as session:
            old = self._message(session_id, message_id)
            if old.role != "user":
                raise InvalidRequest("Only a user message can be edited and answered anew.")
            plan = self._planner.plan(session, self._path_to(session_id, old.parent_id), params, content)
            user = self.store.add_message(session_id, old.parent_id, "user", content)
            return self._answer(session, user, plan, "edit")

    def regenerate(self, session_id: str, message_id: str | None = None, params: SamplingParams | None = None) -> Turn:
        """Another reply to the same user message, as a sibling of the old one. Default: the last reply."""
        with self._claim(session_id) as session:
            user = self._user_message_of(session_id, message_id or session.head_id)
            plan = self._planner.plan(session, self._path_to(session_id, user.id), params, None)
            return self._answer(session, user, plan, "regenerate")

    def complete(
        self,
        session_id: str,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        beams: BeamParams | None = None,
    ) -> Turn:
        """Answer a whole conversation sent by a client: what equals the stored branch is kept, the rest is appended."""
        if not messages or messages[-1].role != "user":
            raise InvalidRequest("The last message of a session's turn must be a user message.")
        for message in messages:
            _check_length(message.content)
        _check_content(messages[-1].content)
        with self._claim(session_id) as session:
            system, rest = _split_system(messages)
            changed = system is not None and system != session.system_prompt
            session = replace(session, system_prompt=system) if changed else session
            stored = self.store.branch(session_id).messages
            kept = _common_messages(stored, rest)
            new = rest[kept:]
            path = [*stored[:kept]]
            cause = "edit" if kept < len(stored) else None
            self._planner.plan(session, path, params, None, unsent=new)
            if changed:
                session = self.store.update(session_id, system_prompt=system)
            for message in new:
                parent_id = path[-1].id if path else None
                path.append(self.store.add_message(session_id, parent_id, message.role, message.content))
            plan = self._planner.plan(session, path, params, None)
            self._name_after(session, rest[0].content)
            return self._answer(session, path[-1], plan, cause, beams)

    def stop(self, session_id: str) -> bool:
        """Ask the running turn, if any, to end; False if nothing was running."""
        turn = self.running(session_id)
        if turn is None:
            return False
        turn.cancel()
        return True

    def running(self, session_id: str) -> Turn | None:
        with self._lock:
            return self._turns.get(session_id)

    # -- acts on the tree -------------------------------------------------------------------------------------------

    def undo(self, session_id: str, message_id: str | None = None) -> str:
        """Take the last user message (or the given one) and what follows it off the branch; its text."""
        with self._claim(session_id) as session:
            user = self._user_message_of(session_id, message_id or session.head_id)
            self.store.set_head(session_id, user.parent_id)
            self._causes[session_id] = "undo"
            return user.content

    def edit_reply(self, session_id: str, message_id: str, content: str) -> Message:
        """Put another text in the place of a reply, as its sibling; nothing is generated."""
        _check_content(content)
        with self._claim(session_id):
            old = self._message(session_id, message_id)
            if old.role != "assistant":
                raise InvalidRequest("Only a reply can be replaced by a text of one's own.")
            self._causes[session_id] = "edit"
            return self.store.add_message(session_id, old.parent_id, "assistant", content)

    def delete_message(self, session_id: str, message_id: str) -> None:
        """Delete a message and everything below it."""
        with self._claim(session_id):
            self._message(session_id, message_id)
            self.store.delete_message(message_id)
            self._causes[session_id] = "delete"

    def select_branch(self, session_id: str, message_id: str) -> None:
        """Show the branch that runs through this message, down to its newest leaf."""
        with self._claim(session_id):
            self._message(session_id, message_id)
            self.store.set_head(session_id, self.store.leaf_below(message_id))
            self._causes[session_id] = "branch"

    # -- sessions ---------------------------------------------------------------------------------------------------

    def fork(self, session_id: str, message_id: str | None = None) -> Session:
        """A new session with the branch up to a message (default: all of it); it shares what is cached of that."""
        with self._claim(session_id):
            if message_id is not None:
                self._message(session_id, message_id)
            twin = self.store.copy_branch(session_id, message_id)
            if self.engine.status() == "ok":
                # The cache may hold more than the branch has, or something else: acts on the tree do not touch it.
                history = self._planner.history(twin, self.store.branch(twin.id).messages)
                self.engine.fork(session_id, twin.id, history)
            return twin

    def update_session(self, session_id: str, changes: Mapping[str, Any]) -> Session:
        """Change any of `title`, `system_prompt` and `params` (sampling settings, checked first)."""
        session = self._session(session_id)
        unknown = set(changes) - {"title", "system_prompt", "params"}
        if unknown:
            raise InvalidRequest(f"A session has no setting named {sorted(unknown)[0]!r}.")
        if "params" in changes:
            parse_params(changes["params"])
        if changes.get("system_prompt", session.system_prompt) != session.system_prompt:
            _check_length(changes["system_prompt"])
            self._causes[session_id] = "system_prompt"
        return self.store.update(session_id, **changes)

    def delete_session(self, session_id: str) -> None:
        """Stop its turn, delete it, and free its cache."""
        self._session(session_id)
        turn = self.running(session_id)
        if turn is not None:
            turn.cancel()
            turn.wait(2**62, timeout_s=10)
        with self._claim(session_id):
            self.store.delete(session_id)
        self.engine.release(session_id)

    def forget_orphans(self) -> None:
        """Have the engine drop what it keeps on disk of sessions that were deleted while it could not be told."""
        for session_id in self.engine.stored_sessions():
            try:
                self.store.get(session_id)
            except NotStored:
                self.engine.release(session_id)

    def preview(self, session_id: str, content: str) -> PromptPreview:
        """What sending `content` now would cost. Raises `ContextOverflow` if it can't fit."""
        session = self._session(session_id)
        plan = self._planner.plan(session, self.store.branch(session_id).messages, None, content)
        ids = plan.fitted.prompt.token_ids
        reused = self.engine.cached_prefix(session_id, ids)
        return PromptPreview(len(ids), reused, self._planner.context_limit, plan.dropped)

    def compare_precision(self, session_id: str, count: int, kv_format: str | None) -> dict[str, Any]:
        """What a KV format (None: the cache's own) costs the current branch, compared with float32."""
        session = self._session(session_id)
        history = self._planner.history(session, self.store.branch(session_id).messages)
        return self.engine.compare_precision(PrecisionQuery(history, count, kv_format))

    def prompt_of(self, reply: Message) -> tuple[int, ...]:
        """Ids of the prompt that a stored reply answered, as it is rendered now.

        Raises `ContextOverflow` and `NotFound` where it can't be any more.
        """
        session = self._session(reply.session_id)
        path = self._path_to(reply.session_id, reply.parent_id)
        return self._planner.plan(session, path, parse_params(_max_tokens(reply.params)), None).fitted.prompt.token_ids

    def misses(self, session_id: str) -> list[dict[str, Any]]:
        """Why cached tokens were dropped in the session's turns, newest first (`ui.price.miss_cards`)."""
        return miss_cards(self.store.turns(self._session(session_id).id))

    def price(
        self, session_id: str, action: str, message_id: str | None = None, content: str | None = None
    ) -> dict[str, Any]:
        """What an act would have to compute if it were done now, and how long that takes; nothing is changed.

        An edit is priced with the text it brings (default: the old one), an undo and a fork by what the next prompt
        finds. Raises `InvalidRequest`, `NotFound` and `ContextOverflow` as the act itself would.
        """
        session = self._session(session_id)
        turns = self.store.turns(session_id)
        if action not in ACTIONS:
            raise InvalidRequest(f"action must be one of {', '.join(ACTIONS)}.")
        if action == "kv_format":
            branch = self.store.branch(session_id).messages
            return price(action, len(self._planner.history(session, branch)), 0, turns)
        ids = self._ids_after(session, action, message_id, content)
        reused = self.engine.cached_prefix(session_id, ids) if ids else 0
        if action in ("undo", "fork"):  # no prompt yet: its last token counts once there is one
            reused += reused == len(ids) - 1
        return price(action, len(ids), reused, turns)

    def close(self) -> None:
        """End every running turn and wait until what they produced is stored."""
        with self._lock:
            turns = list(self._turns.values())
        for turn in turns:
            turn.cancel()
        for turn in turns:
            turn.wait(2**62, timeout_s=10)

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _ids_after(self, session: Session, action: str, message_id: str | None, content: str | None) -> tuple[int, ...]:
        """The prompt that an act leads to, or what it leaves of the history."""
        if action == "fork":
            path = self._path_to(session.id, message_id or session.head_id)
            return self._planner.history(session, path)
        if action == "send":
            _check_content(content or "")
            path = self.store.branch(session.id).messages
            return self._planner.plan(session, path, None, content).fitted.prompt.token_ids
        user = self._user_message_of(session.id, message_id or session.head_id)
        before = self._path_to(session.id, user.parent_id)
        if action == "undo":
            return self._planner.history(session, before)
        text = user.content if content is None or action == "regenerate" else content
        return self._planner.plan(session, before, None, text).fitted.prompt.token_ids

    @contextmanager
    def _claim(self, session_id: str) -> Iterator[Session]:
        """One act at a time per session; a running turn counts as one until its reply is stored."""
        session = self._session(session_id)
        with self._lock:
            if session_id in self._claimed or session_id in self._turns:
                raise Conflict("This session is still answering; wait for the reply or stop it first.")
            self._claimed.add(session_id)
        try:
            yield session
        finally:
            with self._lock:
                self._claimed.discard(session_id)

    def _answer(
        self, session: Session, user: Message, plan: PromptPlan, cause: str | None, beams: BeamParams | None = None
    ) -> Turn:
        params = plan.params if plan.params.seed is not None else replace(plan.params, seed=fresh_seed())
        # Settings and seed are all the random state there is: with them the reply can be made again.
        reply = self.store.add_message(
            session.id,
            user.id,
            "assistant",
            "",
            status=PARTIAL,
            params=asdict(params),
            model=self._planner.model_name,
        )
        self._remember_first_kept(session, plan, user)
        prompt_ids = plan.fitted.prompt.token_ids
        last_turn = next(reversed(self.store.turns(session.id)), None)
        request = GenerateRequest(
            prompt_ids=prompt_ids,
            params=params,
            session_id=session.id,
            cause=self._cause(session.id, cause, last_turn, plan),
            stored_cache_pos=_cached_then(last_turn),
            beams=beams or BeamParams(),
            before=(plan.rendered, TimedSpan("store", plan.rendered.end, time.perf_counter())),
        )
        limit = effective_max_tokens(len(prompt_ids), self._planner.context_limit, plan.params.max_tokens)
        turn = Turn(request.request_id, session.id, user.id, reply.id, plan.dropped, limit)
        # Before the engine has it, which may take seconds where a cache has to be made or read first.
        with self._lock:
            self._turns[session.id] = turn
        try:
            stream = self.engine.generate(request)
        except KVScopeError as error:
            self.store.update_message(reply.id, status=FAILED, finish_reason="error", error=str(error))
            self._turn_over(session.id)
            turn.close(error)
            raise
        made_by = self._planner.made_by(request, reply.id)
        record(self.store, turn, stream, made_by, lambda: self._turn_over(session.id))
        return turn

    def _cause(self, session_id: str, act: str | None, last_turn: TurnRecord | None, plan: PromptPlan) -> str | None:
        """The caller's word for what became of the history since the last turn, should the cache miss."""
        earlier_act = self._causes.pop(session_id, None)
        if last_turn is not None and last_turn.model != self._planner.model_name:
            return "model"
        return act or earlier_act or ("context_full" if plan.fitted.dropped else None)

    def _turn_over(self, session_id: str) -> None:
        with self._lock:
            self._turns.pop(session_id, None)

    def _remember_first_kept(self, session: Session, plan: PromptPlan, user: Message) -> None:
        """So that the next prompts begin at the same message; it may be the one being sent, not stored when planned."""
        if plan.fitted.dropped:
            first_kept_id = plan.message_ids[plan.fitted.first_kept] or user.id
            if first_kept_id != session.first_kept_id:
                self.store.update(session.id, first_kept_id=first_kept_id)

    def _name_after(self, session: Session, content: str) -> None:
        """An unnamed session takes the beginning of its first message as its title."""
        if session.head_id is None and session.title == DEFAULT_TITLE:
            title = " ".join(content.split())[:60]
            self.store.update(session.id, title=title)

    def _session(self, session_id: str) -> Session:
        try:
            uuid.UUID(session_id)
        except (ValueError, AttributeError, TypeError):
            raise InvalidRequest("A session id must be a UUID.") from None
        try:
            return self.store.get(session_id)
        except NotStored:
            raise NotFound("There is no session with this id.") from None

    def _message(self, session_id: str, message_id: str) -> Message:
        try:
            message = self.store.message(message_id)
        except NotStored:
            message = None
        if message is None or message.session_id != session_id:
            raise NotFound("There is no message with this id in this session.")
        return message

    def _path_to(self, session_id: str, message_id: str | None) -> list[Message]:
        path: list[Message] = []
        while message_id is not None:
            message = self._message(session_id, message_id)
            path.append(message)
            message_id = message.parent_id
        return path[::-1]

    def _user_message_of(self, session_id: str, message_id: str | None) -> Message:
        """The user message itself, or the one that a reply answers."""
        while message_id is not None:
            message = self._message(session_id, message_id)
            if message.role == "user":
                return message
            message_id = message.parent_id
        raise InvalidRequest("There is no user message to answer.")


def _cached_then(last_turn: TurnRecord | None) -> int:
    """Tokens in the cache after the last turn; an imported chat may carry any numbers, or none."""
    count = last_turn.stats.get("cache_pos") if last_turn is not None else None
    return count if isinstance(count, int) and count > 0 else 0


def _max_tokens(params: Mapping[str, Any]) -> dict[str, Any]:
    """The one setting that a prompt's length depends on: how much room the reply was given."""
    value = params.get("max_tokens")
    return {"max_tokens": value} if type(value) is int and value > 0 else {}


def _check_content(content: str) -> None:
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest("The message is empty.")
    _check_length(content)


def _check_length(content: str) -> None:
    if len(content) >= MAX_MESSAGE_CHARS:
        raise InvalidRequest(f"The message has {len(content)} characters; the most is {MAX_MESSAGE_CHARS - 1}.")


def _split_system(messages: Sequence[ChatMessage]) -> tuple[str | None, list[ChatMessage]]:
    if messages[0].role == "system":
        return messages[0].content, list(messages[1:])
    return None, list(messages)


def _common_messages(stored: Sequence[Message], given: Sequence[ChatMessage]) -> int:
    count = 0
    for old, new in zip(stored, given, strict=False):
        if (old.role, old.content) != (new.role, new.content):
            break
        count += 1
    return count
