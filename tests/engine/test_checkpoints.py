"""Recurrent states without tensors: a slot "holds" the ids it is the state of, so what a copy would do can be watched.

A state can't be cut back. Whatever is done to a sequence, the state that it runs on must be that of exactly its first
`cache_pos` ids, its blocks must hold those ids too, and no slot may be lost or used twice.
"""

from __future__ import annotations

import random

import pytest

from engine.kv_cache.block_pool import BlockPool, OutOfBlocks
from engine.kv_cache.checkpoints import CLEARED, StateCheckpoints
from engine.kv_cache.integrity import check_integrity
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.prefixes import common_prefix_len
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence, Status

SIZE = 4


class Machine:
    """A scheduler over states made of ids: a step appends its tokens to them, as a recurrence would take them in."""

    def __init__(self, slots: int = 12, blocks: int = 64, holds_kv: bool = True, **limits: int) -> None:
        self.checkpoints = StateCheckpoints(BlockPool(slots))
        self.cache = PrefixCache(BlockPool(blocks if holds_kv else 2), SIZE, self.checkpoints, holds_kv)
        self.scheduler = Scheduler(self.cache, SchedulerLimits(**limits))
        self.states: dict[int, list[int]] = {}
        self.kv: dict[int, list[int | None]] = {}
        self.steps: list[list[int]] = []

    def new(self, token_ids: list[int], session_id: str | None = "s") -> Sequence:
        sequence = Sequence(self.cache, session_id)
        sequence.set_tokens(token_ids)
        return sequence

    def copy(self) -> None:
        for source, target in self.checkpoints.slots.take_copies():
            self.states[target] = [] if source == CLEARED else list(self.states[source])
        for source, target in self.cache.pool.take_copies():
            self.kv[target] = list(self.kv[source])

    def run(self, sequence: Sequence, start: int, count: int) -> None:
        """What the model does with an item: it reads state and blocks and writes its tokens into both."""
        ids = sequence.token_ids
        assert sequence.state is not None and sequence.state.live is not None
        state = self.states[sequence.state.live]
        assert state == ids[:start], "the state is not that of the ids before this step"
        state += ids[start : start + count]
        for position in range(start + count if self.cache.holds_kv else 0):
            block_id = sequence.block_table[position // SIZE]
            block = self.kv.setdefault(block_id, [None] * SIZE)
            if position >= start:
                assert self.cache.pool.ref_count(block_id) == 1, "a block of several owners is written"
                block[position % SIZE] = ids[position]
            assert block[position % SIZE] == ids[position], "the blocks don't hold the ids before this step"

    def step(self, sample=lambda sequence: 7) -> list[Sequence]:
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        self.copy()
        for item in batch.items:
            sequence = item.sequence
            self.run(sequence, item.start, item.count)
            sequence.advance(item.count)
            if item.wants_logits:
                sequence.token_ids.append(sample(sequence))
        self.steps.append([item.count for item in batch.items])
        return [item.sequence for item in batch.items]

    def turn(self, sequence: Sequence, prompt: list[int], generate: int = 3) -> int:
        """A whole turn, alone; tokens reused."""
        shared = common_prefix_len(sequence.token_ids[: sequence.cache_pos], prompt)
        sequence.truncate(min(shared, len(prompt) - 1))
        sequence.set_tokens(prompt)
        self.scheduler.add(sequence)
        reused = None
        while len(sequence.token_ids) < len(prompt) + generate:
            batch_before = len(self.steps)
            assert self.step()
            if reused is None:
                reused = sequence.cache_pos - self.steps[batch_before][0]
        self.scheduler.finish(sequence)
        self.check()
        assert reused is not None
        return reused

    def check(self) -> None:
        self.copy()
        check_integrity(self.cache, self.scheduler.sequences())
        held = [sequence.state.held for sequence in self.scheduler.sequences() if sequence.state.held]
        for kept in [*self.checkpoints, *held]:
            assert self.states[kept.slot] == list(kept.token_ids), "a checkpoint was written to"


@pytest.mark.parametrize("holds_kv", [True, False], ids=["hybrid", "recurrent"])
def test_turns_resume_where_a_state_was_kept(holds_kv):
    """The end of a reply for the next turn and for edits, the last block boundary of a prompt for a new reply."""
    machine = Machine(holds_kv=holds_kv)
    sequence = machine.new([])
    first = list(range(100, 110))
    assert machine.turn(sequence, first) == 0
    assert machine.steps[:2] == [[8], [2]]
    history = list(sequence.token_ids)
    assert machine.turn(sequence, [*history, 50, 51]) == len(history) - 1
    assert machine.turn(sequence, [*history, 60, 61]) == len(history) - 1, "an edit goes on from the reply before it"
    assert machine.turn(sequence, first) == 8, "another reply goes on from within the prompt"
    assert machine.turn(sequence, [1, *first]) == 0
    assert machine.turn(sequence, [*history, 50, 51, 52]) >= 12, "the branch that was left is found again"


@pytest.mark.parametrize("holds_kv", [True, False], ids=["hybrid", "recurrent"])
def test_a_prompt_is_taken_over_only_where_a_state_was_kept(holds_kv):
    """The blocks of 20 tokens are shared, but of the state there is one at 8 and one at 12."""
    machine = Machine(holds_kv=holds_kv)
    machine.turn(machine.new([], "a"), list(range(10)))
    machine.turn(machine.scheduler.idle["a"], [*range(10), 7, 7, 30, 31, 32, 33, 34, 35, 36, 37])
    assert [kept.position for kept in machine.checkpoints] == [8, 12, 16, 22]
    assert machine.turn(machine.new([], "b"), [*range(10), 7, 7, 30, 31, 99, 99]) == 12
    assert machine.turn(machine.new([], "c"), [*range(10), 7, 99, 99, 99, 99]) == 8
    assert machine.turn(machine.new([], "d"), [*range(7), 99, 99]) == 0


@pytest.mark.parametrize("holds_kv", [True, False], ids=["hybrid", "recurrent"])
def test_a_system_prompt_that_chats_share_is_computed_twice_at_most(holds_kv):
    """Where the second chat parts from the first a state is kept, and all others begin there. A few tokens aren't worth
    a state."""
    machine = Machine(holds_kv=holds_kv)
    system = list(range(100, 122))
    reused = [machine.turn(machine.new([], name), [*system, n, n, n]) for n, name in enumerate("abcd")]
    assert reused == [0, 0, 20, 20]
    assert machine.steps[4:7] == [[20], [4], [1]]
    short = [machine.turn(machine.new([], f"short {n}"), [*range(200, 215), *[n] * 5]) for n in range(3)]
    assert short == [0, 0, 0]


def test_a_shared_block_is_copied_where_the_state_lies_inside_it():
    machine = Machine()
    parent = machine.new([], "parent")
    machine.turn(parent, list(range(9)))
    child = parent.fork("child", 11)
    assert child.cache_pos == parent.cache_pos == 11
    assert child.block_table[:2] == parent.block_table[:2] and child.block_table[2] != parent.block_table[2]
    assert child.state.held is parent.state.held
    machine.scheduler.finish(child)
    machine.check()
    machine.turn(parent, [*range(9), 7, 7, 7, 1, 2, 3])
    assert machine.turn(child, [*range(9), 7, 7, 8, 4, 5, 6]) == 11


def test_a_prompt_taken_over_within_a_block_copies_that_block():
    """The block was filled after the state inside it was kept; the newcomer runs the rest of it again."""
    machine = Machine()
    machine.turn(machine.new([], "a"), list(range(9)))
    machine.turn(machine.scheduler.idle["a"], [*range(9), 7, 7, 7])
    assert [kept.position for kept in machine.checkpoints] == [8, 11, 14]
    assert machine.turn(machine.new([], "b"), [*range(9), 7, 7, 7, 5, 5, 5]) == 11
    assert machine.turn(machine.scheduler.idle["a"], [*range(9), 7, 7, 7, 7, 7, 4]) == 14


def test_a_fork_of_a_running_reply_has_the_state_of_that_moment():
    machine = Machine()
    sequence = machine.new(list(range(9)), "parent")
    machine.scheduler.add(sequence)
    for _ in range(4):
        machine.step()
    child = sequence.fork("child", sequence.cache_pos)
    machine.scheduler.finish(child)
    assert child.cache_pos == sequence.cache_pos == 11
    machine.step()
    machine.check()


def test_a_failed_step_leaves_nothing_of_its_state():
    machine = Machine()
    sequence = machine.new([])
    machine.turn(sequence, list(range(10)))
    start, prompt = sequence.cache_pos, [*sequence.token_ids, 50, 51]
    sequence.set_tokens(prompt)
    machine.scheduler.add(sequence)
    batch = machine.scheduler.schedule()
    machine.copy()
    machine.states[sequence.state.live].append(-1)  # the step has written to the state before its result is judged
    assert batch.items[0].start == start
    sequence.distrust_state()
    sequence.truncate(start)
    sequence.set_tokens(prompt[: sequence.cache_pos + 1])
    machine.scheduler.finish(sequence)
    machine.check()
    assert sequence.cache_pos == start and machine.turn(sequence, prompt) == start


def test_the_longest_idle_session_gives_its_state_and_running_ones_none():
    machine = Machine(slots=4, holds_kv=False)
    for name in ("old", "new"):
        machine.turn(machine.new([], name), [ord(name[0]), 1, 2])
    running = machine.new([5, 6, 7], "running")
    machine.scheduler.add(running)
    machine.step()
    machine.scheduler.add(machine.new([8, 9], "late"))
    machine.step()
    machine.check()
    assert machine.scheduler.idle["old"].cache_pos == 0 and machine.scheduler.idle["old"].evicted_from == 5
    assert running.cache_pos == 4 and running.state.live is not None


def test_with_room_for_one_state_a_turn_goes_on_in_the_slot_it_has():
    machine = Machine(slots=2, holds_kv=False)
    sequence = machine.new([])
    machine.turn(sequence, list(range(10)))
    assert machine.turn(sequence, [*sequence.token_ids, 5, 6]) == 12
    assert machine.turn(sequence, [*range(10), 4]) == 0, "there was no room for the state before"


def test_the_least_recently_used_checkpoint_goes_first_and_held_ones_stay():
    checkpoints = StateCheckpoints(BlockPool(4))
    kept = [checkpoints.add([n], checkpoints.allocate(), None) for n in range(3)]
    checkpoints.slots.add_ref(kept[0].slot)
    checkpoints.touch(kept[1])
    checkpoints.allocate()
    assert list(checkpoints) == [kept[0], kept[1]]
    checkpoints.allocate()
    with pytest.raises(OutOfBlocks):
        checkpoints.allocate()
    assert list(checkpoints) == [kept[0]]


def test_a_deleted_session_leaves_no_state():
    machine = Machine()
    machine.turn(machine.new([], "a"), list(range(10)))
    machine.scheduler.idle.pop("a").release_blocks()
    machine.cache.forget("a")
    assert list(machine.checkpoints) == [] and machine.checkpoints.slots.used_count == 0


class Traffic:
    """Sends, edits, forks, failures, cancels, deletes of several sessions on pools that hold little more than one."""

    LIMIT = 11 * SIZE

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.machine = Machine(
            slots=self.rng.randint(2, 9),
            blocks=self.rng.randint(13, 40),
            holds_kv=self.rng.random() < 0.7,
            max_batch_tokens=self.rng.choice([3, 8, 64]),
            mixed_batch_tokens=4,
        )
        self.scheduler = self.machine.scheduler
        self.goal: dict[Sequence, int] = {}

    def send(self) -> None:
        session_id = self.rng.choice(["a", "b", "c", None])
        sequence = (self.scheduler.find(session_id) if session_id else None) or self.machine.new([], session_id)
        if sequence in self.goal:
            return
        history = sequence.token_ids[: self.rng.randint(0, len(sequence.token_ids))]
        prompt = (history + [self.rng.randint(0, 2) for _ in range(self.rng.randint(1, 12))])[: self.LIMIT - 8]
        shared = common_prefix_len(sequence.token_ids[: sequence.cache_pos], prompt)
        expected = sequence.resume_point(min(shared, len(prompt) - 1))
        sequence.truncate(min(shared, len(prompt) - 1))
        assert sequence.cache_pos <= expected
        sequence.set_tokens(prompt)
        self.scheduler.add(sequence)
        self.goal[sequence] = len(prompt) + self.rng.randint(1, 8)

    def cancel(self) -> None:
        if self.goal:
            self.end(self.rng.choice(list(self.goal)), cut=self.rng.random() < 0.5)

    def fail(self) -> None:
        if self.scheduler.running:
            sequence = self.rng.choice(self.scheduler.running)
            self.machine.copy()
            self.machine.states[sequence.state.live].append(-1)
            sequence.distrust_state()
            self.end(sequence, cut=True)

    def fork(self) -> None:
        known = [*self.scheduler.idle.values(), *self.scheduler.running]
        if known:
            source = self.rng.choice(known)
            count = source.cache_pos if self.rng.random() < 0.5 else self.rng.randint(0, source.cache_pos)
            twin = source.fork(f"fork{self.rng.random()}", count)
            assert twin.cache_pos <= count
            self.scheduler.finish(twin)

    def delete(self) -> None:
        if self.scheduler.idle:
            name = self.rng.choice(list(self.scheduler.idle))
            self.scheduler.idle.pop(name).release_blocks()
            self.machine.cache.forget(name)

    def step(self) -> None:
        for sequence in self.machine.step(lambda _: self.rng.randint(0, 2)):
            assert sequence.status is Status.RUNNING
            if len(sequence.token_ids) >= self.goal[sequence]:
                self.end(sequence, cut=self.rng.random() < 0.2)

    def end(self, sequence: Sequence, cut: bool) -> None:
        """With `cut` the reply loses its end, as a stop string would take it."""
        del self.goal[sequence]
        if cut:
            sequence.truncate(self.rng.randint(0, sequence.cache_pos))
        sequence.set_tokens(sequence.token_ids[: sequence.cache_pos + 1])
        self.scheduler.finish(sequence)


@pytest.mark.parametrize("seed", range(150))
def test_random_traffic_always_ends_and_leaks_nothing(seed):
    traffic = Traffic(seed)
    acts = [traffic.send, traffic.cancel, traffic.fail, traffic.fork, traffic.delete, traffic.step]
    for _ in range(120):
        traffic.rng.choices(acts, weights=[25, 5, 3, 6, 5, 60])[0]()
        traffic.machine.check()
    for _ in range(500):
        traffic.step()
    assert not traffic.scheduler.has_work
    while traffic.scheduler.idle:
        traffic.delete()
    traffic.machine.checkpoints.evict(10_000)
    traffic.machine.cache.evict(10_000)
    assert traffic.machine.checkpoints.slots.used_count == 0 and traffic.machine.cache.pool.used_count == 0
