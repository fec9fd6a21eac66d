"""Threads that share a compiled call: who comes late, who is missing, and what is kept for them."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from kernels.dispatch import cpu_kernels
from tests.support.fake_engine import wait_until

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="the CPU kernels can't be compiled here")

TASKS = 500
ROOT = Path(__file__).parents[2]


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


@pytest.fixture
def team():
    from kernels.cpu.team import Team

    return Team(2)


def test_every_task_is_done_once_whoever_comes(kernel, team):
    for _ in range(200):
        counts = np.zeros(2, np.int64)
        team.run(kernel, 1, (counts.ctypes.data, 0, TASKS), counts)
        assert counts.sum() == TASKS


def test_a_thread_that_is_held_up_holds_nobody_up_and_gets_no_more_than_its_mailbox_holds(kernel, team):
    """What a call needs stays until the last thread has left it, and not longer: no other call has to come."""
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
    assert wait_until(lambda: not any(one() is not None for one in kept))
    assert counts[0] >= 3 * JOBS * TASKS


def test_a_team_of_one_runs_alone(kernel):
    from kernels.cpu.team import Team

    counts = np.zeros(1, np.int64)
    Team(1).run(kernel, 1, (counts.ctypes.data, 0, TASKS), counts)
    assert counts.tolist() == [TASKS]


LOOPS = """
import atexit, os, threading
atexit.register(lambda: print("threads", threading.active_count()))  # the first that is registered is the last to run
import numpy as np
from kernels.cpu.team import Team
from tests.kernels.test_cpu_team import TASKS, Kernel

def descriptor():
    number = os.dup(0)
    os.close(number)
    return number

def calls(kernel):
    team, counts = Team(4), np.zeros(4, np.int64)
    for _ in range(3):
        team.run(kernel, PHASES, (counts.ctypes.data, 0, TASKS), counts)
    assert counts.sum() == 3 * TASKS
    return team

PHASES = 40  # numpy keeps what is smaller than a kilobyte when it is freed
before = threading.active_count(), descriptor()
for _ in range(5):
    kernel = Kernel()
    for _ in range(60):
        calls(kernel)
        assert (threading.active_count(), descriptor()) == before
    del kernel
team = calls(Kernel())
print("done")
"""


def test_threads_end_before_what_they_work_on_is_gone():
    """Teams that come and go with all they run, and one that is there when the interpreter ends. A thread that woke up
    late drew its task from memory, by code, that others had already."""
    ended = subprocess.run([sys.executable, "-c", LOOPS], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "done\nthreads 1\n"), ended.stderr
