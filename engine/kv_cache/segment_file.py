"""One file with the stacked tensors of blocks, read row by row into memory of the caller's.

What was verified can't change there afterwards, whatever becomes of the file, and nothing is held twice. The library of
safetensors maps a file or reads all of it; so its header (a length, then JSON) is read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.kv_cache.manifest import DTYPES, SnapshotRefused, bytes_of

TYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "I8",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
}
"""What safetensors calls those of `DTYPES`."""
LENGTH_BYTES = 8


class SegmentFile:
    """An open file of `nbytes` bytes with `rows` blocks; `tensors` are type and shape of one block's, by name.

    All of it raises `SnapshotRefused`.
    """

    def __init__(self, path: Path, nbytes: int, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.name = path.name
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            size = os.fstat(self._file.fileno()).st_size
            if size != nbytes:
                raise SnapshotRefused(f"The snapshot's file {self.name} has {size} bytes in place of {nbytes}.")
            self._data, header = self._header(size)
            self._begins, self.rows = self._places(header, tensors, size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read_row(self, row: int, out: Mapping[str, Tensor]) -> None:
        """One block into `out`, whose tensors are contiguous and of the types and shapes that the file holds."""
        for name, tensor in out.items():
            wanted = memoryview(bytes_of(tensor))
            try:
                self._file.seek(self._data + self._begins[name] + row * len(wanted))
                while len(wanted):
                    count = self._file.readinto(wanted)
                    if not count:
                        raise SnapshotRefused(f"The snapshot's file {self.name} ends before block {row} does.")
                    wanted = wanted[count:]
            except OSError as error:
                raise self._unreadable(error) from error

    def _header(self, size: int) -> tuple[int, dict[str, Any]]:
        """Where the tensors begin, and what is said of them."""
        try:
            data = LENGTH_BYTES + int.from_bytes(self._file.read(LENGTH_BYTES), "little")
            header = json.loads(self._file.read(data - LENGTH_BYTES)) if data <= size else None
        except OSError as error:
            raise self._unreadable(error) from error
        except ValueError as error:
            raise self._damaged() from error
        if not isinstance(header, dict):
            raise self._damaged()
        header.pop("__metadata__", None)
        return data, header

    def _places(
        self, header: dict[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]], size: int
    ) -> tuple[dict[str, int], int]:
        """Where each tensor begins after the header, and how many rows all of them have."""
        try:
            said = {name: (e["dtype"], tuple(e["shape"][1:])) for name, e in header.items()}
            rows = {int(e["shape"][0]) for e in header.values()}
            places = {name: (int(e["data_offsets"][0]), int(e["data_offsets"][1])) for name, e in header.items()}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._damaged() from error
        if said != {name: (TYPES[dtype], shape) for name, (dtype, shape) in tensors.items()} or len(rows) != 1:
            raise SnapshotRefused(f"The snapshot's file {self.name} holds other tensors than its manifest says.")
        (count,) = rows
        for name, (dtype, shape) in tensors.items():
            begin, end = places[name]
            nbytes = count * torch.Size(shape).numel() * DTYPES[dtype].itemsize
            if begin < 0 or end - begin != nbytes or self._data + end > size:
                raise self._damaged()
        return {name: begin for name, (begin, _) in places.items()}, count

    def _unreadable(self, error: OSError) -> SnapshotRefused:
        return SnapshotRefused(f"The snapshot's file {self.name} can't be read: {error.strerror}.")

    def _damaged(self) -> SnapshotRefused:
        return SnapshotRefused(f"The snapshot's file {self.name} is damaged: its header can't be read.")
