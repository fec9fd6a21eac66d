"""The command line: arguments, their bounds and their help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from engine.config import DEVICES, DTYPES, KV_FORMATS, SPECULATION
from engine.errors import ConfigError

PRODUCT = "KVScope: chat with a model on your own GPU, and see the model's memory."
Add = Callable[..., argparse.Action]
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {f"{unit}ib": UNITS[unit] for unit in "kmgt"}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence in place of the usage."""
        raise ConfigError(f"{message[:1].upper()}{message[1:].rstrip('.')}; --help lists all arguments.")


def make_parser(data_dir: Path) -> argparse.ArgumentParser:
    """`data_dir`: where data lies when nothing else is said."""
    parser = Parser("app.py", description=PRODUCT, allow_abbrev=False)
    _of_the_model(parser.add_argument_group("model").add_argument)
    _of_the_cache(parser.add_argument_group("KV cache").add_argument)
    _of_what_is_kept(parser.add_argument_group("what is kept").add_argument, data_dir)
    _of_the_server(parser.add_argument_group("page and API").add_argument)
    _of_other_runs(parser.add_argument_group("instead of a chat").add_argument)
    return parser


def _of_the_model(add: Add) -> None:
    add(
        "--model",
        metavar="NAME|DIR|FILE",
        help="hub name, folder with safetensors, or .gguf file (default: SmolLM2-135M-Instruct, fetched on first use)",
    )
    add("--device", choices=DEVICES, default="auto", help="where the model runs (default: auto, a CUDA card if any)")
    add("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: auto, the fastest 16 bit type)")
    add(
        "--chat-template",
        metavar="NAME",
        help="how messages become a prompt: chatml, llama-2, llama-3, mistral, zephyr or plain "
        "(default: the model's own, or the one that its role markers fit)",
    )
    add(
        "--speculation",
        choices=SPECULATION,
        default="auto",
        help="guess tokens from the text so far and run them ahead; replies stay the same "
        "(default: auto, where it is measured to pay)",
    )


def _of_the_cache(add: Add) -> None:
    add(
        "--kv-format",
        choices=KV_FORMATS,
        default="auto",
        metavar="FORMAT",
        help=f"how keys and values are kept: {', '.join(KV_FORMATS)} (default: auto, 16 bits, or as float32 weights)",
    )
    add(
        "--kv-budget",
        type=_size,
        metavar="SIZE",
        help="most memory for the KV cache, such as 2GiB or 500MB (default: 85%% of a card's free memory, 25%% of RAM)",
    )
    add(
        "--max-seq-len",
        type=_number(2, 2**31),
        metavar="N",
        help="most tokens of a conversation (default: the model's own limit, as far as the KV budget holds it)",
    )
    add(
        "--block-size",
        type=_number(1, 1024),
        default=16,
        metavar="N",
        help="tokens in a block of the KV cache (default: 16)",
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


def _of_what_is_kept(add: Add, data_dir: Path) -> None:
    add(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help=f"where chats and models are kept (default: $KVSCOPE_DATA, or {data_dir})".replace("%", "%%"),
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


def _of_the_server(add: Add) -> None:
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1); others need --api-key")
    add("--port", type=_number(0, 65535), default=7860, help="port to listen on, 0 for any (default: 7860)")
    add("--api-key", metavar="KEY", help="key that page and API ask for (default: $KVSCOPE_API_KEY, or none)")
    add("--no-browser", action="store_true", help="do not open the page (default: open it when the model is ready)")
    add(
        "--allow-fault-injection",
        action="store_true",
        help="let POST /api/debug/inject damage a session's cache on purpose (default: off)",
    )


def _of_other_runs(add: Add) -> None:
    add(
        "--freeze",
        type=Path,
        metavar="FILE",
        help="compute ahead what chats with this text as system prompt begin with, keep it, and exit (default: off)",
    )
    add("--plan", action="store_true", help="print what memory the model needs, and exit (default: off)")


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
