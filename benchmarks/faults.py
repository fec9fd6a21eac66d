"""Does the audit find damage, and name it? Random faults in the caches of real sessions, and as many clean sessions.

Needs `requirements-dev.txt`. Two model families: the default model, and tiny random Qwen2 and Bamba (attention beside a
recurrence). Every case is a chat of its own: a prompt, a reply, for some an edit of the prompt and another reply. Then
one fault of a random kind, layer, place and amount is injected (`engine.debugging.inject`), and the audit is asked. It
is not told anything. A fault is detected if the verdict is "fault", its kind is right if the first fault found has it,
its place if that fault begins within one block of the damage.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from app import default_data_dir
from benchmarks.common import print_json, print_table, until
from engine.config import KV_FORMATS, EngineConfig
from engine.debugging.faults import KINDS
from engine.debugging.invariants import InvariantLights
from engine.debugging.protocol import FaultRequest
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.local import LocalEngine
from engine.protocol import Failed, GenerateRequest
from engine.sampling.params import SamplingParams
from engine.scheduler import ScheduledBatch, ScheduledItem
from engine.sequence import Sequence as CachedSequence
from engine.sequence import Status

FORMATS = tuple(name for name in KV_FORMATS if name != "auto")
DEFAULT, QWEN2, BAMBA = "default model", "qwen2", "bamba"
SHARES = {DEFAULT: 0.4, QWEN2: 0.4, BAMBA: 0.2}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
AMOUNTS = {"shift": (1, 2, 3, 7, -1, -5), "wrong_position": (1, 2, 5, 16, -1, -4), "scale": (0.5, 0.75, 1.5, 2.0, 4.0)}


@dataclass(frozen=True, slots=True)
class Case:
    """What was done to a session (None: nothing), and what the audit said of it."""

    family: str
    kv_format: str
    kind: str | None
    found: str | None
    place_right: bool
    sentence: str
    ms: float

    @property
    def right(self) -> bool:
        return self.found == self.kind and (self.kind is None or self.place_right)


@contextmanager
def engine_of(family: str, kv_format: str, data_dir: Path, model: str | None = None) -> Iterator[LocalEngine]:
    """An engine whose caches may be damaged. Tiny models are made here, and loaded as any model is. `model`: a file or
    name in place of the default model's."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            data_dir, model, kv_format=kv_format, snapshot_limit=0, kv_budget=256 * 2**20, fault_injection=True
        )
        if family == DEFAULT:
            engine = LocalEngine(config)
        else:
            from tests.support.engines import tiny_parts

            options = {"kind": family, "kv_format": kv_format, "block_size": 16, "fault_injection": True}
            engine = LocalEngine(*tiny_parts(**options, data_dir=Path(folder)))
        engine.start()
        engine.wait_ready()
        try:
            yield engine
        finally:
            engine.close()


def chat(engine: LocalEngine, session_id: str, dice: random.Random, longest: int) -> None:
    """One to three turns of random ids; in every other chat a later turn edits what an earlier one said."""
    vocabulary = int(engine.capabilities()["vocab_size"])
    history = tuple(dice.randrange(vocabulary) for _ in range(dice.randint(40, longest)))
    for number in range(dice.randint(1, 3)):
        if number and dice.random() < 0.5:
            start = dice.randrange(len(history) // 2)
            history = (*history[:start], *(dice.randrange(vocabulary) for _ in history[start:]))
        forced = tuple(dice.randrange(vocabulary) for _ in range(dice.randint(4, 12)))
        last = list(engine.generate(GenerateRequest(history, PARAMS, session_id, forced_ids=forced)))[-1]
        if isinstance(last, Failed):
            raise last.error
        history = (*history, *forced, *(dice.randrange(vocabulary) for _ in range(dice.randint(4, 20))))


def random_fault(engine: LocalEngine, session_id: str, kind: str, dice: random.Random) -> FaultRequest:
    count = int(engine.inspect(session_id)["cache_pos"])
    layer = dice.randrange(int(engine.capabilities()["num_layers"]))
    start = dice.randrange(count)
    length = min(dice.choice((1, 2, 5, 16, 30)), count - start)
    amount = dice.choice(AMOUNTS[kind]) if kind in AMOUNTS else None
    return FaultRequest(session_id, kind, dice.choice((layer, layer, layer, None)), start, length, amount)


def run_case(
    engine: LocalEngine, family: str, kv_format: str, kind: str | None, dice: random.Random, longest: int
) -> Case:
    session_id = str(uuid.UUID(int=dice.getrandbits(128), version=4))
    chat(engine, session_id, dice, longest)
    done = engine.inject(random_fault(engine, session_id, kind, dice)) if kind is not None else None
    told = engine.audit(session_id)
    engine.release(session_id)
    fault = told["faults"][0] if told["faults"] else None
    size = int(engine.capabilities()["block_size"])
    place_right = bool(done and fault and abs(fault["first_position"] - done["start"]) <= size)
    note = "" if done is None else f"{done['layers'][:3]} {done['start']}+{done['count']} by {done['amount']}: "
    return Case(family, kv_format, kind, fault and fault["kind"], place_right, note + told["sentence"], told["ms"])


def run_all(
    faults: int,
    clean: int,
    seed: int,
    data_dir: Path,
    families: dict[str, float],
    longest: int,
    model: str | None = None,
) -> Iterator[Case]:
    """All cases, spread over families and formats; kinds take turns, the rest is drawn."""
    groups = [(family, index, kv_format) for family in families for index, kv_format in enumerate(FORMATS)]
    shares = [families[family] / len(FORMATS) for family, _, _ in groups]
    damaged, sound = spread_over(faults, shares), spread_over(clean, shares)
    for (family, index, kv_format), with_fault, without in zip(groups, damaged, sound, strict=True):
        dice = random.Random(f"{seed} {family} {kv_format}")
        with engine_of(family, kv_format, data_dir, model) as engine:
            kinds: list[str | None] = [KINDS[(index + i) % len(KINDS)] for i in range(with_fault)]
            for kind in (*kinds, *[None] * without):
                yield run_case(engine, family, kv_format, kind, dice, longest)
            engine.check_integrity()


def spread_over(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in these shares (their sum is 1) that add up to `total`."""
    ends = [round(total * end) for end in accumulate(shares)]
    return [end - start for start, end in pairwise((0, *ends))]


def run_and_show(cases: Iterator[Case], planned: int) -> list[Case]:
    """Run them; each wrong verdict is told at once, and after each format how many were wrong so far."""
    done: list[Case] = []
    for case in cases:
        if done and (done[-1].family, done[-1].kv_format) != (case.family, case.kv_format):
            show_progress(done, planned)
        done.append(case)
        if not case.right:
            print(
                f"{case.family} {case.kv_format}: {case.kind} taken for {case.found}; {case.sentence}",
                flush=True,
            )
    if done:
        show_progress(done, planned)
    return done


def show_progress(done: Sequence[Case], planned: int) -> None:
    wrong = sum(not case.right for case in done)
    print(f"{done[-1].family} {done[-1].kv_format}: {len(done)} of {planned} run, {wrong} wrong", flush=True)


def invariants_share(engine: LocalEngine, tokens: int = 1024, steps: int = 512) -> tuple[float, float]:
    """Microseconds that the invariant lights take of one decode step behind so many tokens, and the share of the step
    that this is, at the speed of a reply of this engine."""
    cache = PrefixCache(BlockPool(-(-(tokens + steps) // 16) + 1), 16)
    lights, sequence = InvariantLights(cache), CachedSequence(cache, "measured")
    sequence.set_tokens([1] * (tokens + steps))
    sequence.status = Status.RUNNING
    sequence.reserve(tokens + steps)
    sequence.advance(tokens)
    seconds = 0.0
    for position in range(tokens, tokens + steps):
        batch = ScheduledBatch((ScheduledItem(sequence, position, 1, False),))
        began = time.perf_counter()
        lights.before(batch)
        seconds += time.perf_counter() - began
        sequence.advance(1)
        began = time.perf_counter()
        lights.after(batch, (True,))
        seconds += time.perf_counter() - began
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    stats = list(engine.generate(GenerateRequest((1, 2, 3), params)))[-1].stats
    assert stats is not None and stats.decode_tokens_per_s
    return 1e6 * seconds / steps, seconds / steps * stats.decode_tokens_per_s


def summary(cases: Sequence[Case]) -> dict[str, float | int | None]:
    """Shares of the damaged cases (None without one), and how many clean ones raised an alarm."""
    damaged, clean = [c for c in cases if c.kind is not None], [c for c in cases if c.kind is None]

    def share(right: int) -> float | None:
        return right / len(damaged) if damaged else None

    return {
        "faults": len(damaged),
        "detected": share(sum(c.found is not None for c in damaged)),
        "kind_right": share(sum(c.found == c.kind for c in damaged)),
        "place_right": share(sum(c.place_right for c in damaged)),
        "clean": len(clean),
        "false_alarms": sum(c.found is not None for c in clean),
    }


def confusion(cases: Sequence[Case]) -> list[list[object]]:
    """A row per injected kind, a column per kind that was named."""
    counts = Counter((case.kind or "(clean)", case.found or "(clean)") for case in cases)
    names = (*KINDS, "(clean)")
    return [[kind, *[counts[kind, found] or "" for found in names]] for kind in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=160, help="tokens of the longest first prompt (default: 160)")
    parser.add_argument("--family", choices=list(SHARES), help="only this one")
    parser.add_argument("--model", help="as for app.py; default: the default model")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help="where the model lies or is put")
    parser.add_argument("--limit-s", type=float, help="stop after so many seconds, and tell what was run by then")
    options = parser.parse_args()
    families = SHARES if options.family is None else {options.family: 1.0}
    began = time.perf_counter()
    planned = options.faults + options.clean
    cases = run_and_show(
        until(
            run_all(
                options.faults,
                options.clean,
                options.seed,
                options.data_dir,
                families,
                options.longest,
                options.model,
            ),
            options.limit_s,
        ),
        planned,
    )
    print_table(("injected \\ found", *KINDS, "(clean)"), confusion(cases))
    with engine_of(next(iter(families)), "auto", options.data_dir, options.model) as engine:
        microseconds, share = invariants_share(engine)
    print(f"Invariants take {microseconds:.1f} us of a decode step at 1024 tokens, {share:.2%} of it.")
    result = {"planned": planned, **summary(cases), "invariants_us": microseconds, "invariants_share": share}
    print_json("faults", {**result, "seconds": round(time.perf_counter() - began, 1)})


if __name__ == "__main__":
    main()
