"""The command as a person types it: what is wrong is one sentence and exit code 2; a signal is a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

import app
from engine.models.registry import load_model
from kernels.dispatch import cpu_kernels
from sessions.store import SessionStore
from tests.support.fake_engine import wait_until
from tests.support.tiny_models import save_gguf, save_safetensors, tiny_model
from tests.support.tiny_tokenizer import CHATML, byte_level
from ui.arguments import make_parser

ROOT = Path(__file__).parents[2]
NO_AVX2 = "WARNING kvscope.kernels: This processor lacks AVX2 and F16C; decoding takes the slower way.\n"


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "app.py"), "--no-browser", *map(str, arguments)]


def environment(data: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSCOPE")}
    return {**kept, "KVSCOPE_DATA": str(data), "OMP_NUM_THREADS": "1"}


def run(tmp_path: Path, *arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    env = {**environment(tmp_path / "data"), **extra}
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=180, env=env, check=False)


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    [sentence] = done.stderr.strip().splitlines()
    assert sentence.endswith(".") and "Traceback" not in sentence and "Error" not in sentence
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "abc"], ["--port", "abc"]),
        (["--port", "70000"], ["--port", "65535"]),
        (["--max-seq-len", "1"], ["--max-seq-len"]),
        (["--max-seq-len", "1.5"], ["--max-seq-len"]),
        (["--block-size", "0"], ["--block-size"]),
        (["--kv-budget", "lots"], ["--kv-budget", "2GiB"]),
        (["--kv-budget", "-1GiB"], ["--kv-budget"]),
        (["--kv-budget", "0"], ["--kv-budget"]),
        (["--snapshot-limit", "-1"], ["--snapshot-limit"]),
        (["--snapshot-limit", "0.0"], ["--snapshot-limit"]),
        (["--ram-limit", "some"], ["--ram-limit", "2GiB"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--nonsense"], ["--nonsense"]),
        (["--window", "0"], ["--window"]),
        (["--window", "5"], ["--window 5", "16 tokens"]),
        (["--sinks", "4"], ["--sinks", "--window"]),
        (["--window", "64", "--sinks", "64"], ["--sinks 64", "--window 64"]),
        (["--share-layers", "0"], ["--share-layers"]),
        (["--speculation", "ngram"], ["--speculation", "auto"]),
        (["--host", "0.0.0.0"], ["0.0.0.0", "--api-key"]),
        (["--host", "::"], ["--api-key"]),
        (["--host", "0.0.0.0", "--api-key", ""], ["key"]),
        (["--api-key", "two words"], ["key"]),
        (["--host", "no.such.host.invalid", "--api-key", "k"], ["no.such.host.invalid"]),
        (["--model", "no-such-model"], ["no-such-model"]),
        (["--model", "missing.gguf"], ["missing.gguf"]),
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_arguments(run_here, arguments, words):
    assert_refused(run_here(*(["--port", "0"] if "--port" not in arguments else []), *arguments), *words)


def test_bad_arguments_end_the_process(tmp_path):
    """As above, with what only the process shows: its exit code, and what else libraries say on the way."""
    assert_refused(run(tmp_path, "--port", "abc"), "--port", "abc")
    assert_refused(run(tmp_path, "--port", "0", "--model", "missing.gguf"), "missing.gguf")


def test_damage_is_allowed_by_its_argument_alone():
    parser = make_parser(app.default_data_dir())
    for arguments, allowed in (([], False), (["--allow-fault-injection"], True)):
        options = parser.parse_args(arguments)
        app.check_options(options)
        assert app.engine_config(options).fault_injection is allowed


def test_the_key_may_come_from_the_environment(run_here):
    done = run_here("--host", "0.0.0.0", "--port", 0, "--model", "missing.gguf", KVSCOPE_API_KEY="secret")
    assert_refused(done, "missing.gguf")


def test_a_busy_port(run_here):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_refused(run_here("--port", port, "--model", "missing.gguf"), str(port), "in use")


def test_files_and_folders_that_are_no_model(tmp_path, run_here):
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a model")
    assert_refused(run_here("--port", 0, "--model", junk), "junk.gguf", "not a GGUF")
    (tmp_path / "empty").mkdir()
    assert_refused(run_here("--port", 0, "--model", tmp_path / "empty"), "empty", "no model")


def test_a_data_folder_that_can_not_be(tmp_path, run_here):
    (tmp_path / "data").write_text("a file")
    model = save_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    assert_refused(run_here("--port", 0, "--model", model), "data folder")


def test_help_explains_every_argument_with_its_default(tmp_path):
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for name in ("model", "device", "dtype", "kv-format", "max-seq-len", "kv-budget", "block-size", "window", "sinks",
                 "data-dir", "host", "port", "api-key", "no-browser", "allow-fault-injection", "plan"):  # fmt: skip
        [found] = re.findall(rf" --{name}(?: [A-Z{{][^ ]*)? ([a-z].*?\(default: .*?\))", text)[:1] or [None]
        assert found, name


def test_the_plan_adds_up(tmp_path, run_here):
    model = save_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    done = run_here("--plan", "--model", model, "--device", "cpu", "--kv-format", "fp32", "--kv-budget", "1MiB")
    assert done.returncode == 0 and done.stderr == ""
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert "(512 bytes)" in rows["KV per token"] and rows["fits"].strip() == "yes"


def test_the_plan_names_what_is_held(tmp_path, run_here):
    """It said int8 for a file whose blocks are kept as they lie in it."""
    path = save_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1)
    loaded = load_model(path, torch.device("cpu"))
    done = run_here("--plan", "--model", path, "--device", "cpu")
    [weights] = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    assert weights.endswith(f"({loaded.weight_bytes} bytes) in {loaded.weight_format}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = byte_level(template=CHATML, eos_token="<|im_end|>")
    save_safetensors(tiny_model("llama", vocab_size=len(tokenizer)), tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def ask(url: str, method: str, path: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, method=method)) as answer:
        return json.load(answer)


@contextmanager
def started(data: Path, *arguments: object, last_word: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The app, and its address once it is ready; killed at the end. It must not say anything but that it is ready, that
    the processor is an old one where it is, and `last_word` as an error."""
    process = subprocess.Popen(
        command("--port", 0, "--device", "cpu", "--max-seq-len", 512, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(data),
    )
    try:
        line = process.stdout.readline()
        ready = re.fullmatch(r"KVScope ready: (http://127\.0\.0\.1:\d+) \(model tiny, device cpu\)\n", line)
        assert ready, (line, process.stderr.read() if process.poll() is not None else "")
        yield process, ready[1]
    finally:
        process.kill()
        rest, errors = process.communicate()
    assert (rest, errors) == ("", ("" if cpu_kernels() else NO_AVX2) + last_word)


@contextmanager
def reply_that_is_read(url: str, session_id: str, body: object) -> Iterator[list[bytes]]:
    """Lines of the stream of a reply, from its first token on; to its end when the block is left."""
    asked = urllib.request.Request(f"{url}/api/sessions/{session_id}/messages", json.dumps(body).encode())
    stream = urllib.request.urlopen(asked)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.extend(stream))
    reader.start()
    assert wait_until(lambda: b"event: token\n" in received, 30)
    yield received
    reader.join(5)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_app_goes_on_with_the_cache_it_had_and_a_signal_ends_it_in_mid_reply(tmp_path, model):
    """C25, C31: after a restart the cache was empty, or shown as restored while the whole prompt was computed."""
    data, turn = tmp_path / "data", {"content": "x" * 200, "params": {"ignore_eos": True, "max_tokens": 20}}
    with started(data, "--model", model) as (process, url):
        with urllib.request.urlopen(f"{url}/") as page:
            assert b"KVScope" in page.read()
        gone, session = (ask(url, "POST", "/api/sessions")["id"] for _ in range(2))
        for session_id in (gone, session):  # whose replies differ, and so may how much of them is kept
            before = ask(url, "POST", f"/api/sessions/{session_id}/messages", turn)["kvscope"]
            assert ask(url, "POST", f"/api/sessions/{session_id}/snapshot")["tokens"] == before["cache_pos"] > 200
        process.kill()
    with closing(SessionStore(data / "kvscope.db")) as store:
        store.delete(gone)
    with started(data, "--model", model) as (process, url):
        assert ask(url, "GET", f"/api/sessions/{session}/cache")["cache_pos"] == before["cache_pos"]
        after = ask(url, "POST", f"/api/sessions/{session}/messages", {**turn, "content": "go on"})["kvscope"]
        assert after["reused_tokens"] >= before["cache_pos"] - 16 and after["miss"] is None
        assert ask(url, "GET", "/api/memory")["kv_disk"] > 0
        ended = ask(url, "POST", "/api/sessions")["id"]
        with reply_that_is_read(
            url, ended, {"content": "Hello", "stream": True, "params": {"ignore_eos": True}}
        ) as received:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert b"event: done\n" in received
    snapshots = {path.name for path in (data / "snapshots").iterdir()}
    assert session in snapshots <= {session, ended}, "what belongs to no session goes"
    manifest = json.loads((data / "snapshots" / session / "manifest.json").read_text())
    assert manifest["cache_pos"] == after["cache_pos"], "a clean end writes what is not yet on disk"
    with closing(SessionStore(data / "kvscope.db")) as store:
        assert store.recovered == 0
        reply = store.branch(ended).messages[-1]
    assert reply.status == "complete" and reply.finish_reason in ("cancelled", "length") and reply.content


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_second_interrupt_ends_the_app_at_once_in_one_line(tmp_path, model):
    """It was the server's traceback, and the exit code that of a clean end."""
    line = "Interrupted again: KVScope ends at once, and what was not yet stored is lost.\n"
    with started(tmp_path / "data", "--model", model, last_word=line) as (process, url):
        session = ask(url, "POST", "/api/sessions")["id"]
        ask(url, "POST", f"/api/sessions/{session}/messages", {"content": "Hello", "params": {"max_tokens": 4}})

        def interrupted() -> bool:
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        # A clean end waits some time for a request that has begun, and so for the second signal.
        address = urllib.parse.urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(b"POST /api/sessions HTTP/1.1\r\nHost: " + address.netloc.encode())
            connection.sendall(b"\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\n")
            assert wait_until(interrupted, 30) and process.returncode == 130
    with closing(SessionStore(tmp_path / "data" / "kvscope.db")) as store:
        assert len(store.branch(session).messages) == 2


def test_a_load_that_fails_is_one_sentence(tmp_path, model, run_here):
    (model / "model.safetensors").write_bytes(b"\x05\x00")
    assert_refused(run_here("--port", 0, "--model", model, "--device", "cpu"), "model.safetensors")
