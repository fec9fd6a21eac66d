"""The files of a snapshot, all safetensors: some with the tensors of blocks, stacked, one with the recurrent state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from engine.kv_cache.manifest import (
    DTYPES,
    Manifest,
    SnapshotRefused,
    StoredBlock,
    StoredState,
    block_digest,
    file_number,
    segment_name,
    state_name,
    tensor_kinds,
)
from engine.kv_cache.segment_file import SegmentFile

SEGMENT_BYTES = 64 * 2**20
"""A segment ends at about this size, so that no more than this is held twice in memory."""
MOST_SEGMENTS = 128
READERS = 2
HEADER_BYTES = 1024
"""Of a segment, about: names, types and shapes."""

Blocks = Iterator[tuple[str, Mapping[str, Tensor]]]
"""`(key, tensors)` of one block after the other."""


def write_segments(
    folder: Path, blocks: Blocks, write: Callable[[Path, bytes], None]
) -> tuple[dict[str, StoredBlock], dict[str, int]]:
    """Put blocks into new files of `folder`: `(blocks by key, sizes by file)`; of a block only key, file, row and
    digest are known here. Raises OSError."""
    added: dict[str, StoredBlock] = {}
    sizes: dict[str, int] = {}
    number = _last_number(folder)
    for group in _grouped(blocks):
        number += 1
        name = segment_name(number)
        stacked = {kind: torch.stack([tensors[kind] for _, tensors in group]) for kind in group[0][1]}
        data = save_tensors(stacked)
        write(folder / name, data)
        sizes[name] = len(data)
        for row, (key, tensors) in enumerate(group):
            added[key] = StoredBlock(key, 0, 0, name, row, block_digest(tensors), None)
    return added, sizes


def write_state(folder: Path, state: Mapping[str, Tensor], write: Callable[[Path, bytes], None]) -> StoredState:
    """Put a recurrent state into a new file of `folder`. Raises OSError."""
    name, data = state_name(_last_number(folder) + 1), save_tensors(dict(state))
    write(folder / name, data)
    return StoredState(name, len(data), block_digest(state), tensor_kinds(state))


def read_state(folder: Path, stored: StoredState) -> dict[str, Tensor]:
    """The recurrent state, verified. Raises `SnapshotRefused`."""
    tensors = _load(folder / stored.file, stored.nbytes)
    if tensor_kinds(tensors) != dict(stored.tensors) or block_digest(tensors) != stored.digest:
        raise SnapshotRefused("The snapshot's recurrent state is damaged: its digest does not fit.")
    return tensors


def read_blocks(folder: Path, manifest: Manifest) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """`(row, tensors)` of each block, verified, in the manifest's order. Raises `SnapshotRefused`."""
    with closing(_BlockReader(folder, manifest)) as reader:
        for index in range(len(manifest.blocks)):
            tensors = {name: tensor[0] for name, tensor in _room_for(manifest, 1).items()}
            reader.read(index, tensors)
            yield index, tensors


def read_stacked(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """All blocks, verified, stacked in the manifest's order. Raises `SnapshotRefused`.

    Digests take longer than reading does, and are computed outside the interpreter's lock: so by more than one thread.
    """
    count = len(manifest.blocks)
    out = _room_for(manifest, count)

    def read(indices: range) -> None:
        with closing(_BlockReader(folder, manifest)) as reader:
            for index in indices:
                reader.read(index, {name: tensor[index] for name, tensor in out.items()})

    share = max(-(-count // READERS), 1)
    with ThreadPoolExecutor(READERS, "kvscope-read") as readers:
        for _ in readers.map(read, (range(first, min(first + share, count)) for first in range(0, count, share))):
            pass
    return out


class _BlockReader:
    """Reads one block after another; those that lie in one file are best asked for together."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._file: SegmentFile | None = None

    def read(self, index: int, out: Mapping[str, Tensor]) -> None:
        """Into contiguous tensors of a block's types and shapes, verified there. Raises `SnapshotRefused`."""
        block, manifest = self._manifest.blocks[index], self._manifest
        if self._file is None or self._file.name != block.segment:
            self.close()
            nbytes = manifest.segments[block.segment]
            self._file = SegmentFile(self._folder / block.segment, nbytes, manifest.tensors)
        if block.row >= self._file.rows:
            raise SnapshotRefused(f"The snapshot's file {block.segment} lacks block {block.index}.")
        self._file.read_row(block.row, out)
        if block_digest(out) != block.digest:
            raise SnapshotRefused(f"The snapshot's block {block.index} is damaged: its digest does not fit.")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _room_for(manifest: Manifest, count: int) -> dict[str, Tensor]:
    """Tensors of `count` blocks, with any content."""
    return {
        name: torch.empty((count, *shape), dtype=DTYPES[dtype]) for name, (dtype, shape) in manifest.tensors.items()
    }


def is_wasteful(manifest: Manifest) -> bool:
    """Less than half of the bytes are of blocks that are listed, or there are very many files."""
    block_bytes = 0
    for dtype, shape in manifest.tensors.values():
        block_bytes += torch.Size(shape).numel() * DTYPES[dtype].itemsize
    live = len(manifest.blocks) * block_bytes + HEADER_BYTES * len(manifest.segments)
    return 2 * live < sum(manifest.segments.values()) or len(manifest.segments) > MOST_SEGMENTS


def _last_number(folder: Path) -> int:
    return max((file_number(path.name) for path in folder.iterdir()), default=0)


def _load(path: Path, expected: int) -> dict[str, Tensor]:
    """Into memory of our own: what was verified can't change afterwards, whatever becomes of the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SnapshotRefused(f"The snapshot's file {path.name} can't be read: {error.strerror}.") from error
    if len(data) != expected:
        raise SnapshotRefused(f"The snapshot's file {path.name} has {len(data)} bytes in place of {expected}.")
    try:
        return load_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise SnapshotRefused(f"The snapshot's file {path.name} is damaged: its header can't be read.") from error


def _grouped(blocks: Blocks) -> Iterator[list[tuple[str, Mapping[str, Tensor]]]]:
    """Lists of at most about `SEGMENT_BYTES`."""
    group: list[tuple[str, Mapping[str, Tensor]]] = []
    size = 0
    for key, tensors in blocks:
        group.append((key, tensors))
        size += sum(tensor.nbytes for tensor in tensors.values())
        if size >= SEGMENT_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
