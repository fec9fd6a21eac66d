"""How large everything is, what is run, and what several parts do alike."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.local import LocalEngine
from engine.protocol import Failed, GenerateRequest, TurnStats
from engine.sampling.beam import BeamParams
from engine.sampling.params import SamplingParams

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Setting:
    """Counts are tokens. `text` is what prompts are cut from, `lengths` those of the sessions of mixed length."""

    model: Path
    text: str
    quality_tokens: int = 512
    lengths: Sequence[int] = (90, 140, 210, 260, 330, 420, 480, 560, 610, 700, 790, 900)
    prefix_tokens: int = 1000
    session_tokens: int = 4000
    decode_contexts: Sequence[int] = (128, 256, 512, 1024, 2048)
    beams: int = 4
    beam_tokens: int = 48
    window_tokens: int = 10_000
    window: int = 1024
    sinks: int = 4
    window_turn: int = 1000
    rounds: int = 3


@contextmanager
def running(setting: Setting, folder: Path, **options: Any) -> Iterator[LocalEngine]:
    """An engine on the benchmark's model, its data in `folder`; stopped, and its snapshots written, at the end."""
    engine = LocalEngine(EngineConfig(data_dir=folder, model=str(setting.model), speculation="off", **options))
    engine.start()
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.close()


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvscope-benchmark-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def text_ids(engine: LocalEngine, text: str, count: int, skip: int = 0) -> tuple[int, ...]:
    """`count` ids of the text, repeated where it is too short; `skip` ids in, so that prompts begin differently."""
    ids = list(engine.tokenizer.encode(text))
    ids *= -(-(count + skip) // len(ids))
    return tuple(ids[skip : skip + count])


def turn(
    engine: LocalEngine,
    prompt_ids: Sequence[int],
    session_id: str | None = None,
    *,
    new_tokens: int = 1,
    beams: int = 1,
) -> TurnStats:
    """One greedy reply of exactly `new_tokens`."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    request = GenerateRequest(tuple(prompt_ids), params, session_id, beams=BeamParams(num_beams=beams))
    last = list(engine.generate(request))[-1]
    if isinstance(last, Failed):
        raise SystemExit(f"the engine failed: {last.error}")
    stats = last.stats  # type: ignore[union-attr]
    assert stats is not None
    return stats


def first_token_ms(stats: TurnStats) -> float:
    assert stats.ttft_ms is not None
    return stats.ttft_ms
