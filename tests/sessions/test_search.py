from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.models import PARTIAL, SessionSummary
from sessions.search import MAX_QUERY, snippet
from sessions.store import SessionStore
from tests.support.session_store import check_integrity

ANYTHING = st.text(st.characters(), max_size=60)
SYNTAX = st.lists(
    st.sampled_from(
        [
            '"',
            "'",
            "*",
            "(",
            ")",
            "AND",
            "OR",
            "NOT",
            "NEAR",
            ":",
            "^",
            "-",
            "+",
            "%",
            "_",
            "\\",
            "\0",
            "ab",
            "content",
            " ",
        ]
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionStore]:
    store = SessionStore(tmp_path_factory.mktemp("search") / "s.db")
    yield store
    store.close()


def titles(found: list[SessionSummary]) -> list[str]:
    return [item.title for item in found]


def test_the_list_is_newest_change_first(path: Path) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    store = SessionStore(path, clock=lambda: now)
    old, new = store.create("old"), store.create("new")
    assert titles(store.list()) == ["new", "old"], "equal times: the later one first"
    now += timedelta(seconds=1)
    store.add_message(old.id, None, "user", "hello")
    assert titles(store.list()) == ["old", "new"]
    now += timedelta(seconds=1)
    store.update(new.id, title="newer")
    assert titles(store.list()) == ["newer", "old"]
    assert titles(store.list(limit=1)) == ["newer"]
    assert [item.message_count for item in store.list()] == [0, 1]
    store.close()


def test_words_substrings_and_other_scripts_are_found(store: SessionStore) -> None:
    session = store.create("Reise nach Köln")
    store.add_message(session.id, None, "user", "Wie wird das WETTER?\n50% Regen, C# und a_b: 世界你好")
    store.create("Other")
    for query in (
        "wetter",
        "ette",
        "  das   wetter ",
        "世界",
        "世",
        "界你好",
        "köln",
        "C#",
        "50%",
        "a_b",
        "%",
        "_b",
        "und wie",
        "reise",
        "wird\0das",
    ):
        assert titles(store.list(query)) == ["Reise nach Köln"], query
    for query in ("axb", "wetter schnee", "das xy", "weter", "51%", "b_a", "C\\"):
        assert store.list(query) == [], query


def test_every_branch_is_searched_and_each_session_found_once(store: SessionStore) -> None:
    session = store.create("one")
    first = store.add_message(session.id, None, "user", "apple pie")
    store.add_message(session.id, None, "user", "apple tart, edited")
    found = store.list("apple")
    assert titles(found) == ["one"] and found[0].snippet == "apple tart, edited"
    assert store.list("apple pie")[0].snippet == "apple pie"
    store.delete_message(first.id)
    assert store.list("pie") == []
    store.update(session.id, title="two cherries")
    assert store.list("one") == [] and titles(store.list("cherries")) == ["two cherries"]
    assert store.list("cherries")[0].snippet == "", "only the title matches"
    store.delete(session.id)
    assert store.list("apple") == [] and store.list("cherries") == []
    check_integrity(store)


def test_a_streaming_reply_is_found_once_it_is_complete(store: SessionStore) -> None:
    session = store.create()
    reply = store.add_message(session.id, None, "assistant", "", status=PARTIAL)
    store.update_message(reply.id, content="the answer is forty")
    store.update_message(reply.id, content="the answer is forty two", status="complete")
    assert len(store.list("forty two")) == 1
    store.update_message(reply.id, content="changed my mind")
    assert store.list("forty") == [] and len(store.list("my mind")) == 1
    store.update_message(reply.id, status=PARTIAL)
    store.update_message(reply.id, content="once more", status="failed")
    assert len(store.list("once more")) == 1
    check_integrity(store)


def test_snippets_show_the_hit_on_one_line() -> None:
    text = "a" * 500 + "\n\n needle \t in hay " + "b" * 500
    shown = snippet(text, ("needle",))
    assert shown.startswith("…a") and shown.endswith("b…") and " needle in hay " in shown and len(shown) < 130
    assert snippet("Short NEEDLE", ("needle",)) == "Short NEEDLE"
    assert snippet("", ("x",)) == ""


@pytest.mark.parametrize(
    "query",
    [
        '"',
        "*",
        "AND (",
        "NEAR(",
        "a" * 100_000,
        "x " * 5000,
        "''",
        "\0\0\0",
        "\ud800\ud800\ud800",
        "title:x",
        "-",
        "^abc",
        '"abc',
        "%%%",
        "\\",
    ],
)
def test_search_syntax_is_only_text(shared: SessionStore, query: str) -> None:
    """Found where its words are written and nowhere else; without a word it is no search."""
    words = storable(query)[:MAX_QUERY].split()
    written, other = shared.create(), shared.create()
    shared.add_message(written.id, None, "user", " and ".join(words))
    shared.add_message(other.id, None, "user", "63,7")
    found = {item.id for item in shared.list(query, limit=10**6)}
    assert written.id in found and (other.id in found) == (not words)
    for session in (written, other):
        shared.delete(session.id)


@settings(max_examples=150)
@given(query=ANYTHING | SYNTAX | SYNTAX.map(lambda text: text + "abc"))
def test_no_query_fails(shared: SessionStore, query: str) -> None:
    assert isinstance(shared.list(query), list)


def storable(text: str) -> str:
    """Without what no search text can hold: NUL and half characters."""
    return text.replace("\0", " ").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@settings(max_examples=100)
@given(text=(ANYTHING | SYNTAX).map(storable).filter(str.split), data=st.data())
def test_whatever_was_written_is_found_by_its_own_words(shared: SessionStore, text: str, data: st.DataObject) -> None:
    words = text.split()[:10]
    word = data.draw(st.sampled_from(words))
    start = data.draw(st.integers(0, len(word) - 1))
    end = data.draw(st.integers(start + 1, len(word)))
    session = shared.create()
    shared.add_message(session.id, None, "user", text)
    for query in (" ".join(words), word, word[start:end]):
        assert session.id in {item.id for item in shared.list(query, limit=10**6)}, query
    shared.delete(session.id)
