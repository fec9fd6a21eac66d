"""Jobs for a snapshot store without an engine: blocks whose content follows from session, turn and place."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import torch

from engine.kv_cache.held import HeldBlocks, SaveJob

SIZE = 4
SHAPE = (2, 2, SIZE, 2, 8)
FINGERPRINT = {"weights": "w1", "KV format": "fp16", "block size": str(SIZE), "template": "t1"}


def new_session(number: int) -> str:
    return str(uuid.UUID(int=number))


def block(key: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(ord, key)) * 131 + len(key))
    return {
        "data": torch.randn(SHAPE, generator=generator).to(torch.float16),
        "scales": torch.rand((2, 1, SIZE, 2, 1), generator=generator),
    }


def state(turn: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(turn)
    return {
        "conv": torch.randn((2, 12, 3), generator=generator).to(torch.bfloat16),
        "ssm": torch.randn((2, 4, 4, 8), generator=generator),
    }


def job(session_id: str, keys: Sequence[str], new: Sequence[str] | None = None, **changes: object) -> SaveJob:
    """A session whose last block is half full; `new` (default: all) are the blocks that the job brings."""
    count = SIZE * len(keys) - 2
    fields = {
        "session_id": session_id,
        "fingerprint": lambda: FINGERPRINT,
        "block_size": SIZE,
        "token_ids": tuple(range(count + 1)),
        "cache_pos": count,
        "places": tuple((0, index) for index in range(len(keys))),
        "turns": tuple(f"turn of {key}" for key in keys),
        "keys": tuple(keys),
        "new": {key: block(key) for key in (keys if new is None else new)},
    }
    return SaveJob(**{**fields, **changes})  # type: ignore[arg-type]


def holds(held: HeldBlocks | None, keys: Sequence[str]) -> bool:
    """Whether these blocks were read, bit for bit."""
    return (
        held is not None
        and held.keys == tuple(keys)
        and all(
            torch.equal(held.tensors[name][row], tensor)
            for row, key in enumerate(keys)
            for name, tensor in block(key).items()
        )
    )


def holds_state(held: HeldBlocks | None, turn: int) -> bool:
    """Whether this turn's recurrent state was read, bit for bit."""
    return (
        held is not None
        and held.state is not None
        and held.state.keys() == state(turn).keys()
        and all(torch.equal(held.state[name], tensor) for name, tensor in state(turn).items())
    )
