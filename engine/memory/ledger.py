"""The memory ledger: where the bytes are, for `GET /api/memory` and the panel.

What the process holds, in parts that are measured one by one, is told by `engine.memory.watch`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from engine.kv_cache.spec import KVCacheSpec
from engine.lane import Lane
from engine.lanes import Lanes
from engine.sequence import Sequence


def memory_report(lanes: Lanes, on_disk: Mapping[str, int]) -> dict[str, Any]:
    """Bytes by kind; `on_disk` are those of each session's snapshot. On the CPU "device" is the machine's RAM and the
    allocator's part is what the process holds beyond weights, KV and workspace (interpreter, libraries, buffers)."""
    loop, parts = lanes.first, lanes.first.parts
    states = parts.states
    state_bytes = states.spec.nbytes if states is not None else 0
    slots = loop.prefix_cache.checkpoints.slots if loop.prefix_cache.checkpoints is not None else None
    state_reserved = states.reserved_bytes if states is not None else 0
    weights = parts.model.weight_bytes
    kv_reserved = sum(lane.parts.cache.reserved_bytes for lane in lanes)
    kv_empty = sum(lane.empty_bytes() for lane in lanes)
    workspace = sum(lane.parts.cache.workspace_bytes for lane in lanes) + (
        states.workspace_bytes if states is not None else 0
    )
    device = _card_figures(parts.model.device) if parts.model.device.type == "cuda" else _ram_figures()
    own = weights + kv_reserved + state_reserved + workspace
    return {
        "weights": weights,
        "kv_used": sum(_used_bytes(lane) for lane in lanes),
        "kv_reserved": kv_reserved,
        "kv_empty": kv_empty,
        "fragmentation": round(kv_empty / kv_reserved, 4) if kv_reserved else 0.0,
        "kv_ram": loop.keeper.ram.nbytes,
        "kv_disk": sum(on_disk.values()),
        "state_used": slots.used_count * state_bytes if slots is not None else 0,
        "state_reserved": state_reserved,
        "workspace": workspace,
        "allocator_slack": max(device["process"] - own, 0),
        "other_processes": max(device["total"] - device["free"] - device["process"], 0),
        "total_device": device["total"],
        "free_device": device["free"],
        "process_rss": psutil.Process().memory_info().rss,
        "ram_total": psutil.virtual_memory().total,
        "ram_available": psutil.virtual_memory().available,
        "blocks_used": loop.prefix_cache.pool.used_count,
        "blocks_free": loop.prefix_cache.pool.free_count,
        "block_bytes": parts.cache.spec.block_bytes,
        "card": card_parts(device, own) if "reserved" in device else None,
        "formats": {
            lane.parts.kv_format: {
                "kv_used": _used_bytes(lane),
                "kv_reserved": lane.parts.cache.reserved_bytes,
                "blocks_used": lane.prefix_cache.pool.used_count,
                "block_bytes": lane.parts.cache.spec.block_bytes,
            }
            for lane in lanes
        },
        "sessions": _by_session(lanes, on_disk),
    }


def _used_bytes(lane: Lane) -> int:
    return lane.prefix_cache.pool.used_count * lane.parts.cache.spec.block_bytes


def _by_session(lanes: Lanes, on_disk: Mapping[str, int]) -> dict[str, dict[str, int]]:
    parts = lanes.first.parts
    state_bytes = parts.states.spec.nbytes if parts.states is not None else 0
    sequences = {
        sequence.session_id: (sequence, lane.parts.cache.spec)
        for lane in lanes
        for sequence in lane.scheduler.sequences()
        if sequence.session_id is not None
    }
    in_ram = lanes.first.keeper.ram.sizes()
    report = {}
    for session_id in {**sequences, **in_ram, **on_disk}:
        sequence, spec = sequences.get(session_id, (None, parts.cache.spec))
        report[session_id] = {
            "kv_used": used_bytes(sequence, spec) if sequence else 0,
            "kv_reserved": sequence.blocks.count * spec.block_bytes if sequence else 0,
            "kv_ram": in_ram.get(session_id, 0),
            "kv_disk": on_disk.get(session_id, 0),
            "state": state_bytes if sequence and sequence.state is not None and sequence.cache_pos else 0,
        }
    return report


def used_bytes(sequence: Sequence, spec: KVCacheSpec) -> int:
    """Of the positions whose K and V each group of layers holds."""
    held = sum(sequence.blocks.held_tokens(group, sequence.cache_pos) for group in range(len(sequence.block_tables)))
    return held * spec.group_bytes_per_token


def card_parts(device: Mapping[str, int], own: int) -> dict[str, int]:
    """What the driver says that the process holds of the card, in four parts, bytes.

    `own`: weights, KV, states and workspace; `buffers`: what torch has allocated beside them; `allocator_free`: what
    its allocator keeps and has not given out. These are counted; `context`, the driver's own, loaded kernels and
    captured graphs, is what remains: nothing tells it.
    """
    return {
        "own": own,
        "buffers": max(device["allocated"] - own, 0),
        "allocator_free": device["reserved"] - device["allocated"],
        "context": max(device["process"] - device["reserved"], 0),
        "process": device["process"],
    }


def _ram_figures() -> dict[str, int]:
    ram = psutil.virtual_memory()
    return {"total": ram.total, "free": ram.available, "process": psutil.Process().memory_info().rss}


def _card_figures(device: torch.device) -> dict[str, int]:
    """What the driver says through NVML, which also sees other processes; torch's own view where NVML is missing."""
    free, total = torch.cuda.mem_get_info(device)
    process = reserved = torch.cuda.memory_reserved(device)
    found = {"total": total, "free": free, "reserved": reserved, "allocated": torch.cuda.memory_allocated(device)}
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if entry.pid == os.getpid() and entry.usedGpuMemory:
                process = int(entry.usedGpuMemory)
    except Exception:
        # NVML is optional: containers often hide it, and the ledger then works with torch's own figures.
        return {**found, "process": process}
    return {**found, "process": process}
