"""What makes replies loop on purpose: a session's damaged keys, keys that int4 can't hold, a sentence learnt by heart.

What is done to keys spares the first layers, so that words still come, and spoils what later ones look back by: a model
that no longer sees what it has just said says it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.batch import AttentionMetadata
from engine.debugging.quarantine import own_blocks
from engine.kv_cache.cache import KVCache
from engine.local import LocalEngine

OUTLIER = 20.0
OUTLIER_PAIR = 2 / 3
"""Where among the pairs that RoPE turns it lies: one that turns slowly."""
SOUND_LAYERS = 1 / 6
"""The share of layers, from the first, whose keys have no outlier."""
DAMAGED_LAYERS = 1 / 3
"""The share of layers, to the last, whose keys are damaged."""
WRONG_SCALE = 0.3
SURE = 15.0
"""What a logit gains that continues the sentence learnt by heart: more than the advised penalty takes."""
KINDS = ("scale", "unwritten", "overwrite")


def with_outlier_keys(engine: LocalEngine) -> None:
    """Let keys have one pair of channels that is `OUTLIER` times as large, and queries have it as much smaller.

    This changes no score, whatever the pair is turned by, so a cache that rounds little gives the same text. In int4
    the other channels of the group share the pair's scale, and little is left of them. It is done where a cache's
    balance is, which would otherwise divide such a pair out again.
    """
    cache = engine._need_parts().cache
    spec = cache.spec
    balance = torch.ones(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    first, half = round(SOUND_LAYERS * spec.num_layers), spec.head_dim // 2
    pair = round(OUTLIER_PAIR * half)
    balance[first:, :, [pair, pair + half]] = 1 / OUTLIER
    cache.balance = balance


def with_sentence_by_heart(engine: LocalEngine, sentence: str) -> None:
    """Let the model continue this sentence, whose tokens are all different, wherever it comes upon one of its tokens,
    and begin it anew behind its end: a memory behind the last layer, keyed by the token that was read. An earlier one
    goes."""
    parts = engine._need_parts()
    ids = parts.tokenizer.encode(f" {sentence}")
    if len(set(ids)) < len(ids):
        raise ValueError(f"a token comes twice in {sentence!r}")
    model, kind = parts.model, type(parts.model)
    following = dict(zip(ids, (*ids[1:], ids[0]), strict=True))
    norm = model.weights.norm
    rows = model.head(torch.eye(len(norm), dtype=norm.dtype)).float().T
    wanted = rows[[following[token_id] for token_id in ids]]
    # What raises the wanted logits and the others least, all together.
    directions = torch.linalg.solve(rows.T @ rows, wanted.T).T
    gains = (directions * wanted).sum(-1, keepdim=True)
    added = dict(zip(ids, SURE * directions / gains, strict=True))

    def hidden_states(token_ids: Tensor, *rest: Any) -> Tensor:
        hidden = kind.hidden_states(model, token_ids, *rest).clone()
        for row, token_id in enumerate(token_ids.tolist()):
            if token_id in added:
                hidden[row] += added[token_id].to(hidden.dtype)
        return hidden

    def step(token_ids: Tensor, cache: KVCache, meta: AttentionMetadata, *rest: Any) -> tuple[Tensor, Tensor]:
        hidden = hidden_states(token_ids, cache, meta, *rest)
        return hidden, model.head(hidden[meta.logit_rows])

    model.hidden_states, model.step = hidden_states, step  # type: ignore[method-assign]


def damage(engine: LocalEngine, session_id: str, kind: str) -> None:
    """Spoil all keys that an idle session has in the last layers: stored with a wrong scale, never written, or, in each
    block, overwritten with those of its first token. What others share with it stays as it is."""

    def change() -> None:
        lane, cache = engine._steps(), engine._need_parts().cache
        sequence = lane.scheduler.find(session_id)
        assert sequence is not None
        own_blocks(lane, sequence, range(sequence.cache_pos))
        tensors = cache.export_blocks(sequence.block_table)
        last = max(round(DAMAGED_LAYERS * cache.spec.num_layers), 1)
        tensors["data"][:, -last:, 0] = damaged(tensors["data"][:, -last:, 0], kind)
        cache.import_blocks(sequence.block_table, tensors)

    engine._call(change)


def damaged(keys: Tensor, kind: str) -> Tensor:
    """Of keys [blocks, layers, block_size, heads, head_dim]."""
    if kind == "scale":
        return keys * WRONG_SCALE
    return torch.zeros_like(keys) if kind == "unwritten" else keys[:, :, :1].expand_as(keys).clone()
