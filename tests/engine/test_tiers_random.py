"""Tiers at random: scheduler, tree, pools, RAM, disk and the real tensors, over a model whose K, V and state tell what
ids they were made of."""

from __future__ import annotations

import random
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache import KVCache
from engine.kv_cache.checkpoints import StateCheckpoints
from engine.kv_cache.compaction import compact
from engine.kv_cache.held import HeldBlocks
from engine.kv_cache.integrity import check_integrity
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.prefixes import common_prefix_len
from engine.kv_cache.snapshot import SnapshotStore
from engine.kv_cache.spec import KVCacheSpec
from engine.kv_cache.ssm_state import SSMStatePool
from engine.model_runner import ModelRunner
from engine.scheduler import ScheduledBatch, Scheduler, SchedulerLimits
from engine.sequence import Sequence, Status
from engine.tiers.keeper import SessionKeeper
from engine.tiers.restore import NoRoom, Restorer
from kernels.kv_format import FP32
from tests.support.chain_model import STATE, ChainModel, chain

SESSIONS = [str(uuid.UUID(int=number)) for number in range(1, 5)]
SIZE, LIMIT = 4, 48
BLOCK_BYTES = 2 * SIZE * 2 * 4
RAM = st.sampled_from([0, 8, 40])
TOKENS = st.builds(
    lambda seed, count: random.Random(seed).choices(range(3), k=count), st.integers(0, 3), st.integers(1, 30)
)


class Tiers(RuleBasedStateMachine):
    """Models that attend; those of other kinds say which in the draws of `open`."""

    def _open(self, blocks: int, ram_blocks: int, disk: bool, slots: int = 0, holds_kv: bool = True) -> None:
        """`slots` for recurrent states, if the model has any."""
        self.folder, self.holds_kv = tempfile.TemporaryDirectory(), holds_kv
        spec = KVCacheSpec(num_layers=int(holds_kv), num_kv_heads=1, head_dim=2, block_size=SIZE, format=FP32)
        pool = BlockPool(blocks)
        self.states = SSMStatePool(STATE, torch.device("cpu")) if slots else None
        state_slots = BlockPool(slots) if slots else None
        checkpoints = StateCheckpoints(state_slots) if state_slots is not None else None
        self.tree = PrefixCache(pool, SIZE, checkpoints, holds_kv)
        self.scheduler = Scheduler(self.tree, SchedulerLimits(max_batch_tokens=16, mixed_batch_tokens=8))
        cache = KVCache(spec, torch.device("cpu"), extent_bytes=4 * spec.block_bytes, max_blocks=blocks)
        model: Any = ChainModel()
        self.runner = ModelRunner(model, cache, pool, LIMIT, 16, self.states, state_slots)
        self.store = SnapshotStore(Path(self.folder.name), 2**20, lambda path, data: path.write_bytes(data))
        restorer = Restorer(self.tree, self.scheduler, self.runner, 0.0)
        submit = self.store.save if disk else None
        self.keeper = SessionKeeper(
            self.scheduler, self.runner, restorer, ram_blocks * BLOCK_BYTES, submit, lambda: {"model": "chain"}
        )
        displace = self.scheduler.on_displace

        def only_idle(sequence: Sequence) -> None:
            assert sequence.status is Status.IDLE, "a running session never loses a block to another"
            displace(sequence)

        self.scheduler.on_displace = only_idle
        self.goal: dict[Sequence, int] = {}
        self.history: dict[str, list[int]] = {}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def _restore(self, session: str, displacing: bool) -> None:
        held = None if session in self.keeper.present else self.store.load(session, {"model": "chain"})
        if held is not None:
            try:
                self.keeper.adopt(session, held, displacing)
            except NoRoom:
                return

    @rule(session=st.sampled_from(SESSIONS), new=TOKENS, kept=st.integers(0, LIMIT))
    def send(self, session: str, new: list[int], kept: int) -> None:
        if any(sequence.session_id == session for sequence in self.goal):
            return
        prompt = (self.history.get(session, [])[:kept] + new)[: LIMIT - 4]
        self._restore(session, displacing=True)
        self.keeper.before_turn(session)
        sequence = self.scheduler.find(session) or Sequence(self.tree, session)
        shared = common_prefix_len(sequence.token_ids[: sequence.cache_pos], prompt)
        sequence.truncate(min(shared, len(prompt) - 1))
        sequence.set_tokens(prompt)
        self.scheduler.add(sequence)
        self.goal[sequence] = len(prompt) + 3

    @rule(session=st.sampled_from(SESSIONS), new=TOKENS, kept=st.integers(0, LIMIT))
    def whole_turn(self, session: str, new: list[int], kept: int) -> None:
        self.send(session, new, kept)
        self.steps(20)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            batch = self.scheduler.schedule()
            if batch is None:
                self.keeper.save_next(busy=False)
                return
            self.runner.execute(
                ScheduledBatch(tuple(replace(item, wants_logits=False) for item in batch.items)), (), ()
            )
            for item in batch.items:
                item.sequence.advance(item.count)
                if item.wants_logits:
                    item.sequence.token_ids.append(sum(item.sequence.token_ids) % 3)
                if len(item.sequence.token_ids) >= self.goal[item.sequence]:
                    self._end(item.sequence)

    def _end(self, sequence: Sequence) -> None:
        del self.goal[sequence]
        sequence.set_tokens(sequence.token_ids[: sequence.cache_pos + 1])
        self.history[sequence.session_id] = list(sequence.token_ids)
        self.scheduler.finish(sequence)
        self.keeper.turn_ended(sequence.session_id)

    @precondition(lambda self: getattr(self, "goal", None))
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.goal, key=lambda sequence: sequence.session_id))))

    @rule(source=st.sampled_from(SESSIONS), twin=st.sampled_from(SESSIONS), count=st.integers(1, LIMIT))
    def fork(self, source: str, twin: str, count: int) -> None:
        sequence = self.scheduler.idle.get(source)
        if sequence is not None and self.scheduler.find(twin) is None:
            self.keeper.forget(twin)
            self.store.remove(twin)
            self.scheduler.finish(sequence.fork(twin, count))
            self.keeper.turn_ended(twin)

    @rule(session=st.sampled_from(SESSIONS))
    def look(self, session: str) -> None:
        self._restore(session, displacing=False)

    @rule(session=st.sampled_from(SESSIONS))
    def delete(self, session: str) -> None:
        sequence = self.scheduler.find(session)
        if sequence is not None:
            if sequence in self.goal:
                self._end(sequence)
            self.scheduler.idle.pop(session).release_blocks()
        self.tree.forget(session)
        self.keeper.forget(session)
        self.store.remove(session)
        self.history.pop(session, None)

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        self.tree.evict(count)

    @rule()
    def compact_and_trim(self) -> None:
        self.runner.sync_blocks()
        compact(self.tree, list(self.scheduler.sequences()))
        self.runner.trim()
        assert self.tree.pool.high_water == self.tree.pool.used_count + 1

    @rule()
    def save_all(self) -> None:
        self.keeper.save_all()

    @invariant()
    def every_block_is_accounted_for_and_holds_what_its_ids_say(self) -> None:
        if not hasattr(self, "tree"):
            return
        check_integrity(self.tree, self.scheduler.sequences())
        self.runner.sync_blocks()
        for sequence in self.scheduler.sequences() if self.holds_kv else ():
            values = self.runner.cache.read(sequence.block_tables, 0, 0, "v", 0, sequence.cache_pos)
            assert values[:, 1].tolist() == chain(sequence.token_ids[: sequence.cache_pos])
        assert self.keeper.ram.nbytes <= self.keeper.ram.limit
        for session in self.keeper.ram.sizes():
            self._is_whole(self.keeper.ram.find(session))

    @invariant()
    def every_state_is_that_of_its_ids(self) -> None:
        if not hasattr(self, "tree") or self.states is None:
            return
        self.runner.sync_blocks()
        assert self.tree.checkpoints is not None
        held = [sequence.state.held for sequence in self.scheduler.sequences() if sequence.state.held]
        for kept in [*self.tree.checkpoints, *held]:
            self._is_state(self.states.export_state(kept.slot), kept.token_ids)
        for sequence in self.scheduler.running:
            state = self.states.export_state(sequence.state.live)
            self._is_state(state, sequence.token_ids[: sequence.cache_pos])

    @invariant()
    def what_is_on_disk_is_what_was_written(self) -> None:
        for session in self.store.sizes() if hasattr(self, "store") else ():
            self._is_whole(self.store.load(session, {"model": "chain"}))

    def _is_whole(self, held: HeldBlocks | None) -> None:
        assert held is not None
        ids = held.token_ids[: held.cache_pos]
        if self.holds_kv:
            rows = held.tensors["data"][:, 0, 1, :, 0, 0].reshape(-1)[: held.cache_pos]
            assert rows.tolist() == chain(ids)
        assert (held.state is None) == (self.states is None)
        if held.state is not None:
            self._is_state(held.state, ids)

    def _is_state(self, state: Any, token_ids: Any) -> None:
        """The last value of the chain, and the last id as the convolution's input."""
        assert float(state["ssm"]) == (chain(token_ids)[-1] if token_ids else 0.0)
        assert float(state["conv"]) == (token_ids[-1] if token_ids else 0.0)


class AttentionTiers(Tiers):
    @initialize(blocks=st.integers(14, 34), ram_blocks=RAM, disk=st.booleans())
    def open(self, blocks: int, ram_blocks: int, disk: bool) -> None:
        self._open(blocks, ram_blocks, disk)


class HybridTiers(Tiers):
    """Blocks and states are short at different times: a session needs both of the same position to come back."""

    @initialize(blocks=st.integers(14, 34), ram_blocks=RAM, disk=st.booleans(), slots=st.integers(3, 9))
    def open(self, blocks: int, ram_blocks: int, disk: bool, slots: int) -> None:
        self._open(blocks, ram_blocks, disk, slots)


class RecurrentTiers(Tiers):
    @initialize(ram_states=st.sampled_from([0, 1, 3]), disk=st.booleans(), slots=st.integers(2, 7))
    def open(self, ram_states: int, disk: bool, slots: int) -> None:
        self._open(2, ram_states, disk, slots, holds_kv=False)


TestAttention, TestHybrid, TestRecurrent = AttentionTiers.TestCase, HybridTiers.TestCase, RecurrentTiers.TestCase
TestAttention.settings = settings(max_examples=30, stateful_step_count=80, suppress_health_check=list(HealthCheck))
TestHybrid.settings = TestRecurrent.settings = TestAttention.settings
