"""The event loop to run on: uvloop where it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: The factories of the available loops, the best first; None is asyncio's default.
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop] | None] = {}

try:
    import uvloop

    LOOPS["uvloop"] = uvloop.new_event_loop
except ModuleNotFoundError:
    pass
LOOPS["asyncio"] = None


def run(program: Callable[[], Coroutine[Any, Any, T]], loop: str) -> T:
    """Run the coroutine function `program` as `asyncio.run` does, on one of the `LOOPS`."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(program())
