"""From a stored branch to a prompt that fits: which messages it is made of, and which had to leave."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from engine.errors import KVScopeError
from engine.local import LocalEngine
from engine.prompt import FittedPrompt, fit_prompt
from engine.protocol import ChatMessage, GenerateRequest, TimedSpan
from engine.sampling.params import SamplingParams, check_vocabulary
from sessions.models import Message, Session, TurnInput
from ui.api.params import parse_params
from ui.recorder import MadeBy
from ui.thoughts import without_thoughts

REPLY_SHARE = 4
"""While older turns can still leave the prompt, up to 1 / REPLY_SHARE of the context is kept free for the reply."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """A prompt that fits, the ids of the messages it was made of (None for the system prompt and unsent text), when it
    was rendered, and whether thoughts of earlier replies were left out."""

    fitted: FittedPrompt
    message_ids: tuple[str | None, ...]
    params: SamplingParams
    rendered: TimedSpan
    stripped: bool = False

    @property
    def dropped(self) -> tuple[str, ...]:
        ids = (self.message_ids[index] for index in self.fitted.dropped)
        return tuple(message_id for message_id in ids if message_id is not None)


class PromptPlanner:
    """Knows the loaded model's tokenizer, name and context."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    @property
    def model_name(self) -> str:
        return str(self._engine.capabilities()["model"])

    def made_by(self, request: GenerateRequest, message_id: str) -> MadeBy:
        """Of the reply `message_id` to a request that the engine has taken."""
        known = self._engine.capabilities()
        kv_format = str(request.params.kv_format or known["kv_format"])
        beams = asdict(request.beams) if request.beams.searches else {}
        fingerprint = self._engine.fingerprint(kv_format)
        return MadeBy(
            str(known["model"]), TurnInput(message_id, request.prompt_ids, kv_format, beams, dict(fingerprint))
        )

    @property
    def context_limit(self) -> int:
        return int(self._engine.capabilities()["max_seq_len"])

    def plan(
        self,
        session: Session,
        path: Sequence[Message],
        params: SamplingParams | None,
        content: str | None,
        unsent: Sequence[ChatMessage] = (),
    ) -> PromptPlan:
        """Render the branch `path`, then text that is not stored yet.

        Raises `ContextOverflow` if it can't fit and `InvalidRequest` for settings that the model can't follow: before
        anything is stored.
        """
        began = time.perf_counter()
        params = params or parse_params(session.params)
        check_vocabulary(params, int(self._engine.capabilities()["vocab_size"]))
        messages, message_ids = self._messages(session, path)
        messages += unsent
        if content is not None:
            messages.append(ChatMessage("user", content))
        message_ids += [None] * (len(messages) - len(message_ids))
        stored = messages
        if params.strip_thoughts:
            messages = [without_thoughts(message, self._engine.tokenizer) for message in stored]
        limit = self.context_limit
        reserve = min(params.max_tokens or limit, limit // REPLY_SHARE)
        # None in this list stands for text that is not stored yet, not for a session that has dropped nothing.
        kept_id = session.first_kept_id
        first_kept = message_ids.index(kept_id) if kept_id is not None and kept_id in message_ids else None
        date = datetime.fromisoformat(session.prompt_date)
        fitted = fit_prompt(self._engine.tokenizer, messages, date, limit, reserve, first_kept)
        rendered = TimedSpan("render", began, time.perf_counter())
        return PromptPlan(fitted, tuple(message_ids), params, rendered, stripped=messages != stored)

    def history(
        self, session: Session, path: Sequence[Message], params: SamplingParams | None = None
    ) -> tuple[int, ...]:
        """Ids of the branch `path` as its next prompt begins; none where there is nothing that could be rendered.

        `params`: other settings than the session's own.
        """
        if not path and not session.system_prompt:
            return ()
        try:
            return self.plan(session, path, params, None).fitted.prompt.token_ids
        except KVScopeError:
            return ()

    def _messages(self, session: Session, path: Sequence[Message]) -> tuple[list[ChatMessage], list[str | None]]:
        model = self.model_name
        messages: list[ChatMessage] = []
        message_ids: list[str | None] = []
        if session.system_prompt:
            messages.append(ChatMessage("system", session.system_prompt))
            message_ids.append(None)
        for message in path:
            # Ids of another model mean other text: they are only spliced where they were made.
            token_ids = message.token_ids if message.model == model else None
            messages.append(ChatMessage(message.role, message.content, token_ids))
            message_ids.append(message.id)
        return messages, message_ids
