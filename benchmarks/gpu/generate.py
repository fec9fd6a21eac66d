"""The peer of whole steps: transformers' `generate` with a static cache, compiled as it chooses."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from benchmarks.gpu.random_model import config_json, weight_format
from benchmarks.gpu.setting import SPARE, Setting
from benchmarks.gpu.timing import Budget, free_bytes
from benchmarks.roofline import Shape, token_bytes
from engine.memory.plan import human_bytes

PEER_SECONDS = 110


class Generate:
    """transformers with a static cache."""

    def __init__(self, shape: Shape, setting: Setting, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        values = config_json(shape)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device(device):
            self._model = AutoModelForCausalLM.from_config(config, dtype=weight_format(device).compute_dtype).eval()
        self._setting, self._ids = setting, torch.randint(shape.vocab, (1, setting.prompt), device=device)

    @staticmethod
    def needs(shape: Shape) -> int:
        """Bytes of free memory."""
        return int(1.2 * token_bytes(shape, "F16").held) + SPARE

    @classmethod
    def where_it_fits(cls, shape: Shape, setting: Setting, device: torch.device, budget: Budget) -> Generate | None:
        """Warmed up; None, and noted, if there is no memory or no time for it, or it does not run here."""
        what, needed, free = f"generate, {shape.name}", cls.needs(shape), free_bytes(device)
        if needed > free:
            budget.skip(what, f"needs {human_bytes(needed)}, {human_bytes(free)} are free")
            return None
        if not budget.allows(what, PEER_SECONDS):
            return None
        with budget.noting(what):
            found = cls(shape, setting, device)
            found.tokens_per_second()
            return found
        return None

    def close(self) -> None:
        """Compiled code holds on to graphs and their memory."""
        torch.compiler.reset()

    def tokens_per_second(self) -> float:
        """After the first token, as for the engine."""
        moments: list[float] = []

        def note(input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            moments.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        count = self._setting.reply
        self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            cache_implementation="static",
            stopping_criteria=[note],
            pad_token_id=0,
        )
        return (len(moments) - 1) / (moments[-1] - moments[0])
