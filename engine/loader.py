"""From a configuration to everything the step loop needs: model, tokenizer, cache of the right size."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.attention_layout import attention_layout, context_limit
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.jobs import Slices, run_through
from engine.kv_cache.cache import EXTENT_BYTES, KVCache, fitting_extent_bytes
from engine.kv_cache.calibration import (
    CALIBRATION_TEXT,
    CALIBRATION_TOKENS,
    KL_LIMITS,
    calibration_slices,
    layout_loss,
)
from engine.kv_cache.spec import KVCacheSpec
from engine.kv_cache.ssm_state import SSMStatePool
from engine.memory.plan import blocks_to_tokens, human_bytes, split_budget
from engine.memory.process import trim_heap
from engine.models.registry import DecoderModel, load_model
from engine.replay import REPLAY_CHUNK
from engine.scheduler import SchedulerLimits
from engine.tokenizer import ChatTokenizer
from engine.weights.catalog import resolve
from engine.weights.identity import weights_identity
from kernels.dispatch import triton_runs_on
from kernels.kv_format import KV_FORMATS
from kernels.layer_groups import LayerGroup

CPU_LIMITS = SchedulerLimits(max_sequences=16, max_batch_tokens=256, mixed_batch_tokens=64)
CUDA_LIMITS = SchedulerLimits(max_sequences=64, max_batch_tokens=2048, mixed_batch_tokens=512)
FP8_CAPABILITY = (8, 9)
RAM_SHARE, CARD_SHARE = 0.25, 0.85


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A loaded model with its tokenizer and an empty cache; `max_blocks` counts the null block, `state_slots` the null
    slot of `states`, which models with recurrent layers have.

    `weights_id` tells the weights from others (`weights_identity`).
    """

    model: DecoderModel
    cache: KVCache
    tokenizer: ChatTokenizer
    name: str
    kv_format: str
    max_seq_len: int
    max_blocks: int
    limits: SchedulerLimits
    warnings: tuple[str, ...] = field(default=())
    states: SSMStatePool | None = None
    state_slots: int = 0
    weights_id: str = ""
    speculation: str = "off"

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def with_template(self, name: str) -> EngineParts:
        """The same with another chat template. Raises `InvalidRequest` if there is none of this name."""
        tokenizer = self.tokenizer.with_template(name)
        return replace(self, tokenizer=tokenizer, warnings=(*tokenizer.warnings, *self.model.warnings))

    def capabilities(self) -> dict[str, Any]:
        """What the panel shows of the model, and what requests are checked against."""
        spec = self.cache.spec
        return {
            "model": self.name,
            "device": str(self.model.device),
            "dtype": self.model.weight_format,
            "kv_format": self.kv_format,
            "kv_formats": list(KV_FORMATS),
            "max_seq_len": self.max_seq_len,
            "block_size": spec.block_size,
            "num_layers": len(spec.places),
            "groups": [
                {"window": g.window, "sinks": g.sinks, "layers": sum(place.group == index for place in spec.places)}
                for index, g in enumerate(spec.windows.groups)
            ],
            "num_heads": self.model.config.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "bytes_per_token": spec.bytes_per_token,
            "state_layers": self.states.spec.num_layers if self.states is not None else 0,
            "state_bytes": self.states.spec.nbytes if self.states is not None else 0,
            "vocab_size": self.vocab_size,
            "chat_template": self.tokenizer.template_name,
            "chat_templates": list(self.tokenizer.template_names()),
            "speculation": "off" if self.states is not None else self.speculation,
            "warnings": list(self.warnings),
        }


def load_parts(config: EngineConfig) -> EngineParts:
    """Load what the configuration names. Raises `ModelFileError` and `ConfigError`, each one sentence."""
    device = pick_device(config.device)
    source = resolve(config.model, config.data_dir)
    tokenizer = ChatTokenizer.from_source(source, config.chat_template)
    model = load_model(source.path, device, config.dtype)
    if triton_runs_on(device):
        check_kernels(model, config.data_dir / "kernels.json")
    parts = assemble(config, model, tokenizer, source.name, weights_identity(source.path))
    trim_heap()
    return parts


def check_kernels(model: DecoderModel, kept: Path) -> None:
    """Have each kernel checked on this card; what is found is told with the model and kept in a file."""
    from kernels.gpu import self_test

    model.replaced_kernels = self_test.check(model.device, model.dtype, kept)
    if model.replaced_kernels:
        names = ", ".join(model.replaced_kernels)
        model.warnings += (
            f"Kernels that give wrong results on this card are replaced by torch, more slowly: {names}.",
        )


def assemble(
    config: EngineConfig, model: DecoderModel, tokenizer: ChatTokenizer, name: str, weights_id: str = ""
) -> EngineParts:
    """Fit the cache to the budget and put the parts together."""
    kv_format = pick_kv_format(config.kv_format, model.weight_format, model.dtype)
    check_card_has(kv_format, model.device)
    layout = attention_layout(config, model.config)
    spec = KVCacheSpec(
        num_layers=layout.stores,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=config.block_size,
        format=KV_FORMATS[kv_format],
        groups=layout.groups or (LayerGroup(),),
        places=layout.places,
    )
    budget = config.kv_budget if config.kv_budget is not None else default_kv_budget(model.device)
    limits = CUDA_LIMITS if model.device.type == "cuda" else CPU_LIMITS
    state = model.state_spec
    max_blocks, state_slots = split_budget(budget, spec.block_bytes, state.nbytes if state else 0, limits.max_sequences)
    if state is not None and config.speculation == "on":
        raise ConfigError("--speculation on is not for this model: a recurrent state can't be taken back from a guess.")
    if state is not None and state_slots < 2:
        raise ConfigError(f"The KV budget does not hold one state of {human_bytes(state.nbytes)}; raise --kv-budget.")
    max_seq_len = fit_max_seq_len(config.max_seq_len, context_limit(config, model.config), max_blocks, spec)
    cache = KVCache(spec, model.device, fitting_extent_bytes(spec, max_seq_len), max_blocks)
    with torch.inference_mode():
        format_warnings = run_through(calibration(model, cache, tokenizer, max_seq_len))
    return EngineParts(
        model=model,
        cache=cache,
        tokenizer=tokenizer,
        name=name,
        kv_format=kv_format,
        max_seq_len=max_seq_len,
        max_blocks=max_blocks,
        limits=limits,
        warnings=(
            *tokenizer.warnings,
            *model.warnings,
            *sharing_loss(config, model, spec, tokenizer, max_seq_len),
            *format_warnings,
        ),
        states=SSMStatePool(state, model.device) if state is not None else None,
        state_slots=state_slots,
        weights_id=weights_id,
        speculation=config.speculation,
    )


def parts_in_format(parts: EngineParts, kv_format: str) -> Slices[EngineParts]:
    """The same model with an empty cache in another format, for the same budget; its warnings are those of the format.

    Raises `ConfigError` where the card has no such format, or the budget does not hold a block.
    """
    check_card_has(kv_format, parts.model.device)
    spec = replace(parts.cache.spec, format=KV_FORMATS[kv_format])
    budget = parts.max_blocks * parts.cache.spec.block_bytes
    max_blocks = budget // spec.block_bytes
    max_seq_len = fit_max_seq_len(None, parts.max_seq_len, max_blocks, spec)
    cache = KVCache(spec, parts.model.device, min(EXTENT_BYTES, budget // 8), max_blocks)
    warnings = yield from calibration(parts.model, cache, parts.tokenizer, max_seq_len, parts.limits.mixed_batch_tokens)
    return replace(
        parts, cache=cache, kv_format=kv_format, max_seq_len=max_seq_len, max_blocks=max_blocks, warnings=warnings
    )


def calibration(
    model: DecoderModel, cache: KVCache, tokenizer: ChatTokenizer, max_seq_len: int, chunk: int = REPLAY_CHUNK
) -> Slices[tuple[str, ...]]:
    """Prepare a cache in few bits for this model, `chunk` tokens at a time; a warning if the model does not bear it."""
    kv_format = cache.spec.kv_format
    if kv_format not in KL_LIMITS or not cache.spec.num_layers:
        return ()
    ids = tokenizer.encode(CALIBRATION_TEXT)[: min(CALIBRATION_TOKENS, max_seq_len)]
    loss = yield from calibration_slices(model, cache, ids, chunk)
    if loss.mean_kl <= KL_LIMITS[kv_format]:
        return ()
    return (
        f"This model loses much with its KV cache in {kv_format}: on a sample text the mean KL divergence is "
        f"{loss.mean_kl:.3f} and {loss.top1_agreement:.0%} of the likeliest tokens are the same; "
        "it may repeat itself. Another --kv-format is safer.",
    )


def sharing_loss(
    config: EngineConfig, model: DecoderModel, spec: KVCacheSpec, tokenizer: ChatTokenizer, max_seq_len: int
) -> tuple[str, ...]:
    """What layers that share a store do to the model, as a warning."""
    if config.share_layers < 2:
        return ()
    own = attention_layout(replace(config, share_layers=1), model.config)
    apart = replace(spec, num_layers=own.stores, groups=own.groups, places=own.places)
    ids = tokenizer.encode(CALIBRATION_TEXT)[: min(CALIBRATION_TOKENS, max_seq_len)]
    loss = layout_loss(model, apart, spec, ids)
    return (
        f"--share-layers {config.share_layers} is an experiment: on a sample text the mean KL divergence from the "
        f"model as it was trained is {loss.mean_kl:.3f}, and {loss.top1_agreement:.0%} of the likeliest tokens are the "
        "same.",
    )


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a CUDA card and driver, and none is available.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def pick_kv_format(name: str, weight_format: str, compute_dtype: torch.dtype) -> str:
    """auto: exact for float32 models, else 16 bits in the range that the card computes in."""
    if name != "auto":
        return name
    if weight_format == "float32":
        return "fp32"
    return "bf16" if compute_dtype is torch.bfloat16 else "fp16"


def check_card_has(kv_format: str, device: torch.device) -> None:
    """Triton turns numbers into e4m3 only where the card does. Raises `ConfigError`."""
    if kv_format == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError("--kv-format fp8 needs a card of compute capability 8.9 or newer; int8 takes as many bytes.")


def default_kv_budget(device: torch.device) -> int:
    """Bytes: a share of what is free once the weights are loaded."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CARD_SHARE)
    return int(psutil.virtual_memory().available * RAM_SHARE)


def ram_limit(config: EngineConfig, parts: EngineParts) -> int:
    """Bytes of RAM for the blocks of idle sessions; without a card the pool is in RAM itself."""
    if config.ram_limit is not None:
        return config.ram_limit
    return int(psutil.virtual_memory().available * RAM_SHARE) if parts.model.device.type == "cuda" else 0


def fit_max_seq_len(wanted: int | None, limit: int, max_blocks: int, spec: KVCacheSpec) -> int:
    """The context limit: as asked, or as much of `limit` as the budget can hold."""
    room = blocks_to_tokens(max_blocks - 1, spec.block_size, spec.groups, limit) if spec.num_layers else limit
    if wanted is not None and wanted > room:
        raise ConfigError(f"--max-seq-len {wanted} does not fit: the KV budget holds {room} tokens.")
    limit = min(limit, room)
    if limit < 2:
        raise ConfigError("The KV budget does not hold a single block; raise --kv-budget.")
    return limit
