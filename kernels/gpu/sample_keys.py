"""The thresholds of top-k and top-p for `kernels.gpu.sample`, and what its kernels share.

Both are found as 8 rounds that fix 4 bits of an order-preserving integer key, each round one launch over all chunks of
a row, so that no program waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.reference.sampling import SETTINGS

UNIT = tl.constexpr(1099511627776.0)  # 2**40
LOWEST = tl.constexpr(-2147483648)
NOT_FINITE_KEY = tl.constexpr(2147483647)  # above the key of any number
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
def order_key(x):
    """float32 -> int32 in the same order; -0 and 0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def setting(settings_ptr, row, FIELD: tl.constexpr):
    """Column FIELD of `SETTINGS`, float64."""
    return tl.load(settings_ptr + row * FIELDS + FIELD)


@triton.jit
def best_token(scratch, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """(key, id) of the row's largest logit, the lowest id on ties; the pair is one integer per chunk."""
    chunk = tl.arange(0, WIDTH)
    packed = tl.max(tl.load(scratch + STATE + chunk, mask=chunk < NUM_CHUNKS, other=-9223372036854775807), 0)
    return (packed >> 32).to(tl.int32), (packed & INDEX_MASK) ^ INDEX_MASK


@triton.jit
def round_counts(scratch, launch, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """int64 [DIGITS]: what an earlier round counted, over all chunks."""
    chunk, digit = tl.arange(0, WIDTH)[:, None], tl.arange(0, DIGITS)[None, :]
    buffer = scratch + STATE + 2 * NUM_CHUNKS + (launch % 2) * (NUM_CHUNKS * DIGITS)
    return tl.sum(tl.load(buffer + chunk * DIGITS + digit, mask=chunk < NUM_CHUNKS, other=0), 0)


@triton.jit
def lowest_key(scratch, launch, target, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """The lowest key left once round `launch` has counted: the largest candidate that still reaches the target."""
    reached = (round_counts(scratch, launch, NUM_CHUNKS, WIDTH) >= target) & (tl.arange(0, DIGITS) > 0)
    digit = tl.sum(reached.to(tl.int32), 0).to(tl.int64)
    return tl.load(scratch + launch) + (digit << (28 - 4 * (launch % ROUNDS)))


@triton.jit
def tempered(settings_ptr, row, x, scratch, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """Logits once the largest is 0 and the temperature divides them; -inf where that is no number."""
    key, _index = best_token(scratch, NUM_CHUNKS, WIDTH)
    top = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    temperature = tl.maximum(setting(settings_ptr, row, 1).to(tl.float32), LOWEST_TEMPERATURE)
    y = tl.div_rn(x - top, tl.zeros_like(x) + temperature)
    return tl.where(y == y, y, float("-inf"))


@triton.jit(do_not_specialize=["launch"])
def narrow_kernel(
    settings_ptr, logits_ptr, scratch_ptr, scratch_stride, V, launch,
    BY_MASS: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): tokens (top-k) or their probabilities (top-p) at or above 16 candidate keys.

    Round 0 tries the highest 4 bits; each round starts from what the one before it counted.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p = setting(settings_ptr, row, 2).to(tl.int64), setting(settings_ptr, row, 3)
    limited = (top_k > 0) & (top_k < V)
    if (setting(settings_ptr, row, 1) == 0.0) | (top_p >= 1.0 if BY_MASS else limited == 0):
        return
    scratch = scratch_ptr + row * scratch_stride
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * V + at, mask=at < V, other=float("-inf"))
    round = launch % ROUNDS
    target = top_k
    if BY_MASS:
        floor = tl.load(scratch + TOP_K_KEY, mask=round > 0, other=LOWEST)
        target = tl.load(scratch + TARGET, mask=round > 1, other=0)
        if (round == 0) & limited:
            floor = lowest_key(scratch, launch - 1, top_k, NUM_CHUNKS, WIDTH)
        if round == 1:
            # Candidate 0 of round 0 is below every key: it counted all there is. Rounded up.
            masses = round_counts(scratch, launch - 1, NUM_CHUNKS, WIDTH)
            total = tl.sum(tl.where(tl.arange(0, DIGITS) == 0, masses, 0), 0)
            share = total.to(tl.float64) * top_p
            target = share.to(tl.int64)
            target += (target.to(tl.float64) < share).to(tl.int64)
            target = tl.maximum(target, 1)  # top_p 0 keeps the likeliest token
        if chunk == 0:
            tl.store(scratch + TOP_K_KEY, floor, mask=round == 0)
            tl.store(scratch + TARGET, target, mask=round == 1)
        y = tempered(settings_ptr, row, x, scratch, NUM_CHUNKS, WIDTH)
        key = order_key(y)
        worth = tl.where((at < V) & (order_key(x) >= floor), (tl.exp(y) * UNIT).to(tl.int64), 0)
    else:
        key = order_key(x)
        worth = (at < V).to(tl.int64)
    low = tl.full([], LOWEST, tl.int64)
    if round > 0:
        low = lowest_key(scratch, launch - 1, target, NUM_CHUNKS, WIDTH)
    if chunk == 0:
        tl.store(scratch + launch, low)
    counts = scratch + STATE + 2 * NUM_CHUNKS + ((launch % 2) * NUM_CHUNKS + chunk) * DIGITS
    step = tl.full([], 1, tl.int64) << (28 - 4 * round)
    for digit in tl.static_range(DIGITS):
        candidate = (low + digit * step).to(tl.int32)
        tl.store(counts + digit, tl.sum(tl.where(key >= candidate, worth, 0), 0))
