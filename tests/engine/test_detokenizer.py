"""Text as it streams: never half a character, never part of a stop string, joined exactly what the ids decode to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer import ChatTokenizer
from engine.tokenizer.detokenizer import Detokenizer
from tests.support import tiny_tokenizer as tiny

HARD = "A 世界 e\u0301 👩‍👩‍👧‍👦 🇫🇷 end"
BUILDS = {
    "bytes": tiny.byte_level,
    "merged": tiny.merged_byte_level,
    "spm": tiny.sentencepiece_like,
    "spm-legacy": lambda: tiny.sentencepiece_like(legacy=True),
}


@pytest.fixture(params=BUILDS, scope="module")
def tokenizer(request) -> ChatTokenizer:
    return ChatTokenizer(BUILDS[request.param](), template="plain")


def stream(tokenizer: ChatTokenizer, ids, stop=()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped is not None:
            break
    pieces.append(detokenizer.finish())
    return pieces, detokenizer


def test_characters_split_over_tokens_are_sent_once_and_whole(tokenizer):
    """Streaming showed replacement marks, or a character twice, where its bytes were different tokens."""
    ids = tokenizer.encode(HARD)
    pieces, detokenizer = stream(tokenizer, ids)
    assert "".join(pieces) == detokenizer.text == tokenizer.decode(ids) == HARD
    assert all("\ufffd" not in piece for piece in pieces)
    assert detokenizer.final_ids() == tuple(ids)


def test_a_cut_anywhere_ends_before_the_character_that_is_not_complete(tokenizer):
    ids = tokenizer.encode(HARD)
    for count in range(len(ids) + 1):
        pieces, detokenizer = stream(tokenizer, ids[:count])
        text = "".join(pieces)
        assert text == detokenizer.text == tokenizer.decode(ids[:count])
        assert HARD.startswith(text) and "\ufffd" not in text
        assert tokenizer.decode(detokenizer.final_ids()) == text
        assert text.encode().decode() == text


@settings(max_examples=200)
@given(data=st.data())
def test_any_ids_stream_to_what_they_decode_to(tokenizer, data):
    """Also bytes that are no text at all: they may show as U+FFFD, but never hold up or swallow what follows."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    pieces, detokenizer = stream(tokenizer, ids)
    assert "".join(pieces) == detokenizer.text == tokenizer.decode(ids)
    later = tokenizer.encode_following("hello, it goes on")
    pieces, _ = stream(tokenizer, [*ids, *later])
    assert "".join(pieces).endswith("hello, it goes on")


@settings(max_examples=200)
@given(data=st.data())
def test_stop_strings_cut_the_text_whatever_the_tokens(tokenizer, data):
    text = data.draw(st.text(alphabet="ab世é ", min_size=1, max_size=25))
    stop = tuple(data.draw(st.lists(st.text(alphabet="ab世é ", min_size=1, max_size=4), min_size=1, max_size=3)))
    pieces, detokenizer = stream(tokenizer, tokenizer.encode_following(text), stop)
    whole = tokenizer.decode(tokenizer.encode_following(text))
    ends = [whole.find(s) + len(s) for s in stop if s in whole]
    if ends:
        assert detokenizer.stopped in stop
        assert detokenizer.text == whole[: min(ends)].removesuffix(detokenizer.stopped)
    else:
        assert detokenizer.text == whole
    assert "".join(pieces) == detokenizer.text
    assert not any(s in detokenizer.text for s in stop)
    assert tokenizer.decode(detokenizer.final_ids()) == detokenizer.text


def test_possible_beginning_of_a_stop_string_is_held_back_then_released():
    tokenizer = tiny.chat_tokenizer()
    detokenizer = Detokenizer(tokenizer, ("STOP",))
    assert [detokenizer.push(i) for i in tokenizer.encode("aSTx")] == ["a", "", "", "STx"]
    assert [detokenizer.push(i) for i in tokenizer.encode("STO")] == ["", "", ""]
    assert detokenizer.finish() == "STO"
    assert detokenizer.finish() == ""
    assert detokenizer.text == "aSTxSTO"


def test_stop_string_inside_a_token_leaves_the_rest_of_the_text_encoded():
    tokenizer = ChatTokenizer(tiny.merged_byte_level(), template="plain")
    ids = tokenizer.encode(" Hello there")
    assert len(ids) == 2
    _, detokenizer = stream(tokenizer, ids, ("er",))
    assert detokenizer.stopped == "er"
    assert detokenizer.text == " Hello th"
    final = detokenizer.final_ids()
    assert final[0] == ids[0] and tokenizer.decode(final) == " Hello th"
    assert detokenizer.push(ids[0]) == "" and detokenizer.text == " Hello th"


def test_token_that_ends_a_character_and_begins_another():
    merges = [("a", "\u00e4"), ("\u00b8", "\u0138")]
    tokenizer = ChatTokenizer(tiny.byte_level(merges=merges), template="plain")
    ids = tokenizer.encode("a世")
    assert len(ids) == 2
    _, detokenizer = stream(tokenizer, ids[:1])
    assert detokenizer.text == "a"
    assert tokenizer.decode(detokenizer.final_ids()) == "a"
    assert detokenizer.final_ids() != tuple(ids[:1])


def test_control_tokens_in_mid_reply_stay_in_the_ids_but_not_in_the_text():
    tokenizer = tiny.chat_tokenizer()
    ids = tokenizer.encode("a<|im_start|>b")
    pieces, detokenizer = stream(tokenizer, ids)
    assert pieces == ["a", "", "b", ""]
    assert detokenizer.final_ids() == tuple(ids)


def test_a_normaliser_does_not_change_the_rest_that_is_encoded_anew():
    """Qwen's tokenizers compose characters: the rest of a cut text must still be the text that was shown."""
    from tokenizers import normalizers

    reference = tiny.byte_level(merges=[("e", "\u00cc"), ("e\u00cc", "\u0123"), ("e\u00cc\u0123", "x")])
    composing = reference.backend_tokenizer
    ids = composing.encode("e\u0301x", add_special_tokens=False).ids
    composing.normalizer = normalizers.NFC()
    tokenizer = ChatTokenizer(reference, template="plain")
    _, detokenizer = stream(tokenizer, ids, ("x",))
    assert detokenizer.text == "e\u0301"
    assert tokenizer.decode(detokenizer.final_ids()) == "e\u0301"
