"""A chat with the default model, ours beside `transformers.generate` on the same file, in one run.

    python -m benchmarks.chat

Decode: tokens per second of greedy replies, the two in turn. First token: one growing chat; ours keeps its cache from
turn to turn, `generate` prefills the whole prompt again, as it does when called with a conversation.
"""

from __future__ import annotations

import argparse
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from app import default_data_dir
from benchmarks.common import median, print_json, print_table, spread
from engine.config import EngineConfig
from engine.local import LocalEngine
from engine.protocol import ChatMessage, Finished, GenerateRequest
from engine.sampling.params import SamplingParams
from engine.weights.catalog import resolve

THREADS = torch.get_num_threads()
TURNS = 20
MEASURED_TURNS = (1, 5, 10, 20)
QUESTIONS = (
    "Tell me something about the sea.",
    "How deep is it?",
    "What lives at the bottom?",
    "Why is the water salty?",
    "Name three large fish.",
)


def ours(engine: LocalEngine, prompt_ids: tuple[int, ...], max_tokens: int, session_id: str | None) -> Finished:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=max_tokens > 32)
    for event in engine.generate(GenerateRequest(prompt_ids, params, session_id)):
        if isinstance(event, Finished):
            return event
    raise SystemExit("the engine failed")


def reference(model: torch.nn.Module, prompt_ids: tuple[int, ...], new_tokens: int) -> float:
    """Seconds that `generate` needs, with all threads: our engine has left torch with one."""
    torch.set_num_threads(THREADS)
    ids = torch.tensor([prompt_ids])
    start = time.perf_counter()
    model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens
    )
    return time.perf_counter() - start


def decode_speed(
    engine: LocalEngine, model: torch.nn.Module, rounds: int, tokens: int
) -> tuple[list[float], list[float]]:
    """Tokens per second, ours and reference, alternating. The first token (prefill) is left out of both."""
    prompt = engine.tokenizer.render([ChatMessage("user", QUESTIONS[0])], datetime.now(UTC)).token_ids
    mine, theirs = [], []
    for _ in range(rounds + 1):
        mine.append(ours(engine, prompt, tokens, None).stats.decode_tokens_per_s or 0.0)
        first = reference(model, prompt, 1)
        theirs.append((tokens - 1) / (reference(model, prompt, tokens) - first))
    return mine[1:], theirs[1:]


def first_token(engine: LocalEngine, model: torch.nn.Module, rounds: int) -> dict[int, tuple[list[float], list[float]]]:
    """Milliseconds to the first token per measured turn, ours and reference, for `rounds` whole chats."""
    result: dict[int, tuple[list[float], list[float]]] = {turn: ([], []) for turn in MEASURED_TURNS}
    for _ in range(rounds):
        session_id = str(uuid.uuid4())
        messages: list[ChatMessage] = []
        for turn in range(1, TURNS + 1):
            messages.append(ChatMessage("user", QUESTIONS[turn % len(QUESTIONS)]))
            start = time.perf_counter()
            prompt = engine.tokenizer.render(messages, datetime.now(UTC)).token_ids
            render_ms = 1e3 * (time.perf_counter() - start)
            done = ours(engine, prompt, 32, session_id)
            messages.append(ChatMessage("assistant", done.text, done.token_ids))
            if turn in MEASURED_TURNS:
                result[turn][0].append(render_ms + (done.stats.ttft_ms or 0.0))
                result[turn][1].append(1e3 * reference(model, prompt, 1))
        engine.release(session_id)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help="where the model lies or is put")
    parser.add_argument("--dtype", default="auto", help="weights of our engine (default: auto)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per decode measurement (default: 64)")
    arguments = parser.parse_args()

    engine = LocalEngine(EngineConfig(data_dir=arguments.data_dir, dtype=arguments.dtype, speculation="off"))
    engine.start()
    engine.wait_ready()
    source = resolve(None, arguments.data_dir)
    model = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    ).eval()

    mine, theirs = decode_speed(engine, model, arguments.rounds, arguments.tokens)
    turns = first_token(engine, model, arguments.rounds)
    engine.close()

    rows = [
        (
            "decode, tokens/s",
            f"{median(mine):.1f}",
            spread(mine),
            f"{median(theirs):.1f}",
            spread(theirs),
            f"{median(mine) / median(theirs):.2f} x",
        )
    ]
    for turn, (own, other) in turns.items():
        ratio = f"{median(other) / median(own):.1f} x"
        rows.append(
            (
                f"first token of turn {turn}, ms",
                f"{median(own):.1f}",
                spread(own),
                f"{median(other):.1f}",
                spread(other),
                ratio,
            )
        )
    print_table(("", "KVScope", "spread", "generate fp32", "spread", "ahead by"), rows)
    print_json(
        "chat",
        {
            "model": source.name,
            "dtype": arguments.dtype,
            "decode_tokens_per_s": median(mine),
            "decode_tokens_per_s_generate": median(theirs),
            "decode_ratio": median(mine) / median(theirs),
            "ttft_ms": {turn: median(own) for turn, (own, _) in turns.items()},
            "ttft_ms_generate": {turn: median(other) for turn, (_, other) in turns.items()},
            "ttft_ratio_turn_20": median(turns[20][1]) / median(turns[20][0]),
        },
    )


if __name__ == "__main__":
    main()
