"""Memory and quality of each KV format: bytes per token, and KL divergence from a float32 cache on a text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.cache.setting import MIB, Setting, running, scratch, text_ids
from benchmarks.common import print_table
from engine.kv_cache.cache import KVCache
from engine.kv_cache.calibration import CALIBRATION_TEXT, CALIBRATION_TOKENS, calibrate, precision_loss
from engine.local import LocalEngine
from engine.replay import Replay
from kernels.kv_format import FP32, KV_FORMATS


def measure(setting: Setting) -> dict[str, Any]:
    with scratch() as folder, running(setting, folder, snapshot_limit=0) as engine:
        result = {name: _one(engine, setting, name) for name in KV_FORMATS}
    rows = [
        (
            name,
            f"{found['bytes_per_token']:,}",
            f"{result['fp16']['bytes_per_token'] / found['bytes_per_token']:.2f} x",
            f"{found['bytes'] / MIB:.1f}",
            f"{found['mean_kl']:.5f}",
            f"{found['top1_agreement']:.1%}",
        )
        for name, found in result.items()
    ]
    head = (
        "format",
        "bytes/token",
        "of fp16",
        f"MiB for {setting.quality_tokens} tokens",
        "mean KL, nats",
        "top-1 same",
    )
    print_table(head, rows)
    return result


def _one(engine: LocalEngine, setting: Setting, name: str) -> dict[str, Any]:
    """A cache of this format with the balance constants that it would have, filled with the text."""
    parts = engine._need_parts()
    spec = replace(parts.cache.spec, format=KV_FORMATS[name])
    ids = text_ids(engine, setting.text, setting.quality_tokens)
    prepared = KVCache(spec, parts.model.device)
    if spec.format.has_scales:
        calibrate(parts.model, prepared, engine.tokenizer.encode(CALIBRATION_TEXT)[:CALIBRATION_TOKENS])
    exact = Replay(parts.model, replace(spec, format=FP32), len(ids)).extend(ids, len(ids))
    other = Replay(parts.model, spec, len(ids), prepared.balance)
    loss = precision_loss(exact, other.extend(ids, len(ids)))
    return {
        "bytes_per_token": spec.bytes_per_token,
        "bytes": sum(extent.nbytes for extent in (*other.cache.extents, *other.cache.scale_extents)),
        "mean_kl": loss.mean_kl,
        "max_kl": loss.max_kl,
        "top1_agreement": loss.top1_agreement,
    }
