"""A session that grows, and is cut every fifth turn: which blocks its snapshot lists after each turn."""

from __future__ import annotations

from engine.kv_cache.snapshot import SnapshotStore
from tests.support.snapshots import FINGERPRINT, holds, holds_state, new_session

CUT_EVERY = 5


def keys_of_turn(turn: int) -> list[str]:
    """Three full blocks more each turn and one that is replaced by the next; at a cut only the first two are left."""
    since_cut = turn % CUT_EVERY
    full = [f"{turn // CUT_EVERY}-{index}" for index in range(3 * since_cut)]
    return ["a", "b", *full, f"last {turn}"]


def reached(store: SnapshotStore) -> int:
    """The turn of the snapshot on disk, verified in full; 0 where there is none."""
    held = store.load(new_session(1), FINGERPRINT)
    if held is None:
        return 0
    turn = int(held.keys[-1].split()[1])
    assert holds(held, keys_of_turn(turn)) and holds_state(held, turn), f"turn {turn} came back changed"
    return turn
