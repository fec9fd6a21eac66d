"""What a snapshot on disk consists of: `manifest.json`, which lists every block with its place and its digest,
and the recurrent state with its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kv_cache.window import BlockPlace

FORMAT, VERSION = "kvscope-snapshot", 2
DIGEST_FIELD = "digest"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn)
}
_SEGMENT_NAME = re.compile(r"segment-[0-9]{6,}\.safetensors")
_STATE_NAME = re.compile(r"state-[0-9]{6,}\.safetensors")


class SnapshotRefused(Exception):
    """A snapshot can't be used. `str(error)` is one sentence that names what differs or is damaged."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block of a group of layers, at `index` of its table: row `row` of the tensors in file `segment`; `digest` is
    sha256 over them (`block_digest`)."""

    key: str
    group: int
    index: int
    segment: str
    row: int
    digest: str
    turn: str | None


@dataclass(frozen=True, slots=True)
class StoredState:
    """The recurrent state at `cache_pos`: a file of its own of `nbytes` bytes; `digest` is that of `block_digest`."""

    file: str
    nbytes: int
    digest: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """`tensors` gives type and shape of one block's tensors by name, `segments` the size in bytes of each file.

    Which blocks there have to be is for those to say who know the model's windows; without a `state` there is one of
    each cached token in some group. `anchors` are those of `HeldBlocks`.
    """

    session_id: str
    created_at: float
    fingerprint: Mapping[str, str]
    block_size: int
    token_ids: tuple[int, ...]
    cache_pos: int
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    blocks: tuple[StoredBlock, ...]
    segments: Mapping[str, int]
    anchors: tuple[int, ...] = ()
    state: StoredState | None = None

    @property
    def places(self) -> tuple[BlockPlace, ...]:
        return tuple((block.group, block.index) for block in self.blocks)

    @property
    def files(self) -> set[str]:
        """Names of all files beside the manifest."""
        return {*self.segments, *([self.state.file] if self.state is not None else [])}

    def check_fingerprint(self, wanted: Mapping[str, str]) -> None:
        """Raises `SnapshotRefused` naming the first field that differs."""
        for name in wanted:
            found = self.fingerprint.get(name, "not known")
            if found != wanted[name]:
                raise SnapshotRefused(f"The snapshot's {name} is {found}, and what runs now has {wanted[name]}.")

    def to_bytes(self) -> bytes:
        """JSON with a digest of all the rest of it."""
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return _dumps({**body, DIGEST_FIELD: hashlib.sha256(_dumps(body)).hexdigest()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises `SnapshotRefused` for anything but what `to_bytes` wrote, and for counts that contradict."""
        try:
            body = json.loads(data)
            digest = body.pop(DIGEST_FIELD)
            if digest != hashlib.sha256(_dumps(body)).hexdigest():
                raise SnapshotRefused("The snapshot's manifest is damaged: its digest does not fit.")
            if (body.pop("format"), body.pop("version")) != (FORMAT, VERSION):
                raise SnapshotRefused("The snapshot was written by another version of KVScope.")
            manifest = _from_json(body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SnapshotRefused("The snapshot's manifest is damaged: it can't be read.") from error
        _check(manifest)
        return manifest


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _from_json(body: dict[str, Any]) -> Manifest:
    tensors = _kinds_from_json(body["tensors"])
    state = body.pop("state", None)
    if state is not None:
        state = StoredState(**{**state, "tensors": _kinds_from_json(state["tensors"])})
    blocks = tuple(StoredBlock(**block) for block in body["blocks"])
    token_ids = tuple(map(int, body["token_ids"]))
    changed = {"tensors": tensors, "blocks": blocks, "token_ids": token_ids, "state": state}
    return Manifest(**{**body, **changed, "anchors": tuple(map(int, body["anchors"]))})


def _kinds_from_json(kinds: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in kinds.items()}


def _check(manifest: Manifest) -> None:
    if not _counts_fit(manifest):
        raise SnapshotRefused(
            f"The snapshot's counts contradict each other: {len(manifest.blocks)} blocks of {manifest.block_size} and "
            f"{len(manifest.token_ids)} token ids for {manifest.cache_pos} cached tokens."
        )
    state = manifest.state
    if any(not _SEGMENT_NAME.fullmatch(name) for name in manifest.segments) or (
        state is not None and not _STATE_NAME.fullmatch(state.file)
    ):
        raise SnapshotRefused("The snapshot's manifest is damaged: it names a file that is none of its own.")
    if any(block.segment not in manifest.segments or block.row < 0 for block in manifest.blocks):
        raise SnapshotRefused("The snapshot's manifest is damaged: a block lies in no file.")
    kinds = [*manifest.tensors.values(), *(state.tensors.values() if state is not None else ())]
    if (manifest.blocks and "data" not in manifest.tensors) or any(dtype not in DTYPES for dtype, _ in kinds):
        raise SnapshotRefused("The snapshot's manifest is damaged: it names a type of tensor that blocks don't have.")


def _counts_fit(manifest: Manifest) -> bool:
    """Each group that has blocks has the last one, and none twice or beyond it; a state alone needs no blocks."""
    if manifest.block_size < 1 or not 0 < manifest.cache_pos <= len(manifest.token_ids):
        return False
    last, places = (manifest.cache_pos - 1) // manifest.block_size, manifest.places
    groups = {group for group, _ in places}
    return (
        (bool(groups) or manifest.state is not None)
        and len(set(places)) == len(places)
        and all(group >= 0 and 0 <= index <= last for group, index in places)
        and all((group, last) in places for group in groups)
    )


def file_number(name: str) -> int:
    """Of a segment or a state; 0 for any other file."""
    known = _SEGMENT_NAME.fullmatch(name) or _STATE_NAME.fullmatch(name)
    return int(name.split("-")[1].split(".")[0]) if known else 0


def segment_name(number: int) -> str:
    return f"segment-{number:06d}.safetensors"


def state_name(number: int) -> str:
    return f"state-{number:06d}.safetensors"


def bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor on the host, as a numpy array of uint8 that shares it."""
    return tensor.view(-1).view(torch.uint8).numpy()


def block_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the bytes of one block's tensors, or a state's, by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(bytes_of(tensors[name].contiguous()).data)
    return digest.hexdigest()


def tensor_kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape by name, as a manifest has them."""
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
