"""The engines that are compared, behind one interface. Each lives in a process of its own (`child`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

CONTEXT = 8192  # tokens of a session at most


@dataclass(frozen=True, slots=True)
class Reply:
    """`first_s` from the request to the first token, `rest_s` from there to the last of `token_ids`."""

    first_s: float
    rest_s: float
    token_ids: list[int]


class Peer(Protocol):
    def run(self, prompt: list[int], tokens: int, session: str | None) -> Reply:
        """A greedy reply of exactly `tokens` tokens; None starts from nothing, a session goes on where it was."""
        ...

    def together(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds until prompts that are asked at once have their replies, prompts included."""
        ...

    def close(self) -> None: ...


class Ours:
    """The app's engine with its defaults, but that it guesses no tokens ahead."""

    def __init__(self, model: Path, data_dir: Path) -> None:
        from engine.config import EngineConfig
        from engine.local import LocalEngine

        self._engine = LocalEngine(EngineConfig(data_dir=data_dir, model=str(model), speculation="off"))
        self._engine.start()
        self._engine.wait_ready()

    def run(self, prompt: list[int], tokens: int, session: str | None) -> Reply:
        from engine.protocol import Failed, Finished, GenerateRequest
        from engine.sampling.params import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start, first = time.perf_counter(), None
        for event in self._engine.generate(GenerateRequest(tuple(prompt), params, session)):
            if isinstance(event, Failed):
                raise SystemExit(str(event))
            if isinstance(event, Finished):
                first = start + (event.stats.ttft_ms or 0.0) / 1e3
                return Reply(first - start, time.perf_counter() - first, list(event.token_ids))
        raise SystemExit("the engine ended without a reply")

    def together(self, prompts: list[list[int]], tokens: int) -> float:
        return _at_once([lambda p=prompt: self.run(p, tokens, None) for prompt in prompts])

    def close(self) -> None:
        self._engine.close()


class Generate:
    """`transformers.generate`, float32: nothing is kept from call to call, as when it is given a conversation."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)

    def run(self, prompt: list[int], tokens: int, session: str | None) -> Reply:
        clock = _Clock()
        ids = self._generate([prompt], tokens, clock)
        return Reply(clock.times[1] - clock.times[0], clock.times[-1] - clock.times[1], ids[0, len(prompt) :].tolist())

    def together(self, prompts: list[list[int]], tokens: int) -> float:
        """As one batch."""
        start = time.perf_counter()
        self._generate(prompts, tokens, None)
        return time.perf_counter() - start

    def close(self) -> None:
        pass

    def _generate(self, prompts: list[list[int]], tokens: int, clock: _Clock | None) -> Any:
        ids = self._torch.tensor(prompts)
        return self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            streamer=clock,
        )


class _Clock:
    """A streamer that takes times: at the prompt, then at each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class LlamaCpp:
    """llama.cpp's server as a library, its own cache kept per session where it is asked to go on.

    `slots` is how many sessions it can hold: with more than are used it decodes much more slowly."""

    def __init__(self, model: Path, slots: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel = CONTEXT * slots, slots
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
        self._server = xllamacpp.Server(params)
        self._slots: dict[str | None, int] = {}
        self._count = slots

    def run(self, prompt: list[int], tokens: int, session: str | None) -> Reply:
        slot = self._slots.setdefault(session, len(self._slots) % self._count)
        return self._ask(prompt, tokens, slot, session is not None)

    def _ask(self, prompt: list[int], tokens: int, slot: int, cached: bool) -> Reply:
        """By the server's own route, which takes and gives token ids, not streamed: a client that reads along takes
        time from its two threads, which wait for each other in a loop. Times are those that it gives itself."""
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
        asked |= {"return_tokens": True, "id_slot": slot, "cache_prompt": cached}
        answer = httpx.post(f"{self._server.listening_address}/completion", json=asked, timeout=600).json()
        times = answer["timings"]
        each = times["predicted_ms"] / max(times["predicted_n"], 1)
        return Reply((times["prompt_ms"] + each) / 1e3, (times["predicted_ms"] - each) / 1e3, answer["tokens"])

    def together(self, prompts: list[list[int]], tokens: int) -> float:
        return _at_once([lambda p=prompt, i=i: self._ask(p, tokens, i, False) for i, prompt in enumerate(prompts)])

    def close(self) -> None:
        pass


def _at_once(jobs: list[Callable[[], object]]) -> float:
    threads = [threading.Thread(target=job) for job in jobs]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start
