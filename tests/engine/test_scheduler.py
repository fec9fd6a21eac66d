"""The scheduler with no model behind it: random turns on a tiny pool all end, and every block is accounted for."""

import random

import pytest

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.integrity import check_integrity
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.prefixes import common_prefix_len
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence, Status

SIZE = 4


def make(blocks: int = 64, **limits: int) -> tuple[PrefixCache, Scheduler]:
    cache = PrefixCache(BlockPool(blocks), SIZE)
    return cache, Scheduler(cache, SchedulerLimits(**limits))


def new(cache: PrefixCache, token_ids: list[int], session_id: str | None = None) -> Sequence:
    sequence = Sequence(cache, session_id)
    sequence.set_tokens(token_ids)
    return sequence


def run_step(scheduler: Scheduler, sample=lambda sequence: 7) -> list[tuple[Sequence, int]]:
    batch = scheduler.schedule()
    assert batch is not None
    for item in batch.items:
        item.sequence.advance(item.count)
        if item.wants_logits:
            item.sequence.token_ids.append(sample(item.sequence))
    return [(item.sequence, item.count) for item in batch.items]


def test_a_long_prefill_is_chunked_and_a_decoding_neighbour_keeps_streaming():
    cache, scheduler = make(max_batch_tokens=32, mixed_batch_tokens=9)
    chatting, long = new(cache, [1, 2, 3]), new(cache, list(range(100, 140)))
    scheduler.add(chatting)
    assert run_step(scheduler) == [(chatting, 3)]
    scheduler.add(long)
    for _ in range(5):
        assert run_step(scheduler) == [(chatting, 1), (long, 8)]
    assert run_step(scheduler) == [(chatting, 1), (long, 1)]
    assert long.cache_pos == 41


def test_a_newcomer_joins_at_the_next_step():
    cache, scheduler = make()
    first, second = new(cache, [1, 2, 3]), new(cache, [4, 5])
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)
    assert run_step(scheduler) == [(first, 1), (second, 2)]


def test_a_prompt_that_another_is_computing_waits_and_shares():
    cache, scheduler = make(max_batch_tokens=8)
    ids = list(range(20))
    first, second = new(cache, ids), new(cache, [*ids[:16], 90])
    scheduler.add(first)
    scheduler.add(second)
    while second.status is Status.WAITING:
        run_step(scheduler)
    assert second.block_table[:4] == first.block_table[:4]


def test_the_longest_idle_session_gives_its_blocks_first_and_running_ones_none():
    cache, scheduler = make(blocks=9)
    for first, name in ((0, "old"), (100, "new")):
        sequence = new(cache, [first + i for i in range(7)], name)
        scheduler.add(sequence)
        run_step(scheduler)
        scheduler.finish(sequence)
    scheduler.add(new(cache, list(range(300, 318))))
    run_step(scheduler)
    assert scheduler.idle["old"].cache_pos == 0 and scheduler.idle["old"].evicted_from == 7
    assert scheduler.idle["new"].cache_pos == 7


def test_without_room_the_newest_running_sequence_starts_over_and_still_ends():
    cache, scheduler = make(blocks=7)
    old, young = new(cache, list(range(8))), new(cache, list(range(50, 58)))
    scheduler.add(old)
    scheduler.add(young)
    while len(old.token_ids) < 20:
        run_step(scheduler)
    assert young.status is Status.WAITING
    scheduler.finish(old)
    while len(young.token_ids) < 20:
        run_step(scheduler)
    check_integrity(cache, scheduler.sequences())


class Traffic:
    """Sends, edits, forks, cancels and deletes of several sessions on a pool that holds little more than one."""

    LIMIT = 11 * SIZE

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cache, self.scheduler = make(
            blocks=self.rng.randint(13, 40), max_batch_tokens=self.rng.choice([3, 8, 64]), mixed_batch_tokens=4
        )
        self.goal: dict[Sequence, int] = {}

    def send(self) -> None:
        session_id = self.rng.choice(["a", "b", "c", None])
        sequence = (self.scheduler.find(session_id) if session_id else None) or Sequence(self.cache, session_id)
        if sequence in self.goal:
            return
        history = sequence.token_ids[: self.rng.randint(0, len(sequence.token_ids))]
        new = [self.rng.randint(0, 2) for _ in range(self.rng.randint(1, 12))]
        prompt = (history + new)[: self.LIMIT - 8]
        shared = common_prefix_len(sequence.token_ids[: sequence.cache_pos], prompt)
        sequence.truncate(min(shared, len(prompt) - 1))
        sequence.set_tokens(prompt)
        self.scheduler.add(sequence)
        self.goal[sequence] = len(prompt) + self.rng.randint(1, 8)

    def cancel(self) -> None:
        if self.goal:
            self.end(self.rng.choice(list(self.goal)))

    def fork(self) -> None:
        if self.scheduler.idle:
            source = self.rng.choice(list(self.scheduler.idle.values()))
            self.scheduler.finish(source.fork(f"fork{self.rng.random()}", self.rng.randint(0, source.cache_pos)))

    def delete(self) -> None:
        if self.scheduler.idle:
            name = self.rng.choice(list(self.scheduler.idle))
            self.scheduler.idle.pop(name).release_blocks()
            self.cache.forget(name)

    def step(self) -> None:
        if not self.scheduler.has_work:
            return
        before = {seq: seq.cache_pos for seq in self.scheduler.running}
        for sequence, _ in run_step(self.scheduler, lambda _: self.rng.randint(0, 2)):
            assert sequence.status is Status.RUNNING and sequence.cache_pos > before.get(sequence, 0)
            if len(sequence.token_ids) >= self.goal[sequence]:
                self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        del self.goal[sequence]
        self.scheduler.finish(sequence)


@pytest.mark.parametrize("seed", range(150))
def test_random_traffic_always_ends_and_leaks_nothing(seed):
    traffic = Traffic(seed)
    acts = [traffic.send, traffic.cancel, traffic.fork, traffic.delete, traffic.step]
    for _ in range(120):
        traffic.rng.choices(acts, weights=[25, 5, 5, 5, 60])[0]()
        check_integrity(traffic.cache, traffic.scheduler.sequences())
    for _ in range(500):
        traffic.step()
    assert not traffic.scheduler.has_work
    while traffic.scheduler.idle:
        traffic.delete()
    traffic.cache.evict(10_000)
    assert traffic.cache.pool.used_count == 0
