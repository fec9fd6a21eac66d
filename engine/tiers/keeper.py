"""Keeps idle sessions' blocks: on disk after each turn, in RAM when the pool has no room, and brings them back."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from torch import Tensor

from engine.errors import Conflict
from engine.kv_cache.held import HeldBlocks, SaveJob
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.prefix_cache import Node
from engine.kv_cache.window import BlockPlace
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Status
from engine.tiers.restore import NoRoom, Restorer

BUSY_WAIT_S = 2.0
"""While replies are being written a session's new blocks wait this long for a quiet moment."""


class SessionKeeper:
    """Knows of each session what is kept where. Lives on the engine thread; `present` may be read from any.

    `present` holds the sessions for which nobody has to look on the disk: they are in the pool or in RAM.
    `submit` takes blocks to the disk; None where nothing is kept there. `beside`: the keeper of another KV format's
    sessions, with which RAM and disk are shared.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        restorer: Restorer,
        ram_limit: int,
        submit: Callable[[SaveJob], None] | None,
        fingerprint: Callable[[], Mapping[str, str]],
        beside: SessionKeeper | None = None,
    ) -> None:
        self.present: set[str] = beside.present if beside is not None else set()
        self.ram: HostTier = beside.ram if beside is not None else HostTier(ram_limit)
        self._scheduler = scheduler
        self._runner = runner
        self._restorer = restorer
        self._submit: Callable[[SaveJob], None] | None = beside._submit if beside is not None else submit
        self._fingerprint = fingerprint
        self._unsaved: OrderedDict[str, float] = OrderedDict()
        self._saved: dict[str, dict[BlockPlace, tuple[Node, int, str | None]]] = {}
        self._lost: dict[str, tuple[str, str | None]] = {}
        self._run, self._numbers = uuid.uuid4().hex[:12], itertools.count()
        scheduler.on_displace = self.displace

    def before_turn(self, session_id: str) -> None:
        """A turn of this session is about to be queued: save those blocks of the last one that wait, fetch them all."""
        self.save(session_id)
        self.bring_back(session_id)
        self.ram.remove(session_id)
        self.present.add(session_id)

    # -- to the disk ------------------------------------------------------------------------------------------------

    def turn_ended(self, session_id: str) -> None:
        """The session's blocks have changed, and it is idle."""
        self.present.add(session_id)
        self._must_be_saved(session_id)

    def _must_be_saved(self, session_id: str) -> None:
        sequence = self._scheduler.idle.get(session_id)
        if self._submit is not None and sequence is not None and sequence.cache_pos:
            self._unsaved.setdefault(session_id, time.monotonic())

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved)

    def save_next(self, busy: bool) -> None:
        """Hand over the blocks of one session whose turn is over; while others are `busy`, only one that waits long."""
        if self._unsaved:
            session_id, since = next(iter(self._unsaved.items()))
            if not busy or time.monotonic() - since > BUSY_WAIT_S:
                self.save(session_id)

    def save_all(self) -> None:
        while self._unsaved:
            self.save_next(busy=False)

    def save(self, session_id: str) -> None:
        """Hand over the new blocks of one session now, if there are any."""
        sequence = self._scheduler.idle.get(session_id)
        if self._unsaved.pop(session_id, None) is None or self._submit is None:
            return
        if sequence is None or not sequence.cache_pos or sequence.private_from is not None:
            return
        places = sequence.blocks.places(sequence.cache_pos)
        keys, old = self._keys(sequence, places)
        fresh = [row for row, key in enumerate(keys) if key not in old]
        new: dict[str, dict[str, Tensor]] = {}
        self._runner.sync_blocks()
        if fresh:
            tensors = self._export(sequence, [places[row] for row in fresh])
            for n, row in enumerate(fresh):
                new[keys[row]] = {name: tensor[n] for name, tensor in tensors.items()}
        self._submit(
            SaveJob(
                session_id=session_id,
                state=self._state(sequence),
                fingerprint=self._fingerprint,
                block_size=self._runner.cache.spec.block_size,
                token_ids=tuple(sequence.token_ids),
                cache_pos=sequence.cache_pos,
                places=tuple(places),
                anchors=sequence.blocks.anchors,
                turns=_turns(sequence, places),
                keys=tuple(keys),
                new=new,
            )
        )
        self._remember(sequence, places, keys)

    def save_now(self, session_id: str) -> None:
        """Hand over what is in the pool or in RAM, and not on its way to the disk.

        Raises `Conflict` while a reply is written.
        """
        sequence = self._scheduler.find(session_id)
        if sequence is not None and sequence.status is not Status.IDLE:
            raise Conflict("This session is still answering; wait for the reply or stop it first.")
        if session_id not in self._saved:
            self.bring_back(session_id)
            self._must_be_saved(session_id)
        self.save(session_id)

    def not_saved(self, session_id: str, again: bool) -> bool:
        """A job of this session failed: none of its blocks counts as being on disk. Whether all of it will be saved."""
        self._saved.pop(session_id, None)
        if again:
            self._must_be_saved(session_id)
        return session_id in self._unsaved

    def _keys(self, sequence: Sequence, places: list[BlockPlace]) -> tuple[list[str], set[str]]:
        """`(keys of all blocks, those that were handed over before)`; a block in the tree never changes its content,
        unless it went and was computed again (`Node.fills`)."""
        known = self._saved.get(sequence.session_id or "", {})
        keys, old = [], set()
        for place in places:
            node, fills, key = known.get(place, (None, 0, None))
            if key is not None and node is _node(sequence, place) and node is not None and node.fills == fills:
                old.add(key)
                keys.append(key)
            else:
                keys.append(f"{self._run}-{next(self._numbers)}")
        return keys, old

    def _remember(self, sequence: Sequence, places: SequenceOf[BlockPlace], keys: SequenceOf[str | None]) -> None:
        """What is stored of this session, by place: full blocks only, a partly filled one is another each time."""
        nodes = ((place, _node(sequence, place), key) for place, key in zip(places, keys, strict=True))
        self._saved[sequence.session_id or ""] = {
            place: (node, node.fills, key) for place, node, key in nodes if node is not None
        }

    def _export(self, sequence: Sequence, places: SequenceOf[BlockPlace]) -> dict[str, Tensor]:
        """Their blocks as host copies, after `sync_blocks`."""
        return self._runner.cache.export_blocks([sequence.block_tables[group][index] for group, index in places])

    def _state(self, sequence: Sequence) -> dict[str, Tensor] | None:
        """What an idle sequence with something in the cache holds of a recurrent state, after `sync_blocks`."""
        if sequence.state is None or self._runner.states is None:
            return None
        assert sequence.state.held is not None and sequence.state.held.position == sequence.cache_pos
        return self._runner.states.export_state(sequence.state.held.slot)

    # -- out of the pool and back -----------------------------------------------------------------------------------

    def displace(self, sequence: Sequence) -> None:
        """An idle sequence is about to lose its blocks: keep them in RAM as far as its limit goes."""
        session_id = sequence.session_id
        if session_id is None or not sequence.cache_pos:
            return
        self.save(session_id)
        gone = [session_id]
        if sequence.private_from is not None:
            self.present.discard(session_id)
            return
        places = sequence.blocks.places(sequence.cache_pos)
        state_bytes = self._runner.states.spec.nbytes if self._runner.states is not None else 0
        if len(places) * self._runner.cache.spec.block_bytes + state_bytes <= self.ram.limit:
            known = self._saved.get(session_id, {})
            self._runner.sync_blocks()
            held = HeldBlocks(
                token_ids=tuple(sequence.token_ids),
                cache_pos=sequence.cache_pos,
                places=tuple(places),
                anchors=sequence.blocks.anchors,
                turns=_turns(sequence, places),
                keys=tuple(known[place][2] if place in known else None for place in places),
                tensors=self._export(sequence, places) if places else {},
                state=self._state(sequence),
            )
            gone = self.ram.put(session_id, held)
        self.present.difference_update(gone)

    def bring_back(self, session_id: str) -> None:
        """Move a session's blocks from RAM into the pool, displacing others if need be. Does nothing if they can't."""
        held = self.ram.find(session_id)
        sequence = self._scheduler.find(session_id)
        if held is None or (sequence is not None and (sequence.cache_pos or sequence.status is not Status.IDLE)):
            return
        try:
            self._adopt(session_id, held, displacing=True, audit=False)
        except NoRoom:
            return
        self.ram.remove(session_id)
        self.present.add(session_id)  # making room may have pushed the copy in RAM out

    def adopt(self, session_id: str, held: HeldBlocks, displacing: bool) -> None:
        """Take a session's blocks that were read from disk, unless it has some. Raises `SnapshotRefused`, `NoRoom`."""
        sequence = self._scheduler.find(session_id)
        if session_id in self.present or (sequence is not None and sequence.status is not Status.IDLE):
            return
        self._adopt(session_id, held, displacing, audit=True)
        self.present.add(session_id)

    def _adopt(self, session_id: str, held: HeldBlocks, displacing: bool, audit: bool) -> None:
        before = self._saved.get(session_id, {})
        sequence, shared = self._restorer.restore(session_id, held, displacing=displacing, audit=audit)
        keys = list(held.keys)
        for row, place in enumerate(held.places):
            # A block that another session computed is equal up to rounding only, so the stored copy is not of it.
            if place in shared:
                node, fills, key = before.get(place, (None, 0, None))
                found = _node(sequence, place)
                keys[row] = key if node is not None and node is found and node.fills == fills else None
        self._remember(sequence, held.places, keys)

    # -- what is known of a session -----------------------------------------------------------------------------------

    def lose(self, session_id: str, cause: str, sentence: str | None = None) -> None:
        """What is on disk of a session can't be used, for this reason; told with the miss of its next turn."""
        self._lost[session_id] = (cause, sentence)

    def loss(self, session_id: str | None) -> tuple[str, str | None] | None:
        """Cause and sentence given to `lose`, once."""
        return self._lost.pop(session_id or "", None)

    def forget(self, session_id: str) -> None:
        for known in (self._unsaved, self._saved, self._lost):
            known.pop(session_id, None)
        self.ram.remove(session_id)
        self.present.discard(session_id)


def _node(sequence: Sequence, place: BlockPlace) -> Node | None:
    """That of a full block."""
    return sequence.nodes[place[1]] if place[1] < len(sequence.nodes) else None


def _turns(sequence: Sequence, places: SequenceOf[BlockPlace]) -> tuple[str | None, ...]:
    return tuple(sequence.block_turns[index] for _, index in places)
