"""A peer in a process of its own."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from hixl_async import (
    Engine,
    InvalidArgumentError,
    PeerDownError,
    RequestTimeoutError,
)
from hixl_async.testing import FaultPlan, PeerProcessError, peer_process, until


async def remember(engine: Engine, word: str) -> dict[str, Any]:
    """Run in the other process, by `PeerProcess.run`."""
    return {"engine": engine.name, "word": word, "pid": os.getpid()}


def fail(engine: Engine, usage: bool) -> None:
    """Raise an error in the other process, by `PeerProcess.run`."""
    if usage:
        raise InvalidArgumentError("an error of the package")
    raise LookupError("any other error")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_conversation(loop: str) -> None:
    async with (
        peer_process(name="child", loop=loop, regions={"kv": 4096}) as process,
        Engine("127.0.0.1:0", name="parent") as engine,
    ):
        peer = await engine.connect(process.address)
        assert peer.name == "child"
        remote = await peer.region("kv")
        await engine.write(b"to the child", remote[0:12])
        assert await process.peek("kv", 0, 12) == b"to the child"
        await process.poke("kv", b"from it", 100)
        buffer = bytearray(7)
        await engine.read(buffer, remote[100:107])
        assert buffer == b"from it"

        region = engine.allocate("here", 64, access="read-write")
        notes = engine.notifications("n")
        await process.write("parent", "here", b"by the child", 4, notify=("n", b"done"))
        assert (await notes.get()).payload == b"done"
        assert bytes(memoryview(region)[4:16]) == b"by the child"
        assert await process.read("parent", "here", 4, 16) == b"by the child"
        await process.allocate("more", 128, access="read")
        assert len(await peer.region("more")) == 128
        assert (await process.stats())["regions"] == 2

        answer = await process.run(f"{__name__}:remember", word="token")
        assert answer == {"engine": "child", "word": "token", "pid": process.pid}
        with pytest.raises(InvalidArgumentError, match="an error of the package"):
            await process.run(f"{__name__}:fail", usage=True)
        with pytest.raises(PeerProcessError, match=r"LookupError.*any other error"):
            await process.run(f"{__name__}:fail", usage=False)
        with pytest.raises(PeerProcessError, match="no_such"):
            await process.run(f"{__name__}:no_such")
    assert await process.exited() == 0


async def test_kill() -> None:
    async with peer_process(regions={"kv": 4096}) as process, Engine() as engine:
        peer = await engine.connect(process.address)
        remote = await peer.region("kv")
        process.kill()
        assert await process.exited() == -signal.SIGKILL
        await until(lambda: peer.confirmed_dead)
        with pytest.raises(PeerDownError):
            engine.write(b"x", remote[0:1])
        with pytest.raises(PeerProcessError, match="has ended"):
            await process.stats()


async def test_stop_and_resume() -> None:
    async with peer_process(regions={"kv": 4096}) as process, Engine() as engine:
        peer = await engine.connect(process.address)
        remote = await peer.region("kv")
        process.stop()
        assert await engine.write(b"one-sided", remote[0:9]) == 9
        with pytest.raises(RequestTimeoutError):
            await peer.request("anything", {}, timeout=0.05)
        process.resume()
        assert await process.peek("kv", 0, 9) == b"one-sided"


async def test_a_plan_in_the_other_process() -> None:
    plan = FaultPlan(1).fail(nth=1)
    async with peer_process(plan=plan) as process, Engine("127.0.0.1:0", name="parent") as engine:
        engine.allocate("here", 64, access="read-write")
        await process.connect(engine.address)
        with pytest.raises(Exception, match="failed"):
            await process.write("parent", "here", b"x")
        await process.write("parent", "here", b"x")
    assert plan.counts.ops == 0


async def test_a_process_that_does_not_start() -> None:
    with pytest.raises(PeerProcessError, match="ended"):
        async with peer_process(no_such_setting=1):
            pass
