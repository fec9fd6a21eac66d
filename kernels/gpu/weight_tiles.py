"""Device functions that decode the planes of `kernels.planes`, shared by the kernels that read quantised weights.

A code becomes a float without an int-to-float conversion, which runs at a quarter of the rate of other instructions:
its bits at bit `p` of the mantissa of 2^23 make the float 2^23 + code * 2^p, and one fused multiply-add by 2^-p takes
2^23 and the code's offset away. Every step is exact. Kernels make the bits of 2^23
with `float_base`: as a literal they would cost every code one instruction more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.planes import FORMATS


@triton.constexpr_function
def field(kind, name):
    """A field of `planes.BlockFormat` for a constexpr kind."""
    return getattr(FORMATS[kind], name)


@triton.constexpr_function
def groups(kind):
    """Scales of a unit that differ."""
    return max(FORMATS[kind].unit // FORMATS[kind].group, 1)


@triton.jit
def float_base(index):
    """The bits of the float32 2^23 in the shape of `index`, int32 below 2^30, which only hides that it is a constant.

    An instruction takes one literal, so with the mask of a code as a literal its base must lie in a register.
    """
    return (index >> 30) | 0x4B000000


@triton.jit
def mantissa_float(bits, POSITION: tl.constexpr, OFFSET: tl.constexpr):
    """int32 code * 2^POSITION below 2^23 over the bits of 2^23 -> float32 code - OFFSET."""
    BASE: tl.constexpr = 2.0 ** (23 - POSITION) + OFFSET
    return tl.fma(bits.to(tl.float32, bitcast=True), 2.0 ** (0 - POSITION), 0.0 - BASE)


@triton.jit
def load_unit(codes_ptr, high_ptr, at, mask, KIND: tl.constexpr, POLICY: tl.constexpr):
    """The int32 words of `codes` and, where the kind has them, of `high` at the words `at`."""
    codes = tl.load(codes_ptr + at, mask=mask, other=0, eviction_policy=POLICY)
    high = codes
    if field(KIND, "high_bits") > 0:
        high = tl.load(high_ptr + at, mask=mask, other=0, eviction_policy=POLICY).to(tl.int32)
    return codes, high


@triton.jit
def slot_code(codes, high, base, SLOT: tl.constexpr, KIND: tl.constexpr):
    """float32 code - offset of one slot of each int32 word of `codes`, with `high` the words above them as int32."""
    BITS: tl.constexpr = field(KIND, "bits")
    HIGH_BITS: tl.constexpr = field(KIND, "high_bits")
    HALF: tl.constexpr = SLOT // (16 // BITS)
    J: tl.constexpr = SLOT % (16 // BITS)
    POSITION: tl.constexpr = BITS * J
    # xor, since compilers reorder a chain of ors so that it takes an instruction more
    bits = ((codes >> (16 * HALF)) & (((1 << BITS) - 1) << POSITION)) ^ base
    if HIGH_BITS > 0:
        # planes.high_position: the fields of a class lie as far apart as the codes and share this shift.
        RUN: tl.constexpr = 32 // BITS * HIGH_BITS // BITS
        CLASS: tl.constexpr = HALF * (16 // BITS // RUN) + J // RUN
        SHIFT: tl.constexpr = BITS * (J - J % RUN) + BITS - HIGH_BITS * CLASS
        bits = bits | ((high << SHIFT) & (((1 << HIGH_BITS) - 1) << (POSITION + BITS)))
    return mantissa_float(bits, POSITION, field(KIND, "offset"))


@triton.jit
def load_scales(scales_ptr, sub_ptr, sub_high_ptr, row, unit, units, mask, KIND: tl.constexpr):
    """The words that hold the scales of unit `unit` of row `row`: scales, sub, sub_high; int64 row, int32 unit."""
    UNIT: tl.constexpr = field(KIND, "unit")
    SUB_BITS: tl.constexpr = field(KIND, "sub_bits")
    SHARED: tl.constexpr = (256 if SUB_BITS > 0 else 32) // UNIT
    scales = tl.load(scales_ptr + row * (units // SHARED) + unit // SHARED, mask=mask, other=0)
    sub = scales
    sub_high = scales
    if SUB_BITS > 0:
        sub = tl.load(sub_ptr + row * units + unit, mask=mask, other=0).to(tl.int32)
    if SUB_BITS == 6:
        if field(KIND, "has_min"):
            pair = tl.load(sub_high_ptr + row * (units // 2) + unit // 2, mask=mask, other=0).to(tl.int32)
            sub_high = (pair >> (4 * (unit % 2))) & 15
        else:
            sub_high = tl.load(sub_high_ptr + row * units + unit, mask=mask, other=0).to(tl.int32)
    return scales, sub, sub_high


@triton.jit
def group_scale(scales, sub, sub_high, base, INDEX: tl.constexpr, KIND: tl.constexpr):
    """float32 scale and minimum of a unit's group INDEX; the minimum is the scale where the kind has none."""
    SUB_BITS: tl.constexpr = field(KIND, "sub_bits")
    HAS_MIN: tl.constexpr = field(KIND, "has_min")
    if HAS_MIN:
        scale = (scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (scales >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = scales.to(tl.float32)
        minimum = scale
    if SUB_BITS == 8:
        scale = scale * mantissa_float((((sub >> (8 * INDEX)) & 255) ^ 128) | base, 0, 128)
    elif SUB_BITS == 4:
        scale = scale * mantissa_float(((sub >> (8 * INDEX)) & 15) | base, 0, 0)
        minimum = 0.0 - minimum * mantissa_float(((sub >> (8 * INDEX + 4)) & 15) | base, 0, 0)
    elif SUB_BITS == 6:
        if HAS_MIN:
            scale = scale * mantissa_float((sub & 63) | base, 0, 0)
            minimum = 0.0 - minimum * mantissa_float(((sub >> 6) | (sub_high << 2)) | base, 0, 0)
        else:
            low = (sub >> (4 * INDEX)) & 15
            scale = scale * mantissa_float((low | (((sub_high >> (2 * INDEX)) & 3) << 4)) | base, 0, 32)
    return scale, minimum
