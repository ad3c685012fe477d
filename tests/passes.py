"""Passes of the event loop."""

from __future__ import annotations

import asyncio


async def settle(rounds: int = 20) -> None:
    """Run all due callbacks."""
    for _ in range(rounds):
        await asyncio.sleep(0)
