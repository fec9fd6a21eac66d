"""What has to be equal for cached blocks to mean the same: the fingerprint of a loaded model."""

from __future__ import annotations

import hashlib
from dataclasses import asdict

from torch import Tensor

from engine.kv_cache.spec import KVCacheSpec
from engine.kv_cache.ssm_state import SSMStateSpec
from engine.loader import EngineParts

ENGINE_VERSION = "1"
"""To be raised whenever the same weights and ids give other K and V than before."""


def _balance_digest(balance: Tensor | None) -> str:
    """Codes mean nothing without the constants that the keys were divided by."""
    if balance is None:
        return ""
    return ", balance " + hashlib.sha256(balance.cpu().numpy().tobytes()).hexdigest()[:16]


def _attention(spec: KVCacheSpec) -> str:
    """What layers see of the past, and which of them share K and V."""
    seen = [
        "all"
        if group.window is None
        else f"the last {group.window}" + (f" and first {group.sinks}" * bool(group.sinks))
        for group in spec.windows.groups
    ]
    layers = [f"{place.group}.{place.store}" for place in spec.places]
    return f"{', '.join(seen)} by {hashlib.sha256(' '.join(layers).encode()).hexdigest()[:8]}"


def _state_layout(spec: SSMStateSpec) -> str:
    conv, dtype = list(spec.conv_shape), str(spec.conv_dtype).removeprefix("torch.")
    return f"{spec.num_layers} layers, {dtype} {conv}, float32 {list(spec.ssm_shape)}"


def fingerprint(parts: EngineParts) -> dict[str, str]:
    """By names fit for a sentence. The first call for a tokenizer takes a while (`vocabulary_digest`)."""
    config = parts.model.config
    rope = ", ".join(f"{name} {value}" for name, value in asdict(config.rope).items())
    state = {"recurrent state": _state_layout(parts.states.spec)} if parts.states is not None else {}
    return {
        "weights": parts.weights_id,
        "weight format": f"{parts.model.weight_format} in {str(parts.model.dtype).removeprefix('torch.')}",
        "KV format": parts.kv_format + _balance_digest(parts.cache.balance),
        "block size": str(parts.cache.spec.block_size),
        "RoPE": rope,
        "attention": _attention(parts.cache.spec),
        "tokenizer": parts.tokenizer.vocabulary_digest,
        "chat template": parts.tokenizer.template_digest,
        "engine version": ENGINE_VERSION,
        **state,
    }
