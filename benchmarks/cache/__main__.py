"""What the cache saves: memory per KV format and layout and far past a window, time to first token by tier, and the
articles' comparisons.

    python -m benchmarks.cache

Some minutes with the default model; `--parts` runs some of it. Tables, then one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app import default_data_dir
from benchmarks.cache import articles, first_token, formats, layout, windows
from benchmarks.cache.setting import Setting
from benchmarks.common import print_json
from engine.weights.catalog import resolve

README = Path(__file__).parent.parent.parent / "README.md"
PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "formats": formats.measure,
    "utilisation": layout.utilisation,
    "first_token": first_token.measure,
    "beams": layout.beams,
    "window": windows.measure,
    "articles": articles.measure,
}


def run(setting: Setting, parts: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in parts:
        print(f"\n{name}")
        found[name] = PARTS[name](setting)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help="where the model lies or is put")
    parser.add_argument("--text", type=Path, default=README, help="what prompts are cut from (default: the README)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window-tokens", type=int, default=10_000, help="length of the chat in the part window")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    arguments = parser.parse_args()
    if arguments.window_tokens < 2000:
        parser.error("--window-tokens must be at least 2000: a chat of less is hardly past its window.")
    source = resolve(None, arguments.data_dir)
    setting = Setting(
        model=source.path,
        text=arguments.text.read_text("utf-8"),
        window_tokens=arguments.window_tokens,
        rounds=arguments.rounds,
    )
    print_json("cache", {"model": source.name, **run(setting, arguments.parts)})


if __name__ == "__main__":
    main()
