from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions import inputs
from sessions.models import COMPLETE, INTERRUPTED, PARTIAL
from sessions.store import InvalidData, SessionStore
from tests.support.session_store import check_integrity, sample_session

UNKNOWN = str(uuid.uuid4())
Data = dict[str, Any]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[SessionStore]:
    opened = SessionStore(tmp_path / "other" / "sessions.db")
    yield opened
    opened.close()


@pytest.fixture
def data(store: SessionStore) -> Data:
    return store.export(sample_session(store).id)


def renumbered(data: Data) -> Data:
    """The export with its ids replaced by the places where they first occur."""
    text = json.dumps(data)
    ids = [data["session"]["id"], *(item["id"] for item in (*data["messages"], *data["turns"]))]
    for number, old in enumerate(ids):
        text = text.replace(old, f"#{number}")
    return json.loads(text)


def test_export_import_export_is_equal(data: Data, other: SessionStore) -> None:
    assert (data["format"], data["version"]) == ("kvscope-session", 1)
    file = json.dumps(data)
    session = other.import_(json.loads(file))
    assert session == other.get(data["session"]["id"])
    assert json.dumps(other.export(session.id)) == file
    assert [item.title for item in other.list("世界 é")] == [session.title]
    check_integrity(other)


def test_importing_again_gives_new_ids_and_keeps_both(data: Data, other: SessionStore) -> None:
    first = other.import_(data)
    second = other.import_(data)
    assert first.id != second.id and len(other.list()) == 2
    assert renumbered(other.export(second.id)) == renumbered(data)
    assert other.turns(second.id)[0].stats["session_id"] == second.id
    assert other.export(first.id) == data
    other.delete(first.id)
    assert renumbered(other.export(second.id)) == renumbered(data)
    check_integrity(other)


def test_a_known_message_id_under_an_unknown_session_id_gives_new_ids_too(data: Data, other: SessionStore) -> None:
    first = other.import_(data)
    data["session"]["id"] = UNKNOWN
    second = other.import_(data)
    assert second.id not in (UNKNOWN, first.id)
    assert len(other.branch(first.id).messages) == len(other.branch(second.id).messages) == 4


def test_the_prompt_date_travels_with_the_session(data: Data, other: SessionStore) -> None:
    data["session"]["prompt_date"] = "2024-02-29T23:59:50+05:30"
    assert other.import_(data).prompt_date == "2024-02-29T23:59:50+05:30"


def test_a_reply_exported_while_it_streamed_is_interrupted(store: SessionStore, other: SessionStore) -> None:
    session = store.create()
    store.add_message(session.id, None, "assistant", "so far", token_ids=[1], status=PARTIAL)
    exported = store.export(session.id)
    assert exported["messages"][0]["status"] == PARTIAL
    message = other.branch(other.import_(exported).id).messages[0]
    assert (message.content, message.token_ids, message.status) == ("so far", (1,), COMPLETE)
    assert message.finish_reason == INTERRUPTED


def test_prompts_are_what_they_add_to_the_one_before(data: Data, other: SessionStore) -> None:
    told = [(item["kept"], item["prompt_ids"]) for item in data["inputs"]]
    assert told == [(0, [5, 6, 7]), (2, [8, 9])]
    stored = other.export(other.import_(data).id)
    assert stored["inputs"] == data["inputs"]
    session_id = stored["session"]["id"]
    reply = next(item for item in stored["messages"] if item["id"] == stored["inputs"][1]["message_id"])
    other.delete_message(reply["id"])
    assert [item["prompt_ids"] for item in other.export(session_id)["inputs"]] == [[5, 6, 7]]


def test_a_file_of_before_there_were_inputs_is_read(data: Data, other: SessionStore) -> None:
    del data["inputs"]
    exported = other.export(other.import_(data).id)
    assert exported.pop("inputs") == [] and exported == data


def test_prompts_beyond_all_measure_are_left_out(
    data: Data, other: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_UNFOLDED", 6)
    exported = other.export(other.import_(data).id)
    assert exported["inputs"] == data["inputs"][:1] and exported["messages"] == data["messages"]


def test_unknown_keys_are_ignored(data: Data, other: SessionStore) -> None:
    before = json.dumps(data)
    data["comment"] = data["session"]["comment"] = data["messages"][0]["comment"] = "by hand"
    assert json.dumps(other.export(other.import_(data).id)) == before


BAD: dict[str, tuple[Callable[[Data], Any], str]] = {
    "other format": (lambda d: d.update(format="chat"), "not a session export"),
    "no format": (lambda d: d.pop("format"), "not a session export"),
    "newer": (lambda d: d.update(version=2), "version 2"),
    "older": (lambda d: d.update(version=0), "version 0"),
    "far newer": (lambda d: d.update(version=10**5000), "version far beyond any"),
    "version true": (lambda d: d.update(version=True), '"version" must be a whole number'),
    "version text": (lambda d: d.update(version="1"), '"version" must be a whole number without quotes'),
    "version float": (lambda d: d.update(version=1.0), '"version" must be a whole number'),
    "version null": (lambda d: d.update(version=None), '"version" must be a whole number'),
    "version list": (lambda d: d.update(version=[1]), '"version" must be a whole number'),
    "no version": (lambda d: d.pop("version"), 'no "version"'),
    "no messages": (lambda d: d.pop("messages"), 'no "messages"'),
    "messages object": (lambda d: d.update(messages={}), "must be a list"),
    "message text": (lambda d: d["messages"].append("hello"), "Message 7 must be a JSON object"),
    "session null": (lambda d: d.update(session=None), "The session must be a JSON object"),
    "session id": (lambda d: d["session"].update(id="../../etc/passwd"), 'The session: "id" must be a UUID'),
    "upper case id": (lambda d: d["session"].update(id=UNKNOWN.upper() + "A"), "must be a UUID"),
    "title number": (lambda d: d["session"].update(title=5), "title must be text"),
    "title long": (lambda d: d["session"].update(title="x" * 201), "201 characters"),
    "title blank": (lambda d: d["session"].update(title="\n"), "title is empty"),
    "params list": (lambda d: d["session"].update(params=[]), '"params" must be an object'),
    "params nan": (lambda d: d["session"].update(params={"a": float("nan")}), "JSON can't express"),
    "created": (lambda d: d["session"].update(created_at="yesterday"), "ISO date"),
    "created early": (lambda d: d["session"].update(created_at="0001-01-01T00:00:00+10:00"), "out of range"),
    "prompt date": (lambda d: d["session"].update(prompt_date="{{ now() }}"), "ISO date"),
    "head": (lambda d: d["session"].update(head_id=UNKNOWN), '"head_id" names a message that is not'),
    "kept": (lambda d: d["session"].update(first_kept_id=UNKNOWN), '"first_kept_id" names'),
    "role": (lambda d: d["messages"][1].update(role="root"), 'Message 2: "role" must be one of'),
    "role tool": (lambda d: d["messages"][1].update(role="tool"), "one of system, user, assistant."),
    "role list": (lambda d: d["messages"][1].update(role=["user"]), 'Message 2: "role" must be one of'),
    "status": (lambda d: d["messages"][1].update(status="done"), 'Message 2: "status" must be one of'),
    "content": (lambda d: d["messages"][2].update(content=None), 'Message 3: "content" must be text'),
    "content long": (lambda d: d["messages"][2].update(content="x" * 4_000_001), "4000001 characters"),
    "ids text": (lambda d: d["messages"][2].update(token_ids="12"), 'Message 3: "token_ids" must be a list'),
    "ids negative": (lambda d: d["messages"][2].update(token_ids=[1, -1]), "whole numbers from 0"),
    "ids float": (lambda d: d["messages"][2].update(token_ids=[1.0]), "whole numbers from 0"),
    "ids huge": (lambda d: d["messages"][2].update(token_ids=[2**31]), "whole numbers from 0"),
    "parent": (lambda d: d["messages"][3].update(parent_id=UNKNOWN), "Message 4 names a parent that is not"),
    "own parent": (lambda d: d["messages"][0].update(parent_id=d["messages"][0]["id"]), "Message 1 comes before"),
    "cycle": (lambda d: d["messages"][0].update(parent_id=d["messages"][4]["id"]), "Message 1 comes before"),
    "same id": (lambda d: d["messages"][4].update(id=d["messages"][3]["id"]), "Message 5 has the id of an earlier"),
    "turn message": (lambda d: d["turns"][1].update(message_id=UNKNOWN), "Turn 2 names a message"),
    "turn same id": (lambda d: d["turns"][1].update(id=d["turns"][0]["id"]), "Turn 2 has the id of an earlier"),
    "turn stats": (lambda d: d["turns"][0].update(stats="fast"), 'Turn 1: "stats" must be an object'),
    "input message": (lambda d: d["inputs"][1].update(message_id=UNKNOWN), "Input 2 names a message that is not"),
    "input twice": (lambda d: d["inputs"].append({**d["inputs"][0], "kept": 0}), "Input 3 has the id of an earlier"),
    "inputs object": (lambda d: d.update(inputs={}), '"inputs" must be a list'),
    "input kept": (lambda d: d["inputs"][1].update(kept=4), 'Input 2: "kept" must be a whole number from 0 to 3'),
    "input kept true": (lambda d: d["inputs"][1].update(kept=True), 'Input 2: "kept" must be a whole number'),
    "input ids": (lambda d: d["inputs"][0].update(prompt_ids=[-1]), 'Input 1: "prompt_ids" must be whole numbers'),
    "input print": (lambda d: d["inputs"][0].update(fingerprint=None), 'Input 1: "fingerprint" must be an object'),
    "turn model": (lambda d: d["turns"][0].pop("model"), 'Turn 1 has no "model"'),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gets_one_sentence_and_nothing_is_written(data: Data, other: SessionStore, case: str) -> None:
    damage, sentence = BAD[case]
    damage(data)
    with pytest.raises(InvalidData, match=sentence) as caught:
        other.import_(data)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value) and len(str(caught.value)) < 200
    assert other.list() == []


@pytest.mark.parametrize("value", [None, [], "text", 5])
def test_a_file_that_is_no_object_is_refused(store: SessionStore, value: Any) -> None:
    with pytest.raises(InvalidData, match="not a session export"):
        store.import_(value)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values inside a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SessionStore, Data]]:
    store = SessionStore(tmp_path_factory.mktemp("export") / "s.db")
    session = sample_session(store)
    data = store.export(session.id)
    store.delete(session.id)
    yield store, data
    store.close()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@settings(max_examples=200)
@given(draw=st.data(), value=VALUES)
def test_any_damage_is_either_harmless_or_refused_as_a_whole(
    shared: tuple[SessionStore, Data], draw: st.DataObject, value: Any
) -> None:
    store, data = shared
    data = copy.deepcopy(data)
    *way, last = draw.draw(st.sampled_from(places(data)))
    target = data
    for key in way:
        target = target[key]
    # Swapped ids are the damage that looks most like good data.
    ids = [item["id"] for item in data["messages"]]
    target[last] = draw.draw(st.sampled_from([value, *ids])) if last != "content" else value
    try:
        session = store.import_(data)
    except InvalidData:
        assert store.list() == []
        return
    exported = store.export(session.id)
    assert store.import_(exported).title == session.title, "what was accepted can be exported and imported again"
    store.branch(session.id)
    check_integrity(store)
    for item in store.list():
        store.delete(item.id)


def test_markdown_is_the_current_branch(store: SessionStore) -> None:
    session = store.create("A title", "Be brief.")
    question = store.add_message(session.id, None, "user", "First?")
    store.add_message(session.id, question.id, "assistant", "left out")
    store.add_message(session.id, question.id, "assistant", "```py\nx = 1\n```\n", model="tiny")
    assert store.export_markdown(session.id) == (
        "# A title\n\n## System\n\nBe brief.\n\n## User\n\nFirst?\n\n## Assistant (tiny)\n\n```py\nx = 1\n```\n"
    )
    assert store.export_markdown(store.create("Empty").id) == "# Empty\n"
