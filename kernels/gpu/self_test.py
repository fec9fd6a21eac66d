"""Each kernel on this very card against its definition in torch, once per card and version; one that fails is replaced.

A driver, a compiler or a card may get a kernel wrong that is right elsewhere. The tests can't know of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gpu import causal_conv, copy_blocks, ssm_chunk, ssm_step, step  # noqa: F401  (they register the ops)
from kernels.gpu.dequant_gemm import needs_scratch
from kernels.gpu.paged_decode import newest_tokens, workspace_shapes
from kernels.gpu.sample import scratch_width
from kernels.kv_format import KV_FORMATS, KVFormat, fill_extent_table
from kernels.planes import FORMATS, PackedWeight, pack, plain
from kernels.reference.quantized import ACTIVATIONS
from kernels.reference.sampling import SETTINGS
from kernels.registry import OPS, use_reference

log = logging.getLogger("kvscope.kernels")

KINDS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
MIXED = ("Q4_K", "Q6_K")
"""As the parts of a matrix are in most files of mixed kinds."""
TOLERANCE = 0.02
"""Largest error allowed, as a share of the largest value: several times what rounding to bfloat16 makes."""
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 6, 2, 64, 16, 8
CONTEXT_LENS = (1, 37)
WINDOW, SINKS = 20, 3

Case = tuple[str, list[Any], Tensor]
"""An op's name, its arguments, and the one among them that it writes."""


def check(device: torch.device, dtype: torch.dtype, kept: Path | None) -> tuple[str, ...]:
    """Names of the ops whose kernels fail on `device` when activations are `dtype`; from then on they run in torch.

    What an earlier start found is read from `kept`, a JSON file, if it was this card, these versions and these sources.
    """
    key = _key(device, dtype)
    known = _read(kept)
    if key not in known:
        known[key] = _failing(device, dtype)
        if kept is not None:
            with suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(known))
    for name in known[key]:
        log.warning("The kernel %s gives wrong results on this card; torch takes its place, more slowly.", name)
        use_reference(name)
    return tuple(known[key])


def _key(device: torch.device, dtype: torch.dtype) -> str:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    digest = hashlib.sha256()
    for source in sorted((*Path(__file__).parent.glob("*.py"), *Path(__file__).parent.glob("tuned.json"))):
        digest.update(source.read_bytes())
    return " ".join((card, str(dtype), torch.__version__, triton.__version__, digest.hexdigest()[:16]))


def _read(kept: Path | None) -> dict[str, list[str]]:
    if kept is not None:
        with suppress(OSError, ValueError):
            known = json.loads(kept.read_text())
            if isinstance(known, dict):
                return known
    return {}


def _failing(device: torch.device, dtype: torch.dtype) -> list[str]:
    names: list[str] = []
    for name, arguments, written in cases(device, dtype):
        if name not in names and not _agrees(name, arguments, written):
            names.append(name)
    return names


def _agrees(name: str, arguments: list[Any], written: Tensor) -> bool:
    """Run launcher and reference on the same inputs; both write `written`, and some a state or other arguments too."""
    before = [(tensor, tensor.clone()) for tensor in (written, *arguments) if isinstance(tensor, Tensor)]
    try:
        OPS[name].launcher(*arguments)
        found = written.clone()
    except Exception as error:  # the compiler and the driver have errors of their own
        log.warning("The kernel %s can't be launched: %s", name, " ".join(str(error).split())[:120])
        return False
    for tensor, kept in before:
        tensor.copy_(kept)
    OPS[name].reference(*arguments)
    expected, found = written.float(), found.float()
    return bool(((found - expected).abs() <= TOLERANCE * expected.abs().max()).all())


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Small inputs for every op that a decoder and its sampler run."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, out = normal(3, 512), normal(3, 512)
    yield "rms_norm", [x, normal(512), 1e-5, out], out
    yield "add_rms_norm", [normal(3, 512), x, normal(512), 1e-5, out], out
    yield "swiglu", [normal(3, 1024), out], out
    yield "geglu", [normal(3, 1024), out], out
    yield from _products(device, normal)
    for fmt in _kv_formats(device, dtype):
        yield from _attention(device, normal, fmt)
    yield from _sampling(device)
    yield from _recurrence(device, normal)


def _products(device: torch.device, normal: Callable[..., Tensor]) -> Iterator[Case]:
    weights = {kind: _random_weight(kind, device) for kind in KINDS} | {"plain": plain(normal(96, 512))}
    few, many = normal(2, 512), normal(24, 512)
    for names in (*((name,) for name in weights), MIXED):
        parts = [weights[name] for name in names]
        kinds, planes = [part.kind for part in parts], [plane for part in parts for plane in part.planes]
        rows = 96 * len(parts)
        out = normal(2, rows)
        yield "dequant_gemv", [few, planes, kinds, None, normal(2, rows), "", out], out
        scratch = normal(rows, 512) if needs_scratch(kinds, many.dtype) else None
        out = normal(24, rows)
        yield "dequant_gemm", [many, planes, kinds, None, None, scratch, out], out
        out = normal(2, rows // 2)
        if names in (KINDS[-1:], MIXED):
            for activation in ACTIVATIONS:
                yield "dequant_gemv", [few, planes, kinds, None, None, activation, out], out
    for weight in weights.values():
        out = normal(5, 512)
        ids = torch.tensor([0, 95, 7, 7, 31], device=device)
        yield "dequant_rows", [list(weight.planes), weight.kind, ids, out], out


def _random_weight(kind: str, device: torch.device) -> PackedWeight:
    """96 rows of 512 columns: random bits with scales of a sane size."""
    fmt, generator = FORMATS[kind], torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (96, 512 // fmt.columns, fmt.nbytes), dtype=torch.uint8, generator=generator)
    scales = torch.full((96, blocks.shape[1], 2 if fmt.has_min else 1), 1e-3, dtype=torch.float16)
    blocks[..., fmt.scale_at : fmt.scale_at + 2 * scales.shape[-1]] = scales.view(torch.uint8)
    return pack(blocks.view(96, -1).to(device), kind, 512)


def _recurrence(device: torch.device, normal: Callable[..., Tensor]) -> Iterator[Case]:
    """Two sequences, of one token and of five; a state's last axis is no power of 2."""
    starts = torch.tensor([0, 1, 6], dtype=torch.int32, device=device)
    state, out = normal(2, 160, 3), normal(6, 160)
    convolved = [state, starts, normal(6, 160), normal(160, 4), normal(160), out]
    yield "causal_conv", convolved, out
    yield "causal_conv", convolved, state
    heads, sizes = [normal(4).float() for _ in range(3)], (4, 40, 48)
    A, D, bias = -heads[0].exp(), *heads[1:]
    for name, tokens, begin in (("ssm_step", 2, []), ("ssm_chunk", 6, [starts])):
        state, out = normal(2, *sizes).float(), normal(tokens, *sizes[:2])
        B, C = normal(tokens, 2, sizes[2]), normal(tokens, 2, sizes[2])
        run = [state, *begin, normal(tokens, *sizes[:2]), normal(tokens, 4), A, B, C, D, bias, 0.0, 10.0, out]
        yield name, run, out
        yield name, run, state


def _kv_formats(device: torch.device, dtype: torch.dtype) -> list[KVFormat]:
    """What sessions of this model may keep K and V in: 16 bits (or float32), and fewer."""
    plain = next(fmt for fmt in KV_FORMATS.values() if fmt.dtype is dtype and not fmt.has_scales)
    newer = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return [plain, KV_FORMATS["int8"], KV_FORMATS["int4"]] + ([KV_FORMATS["fp8"]] if newer else [])


def _extents(device: torch.device, normal: Callable[..., Tensor], fmt: KVFormat) -> tuple[Tensor, list[Tensor]]:
    """Blocks of one layer with random content, and their scales where there are any."""
    shape, scales = (BLOCKS, 1, 2, BLOCK_SIZE, KV_HEADS, fmt.data_width(HEAD_DIM)), []
    if fmt.has_scales:
        width = (BLOCKS, 1, fmt.scale_planes, BLOCK_SIZE, KV_HEADS, fmt.scale_width(HEAD_DIM))
        scales = [(normal(*width).float().abs() / 64).to(fmt.scale_dtype)]
        low, high = (-127, 128) if fmt.dtype is torch.int8 else (0, 256)
        codes = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(2))
        return codes.to(device, fmt.dtype), scales
    return normal(*shape).to(fmt.dtype), scales


def _attention(device: torch.device, normal: Callable[..., Tensor], fmt: KVFormat) -> Iterator[Case]:
    total, half = sum(CONTEXT_LENS), HEAD_DIM // 2
    extent, scales = _extents(device, normal, fmt)
    table = torch.zeros(1, 2, dtype=torch.int64, device=device)
    fill_extent_table(table, [extent], scales)
    cache = [fmt.name, 0, BLOCKS, [extent], scales, table]
    inv_freq = 1e4 ** -(torch.arange(half, device=device).float() / half)
    tokens = torch.arange(total, device=device)
    q = normal(total, HEADS, HEAD_DIM)
    qkv = normal(total, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    stored = [qkv, tokens, tokens + BLOCK_SIZE, inv_freq, 1.0, None, None, 1e-5, None, False, *cache, q]
    # Two codes of 4 bits in a byte are no number to compare; what they are made with is.
    yield "store_kv", stored, scales[0] if fmt.bits == 4 else extent
    yield "store_kv", stored, q
    sink_q = normal(total, HEADS, HEAD_DIM)
    yield "store_kv", [*stored, 9, sink_q], sink_q
    lens = torch.tensor(CONTEXT_LENS, dtype=torch.int32, device=device)
    tables = torch.tensor([[4, 0, 0], [6, 1, 3]], dtype=torch.int32, device=device)
    shapes = workspace_shapes(len(lens), HEADS, HEAD_DIM, 4)
    partials = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]
    out = normal(len(lens), HEADS, HEAD_DIM)
    newest = min(newest_tokens(), 8)
    q = normal(len(lens), HEADS, HEAD_DIM)
    asked = [q, tables, lens, 0.125, 0, 0, 0.0, None, 1.0, newest, *cache, *partials, out]
    yield "paged_decode", asked, out
    asked[4:6] = WINDOW, SINKS
    yield "paged_decode", [*asked, normal(len(lens), HEADS, HEAD_DIM)], out
    starts = torch.tensor([0, 1, total], dtype=torch.int32, device=device)
    out = normal(total, HEADS, HEAD_DIM)
    q = normal(total, HEADS, HEAD_DIM)
    chunk = [q, starts, tables, lens, max(CONTEXT_LENS), 0.125, 0, 0, 0.0, None, 1.0]
    yield "paged_prefill", [*chunk, *cache, out], out
    chunk[6:8] = WINDOW, SINKS
    own = torch.cat([torch.arange(length, device=device) for length in CONTEXT_LENS])
    sink_q = torch.where((own < WINDOW + SINKS - 1)[:, None, None], q, sink_q)
    yield "paged_prefill", [*chunk, *cache, out, sink_q], out

    pairs = torch.tensor([[1, 5], [2, 7], [0, 0]], device=device)
    for written in (extent, *scales):
        yield "copy_blocks", [pairs, *cache[2:]], written


def _sampling(device: torch.device) -> Iterator[Case]:
    """A greedy row and a drawn one, penalised, over two chunks; what they count shows the tokens. Logits are whole
    numbers and the random number lies far from any border between tokens, so that rounding decides nothing."""
    vocab_size = 5000
    logits = (torch.arange(2.0 * vocab_size).reshape(2, vocab_size) * 3) % 997
    row = {"top_p": 1.0, "repetition_penalty": 1.5, "presence_penalty": 2.0, "biased": 1.0}
    drawn = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "uniform": 0.45}
    rows = [row | {"state_row": 1.0}, row | drawn]
    settings = torch.tensor([[asked.get(name, 0.0) for name in SETTINGS] for asked in rows], dtype=torch.float64)
    seen, bias = torch.zeros(2, vocab_size, dtype=torch.bool), torch.zeros(2, vocab_size)
    counts, scratch = seen.int(), torch.zeros(2, scratch_width(vocab_size), dtype=torch.int64)
    seen[:, ::3], counts[:, ::5], bias[:, 1::7] = True, 1, 4.0
    tensors = [logits, settings, seen, counts, bias, scratch, torch.zeros(2, dtype=torch.int64)]
    tensors = [tensor.to(device) for tensor in tensors]
    yield "sample", [*tensors, False], tensors[3]
