"""What the engines are asked to do. Each task gives figures by name: {figure: value} for one engine and round."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable

from benchmarks.peers.child import Child

CONTEXTS = (128, 1024, 4096)
DECODED = 48
TURNS = (1, 5, 10, 20)
HISTORY, QUESTION, ANSWER = 3000, 18, 32  # tokens; by turn 20 some 4,000
SWITCHES = 10
SESSION_COUNTS = (1, 4, 8)
SESSIONS = {"switching": 2, "together": max(SESSION_COUNTS)}  # that an engine must hold at once; else one

Figures = dict[str, float]
Opener = Callable[[], Child]


def words(count: int, seed: int) -> list[int]:
    """Token ids that no other seed shares: nothing of them is in any cache."""
    return random.Random(seed).choices(range(1000, 40000), k=count)


def at_contexts(child: Child, seed: int) -> Figures:
    """Prompts of some lengths from nothing, then decoding behind them; tokens per second."""
    found: Figures = {}
    for context in CONTEXTS:
        reply = child.run(words(context, seed + context), DECODED)
        found[f"prefill {context}"] = context / reply.first_s
        found[f"decode at {context}"] = (DECODED - 1) / reply.rest_s
    return found


def chat(child: Child, seed: int) -> Figures:
    """A chat that begins with a long text: milliseconds to the first token of some turns."""
    found, session, prompt = {}, str(uuid.UUID(int=seed)), words(HISTORY, seed)
    for turn in range(1, max(TURNS) + 1):
        prompt = prompt + words(QUESTION, seed + turn)
        reply = child.run(prompt, ANSWER, session)
        prompt += reply.token_ids
        if turn in TURNS:
            found[f"first token of turn {turn}, ms"] = 1e3 * reply.first_s
    return found


def chat_without_cache(child: Child, seed: int) -> Figures:
    """`chat` for an engine that keeps nothing: only the measured turns are asked for."""
    lengths = {turn: HISTORY + turn * QUESTION + (turn - 1) * ANSWER for turn in TURNS}
    replies = {turn: child.run(words(length, seed), 1) for turn, length in lengths.items()}
    return {f"first token of turn {turn}, ms": 1e3 * reply.first_s for turn, reply in replies.items()}


def switching(child: Child, seed: int) -> Figures:
    """Two sessions with long histories in turn: milliseconds to the first token of the one come back to."""
    names, prompts = [str(uuid.UUID(int=seed + i)) for i in range(2)], [words(HISTORY, seed + i) for i in range(2)]
    times: list[list[float]] = [[], []]
    for step in range(2 * SWITCHES + 2):
        prompts[step % 2] = prompts[step % 2] + words(QUESTION, seed + 10 + step)
        reply = child.run(prompts[step % 2], 2, names[step % 2])
        prompts[step % 2] += reply.token_ids
        times[step % 2].append(1e3 * reply.first_s)
    return {"first switch back, ms": times[0][1], f"switch back {SWITCHES}, ms": times[0][SWITCHES]}


def together(child: Child, seed: int) -> Figures:
    """Short prompts answered at once: tokens per second of all."""
    found = {}
    for count in SESSION_COUNTS:
        prompts = [words(32, seed + 100 * count + i) for i in range(count)]
        found[f"{count} at once"] = count * DECODED / child.together(prompts, DECODED)
    return found


def restart(child: Child, seed: int, open_again: Opener) -> tuple[Figures, Child]:
    """A session of a long text in a process that is ended and started again: seconds to its next first token."""
    session, prompt = str(uuid.UUID(int=seed)), words(HISTORY + 1000, seed)
    prompt += child.run(prompt, ANSWER, session).token_ids
    child.close()
    again = open_again()
    reply = again.run(prompt + words(QUESTION, seed + 1), 2, session)
    return {"after a restart, s": reply.first_s, "start, s": again.ready_s}, again
