"""A segment is read row by row into given memory, and whatever its header says, nothing outside of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engine.kv_cache.manifest import DTYPES, SnapshotRefused
from engine.kv_cache.segment_file import TYPES, SegmentFile

KINDS = {"data": ("float16", (2, 3)), "scales": ("float32", (4,))}


def written(folder: Path, header: Callable[[dict[str, Any]], Any] = lambda header: header) -> Path:
    """Three blocks; what `header` makes of the header goes in its place."""
    numbers = torch.arange(18.0).view(3, 2, 3).half()
    data = save({"data": numbers, "scales": torch.arange(12.0).view(3, 4)})
    end = 8 + int.from_bytes(data[:8], "little")
    text = header(json.loads(data[8:end]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    path = folder / "segment-000001.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return path


def test_rows_are_those_of_the_library_in_any_order(tmp_path):
    path = written(tmp_path)
    file = SegmentFile(path, path.stat().st_size, KINDS)
    assert file.rows == 3
    for row in (2, 0, 1):
        out = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in KINDS.items()}
        file.read_row(row, out)
        assert torch.equal(out["data"].float(), torch.arange(6.0).view(2, 3) + 6 * row)
        assert torch.equal(out["scales"], torch.arange(4.0) + 4 * row)
    file.close()


def test_every_type_of_a_cache_has_its_name_in_the_library(tmp_path):
    assert set(TYPES) == set(DTYPES)
    for name, dtype in DTYPES.items():
        path = tmp_path / "segment-000001.safetensors"
        path.write_bytes(save({"data": torch.ones(5, 2).to(dtype)}))
        file = SegmentFile(path, path.stat().st_size, {"data": (name, (2,))})
        file.read_row(4, {"data": (out := torch.zeros(2).to(dtype))})
        file.close()
        assert torch.equal(out.float(), torch.ones(2))


def changed(name: str, **entry: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: {**header, name: {**header[name], **entry}}


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (lambda _: b"{", "its header can't be read"),
        (lambda _: b"[]", "its header can't be read"),
        (lambda _: b"\xff", "its header can't be read"),
        (lambda header: {**header, "data": None}, "its header can't be read"),
        (changed("data", shape=[]), "its header can't be read"),
        (changed("data", shape=["x", 2, 3]), "its header can't be read"),
        (changed("data", data_offsets=[0]), "its header can't be read"),
        (changed("data", data_offsets=[-36, 0]), "its header can't be read"),
        (changed("data", data_offsets=[10**6, 10**6 + 36]), "its header can't be read"),
        (changed("data", data_offsets=[0, 30]), "its header can't be read"),
        (changed("data", shape=[10**9, 2, 3]), "holds other tensors"),
        (changed("data", shape=[3, 3, 2]), "holds other tensors"),
        (changed("data", dtype="BF16"), "holds other tensors"),
        (lambda header: {"data": header["data"]}, "holds other tensors"),
        (lambda header: {**header, "more": header["data"]}, "holds other tensors"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, sentence):
    path = written(tmp_path, header)
    with pytest.raises(SnapshotRefused, match=sentence):
        SegmentFile(path, path.stat().st_size, KINDS)


def test_a_header_longer_than_its_file_and_a_file_cut_while_it_is_read_are_refused(tmp_path):
    path = written(tmp_path)
    size = path.stat().st_size
    file = SegmentFile(path, size, KINDS)
    with path.open("r+b") as opened:
        opened.truncate(size - 4)
    with pytest.raises(SnapshotRefused, match="ends before block 2"):
        file.read_row(2, {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in KINDS.items()})
    file.close()
    path.write_bytes((2**63).to_bytes(8, "little"))
    with pytest.raises(SnapshotRefused, match="its header can't be read"):
        SegmentFile(path, 8, KINDS)
    with pytest.raises(SnapshotRefused, match="has 8 bytes in place of 9"):
        SegmentFile(path, 9, KINDS)
    with pytest.raises(SnapshotRefused, match="can't be read: No such file"):
        SegmentFile(tmp_path / "none", 8, KINDS)
