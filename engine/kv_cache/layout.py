"""Where each layer keeps its K and V: layers of one kind in groups, all of the same number of stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.layer_groups import LayerGroup, LayerPlace


@dataclass(frozen=True, slots=True)
class Layout:
    """`stores` in each block, the groups, and the place of each layer that attends (`KVCacheSpec`)."""

    stores: int
    groups: tuple[LayerGroup, ...]
    places: tuple[LayerPlace, ...]


def group_layers(kinds: Sequence[LayerGroup], owners: Sequence[int] | None = None) -> Layout:
    """A layout for layers that see what `kinds` says, one for each.

    `owners` names for each layer the one whose K and V it uses, itself or an earlier one of its kind; None: each has
    its own. Blocks of all groups are equally large, so a group whose layers are fewer than the stores wastes some, in
    groups without a window for every token. The number of stores is chosen so that these waste least; then there are as
    few groups as possible, and then least is wasted in the others.
    """
    owners = range(len(kinds)) if owners is None else owners
    if any(owners[owner] != owner or kinds[owner] != kind for owner, kind in zip(owners, kinds, strict=True)):
        raise ValueError("layers can only use K and V that a layer of their own kind stores")
    stored: dict[LayerGroup, list[int]] = {}
    for layer, owner in enumerate(owners):
        if owner == layer:
            stored.setdefault(kinds[layer], []).append(layer)
    stores = min(range(1, max(map(len, stored.values()), default=0) + 1), key=lambda n: _cost(stored, n), default=0)
    groups: list[LayerGroup] = []
    places: dict[int, LayerPlace] = {}
    for kind, layers in stored.items():
        for start in range(0, len(layers), stores):
            for store, layer in enumerate(layers[start : start + stores]):
                places[layer] = LayerPlace(len(groups), store)
            groups.append(kind)
    return Layout(stores, tuple(groups), tuple(places[owner] for owner in owners))


def _cost(stored: dict[LayerGroup, list[int]], stores: int) -> tuple[int, int, int]:
    """(stores wasted in groups without a window, groups, stores wasted in the others)"""
    counts = {kind: -(-len(layers) // stores) for kind, layers in stored.items()}
    waste = {kind: counts[kind] * stores - len(layers) for kind, layers in stored.items()}
    whole = sum(n for kind, n in waste.items() if kind.window is None)
    return whole, sum(counts.values()), sum(waste.values()) - whole


def neighbours(kinds: Sequence[LayerGroup], count: int) -> tuple[int, ...]:
    """Owners where `count` neighbouring layers of a kind share one store."""
    owners: list[int] = []
    firsts: dict[LayerGroup, tuple[int, int]] = {}
    for layer, kind in enumerate(kinds):
        first, users = firsts.get(kind, (layer, count))
        first, users = (layer, 1) if users == count else (first, users + 1)
        firsts[kind] = first, users
        owners.append(first)
    return tuple(owners)
