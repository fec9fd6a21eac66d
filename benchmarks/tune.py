"""Times launch parameters of the kernels that take a step's time, on the present card, and keeps the fastest.

    python -m benchmarks.tune

They go into kernels/gpu/tuned.json under the card's compute capability, in front of the rows of
`kernels.gpu.tuning`, which stay where nothing is clearly faster. Takes about a quarter of an hour. Then run
tests/kernels: whether new rows spill registers, and what they compute, is checked there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks.common import median, print_json, print_table
from benchmarks.gpu.attention import kv_formats, make_problem
from benchmarks.gpu.random_model import random_blocks, weight_format
from benchmarks.gpu.timing import Run, Timer, captured
from benchmarks.roofline import Shape
from kernels.gpu import tuning
from kernels.gpu.dequant_gemm import dequant_gemm, needs_scratch
from kernels.gpu.dequant_gemv import dequant_gemv
from kernels.gpu.paged_decode import newest_tokens
from kernels.gpu.paged_prefill import paged_prefill
from kernels.kv_format import KV_FORMATS, fill_extent_table
from kernels.planes import PackedWeight, pack, plain

CLEARLY = 0.97
"""A candidate is taken if it needs at most this share of what the present values need."""
ROUNDS = 3
Values = dict[str, int]
Options = Mapping[str, Sequence[int]]

ATTENTION: Options = {"BLOCK_N": (16, 32, 64, 128), "STAGES": (1, 2, 3), "num_warps": (2, 4, 8)}
PREFILL: Options = {"BLOCK_M": (32, 64, 128), "BLOCK_N": (16, 32, 64), "STAGES": (1, 2), "num_warps": (4, 8)}
GEMV: Options = {"BLOCK_N": (2, 4, 8), "BLOCK_K": (64, 128, 256), "num_warps": (2, 4, 8)}
PLAIN_GEMV: Options = {"BLOCK_N": (2, 4, 8), "BLOCK_K": (512, 1024, 2048), "num_warps": (2, 4, 8)}
GEMM: Options = {"BLOCK_M": (64, 128), "BLOCK_N": (64, 128), "BLOCK_K": (4, 8), "STAGES": (2, 3), "num_warps": (4, 8)}
KINDS = {"8bit": ("Q8_0",), "4bit": ("Q4_0", "Q4_K", "Q6_K"), "2bit": ("Q2_K", "Q3_K"), "plain": ("plain",)}


HEADS = (
    Shape("heads of 64", 1, 2048, 0, 32, 8, 64, 0, 0),
    Shape("heads of 128", 1, 4096, 0, 32, 8, 128, 0, 0),
    Shape("heads of 256", 1, 2048, 0, 8, 4, 256, 0, 0),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of context and of a chunk of prefill, rows and columns of a matrix, rows of x in a decode step."""

    context: int = 32768
    chunk: int = 512
    matrix: tuple[int, int] = (14336, 4096)
    several: int = 4
    heads: tuple[Shape, ...] = HEADS


@dataclass(frozen=True, slots=True)
class Job:
    """A row of the table, what may stand in it, and launches that use it."""

    kernel: str
    options: Options
    run: Run


@dataclass(frozen=True, slots=True)
class Choice:
    kernel: str
    values: Values
    before_ms: float
    ms: float
    changed: bool


def jobs(device: torch.device, sizes: Sizes) -> Iterator[Job]:
    """One at a time: inputs of a job are gone before the next one's are made."""
    for shape in sizes.heads:
        yield from _attention(shape, device, sizes)
    if newest_tokens():
        # With a cold L2 they bring nothing, so this is what their loads cost.
        launches = _decodes(sizes.heads[-1], device, sizes)
        yield Job("paged_decode_newest", {"TOKENS": (0,)}, lambda: [launch() for launch in launches])
    for width, kinds in KINDS.items():
        yield from _products(width, kinds, device, sizes)


def _attention(shape: Shape, device: torch.device, sizes: Sizes) -> Iterator[Job]:
    dtype, launches = weight_format(device).compute_dtype, _decodes(shape, device, sizes)
    formats = kv_formats(device, dtype)
    decode = f"paged_decode_{shape.head_dim}"
    if newest_tokens():
        yield Job(f"{decode}_hinted", ATTENTION, launches[0])
        yield Job(f"{decode}_coded_hinted", ATTENTION, lambda: [launch() for launch in launches[1:]])
    with tuning.trying("paged_decode_newest", tuning.capability(), {"TOKENS": 0}):
        yield Job(decode, ATTENTION, lambda: [launch() for launch in launches])
    for variant, names in (("", formats[:1]), ("_coded", [name for name in formats if KV_FORMATS[name].bits < 16])):
        chunks = [_prefill(shape, name, device, dtype, sizes) for name in names]
        yield Job(f"paged_prefill_{shape.head_dim}{variant}", PREFILL, lambda chunks=chunks: [run() for run in chunks])


def _decodes(shape: Shape, device: torch.device, sizes: Sizes) -> list[Run]:
    """One for each format, that of 16 bits first."""
    dtype = weight_format(device).compute_dtype
    formats = kv_formats(device, dtype)
    return [make_problem(shape, name, sizes.context, device, dtype).kernel() for name in formats]


def _prefill(shape: Shape, kv_format: str, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Run:
    """A chunk at the end of four chunks of context."""
    chunk, context = sizes.chunk, 4 * sizes.chunk
    made = make_problem(shape, kv_format, context, device, dtype)
    q = torch.randn(chunk, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
    table = torch.zeros(1, 2, dtype=torch.int64, device=device)
    scales = [] if made.scales is None else [made.scales]
    fill_extent_table(table, [made.data], scales)
    starts, lens = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, chunk], [context]))
    where = (kv_format, 0, len(made.data), [made.data], scales, table)
    out = torch.empty_like(q)
    return lambda: paged_prefill(
        q, starts, made.block_table, lens, chunk, made.scale, 0, 0, 0.0, None, 1.0, *where, out
    )


def _products(width: str, kinds: Sequence[str], device: torch.device, sizes: Sizes) -> Iterator[Job]:
    dtype = weight_format(device).compute_dtype
    weights = [_weight(kind, sizes.matrix, device, dtype) for kind in kinds]
    rows, columns = sizes.matrix

    def gemv(count: int) -> Run:
        x, out = (torch.randn(count, n, device=device, dtype=dtype) for n in (columns, rows))
        return lambda: [dequant_gemv(x, list(w.planes), [w.kind], None, None, "", out) for w in weights]

    options = PLAIN_GEMV if width == "plain" else GEMV
    yield Job(f"dequant_gemv_{width}", options, gemv(1))
    yield Job(f"dequant_gemv_{width}_rows", options, gemv(sizes.several))
    if width != "plain" and not needs_scratch(kinds[:1], dtype):
        x, out = (torch.randn(sizes.chunk, n, device=device, dtype=dtype) for n in (columns, rows))
        yield Job(
            f"dequant_gemm_{width}",
            GEMM,
            lambda: [dequant_gemm(x, list(w.planes), [w.kind], None, None, None, out) for w in weights],
        )


def _weight(kind: str, size: tuple[int, int], device: torch.device, dtype: torch.dtype) -> PackedWeight:
    if kind == "plain":
        return plain(torch.randn(size, device=device, dtype=dtype))
    return pack(torch.from_numpy(random_blocks(kind, *size)).to(device), kind, size[1])


def candidates(kernel: str, options: Options, card: int) -> list[Values]:
    """The present values first; then all others, without copies ahead on cards that have none."""
    present = tuning.launch_params(kernel, card)
    if card < 80 and "STAGES" in options:
        options = {**options, "STAGES": (1,)}
    others = [present | dict(zip(options, values, strict=True)) for values in product(*options.values())]
    return [present, *(values for values in others if values != present)]


def timed(job: Job, values: Values, card: int, timer: Timer) -> float:
    """Milliseconds; infinite where the card has too few registers or too little shared memory."""
    with tuning.trying(job.kernel, card, values):
        try:
            return median(timer.cold({"run": captured(timer.device, job.run)})["run"])
        except Exception:  # the compiler and the driver have errors of their own
            return float("inf")


def choose(job: Job, card: int, timer: Timer) -> Choice:
    """The fastest, timed again beside the present values before it takes their place."""
    present, *others = candidates(job.kernel, job.options, card)
    best = min((timed(job, values, card, timer), index) for index, values in enumerate(others))[1]
    before, after = timed(job, present, card, timer), timed(job, others[best], card, timer)
    if after <= CLEARLY * before:
        return Choice(job.kernel, others[best], before, after, True)
    return Choice(job.kernel, present, before, before, False)


def write(choices: Sequence[Choice], card: int, path: Path) -> None:
    """Put what changed into the file; rows of other cards and kernels stay."""
    rows = json.loads(path.read_text()) if path.exists() else {}
    for choice in choices:
        if choice.changed:
            rows.setdefault(choice.kernel, {})[str(card)] = choice.values
    path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=tuning.TUNED, help="the table (default: the kernels' own)")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("Tuning needs a CUDA card and its driver, and none is available.", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    card, timer, found = tuning.capability(), Timer(device, ROUNDS), []
    for job in jobs(device, Sizes()):
        if arguments.only in job.kernel:
            found.append(choose(job, card, timer))
            print(f"{job.kernel}: {found[-1].before_ms:.4f} ms, now {found[-1].ms:.4f} ms", flush=True)
            write(found, card, arguments.output)
    print_table(
        ("kernel", "before, ms", "now, ms", "values"),
        [(c.kernel, f"{c.before_ms:.4f}", f"{c.ms:.4f}", c.values if c.changed else "as they were") for c in found],
    )
    print_json("tune", {"capability": card, "kernels": {c.kernel: {"ms": c.ms, **c.values} for c in found}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
