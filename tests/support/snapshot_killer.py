"""Child process: forks writers that save turn after turn of one session, and kills each at a random moment.

Arguments: the store's folder, rounds, seed. Prints the turn that each round reached for certain.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from engine.kv_cache.durable import write_durably
from engine.kv_cache.snapshot import SnapshotStore
from tests.support.snapshots import job, new_session, state
from tests.support.snapshots_of_turns import keys_of_turn, reached

MOST_FILES = 9
"""Files that a writer begins at most before it is killed; a turn has three: blocks, a state, the manifest."""


def write_for_ever(folder: Path, turn: int, begun: int) -> None:
    """Tells of each file that it begins in the pipe `begun`."""
    torch.set_num_threads(1)

    def write(path: Path, data: bytes) -> None:
        os.write(begun, b".")
        write_durably(path, data)

    store = SnapshotStore(folder, 2**30, write)
    while True:
        turn += 1
        keys = keys_of_turn(turn)
        old = reached(store)
        kept = set(keys_of_turn(old)) if old else set()
        store.save(job(new_session(1), keys, [key for key in keys if key not in kept], state=state(turn)))


def main() -> None:
    folder, rounds, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    for _ in range(rounds):
        start = reached(SnapshotStore(folder, 2**30))
        begun, tell = os.pipe()
        child = os.fork()
        if child == 0:
            write_for_ever(folder, start, tell)
        # Counted in files, since a busy machine may take a second for what takes a millisecond on an idle one.
        for _ in range(rng.randint(1, MOST_FILES)):
            os.read(begun, 1)
        time.sleep(rng.uniform(0, 0.004))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(begun)
        os.close(tell)
        print(reached(SnapshotStore(folder, 2**30)), flush=True)


if __name__ == "__main__":
    main()
