"""What is measured of whole steps, on a card and when only the script is checked."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = ("F16", "Q8_0", "Q4_0", "Q4_K_M")
SPARE = 2**28
"""Bytes beside a plan: the benchmark's own, and what libraries take."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Tokens before and in a measured reply, and steps that are queued at once; mixes of `benchmarks.roofline`."""

    prompt: int = 1024
    reply: int = 64
    queued: int = 20
    weights: tuple[str, ...] = WEIGHTS

    @property
    def context(self) -> int:
        """What a step in the middle of the reply sees."""
        return self.prompt + self.reply // 2

    @property
    def max_seq_len(self) -> int:
        return self.prompt + self.reply + 1


TINY_SETTING = Setting(prompt=12, reply=2, queued=1, weights=("F16", "Q4_K_M"))
