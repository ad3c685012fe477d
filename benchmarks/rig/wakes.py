"""The time from a write in this process until a coroutine runs in the other."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from time import perf_counter_ns

from rig.blocks import Level, interleave
from rig.figure import Figure, compare
from rig.pair import PING, PONG, Pair
from rig.plan import Plan

__all__ = ["measure_notify"]

WORD = 8


async def measure_notify(pair: Pair, loop: str, plan: Plan) -> AsyncIterator[Figure]:
    """Measure write + notify, one way, until the other process's coroutine runs: half of a round trip, without spinning.

    The floor: the same round trip by two bare eventfds, each resuming a coroutine by add_reader on the same loops.
    """
    engine, remote, bell, their_bell = pair.engine, pair.remote, pair.bell, pair.their_bell
    local = pair.local[:WORD]
    target = remote[:WORD]

    async def rings(times: int) -> int:
        start = perf_counter_ns()
        for _ in range(times):
            answer = bell.wait()
            os.eventfd_write(their_bell, 1)
            await answer
        return perf_counter_ns() - start

    async def notes(times: int) -> int:
        left = times
        start = perf_counter_ns()
        await engine.write(local, target, notify=(PING, b""))
        async for _ in answers:
            left -= 1
            if left == 0:
                break
            await engine.write(local, target, notify=(PING, b""))
        return perf_counter_ns() - start

    answers = engine.notifications(PONG)
    await pair.ask("echo")
    series = await interleave(
        [Level("eventfd", rings, share=2), Level("write + notify", notes, share=2)], plan.wake_pace
    )
    answers.close()
    for figure in compare(series, part="notify", loop=loop, case="one way", verb="write", nbytes=WORD):
        yield figure
