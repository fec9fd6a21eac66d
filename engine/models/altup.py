"""AltUp: a layer runs on one of several streams and the others are predicted and corrected beside it (Baykal et al.,
"Alternating Updates for Efficient Transformers", 2023), with a low-rank residual and inputs of each layer's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.config import AltUpConfig
from engine.models.layers import Embedding, Linear
from kernels.dispatch import Operations

LEAST_POWER = 1e-5


@dataclass(frozen=True, slots=True)
class AltUpLayer:
    """What a layer has beyond attention and MLP. Norms are [hidden], `router` [streams, hidden], `predict` [streams²,
    streams] and `correct` [streams, streams]; `scale` [hidden] multiplies what the layer's own input is gated by."""

    norm: Tensor
    router: Tensor
    predict: Tensor
    correct: Tensor
    scale: Tensor
    laurel_left: Linear
    laurel_right: Linear
    laurel_norm: Tensor
    input_gate: Linear
    input_projection: Linear
    input_norm: Tensor

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.laurel_left, self.laurel_right, self.input_gate, self.input_projection

    @property
    def nbytes(self) -> int:
        small = (self.norm, self.router, self.predict, self.correct, self.scale, self.laurel_norm, self.input_norm)
        return sum(tensor.nbytes for tensor in small) + sum(linear.nbytes for linear in self.linears)

    def predicted(self, streams: Tensor, sizes: AltUpConfig, eps: float, ops: Operations) -> Tensor:
        """[N, T, hidden] from that."""
        count = sizes.streams
        mixed = F.linear(self._routed(streams[sizes.active], eps, ops), self.predict)
        weights = mixed.view(-1, count, count).transpose(1, 2)
        return (streams.permute(1, 2, 0) @ weights).permute(2, 0, 1) + streams

    def corrected(self, predicted: Tensor, active: Tensor, sizes: AltUpConfig, eps: float, ops: Operations) -> Tensor:
        """[N, T, hidden]: all streams move with what the layer made of the active one, [T, hidden]."""
        weights = F.linear(self._routed(active, eps, ops), self.correct) + 1.0
        return (active - predicted[sizes.active]) * weights.T[:, :, None] + predicted

    def laurel(self, x: Tensor, eps: float, ops: Operations) -> Tensor:
        """x [T, hidden] and its low-rank residual."""
        return x + ops.rms_norm(self.laurel_right(self.laurel_left(x)), self.laurel_norm, eps)

    def own_input(self, active: Tensor, own: Tensor, sizes: AltUpConfig, eps: float, ops: Operations) -> Tensor:
        """[T, hidden] for the streams besides the first, from the layer's own inputs `own` [T, input size]."""
        gated = self.input_gate(active * self.scale if sizes.scales else active)
        mixed = self.input_projection(ops.geglu(torch.cat((gated, own), -1)))
        return ops.rms_norm(mixed, self.input_norm, eps)

    def _routed(self, x: Tensor, eps: float, ops: Operations) -> Tensor:
        """[T, streams]"""
        normed = ops.rms_norm(x, self.norm, eps) * (1.0 / x.shape[-1])
        return F.linear(normed, self.router).float().tanh().to(x.dtype)


@dataclass(frozen=True, slots=True)
class AltUp:
    """What lies before the first layer and behind the last. `expand` and `merge` have a matrix for each stream but the
    first; `own_projection` yields all layers' own inputs, which `own_embedding` adds to."""

    sizes: AltUpConfig
    own_embedding: Embedding
    own_projection: Linear
    own_norm: Tensor
    expand: tuple[Linear, ...]
    merge: tuple[Linear, ...]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.own_projection, *self.expand, *self.merge)

    @property
    def nbytes(self) -> int:
        linears = sum(linear.nbytes for linear in self.linears)
        return self.own_embedding.nbytes + self.own_norm.nbytes + linears

    def own_inputs(self, token_ids: Tensor, x: Tensor, eps: float, ops: Operations) -> Tensor:
        """[layers, T, input size] of embedded tokens x [T, hidden]; ids that the table lacks count as id 0."""
        size, known = self.sizes.input_size, token_ids < self.sizes.input_vocab
        looked_up = self.own_embedding(token_ids.where(known, 0)).to(x.dtype) * size**0.5
        projected = (self.own_projection(x) * x.shape[-1] ** -0.5).view(len(x), -1, size)
        normed = ops.rms_norm(projected, self.own_norm, eps)
        return ((normed + looked_up.view_as(normed)) * 2**-0.5).transpose(0, 1)

    def streams(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [N, T, hidden], all as large as x."""
        return torch.stack([x, *(_as_large(project(x), x) for project in self.expand)])

    def merged(self, streams: Tensor) -> Tensor:
        """Their mean [T, hidden], all as large as the first."""
        others = zip(self.merge, streams[1:], strict=True)
        return torch.stack([streams[0], *(_as_large(project(x), streams[0]) for project, x in others)]).mean(0)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """x scaled, row by row, to the root mean square of `like`."""
    wanted = like.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=LEAST_POWER).sqrt()


def sparse_gate(gate_up: Tensor, share: float) -> Tensor:
    """gate_up [T, 2 n] with all of the gate but about its largest `1 - share` set to 0, and these counted from there:
    the border is where it would be if a row's values were normally distributed."""
    gate, up = gate_up.chunk(2, dim=-1)
    border = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(2.0 * share - 1.0, dtype=torch.float64)))
    cut = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * border
    return torch.cat((F.relu(gate - cut), up), -1)
