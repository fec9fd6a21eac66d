"""The Triton kernels and whole decode steps on the present card, each beside a peer in the same run.

    python -m benchmarks.gpu

Random weights of the shapes of Llama-3-8B, Llama-3.2-1B and Qwen2.5-7B, those that fit the card's free memory; nothing
is fetched. First the card's copy bandwidth, then attention over 1K to 128K tokens for each cache format, then decode
steps for each weight format, as shares of what that bandwidth allows. Rounds take turns; figures are medians. What
would take longer than --minutes is left out, and named.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

MINUTES = 7.5


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of it (default: {MINUTES})")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument("--results", type=Path, help="folder for the result (default: benchmarks/results)")
    # To check this script where there is no card: every part once, tiny, in Triton's interpreter. Times mean nothing.
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.device == "cpu":
        if not arguments.tiny:
            print("--device cpu only checks this script: it needs --tiny.", file=sys.stderr)
            return 2
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print("This benchmark needs a CUDA card and its driver, and none is available.", file=sys.stderr)
        return 2
    # Only now: Triton settles at its first import whether kernels are interpreted.
    from benchmarks.gpu.run import run

    run(torch.device(arguments.device), arguments.tiny, arguments.minutes, arguments.rounds, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
