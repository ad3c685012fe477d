"""SIGSTOP: silence proves no death.  Timeouts fire, memory stays pinned, and SIGCONT an hour later corrupts nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from hixl_async import (
    ConnectError,
    Engine,
    PeerState,
    RequestTimeoutError,
    WaitTimeoutError,
)
from hixl_async.core.memory import unpin
from hixl_async.testing import peer_process, until

SIZE = 64 << 20


async def test_a_writer_is_stopped_during_a_write(caplog: pytest.LogCaptureFixture) -> None:
    """Memory that it may be writing stays pinned until it continues and reports that it is done."""
    async with peer_process(name="writer") as process, Engine("127.0.0.1:0", name="owner", close_timeout=0.3) as engine:
        region = engine.allocate("kv", SIZE, access="write")
        borrowed = bytearray(SIZE)
        lent = engine.register("borrowed", borrowed, access="write")
        await process.connect(engine.address)
        for name in ("kv", "borrowed"):
            await process.run("adversity.work:hammer", peer="owner", region=name, size=SIZE, notify=True)
        notes = engine.notifications("hammer")
        for _ in range(3):
            await notes.get()
        process.stop()
        with pytest.raises(RequestTimeoutError):
            await engine.peers[0].request("hixl.ping", {}, timeout=0.1)
        with caplog.at_level(logging.WARNING, "hixl_async"):
            await region.aclose()
            await lent.aclose()
        assert caplog.text.count("did not release") == 2
        assert engine.stats().regions == 2
        with pytest.raises(BufferError):
            borrowed.append(1)

        # The next memory lies elsewhere, and is not touched when the writer finishes later.
        fresh, other = engine.allocate("kv", SIZE, access="read"), bytearray(SIZE)
        pattern = bytes(range(256)) * (SIZE // 256)
        memoryview(fresh)[:] = other[:] = pattern
        process.resume()
        await until(lambda: region.pins == lent.pins == 0, timeout=30)
        assert engine.stats().regions == 1
        borrowed.append(1)
        assert memoryview(fresh) == pattern
        assert other == pattern


async def test_a_stopped_writer_that_dies_gives_everything_back() -> None:
    async with peer_process(name="writer") as process, Engine("127.0.0.1:0", name="owner", close_timeout=0.2) as engine:
        region = engine.allocate("kv", SIZE, access="write")
        await process.connect(engine.address)
        await process.run("adversity.work:hammer", peer="owner", region="kv", size=SIZE, notify=True)
        await engine.notifications("hammer").get()
        peer = engine.peers[0]
        process.stop()
        await region.aclose()
        assert region.pins == 1
        process.kill()
        await peer.fenced()
        assert region.pins == 0
        await until(lambda: engine.stats().peers == 0)


async def test_a_stopped_owner_delays_answers_but_no_copies() -> None:
    """Copies need only this process; what needs the other process waits, each with a timeout of its own."""
    async with peer_process(regions={"kv": SIZE}) as process, Engine() as engine:
        peer = await engine.connect(process.address)
        remote = await peer.region("kv")
        process.stop()
        await engine.write(b"x" * 4096, remote[0:4096])
        await engine.write(bytes(SIZE), remote)
        back = bytearray(4096)
        await engine.read(back, remote[0:4096])
        with pytest.raises(RequestTimeoutError):
            await peer.request("hixl.ping", {}, timeout=0.1)
        with pytest.raises(WaitTimeoutError):
            await peer.region("other", timeout=0.1)
        assert peer.state is PeerState.UP
        process.resume()
        assert await peer.request("hixl.ping", {"n": 1}) == {"n": 1}
        assert await process.peek("kv", 0, 16) == bytes(16)


async def test_leaving_a_stopped_peer_is_bounded() -> None:
    async with peer_process(regions={"kv": 4096}) as process:
        async with Engine(name="leaver", close_timeout=0.3) as engine:
            peer = await engine.connect(process.address)
            await peer.region("kv")
            process.stop()
            start = time.monotonic()
            await peer.aclose()
            assert 0.25 < time.monotonic() - start < 10
            await until(lambda: engine.stats().peers == 0)
            with pytest.raises(ConnectError):
                await engine.connect(process.address, timeout=0.2)
            process.resume()
            again = await engine.connect(process.address)
            assert again is not peer
            await engine.write(b"x" * 4096, await again.region("kv"))
        assert await process.peek("kv", 0, 1) == b"x"


async def test_closing_an_engine_with_a_stopped_writer(loop_errors: list[dict[str, Any]]) -> None:
    """Closing is bounded; memory that the writer may still write is leaked, with a warning; the rest is given back."""
    from hixl_async.engine import regions

    async with peer_process(name="writer") as process:
        borrowed = bytearray(2 << 20)
        async with Engine("127.0.0.1:0", name="owner", close_timeout=0.3) as engine:
            engine.allocate("kv", 2 << 20, access="write")
            engine.register("borrowed", borrowed, access="write")
            await process.connect(engine.address)
            for name in ("kv", "borrowed"):
                await process.run("adversity.work:hammer", peer="owner", region=name, size=2 << 20, notify=True)
            await engine.notifications("hammer").get()
            process.stop()
            start = time.monotonic()
            await engine.aclose()
            assert time.monotonic() - start < 15
        assert "'borrowed'" in loop_errors.pop()["message"]
        with pytest.raises(BufferError):
            borrowed.append(1)
        assert engine.stats().regions == 1
        process.kill()
        await process.exited()
    # Now that it is dead; the engine that would have heard of it is closed.
    unpin(regions._leaked.pop())
    borrowed.append(1)


async def test_connecting_to_a_stopped_process() -> None:
    async with peer_process() as process, Engine() as engine:
        process.stop()
        with pytest.raises(ConnectError, match=r"within 0\.2 s"):
            await engine.connect(process.address, timeout=0.2)
        assert engine.stats().peers == 0
        process.resume()
        assert (await engine.connect(process.address)).state is PeerState.UP


async def test_repeated_stops_lose_nothing() -> None:
    """Work goes on where it was, nothing is lost and nothing doubled."""
    async with peer_process(name="friend") as process, Engine("127.0.0.1:0") as engine:
        engine.allocate("shared", 4096, access="read-write")
        notes = engine.notifications("friend")
        exercising = asyncio.ensure_future(process.run("adversity.work:exercise", address=engine.address, rounds=300))
        seen = []
        for number in range(300):
            if number % 20 == 10:
                process.stop()
                await asyncio.sleep(0.005)  # it is stopped for that long, which is the point
                process.resume()
            seen.append(int.from_bytes((await notes.get()).payload, "big"))
        assert await exercising == 300
        assert seen == list(range(300))


async def test_a_peer_that_was_given_up_comes_back() -> None:
    """Memory that it held stays pinned until it connects again and says that nothing is left of that."""
    async with peer_process(name="writer") as process, Engine("127.0.0.1:0", name="owner", close_timeout=0.2) as engine:
        region = engine.allocate("kv", 2 << 20, access="write")
        await process.connect(engine.address)
        await process.run("adversity.work:hammer", peer="owner", region="kv", size=2 << 20, notify=True)
        await engine.notifications("hammer").get()
        peer = engine.peers[0]
        process.stop()
        await peer.aclose()
        await region.aclose()
        assert region.pins == 1
        assert engine.stats().peers == 1
        process.resume()
        await process.connect(engine.address)
        await peer.fenced()
        assert region.pins == 0
        assert not peer.confirmed_dead
        await until(lambda: engine.stats().peers == 1 == len(engine.peers))


async def test_a_peer_that_was_given_up_while_stopped_finds_itself_lost() -> None:
    async with peer_process(regions={"kv": 4096}) as process, Engine("127.0.0.1:0", close_timeout=0.2) as engine:
        peer = await engine.connect(process.address)
        process.stop()
        await peer.aclose()
        process.resume()
        await wait_for_stats(process, lambda stats: stats["peers"] == 0)
        assert await process.stats() == {**await process.stats(), "regions": 1, "remote_regions": 0, "pinned": 0}


async def wait_for_stats(process: Any, condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition(await process.stats()):
            await asyncio.sleep(0.01)
