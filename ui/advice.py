"""Which `--max-seq-len` the turns so far would have needed: how long they are, and a limit that holds nearly all.

Pure: lengths and sizes in, plain values out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

NEEDED_TURNS = 20
ROOM_PERCENT = 10
RULE = f"P99 and {ROOM_PERCENT} % more, rounded up to whole blocks"


def percentile(ordered: Sequence[int], percent: int) -> int:
    """The smallest of the ascending values that at least `percent` in a hundred do not exceed (nearest rank)."""
    return ordered[max(-(-percent * len(ordered) // 100), 1) - 1]


def distribution(ordered: Sequence[int]) -> list[tuple[int, float]]:
    """(length, share of turns that are not longer) for ascending lengths, at most a hundred points, the last 1.0."""
    lengths = sorted({percentile(ordered, percent) for percent in range(1, 101)})
    return [(length, bisect_right(ordered, length) / len(ordered)) for length in lengths]


def recommended_len(p99: int, block_size: int) -> int:
    """See `RULE`."""
    wanted = -(-p99 * (100 + ROOM_PERCENT) // 100)
    return -(-wanted // block_size) * block_size


def advise(lengths: Sequence[int], max_seq_len: int, block_size: int, price: Callable[[int], int]) -> dict[str, Any]:
    """The body of `GET /api/advice`. `lengths` are prompt and reply tokens of each turn, in any order; `price` tells
    the bytes that a session of so many tokens takes.

    `saved_bytes` is the difference of the worst case of one session, in whole blocks, at the present and at the
    recommended limit; 0 where lowering it is no advice.
    """
    base: dict[str, Any] = {
        "turns": len(lengths),
        "needed_turns": NEEDED_TURNS,
        "max_seq_len": max_seq_len,
        "at_limit": sum(length >= max_seq_len for length in lengths),
        "rule": RULE,
    }
    if len(lengths) < NEEDED_TURNS:
        none = dict.fromkeys(("p50", "p95", "p99", "recommended", "saved_bytes"))
        text = f"{len(lengths)} of {NEEDED_TURNS} turns so far: too few for advice."
        return base | none | {"cdf": [], "text": text}
    ordered = sorted(lengths)
    p99 = percentile(ordered, 99)
    recommended = recommended_len(p99, block_size)
    saved = max(price(max_seq_len) - price(recommended), 0)
    return base | {
        "p50": percentile(ordered, 50),
        "p95": percentile(ordered, 95),
        "p99": p99,
        "recommended": recommended,
        "saved_bytes": saved,
        "cdf": [list(point) for point in distribution(ordered)],
        "text": _text(recommended, max_seq_len, saved),
    }


def _text(recommended: int, max_seq_len: int, saved: int) -> str:
    if not saved:
        return f"The turns come close to the present limit of {max_seq_len} tokens: lowering it is no advice."
    return (
        f"Paged blocks already take only what is used; --max-seq-len {recommended} in place of {max_seq_len} lowers "
        f"the worst case that has to be reserved per session by {saved / 2**20:.1f} MiB."
    )
