"""A fork's cache holds what its own branch has, whatever the original's cache still holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.chats import TinyChat, finished, tiny_chat

Act = Callable[[TinyChat, str], str | None]
"""Does something to a session; the message to fork at, None for the head."""


@pytest.fixture
def chat(tmp_path):
    with tiny_chat(tmp_path) as opened:
        yield opened


def undo_everything(chat: TinyChat, session: str) -> None:
    chat.service.undo(session, chat.store.branch(session).messages[0].id)


def undo_the_last_turn(chat: TinyChat, session: str) -> None:
    chat.service.undo(session)


def fork_at_the_first_reply(chat: TinyChat, session: str) -> str:
    return chat.store.branch(session).messages[1].id


def fork_at_a_question(chat: TinyChat, session: str) -> str:
    return chat.store.branch(session).messages[2].id


def delete_the_last_reply(chat: TinyChat, session: str) -> None:
    chat.service.delete_message(session, chat.store.branch(session).messages[-1].id)


def replace_the_last_reply(chat: TinyChat, session: str) -> None:
    chat.service.edit_reply(session, chat.store.branch(session).messages[-1].id, "My own words.")


def go_back_to_another_branch(chat: TinyChat, session: str) -> None:
    first = chat.store.branch(session).messages[-1].id
    chat.engine.script.append(chat.ids("Something else.<|im_end|>"))
    finished(chat.service.regenerate(session))
    chat.service.select_branch(session, first)


def change_the_system_prompt(chat: TinyChat, session: str) -> None:
    chat.service.update_session(session, {"system_prompt": "Be a pirate."})


ACTS = [
    undo_everything, undo_the_last_turn, fork_at_the_first_reply, fork_at_a_question, delete_the_last_reply,
    replace_the_last_reply, go_back_to_another_branch, change_the_system_prompt,
]  # fmt: skip


@pytest.mark.parametrize("system_prompt", ["Be brief.", ""])
@pytest.mark.parametrize("act", ACTS)
def test_the_cache_of_a_fork_is_that_of_its_branch(chat, act: Act, system_prompt):
    """A fork after an undo showed the undone tokens in its cache, and a fork at an earlier message showed none."""
    session = chat.store.create(system_prompt=system_prompt).id
    chat.say(session, "One?", "First answer.<|im_end|>")
    chat.say(session, "Two?", "Second answer.<|im_end|>")
    message_id = act(chat, session)
    held = chat.engine.inspect(session)["token_ids"]
    fork = chat.service.fork(session, message_id)
    report = chat.engine.inspect(fork.id)
    cached = report["token_ids"]
    assert all(report["invariants"].values()) and report["cache_pos"] == len(cached)

    messages = chat.store.branch(fork.id).messages
    if not messages:
        assert len(cached) < len(held) and "One?" not in text_of(chat, cached)
        return
    chat.engine.script.append(chat.ids("Well.<|im_end|>"))
    asked = messages[-1].role == "user"
    turn = chat.service.regenerate(fork.id) if asked else chat.service.send(fork.id, "And then?")
    stats = finished(turn).stats
    prompt = list(chat.engine.requests[-1].prompt_ids)
    assert cached == prompt[: len(cached)], "a fork never holds what its branch lacks"
    assert stats.reused_tokens >= min(len(cached), len(prompt) - 1)
    assert ("One?" in text_of(chat, cached)) == (act is not change_the_system_prompt)


def test_a_fork_of_an_untouched_session_has_all_of_its_cache(chat):
    session = chat.store.create().id
    chat.say(session, "One?", "First answer.<|im_end|>")
    held = chat.engine.inspect(session)["token_ids"]
    assert chat.engine.inspect(chat.service.fork(session).id)["token_ids"] == held


def text_of(chat: TinyChat, token_ids: list[int]) -> str:
    return "".join(chat.engine.tokenizer.token_text(token_id) for token_id in token_ids)
