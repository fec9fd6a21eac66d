"""Which attention layers see what of the past, and where each keeps its K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind, which share block tables: a query at position p sees the key at position j <= p if p - j is
    less than `window` (None: always) or j less than `sinks`.

    Sinks are StreamingLLM's (Xiao et al., 2023): a key j < sinks with p - j >= window is scored with the query turned
    to position min(p, window + sinks - 1), its distance if the cache were without a gap.
    """

    window: int | None = None
    sinks: int = 0

    @property
    def sink_position(self) -> int | None:
        """The largest position of a query that scores a sink beyond the window; None where there are none such."""
        return self.window + self.sinks - 1 if self.window is not None and self.sinks else None

    def recent_start(self, position: int) -> int:
        """The first position that a query at `position` sees because it is recent."""
        return 0 if self.window is None else max(position + 1 - self.window, 0)

    def visible(self, position: int) -> int:
        """How many keys a query at `position` sees."""
        start = self.recent_start(position)
        return min(self.sinks, start) + position + 1 - start


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's K and V are: in its group's blocks, at this index of the block's layers."""

    group: int
    store: int


def default_places(count: int) -> tuple[LayerPlace, ...]:
    """One group, a store for each layer."""
    return tuple(LayerPlace(0, store) for store in range(count))


def owners(places: Sequence[LayerPlace]) -> tuple[int, ...]:
    """For each layer the first one at its place: that one stores K and V, the others read them."""
    first: dict[LayerPlace, int] = {}
    return tuple(first.setdefault(place, layer) for layer, place in enumerate(places))
