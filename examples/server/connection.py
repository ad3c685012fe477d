"""The client's connection: what is done for a client ends when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

Receive = Callable[[], Awaitable[dict[str, Any]]]
"""ASGI's function for the next event of a connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do work, or as much of it as there is time for until the client disconnects."""
    tasks = [asyncio.create_task(each) for each in (work, _disconnected(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if not tasks[0].cancelled():
        tasks[0].result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
