"""Which event loop to run on: uvloop where it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def best() -> str:
    """The faster of the loops that are installed."""
    return "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"


def run(program: Coroutine[Any, Any, T], loop: str) -> T:
    """Runs `program` as `asyncio.run` does, on a loop of the kind ``"uvloop"`` or ``"asyncio"``."""
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(program)
