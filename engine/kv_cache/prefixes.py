"""How far two histories are the same."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_len(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading ids are equal. Compares halves, so long equal histories cost a few slice comparisons."""
    left, right = tuple(left), tuple(right)
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
