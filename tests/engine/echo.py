"""Runs in another process: answers each "ping" with its payload and what lies at the start of region "kv"."""

from __future__ import annotations

import asyncio

from hixl_async import Engine

_tasks = set()


def start(engine: Engine) -> None:
    """Start the service, which ends with the engine."""
    _tasks.add(asyncio.ensure_future(_echo(engine)))


async def _echo(engine: Engine) -> None:
    view = memoryview(engine.regions["kv"])
    async for note in engine.notifications("ping"):
        await engine.notify(note.peer, "pong", note.payload + bytes(view[:8]))
    view.release()
