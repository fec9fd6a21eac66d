"""The reference kernels against formulas written out one token at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels import reference
from kernels.dispatch import operations
from kernels.kv_format import KV_FORMATS
from kernels.layer_groups import LayerGroup, default_places
from kernels.reference import attention_plan
from tests.support.paged_cache import encode

LAYERS, BLOCK, KV_HEADS, HEADS, DIM = 3, 4, 2, 6, 8


def poisoned(shape, dtype):
    return torch.full(shape, 85 if dtype in (torch.int8, torch.uint8) else float("nan")).to(dtype)


class Store:
    """A paged store of several extents, filled with NaN where there is one."""

    def __init__(self, extents=3, blocks_per_extent=5, kv_format="fp32", balance=None):
        self.groups, self.places = (LayerGroup(),), default_places(LAYERS)
        self.blocks_per_extent, self.kv_format, self.balance = blocks_per_extent, kv_format, balance
        fmt, shape = (
            KV_FORMATS[kv_format],
            (blocks_per_extent, LAYERS, 2, BLOCK, KV_HEADS, KV_FORMATS[kv_format].data_width(DIM)),
        )
        self.extents = [poisoned(shape, fmt.dtype) for _ in range(extents)]
        shape = (blocks_per_extent, LAYERS, fmt.scale_planes, BLOCK, KV_HEADS, fmt.scale_width(DIM))
        self.scale_extents = [poisoned(shape, fmt.scale_dtype) for _ in range(extents)] if fmt.has_scales else []

    def workspace(self, name, shape, dtype):
        return poisoned(shape, dtype)

    def slot(self, layer, block, offset):
        """Data [2, KV, width] and scales [planes, KV, width] of one token."""
        extent, local = divmod(block, self.blocks_per_extent)
        scales = self.scale_extents[extent][local, layer, :, offset] if self.scale_extents else None
        return self.extents[extent][local, layer, :, offset], scales


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(items):
    """(tokens in the cache before, tokens now, block table) per sequence."""
    slots = [table[p // BLOCK] * BLOCK + p % BLOCK for start, n, table in items for p in range(start, start + n)]
    width = max(len(table) for _, _, table in items)
    return SimpleNamespace(
        slot_mapping=torch.tensor([slots]),
        block_tables=torch.tensor([[table + [0] * (width - len(table)) for _, _, table in items]], dtype=torch.int32),
        query_lens=tuple(n for _, n, _ in items),
        context_lens_host=tuple(start + n for start, n, _ in items),
    )


def naive_attention(query, keys, values, scale):
    """query [H, D] over keys, values [n, KV, D] -> [H * D], in float64."""
    out = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        weights = (keys[:, kv].double() @ query[head].double() * scale).softmax(0)
        out.append(weights @ values[:, kv].double())
    return torch.cat(out).float()


ITEMS = [(5, 1, [7, 3]), (0, 6, [14, 1]), (9, 4, [2, 13, 6, 9]), (0, 1, [11])]


@pytest.mark.parametrize("kv_format", list(KV_FORMATS))
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("gather_bytes", [1, 2**26], ids=["a wave each", "one wave"])
def test_attention_over_a_mixed_batch(kv_format, layer, gather_bytes, monkeypatch):
    """Blocks of all extents, decodes and chunks; every slot that is not part of a context holds NaN. What a format
    stores is written out once more in `encode`, and balanced keys are as good as any."""
    monkeypatch.setattr(attention_plan, "GATHER_BYTES", gather_bytes)
    balance = torch.rand(LAYERS, KV_HEADS, DIM) + 0.5
    store, other, meta = Store(kv_format=kv_format, balance=balance), Store(kv_format=kv_format), batch(ITEMS)
    total = sum(meta.query_lens)
    kv, queries, row, expected = random(total, 2 * KV_HEADS, DIM), random(total, HEADS, DIM, seed=1), 0, []
    for number, (start, count, table) in enumerate(ITEMS):
        past = random(start, 2, KV_HEADS, DIM, seed=2 + number)
        whole = torch.cat((past, kv[row : row + count].view(count, 2, KV_HEADS, DIM)))
        cached = torch.empty(start + count, 2, KV_HEADS, DIM, dtype=torch.float64)
        for position in range(start + count):
            place = table[position // BLOCK], position % BLOCK
            target = store if position < start else other
            k, v = whole[position, 0] / balance[layer], whole[position, 1]
            cached[position, 0], cached[position, 1] = encode(kv_format, k, v, *target.slot(layer, *place))
        cached[:, 0] *= balance[layer]
        for i in range(count):
            seen = cached[: start + i + 1]
            expected.append(naive_attention(queries[row + i], seen[:, 0], seen[:, 1], 0.3))
        row += count
    plan = reference.plan_attention(meta, store, HEADS, DIM, torch.float32)
    reference.store_kv(plan, layer, kv)
    torch.testing.assert_close(reference.attention(plan, layer, queries, 0.3), torch.stack(expected), atol=2e-6, rtol=0)


def test_store_touches_only_its_slots():
    store, meta = Store(), batch(ITEMS)
    kv = random(sum(meta.query_lens), 2 * KV_HEADS, DIM)
    reference.store_kv(reference.plan_attention(meta, store, HEADS, DIM, torch.float32), 1, kv)
    written = sum(int(extent.isfinite().all(-1).all(-1).sum()) for extent in store.extents)
    assert written == 2 * len(kv)
    for row, slot in enumerate(meta.slot_mapping[0].tolist()):
        assert torch.equal(store.slot(1, slot // BLOCK, slot % BLOCK)[0], kv[row].view(2, KV_HEADS, DIM))


def test_rotary_turns_pairs_of_halves():
    positions, inv_freq = torch.tensor([0, 3, 1000]), torch.tensor([1.0, 0.1, 0.01, 0.001])
    heads = random(3, 5, 8)
    turned = heads.clone()
    reference.rotary(turned, *reference.rotary_tables(positions, inv_freq, 1.5, torch.float32))
    for t, position in enumerate(positions.tolist()):
        for i, frequency in enumerate(inv_freq):
            angle = position * frequency
            a, b = heads[t, :, i], heads[t, :, i + 4]
            torch.testing.assert_close(turned[t, :, i], 1.5 * (a * angle.cos() - b * angle.sin()))
            torch.testing.assert_close(turned[t, :, i + 4], 1.5 * (b * angle.cos() + a * angle.sin()))


def test_norm_swiglu_and_linear():
    x, weight = random(4, 8), random(8, seed=1)
    rms = (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), (x / rms * weight).float())
    half = reference.rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), (x / rms * weight).float(), atol=0.03, rtol=0.03)
    gate, up = x[:, :4], x[:, 4:]
    torch.testing.assert_close(reference.swiglu(x), gate * torch.sigmoid(gate) * up)
    matrix, bias = random(3, 8, seed=2), random(3, seed=3)
    torch.testing.assert_close(reference.linear(x, matrix, bias), x @ matrix.T + bias)
    assert reference.linear(x, matrix.bfloat16(), None).dtype == torch.float32


def test_copy_blocks_goes_in_order_and_across_extents():
    store = Store(extents=2, blocks_per_extent=2)
    for block in range(4):
        store.extents[block // 2][block % 2] = block
    reference.copy_blocks_out(torch.tensor([(1, 2), (2, 3)]), 2, store.extents, [], torch.zeros(2, 2))
    assert [int(store.extents[b // 2][b % 2].unique()) for b in range(4)] == [0, 1, 1, 1]


def test_every_device_gets_a_full_table():
    table = operations(torch.device("cpu"))
    assert table.name == "reference"
    assert all(callable(getattr(table, name)) for name in table.__slots__ if name != "name")
