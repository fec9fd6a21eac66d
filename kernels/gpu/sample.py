"""Draws the next token of each row on the device: the rules and the order of `engine.sampling`, without a host sync.

A row's vocabulary is cut into chunks, one program each, and the steps are launches that follow each other, so that all
of the card works on one row and no program waits for another: penalties and maximum; top-k's threshold and top-p's,
each as 8 rounds that fix 4 bits of an order-preserving integer key; probabilities per chunk; the draw.

Probabilities are fixed-point integers of 2**-40 of the likeliest token's, so that sums don't depend on their order;
tokens less likely than one unit are not drawn. Against the float64 sums of the CPU's sampler a draw differs where the
random number falls within float32's rounding of exp of a border between two tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tuning import capability, launch_params
from kernels.reference.sampling import SETTINGS, sample_reference
from kernels.registry import register

UNIT = tl.constexpr(1099511627776.0)  # 2**40
LOWEST = tl.constexpr(-2147483648)
LOWEST_TEMPERATURE = tl.constexpr(1e-30)
INDEX_MASK = tl.constexpr(0xFFFFFFFF)
FIELDS = tl.constexpr(len(SETTINGS))
ROUNDS = tl.constexpr(8)
DIGITS = tl.constexpr(16)
# A row of `scratch` has STATE numbers, then per chunk its best token, its mass, and two buffers of DIGITS counts. State
# 0 to 15: the lowest key that top-k (0 to 7) and top-p (8 to 15) may still end at before each round.
TOP_K_KEY = tl.constexpr(16)
TARGET = tl.constexpr(17)
STATE = tl.constexpr(18)
PER_CHUNK = 2 + 2 * 16


@triton.jit
def _key(x):
    """float32 -> int32 in the same order; -0 and 0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _setting(settings_ptr, row, FIELD: tl.constexpr):
    """Column FIELD of `SETTINGS`, float64."""
    return tl.load(settings_ptr + row * FIELDS + FIELD)


@triton.jit
def _best(scratch, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """(key, id) of the row's largest logit, the lowest id on ties; the pair is one integer per chunk."""
    chunk = tl.arange(0, WIDTH)
    packed = tl.max(tl.load(scratch + STATE + chunk, mask=chunk < NUM_CHUNKS, other=-9223372036854775807), 0)
    return (packed >> 32).to(tl.int32), (packed & INDEX_MASK) ^ INDEX_MASK


@triton.jit
def _counts(scratch, launch, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """int64 [DIGITS]: what an earlier round counted, over all chunks."""
    chunk, digit = tl.arange(0, WIDTH)[:, None], tl.arange(0, DIGITS)[None, :]
    buffer = scratch + STATE + 2 * NUM_CHUNKS + (launch % 2) * (NUM_CHUNKS * DIGITS)
    return tl.sum(tl.load(buffer + chunk * DIGITS + digit, mask=chunk < NUM_CHUNKS, other=0), 0)


@triton.jit
def _after(scratch, launch, target, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """The lowest key left once round `launch` has counted: the largest candidate that still reaches the target."""
    reached = (_counts(scratch, launch, NUM_CHUNKS, WIDTH) >= target) & (tl.arange(0, DIGITS) > 0)
    digit = tl.sum(reached.to(tl.int32), 0).to(tl.int64)
    return tl.load(scratch + launch) + (digit << (28 - 4 * (launch % ROUNDS)))


@triton.jit
def _tempered(settings_ptr, row, x, scratch, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """Logits once the largest is 0 and the temperature divides them."""
    key, _index = _best(scratch, NUM_CHUNKS, WIDTH)
    top = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    temperature = tl.maximum(_setting(settings_ptr, row, 1).to(tl.float32), LOWEST_TEMPERATURE)
    return tl.div_rn(x - top, tl.zeros_like(x) + temperature)


@triton.jit
def _weights(settings_ptr, row, adjusted_ptr, chunk, scratch, V, CHUNK: tl.constexpr,
             NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """int64 [CHUNK]: the probabilities of a chunk's tokens, 0 where a filter takes them out."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(adjusted_ptr + row * V + at, mask=at < V, other=float("-inf"))
    y = _tempered(settings_ptr, row, x, scratch, NUM_CHUNKS, WIDTH)
    share = tl.exp(y)
    kept = (at < V) & (share >= _setting(settings_ptr, row, 4).to(tl.float32))
    top_k = _setting(settings_ptr, row, 2).to(tl.int64)
    cut = _setting(settings_ptr, row, 3) < 1.0
    if (top_k > 0) & (top_k < V):
        # Counts of top-k's last round are only overwritten where top-p has kept what they say.
        if cut:
            kept = kept & (_key(x) >= tl.load(scratch + TOP_K_KEY))
        else:
            kept = kept & (_key(x) >= _after(scratch, ROUNDS - 1, top_k, NUM_CHUNKS, WIDTH))
    if cut:
        target = tl.load(scratch + TARGET)
        kept = kept & (_key(y) >= _after(scratch, 2 * ROUNDS - 1, target, NUM_CHUNKS, WIDTH))
    return tl.where(kept, (share * UNIT).to(tl.int64), 0)


@triton.jit
def adjust_kernel(
    logits_ptr, logits_stride, settings_ptr, seen_ptr, counts_ptr, adjusted_ptr, scratch_ptr, scratch_stride, V,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): penalties, and the chunk's best token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    x = tl.load(logits_ptr + row * logits_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    repetition = _setting(settings_ptr, row, 5).to(tl.float32)
    presence, frequency = _setting(settings_ptr, row, 6).to(tl.float32), _setting(settings_ptr, row, 7).to(tl.float32)
    if repetition != 1.0:
        seen = tl.load(seen_ptr + row * V + at, mask=inside, other=0) != 0
        x = tl.where(seen, tl.where(x < 0, x * repetition, tl.div_rn(x, tl.zeros_like(x) + repetition)), x)
    if (presence != 0.0) | (frequency != 0.0):
        counts = tl.load(counts_ptr + row * V + at, mask=inside, other=0)
        x = x - presence * (counts > 0).to(tl.float32) - frequency * counts.to(tl.float32)
    tl.store(adjusted_ptr + row * V + at, x, mask=inside)
    packed = (_key(x).to(tl.int64) << 32) | (at.to(tl.int64) ^ INDEX_MASK)
    best = tl.max(tl.where(inside, packed, -9223372036854775807), 0)
    tl.store(scratch_ptr + row * scratch_stride + STATE + chunk, best)


@triton.jit(do_not_specialize=["launch"])
def narrow_kernel(
    settings_ptr, adjusted_ptr, scratch_ptr, scratch_stride, V, launch,
    BY_MASS: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): tokens (top-k) or their probabilities (top-p) at or above 16 candidate keys.

    Round 0 tries the highest 4 bits; each round starts from what the one before it counted.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p = _setting(settings_ptr, row, 2).to(tl.int64), _setting(settings_ptr, row, 3)
    limited = (top_k > 0) & (top_k < V)
    if (_setting(settings_ptr, row, 1) == 0.0) | (top_p >= 1.0 if BY_MASS else limited == 0):
        return
    scratch = scratch_ptr + row * scratch_stride
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(adjusted_ptr + row * V + at, mask=at < V, other=float("-inf"))
    round = launch % ROUNDS
    target = top_k
    if BY_MASS:
        floor = tl.load(scratch + TOP_K_KEY, mask=round > 0, other=LOWEST)
        target = tl.load(scratch + TARGET, mask=round > 1, other=0)
        if (round == 0) & limited:
            floor = _after(scratch, launch - 1, top_k, NUM_CHUNKS, WIDTH)
        if round == 1:
            # Candidate 0 of round 0 is below every key: it counted all there is. Rounded up.
            total = tl.sum(tl.where(tl.arange(0, DIGITS) == 0, _counts(scratch, launch - 1, NUM_CHUNKS, WIDTH), 0), 0)
            share = total.to(tl.float64) * top_p
            target = share.to(tl.int64)
            target += (target.to(tl.float64) < share).to(tl.int64)
            target = tl.maximum(target, 1)  # top_p 0 keeps the likeliest token
        if chunk == 0:
            tl.store(scratch + TOP_K_KEY, floor, mask=round == 0)
            tl.store(scratch + TARGET, target, mask=round == 1)
        y = _tempered(settings_ptr, row, x, scratch, NUM_CHUNKS, WIDTH)
        key = _key(y)
        worth = tl.where((at < V) & (_key(x) >= floor), (tl.exp(y) * UNIT).to(tl.int64), 0)
    else:
        key = _key(x)
        worth = (at < V).to(tl.int64)
    low = tl.full([], LOWEST, tl.int64)
    if round > 0:
        low = _after(scratch, launch - 1, target, NUM_CHUNKS, WIDTH)
    if chunk == 0:
        tl.store(scratch + launch, low)
    counts = scratch + STATE + 2 * NUM_CHUNKS + ((launch % 2) * NUM_CHUNKS + chunk) * DIGITS
    step = tl.full([], 1, tl.int64) << (28 - 4 * round)
    for digit in tl.static_range(DIGITS):
        candidate = (low + digit * step).to(tl.int32)
        tl.store(counts + digit, tl.sum(tl.where(key >= candidate, worth, 0), 0))


@triton.jit
def weigh_kernel(
    settings_ptr, adjusted_ptr, scratch_ptr, scratch_stride, V,
    CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the probability of the chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _setting(settings_ptr, row, 1) == 0.0:
        return
    scratch = scratch_ptr + row * scratch_stride
    weights = _weights(settings_ptr, row, adjusted_ptr, chunk, scratch, V, CHUNK, NUM_CHUNKS, WIDTH)
    tl.store(scratch + STATE + NUM_CHUNKS + chunk, tl.sum(weights, 0))


@triton.jit
def pick_kernel(
    settings_ptr, seen_ptr, counts_ptr, adjusted_ptr, scratch_ptr, scratch_stride, out_ptr, V,
    CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program row: the first token whose cumulative probability, in the order of ids, is above the random number."""
    row = tl.program_id(0).to(tl.int64)
    scratch = scratch_ptr + row * scratch_stride
    _top, token = _best(scratch, NUM_CHUNKS, WIDTH)
    if _setting(settings_ptr, row, 1) != 0.0:
        chunks = tl.arange(0, WIDTH)
        masses = tl.load(scratch + STATE + NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=0)
        total = tl.sum(masses, 0)
        wanted = (_setting(settings_ptr, row, 0) * total.to(tl.float64)).to(tl.int64)
        wanted = tl.minimum(wanted, total - 1)
        chunk = tl.sum((tl.cumsum(masses, 0) <= wanted).to(tl.int32), 0)
        wanted -= tl.sum(tl.where(chunks < chunk, masses, 0), 0)
        weights = _weights(settings_ptr, row, adjusted_ptr, chunk, scratch, V, CHUNK, NUM_CHUNKS, WIDTH)
        token = (chunk * CHUNK + tl.sum((tl.cumsum(weights, 0) <= wanted).to(tl.int32), 0)).to(tl.int64)
    tl.store(out_ptr + row, token)
    tl.store(seen_ptr + row * V + token, 1)
    tl.store(counts_ptr + row * V + token, tl.load(counts_ptr + row * V + token) + 1)


def scratch_width(vocab_size: int) -> int:
    """Columns of the int64 workspace `scratch`."""
    return int(STATE.value) + PER_CHUNK * triton.cdiv(vocab_size, launch_params("sample", capability())["CHUNK"])


def launch_sample(
    logits: Tensor, settings: Tensor, seen: Tensor, counts: Tensor, adjusted: Tensor, scratch: Tensor, out: Tensor
) -> None:
    """out int64 [B] from logits [B, V] of any float dtype, counted into seen bool and counts int32, [B, V].

    `settings` float64 [B, 8], see `SETTINGS`. Workspaces: adjusted float32 [B, V], scratch int64 [B,
    `scratch_width(V)`]. A logit bias or hook is the caller's, before this. Raises ValueError for other shapes.
    """
    rows, vocab_size = logits.shape
    _check(logits, settings, seen, counts, adjusted, scratch, out)
    if not rows:
        return
    params = launch_params("sample", capability())
    chunks = triton.cdiv(vocab_size, params["CHUNK"])
    # Fused multiply-adds would round the penalties in another way than the CPU does.
    common = {**params, "enable_fp_fusion": False}
    split = {**common, "NUM_CHUNKS": chunks, "WIDTH": triton.next_power_of_2(chunks)}
    flags, stride, grid = seen.view(torch.uint8), scratch.stride(0), (rows, chunks)
    adjust_kernel[grid](
        logits, logits.stride(0), settings, flags, counts, adjusted, scratch, stride, vocab_size, **common
    )
    for launch in range(2 * ROUNDS.value):
        narrow_kernel[grid](
            settings, adjusted, scratch, stride, vocab_size, launch, BY_MASS=launch >= ROUNDS.value, **split
        )
    weigh_kernel[grid](settings, adjusted, scratch, stride, vocab_size, **split)
    pick_kernel[(rows,)](settings, flags, counts, adjusted, scratch, stride, out, vocab_size, **split)


def _check(
    logits: Tensor, settings: Tensor, seen: Tensor, counts: Tensor, adjusted: Tensor, scratch: Tensor, out: Tensor
) -> None:
    rows, vocab_size = logits.shape
    wanted = (
        ("settings", settings, torch.float64, (rows, len(SETTINGS))),
        ("seen", seen, torch.bool, (rows, vocab_size)),
        ("counts", counts, torch.int32, (rows, vocab_size)),
        ("adjusted", adjusted, torch.float32, (rows, vocab_size)),
        ("scratch", scratch, torch.int64, (rows, scratch_width(vocab_size))),
        ("out", out, torch.int64, (rows,)),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}."
            )
    if logits.stride(1) != 1:
        raise ValueError("A row of logits must be contiguous.")


sample = register(
    "sample",
    "(Tensor logits, Tensor settings, Tensor(a!) seen, Tensor(b!) counts, Tensor(c!) adjusted, Tensor(d!) scratch,"
    " Tensor(e!) out) -> ()",
    launch_sample,
    sample_reference,
)
