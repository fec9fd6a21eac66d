"""Draws the next token of each row on the device: the rules and the order of `engine.sampling`, without a host sync.

A row's vocabulary is cut into chunks, one program each, and the steps are launches that follow each other, so that all
of the card works on one row: penalties, bias and maximum; the thresholds of top-k and top-p (`sample_keys`);
probabilities per chunk; the draw. Where every row is greedy, the first and the last are all.

Probabilities are fixed-point integers of 2**-40 of the likeliest token's, so that sums don't depend on their order;
tokens less likely than one unit are not drawn. Against the float64 sums of the CPU's sampler a draw differs where the
random number falls within float32's rounding of exp of a border between two tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.sample_keys import (
    INDEX_MASK,
    NOT_FINITE_KEY,
    PER_CHUNK,
    ROUNDS,
    STATE,
    TARGET,
    TOP_K_KEY,
    UNIT,
    best_token,
    lowest_key,
    narrow_kernel,
    order_key,
    setting,
    tempered,
)
from kernels.gpu.tuning import capability, launch_params
from kernels.reference.sampling import SETTINGS, sample_reference
from kernels.registry import register


@triton.jit
def _weights(settings_ptr, row, logits_ptr, chunk, scratch, V, CHUNK: tl.constexpr,
             NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """int64 [CHUNK]: the probabilities of a chunk's tokens, 0 where a filter takes them out."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * V + at, mask=at < V, other=float("-inf"))
    y = tempered(settings_ptr, row, x, scratch, NUM_CHUNKS, WIDTH)
    share = tl.exp(y)
    kept = (at < V) & (share >= setting(settings_ptr, row, 4).to(tl.float32))
    top_k = setting(settings_ptr, row, 2).to(tl.int64)
    cut = setting(settings_ptr, row, 3) < 1.0
    if (top_k > 0) & (top_k < V):
        # Counts of top-k's last round are only overwritten where top-p has kept what they say.
        if cut:
            kept = kept & (order_key(x) >= tl.load(scratch + TOP_K_KEY))
        else:
            kept = kept & (order_key(x) >= lowest_key(scratch, ROUNDS - 1, top_k, NUM_CHUNKS, WIDTH))
    if cut:
        target = tl.load(scratch + TARGET)
        kept = kept & (order_key(y) >= lowest_key(scratch, 2 * ROUNDS - 1, target, NUM_CHUNKS, WIDTH))
    return tl.where(kept, (share * UNIT).to(tl.int64), 0)


@triton.jit
def adjust_kernel(
    logits_ptr, settings_ptr, seen_ptr, counts_ptr, bias_ptr, scratch_ptr, scratch_stride, V, CHUNK: tl.constexpr
):
    """Program (row, chunk): penalties and bias, in place, and the chunk's best token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    x = tl.load(logits_ptr + row * V + at, mask=inside, other=0.0)
    finite = (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    repetition = setting(settings_ptr, row, 5).to(tl.float32)
    presence, frequency = setting(settings_ptr, row, 6).to(tl.float32), setting(settings_ptr, row, 7).to(tl.float32)
    biased = setting(settings_ptr, row, 8) != 0.0
    kept = setting(settings_ptr, row, 9).to(tl.int64) * V + at
    counted = (presence != 0.0) | (frequency != 0.0)
    if repetition != 1.0:
        seen = tl.load(seen_ptr + kept, mask=inside, other=0) != 0
        x = tl.where(seen, tl.where(x < 0, x * repetition, tl.div_rn(x, tl.zeros_like(x) + repetition)), x)
    if counted:
        counts = tl.load(counts_ptr + kept, mask=inside, other=0)
        x = x - presence * (counts > 0).to(tl.float32) - frequency * counts.to(tl.float32)
    if biased:
        x = x + tl.load(bias_ptr + kept, mask=inside, other=0.0)
    if counted | biased | (repetition != 1.0):
        tl.store(logits_ptr + row * V + at, x, mask=inside)
    key = tl.where(finite, order_key(x), NOT_FINITE_KEY)
    packed = (key.to(tl.int64) << 32) | (at.to(tl.int64) ^ INDEX_MASK)
    best = tl.max(tl.where(inside, packed, -9223372036854775807), 0)
    tl.store(scratch_ptr + row * scratch_stride + STATE + chunk, best)


@triton.jit
def weigh_kernel(
    settings_ptr, logits_ptr, scratch_ptr, scratch_stride, V,
    CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the probability of the chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if setting(settings_ptr, row, 1) == 0.0:
        return
    scratch = scratch_ptr + row * scratch_stride
    weights = _weights(settings_ptr, row, logits_ptr, chunk, scratch, V, CHUNK, NUM_CHUNKS, WIDTH)
    tl.store(scratch + STATE + NUM_CHUNKS + chunk, tl.sum(weights, 0))


@triton.jit
def pick_kernel(
    settings_ptr, seen_ptr, counts_ptr, logits_ptr, scratch_ptr, scratch_stride, out_ptr, V,
    CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program row: the first token whose cumulative probability, in the order of ids, is above the random number.

    -1, not counted, if a logit of the row was not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    scratch = scratch_ptr + row * scratch_stride
    top, token = best_token(scratch, NUM_CHUNKS, WIDTH)
    if setting(settings_ptr, row, 1) != 0.0:
        chunks = tl.arange(0, WIDTH)
        masses = tl.load(scratch + STATE + NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=0)
        total = tl.sum(masses, 0)
        wanted = (setting(settings_ptr, row, 0) * total.to(tl.float64)).to(tl.int64)
        wanted = tl.minimum(wanted, total - 1)
        chunk = tl.sum((tl.cumsum(masses, 0) <= wanted).to(tl.int32), 0)
        wanted -= tl.sum(tl.where(chunks < chunk, masses, 0), 0)
        weights = _weights(settings_ptr, row, logits_ptr, chunk, scratch, V, CHUNK, NUM_CHUNKS, WIDTH)
        token = (chunk * CHUNK + tl.sum((tl.cumsum(weights, 0) <= wanted).to(tl.int32), 0)).to(tl.int64)
    finite = top != NOT_FINITE_KEY
    tl.store(out_ptr + row, tl.where(finite, token, -1))
    kept = setting(settings_ptr, row, 9).to(tl.int64) * V + token
    tl.store(seen_ptr + kept, 1, mask=finite)
    tl.store(counts_ptr + kept, tl.load(counts_ptr + kept) + 1, mask=finite)


def scratch_width(vocab_size: int) -> int:
    """Columns of the int64 workspace `scratch`."""
    return int(STATE.value) + PER_CHUNK * triton.cdiv(vocab_size, launch_params("sample", capability())["CHUNK"])


def launch_sample(
    logits: Tensor, settings: Tensor, seen: Tensor, counts: Tensor, bias: Tensor, scratch: Tensor, out: Tensor,
    greedy: bool,
) -> None:  # fmt: skip
    """As `sample_reference`, with the workspace scratch int64 [B, `scratch_width(V)`]; adjusts logits in place.

    Raises ValueError for other shapes and dtypes.
    """
    rows, vocab_size = logits.shape
    _check(logits, settings, seen, counts, bias, scratch, out)
    if not rows:
        return
    params = launch_params("sample", capability())
    chunks = triton.cdiv(vocab_size, params["CHUNK"])
    # Fused multiply-adds would round the penalties in another way than the CPU does.
    common = {**params, "enable_fp_fusion": False}
    split = {**common, "NUM_CHUNKS": chunks, "WIDTH": triton.next_power_of_2(chunks)}
    flags, stride, grid = seen.view(torch.uint8), scratch.stride(0), (rows, chunks)
    adjust_kernel[grid](logits, settings, flags, counts, bias, scratch, stride, vocab_size, **common)
    if not greedy:
        for launch in range(2 * ROUNDS.value):
            by_mass = launch >= ROUNDS.value
            narrow_kernel[grid](settings, logits, scratch, stride, vocab_size, launch, BY_MASS=by_mass, **split)
        weigh_kernel[grid](settings, logits, scratch, stride, vocab_size, **split)
    pick_kernel[(rows,)](settings, flags, counts, logits, scratch, stride, out, vocab_size, **split)


def _check(
    logits: Tensor, settings: Tensor, seen: Tensor, counts: Tensor, bias: Tensor, scratch: Tensor, out: Tensor
) -> None:
    rows, vocab_size = logits.shape
    states = len(seen)
    wanted = (
        ("logits", logits, torch.float32, (rows, vocab_size)),
        ("settings", settings, torch.float64, (rows, len(SETTINGS))),
        ("seen", seen, torch.bool, (states, vocab_size)),
        ("counts", counts, torch.int32, (states, vocab_size)),
        ("bias", bias, torch.float32, (states, vocab_size)),
        ("scratch", scratch, torch.int64, (rows, scratch_width(vocab_size))),
        ("out", out, torch.int64, (rows,)),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}."
            )


sample = register(
    "sample",
    "(Tensor(a!) logits, Tensor settings, Tensor(b!) seen, Tensor(c!) counts, Tensor bias, Tensor(d!) scratch,"
    " Tensor(e!) out, bool greedy) -> ()",
    launch_sample,
    sample_reference,
)
