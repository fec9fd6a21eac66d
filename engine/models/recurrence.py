"""Mamba-2's recurrence as the mixer of a decoder layer, over the sequences' states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache.ssm_state import SSMStateSpec
from engine.models.attention import StepContext
from engine.models.config import ModelConfig, SSMConfig
from engine.models.layers import Linear
from kernels.dispatch import Operations
from kernels.reference.ssm import gated_rms_norm


def state_spec(config: ModelConfig, dtype: torch.dtype) -> SSMStateSpec | None:
    """Shape of one sequence's state in a model that computes in `dtype`; None for one without recurrent layers."""
    ssm, layers = config.ssm, len(config.ssm_layers)
    if ssm is None or not layers:
        return None
    conv = (ssm.conv_channels, ssm.conv_width - 1)
    return SSMStateSpec(layers, conv, (ssm.num_heads, ssm.head_dim, ssm.state_size), dtype)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """`layer` counts the layers that have a state. `in_proj` yields gate, then x, B and C side by side, then dt.

    conv_weight [channels, width], conv_bias [channels] or None, norm [inner]; A (negative), D, dt_bias float32 [heads].
    """

    layer: int
    sizes: SSMConfig
    in_proj: Linear
    out_proj: Linear
    conv_weight: Tensor
    conv_bias: Tensor | None
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    norm: Tensor

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.in_proj, self.out_proj

    @property
    def nbytes(self) -> int:
        vectors = (self.conv_weight, self.A, self.D, self.dt_bias, self.norm)
        bias = 0 if self.conv_bias is None else self.conv_bias.nbytes
        return sum(linear.nbytes for linear in self.linears) + sum(vector.nbytes for vector in vectors) + bias

    def __call__(self, x: Tensor, step: StepContext, config: ModelConfig, ops: Operations) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the sequences' states move on by their tokens."""
        assert step.states is not None
        sizes, count = self.sizes, len(x)
        gate, row, dt = self.in_proj(x).split([sizes.inner, sizes.conv_channels, sizes.num_heads], dim=-1)
        mixed = torch.empty_like(row)
        ops.causal_conv(step.states.conv[self.layer], step.query_starts, row, self.conv_weight, self.conv_bias, mixed)
        values, B, C = mixed.split([sizes.inner, sizes.group_columns, sizes.group_columns], dim=-1)
        state, out = step.states.ssm[self.layer], values.new_empty(count, sizes.num_heads, sizes.head_dim)
        groups = (count, sizes.num_groups, sizes.state_size)
        inputs = (values.view(out.shape), dt, self.A, B.view(groups), C.view(groups), self.D, self.dt_bias)
        if step.one_each:
            ops.ssm_step(state, *inputs, sizes.dt_min, sizes.dt_max, out)
        else:
            ops.ssm_chunk(state, step.query_starts, *inputs, sizes.dt_min, sizes.dt_max, out)
        out = out.view(count, sizes.inner)
        return self.out_proj(gated_rms_norm(out, gate, self.norm, sizes.num_groups, config.rms_norm_eps))
