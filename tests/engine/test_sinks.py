"""Sinks and a window against StreamingLLM as its authors define it, written out: the cache holds keys before RoPE, of
the first tokens and of the newest, and every step turns them by their place in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.registry import DecoderModel, load_model
from kernels.dispatch import cpu_kernels
from tests.support.batches import make_cache, make_metadata, poison_unseen
from tests.support.tiny_models import HEADS, KV_HEADS, VOCAB, save_safetensors, tiny_model

CPU = torch.device("cpu")
WINDOW = 12
LENGTH = 5 * WINDOW
IDS = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3))
TABLE = (torch.randperm(30, generator=torch.Generator().manual_seed(4)) + 1).tolist()


def turned(x: Tensor, positions: Tensor, dim: int) -> Tensor:
    """x [n, heads, dim] rotated by positions [n]."""
    angles = positions[:, None, None] * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def streaming_llm(model, sinks: int) -> Tensor:
    """Logits of all IDS, one token at a time."""
    weights, layers = dict(model.state_dict()), model.config.num_hidden_layers
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]
    return torch.stack([_token(weights, layers, caches, int(token), sinks) for token in IDS])


def _token(weights: dict[str, Tensor], layers: int, caches, token: int, sinks: int) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt() * weights[f"model.{name}.weight"]

    x = weights["model.embed_tokens.weight"][token]
    for layer, cache in enumerate(caches):
        own = f"model.layers.{layer}."
        normed = norm(x, f"layers.{layer}.input_layernorm")
        q, k, v = (weights[f"{own}self_attn.{part}_proj.weight"] @ normed for part in "qkv")
        cache.append((k.view(KV_HEADS, -1), v.view(KV_HEADS, -1)))
        if len(cache) > sinks + WINDOW:
            del cache[sinks]
        dim, count = len(k) // KV_HEADS, len(cache)
        keys = turned(torch.stack([key for key, _ in cache]), torch.arange(count), dim)
        query = turned(q.view(1, HEADS, dim), torch.tensor([count - 1]), dim)[0]
        keys = keys.repeat_interleave(HEADS // KV_HEADS, 1)
        values = torch.stack([value for _, value in cache]).repeat_interleave(HEADS // KV_HEADS, 1)
        chosen = (torch.einsum("hd,nhd->hn", query, keys) / dim**0.5).softmax(-1)
        mixed = torch.einsum("hn,nhd->hd", chosen, values).flatten()
        x = x + weights[f"{own}self_attn.o_proj.weight"] @ mixed
        normed = norm(x, f"layers.{layer}.post_attention_layernorm")
        gate, up = (weights[f"{own}mlp.{part}_proj.weight"] @ normed for part in ("gate", "up"))
        x = x + weights[f"{own}mlp.down_proj.weight"] @ (F.silu(gate) * up)
    return weights["lm_head.weight"] @ norm(x, "norm")


def ours(model: DecoderModel, sinks: int, chunks: list[int]) -> Tensor:
    cache, start, rows = make_cache(model, window=WINDOW, sinks=sinks), 0, []
    for count in chunks:
        meta = make_metadata([(start, count, TABLE)], cache=cache)
        rows.append(model.forward(IDS[start : start + count], cache, meta))
        start += count
        poison_unseen(cache, TABLE, start)
    return torch.cat(rows)


@pytest.fixture(scope="module", params=[1, 4, 7])
def defined(request: pytest.FixtureRequest):
    model = tiny_model("llama", rms_norm_eps=1e-6)
    with torch.no_grad():
        return model, request.param, streaming_llm(model, request.param)


@pytest.mark.parametrize("chunks", [[LENGTH], [1] * LENGTH, [5, 14, 1, 1, 19, 20]], ids=["one go", "single", "chunks"])
def test_logits_are_those_of_the_definition(defined, chunks: list[int], tmp_path: Path) -> None:
    model, sinks, expected = defined
    loaded = load_model(save_safetensors(model, tmp_path), CPU, "float32")
    assert (ours(loaded, sinks, chunks) - expected).abs().max() < 1e-3


@pytest.mark.skipif(cpu_kernels() is None, reason="the CPU kernels can't be compiled here")
def test_the_compiled_kernels_follow_it_too(defined, tmp_path: Path) -> None:
    """With the weights rounded as they round them."""
    model, sinks, _ = defined
    loaded = load_model(save_safetensors(model, tmp_path), CPU)
    kept, loaded._fused = loaded._fused, None
    expected = ours(loaded, sinks, [1] * LENGTH)
    loaded._fused = kept
    for chunks in ([1] * LENGTH, [20, 20, 20]):
        assert (ours(loaded, sinks, chunks) - expected).abs().max() < 1e-3


def test_without_other_positions_for_sinks_it_would_not_hold(defined, tmp_path: Path) -> None:
    """The test above can fail: a window that is only cut out of the text gives other logits."""
    model, sinks, expected = defined
    loaded = load_model(save_safetensors(model, tmp_path), CPU, "float32")
    loaded._turns = lambda cache, meta: [type(t)(t.own, None) for t in DecoderModel._turns(loaded, cache, meta)]
    assert (ours(loaded, sinks, [LENGTH]) - expected).abs().max() > 0.05
