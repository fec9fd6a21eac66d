"""Launch parameters by kernel and compute capability: a table, because nothing is tuned while the app runs.

Values follow from registers and shared memory of the compiled code (two resident programs per multiprocessor, no
spills) and from 128-bit loads; `STAGES` above 1 needs cp.async, which sm_75 does not have. Rows that were measured on a
card (`python -m benchmarks.tune`) lie in `tuned.json`, {kernel: {capability: values}}, and go before these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import triton

CAPABILITIES = (75, 80, 86, 89, 90, 120)

TUNED = Path(__file__).with_name("tuned.json")
_TABLE: dict[tuple[str, int], dict[str, int]] = {}


def _add(kernel: str, capabilities: tuple[int, ...], **values: int) -> None:
    _TABLE.update({(kernel, capability): values for capability in capabilities})


def launch_params(kernel: str, capability: int) -> dict[str, int]:
    """The values of `kernel` for the newest capability of the table that is not newer than `capability`.

    KeyError if the kernel has none. Cards older than the table get the oldest row.
    """
    known = [row for name, row in _TABLE if name == kernel and row <= capability]
    return dict(_TABLE[kernel, max(known, default=CAPABILITIES[0])])


def kernels() -> list[str]:
    """All names in the table."""
    return sorted({kernel for kernel, _ in _TABLE})


@contextmanager
def trying(kernel: str, capability: int, values: Mapping[str, int]) -> Iterator[None]:
    """Inside, `kernel` is launched with `values` on cards of `capability`, which must not be older than the table."""
    key = kernel, capability
    before = _TABLE.get(key)
    _TABLE[key] = dict(values)
    try:
        yield
    finally:
        del _TABLE[key]
        if before is not None:
            _TABLE[key] = before


def read_tuned(path: Path) -> dict[tuple[str, int], dict[str, int]]:
    """The measured rows; none where there is no such file."""
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {(kernel, int(card)): values for kernel, cards in rows.items() for card, values in cards.items()}


def capability() -> int:
    """Of the current device, e.g. 89; 80 where kernels are interpreted."""
    if triton.knobs.runtime.interpret:
        return 80
    target = triton.runtime.driver.active.get_current_target()
    return int(target.arch)


_add("store_kv", CAPABILITIES, HEADS=4, num_warps=1)

# BLOCK_K counts units of kernels.planes, columns for plain weights; "_rows" is for two to eight rows of x.
_add("dequant_gemv_plain", CAPABILITIES, BLOCK_N=4, BLOCK_K=1024, num_warps=4)
_add("dequant_gemv_plain_rows", CAPABILITIES, BLOCK_N=2, BLOCK_K=1024, num_warps=4)
_add("dequant_gemv_8bit", CAPABILITIES, BLOCK_N=4, BLOCK_K=128, num_warps=4)
_add("dequant_gemv_8bit_rows", CAPABILITIES, BLOCK_N=2, BLOCK_K=128, num_warps=4)
_add("dequant_gemv_4bit", CAPABILITIES, BLOCK_N=4, BLOCK_K=128, num_warps=4)
_add("dequant_gemv_4bit_rows", CAPABILITIES, BLOCK_N=2, BLOCK_K=128, num_warps=4)
_add("dequant_gemv_2bit", CAPABILITIES, BLOCK_N=2, BLOCK_K=64, num_warps=2)
_add("dequant_gemv_2bit_rows", CAPABILITIES, BLOCK_N=2, BLOCK_K=64, num_warps=2)

_add("swiglu", CAPABILITIES, BLOCK=2048, num_warps=4)
_add("rms_norm", CAPABILITIES, elements_per_thread=16, max_warps=16)


def attention_params(kernel: str, head_dim: int, variant: str, capability: int) -> dict[str, int]:
    """`launch_params` of an attention kernel for heads of up to 64, 128 or 256 channels.

    Variants, which may have rows of their own: "" where tiles are what the cache holds, "coded" where they are
    dequantised, "rotated" where keys are turned when read, "hinted" and "coded_hinted" where loads carry an L2 policy.
    ValueError for larger heads.
    """
    size = next((size for size in (64, 128, 256) if head_dim <= size), None)
    if size is None:
        raise ValueError(f"attention kernels take heads of at most 256 channels, not {head_dim}")
    name = f"{kernel}_{size}"
    own = f"{name}_{variant}"
    return launch_params(own if (own, CAPABILITIES[0]) in _TABLE else name, capability)


# Without tl.dot the products of ROWS x BLOCK_N x head size lie in registers: at most 64 per thread.
_DOT = {"USE_DOT": 1, "MIN_ROWS": 16, "MAX_ROWS": 64, "num_warps": 4}
_NO_DOT = {"USE_DOT": 0, "MIN_ROWS": 1, "MAX_ROWS": 4, "num_warps": 4, "STAGES": 1}
_add("paged_decode_64", (75,), BLOCK_N=32, **_NO_DOT)
_add("paged_decode_128", (75,), BLOCK_N=16, **_NO_DOT)
_add("paged_decode_256", (75,), BLOCK_N=8, **_NO_DOT)
_add("paged_decode_64", CAPABILITIES[1:], BLOCK_N=64, STAGES=3, **_DOT)
_add("paged_decode_128", CAPABILITIES[1:], BLOCK_N=32, STAGES=3, **_DOT)
_add("paged_decode_256", CAPABILITIES[1:], BLOCK_N=32, STAGES=2, **_DOT)
# Copies ahead (cp.async) carry no L2 policy: where one is asked for, tiles are loaded directly.
for _variant, _size in (("hinted", 64), ("coded_hinted", 32)):
    _add(f"paged_decode_64_{_variant}", (75,), BLOCK_N=32, **_NO_DOT)
    _add(f"paged_decode_128_{_variant}", (75,), BLOCK_N=16, **_NO_DOT)
    _add(f"paged_decode_256_{_variant}", (75,), BLOCK_N=8, **_NO_DOT)
    _add(f"paged_decode_64_{_variant}", CAPABILITIES[1:], BLOCK_N=64, STAGES=1, **_DOT)
    _add(f"paged_decode_128_{_variant}", CAPABILITIES[1:], BLOCK_N=_size, STAGES=1, **_DOT)
    _add(f"paged_decode_256_{_variant}", CAPABILITIES[1:], BLOCK_N=32, STAGES=1, **_DOT)
# Tokens at the end of a context that are asked to stay in L2, since the next step reads them again, while older ones
# stream through; 0: no policy, and before 8.0 there is none. About half of the L2 of a large card of its kind (40, 6,
# 72, 50 and 96 MB) at 128 KB a token, as 16 bits take in all layers of an 8B model.
_add("paged_decode_newest", (75,), TOKENS=0)
for _card, _tokens in ((80, 160), (86, 32), (89, 288), (90, 192), (120, 384)):
    _add("paged_decode_newest", (_card,), TOKENS=_tokens)
_add("paged_decode_64_rotated", (75,), BLOCK_N=16, **_NO_DOT)
_add("paged_decode_128_rotated", (75,), BLOCK_N=8, **_NO_DOT)
_add("paged_decode_256_rotated", (75,), BLOCK_N=4, **_NO_DOT)
_add("paged_decode_64_rotated", CAPABILITIES[1:], BLOCK_N=32, STAGES=3, **_DOT)
_add("paged_decode_128_rotated", CAPABILITIES[1:], BLOCK_N=32, STAGES=3, **_DOT)
_add("paged_decode_256_rotated", CAPABILITIES[1:], BLOCK_N=16, STAGES=2, **_DOT)
_add("paged_decode_reduce", CAPABILITIES, num_warps=2)
# Prefill is bound by arithmetic: fewer rows, or no copies ahead, where dequantising and turning keys take registers.
_add("paged_prefill_64", CAPABILITIES[1:], BLOCK_M=64, BLOCK_N=64, STAGES=2, num_warps=4)
_add("paged_prefill_64_coded", CAPABILITIES[1:], BLOCK_M=64, BLOCK_N=32, STAGES=1, num_warps=4)
_add("paged_prefill_64_rotated", CAPABILITIES[1:], BLOCK_M=32, BLOCK_N=32, STAGES=1, num_warps=4)
_add("paged_prefill_128", CAPABILITIES[1:], BLOCK_M=64, BLOCK_N=32, STAGES=2, num_warps=4)
_add("paged_prefill_128_coded", CAPABILITIES[1:], BLOCK_M=64, BLOCK_N=32, STAGES=1, num_warps=4)
_add("paged_prefill_128_rotated", CAPABILITIES[1:], BLOCK_M=32, BLOCK_N=32, STAGES=1, num_warps=4)
_add("paged_prefill_256", CAPABILITIES[1:], BLOCK_M=32, BLOCK_N=32, STAGES=1, num_warps=8)
_add("paged_prefill_256_coded", CAPABILITIES[1:], BLOCK_M=32, BLOCK_N=16, STAGES=1, num_warps=4)
_add("paged_prefill_256_rotated", CAPABILITIES[1:], BLOCK_M=32, BLOCK_N=32, STAGES=1, num_warps=8)
# There tl.dot becomes multiply-adds of whole tiles in registers.
_add("paged_prefill_64", (75,), BLOCK_M=32, BLOCK_N=16, STAGES=1, num_warps=4)
_add("paged_prefill_64_coded", (75,), BLOCK_M=16, BLOCK_N=16, STAGES=1, num_warps=4)
_add("paged_prefill_64_rotated", (75,), BLOCK_M=16, BLOCK_N=16, STAGES=1, num_warps=4)
_add("paged_prefill_128", (75,), BLOCK_M=32, BLOCK_N=16, STAGES=1, num_warps=4)
_add("paged_prefill_128_coded", (75,), BLOCK_M=16, BLOCK_N=16, STAGES=1, num_warps=4)
_add("paged_prefill_128_rotated", (75,), BLOCK_M=16, BLOCK_N=16, STAGES=1, num_warps=4)
_add("paged_prefill_256", (75,), BLOCK_M=16, BLOCK_N=16, STAGES=1, num_warps=8)
_add("paged_prefill_256_coded", (75,), BLOCK_M=16, BLOCK_N=16, STAGES=1, num_warps=8)
_add("paged_prefill_256_rotated", (75,), BLOCK_M=16, BLOCK_N=16, STAGES=1, num_warps=8)
_add("copy_blocks", CAPABILITIES, BLOCK=4096, num_warps=4)

_add("dequant_rows", CAPABILITIES, BLOCK_M=4, BLOCK_K=32, num_warps=4)
_add("dequant_gemm_8bit", CAPABILITIES[1:], BLOCK_M=128, BLOCK_N=64, BLOCK_K=8, STAGES=2, num_warps=8)
_add("dequant_gemm_4bit", CAPABILITIES[1:], BLOCK_M=128, BLOCK_N=64, BLOCK_K=4, STAGES=2, num_warps=8)
_add("dequant_gemm_2bit", CAPABILITIES[1:], BLOCK_M=64, BLOCK_N=64, BLOCK_K=4, STAGES=2, num_warps=4)
_add("sample", CAPABILITIES, CHUNK=4096, num_warps=8)
_add("ssm_step", CAPABILITIES, BLOCK_P=16, num_warps=4)
_add("ssm_chunk", CAPABILITIES, BLOCK_P=16, num_warps=4)
_add("causal_conv", CAPABILITIES, BLOCK_T=8, BLOCK_C=128, num_warps=4)

_TABLE.update(read_tuned(TUNED))
