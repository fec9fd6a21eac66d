"""What one session has cached, outside the pool: as host tensors, on its way to RAM or disk and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from engine.kv_cache.window import BlockPlace


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """The cache of a session as it was when its turn was over.

    The first `cache_pos` of `token_ids` are cached. `places` says which blocks are held, those of groups without a
    window all; their host copies are the rows of `tensors` (`KVCache.export_blocks`). `turns` says which turn wrote
    each block, `keys` names its stored copy on disk (None: there is none). `anchors` are those of `BlockTables`.
    `state` is the recurrent state after the first `cache_pos` ids (`SSMStatePool.export_state`) of a model that has
    one; if nothing in it attends there are no blocks.
    """

    token_ids: tuple[int, ...]
    cache_pos: int
    places: tuple[BlockPlace, ...]
    turns: tuple[str | None, ...]
    keys: tuple[str | None, ...]
    tensors: Mapping[str, Tensor]
    anchors: tuple[int, ...] = ()
    state: Mapping[str, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *(self.state or {}).values()))


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A session's blocks for the disk: `places` and `keys` of all, and the tensors of those that are not there yet.

    `new` holds, by key, one block's tensors (no leading dimension). `anchors` and `state` are those of `HeldBlocks`; a
    state is always whole: unlike a block it is another one after each turn. `fingerprint` is asked where the job is
    carried out, because the first answer takes a while.
    """

    session_id: str
    fingerprint: Callable[[], Mapping[str, str]]
    block_size: int
    token_ids: tuple[int, ...]
    cache_pos: int
    places: tuple[BlockPlace, ...]
    turns: tuple[str | None, ...]
    keys: tuple[str, ...]
    new: Mapping[str, Mapping[str, Tensor]]
    anchors: tuple[int, ...] = ()
    state: Mapping[str, Tensor] | None = None

    def after(self, earlier: SaveJob) -> SaveJob:
        """This job in place of both: what the earlier one brought and this one still lists comes along."""
        new = {key: earlier.new[key] for key in self.keys if key in earlier.new} | dict(self.new)
        return replace(self, new=new)
