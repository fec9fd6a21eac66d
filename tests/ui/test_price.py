"""The price of an act before it is done is what it then costs; misses are kept with text, cause and time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.errors import InvalidRequest, NotFound
from engine.turns.miss import THINKING_STRIPPED
from sessions.models import TurnRecord
from tests.support.chats import TinyChat, finished, tiny_chat
from tests.support.tiny_tokenizer import QWEN3
from ui.price import miss_cards, prefill_speed, price

QUESTIONS = ("How deep is the sea between two islands?", "And how wide is it?", "Who measured that?")


@pytest.fixture
def chat(tmp_path) -> Iterator[TinyChat]:
    with tiny_chat(tmp_path) as opened:
        yield opened


@pytest.fixture
def session_id(chat: TinyChat) -> str:
    session = chat.store.create()
    for question in QUESTIONS:
        chat.say(session.id, question, "It is a good question.<|im_end|>")
    return str(session.id)


def users(chat: TinyChat, session_id: str) -> list[str]:
    return [message.id for message in chat.store.branch(session_id).messages if message.role == "user"]


def test_an_edit_costs_what_was_told_before(chat, session_id):
    told = chat.service.prices.price(session_id, "edit", users(chat, session_id)[1], "And how broad is it?")
    assert told["tokens"] == told["prompt_tokens"] - told["reused_tokens"] > 0
    assert told["seconds"] == pytest.approx(told["tokens"] / told["tokens_per_s"], rel=0.05, abs=1e-3)
    chat.engine.script.append(chat.ids("Yes.<|im_end|>"))
    done = finished(chat.service.edit(session_id, users(chat, session_id)[1], "And how broad is it?"))
    assert (done.stats.computed_tokens, done.stats.reused_tokens) == (told["tokens"], told["reused_tokens"])


def test_another_answer_costs_what_was_told_before(chat, session_id):
    told = chat.service.prices.price(session_id, "regenerate")
    chat.engine.script.append(chat.ids("No.<|im_end|>"))
    done = finished(chat.service.regenerate(session_id))
    assert done.stats.computed_tokens == told["tokens"] < told["prompt_tokens"] / 2


def test_taking_back_and_branching_are_all_but_free_and_another_format_is_not(chat, session_id):
    held = chat.engine.inspect(session_id)["cache_pos"]
    assert chat.service.prices.price(session_id, "undo")["tokens"] == 0
    assert chat.service.prices.price(session_id, "fork")["tokens"] < 8
    told = chat.service.prices.price(session_id, "kv_format")
    assert told["reused_tokens"] == 0 and told["tokens"] >= held
    assert chat.service.prices.price(session_id, "send", content="More?")["tokens"] < held / 2


def test_prices_are_refused_like_the_acts(chat, session_id):
    for action, content in (("dance", None), ("send", None), ("send", " ")):
        with pytest.raises(InvalidRequest):
            chat.service.prices.price(session_id, action, None, content)
    with pytest.raises(NotFound):
        chat.service.prices.price(session_id, "edit", session_id)


def test_an_edit_leaves_a_card_with_both_texts_and_the_time(chat, session_id):
    assert chat.service.prices.misses(session_id) == []
    chat.engine.script.append(chat.ids("Yes.<|im_end|>"))
    turn = chat.service.edit(session_id, users(chat, session_id)[1], "And how broad is it?")
    view = finished(turn)
    [card] = chat.service.prices.misses(session_id)
    assert (card["cause"], card["message_id"]) == ("edit", turn.message_id)
    assert card["text_before"].endswith("And how ") and card["text_cached"].startswith("wide")
    assert card["text_wanted"].startswith("broad")
    per_token = view.stats.prefill_ms / view.stats.computed_tokens
    assert card["ms_lost"] == pytest.approx(per_token * card["tokens_lost"], rel=0.01) and card["ms_lost"] > 0


def test_stripped_thinking_is_told_as_such(tmp_path):
    with tiny_chat(tmp_path, template=QWEN3) as chat:
        session = chat.store.create()
        chat.say(session.id, "Capital?", "<think>\nhm, France\n</think>\n\nParis is.<|im_end|>")
        view = chat.say(session.id, "Sure?", "Yes.<|im_end|>")
        assert view.stats.miss.cause == "template" and view.stats.miss.detail == THINKING_STRIPPED


THOUGHT = "<think>\nThe person asks for a capital, and France has one.\n</think>\n\n"


@pytest.fixture
def thinker(chat: TinyChat) -> str:
    """A session whose template keeps what its two replies thought."""
    session = chat.store.create()
    for question, answer in (("Capital?", "Paris is."), ("Sure?", "Yes, it is.")):
        chat.say(session.id, question, f"{THOUGHT}{answer}<|im_end|>")
    assert chat.prompt_text().count("<think>") == 1
    return str(session.id)


def test_leaving_thoughts_out_costs_what_was_told_before(chat, thinker):
    price_of = chat.service.prices.price
    keep, strip = price_of(thinker, "keep_thoughts"), price_of(thinker, "strip_thoughts")
    assert keep["tokens"] == 0 and strip["tokens"] > 0 and strip["seconds"] is not None
    saved = keep["prompt_tokens"] - strip["prompt_tokens"]
    assert saved >= 2 * len(chat.ids(THOUGHT.strip()))
    told = price_of(thinker, "send", content="And Spain?")
    chat.service.update_session(thinker, {"params": {"strip_thoughts": True}})
    assert price_of(thinker, "strip_thoughts") == strip
    view = chat.say_with_own_settings(thinker, "And Spain?", "Madrid.<|im_end|>")
    assert "<think>" not in chat.prompt_text() and "Paris is." in chat.prompt_text()
    sent = told["prompt_tokens"] - keep["prompt_tokens"]  # the question's own tokens
    assert view.stats.computed_tokens == strip["tokens"] + sent
    assert view.stats.prompt_tokens == told["prompt_tokens"] - saved
    assert view.stats.miss.cause == "thoughts" and "<think>" in view.stats.miss.text_cached
    assert price_of(thinker, "keep_thoughts")["tokens"] > 0 == price_of(thinker, "strip_thoughts")["tokens"]


def test_an_answer_without_its_thoughts_keeps_the_ids_that_the_model_gave_it(chat, thinker):
    chat.service.update_session(thinker, {"params": {"strip_thoughts": True}})
    answer = chat.store.branch(thinker).messages[1]
    turn = chat.service.send(thinker, "And Spain?")
    finished(turn)
    ids, wanted = answer.token_ids, chat.engine.requests[-1].prompt_ids
    tail = ids[-len(chat.ids("Paris is.")) :]
    assert tail in [wanted[i : i + len(tail)] for i in range(len(wanted))]
    chat.assert_cache_is_history(turn)
    reply = chat.store.branch(thinker).messages[-1]
    assert reply.params["strip_thoughts"] is True and chat.service.prompt_of(reply) == wanted


def record(number: int, **stats: object) -> TurnRecord:
    return TurnRecord(str(number), "s", f"m{number}", "tiny", dict(stats), "now")


def test_what_an_imported_chat_says_of_itself_is_not_trusted():
    odd = [record(0), record(1, computed_tokens="many", prefill_ms=3, miss="lost"), record(2, computed_tokens=True)]
    assert prefill_speed(odd) is None and miss_cards(odd) == []
    assert price("edit", 100, 40, odd) == {
        "action": "edit", "prompt_tokens": 100, "reused_tokens": 40, "tokens": 60, "seconds": None,
        "tokens_per_s": None,
    }  # fmt: skip
    assert price("edit", 100, 40, [record(3, computed_tokens=30, prefill_ms=1500.0)])["seconds"] == 3.0


def test_the_last_fifty_misses_are_told_newest_first():
    cards = miss_cards([record(i, miss={"cause": "edit", "position": i}) for i in range(60)])
    assert [card["position"] for card in cards] == list(range(59, 9, -1)) and cards[0]["message_id"] == "m59"
