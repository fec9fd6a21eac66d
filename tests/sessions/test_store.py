from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from sessions.models import COMPLETE, DEFAULT_TITLE, FAILED, INTERRUPTED, PARTIAL
from sessions.store import InvalidData, NotStored, SessionStore, StoreError
from tests.support.session_store import check_integrity, sample_session

UNKNOWN = "00000000-0000-4000-8000-000000000000"


def test_a_new_session_is_empty_and_has_a_name(store: SessionStore) -> None:
    session = store.create()
    assert store.get(session.id) == session
    assert (session.title, session.system_prompt, session.params, session.head_id) == (DEFAULT_TITLE, "", {}, None)
    assert store.branch(session.id).messages == ()
    assert uuid.UUID(session.id).version == 4


def test_everything_is_there_after_a_restart(path: Path) -> None:
    store = SessionStore(path)
    session = sample_session(store)
    before = (store.get(session.id), store.branch(session.id), store.turns(session.id), store.list())
    store.close()
    store = SessionStore(path)
    assert (store.get(session.id), store.branch(session.id), store.turns(session.id), store.list()) == before
    assert store.recovered == 0
    store.close()


def test_ids_and_text_come_back_exactly(store: SessionStore) -> None:
    session = store.create(params={"stop": ("a", "b"), "logit_bias": {5: -1.0}})
    assert store.get(session.id).params == {"stop": ["a", "b"], "logit_bias": {"5": -1.0}}
    ids = (0, 1, 2**31 - 1)
    message = store.add_message(
        session.id, None, "assistant", "a\0b\r\n\u2028👩‍👩‍👧‍👦", token_ids=ids, model="m", params={"seed": 2**63}
    )
    assert store.message(message.id) == message
    assert message.token_ids == ids and message.content == "a\0b\r\n\u2028👩‍👩‍👧‍👦"
    assert store.add_message(session.id, None, "assistant", "", token_ids=()).token_ids == ()
    assert store.add_message(session.id, None, "user", "").token_ids is None


def test_half_a_character_is_replaced_instead_of_refused(store: SessionStore) -> None:
    session = store.create()
    assert store.add_message(session.id, None, "user", "a\ud800b").content == "a\ufffdb"
    assert store.update(session.id, title="\udfff x").title == "\ufffd x"


def test_edits_and_regenerated_replies_are_siblings(store: SessionStore) -> None:
    session = store.create()
    one = store.add_message(session.id, None, "user", "one")
    a = store.add_message(session.id, one.id, "assistant", "a")
    b = store.add_message(session.id, one.id, "assistant", "b")
    branch = store.branch(session.id)
    assert branch.messages == (one, b)
    assert branch.siblings == {one.id: (one.id,), b.id: (a.id, b.id)}
    store.set_head(session.id, a.id)
    edited = store.add_message(session.id, None, "user", "uno")
    assert store.siblings(one.id) == (one.id, edited.id)
    assert store.leaf_below(one.id) == b.id and store.leaf_below(edited.id) == edited.id
    store.set_head(session.id, None)
    assert store.branch(session.id).messages == ()


def test_first_messages_of_other_sessions_are_no_siblings(store: SessionStore) -> None:
    here, other = store.create(), store.create()
    store.add_message(other.id, None, "user", "there")
    message = store.add_message(here.id, None, "user", "here")
    assert store.siblings(message.id) == (message.id,)
    assert store.branch(here.id).siblings == {message.id: (message.id,)}


def test_a_message_of_another_session_is_refused_everywhere(store: SessionStore) -> None:
    here, other = store.create(), store.create()
    message = store.add_message(other.id, None, "user", "there")
    calls = (
        lambda: store.add_message(here.id, message.id, "user", "x"),
        lambda: store.set_head(here.id, message.id),
        lambda: store.update(here.id, title="changed", first_kept_id=message.id),
        lambda: store.copy_branch(here.id, message.id),
        lambda: store.add_turn(here.id, message.id, "m", {}),
    )
    for call in calls:
        with pytest.raises(NotStored):
            call()
    assert store.get(here.id) == here
    assert len(store.list()) == 2


@pytest.mark.parametrize("bad", [UNKNOWN, "", "x", "'; DROP TABLE sessions; --", "\ud800", "é", "a\0b", "../../etc"])
def test_unknown_and_malformed_ids_are_not_stored(store: SessionStore, bad: str) -> None:
    session = store.create()
    calls = (
        lambda: store.get(bad),
        lambda: store.branch(bad),
        lambda: store.update(bad, title="x"),
        lambda: store.delete(bad),
        lambda: store.message(bad),
        lambda: store.siblings(bad),
        lambda: store.leaf_below(bad),
        lambda: store.delete_message(bad),
        lambda: store.update_message(bad, content="x"),
        lambda: store.add_message(bad, None, "user", "x"),
        lambda: store.add_message(session.id, bad, "user", "x"),
        lambda: store.set_head(session.id, bad),
        lambda: store.copy_branch(bad),
        lambda: store.copy_branch(session.id, bad),
        lambda: store.turns(bad),
        lambda: store.export(bad),
        lambda: store.export_markdown(bad),
    )
    for call in calls:
        with pytest.raises(NotStored) as caught:
            call()
        assert "/" not in str(caught.value) and str(caught.value).endswith(".")
    assert [item.id for item in store.list()] == [session.id]


def test_bad_values_are_refused_and_nothing_is_written(store: SessionStore) -> None:
    session = store.create("kept")
    nested: dict[str, object] = {}
    for _ in range(2000):
        nested = {"a": nested}
    calls = (
        lambda: store.create(""),
        lambda: store.create("x" * 201),
        lambda: store.update(session.id, title=" \n "),
        lambda: store.update(session.id, params={"x": float("nan")}),
        lambda: store.update(session.id, params={"x": object()}),
        lambda: store.update(session.id, params=nested),
        lambda: store.update(session.id, params={"x": "y" * 1_000_001}),
        lambda: store.add_message(session.id, None, "robot", "x"),
        lambda: store.add_message(session.id, None, "user", "x" * 4_000_001),
        lambda: store.add_message(session.id, None, "user", "x", status="done"),
        lambda: store.add_message(session.id, None, "user", "x", token_ids=[2**31]),
        lambda: store.add_message(session.id, None, "user", "x", token_ids=[-1]),
        lambda: store.add_message(session.id, None, "user", "x", token_ids=[True]),
    )
    for call in calls:
        with pytest.raises(InvalidData):
            call()
    assert store.get(session.id) == session
    assert [item.message_count for item in store.list()] == [0]


def test_update_changes_only_what_is_given(store: SessionStore) -> None:
    session = sample_session(store)
    renamed = store.update(session.id, title="  New\n name ")
    assert renamed.title == "New name"
    assert (renamed.system_prompt, renamed.params, renamed.head_id) == ("Be brief.", session.params, session.head_id)
    assert renamed.updated_at > session.updated_at
    moved = store.update(session.id, head_id=None, first_kept_id=None)
    assert (moved.head_id, moved.first_kept_id, moved.updated_at) == (None, None, renamed.updated_at)


def test_a_reply_is_stored_as_it_streams(store: SessionStore) -> None:
    session = store.create()
    reply = store.add_message(session.id, None, "assistant", "", status=PARTIAL)
    at = store.get(session.id).updated_at
    store.update_message(reply.id, content="Hel", token_ids=[1])
    partial = store.message(reply.id)
    assert (partial.content, partial.token_ids, partial.status) == ("Hel", (1,), PARTIAL)
    assert store.get(session.id).updated_at == at
    store.update_message(reply.id, content="Hello", token_ids=[1, 2], status=COMPLETE, finish_reason="stop")
    done = store.message(reply.id)
    assert (done.content, done.token_ids, done.status, done.finish_reason) == ("Hello", (1, 2), COMPLETE, "stop")
    assert store.get(session.id).updated_at > at
    store.update_message(reply.id, status=FAILED, error="Broken.", token_ids=None, finish_reason=None)
    failed = store.message(reply.id)
    assert (failed.token_ids, failed.finish_reason, failed.error) == (None, None, "Broken.")


def test_deleting_a_version_shows_the_newest_remaining_one(store: SessionStore) -> None:
    session = store.create()
    one = store.add_message(session.id, None, "user", "one")
    replies = [store.add_message(session.id, one.id, "assistant", text) for text in "abc"]
    below_b = store.add_message(session.id, replies[1].id, "user", "more")
    store.set_head(session.id, replies[2].id)
    store.delete_message(replies[2].id)
    assert store.get(session.id).head_id == below_b.id
    store.delete_message(replies[0].id)
    assert store.get(session.id).head_id == below_b.id, "the current branch did not run through it"
    store.delete_message(replies[1].id)
    assert store.get(session.id).head_id == one.id
    store.delete_message(one.id)
    assert store.get(session.id).head_id is None
    assert store.list()[0].message_count == 0


def test_deleting_takes_turns_and_links_along(store: SessionStore) -> None:
    session = sample_session(store)
    first = store.branch(session.id).messages[0]
    store.delete_message(first.id)
    emptied = store.get(session.id)
    assert (emptied.head_id, emptied.first_kept_id, store.turns(session.id)) == (None, None, [])
    check_integrity(store)


def test_a_chat_deeper_than_sqlites_cascade_limit_can_be_copied_and_deleted(store: SessionStore) -> None:
    """A cascade from parent to child stops at 1000 levels with an error."""
    session = store.create()
    parent = None
    messages = []
    for number in range(1200):
        messages.append(store.add_message(session.id, parent, "user", str(number)).id)
        parent = messages[-1]
    fork = store.copy_branch(session.id)
    assert [item.content for item in store.branch(fork.id).messages] == [str(number) for number in range(1200)]
    store.delete_message(messages[1])
    assert [item.id for item in store.branch(session.id).messages] == messages[:1]
    store.delete(fork.id)
    assert [item.message_count for item in store.list()] == [1]
    check_integrity(store)


def test_a_fork_copies_the_path_and_leaves_the_original_alone(store: SessionStore) -> None:
    session = sample_session(store)
    before = store.export(session.id)
    path = store.branch(session.id).messages
    fork = store.copy_branch(session.id)
    copies = store.branch(fork.id).messages
    assert fork == store.get(fork.id)
    assert fork.title == "Trees & <b>leaves</b> (fork)"
    assert (fork.system_prompt, fork.params, fork.prompt_date) == (
        session.system_prompt,
        session.params,
        session.prompt_date,
    )
    assert [(m.role, m.content, m.token_ids, m.status, m.error) for m in copies] == [
        (m.role, m.content, m.token_ids, m.status, m.error) for m in path
    ]
    assert not {m.id for m in copies} & {m.id for m in path}
    assert fork.first_kept_id == copies[2].id
    store.add_message(fork.id, copies[-1].id, "user", "only here")
    store.delete(fork.id)
    assert store.export(session.id) == before


def test_a_fork_may_start_at_any_message_and_keeps_titles_short(store: SessionStore) -> None:
    session = sample_session(store)
    path = store.branch(session.id).messages
    fork = store.copy_branch(session.id, path[1].id, title="Half")
    assert fork.title == "Half" and fork.first_kept_id is None
    assert [m.content for m in store.branch(fork.id).messages] == [m.content for m in path[:2]]
    store.update(session.id, title="t" * 200)
    assert len(store.copy_branch(session.id).title) == 200
    assert store.branch(store.copy_branch(store.create().id).id).messages == ()


def test_a_fork_of_a_streaming_reply_is_not_partial(store: SessionStore) -> None:
    """Nobody would ever finish the copy, so it must not look as if it were still being written."""
    session = store.create()
    reply = store.add_message(session.id, None, "assistant", "so far", status=PARTIAL)
    copy = store.branch(store.copy_branch(session.id).id).messages[0]
    assert (copy.content, copy.status, copy.finish_reason) == ("so far", COMPLETE, INTERRUPTED)
    assert store.message(reply.id).status == PARTIAL


def test_the_prompt_date_is_fixed_per_session_and_kept_by_forks(path: Path) -> None:
    """The head of the prompt must not change at midnight, after a restart, or in a fork; a new chat has the new day."""
    now = datetime(2026, 3, 1, 23, 59, 50, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    store = SessionStore(path, clock=lambda: now)
    session = store.create()
    message = store.add_message(session.id, None, "user", "x")
    now += timedelta(seconds=20)
    store.add_message(session.id, message.id, "assistant", "y")
    assert session.prompt_date == "2026-03-01T23:59:50+05:30"
    assert session.created_at == "2026-03-01T18:29:50.000000+00:00"
    store.close()
    now += timedelta(days=2)
    store = SessionStore(path, clock=lambda: now)
    assert store.get(session.id).prompt_date == session.prompt_date
    fork = store.copy_branch(session.id)
    assert fork.prompt_date == session.prompt_date and fork.created_at > session.created_at
    assert store.create().prompt_date.startswith("2026-03-04T00:00:10")
    store.close()


def test_turns_are_kept_per_reply(store: SessionStore) -> None:
    session = store.create()
    message = store.add_message(session.id, None, "assistant", "x")
    stats = {"ttft_ms": None, "decode_tokens_per_s": 14.25, "miss": {"position": 3, "cause": "edit"}}
    turn = store.add_turn(session.id, message.id, "tiny", stats)
    assert store.turns(session.id) == [turn]
    assert turn.stats == stats and turn.message_id == message.id
    store.delete(session.id)
    with pytest.raises(NotStored):
        store.turns(session.id)


def test_a_closed_store_says_so(store: SessionStore) -> None:
    session = store.create()
    store.close()
    store.close()
    for call in (store.list, store.create, lambda: store.get(session.id)):
        with pytest.raises(StoreError, match="closed"):
            call()
