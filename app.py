"""KVScope: chat with a model on your own GPU, and see the model's memory. Wiring only."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from engine.config import EngineConfig, check_window
from engine.errors import ConfigError, KVScopeError
from engine.prepare import prepare
from engine.tiers.frozen_text import read_text
from engine.weights.catalog import local_models, resolve
from sessions.errors import StoreError
from ui import quick_imports
from ui.arguments import make_parser
from ui.lifecycle import Start, end_at_once_when_asked_again, end_cleanly, end_replies_first, finish, on_signals
from ui.network import is_loopback, open_socket, own_names, url_of

GRACE_S = 2


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
        options = make_parser(default_data_dir()).parse_args()
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


def has_desktop() -> bool:
    """Without one, a browser would be one that takes over the terminal."""
    return sys.platform != "linux" or bool(os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"})


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
    start = Start(server, engine, url_of(opened), has_desktop() and not options.no_browser)
    end_replies_first(server, chat)
    end_at_once_when_asked_again(server)
    start.begin()
    # From here on a signal is the server's; when it has ended it raises the signal again, which must not end us early.
    on_signals(lambda *_: None)
    server.run(sockets=[opened])
    finish(start, chat)


if __name__ == "__main__":
    sys.exit(main())
