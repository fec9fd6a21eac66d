"""Long work for a client that may hang up meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from fastapi import Request

LOOK_S = 0.5
"""Between two looks whether the client is still there."""


async def while_connected(request: Request, work: Callable[..., Any], *given: Any) -> Any:
    """What `work(*given, gone)` returns, run on a thread; `gone()` comes true once the client has hung up."""
    gone = threading.Event()
    running = asyncio.create_task(asyncio.to_thread(work, *given, gone.is_set))
    try:
        while not (await asyncio.wait([running], timeout=LOOK_S))[0]:
            if await request.is_disconnected():
                gone.set()
        return await running
    finally:
        gone.set()
