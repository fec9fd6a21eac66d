"""Edits, branches and other answers: only what follows the change is computed, and it is computed right."""

from __future__ import annotations

import pytest

from tests.support.chats import BLOCK, GREEDY, SCRIPTED, finished, tiny_chat
from ui.turn import Turn

CLOSING = len("E\nSassistant\n")
"""Tokens that the template puts behind a question: a character each, E and S for its two control tokens."""


@pytest.fixture
def chat(tmp_path):
    with tiny_chat(tmp_path, context=2048) as opened:
        yield opened


def test_editing_the_second_message_recomputes_only_its_end_and_branching_back_gives_the_old_reply(chat):
    """C01: an edit of the first message was quick, but an edit of a later one recomputed the whole chat."""
    session = chat.store.create().id
    chat.say(session, "Some filler text. " * 44 + "Reply OK", "OK<|im_end|>")
    original = chat.send(session, "List three colours")
    prompt = chat.engine.requests[-1].prompt_ids
    shared = len(prompt) - CLOSING - len("colours")
    assert len(prompt) > 800
    for text in ("List three birds", "List three colours"):
        user_id = next(m.id for m in reversed(chat.store.branch(session).messages) if m.role == "user")
        turn = chat.service.edit(session, user_id, text, GREEDY)
        view = finished(turn)
        assert view.stats.reused_tokens >= shared - BLOCK
        assert view.stats.computed_tokens <= 60 + BLOCK
        assert (view.stats.miss.position, view.stats.miss.cause) == (shared, "edit")
        if text == "List three birds":
            assert (view.stats.miss.cached_token, view.stats.miss.wanted_token) == chat.ids("cb")
        else:
            assert view.token_ids == original.token_ids
        chat.assert_parity(turn)
        chat.assert_cache_is_history(turn)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_edit_anywhere_costs_what_follows_it(chat, place):
    """C01's neighbours: the reuse is right at the first, a middle and the last message alike."""
    session = chat.store.create(system_prompt="Be brief.").id
    for index in range(5):
        chat.say(session, f"Question number {index}, please answer it.")
    last = chat.engine.requests[-1].prompt_ids
    users = [m for m in chat.store.branch(session).messages if m.role == "user"]
    turn = chat.service.edit(session, users[place].id, users[place].content + " Really.", GREEDY)
    stats = finished(turn).stats
    edited = chat.engine.requests[-1].prompt_ids
    common = next(i for i in range(len(edited)) if edited[i] != last[i])
    assert common == len(edited) - len(" Really.") - CLOSING
    assert stats.reused_tokens == common
    chat.assert_parity(turn)
    chat.assert_cache_is_history(turn)


def branch_back_by_arrow(chat, session) -> Turn:
    replies = [m.id for m in chat.store.branch(session).messages if m.role == "assistant"]
    chat.service.select_branch(session, chat.store.siblings(replies[-1])[0])
    return chat.service.send(session, "Go on", GREEDY)


def undo_and_ask_again(chat, session) -> Turn:
    return chat.service.send(session, chat.service.undo(session), GREEDY)


def delete_and_ask_something_else(chat, session) -> Turn:
    chat.service.delete_message(session, chat.store.branch(session).messages[-2].id)
    return chat.service.send(session, "Something else", GREEDY)


def ask_a_fork(chat, session) -> Turn:
    return chat.service.send(chat.service.fork(session).id, "Go on", GREEDY)


@pytest.mark.parametrize("act", [branch_back_by_arrow, undo_and_ask_again, delete_and_ask_something_else, ask_a_fork])
def test_every_other_way_back_reuses_the_shared_part(chat, act):
    """C01's neighbours: arrows, undo, delete and fork recompute nothing of what stands before the change."""
    session = chat.store.create().id
    chat.say(session, "Some filler text. " * 20)
    chat.say(session, "List three colours", "Red, blue.<|im_end|>")
    before = (*chat.engine.requests[-1].prompt_ids, *chat.ids("Red, blue."))
    chat.engine.script.append(chat.ids("Green.<|im_end|>"))
    finished(chat.service.regenerate(session, params=SCRIPTED))
    turn = act(chat, session)
    stats = finished(turn).stats
    prompt = chat.engine.requests[-1].prompt_ids
    common = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before))
    assert stats.reused_tokens >= min(common, len(prompt) - 1) - BLOCK and common > 300
    assert stats.reused_tokens + stats.computed_tokens == len(prompt)
    chat.assert_parity(turn)
    chat.assert_cache_is_history(turn)


def test_the_price_told_beforehand_is_the_price_paid(chat):
    """C01: what the page says a message will cost is what it costs."""
    session = chat.store.create().id
    chat.say(session, "Some filler text. " * 20)
    told = chat.service.prices.preview(session, "And then?")
    stats = chat.say(session, "And then?").stats
    assert (told.prompt_tokens, told.reused_tokens) == (stats.prompt_tokens, stats.reused_tokens)
