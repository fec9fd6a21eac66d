"""What the page shows, from stored data."""

import pytest

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
        ("cache_pos", "bytes_used", "bytes_reserved", "kv_ratio", "status", "invariants", "away", "refused"), 0
    )
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
        {"miss": MISS | {"wanted_token": -1}}, {"miss": MISS | {"tokens_lost": None}},
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


def test_blocks_outside_the_pool_are_no_cells():
    block = {"id": 4, "start": 0, "count": 16, "ref_count": 2, "tier": "gpu"}
    assert view_models.block_cells([block, block | {"id": None, "ref_count": 0, "tier": "disk"}]) == [[4, 0, 16, 2]]
