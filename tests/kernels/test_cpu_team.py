"""Threads that share a compiled call: who comes late, who is missing, and what is kept for them."""

import gc
import threading
import weakref

import numpy as np
import pytest

from kernels.dispatch import cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="the CPU kernels can't be compiled here")

TASKS = 500
TEAMS = []


class Kernel:
    """Counts tasks of one phase per thread into int64 [threads]; thread 1 waits at the gate where there is one."""

    def __init__(self):
        import numba

        from kernels.cpu import ir as cpu_ir
        from kernels.cpu.tickets import draw, finish, wait

        @numba.cfunc("int64(int64, int64, int64, int64, int64)")
        def count(sync, counts, gate, total, thread):
            while thread and gate and cpu_ir.load_acquire(gate) == 0:
                cpu_ir.pause(0)
            task = draw(sync, 0)
            while task < total:
                cpu_ir.fetch_add(counts + 8 * thread, 1)
                finish(sync, 0)
                task = draw(sync, 0)
            wait(sync, 0, total)
            return 0

        self.function, self.address = count, count.address


class Kept:
    """Something that can be watched."""


@pytest.fixture(scope="module")
def kernel():
    return Kernel()


@pytest.fixture(scope="module")
def team():
    """For good, as the app's: its threads never end, and may still be on their way out of a call."""
    from kernels.cpu.team import Team

    TEAMS.append(Team(2))
    return TEAMS[-1]


def test_every_task_is_done_once_whoever_comes(kernel, team):
    for _ in range(200):
        counts = np.zeros(2, np.int64)
        team.run(kernel, 1, (counts.ctypes.data, 0, TASKS), counts)
        assert counts.sum() == TASKS


def test_a_thread_that_is_held_up_holds_nobody_up_and_gets_no_more_than_its_mailbox_holds(kernel, team):
    """What a call needs stays until the last thread has left it, and not longer."""
    from kernels.cpu.teamwork import JOBS

    gate, counts, kept = np.zeros(1, np.int64), np.zeros(2, np.int64), []
    for i in range(3 * JOBS):
        alive = Kept()
        kept.append(weakref.ref(alive))
        team.run(kernel, 1, (counts.ctypes.data, gate.ctypes.data, TASKS), (alive, gate, counts))
        del alive
        assert counts.tolist() == [(i + 1) * TASKS, 0]
    gc.collect()
    assert all(one() is not None for one in kept[:JOBS])
    gate[0] = 1
    for _ in range(1000):
        team.run(kernel, 1, (counts.ctypes.data, 0, TASKS), counts)
        if not any(one() is not None for one in kept):
            break
        threading.Event().wait(0.01)
    assert not any(one() is not None for one in kept)
    assert counts[0] >= 3 * JOBS * TASKS


def test_a_team_of_one_runs_alone(kernel):
    from kernels.cpu.team import Team

    counts = np.zeros(1, np.int64)
    Team(1).run(kernel, 1, (counts.ctypes.data, 0, TASKS), counts)
    assert counts.tolist() == [TASKS]
