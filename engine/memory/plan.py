"""Will a model fit? Arithmetic on sizes, before anything is loaded. All figures are bytes unless they say tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGML_QUANT_SIZES

from engine.kv_cache.window import Windows
from kernels.layer_groups import LayerGroup

KV_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4}
INT4_GROUP = 32
WEIGHT_BLOCKS = {kind.name: size for kind, size in GGML_QUANT_SIZES.items()}
"""(weights, bytes) of a block of each GGUF type."""
STATES_PER_SEQUENCE = 4
"""Slots for recurrent states that are wanted for each running sequence: its own, and checkpoints to come back to."""
ACTIVATION_COPIES = 8
"""Row-sized buffers of hidden and inner width that live at the same time while a layer runs."""
LOGIT_COPIES = 4
PENALTY_BYTES = 9
"""Of each token of the vocabulary for a request with penalties or a bias: whether it was seen, how often, the bias."""
NO_BLOCKS = 2
"""The smallest pool there is, for models without K and V."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What of a model's shape decides its memory; `weight_bytes` as they will be held, not as they are stored.

    `num_layers` counts those with K and V in each of `groups`; `state_bytes` is what the others remember of a session,
    whatever its length.
    """

    weight_bytes: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_tokens: int
    state_bytes: int = 0
    groups: tuple[LayerGroup, ...] = (LayerGroup(),)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a model needs for one sequence of `max_seq_len` tokens, and what there is.

    `kv_bytes_per_token` is what the newest token takes in all layers; those with a window give up as much for it once
    they are full. `state_budget` is the part of `kv_budget` that recurrent states may take, with the checkpoints of
    earlier turns.
    """

    weights: int
    kv_bytes_per_token: int
    max_seq_len: int
    kv_total: int
    kv_budget: int
    workspace: int
    available: int
    total_device: int
    state_bytes: int = 0
    state_budget: int = 0
    groups: tuple[LayerGroup, ...] = (LayerGroup(),)

    @property
    def needed(self) -> int:
        return self.weights + self.kv_total + self.state_bytes + self.workspace

    @property
    def fits(self) -> bool:
        held = self.kv_total <= self.kv_budget - self.state_budget and self.state_bytes <= self.state_budget
        return self.max_seq_len > 1 and held and self.needed <= self.available


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, kv_format: str) -> int:
    """K and V of one token in all layers, with their scales. Only KV heads count: query heads share them.

    The formats are those of `kernels.kv_format`: int8 has a float32 per head for K and V together, int4 an fp16 scale
    and minimum for each `INT4_GROUP` channels of K and of V.
    """
    head = 2 * head_dim * KV_BITS[kv_format] // 8
    if kv_format == "int8":
        head += 4
    elif kv_format == "int4":
        head += 2 * 2 * 2 * -(-head_dim // INT4_GROUP)
    return num_layers * num_kv_heads * head


def matrix_bytes(rows: int, columns: int, kind: str) -> int:
    """A weight [rows, columns] in a GGUF type; each row is a whole number of blocks."""
    weights, size = WEIGHT_BLOCKS[kind]
    return rows * -(-columns // weights) * size


def kv_bytes(
    tokens: int, bytes_per_token: int, block_size: int, groups: tuple[LayerGroup, ...] = (LayerGroup(),)
) -> int:
    """Memory of the blocks that hold `tokens`, `bytes_per_token` in each group of layers, and of the null block;
    nothing where there are no K and V."""
    return (Windows(groups, block_size).blocks(tokens, 1) + 1) * block_size * bytes_per_token


def kv_tokens(
    budget: int,
    bytes_per_token: int,
    block_size: int,
    groups: tuple[LayerGroup, ...] = (LayerGroup(),),
    most: int | None = None,
) -> int:
    """Tokens that a budget of bytes holds, `bytes_per_token` in each group of layers; one block is the null block.

    `most` bounds them where all groups have windows.
    """
    return blocks_to_tokens(budget // (bytes_per_token * block_size) - 1, block_size, groups, most)


def blocks_to_tokens(
    blocks: int, block_size: int, groups: tuple[LayerGroup, ...] = (LayerGroup(),), most: int | None = None
) -> int:
    """Tokens of one sequence, at most `most`, for which so many blocks are enough; whole blocks, or `most`."""
    windows = Windows(groups, block_size)
    if most is not None and windows.blocks(most, 1) <= blocks:
        return most
    low, high = 0, max(blocks, 0) + 1 if most is None else -(-most // block_size)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if windows.blocks(middle * block_size, 1) <= blocks else (low, middle)
    return low * block_size


def session_bytes(tokens: int, capabilities: Mapping[str, Any]) -> int:
    """K and V of one session of so many tokens, in whole blocks, in an engine with these capabilities."""
    kinds = capabilities["groups"]
    if not kinds:
        return 0
    size = capabilities["block_size"]
    windows = Windows(tuple(LayerGroup(kind["window"], kind["sinks"]) for kind in kinds), size)
    return windows.blocks(tokens, 1) * size * (capabilities["bytes_per_token"] // len(kinds))


def split_budget(budget: int, block_bytes: int, state_bytes: int, sequences: int) -> tuple[int, int]:
    """`(blocks, state slots)` that a budget of bytes holds, null block and null slot (which takes no memory) included.

    Recurrent states take what `sequences` of them want, but at most half where there are blocks too.
    """
    if not state_bytes:
        return budget // block_bytes, 0
    share = budget // 2 if block_bytes else budget
    slots = min(share // state_bytes, STATES_PER_SEQUENCE * sequences)
    if not block_bytes:
        return NO_BLOCKS, slots + 1
    return (budget - slots * state_bytes) // block_bytes, slots + 1


def workspace_bytes(sizes: ModelSizes, batch_tokens: int, compute_bytes: int) -> int:
    """A step's activations for `batch_tokens`, a row of float32 logits with the copies that sampling takes, and what
    penalties take for one request and for those without (`engine.sampling.row_states`)."""
    row = ACTIVATION_COPIES * sizes.hidden_size + 3 * sizes.intermediate_size
    return batch_tokens * row * compute_bytes + (LOGIT_COPIES * 4 + 2 * PENALTY_BYTES) * sizes.vocab_size


def plan_memory(
    sizes: ModelSizes,
    *,
    kv_format: str,
    block_size: int,
    kv_budget: int,
    available: int,
    total_device: int,
    max_seq_len: int | None = None,
    batch_tokens: int = 256,
    compute_bytes: int = 4,
    sequences: int = 16,
) -> MemoryPlan:
    """Without `max_seq_len`, the model's own context, cut down to what the budget holds."""
    per_token = kv_bytes_per_token(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, kv_format)
    _, slots = split_budget(kv_budget, per_token * block_size, sizes.state_bytes, sequences)
    state_budget = max(slots - 1, 0) * sizes.state_bytes
    context, groups = sizes.context_tokens, sizes.groups
    room = kv_tokens(kv_budget - state_budget, per_token, block_size, groups, context) if per_token else context
    tokens = max_seq_len or room
    return MemoryPlan(
        weights=sizes.weight_bytes,
        kv_bytes_per_token=per_token * len(groups),
        max_seq_len=tokens,
        kv_total=kv_bytes(tokens, per_token, block_size, groups),
        kv_budget=kv_budget,
        workspace=workspace_bytes(sizes, batch_tokens, compute_bytes),
        available=available,
        total_device=total_device,
        state_bytes=sizes.state_bytes,
        state_budget=state_budget,
        groups=groups,
    )


def human_bytes(count: float) -> str:
    """With one decimal in the largest binary unit below it: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def plan_table(plan: MemoryPlan, *, model: str, device: str, dtype: str, kv_format: str) -> str:
    """The plan as lines to print."""
    rows = [
        ("model", model),
        ("device", f"{device}, {human_bytes(plan.total_device)}, of which {human_bytes(plan.available)} are free"),
        ("weights", f"{human_bytes(plan.weights)} ({plan.weights} bytes) in {dtype}"),
        ("KV per token", f"{human_bytes(plan.kv_bytes_per_token)} ({plan.kv_bytes_per_token} bytes) in {kv_format}"),
        ("KV cache", f"{human_bytes(plan.kv_total)} ({plan.kv_total} bytes) for {plan.max_seq_len} tokens"),
        *_window_rows(plan),
        *_state_rows(plan),
        ("KV budget", human_bytes(plan.kv_budget)),
        ("workspace", f"about {human_bytes(plan.workspace)}"),
        ("needed", f"{human_bytes(plan.needed)} of {human_bytes(plan.available)}"),
        ("fits", "yes" if plan.fits else "no"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _window_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    kinds = Counter(group for group in plan.groups if group.window is not None)
    return [
        (
            "window",
            f"{count} of {len(plan.groups)} groups of layers keep the last {kind.window} tokens"
            + (f" and the first {kind.sinks}" if kind.sinks else "")
            + ", as long as there is room also the two windows that the last turn goes back to",
        )
        for kind, count in kinds.items()
    ]


def _state_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    if not plan.state_bytes:
        return []
    return [
        ("state", f"{human_bytes(plan.state_bytes)} ({plan.state_bytes} bytes) per session, whatever its length"),
        ("states", f"up to {human_bytes(plan.state_budget)} of the KV budget, those kept of earlier turns included"),
    ]
