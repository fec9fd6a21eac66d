"""Replies with drafts from the text so far beside the same replies without, in one run on one engine.

    python -m benchmarks.speculation

Tasks that repeat their prompt (rewrite, correct) gain; ordinary chat must not lose. The two take turns, the order
changes from round to round, and each figure is the median of the rounds' own ratios. The replies are compared, token by
token. `step_costs` are the measured costs of steps by their rows, in steps of one row.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app import default_data_dir
from benchmarks.common import median, print_json, print_table, spread
from engine.config import EngineConfig
from engine.local import LocalEngine
from engine.protocol import ChatMessage, Finished, GenerateRequest
from engine.sampling.params import SamplingParams

PASSAGE = (
    "The lighthouse stands at the northern end of the island. It was built in 1868 by a crew of forty men, who "
    "carried every stone up the cliff by hand. For more than a century its lamp was lit each evening by a keeper, "
    "and the light could be seen by ships thirty kilometres away. In 1991 the lamp was replaced by an electric "
    "one, and the last keeper moved to the village. Today the tower is a museum. Visitors climb its two hundred "
    "steps, look at the old lens, and read the names of the ships that were lost before it was built."
)
REWRITES = (
    f"Rewrite this text and fix its spelling mistakes. Answer with the text only.\n\n{PASSAGE}",
    f"Repeat the following text word for word:\n\n{PASSAGE}",
    f"Copy the following text, but replace the word lighthouse by tower.\n\n{PASSAGE}",
)
CHATS = (
    "Tell me something about the sea.",
    "Write a short story about a dog that finds a key.",
    "Who was Ada Lovelace?",
    "Why is the sky blue?",
)


def reply(engine: LocalEngine, question: str, params: SamplingParams) -> Finished:
    prompt = engine.tokenizer.render([ChatMessage("user", question)], datetime(2026, 1, 1, tzinfo=UTC)).token_ids
    event = list(engine.generate(GenerateRequest(prompt, params)))[-1]
    if not isinstance(event, Finished):
        raise SystemExit("the engine failed")
    return event


def compare(
    engine: LocalEngine, questions: tuple[str, ...], tokens: int, rounds: int, temperature: float
) -> dict[str, Any]:
    """Ratios of the decode times without and with drafts, of all questions of a round together."""
    found: dict[str, Any] = {"ratios": [], "drafted": 0, "accepted": 0, "generated": 0, "same": True}
    for number in range(rounds + 1):
        seconds, replies = {"off": 0.0, "auto": 0.0}, {}
        for question in questions:
            for mode in ("off", "auto") if number % 2 else ("auto", "off"):
                params = SamplingParams(temperature, seed=number, max_tokens=tokens, speculation=mode)
                end = replies[mode] = reply(engine, question, params)
                if end.stats.decode_tokens_per_s is not None:
                    seconds[mode] += (end.stats.generated_tokens - 1) / end.stats.decode_tokens_per_s
            found["same"] &= replies["off"].token_ids == replies["auto"].token_ids
            if number:  # the first round fills the prompt's cache and measures what steps cost
                stats = replies["auto"].stats
                found["drafted"] += stats.drafted_tokens
                found["accepted"] += stats.accepted_tokens
                found["generated"] += stats.generated_tokens
        if number:
            found["ratios"].append(seconds["off"] / seconds["auto"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help="where the model lies or is put")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of a reply (default: 200)")
    arguments = parser.parse_args()

    engine = LocalEngine(EngineConfig(data_dir=arguments.data_dir, snapshot_limit=0))
    engine.start()
    engine.wait_ready()
    tasks = {"rewrite": (REWRITES, 0.0), "chat": (CHATS, 0.7), "chat_greedy": (CHATS, 0.0)}
    results = {
        name: compare(engine, questions, arguments.tokens, arguments.rounds, temperature)
        for name, (questions, temperature) in tasks.items()
    }
    costs = engine._steps().speculation.costs.report()
    engine.close()

    rows = []
    for name, found in results.items():
        accepted = f"{found['accepted']} of {found['drafted']}" if found["drafted"] else "none"
        share = f"{found['accepted'] / found['generated']:.0%}"
        ratio = f"{median(found['ratios']):.2f} x"
        rows.append((name, ratio, spread(found["ratios"]), accepted, share, "yes" if found["same"] else "NO"))
    print_table(("task", "faster by", "spread", "accepted drafts", "of the reply", "same tokens"), rows)
    print_json(
        "speculation",
        {
            **{
                f"{name}_{key}": value
                for name, found in results.items()
                for key, value in (
                    ("ratio", median(found["ratios"])),
                    ("acceptance", found["accepted"] / found["drafted"] if found["drafted"] else None),
                    ("same_tokens", found["same"]),
                )
            },
            "step_costs": costs,
        },
    )


if __name__ == "__main__":
    main()
