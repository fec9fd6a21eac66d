"""The conversation: what a person's act does to the stored messages, the prompt and the running turn.

Page and HTTP routes both come through here. The engine's cache is never told what changed: every prompt is compared
with it from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.debugging.protocol import PrecisionQuery
from engine.errors import InvalidRequest
from engine.local import LocalEngine
from engine.protocol import ChatMessage
from engine.sampling.beam import BeamParams
from engine.sampling.params import SamplingParams
from sessions.errors import NotStored
from sessions.models import DEFAULT_TITLE, Message, Session
from sessions.store import SessionStore
from ui.api.params import parse_params
from ui.checks import check_content, check_length
from ui.lookup import Lookup
from ui.price import Prices
from ui.prompt_plan import PromptPlanner
from ui.running_turns import RunningTurns
from ui.turn import Turn


class ChatService:
    """Acts on stored conversations; at most one turn per session. Thread-safe."""

    def __init__(self, store: SessionStore, engine: LocalEngine) -> None:
        self.store = store
        self.engine = engine
        self._planner = PromptPlanner(engine)
        self._lookup = Lookup(store)
        self._turns = RunningTurns(store, engine, self._planner, self._lookup)
        self.prices = Prices(store, engine, self._planner, self._lookup)
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
        check_content(content)
        with self._turns.claim(session_id) as session:
            branch = self.store.branch(session_id)
            plan = self._planner.plan(session, branch.messages, params, content)
            user = self.store.add_message(session_id, session.head_id, "user", content)
            self._name_after(session, content)
            return self._turns.answer(session, user, plan, None)

    def edit(self, session_id: str, message_id: str, content: str, params: SamplingParams | None = None) -> Turn:
        """Answer another version of a user message; the old one and what followed it stay as a sibling branch."""
        check_content(content)
        with self._turns.claim(session_id) as session:
            old = self._lookup.message(session_id, message_id)
            if old.role != "user":
                raise InvalidRequest("Only a user message can be edited and answered anew.")
            plan = self._planner.plan(session, self._lookup.path_to(session_id, old.parent_id), params, content)
            user = self.store.add_message(session_id, old.parent_id, "user", content)
            return self._turns.answer(session, user, plan, "edit")

    def regenerate(self, session_id: str, message_id: str | None = None, params: SamplingParams | None = None) -> Turn:
        """Another reply to the same user message, as a sibling of the old one. Default: the last reply."""
        with self._turns.claim(session_id) as session:
            user = self._lookup.user_message_of(session_id, message_id or session.head_id)
            plan = self._planner.plan(session, self._lookup.path_to(session_id, user.id), params, None)
            return self._turns.answer(session, user, plan, "regenerate")

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
            check_length(message.content)
        check_content(messages[-1].content)
        with self._turns.claim(session_id) as session:
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
            return self._turns.answer(session, path[-1], plan, cause, beams)

    def stop(self, session_id: str) -> bool:
        """Ask the running turn, if any, to end; False if nothing was running."""
        turn = self.running(session_id)
        if turn is None:
            return False
        turn.cancel()
        return True

    def running(self, session_id: str) -> Turn | None:
        return self._turns.find(session_id)

    def acting(self, session_id: str) -> bool:
        """Whether an act of the session has begun that may yet become a turn."""
        return self._turns.claimed(session_id)

    def close(self) -> None:
        """End every running turn and wait until what they produced is stored."""
        self._turns.close()

    # -- acts on the tree -------------------------------------------------------------------------------------------

    def undo(self, session_id: str, message_id: str | None = None) -> str:
        """Take the last user message (or the given one) and what follows it off the branch; its text."""
        with self._turns.claim(session_id) as session:
            user = self._lookup.user_message_of(session_id, message_id or session.head_id)
            self.store.set_head(session_id, user.parent_id)
            self._turns.note(session_id, "undo")
            return user.content

    def edit_reply(self, session_id: str, message_id: str, content: str) -> Message:
        """Put another text in the place of a reply, as its sibling; nothing is generated."""
        check_content(content)
        with self._turns.claim(session_id):
            old = self._lookup.message(session_id, message_id)
            if old.role != "assistant":
                raise InvalidRequest("Only a reply can be replaced by a text of one's own.")
            self._turns.note(session_id, "edit")
            return self.store.add_message(session_id, old.parent_id, "assistant", content)

    def delete_message(self, session_id: str, message_id: str) -> None:
        """Delete a message and everything below it."""
        with self._turns.claim(session_id):
            self._lookup.message(session_id, message_id)
            self.store.delete_message(message_id)
            self._turns.note(session_id, "delete")

    def select_branch(self, session_id: str, message_id: str) -> None:
        """Show the branch that runs through this message, down to its newest leaf."""
        with self._turns.claim(session_id):
            self._lookup.message(session_id, message_id)
            self.store.set_head(session_id, self.store.leaf_below(message_id))
            self._turns.note(session_id, "branch")

    # -- sessions ---------------------------------------------------------------------------------------------------

    def fork(self, session_id: str, message_id: str | None = None) -> Session:
        """A new session with the branch up to a message (default: all of it); it shares what is cached of that."""
        with self._turns.claim(session_id):
            if message_id is not None:
                self._lookup.message(session_id, message_id)
            twin = self.store.copy_branch(session_id, message_id)
            if self.engine.status() == "ok":
                # The cache may hold more than the branch has, or something else: acts on the tree do not touch it.
                history = self._planner.history(twin, self.store.branch(twin.id).messages)
                self.engine.fork(session_id, twin.id, history)
            return twin

    def update_session(self, session_id: str, changes: Mapping[str, Any]) -> Session:
        """Change any of `title`, `system_prompt` and `params` (sampling settings, checked first)."""
        session = self._lookup.session(session_id)
        unknown = set(changes) - {"title", "system_prompt", "params"}
        if unknown:
            raise InvalidRequest(f"A session has no setting named {sorted(unknown)[0]!r}.")
        if "params" in changes:
            wanted = parse_params(changes["params"])
            if wanted.strip_thoughts != bool(session.params.get("strip_thoughts")):
                self._turns.note(session_id, "thoughts")
        if changes.get("system_prompt", session.system_prompt) != session.system_prompt:
            check_length(changes["system_prompt"])
            self._turns.note(session_id, "system_prompt")
        return self.store.update(session_id, **changes)

    def delete_session(self, session_id: str) -> None:
        """Stop its turn, delete it, and free its cache."""
        self._lookup.session(session_id)
        turn = self.running(session_id)
        if turn is not None:
            turn.cancel()
            turn.wait(2**62, timeout_s=10)
        with self._turns.claim(session_id):
            self.store.delete(session_id)
        self.engine.release(session_id)

    def forget_orphans(self) -> None:
        """Have the engine drop what it keeps on disk of sessions that were deleted while it could not be told."""
        for session_id in self.engine.stored_sessions():
            try:
                self.store.get(session_id)
            except NotStored:
                self.engine.release(session_id)

    def compare_precision(self, session_id: str, count: int, kv_format: str | None) -> dict[str, Any]:
        """What a KV format (None: the cache's own) costs the current branch, compared with float32."""
        session = self._lookup.session(session_id)
        history = self._planner.history(session, self.store.branch(session_id).messages)
        return self.engine.compare_precision(PrecisionQuery(history, count, kv_format))

    def prompt_of(self, reply: Message) -> tuple[int, ...]:
        """Ids of the prompt that a stored reply answered, as it is rendered now.

        Raises `ContextOverflow` and `NotFound` where it can't be any more.
        """
        session = self._lookup.session(reply.session_id)
        path = self._lookup.path_to(reply.session_id, reply.parent_id)
        return self._planner.plan(session, path, parse_params(_shaping(reply.params)), None).fitted.prompt.token_ids

    def _name_after(self, session: Session, content: str) -> None:
        """An unnamed session takes the beginning of its first message as its title."""
        if session.head_id is None and session.title == DEFAULT_TITLE:
            title = " ".join(content.split())[:60]
            self.store.update(session.id, title=title)


def _shaping(params: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a prompt depends on: how much room the reply was given, and whether it had earlier thoughts."""
    room, strip = params.get("max_tokens"), params.get("strip_thoughts")
    found: dict[str, Any] = {"max_tokens": room} if type(room) is int and room > 0 else {}
    return found | ({"strip_thoughts": strip} if isinstance(strip, bool) else {})


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
