"""How much of the allocated memory holds tokens: blocks on demand beside one stretch per session; and shared beams."""

from __future__ import annotations

import uuid
from typing import Any

from benchmarks.cache.setting import MIB, Setting, running, scratch, text_ids, turn
from benchmarks.common import print_table


def utilisation(setting: Setting) -> dict[str, Any]:
    """Sessions of mixed length, all idle at the end; the other layout reserves `max_seq_len` for each of them."""
    with scratch() as folder, running(setting, folder, snapshot_limit=0) as engine:
        engine.wait_ready()
        for index, length in enumerate(setting.lengths):
            turn(engine, text_ids(engine, setting.text, length, skip=7 * index), str(uuid.uuid4()))
        limits, metrics = engine.capabilities(), engine.metrics()
    per_token, tokens = limits["bytes_per_token"], sum(setting.lengths)
    reserved = metrics["kv_reserved_bytes"]
    whole = len(setting.lengths) * limits["max_seq_len"] * per_token
    blocks = metrics["blocks_used"] * limits["block_size"] * per_token
    found = {
        "sessions": len(setting.lengths),
        "tokens": tokens,
        "block_bytes": blocks,
        "block_utilisation": tokens * per_token / blocks,
        "allocated_bytes": reserved,
        "allocated_utilisation": tokens * per_token / reserved,
        "preallocated_bytes": whole,
        "preallocated_utilisation": tokens * per_token / whole,
    }
    rows = [
        ("blocks in use", f"{blocks / MIB:.1f}", f"{found['block_utilisation']:.1%}"),
        ("extents allocated", f"{reserved / MIB:.1f}", f"{found['allocated_utilisation']:.1%}"),
        (
            f"one stretch of {limits['max_seq_len']} tokens each",
            f"{whole / MIB:.1f}",
            f"{found['preallocated_utilisation']:.1%}",
        ),
    ]
    print_table((f"{found['sessions']} sessions, {tokens} tokens", "MiB", "holds tokens"), rows)
    return found


def beams(setting: Setting) -> dict[str, Any]:
    """The blocks that a beam search holds at its end, beside what as many sequences with a prefix each would."""
    session = str(uuid.uuid4())
    with scratch() as folder, running(setting, folder, snapshot_limit=0) as engine:
        prompt = text_ids(engine, setting.text, setting.prefix_tokens)
        turn(engine, prompt, session, new_tokens=setting.beam_tokens, beams=setting.beams)
        tables = [beam["block_table"] for beam in engine.inspect(session)["beams"]]
        limits = engine.capabilities()
    shared, apart = len(set().union(*tables)), sum(len(table) for table in tables)
    per_block = limits["block_size"] * limits["bytes_per_token"]
    print_table(
        (f"{len(tables)} beams, {setting.prefix_tokens} + {setting.beam_tokens} tokens", "blocks", "MiB"),
        [
            ("prefix stored once", shared, f"{shared * per_block / MIB:.1f}"),
            ("a copy for each beam", apart, f"{apart * per_block / MIB:.1f}"),
        ],
    )
    return {
        "beams": len(tables),
        "prefix_tokens": setting.prefix_tokens,
        "suffix_tokens": setting.beam_tokens,
        "shared_bytes": shared * per_block,
        "unshared_bytes": apart * per_block,
    }
