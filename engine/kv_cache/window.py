"""Which blocks each group of layers needs: what may be given up, and from where a sequence can go on. Integers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernels.layer_groups import LayerGroup

MOST_SLACK = 32
"""A reply may lose this many of its last tokens, to a stop string or to bytes that form no character, and go on."""

BlockPlace = tuple[int, int]
"""(group of layers, position // block size)."""
Held = Callable[[int, int], bool]
"""Whether a group has the block of an index (position // block size)."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The groups of one cache, with its block size.

    To go on at position n, a group with a window needs the blocks of the `window` positions before n and of the sinks;
    a group without one needs all. What it keeps while it runs is a little more (`slack`), so that n may move back.
    """

    groups: tuple[LayerGroup, ...]
    block_size: int

    @property
    def any(self) -> bool:
        """Whether some group gives blocks up."""
        return any(group.window is not None for group in self.groups)

    @property
    def widest(self) -> int:
        """The group that keeps most."""
        return max(range(len(self.groups)), key=lambda g: self.groups[g].window or 2**62, default=0)

    def is_whole(self, group: int) -> bool:
        """Whether this group keeps every block."""
        return self.groups[group].window is None

    def slack(self, group: int) -> int:
        """Tokens before the window that are kept too."""
        window = self.groups[group].window
        return 0 if window is None else max(self.block_size, min(MOST_SLACK, window // 8))

    def sink_blocks(self, group: int) -> int:
        """Leading blocks that hold sinks."""
        return -(-self.groups[group].sinks // self.block_size)

    def first(self, group: int, count: int, slack: int = 0) -> int:
        """Index of the first block, sinks apart, that is needed to go on at position `count`."""
        span = self._span(group)
        return 0 if span is None else max(count - span - slack, 0) // self.block_size

    def needs(self, group: int, index: int, count: int, slack: int = 0) -> bool:
        """Whether the block at `index` is needed to go on at position `count`."""
        end = -(-count // self.block_size)
        return index < end and (index >= self.first(group, count, slack) or index < self.sink_blocks(group))

    def keeps(self, group: int, index: int, count: int, anchors: Sequence[int]) -> bool:
        """Whether a sequence at position `count` keeps the block; `anchors` are positions that it may go back to."""
        end = -(-count // self.block_size)
        return index >= end or any(
            self.needs(group, index, n, slack) for n, slack in ((count, self.slack(group)), *((a, 0) for a in anchors))
        )

    def passed(self, group: int, before: int, count: int) -> range:
        """Indices that leave what is kept, anchors apart, when a sequence moves on from `before` to `count` tokens."""
        slack = self.slack(group)
        low = max(self.first(group, before, slack), self.sink_blocks(group))
        return range(low, self.first(group, count, slack))

    def resume_point(self, count: int, held: Held) -> int:
        """The greatest position up to `count` at which every group has what it needs."""
        while True:
            missing = [index for group in range(len(self.groups)) for index in self._missing(group, count, held)]
            if not missing:
                return count
            # Between the missing block's start and `count` every position needs it, so go back to its start.
            count = min(missing) * self.block_size

    def _missing(self, group: int, count: int, held: Held) -> list[int]:
        end, first = -(-count // self.block_size), self.first(group, count)
        sinks = range(min(self.sink_blocks(group), first))
        return [index for part in (sinks, range(first, end)) for index in part if not held(group, index)]

    def blocks(self, count: int, chunk: int = 0) -> int:
        """The most blocks, of all groups, that a sequence of `count` tokens needs at a time; `chunk` tokens of it are
        run in one step."""
        return sum(self.group_blocks(group, count, chunk) for group in range(len(self.groups)))

    def group_blocks(self, group: int, count: int, chunk: int = 0) -> int:
        """The same of one group."""
        everything = -(-count // self.block_size)
        span = self._span(group)
        if span is None:
            return everything
        # A run of n tokens that begins anywhere in a block touches one more block than n / block size.
        run = -(-(span + self.slack(group) + max(chunk, 1) - 1) // self.block_size) + 1
        return min(everything, self.sink_blocks(group) + run)

    def _span(self, group: int) -> int | None:
        """The window; at least a block, so that a sequence always has its last full one."""
        window = self.groups[group].window
        return None if window is None else max(window, self.block_size)
