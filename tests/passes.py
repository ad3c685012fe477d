"""Passes of the event loop."""

from __future__ import annotations

import asyncio


async def settle(rounds: int = 20) -> None:
    """Let everything run that is due."""
    for _ in range(rounds):
        await asyncio.sleep(0)
