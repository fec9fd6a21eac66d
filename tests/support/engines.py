"""Real engines over tiny random models: every part is the product's own, only the weights are small."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.loader import EngineParts, assemble
from engine.local import LocalEngine, QueueStream
from engine.models.registry import DecoderModel, load_model
from engine.protocol import Event, GenerateRequest
from engine.sampling.params import SamplingParams
from engine.tokenizer import ChatTokenizer
from tests.support.tiny_models import save_safetensors, tiny_model
from tests.support.tiny_tokenizer import chat_tokenizer

LONG_CONTEXT = 2**15
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
"""With LONG_CONTEXT a reply that the test ends: one of some hundred tokens may be over before a thread that is held up
has done what it is to do meanwhile."""


@cache
def loaded_model(kind: str = "llama", seed: int = 0, vocab_size: int = 271, context: int = 512) -> DecoderModel:
    """A tiny model in float32, loaded by the product's own loader."""
    torch.set_num_threads(1)  # on matrices this small a second thread only waits
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(kind, seed, vocab_size=vocab_size, max_position_embeddings=context)
        return load_model(save_safetensors(model, Path(folder)), torch.device("cpu"), "float32")


class RecordingEngine(LocalEngine):
    """Remembers the requests it was given, so that a test can run the same prompt again elsewhere.

    `script` are replies (token ids) for the next requests, taken in place of what the model would say.
    """

    requests: list[GenerateRequest]
    script: list[tuple[int, ...]]

    def generate(self, request: GenerateRequest) -> QueueStream:
        if self.script:
            request = replace(request, forced_ids=self.script.pop(0))
        self.requests.append(request)
        return super().generate(request)


def tiny_parts(
    *,
    kind: str = "llama",
    template: str | None = None,
    tokenizer: ChatTokenizer | None = None,
    blocks: int | None = None,
    states: int | None = None,
    context: int = 512,
    name: str = "tiny",
    model: DecoderModel | None = None,
    **config: Any,
) -> tuple[EngineConfig, Callable[[EngineConfig], EngineParts]]:
    """A configuration and what loads its parts; `blocks` and `states` are the sizes of its pools (null block and null
    slot included)."""
    tokenizer = tokenizer or chat_tokenizer(template)
    held = model or loaded_model(kind, vocab_size=tokenizer.vocab_size, context=context)
    settings: dict[str, Any] = {"kv_format": "fp32", "kv_budget": 64 * 2**20, "block_size": 4}
    settings |= {"data_dir": Path("unused"), "snapshot_limit": 0, "speculation": "off", **config}
    configuration = EngineConfig(**settings)

    def load(config: EngineConfig) -> EngineParts:
        parts = assemble(config, held, tokenizer, name, f"{kind} weights")
        limit = parts.max_blocks if blocks is None else blocks
        parts.cache.max_blocks = limit
        return replace(parts, max_blocks=limit, state_slots=parts.state_slots if states is None else states)

    return configuration, load


def tiny_engine(**options: Any) -> RecordingEngine:
    """A started engine; options are those of `tiny_parts`."""
    engine = RecordingEngine(*tiny_parts(**options))
    engine.requests, engine.script = [], []
    engine.start()
    engine.wait_ready(30)
    return engine


def run(engine: LocalEngine, request: GenerateRequest) -> list[Event]:
    """All events of one request."""
    return list(engine.generate(request))
