"""Sequences of models with windows, with no model behind them: each group's blocks hold exactly what a step may read.

What a slot holds is simulated as a hash of all tokens up to its position. Random conversations on a small pool send,
edit, regenerate, fork, stop, displace, evict and compact; at every step all that is visible to its tokens must be there
and be right, and afterwards every block must be accounted for.
"""

from __future__ import annotations

import random

import pytest

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.compaction import compact
from engine.kv_cache.integrity import check_integrity
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.prefixes import common_prefix_len
from engine.scheduler import ScheduledItem, Scheduler, SchedulerLimits
from engine.sequence import Sequence, Status
from kernels.layer_groups import LayerGroup
from tests.support.chain_model import chain

SIZE = 4
LAYOUTS = {
    "window": (LayerGroup(8),),
    "sinks": (LayerGroup(8, 2),),
    "sinks over a block": (LayerGroup(12, 6),),
    "local and global": (LayerGroup(8), LayerGroup()),
    "three groups": (LayerGroup(), LayerGroup(10, 1), LayerGroup(20)),
    "all": (LayerGroup(),),
}


class Machine:
    def __init__(self, groups: tuple[LayerGroup, ...], blocks: int = 200, **limits: int) -> None:
        self.cache = PrefixCache(BlockPool(blocks), SIZE, groups=groups)
        self.scheduler = Scheduler(self.cache, SchedulerLimits(**limits))
        self.held: dict[int, list[tuple[int, float] | None]] = {}
        self.computed = 0

    def start(self, session: str, prompt: list[int]) -> Sequence:
        sequence = self.scheduler.find(session) or Sequence(self.cache, session)
        cached = sequence.token_ids[: sequence.cache_pos]
        sequence.truncate(min(common_prefix_len(cached, prompt), len(prompt) - 1))
        sequence.set_tokens(prompt)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        batch = self.scheduler.schedule()
        self._copy()
        if batch is None:
            return False
        for item in batch.items:
            self._store(item)
        for item in batch.items:
            self._look(item)
            self.computed += item.count
            item.sequence.advance(item.count)
            if item.wants_logits:
                item.sequence.token_ids.append(hash((7, *item.sequence.token_ids[-3:])) % 5)
        self.check()
        return True

    def check(self) -> None:
        check_integrity(self.cache, self.scheduler.sequences())

    def _copy(self) -> None:
        for source, target in self.cache.pool.take_copies():
            self.held[target] = list(self.held[source])

    def _store(self, item: ScheduledItem) -> None:
        values = chain(item.sequence.token_ids[: item.start + item.count])
        for group, table in enumerate(item.sequence.block_tables):
            for position in range(item.start, item.start + item.count):
                block_id = table[position // SIZE]
                assert block_id and self.cache.pool.ref_count(block_id) == 1
                self.held.setdefault(block_id, [None] * SIZE)[position % SIZE] = (group, values[position])

    def _look(self, item: ScheduledItem) -> None:
        """Everything that the step's tokens see is in its slot."""
        values = chain(item.sequence.token_ids[: item.start + item.count])
        for group, (kind, table) in enumerate(zip(self.cache.windows.groups, item.sequence.block_tables, strict=True)):
            first = kind.recent_start(item.start)
            seen = {*range(first, item.start + item.count), *range(min(kind.sinks, first))}
            for position in seen:
                slot = self.held[table[position // SIZE]][position % SIZE]
                assert slot == (group, values[position]), (group, position)

    def reply(self, sequence: Sequence, count: int, lost: int = 0) -> None:
        """Run a turn until `count` tokens were generated; the last `lost` of them leave the history again."""
        prompt = len(sequence.token_ids)
        while len(sequence.token_ids) < prompt + count:
            assert self.step()
        self.end(sequence, lost)

    def end(self, sequence: Sequence, lost: int = 0) -> None:
        history = sequence.token_ids[: max(len(sequence.token_ids) - lost, 1)]
        sequence.truncate(min(sequence.cache_pos, len(history)))
        sequence.set_tokens(history[: sequence.cache_pos + 1])
        self.scheduler.finish(sequence)
        self._copy()
        self.check()

    def held_tokens(self, sequence: Sequence) -> list[int]:
        return [sequence.blocks.held_tokens(group, sequence.cache_pos) for group in range(len(sequence.block_tables))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(12))
def test_random_conversations_see_what_they_should(layout, seed):
    rng = random.Random(f"{layout} {seed}")
    machine = Machine(
        LAYOUTS[layout],
        blocks=rng.choice([70, 110, 300]),
        max_sequences=rng.choice([1, 3]),
        max_batch_tokens=rng.choice([3, 16, 64]),
        mixed_batch_tokens=rng.choice([3, 16]),
    )
    histories: dict[str, list[list[int]]] = {"a": []}
    for _ in range(25):
        act(machine, histories, rng)
        machine._copy()
        machine.check()
    for sequence in list(machine.scheduler.idle.values()):
        sequence.release_blocks()
    machine.cache.evict(10_000)
    assert machine.cache.pool.used_count == 0


def act(machine: Machine, histories: dict[str, list[list[int]]], rng: random.Random) -> None:
    """One thing that may happen between two turns, or several turns side by side."""
    kind = rng.choice(["talk"] * 6 + ["fork", "displace", "evict", "compact", "forget", "spare"])
    idle = list(machine.scheduler.idle.values())
    if kind == "talk":
        talk(machine, histories, rng)
    elif kind == "fork" and idle and len(histories) < 5:
        source, name = rng.choice(idle), f"fork {rng.random()}"
        twin = source.fork(name, rng.randint(0, source.cache_pos))
        machine.scheduler.finish(twin)
        histories[name] = [list(twin.token_ids)] if twin.token_ids else []
    elif kind == "displace" and idle:
        rng.choice(idle).release_blocks()
    elif kind == "evict":
        machine.cache.evict(rng.randint(1, 20))
    elif kind == "compact":
        machine._copy()
        compact(machine.cache, machine.scheduler.sequences())
    elif kind == "forget" and idle and len(histories) > 1:
        gone = machine.scheduler.idle.pop(rng.choice(idle).session_id)
        gone.release_blocks()
        machine.cache.forget(gone.session_id)
        histories.pop(gone.session_id, None)
    elif kind == "spare" and idle:
        rng.choice(idle).drop_spare()


def talk(machine: Machine, histories: dict[str, list[list[int]]], rng: random.Random) -> None:
    """Turns of some sessions at once: each goes on, is edited, or regenerates."""
    if rng.random() < 0.3 and len(histories) < 5:
        histories[f"new {rng.random()}"] = []
    running: dict[str, tuple[Sequence, int]] = {}
    for name in rng.sample(sorted(histories), rng.randint(1, len(histories))):
        turns = histories[name]
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            if turns:
                turns.pop()
        before = turns[-1] if turns else [1, 2, 3] * 5
        message = [rng.randint(0, 3) for _ in range(rng.choice([1, 3, 9, 40]))]
        if rng.random() < 0.7 and turns and len(before) > 120:
            before = before[: rng.randint(1, 20)]
        sequence = machine.start(name, [*before, *message])
        running[name] = sequence, len(sequence.token_ids) + rng.choice([1, 4, 30])
    while running:
        assert machine.step(), "nothing can run"
        for name, (sequence, end) in list(running.items()):
            if len(sequence.token_ids) >= end or (sequence.status is Status.RUNNING and rng.random() < 0.02):
                machine.end(sequence, lost=rng.choice([0, 0, 1, 3]))
                histories[name].append(list(sequence.token_ids))
                del running[name]


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_long_reply_takes_constant_memory(sinks):
    machine = Machine((LayerGroup(16, sinks),))
    sequence = machine.start("a", list(range(5)))
    counts = []
    for _ in range(400):
        assert machine.step()
        counts.append(machine.cache.pool.used_count)
    windows = machine.cache.windows
    assert max(counts[100:]) <= windows.blocks(400, 1) + windows.blocks(5)  # the prompt's, to which it may go back
    assert max(counts[100:]) - min(counts[100:]) <= 1
    assert sequence.cache_pos == 404 and machine.held_tokens(sequence)[0] <= 16 + 4 + 3 * SIZE


def test_local_layers_hold_the_window_and_global_layers_all():
    """C08: neither one reads its length from the other."""
    for chunk in (200, 48, 16):
        machine = Machine((LayerGroup(64), LayerGroup()), max_batch_tokens=chunk)
        sequence = machine.start("a", [n % 11 for n in range(200)])
        machine.reply(sequence, 6)
        local, everything = machine.held_tokens(sequence)
        assert sequence.cache_pos == everything == 205
        assert 64 <= local <= 64 + machine.cache.windows.slack(0) + SIZE


def test_the_last_turn_can_be_taken_back_as_long_as_memory_allows():
    machine = Machine((LayerGroup(16, 2), LayerGroup()), max_batch_tokens=8)
    sequence = machine.start("a", [1] * 30)
    machine.reply(sequence, 50)
    first = list(sequence.token_ids)
    machine.reply(machine.start("a", [*first, *[2] * 40]), 50)
    machine.computed = 0
    machine.reply(machine.start("a", [*first, *[2] * 40]), 3)  # regenerate
    assert machine.computed <= 1 + 2
    machine.reply(machine.start("a", [*first, *[3] * 40]), 50)  # edit
    assert machine.computed <= 3 + 40 + 50
    sequence = machine.scheduler.idle["a"]
    assert sequence.drop_spare() and not sequence.drop_spare()
    assert sequence.resume_point(len(first) + 10) <= SIZE  # up to there sinks are all that is needed
    machine.computed = 0
    machine.reply(machine.start("a", [*first, *[4] * 40]), 3)
    assert machine.computed <= 3 + 40 + 2  # two edits part there, so the tree has kept the window
    machine.scheduler.idle["a"].drop_spare()
    machine.cache.evict(1000)
    machine.computed = 0
    machine.reply(machine.start("a", [*first, *[5] * 40]), 3)
    assert len(first) + 40 + 2 - SIZE <= machine.computed <= len(first) + 40 + 2


def test_the_turn_before_is_given_up_when_the_next_one_starts():
    machine = Machine((LayerGroup(16),))
    sequence = machine.start("a", [1] * 100)
    machine.reply(sequence, 100)
    spare = sequence.blocks.count
    machine.reply(machine.start("a", [*sequence.token_ids, 3, 3, 3]), 1)
    assert sequence.blocks.count < spare


def test_a_prompt_that_others_share_is_computed_twice_at_most():
    """Where prompts part, the window before stays in the tree."""
    machine = Machine((LayerGroup(8), LayerGroup()), max_batch_tokens=16)
    system = [n % 7 for n in range(80)]
    costs = []
    for session in "abcd":
        machine.computed = 0
        machine.reply(machine.start(session, [*system, *[ord(session)] * 40]), 2)
        costs.append(machine.computed)
    assert costs == [121, 121, 41, 41]


def test_a_prompt_that_another_is_computing_is_taken_over_where_it_parts():
    machine = Machine((LayerGroup(8),), max_batch_tokens=64, mixed_batch_tokens=64)
    system = [n % 7 for n in range(86)]
    first, second = machine.start("a", [*system, *[1] * 40]), machine.start("b", [*system, *[2] * 40])
    while first.remaining > 1 or second.remaining > 1:
        assert machine.step()
    assert machine.computed < 2 * (86 + 40) - 84 + 10  # and the tokens that the first one says meanwhile


def test_a_window_gives_way_under_pressure_before_another_session_does():
    machine = Machine((LayerGroup(8),), blocks=30)
    machine.reply(machine.start("a", [1] * 30), 2)
    machine.reply(machine.start("b", [2] * 30), 60)
    machine.cache.evict(100)
    idle = machine.scheduler.idle
    before = idle["a"].cache_pos
    assert machine.cache.pool.free_count < 20
    assert machine.scheduler.make_room(20)
    assert idle["a"].cache_pos == before and not idle["b"].blocks.anchors


def test_a_displaced_session_leaves_the_tree_what_is_needed_to_go_on():
    machine = Machine((LayerGroup(8),))
    sequence = machine.start("a", [n % 5 for n in range(60)])
    machine.reply(sequence, 60)
    assert sequence.blocks.count > machine.cache.windows.blocks(119)
    sequence.release_blocks()
    assert machine.cache.pool.used_count <= machine.cache.windows.blocks(119)
    machine.computed = 0
    machine.reply(machine.start("a", [*sequence.token_ids, 4]), 1)
    assert machine.computed <= SIZE + 1


@pytest.mark.parametrize("layout", ["all", "local and global"])
def test_what_a_group_without_a_window_has_is_eaten_from_the_tail_however_old_it_is(layout):
    machine = Machine(LAYOUTS[layout])
    sequence = machine.start("a", [n % 5 for n in range(40)])
    for _ in range(40):
        machine.step()
    machine.scheduler.leave(sequence)
    sequence.release_blocks()
    while machine.cache.pool.used_count:
        path = len(machine.cache.match(sequence.token_ids))
        assert machine.cache.evict(1)
        machine.check()
        assert path - len(machine.cache.match(sequence.token_ids)) <= 1


def test_a_pool_that_holds_window_and_a_token_runs_any_length():
    groups = (LayerGroup(8, 1),)
    blocks = PrefixCache(BlockPool(2), SIZE, groups=groups).windows.blocks(1000, 1)
    machine = Machine(groups, blocks=blocks + 1, max_batch_tokens=64)
    machine.reply(machine.start("a", [n % 5 for n in range(150)]), 100)
    with pytest.raises(AssertionError):
        smaller = Machine(groups, blocks=blocks, max_batch_tokens=64)
        smaller.reply(smaller.start("a", [n % 5 for n in range(150)]), 100)
