"""How far stored rows may be from rows that are computed anew, and which of them an audit looks at."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.debugging.faults import Layer, relative_errors
from engine.debugging.rows import StoredRows
from engine.errors import InvalidRequest
from engine.loader import EngineParts

NOISE_FACTOR = 4.0
"""How much further off than two prefills from each other a right row may be."""
LEAST_LIMIT = 1e-3
NOISE_TOKENS = 1024
"""Positions of the second prefill; with a recurrent state all of them."""
MIB = 2**20


def layer_of(
    index: int,
    stored: StoredRows,
    right: StoredRows,
    again: StoredRows,
    checked: Tensor,
    inv_freq: Tensor,
    block_size: int,
) -> tuple[Layer, float]:
    """One layer's rows with errors and limits, and its noise: how far two prefills are apart, or the format's rounding.

    A row is wrong if it is further off than its format rounds and than `NOISE_FACTOR` times the two prefills differ.
    Positions that are not `checked` have no error.
    """
    rows, fresh = stored.layer(index), right.layer(index)
    errors, sizes = relative_errors(rows, fresh)
    noise = relative_errors(again.layer(index), fresh[:, : again.count])[0].amax(-1, keepdim=True)
    # Channels in another order are rows of the same kind that do not lie on the format's grid already.
    mixed = (fresh + fresh.flip(-1)) / 2
    rounding = (right.requantised(index, mixed) - mixed).flatten(2).norm(dim=-1) / sizes
    limits = (NOISE_FACTOR * noise).maximum(rounding).clamp_min(LEAST_LIMIT)
    errors = torch.where(checked, errors, 0.0)
    return Layer(rows, fresh, errors, limits, sizes, inv_freq, block_size), float(noise.maximum(rounding).max())


def checked_positions(positions: int | list[int] | None, count: int) -> Tensor:
    """bool [count]. Raises `InvalidRequest`."""
    if positions is None:
        return torch.ones(count, dtype=torch.bool)
    if isinstance(positions, int):
        if positions < 1:
            raise InvalidRequest("positions must be at least 1, or a list of positions.")
        positions = torch.linspace(0, count - 1, min(positions, count)).round().int().tolist()
    if not positions or not all(0 <= position < count for position in positions):
        raise InvalidRequest(f"positions must lie between 0 and {count - 1}, at least one: so many tokens are cached.")
    checked = torch.zeros(count, dtype=torch.bool)
    checked[torch.tensor(positions)] = True
    return checked


def check_room(parts: EngineParts, count: int) -> None:
    spec = parts.cache.spec
    copies = 1 + min(1.0, NOISE_TOKENS / count)
    needed = int(copies * (-(-count // spec.block_size) + 2) * len(spec.groups) * spec.block_bytes)
    left = max(parts.max_blocks * spec.block_bytes - parts.cache.reserved_bytes, 0)
    if needed > left:
        raise InvalidRequest(
            f"The audit needs {-(-needed // MIB)} MiB of scratch memory, and the KV budget has {left // MIB} MiB left; "
            "raise --kv-budget."
        )
