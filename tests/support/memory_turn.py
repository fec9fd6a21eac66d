"""Prints the process's memory by part before and after a turn of a tiny model, a JSON object per line."""

from __future__ import annotations

import gc
import json
import time
import uuid
from typing import Any

from engine.local import LocalEngine
from engine.memory.watch import measure
from engine.protocol import GenerateRequest
from engine.sampling.params import SamplingParams
from tests.support.engines import run, tiny_engine


def settled_reading(engine: LocalEngine) -> dict[str, Any]:
    """The parts are asked for one after the other; what is let go of in between is in some only."""
    gc.collect()
    readings = []
    for _ in range(5):
        readings.append(measure(engine._call(engine._holdings)))
        time.sleep(0.1)
    return min(readings, key=lambda reading: abs(reading["unexplained"]))


if __name__ == "__main__":
    engine = tiny_engine()
    try:
        print(json.dumps(settled_reading(engine)), flush=True)
        sampling = SamplingParams(temperature=0, max_tokens=20)
        run(engine, GenerateRequest(tuple(range(1, 200)), sampling, str(uuid.uuid4())))
        print(json.dumps(settled_reading(engine)), flush=True)
    finally:
        engine.close()
