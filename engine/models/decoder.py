"""The decoder: embedding, layers of a mixer and a gated MLP, final norm, head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache
from engine.kv_cache.ssm_state import SSMStateSpec, States
from engine.models.altup import AltUp, AltUpLayer, sparse_gate
from engine.models.attention import Attention, StepContext, Tables, Turn
from engine.models.config import ModelConfig
from engine.models.layers import Embedding, Linear, WeightFormat
from engine.models.recurrence import Recurrence, state_spec
from kernels.dispatch import Operations

if TYPE_CHECKING:
    from engine.models.fused import Fused


Mixer = Attention | Recurrence


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """norm float [hidden]; `gate_up` yields gate, then up. `post_norm` [hidden] norms the result where used;
    `sparsity` is the share of the gate that is set to 0."""

    norm: Tensor
    gate_up: Linear
    down: Linear
    post_norm: Tensor | None = None
    sparsity: float = 0.0

    def __call__(self, x: Tensor, config: ModelConfig, ops: Operations) -> Tensor:
        """x [T, hidden], before the norm -> [T, hidden] to add to it."""
        gate_up = self.gate_up(ops.rms_norm(x, self.norm, config.rms_norm_eps))
        if self.sparsity:
            gate_up = sparse_gate(gate_up, self.sparsity)
        result = self.down(ops.swiglu(gate_up) if config.activation == "silu" else ops.geglu(gate_up))
        return result if self.post_norm is None else ops.rms_norm(result, self.post_norm, config.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """What mixes tokens, with the norm before it (float [hidden]), and the MLP where the architecture has one.

    `post_norm` [hidden] norms the mixer's result where used; `altup` is what a model of several streams adds."""

    mixer_norm: Tensor
    mixer: Mixer
    mlp: GatedMLP | None
    post_norm: Tensor | None = None
    altup: AltUpLayer | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        mlp = () if self.mlp is None else (self.mlp.gate_up, self.mlp.down)
        return (*self.mixer.linears, *mlp, *(() if self.altup is None else self.altup.linears))

    @property
    def nbytes(self) -> int:
        mlp, norms = self.mlp, [self.mixer_norm, self.post_norm]
        norms += [] if mlp is None else [mlp.norm, mlp.post_norm]
        linears = 0 if mlp is None else mlp.gate_up.nbytes + mlp.down.nbytes
        linears += 0 if self.altup is None else self.altup.nbytes
        return self.mixer.nbytes + linears + sum(norm.nbytes for norm in norms if norm is not None)


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding: `inv_freq` float32 [rotary_dim / 2]; cos and sin are multiplied by `scale`."""

    inv_freq: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of a model. `ropes`: that of layers which see everything, then that of layers with a window where it
    is another."""

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Linear
    ropes: tuple[Rope, ...]
    tied_in_memory: bool
    altup: AltUp | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held; a matrix that embedding and head share counts once."""
        shared = 0 if self.tied_in_memory else self.embedding.nbytes
        shared += 0 if self.altup is None else self.altup.nbytes
        return shared + self.head.nbytes + self.norm.nbytes + sum(layer.nbytes for layer in self.layers)

    def block_formats(self) -> str:
        """What matrices in blocks are kept in, the formats that take most bytes first; empty if there are none."""
        sizes: Counter[str] = Counter()
        linears = [linear for layer in self.layers for linear in layer.linears]
        linears += [] if self.altup is None else self.altup.linears
        for linear in (*linears, self.head):
            for name, nbytes in linear.formats:
                sizes[name] += nbytes
        return ", ".join(name for name, _ in sizes.most_common())


class StepAbandoned(Exception):
    """Nobody wants the result of the step any more; what it stored lies past every `cache_pos`."""


def _go_on(abandoned: Callable[[], bool]) -> None:
    if abandoned():
        raise StepAbandoned


class DecoderModel:
    """A loaded model. `dtype` is what it computes in, `weight_format` what its matrices are kept in."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        fmt: WeightFormat,
        device: torch.device,
        operations: Operations,
        warnings: tuple[str, ...] = (),
        fused: Fused | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = fmt.compute_dtype
        self.weight_format = weights.block_formats() or fmt.name
        self.weight_bytes = weights.nbytes
        self.warnings = warnings
        self.weights = weights
        self._operations = operations
        self.replaced_kernels: tuple[str, ...] = ()
        self._runs_triton = fmt.planes
        self._fused = fused
        self._rounds_activations = fmt.rounds_activations

    @property
    def state_spec(self) -> SSMStateSpec | None:
        """Shape of one sequence's recurrent state; None for a model that has none."""
        return state_spec(self.config, self.dtype)

    @property
    def stays_on_device(self) -> bool:
        """Whether a decode step reads nothing back to the host, so that a CUDA graph can hold it.

        The definitions in torch, which stand in for kernels that a card gets wrong, do.
        """
        replaced = set(self.replaced_kernels) - {"sample"}
        return self._runs_triton and self.device.type == "cuda" and not replaced

    @property
    def amplifies_rounding(self) -> bool:
        """Whether the last bit of a sum may become a whole step of an int8 activation: products round what they are
        given, and steps of other sizes do their sums in another order, as only the CPU's compiled steps do not."""
        return self._rounds_activations and not (self._fused is not None and self._fused.fits)

    @property
    def samples_on_device(self) -> bool:
        """Whether the kernel that draws tokens runs where the logits are."""
        return self._runs_triton and "sample" not in self.replaced_kernels

    @torch.inference_mode()
    def inv_freq(self, layer: int) -> Tensor:
        """RoPE's frequencies float32 [rotary dim / 2] of a layer, counted among those that attend."""
        attending = [part.mixer for part in self.weights.layers if isinstance(part.mixer, Attention)]
        return self.weights.ropes[attending[layer].rope].inv_freq

    def forward(
        self, token_ids: Tensor, cache: KVCache, meta: AttentionMetadata, states: States | None = None
    ) -> Tensor:
        """Run int64 token_ids [T], storing their K and V; logits float32 [N, vocab] of `meta.logit_rows`."""
        return self.step(token_ids, cache, meta, states)[1]

    @torch.inference_mode()
    def hidden_states(
        self,
        token_ids: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        states: States | None = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """As `forward`, but the last layer's output after the final norm, [T, hidden], for every token.

        `states` holds the recurrent states of a model that has such, moved on by the step. Raises `StepAbandoned` as
        soon as `abandoned()` is true between two layers; a step of few tokens does not ask.
        """
        ops, config, weights, fused = self._operations, self.config, self.weights, self._fused
        if fused is not None and fused.fits:
            return fused(self._entering(token_ids, fused), cache, meta, lambda: _go_on(abandoned))
        x, step = self._embedded(token_ids), self._step_context(cache, meta, states)
        if weights.altup is not None:
            x = self._through_streams(weights.altup, token_ids, x, step, abandoned)
        else:
            for layer in weights.layers:
                _go_on(abandoned)
                x += self._mixed(layer, ops.rms_norm(x, layer.mixer_norm, config.rms_norm_eps), step)
                if layer.mlp is not None:
                    x += layer.mlp(x, config, ops)
        if states is not None and step.states is not None:
            states.put_back(step.states)
        return ops.rms_norm(x, weights.norm, config.rms_norm_eps)

    @torch.inference_mode()
    def step(
        self,
        token_ids: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        states: States | None = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> tuple[Tensor, Tensor]:
        """`hidden_states` of every token, and logits as `forward`, in one call where the layers' kernels go so far."""
        fused = self._fused
        if fused is None or fused.with_logits is None or not (fused.fits and fused.has_head):
            hidden = self.hidden_states(token_ids, cache, meta, states, abandoned)
            return hidden, self.head(hidden[meta.logit_rows])
        tokens = self._entering(token_ids, fused)
        hidden, logits = fused.with_logits(tokens, cache, meta, meta.logit_rows, lambda: _go_on(abandoned))
        return hidden, self._capped(logits)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        x, scale = self.weights.embedding(token_ids), self.config.embedding_scale
        return x if scale == 1.0 else x * scale

    def _entering(self, token_ids: Tensor, fused: Fused) -> Tensor:
        return token_ids if fused.embeds else self._embedded(token_ids)

    def _mixed(self, layer: DecoderLayer, normed: Tensor, step: StepContext) -> Tensor:
        """normed [T, hidden] -> what the layer's mixer adds to the residual."""
        mixed = layer.mixer(normed, step, self.config, self._operations)
        if layer.post_norm is None:
            return mixed
        return self._operations.rms_norm(mixed, layer.post_norm, self.config.rms_norm_eps)

    def _through_streams(
        self, altup: AltUp, token_ids: Tensor, x: Tensor, step: StepContext, abandoned: Callable[[], bool]
    ) -> Tensor:
        """x [T, hidden] through all layers of a model of several streams; of these each layer runs on one."""
        ops, config, eps, sizes = self._operations, self.config, self.config.rms_norm_eps, altup.sizes
        own, streams = altup.own_inputs(token_ids, x, eps, ops), altup.streams(x)
        for index, layer in enumerate(self.weights.layers):
            _go_on(abandoned)
            assert layer.altup is not None and layer.mlp is not None
            predicted = layer.altup.predicted(streams, sizes, eps, ops)
            active = predicted[sizes.active]
            normed = ops.rms_norm(active, layer.mixer_norm, eps)
            active = (active + self._mixed(layer, normed, step) + layer.altup.laurel(normed, eps, ops)) * 2**-0.5
            active = active + layer.mlp(active, config, ops)
            streams = layer.altup.corrected(predicted, active, sizes, eps, ops)
            streams[1:] += layer.altup.own_input(streams[sizes.active], own[index], sizes, eps, ops)
        return altup.merged(streams)

    def _step_context(self, cache: KVCache, meta: AttentionMetadata, states: States | None) -> StepContext:
        config, plan = self.config, None
        if config.num_attention_layers:
            plan = self._operations.plan_attention(meta, cache, config.num_heads, config.head_dim, self.dtype)
        one_each = max(meta.query_lens) == 1
        batch = states.take(meta.state_slots, apart=not one_each) if states is not None else None
        return StepContext(plan, self._turns(cache, meta), batch, meta.cu_seqlens_q, one_each)

    def _turns(self, cache: KVCache, meta: AttentionMetadata) -> list[Turn]:
        """Of each layer that attends. Until a context passes it, a group's `sink_position` changes nothing; but what is
        captured as a graph is run with later contexts too."""
        kept: dict[tuple[int, int | None], Tables] = {}

        def tables(rope: int, largest: int | None) -> Tables:
            if (rope, largest) not in kept:
                positions = meta.positions if largest is None else meta.positions.clamp(max=largest)
                own = self.weights.ropes[rope]
                kept[rope, largest] = self._operations.rotary_tables(positions, own.inv_freq, own.scale, self.dtype)
            return kept[rope, largest]

        turns, newest = [], max(meta.context_lens_host) - 1
        for mixer in (layer.mixer for layer in self.weights.layers):
            if isinstance(mixer, Attention):
                largest = cache.groups[cache.places[mixer.layer].group].sink_position
                passed = largest is not None and (self._runs_triton or newest > largest)
                sinks = tables(mixer.rope, largest) if passed else None
                turns.append(Turn(tables(mixer.rope, None), sinks))
        return turns

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] after the final norm -> logits float32 [N, vocab]."""
        return self._capped(self.weights.head(hidden).float())

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.logit_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
