"""KVScope: chat with a model on your own GPU, and see the model's memory. Arguments, wiring, start and end."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from engine.config import DEVICES, DTYPES, KV_FORMATS, SPECULATION, EngineConfig, check_window
from engine.errors import ConfigError, KVScopeError
from engine.prepare import prepare
from engine.tiers.frozen_text import read_text
from engine.weights.catalog import local_models, resolve
from sessions.errors import StoreError
from ui import quick_imports
from ui.network import is_loopback, open_socket, own_names, url_of

if TYPE_CHECKING:
    import uvicorn

    from engine.local import LocalEngine
    from ui.chat import ChatService

GRACE_S = 2
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {f"{unit}ib": UNITS[unit] for unit in "kmgt"}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence in place of the usage."""
        raise ConfigError(f"{message[:1].upper()}{message[1:].rstrip('.')}; --help lists all arguments.")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser("app.py", description=__doc__.split(".")[0] + ".", allow_abbrev=False)
    add = parser.add_argument
    add(
        "--model",
        metavar="NAME|DIR|FILE",
        help="hub name, folder with safetensors, or .gguf file (default: SmolLM2-135M-Instruct, fetched on first use)",
    )
    add("--device", choices=DEVICES, default="auto", help="where the model runs (default: auto, a CUDA card if any)")
    add("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: auto, the fastest 16 bit type)")
    add(
        "--kv-format",
        choices=KV_FORMATS,
        default="auto",
        metavar="FORMAT",
        help=f"how keys and values are kept: {', '.join(KV_FORMATS)} (default: auto, 16 bits, or as float32 weights)",
    )
    add(
        "--max-seq-len",
        type=_number(2, 2**31),
        metavar="N",
        help="most tokens of a conversation (default: the model's own limit, as far as the KV budget holds it)",
    )
    add(
        "--kv-budget",
        type=_size,
        metavar="SIZE",
        help="most memory for the KV cache, such as 2GiB or 500MB (default: 85%% of a card's free memory, 25%% of RAM)",
    )
    add(
        "--block-size",
        type=_number(1, 1024),
        default=16,
        metavar="N",
        help="tokens in a block of the KV cache (default: 16)",
    )
    add(
        "--chat-template",
        metavar="NAME",
        help="how messages become a prompt: chatml, llama-2, llama-3, mistral, zephyr or plain "
        "(default: the model's own, or the one that its role markers fit)",
    )
    add(
        "--window",
        type=_number(1, 2**31),
        metavar="N",
        help="most tokens that a layer looks back, so that memory stays the same however long a chat gets "
        "(default: as the model says)",
    )
    add(
        "--sinks",
        type=_number(0, 2**31),
        default=0,
        metavar="N",
        help="first tokens that a window keeps, such as 4: the chat may then outgrow the model's context (default: 0)",
    )
    add(
        "--share-layers",
        type=_number(1, 64),
        default=1,
        metavar="N",
        help="let N neighbouring layers use one store of keys and values, as an experiment (default: 1)",
    )
    add(
        "--speculation",
        choices=SPECULATION,
        default="auto",
        help="guess tokens from the text so far and run them ahead; replies stay the same "
        "(default: auto, where it is measured to pay)",
    )
    add(
        "--snapshot-limit",
        type=_size_or_none,
        metavar="SIZE",
        help="most disk space for what keeps the chats' caches over a restart, 0 to keep none "
        "(default: 25%% of what is free, at most 8GiB)",
    )
    add(
        "--ram-limit",
        type=_size_or_none,
        metavar="SIZE",
        help="most RAM for caches of idle chats that a card has no room for, 0 for none (default: 25%% of RAM)",
    )
    add(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help=f"where chats and models are kept (default: $KVSCOPE_DATA, or {default_data_dir()})".replace("%", "%%"),
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1); others need --api-key")
    add("--port", type=_number(0, 65535), default=7860, help="port to listen on, 0 for any (default: 7860)")
    add("--api-key", metavar="KEY", help="key that page and API ask for (default: $KVSCOPE_API_KEY, or none)")
    add("--no-browser", action="store_true", help="do not open the page (default: open it when the model is ready)")
    add(
        "--allow-fault-injection",
        action="store_true",
        help="let POST /api/debug/inject damage a session's cache on purpose (default: off)",
    )
    add(
        "--freeze",
        type=Path,
        metavar="FILE",
        help="compute ahead what chats with this text as system prompt begin with, keep it, and exit (default: off)",
    )
    add("--plan", action="store_true", help="print what memory the model needs, and exit (default: off)")
    return parser


def _number(low: int, high: int) -> Any:
    def convert(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, not {text!r}")
        return int(text)

    return convert


def _size(text: str) -> int:
    """Bytes of "2GiB", "500 MB", "1.5g" or "1048576"."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([a-z]*)", text.strip().lower())
    unit = match[2].removesuffix("b") if match and match[2] == "b" else match[2] if match else ""
    if match is None or unit not in UNITS or float(match[1]) * UNITS[unit] < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 2GiB or 500MB, not {text!r}")
    return int(float(match[1]) * UNITS[unit])


def _size_or_none(text: str) -> int:
    """As `_size`; "0" is allowed."""
    return 0 if text.strip() == "0" else _size(text)


def default_data_dir() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "KVScope"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "KVScope"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "kvscope"


def check_options(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for what this version does not do, and for what would be unsafe."""
    options.api_key = os.environ.get("KVSCOPE_API_KEY") if options.api_key is None else options.api_key
    if options.api_key is not None and not re.fullmatch(r"[!-~]+", options.api_key):
        raise ConfigError("The API key must be printable ASCII characters without blanks, at least one.")
    if not is_loopback(options.host) and options.api_key is None:
        raise ConfigError(f"Listening on {options.host} lets other machines in, so it needs --api-key.")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        data_dir=(options.data_dir or Path(os.environ.get("KVSCOPE_DATA") or default_data_dir())).expanduser(),
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        kv_format=options.kv_format,
        max_seq_len=options.max_seq_len,
        kv_budget=options.kv_budget,
        block_size=options.block_size,
        chat_template=options.chat_template,
        snapshot_limit=options.snapshot_limit,
        ram_limit=options.ram_limit,
        fault_injection=options.allow_fault_injection,
        window=options.window,
        sinks=options.sinks,
        share_layers=options.share_layers,
        speculation=options.speculation,
    )


def main() -> int:
    """Run until a signal; the exit code."""
    on_signals(end_cleanly)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        options = make_parser().parse_args()
        check_options(options)
        config = engine_config(options)
        check_window(config)
        if options.plan:
            from engine.memory.model_plan import plan_model

            print(plan_model(config))
            return 0
        if options.freeze is not None:
            print(freeze(options.freeze, config))
            return 0
        serve(options, config)
    except (KVScopeError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2


def on_signals(handler: Callable[..., object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def end_cleanly(*_: object) -> NoReturn:
    """What is being fetched is put away; who asks again does not wait for that."""
    signal.signal(signal.SIGINT, end_at_once)
    sys.exit(0)


def end_at_once(*_: object) -> NoReturn:
    """What is on disk stays whole, as after a crash."""
    os.write(2, b"Interrupted again: KVScope ends at once, and what was not yet stored is lost.\n")
    os._exit(130)


def freeze(path: Path, config: EngineConfig) -> str:
    """Check the file before the model is loaded; the line to print."""
    text = read_text(path)
    before_loading(config)
    on_signals(lambda *_: os._exit(130))
    from engine.freeze import freeze_text

    return freeze_text(config, text, path.stem)


def before_loading(config: EngineConfig) -> None:
    """Find the model, and set what libraries look at when they are imported. Raises `ModelFileError`."""
    resolve(config.model, config.data_dir)
    prepare(config)
    quick_imports.install()
    # torch's threads wait for each other by spinning; beside any other busy program a prefill then takes ten times as
    # long. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def serve(options: argparse.Namespace, config: EngineConfig) -> NoReturn:
    """Check what is quick to check, then load the model while the page is being built."""
    # What is made until then stays, and to pass over it again and again takes a tenth of the start.
    gc.disable()
    opened = open_socket(options.host, options.port)
    before_loading(config)
    from sessions.store import SessionStore

    store = SessionStore(config.data_dir / "kvscope.db")
    from engine.local import LocalEngine

    engine = LocalEngine(config)
    engine.start()
    # The load can't be interrupted, and there is nothing to store yet.
    on_signals(lambda *_: os._exit(0))
    import uvicorn

    from ui.api.routes import build_api
    from ui.chat import ChatService
    from ui.layout import mount
    from ui.security import Security

    chat = ChatService(store, engine)
    chat.forget_orphans()
    app = mount(build_api(chat, lambda: local_models(config.data_dir)), chat)
    guarded = Security(app, names=own_names(options.host), api_key=options.api_key)
    server = uvicorn.Server(
        uvicorn.Config(guarded, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S)
    )
    start = Start(server, engine, url_of(opened), not options.no_browser)
    end_replies_first(server, chat)
    end_at_once_when_asked_again(server)
    start.begin()
    # From here on a signal is the server's; when it has ended it raises the signal again, which must not end us early.
    on_signals(lambda *_: None)
    server.run(sockets=[opened])
    finish(start, chat)


class Start:
    """Waits beside the server until the first chat could be sent, and says so; or ends the server if the load fails."""

    def __init__(self, server: uvicorn.Server, engine: LocalEngine, url: str, open_browser: bool) -> None:
        self._server, self._engine, self._url, self._open_browser = server, engine, url, open_browser
        self.failure: str | None = None

    def begin(self) -> None:
        threading.Thread(target=self._wait, name="kvscope-start", daemon=True).start()

    def _wait(self) -> None:
        try:
            self._engine.wait_ready()
        except KVScopeError as error:
            self.failure = str(error)
        except BaseException as error:
            self.failure = f"The model could not be loaded: {type(error).__name__}."
            logging.getLogger("kvscope").warning("loading failed", exc_info=error)
        if self.failure is not None:
            self._server.should_exit = True
            return
        while not self._server.started and not self._server.should_exit:
            time.sleep(0.02)
        if self._server.should_exit:
            return
        known = self._engine.capabilities()
        gc.freeze()
        gc.enable()
        print(f"KVScope ready: {self._url} (model {known['model']}, device {known['device']})", flush=True)
        # Without a desktop, the browser would be one that takes over the terminal.
        if self._open_browser and (sys.platform != "linux" or os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}):
            import webbrowser

            webbrowser.open(self._url)


def end_replies_first(server: uvicorn.Server, chat: ChatService) -> None:
    """When the server is told to stop, running replies end first: then all streams end by themselves, complete."""
    shutdown = server.shutdown

    def end_replies() -> None:
        chat.close()
        # A load can't be interrupted, so nobody waits for it.
        if chat.engine.status() != "loading":
            chat.engine.close()

    async def end_then_shutdown(sockets: Any = None) -> None:
        await asyncio.to_thread(end_replies)
        await shutdown(sockets)

    server.shutdown = end_then_shutdown  # type: ignore[method-assign]


def end_at_once_when_asked_again(server: uvicorn.Server) -> None:
    """A second SIGINT does not wait for what the first one began."""
    handle_exit = server.handle_exit

    def handle(number: int, frame: FrameType | None) -> None:
        if server.should_exit and number == signal.SIGINT:
            end_at_once()
        handle_exit(number, frame)

    server.handle_exit = handle  # type: ignore[method-assign]


def finish(start: Start, chat: ChatService) -> NoReturn:
    """Everything is stored: leave at once. Taking torch and the page's modules apart would take seconds."""
    if start.failure is not None:
        print(start.failure, file=sys.stderr)
    chat.store.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if start.failure is None else 2)


if __name__ == "__main__":
    sys.exit(main())
