"""Models whose file has no chat template: the fallback is named, works, and can be changed for another."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from app import default_data_dir, engine_config
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.local import LocalEngine
from engine.tokenizer import ChatTokenizer
from engine.tokenizer.chat_template import bundled_names
from tests.support import tiny_tokenizer as tiny
from tests.support.chats import GREEDY, finished, tiny_chat
from tests.support.tiny_models import save_safetensors, tiny_model
from ui.api.routes import build_api
from ui.arguments import make_parser


def test_the_fallback_is_named_and_a_reply_ends_at_its_marker(tmp_path):
    """C34: without a template the model ran on past its turn, and nothing said why."""
    with tiny_chat(tmp_path, tokenizer=ChatTokenizer(tiny.byte_level(eos_token="<|endoftext|>"))) as chat:
        known = chat.engine.capabilities()
        assert known["chat_template"] == "chatml"
        assert any("tokenizer.chat_template" in warning and "chatml" in warning for warning in known["warnings"])
        session = chat.store.create().id
        for end in ("<|im_end|>", "<|endoftext|>"):
            view = chat.say(session, "Hi", f"Hello{end}and on and on")
            assert (view.text, view.finish_reason) == ("Hello", "stop")
            [start], [stop] = chat.ids("<|im_start|>"), chat.ids("<|im_end|>")
            prompt = chat.engine.requests[-1].prompt_ids
            assert prompt.count(start) == prompt.count(stop) + 1 == 2 * len(chat.store.branch(session).messages) // 2


def test_another_template_takes_effect_at_the_next_message_and_cuts_the_cache(tmp_path):
    """C34: after another template was picked, what had been cached under the old one was used on."""
    with tiny_chat(tmp_path) as chat, TestClient(build_api(chat.service), raise_server_exceptions=False) as api:
        assert api.get("/api/template").json() == {"name": "model", "names": ["model", *bundled_names()]}
        session = chat.store.create(system_prompt="Be brief.").id
        chat.say(session, "One?", "1<|im_end|>")
        assert api.put("/api/template", json={"name": "llama-3"}).json()["name"] == "llama-3"
        turn = chat.service.send(session, "Two?", GREEDY)
        stats = finished(turn).stats
        assert chat.prompt_text().startswith("<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>")
        assert "<|im_start|>" not in chat.prompt_text()
        assert (stats.reused_tokens, stats.miss.position, stats.miss.cause) == (0, 0, "template")
        chat.assert_cache_is_history(turn)
        assert chat.say(session, "Three?", "3<|eot_id|>and on").text == "3"
        api.put("/api/template", json={"name": "model"})
        assert chat.say(session, "Four?", "4<|im_end|>").stats.miss.position == 0
        chat.say(chat.store.create().id, "Another?")
        assert "<|im_start|>" in chat.prompt_text()


@pytest.mark.parametrize("body", [{"name": "nonesuch"}, {"name": ""}, {"name": 5}, {}, {"name": "../etc"}])
def test_a_template_that_is_not_there_is_refused_and_the_old_one_stays(tmp_path, body):
    """C34's neighbour: a bad choice must not leave the app without a template."""
    with tiny_chat(tmp_path) as chat, TestClient(build_api(chat.service), raise_server_exceptions=False) as api:
        answer = api.put("/api/template", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_request"
        assert api.get("/api/template").json()["name"] == "model"
        assert chat.say(chat.store.create().id, "Hi", "Hello<|im_end|>").text == "Hello"


def test_the_command_line_picks_one_too(tmp_path):
    """C34: the choice has to survive a restart."""
    tokenizer = tiny.byte_level(template=tiny.CHATML, eos_token="<|im_end|>")
    folder = save_safetensors(tiny_model("llama", vocab_size=len(tokenizer)), tmp_path / "tiny")
    tokenizer.save_pretrained(folder)
    options = make_parser(default_data_dir()).parse_args(
        ["--model", str(folder), "--chat-template", "zephyr", "--data-dir", str(tmp_path)]
    )
    engine = LocalEngine(engine_config(options))
    engine.start()
    engine.wait_ready(60)
    assert engine.capabilities()["chat_template"] == "zephyr"
    engine.close()
    refused = LocalEngine(EngineConfig(tmp_path, str(folder), chat_template="nonesuch"))
    refused.start()
    with pytest.raises(InvalidRequest, match="nonesuch"):
        refused.wait_ready(60)
