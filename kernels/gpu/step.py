"""A decoder's layers through the Triton kernels: seven launches for a layer of a decode step, and three more where what
attention and MLP yield is normed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.linear import PlaneLinear
from kernels.gpu.paged_attention import PagedAttention
from kernels.gpu.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.store_kv import store_kv
from kernels.interface import BatchMetadata, PagedStore


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Matrices as `PlaneLinear`: qkv stacks three, gate_up two. Norms in the compute dtype; None where not used.
    `rope` is the layer's among `Heads.ropes`."""

    qkv: PlaneLinear
    o: PlaneLinear
    gate_up: PlaneLinear
    down: PlaneLinear
    attn_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    attn_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    rope: int = 0


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts and rotary embeddings of a model, each (inv_freq float32 [head_dim / 2], what multiplies cos and
    sin); `scale` multiplies scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    ropes: tuple[tuple[Tensor, float], ...]
    scale: float


class TritonLayers:
    """All layers and the last norm. Nothing is read back to the host, so a decode step can be captured."""

    def __init__(
        self, layers: Sequence[LayerParts], norm: Tensor, heads: Heads, eps: float, activation: str = "silu"
    ) -> None:
        """`activation`: what gates are put through, "silu" or "gelu"."""
        self._layers, self._norm, self._heads, self._eps = tuple(layers), norm, heads, eps
        self._activation = activation
        self._next_norms = (*(layer.attn_norm for layer in self._layers[1:]), norm)

    embeds, with_logits = False, None
    """Embedding and head are kernels of their own."""

    @property
    def fits(self) -> bool:
        """All steps go this way."""
        return True

    def __call__(
        self, embedded: Tensor, store: PagedStore, meta: BatchMetadata, between: Callable[[], None] = lambda: None
    ) -> Tensor:
        """embedded [T, hidden], overwritten -> [T, hidden] after the last norm; K and V of the tokens are stored."""
        residual, normed = embedded, torch.empty_like(embedded)
        attend = _Attention(self._heads, self._eps, store, meta, embedded.dtype)
        rms_norm(residual, self._layers[0].attn_norm, self._eps, normed)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            between()
            attended = attend(index, layer.qkv(normed), layer)
            self._add(residual, layer.o, attended, layer.attn_post_norm, layer.mlp_norm, normed)
            gated = layer.gate_up.gated(normed, self._activation)
            self._add(residual, layer.down, gated, layer.mlp_post_norm, next_norm, normed)
        return normed

    def _add(
        self, residual: Tensor, linear: PlaneLinear, x: Tensor, post_norm: Tensor | None, norm: Tensor, normed: Tensor
    ) -> None:
        """residual += the product, normed by `post_norm` where there is one; then its norm into `normed`."""
        if post_norm is None:
            linear.add_to(residual, x)
            rms_norm(residual, norm, self._eps, normed)
            return
        product = linear(x)
        rms_norm(product, post_norm, self._eps, product)
        add_rms_norm(residual, product, norm, self._eps, normed)


class _Attention:
    """Storing and attending for all layers of a step."""

    def __init__(self, heads: Heads, eps: float, store: PagedStore, meta: BatchMetadata, dtype: torch.dtype) -> None:
        self._heads, self._eps = heads, eps
        self._plan = PagedAttention(meta, store, heads.num_heads, heads.head_dim, dtype)
        self._q = torch.empty_like(self._plan.out)
        self._sink_q = torch.empty_like(self._q) if any(group.sink_position for group in store.groups) else None

    def __call__(self, index: int, qkv: Tensor, layer: LayerParts) -> Tensor:
        """qkv [T, (H + 2 KV) * D] -> [T, H * D]."""
        plan, heads = self._plan, self._heads
        sink_position = plan.group(index).sink_position
        inv_freq, rope_scale = heads.ropes[layer.rope]
        sink_q = None if sink_position is None else self._sink_q
        store_kv(
            qkv, plan.meta.positions, plan.slots(index), inv_freq, rope_scale, layer.q_norm, layer.k_norm, self._eps,
            plan.balance(index), False, *plan.cache(index), self._q, sink_position or 0, sink_q,
        )  # fmt: skip
        return plan.attend(index, self._q, heads.scale, sink_q)
