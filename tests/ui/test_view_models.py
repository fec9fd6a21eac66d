"""What the page shows, from stored data."""

import math

import pytest

from engine.debugging.report import empty_result
from sessions.models import COMPLETE, FAILED, PARTIAL, Branch, Message
from ui import view_models

STATS = {"generated_tokens": 3, "decode_tokens_per_s": 9.5, "ttft_ms": 12.0, "reused_tokens": 4, "computed_tokens": 2,
         "cache_pos": 9, "prompt_tokens": 6, "prefill_ms": 8.0, "finish_reason": "stop", "seed": 1, "session_id": "s",
         "miss": None}  # fmt: skip


def message(id: str, role: str = "assistant", content: str = "Hi", status: str = COMPLETE, **more) -> Message:
    values = {"finish_reason": None, "error": None, "token_ids": None, "params": {}, "model": None} | more
    values |= {"session_id": "s", "parent_id": None, "created_at": ""}
    return Message(id=id, role=role, content=content, status=status, **values)


def entry(item: Message, siblings: tuple[str, ...] = (), live: str | None = None) -> dict:
    branch = Branch((item,), {item.id: siblings or (item.id,)})
    return view_models.message_entries(branch, {item.id: STATS}, live)[0]


def test_user_text_stays_text_and_replies_are_html():
    assert entry(message("u", "user", "<b>*x*"))["text"] == "<b>*x*"
    assert entry(message("a", content="*x*"))["html"] == "<p><em>x</em></p>\n"


def test_versions_and_their_neighbours():
    middle = entry(message("b"), ("a", "b", "c"))
    assert (middle["version"], middle["versions"], middle["previous"], middle["next"]) == (2, 3, "a", "c")
    first = entry(message("a"), ("a", "b"))
    assert "previous" not in first and first["next"] == "b"


def test_a_running_reply_carries_no_text():
    assert entry(message("a", status=PARTIAL), live="a") == {
        "id": "a", "role": "assistant", "version": 1, "versions": 1, "live": True,
    }  # fmt: skip


def test_how_a_reply_ended_is_told():
    assert entry(message("a", status=FAILED, error="Broken."))["error"] == "Broken."
    assert entry(message("a", finish_reason="length"))["finish"] == "length"
    assert "finish" not in entry(message("a", finish_reason="stop"))
    assert entry(message("a"))["stats"] == {name: STATS[name] for name in view_models.SHOWN_STATS}


def test_settings_are_filled_with_defaults():
    values = view_models.settings({"temperature": 0, "stop": "###"})
    assert list(values) == list(view_models.SETTINGS)
    assert (values["temperature"], values["stop"], values["top_p"], values["seed"]) == (0, ["###"], 0.95, None)
    assert view_models.settings({"max_completion_tokens": 5})["max_tokens"] == 5
    nothing = dict.fromkeys(view_models.SETTINGS)
    assert view_models.settings(nothing) == view_models.settings({}) and values["strip_thoughts"] is False


def test_the_price_of_a_token_adds_up():
    capabilities = {"kv_format": "fp16", "num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "bytes_per_token": 23040}
    section = view_models.model_section(capabilities)
    assert section["formula"] == "2 × 30 layers × 3 KV heads × 64 × 2 B"
    assert section["bytes_per_token"] == 2 * 30 * 3 * 64 * 2


def test_a_recurrent_model_has_a_state_and_only_with_attention_a_price_per_token():
    capabilities = {"kv_format": "fp16", "num_layers": 0, "num_kv_heads": 0, "head_dim": 0, "bytes_per_token": 0}
    section = view_models.model_section(capabilities | {"state_layers": 64, "state_bytes": 1000})
    assert "formula" not in section and (section["state_layers"], section["state_bytes"]) == (64, 1000)


def test_the_last_checkpoints_are_shown():
    report = dict.fromkeys(
        ("cache_pos", "bytes_used", "bytes_reserved", "kv_ratio", "status", "invariants", "violation", "away",
         "refused"), 0
    )  # fmt: skip
    assert "state" not in view_models.cache_section(report | {"state": None})
    state = {"layers": 2, "bytes": 9, "slot": 3, "checkpoints": [8, 20, 24, 40, 48]}
    section = view_models.cache_section(report | {"state": state})
    assert section["state"] == {"bytes": 9, "count": 5, "last": [20, 24, 40, 48]}


def test_a_miss_names_both_tokens():
    miss = {"position": 7, "cause": "edit", "cached_token": 1, "wanted_token": None, "tokens_lost": 30}
    section = view_models.turn_section(STATS | {"miss": miss}, False, 99, lambda token_id: f"<{token_id}>")
    assert section["miss"] == miss | {"cached_text": "<1>", "wanted_text": None}
    assert section["max_new_tokens"] == 99 and "session_id" not in section


MISS = {"position": 7, "cause": "edit", "cached_token": 1, "wanted_token": None, "tokens_lost": 30}


@pytest.mark.parametrize(
    "odd",
    [
        {"prompt_tokens": None}, {"prompt_tokens": "6"}, {"prompt_tokens": True}, {"computed_tokens": -1},
        {"generated_tokens": 1.5}, {"cache_pos": 2**60}, {"ttft_ms": "fast"}, {"decode_tokens_per_s": [9]},
        {"seed": None}, {"finish_reason": 3}, {"miss": "edit"}, {"miss": {}}, {"miss": MISS | {"cached_token": "a"}},
        {"miss": MISS | {"wanted_token": -1}}, {"miss": MISS | {"tokens_lost": None}}, {"drafted_tokens": "many"},
        {"accepted_tokens": None},
    ],
)  # fmt: skip
def test_odd_numbers_are_not_shown(odd):
    assert view_models.sound_stats(STATS) and view_models.sound_stats(STATS | {"miss": MISS})
    assert not view_models.sound_stats(STATS | odd)
    shown = view_models.message_entries(Branch((message("a"),), {}), {"a": STATS | odd}, None)[0]
    assert "stats" not in shown and shown["html"]


def test_only_changed_sections_travel():
    old = {"memory": {"a": 1}, "turn": None, "blocks": [[1, 0, 16, 1], [2, 16, 3, 1]], "head": [[0, "x"]]}
    new = {"memory": {"a": 1}, "turn": {"b": 2}, "blocks": [[1, 0, 16, 1], [2, 16, 9, 1], [3, 32, 1, 1]], "head": []}
    assert view_models.changed_sections(old, new) == {
        "turn": {"b": 2},
        "blocks": {"keep": 1, "add": [[2, 16, 9, 1], [3, 32, 1, 1]]},
        "head": {"keep": 0, "add": []},
    }
    assert view_models.changed_sections({}, {"turn": None, "blocks": []}) == {
        "turn": None,
        "blocks": {"keep": 0, "add": []},
    }


def test_signatures_name_values():
    assert view_models.signature({"a": 1, "b": [2]}) == view_models.signature({"b": [2], "a": 1})
    assert view_models.signature({"a": 1}) != view_models.signature({"a": 2})
    assert view_models.signature("half \ud800") == view_models.signature("half \ud800")


def test_blocks_outside_the_pool_say_where_they_are():
    block = {"id": 4, "start": 0, "count": 16, "ref_count": 2, "tier": "gpu", "last_audit": None}
    cells = view_models.block_cells([block, block | {"id": None, "ref_count": 0, "tier": "disk"}])
    assert cells == [[4, 0, 16, 2, None, "gpu"], [None, 0, 16, 0, None, "disk"]]


def test_a_block_tells_its_last_audit():
    block = {"id": 4, "start": 0, "count": 16, "ref_count": 1, "tier": "ram"} | {
        "last_audit": {"verdict": "fault", "at": 1.0}
    }
    assert view_models.block_cells([block]) == [[4, 0, 16, 1, "fault", "ram"]]


FAULT = {"kind": "nan", "tensor": "kv", "layers": [3], "first_position": 5, "last_position": 6, "amount": None}


def test_an_audit_is_shown_without_numbers_that_are_none():
    found = {
        "verdict": "fault", "scope": "audit", "at": 2.0, "sentence": "Layer 3 is not finite.", "noise_floor": 0.004,
        "max_error": math.nan, "state_error": None, "logits_error": 0.1, "since_turn": "t", "checked_tokens": 9,
        "cache_pos": 9, "heat": {"columns": [[0, 8]], "values": [[None]]}, "ms": 7.0,
        "faults": [FAULT | {"max_error": math.inf, "since_turn": "t"}],
        "follows": [{"layer": 4, "first_position": 7, "last_position": 8}],
    }  # fmt: skip
    section = view_models.audit_section(found)
    assert section["faults"] == [FAULT | {"max_error": None}] and section["follows"] == 1
    assert (section["noise_floor"], section["max_error"], section["heat"]) == (0.004, None, found["heat"])
    assert view_models.audit_section(None) is None
    assert view_models.audit_section(empty_result() | {"at": 1.0})["faults"] == []


@pytest.mark.parametrize(
    ("loop", "shown"),
    [
        ({"period": 3, "start": 9, "repeats": 4, "near": True}, {"period": 3, "start": 9, "repeats": 4, "near": True}),
        ({"period": 3, "start": 9, "repeats": 4}, {"period": 3, "start": 9, "repeats": 4, "near": False}),
        (None, None), ("yes", None), ({"period": "<b>", "start": 9, "repeats": 4}, None), ({"period": -1}, None),
    ],
)  # fmt: skip
def test_a_reply_tells_its_loop(loop, shown):
    entry = view_models.message_entries(Branch((message("a"),), {}), {"a": STATS | {"loop": loop}}, None)[0]
    assert entry.get("loop") == shown
