"""Replay of recorded sessions on a tiny model: the same ids, a doctored file that parts, load, and bad files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay.__main__ import main
from benchmarks.replay.files import read_session
from benchmarks.replay.load import arrivals, percentiles
from engine.config import EngineConfig
from engine.loader import EngineParts
from engine.sampling.beam import BeamParams
from engine.sampling.params import SamplingParams
from tests.support.chats import finished, tiny_chat
from tests.support.engines import tiny_parts
from ui.chat import ChatMessage, ChatService

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=1.3, top_p=0.98, repetition_penalty=1.1, presence_penalty=0.4, max_tokens=16, seed=11
)
Data = dict[str, Any]


def loader(kind: str = "llama", **options: Any) -> Callable[[EngineConfig], EngineParts]:
    _, load = tiny_parts(kind=kind, **options)
    return lambda config: load(replace(config, kv_budget=2**26))


def chat_of_all_sorts(chat: ChatService, title: str) -> str:
    """Greedy and sampled turns, one in another format, a regenerated one, an edited one, one that was stopped."""
    session_id = chat.store.create(title).id
    first = finished_turn(chat, session_id, "Hello there, how are you today?", GREEDY)
    finished_turn(chat, session_id, "And now?", SAMPLED)
    finished(chat.regenerate(session_id, None, replace(SAMPLED, seed=None, ignore_eos=True)))
    finished_turn(chat, session_id, "In few bits, please.", replace(SAMPLED, kv_format="int8"))
    finished(chat.edit(session_id, first, "Good evening.", replace(SAMPLED, ignore_eos=True, seed=5)))
    stopped = chat.send(session_id, "Talk for ever.", replace(SAMPLED, max_tokens=400, ignore_eos=True))
    while stopped.view().token_count < 20:
        stopped.wait(stopped.view().version, 10)
    stopped.cancel()
    finished(stopped)
    return session_id


def finished_turn(chat: ChatService, session_id: str, text: str, params: SamplingParams) -> str:
    turn = chat.send(session_id, text, params)
    finished(turn)
    assert turn.user_message_id is not None
    return turn.user_message_id


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Data]:
    """Two sessions."""
    with tiny_chat(tmp_path_factory.mktemp("chat")) as chat:
        ids = [chat_of_all_sorts(chat.service, title) for title in ("One", "Two")]
        return [chat.store.export(session_id) for session_id in ids]


@pytest.fixture
def data(recorded: list[Data]) -> Data:
    copy: Data = json.loads(json.dumps(recorded[0]))
    return copy


def written(folder: Path, data: Any, name: str = "session.json") -> str:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def reply(data: Data, turn: int) -> Data:
    """The message that a turn made; turns count from 1."""
    message_id = data["inputs"][turn - 1]["message_id"]
    found: Data = next(message for message in data["messages"] if message["id"] == message_id)
    return found


def result(capsys: pytest.CaptureFixture[str]) -> tuple[str, Data]:
    out = capsys.readouterr().out
    found: Data = json.loads(out.splitlines()[-1])
    return out, found


def test_every_turn_gives_the_same_ids(data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([written(tmp_path, data)], loader()) == 0
    out, found = result(capsys)
    assert (found["turns"], found["same"], found["skipped"], found["parted"]) == (6, 6, 0, [])
    assert found["tokens"] == sum(len(reply(data, turn)["token_ids"]) for turn in range(1, 7)) > 60
    assert found["reused_tokens"] == found["recorded_reused_tokens"] > 0
    assert out.count("same ") == 6 and "other than now" not in out


def test_what_another_session_had_computed_is_found_again(
    recorded: list[Data], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [written(tmp_path, item, f"{index}.json") for index, item in enumerate(recorded)]
    (shared,) = [turn["stats"] for turn in recorded[1]["turns"] if turn["message_id"] == reply(recorded[1], 1)["id"]]
    assert shared["reused_tokens"] > 0, "its first prompt begins as one of the other session's"
    for files in (paths[1:], paths):
        assert main(files, loader()) == 0
        found = result(capsys)[1]
        assert found["same"] == found["turns"] == 6 * len(files)
        assert found["reused_tokens"] == found["recorded_reused_tokens"]


def test_what_a_restart_had_lost_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_chat(tmp_path) as chat:
        session_id = chat.store.create().id
        for text in ("Hello there, how are you?", "And now?"):
            finished_turn(chat.service, session_id, text, SAMPLED)
    with tiny_chat(tmp_path) as chat:
        for text in ("Are you still there?", "Good."):
            finished_turn(chat.service, session_id, text, SAMPLED)
        exported = chat.store.export(session_id)
    assert [turn["stats"]["reused_tokens"] > 0 for turn in exported["turns"]] == [False, True, False, True]
    assert main([written(tmp_path, exported)], loader()) == 0
    found = result(capsys)[1]
    assert found["same"] == 4 and found["reused_tokens"] == found["recorded_reused_tokens"]


@pytest.mark.parametrize("kind", ["bamba", "gemma3"])
def test_also_with_states_and_windows(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_chat(tmp_path, kind=kind) as chat:
        session_id = chat.store.create().id
        for text in ("Hello there, how are you?", "And now?", "Once more."):
            finished_turn(chat.service, session_id, text, SAMPLED)
        path = written(tmp_path, chat.store.export(session_id))
    assert main([path], loader(kind)) == 0
    assert result(capsys)[1]["same"] == 3


def test_beams_and_a_stop_string(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_chat(tmp_path) as chat:
        session_id = chat.store.create().id
        ask = [ChatMessage("user", "Hello there")]
        finished(chat.service.complete(session_id, ask, GREEDY, BeamParams(num_beams=3)))
        drawn = finished(chat.service.regenerate(session_id, None, replace(GREEDY, max_tokens=30))).text
        finished(chat.service.regenerate(session_id, None, replace(GREEDY, max_tokens=30, stop=(drawn[5:8],))))
        exported = chat.store.export(session_id)
    assert main([written(tmp_path, exported)], loader()) == 0
    assert result(capsys)[1]["same"] == 3
    assert [reply(exported, turn)["finish_reason"] for turn in (2, 3)] == ["length", "stop"]


@pytest.mark.parametrize(("turn", "token"), [(1, 0), (2, 5), (3, 9), (6, 2)])
def test_a_doctored_token_is_found(
    data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str], turn: int, token: int
) -> None:
    ids = reply(data, turn)["token_ids"]
    ids[token] = (ids[token] + 1) % 256
    assert main([written(tmp_path, data)], loader()) == 1
    out, found = result(capsys)
    assert found["parted"] == [{"file": "session.json", "turn": turn, "token": token}] and found["same"] == 5
    assert f"parted at token {token}: " in out and f"(id {ids[token]}) was recorded" in out
    assert "log probabilities -" in out


def test_another_seed_a_shorter_and_a_longer_reply_part(
    data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply(data, 2)["params"]["seed"] += 1
    del reply(data, 3)["token_ids"][-1]
    reply(data, 5)["token_ids"].append(7)
    lengths = {3: len(reply(data, 3)["token_ids"]), 5: len(reply(data, 5)["token_ids"]) - 1}
    assert main([written(tmp_path, data)], loader()) == 1
    out, found = result(capsys)
    assert [item["turn"] for item in found["parted"]] == [2, 3, 5]
    assert {item["turn"]: item["token"] for item in found["parted"][1:]} == lengths
    assert "the end was recorded" in out and "the end came now" in out


def test_what_was_not_finished_is_passed_over(data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reply(data, 1).update(status="partial")
    reply(data, 2)["params"]["seed"] = None
    data["inputs"][2]["fingerprint"]["weights"] = "others"
    data["inputs"][4]["fingerprint"]["engine version"] = "0"
    assert main([written(tmp_path, data)], loader()) == 0
    out, found = result(capsys)
    assert (found["turns"], found["skipped"]) == (3, 3)
    for why in ("it did not finish", "its seed is not known", "another model made it"):
        assert f"skipped: {why}" in out
    assert "other than now: engine version" in out


BAD: dict[str, tuple[Callable[[Data], Any], str]] = {
    "not JSON": (lambda d: "{", "session.json is not JSON."),
    "nested": (lambda d: "[" * 100_000, "session.json is not JSON."),
    "other JSON": (lambda d: [1, 2], "session.json: This is not a session export of KVScope."),
    "damaged": (lambda d: {**d, "messages": None}, 'session.json: The file: "messages" must be a list.'),
    "older": (lambda d: {k: v for k, v in d.items() if k != "inputs"}, "does not say what its replies were made from"),
    "settings": (lambda d: reply(d, 2)["params"].update(top_p=7) or d, "turn 2 has settings that make no sense."),
    "format": (lambda d: d["inputs"][0].update(kv_format="x") or d, "turn 1 has settings that make no sense."),
    "beams": (lambda d: d["inputs"][0].update(beams={"num_beams": 99}) or d, "turn 1 has settings that make no sense."),
    "ids": (
        lambda d: reply(d, 2)["token_ids"].append(10**6) or d,
        "session.json: turn 2 has token ids that the model does not have.",
    ),
    "weights": (
        lambda d: [item["fingerprint"].update(weights="w") for item in d["inputs"]] and d,
        "was recorded with other weights (tiny); name them with --model.",
    ),
    "unfinished": (
        lambda d: [reply(d, turn).update(status="failed") for turn in range(1, 7)] and d,
        "holds no finished reply",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gets_one_sentence(
    data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    damage, sentence = BAD[case]
    assert main([written(tmp_path, damage(data))], loader()) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and str(tmp_path) not in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.json"], "missing.json can't be read: No such file"),
        ([], "The following arguments are required"),
        (["x", "--speed", "2"], "--speed and --max-gap need --load."),
        (["x", "--load", "--speed", "0"], "--speed must be above 0"),
        (["x", "--load", "--speed", "nan"], "--speed must be above 0"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(arguments, loader()) == 2
    assert words in capsys.readouterr().err


def test_load_gives_the_recorded_work(recorded: list[Data], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [written(tmp_path, item, f"{index}.json") for index, item in enumerate(recorded)]
    assert main([*paths, "--load", "--speed", "inf"], loader()) == 0
    out, found = result(capsys)
    assert (found["sessions"], found["turns"], found["failed"]) == (2, 12, 0)
    lengths = [len(reply(item, turn)["token_ids"]) for item in recorded for turn in range(1, 7)]
    assert found["generated_tokens"] == sum(max(length, 1) for length in lengths)
    assert 0 < found["hit_rate"] < 1 and found["recorded_hit_rate"] > 0
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] and found["tokens_per_s"] > 0
    assert "hit rate" in out and found["files"] == ["0.json", "1.json"]


def test_a_turn_that_can_not_be_run_fails_the_replay(
    recorded: list[Data], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, recorded[0])
    assert main([path, "--load", "--speed", "inf", "--max-seq-len", "40"], loader()) == 1
    out, found = result(capsys)
    assert found["failed"] > 0 and "the context holds 40" in out
    assert main([path, "--max-seq-len", "40"], loader()) == 1
    assert "could not be run: " in capsys.readouterr().out


def test_arrivals_keep_the_gaps_up_to_the_longest(data: Data, recorded: list[Data], tmp_path: Path) -> None:
    other = json.loads(json.dumps(recorded[1]))
    for item, first, gap in ((data, 0, 10), (other, 5, 100)):
        for turn in range(1, 7):
            seconds = first + gap * (turn - 1)
            reply(item, turn)["created_at"] = f"2026-01-01T00:{seconds // 60:02}:{seconds % 60:02}+00:00"
    sessions = [
        read_session(Path(written(tmp_path, item, name))) for item, name in ((data, "a.json"), (other, "b.json"))
    ]
    # Asked at 0, 10, ... 50 in one session and at 5, 105, ... 505 in the other.
    due = [(item.session, item.turn.number, item.at) for item in arrivals(sessions, 2.0, 20.0)]
    assert due[:3] == [(0, 1, 0.0), (1, 1, 2.5), (0, 2, 5.0)]
    assert due[6:9] == [(0, 6, 25.0), (1, 2, 35.0), (1, 3, 45.0)]
    assert {item.at for item in arrivals(sessions, float("inf"), 20.0)} == {0.0}


def test_percentiles_are_by_rank() -> None:
    assert percentiles(range(1, 101)) == {"p50": 51, "p90": 91, "p99": 100}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}
