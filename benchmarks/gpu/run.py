"""The parts in turn, and what they found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import median, spread
from benchmarks.gpu import attention, report, steps
from benchmarks.gpu.random_model import SHAPES, TINY, weight_format
from benchmarks.gpu.setting import SPARE, TINY_SETTING, Setting
from benchmarks.gpu.timing import Budget, Timer, copy_bandwidth, free_bytes
from benchmarks.roofline import Shape
from engine.memory.plan import human_bytes
from kernels.gpu import self_test, tuning

COPY_BYTES = 2**30
ATTENTION_SHARE = 0.4
"""Of the time; steps take what is left."""
TINY_CONTEXTS = (40,)
TILE = {"BLOCK_N": 512, "BLOCK_K": 8}


@contextmanager
def large_tiles() -> Iterator[None]:
    """Interpreted programs take their time each, not by what they hold: so let them be few."""
    card = tuning.capability()
    with ExitStack() as stack:
        for kernel in tuning.kernels():
            if kernel.startswith("dequant_ge"):
                values = tuning.launch_params(kernel, card) | TILE | ({"BLOCK_K": 256} if "plain" in kernel else {})
                stack.enter_context(tuning.trying(kernel, card, values))
        yield


def shapes_that_fit(budget: Budget, device: torch.device, setting: Setting) -> tuple[Shape, ...]:
    """Of `SHAPES`, those that the free memory holds in at least one weight format."""
    free, found = free_bytes(device), []
    for shape in SHAPES:
        smallest = min(steps.memory_plan(shape, w, "fp16", setting.max_seq_len, 0).needed for w in setting.weights)
        if smallest + SPARE <= free:
            found.append(shape)
        else:
            budget.skip(shape.name, f"needs {human_bytes(smallest)} or more, {human_bytes(free)} are free")
    return tuple(found)


def run(device: torch.device, tiny: bool, minutes: float, rounds: int, results: Path | None) -> None:
    """All parts, printed; the result is kept in `results`, by default where those of this project lie."""
    if device.type == "cpu":
        with large_tiles():
            result = measure(device, tiny, minutes, rounds)
    else:
        result = measure(device, tiny, minutes, rounds)
    report.finish(result, results if results is not None or tiny else report.RESULTS)


def measure(device: torch.device, tiny: bool, minutes: float, rounds: int) -> dict[str, Any]:
    budget, timer, dtype = Budget(60 * minutes), Timer(device, rounds), weight_format(device).compute_dtype
    setting = TINY_SETTING if tiny else Setting()
    shapes = (TINY,) if tiny else shapes_that_fit(budget, device, setting)
    wrong = () if device.type == "cpu" else self_test.check(device, dtype, None)
    if wrong:
        raise SystemExit(
            f"These kernels give wrong results on this card, so there is nothing to time: {', '.join(wrong)}."
        )
    copies = copy_bandwidth(timer, 2**20 if tiny else min(COPY_BYTES, free_bytes(device) // 4))
    copy = median(copies)
    found = report.card(device)
    print(
        f"{found['name']}: copies {copy / 1e9:.1f} GB/s (spread {spread([rate / 1e9 for rate in copies])})", flush=True
    )
    contexts = TINY_CONTEXTS if tiny else attention.CONTEXTS
    attended = list(attention.rows(shapes, contexts, dtype, copy, timer, budget.part(ATTENTION_SHARE)))
    report.print_attention(attended)
    stepped = list(steps.rows(shapes, setting, copy, timer, budget))
    report.print_steps(stepped)
    return {
        "card": found,
        "dtype": str(dtype).removeprefix("torch."),
        "copy_bytes_per_s": copy,
        "attention": attended,
        "steps": stepped,
        "skipped": budget.skipped,
    }
