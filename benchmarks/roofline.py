"""What a card allows on paper: `python -m benchmarks.roofline`.

A decoded token of one sequence reads every weight once (one row of the embedding) and K and V of the whole context, so

    tokens/s <= memory bandwidth / (weights + KV per token * context + activations).

Arithmetic isn't the limit at one row per weight, and caches are too small to matter. Bandwidth is bus width times data
rate, as makers and reviewers give them: RTX 4090 384 bit GDDR6X at 21 Gbit/s, 1008 GB/s; RTX 3050 Laptop 4 GB 128 bit
GDDR6 (pcmasters.de; the 6 GB model has 96 bit) at an assumed 12 Gbit/s, 192 GB/s; GTX 1650 4 GB 128 bit, GDDR5 at 8
Gbit/s, 128 GB/s, or GDDR6 at 12 Gbit/s, 192 GB/s (topcpu.net, pcpartdb.com). Real kernels reach 80 to 95 % of it.
Capacities are binary; `RESERVED` of them is assumed to belong to CUDA and the desktop. Shapes are those of the models'
published configurations. Q4_K_M stands for what llama.cpp mixes under that name: Q6_K for the head, and for values and
down projections of about half of the layers; its Q4_0 has a Q6_K head too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common import print_json, print_table
from engine.loader import CUDA_LIMITS
from engine.memory.plan import (
    ACTIVATION_COPIES,
    MemoryPlan,
    ModelSizes,
    human_bytes,
    kv_bytes_per_token,
    matrix_bytes,
    plan_memory,
    workspace_bytes,
)

RESERVED = 512 * 2**20
BLOCK_SIZE = 16
VALUE = 2
"""Bytes of an activation, norm or bias."""
KV = ("fp16", "int8", "int4")
WEIGHTS = ("F16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0")
CONTEXTS = (1024, 8192, 32768)


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    memory: int
    bus_bits: int
    gbit_per_pin: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bus_bits / 8 * self.gbit_per_pin * 1e9


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with gated feed-forward layers; `tied` means that the head is the embedding."""

    name: str
    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool = False
    qkv_bias: bool = False


CARDS = (
    Card("RTX 4090 24 GB", 24 * 2**30, 384, 21),
    Card("RTX 3050 Laptop 4 GB", 4 * 2**30, 128, 12),
    Card("GTX 1650 4 GB GDDR6", 4 * 2**30, 128, 12),
    Card("GTX 1650 4 GB GDDR5", 4 * 2**30, 128, 8),
)
MODELS = (
    Shape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256, 131072, tied=True),
    Shape("Qwen2.5-1.5B", 28, 1536, 8960, 12, 2, 128, 151936, 32768, tied=True, qkv_bias=True),
    Shape("Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128, 128256, 131072, tied=True),
    Shape("Mistral-7B-v0.3", 32, 4096, 14336, 32, 8, 128, 32768, 32768),
    Shape("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152064, 32768, qkv_bias=True),
    Shape("Llama-3-8B", 32, 4096, 14336, 32, 8, 128, 128256, 8192),
)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes that one decoded token moves, by part, and `held`: what all weights take."""

    layers: int
    head: int
    small: int
    activations: int
    held: int

    @property
    def weights(self) -> int:
        return self.layers + self.head + self.small


def layer_matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """(rows, columns) of a layer's matrices, by GGUF's names."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "attn_q": (q, shape.hidden),
        "attn_k": (kv, shape.hidden),
        "attn_v": (kv, shape.hidden),
        "attn_output": (shape.hidden, q),
        "ffn_gate": (shape.inner, shape.hidden),
        "ffn_up": (shape.inner, shape.hidden),
        "ffn_down": (shape.hidden, shape.inner),
    }


def weight_kind(weights: str, name: str, layer: int, num_layers: int) -> str:
    """GGUF type of one matrix under a named mix."""
    if weights in ("Q4_K_M", "Q4_0") and name == "output":
        return "Q6_K"
    if weights != "Q4_K_M":
        return weights
    eighth = num_layers // 8
    more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if name in ("attn_v", "ffn_down") and more else "Q4_K"


def token_bytes(shape: Shape, weights: str) -> TokenBytes:
    """Of one sequence's decoded token; the KV cache comes on top, see `kv_bytes_per_token`."""
    layers = sum(
        matrix_bytes(*size, weight_kind(weights, name, layer, shape.num_layers))
        for layer in range(shape.num_layers)
        for name, size in layer_matrices(shape).items()
    )
    head = matrix_bytes(shape.vocab, shape.hidden, weight_kind(weights, "output", 0, shape.num_layers))
    embedding_kind = weight_kind(weights, "token_embd", 0, shape.num_layers)
    bias = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim if shape.qkv_bias else 0
    norms = ((2 * shape.hidden + bias) * shape.num_layers + shape.hidden) * VALUE
    row = matrix_bytes(1, shape.hidden, "F16" if shape.tied and weights == "F16" else embedding_kind)
    activations = shape.num_layers * (ACTIVATION_COPIES * shape.hidden + 3 * shape.inner) * VALUE + 4 * shape.vocab
    embedding = 0 if shape.tied else matrix_bytes(shape.vocab, shape.hidden, embedding_kind)
    return TokenBytes(layers, head, norms + row, activations, layers + head + norms + embedding)


def tokens_per_second(card: Card, parts: TokenBytes, kv_per_token: int, context: int) -> float:
    """The bound for one sequence whose next token sees `context` tokens, itself included."""
    return card.bandwidth / (parts.weights + parts.activations + kv_per_token * context)


def plan(card: Card, shape: Shape, parts: TokenBytes, kv_format: str) -> MemoryPlan:
    """The engine's own memory plan with all of the card's free memory for KV."""
    sizes = ModelSizes(
        weight_bytes=parts.held,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        vocab_size=shape.vocab,
        context_tokens=shape.context,
    )
    available = card.memory - RESERVED
    batch = CUDA_LIMITS.max_batch_tokens
    return plan_memory(
        sizes,
        kv_format=kv_format,
        block_size=BLOCK_SIZE,
        kv_budget=max(available - parts.held - workspace_bytes(sizes, batch, VALUE), 0),
        available=available,
        total_device=card.memory,
        batch_tokens=batch,
        compute_bytes=VALUE,
    )


def bounds(card: Card) -> Iterator[dict[str, Any]]:
    """A row per model and weights. `context`: per KV format the longest that fits, 0 if the model doesn't;
    `tokens_per_second`: the bound per KV format and, of `CONTEXTS`, those that fit."""
    for shape in MODELS:
        for weights in WEIGHTS:
            parts = token_bytes(shape, weights)
            contexts, speeds = {}, {}
            for kv_format in KV:
                planned = plan(card, shape, parts, kv_format)
                contexts[kv_format] = planned.max_seq_len if planned.fits else 0
                speeds[kv_format] = {
                    str(n): round(tokens_per_second(card, parts, planned.kv_bytes_per_token, n), 1)
                    for n in CONTEXTS
                    if n <= contexts[kv_format]
                }
            yield {
                "card": card.name,
                "model": shape.name,
                "weights": weights,
                "weight_bytes": parts.held,
                "context": contexts,
                "tokens_per_second": speeds,
            }


def largest(rows: list[dict[str, Any]], kv_format: str, context: int) -> str | None:
    """The largest model, in its most exact weights, that holds `context` tokens."""
    fitting = [row for row in rows if row["context"][kv_format] >= context]
    names = [shape.name for shape in MODELS]
    best = max(fitting, key=lambda row: (names.index(row["model"]), row["weight_bytes"]), default=None)
    return f"{best['model']} {best['weights']}" if best else None


def _print_parts() -> None:
    head = ("model", "weights", "held", "layers", "head", "norms, row", "activations", *(f"KV {f} / 1024" for f in KV))
    rows = []
    for shape in MODELS:
        kv = [
            human_bytes(1024 * kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, f)) for f in KV
        ]
        for weights in WEIGHTS:
            parts = token_bytes(shape, weights)
            sizes = (parts.held, parts.layers, parts.head, parts.small, parts.activations)
            rows.append((shape.name, weights, *map(human_bytes, sizes), *kv))
    print("Bytes that one decoded token moves, by part\n")
    print_table(head, rows)


def _print_card(card: Card, rows: list[dict[str, Any]]) -> None:
    print(f"\n{card.name}, {card.bandwidth / 1e9:.0f} GB/s; each cell with KV {' / '.join(KV)}\n")

    def cell(values: Iterator[object]) -> str:
        return " / ".join(str(value) for value in values)

    print_table(
        ("model", "weights", "longest context", *(f"tokens/s at {n}" for n in CONTEXTS)),
        [
            (
                row["model"],
                row["weights"],
                cell(row["context"][f] for f in KV),
                *(cell(row["tokens_per_second"][f].get(str(n), "-") for f in KV) for n in CONTEXTS),
            )
            for row in rows
            if any(row["context"].values())
        ],
    )
    print()
    for context in CONTEXTS:
        print(f"largest with {context} tokens: " + cell(largest(rows, f, context) or "none" for f in KV))


def main() -> None:
    _print_parts()
    found = []
    for card in CARDS:
        rows = list(bounds(card))
        _print_card(card, rows)
        found += rows
    print_json("roofline", {"bounds": found})


if __name__ == "__main__":
    main()
