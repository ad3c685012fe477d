"""Streams between processes that are stopped and killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import hixl_async as hx

from .worker import BLOCKS, LAYERS, VIEW, fill, values

WORKER = Path(__file__).with_name("worker.py")


class Child:
    """A worker process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Return the worker's reply, or raise its error."""
        self.tell(do, **arguments)
        answer = await self.answer()
        if "error" in answer:
            raise getattr(hx, answer["error"])(answer["message"])
        return answer

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, "the worker ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def signal(self, number: int) -> None:
        # Process.send_signal may reap a dying child, whose exit status is lost then.
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


@asynccontextmanager
async def child(role: str) -> AsyncIterator[Child]:
    pipe = asyncio.subprocess.PIPE
    # Also from a checkout that is not installed.
    environment = {**os.environ, "PYTHONPATH": str(Path(hx.__file__).parents[1])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(WORKER), role, stdin=pipe, stdout=pipe, env=environment
    )
    worker = Child(process)
    try:
        await worker.answer()
        yield worker
    finally:
        if process.returncode is None:
            worker.signal(signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.close()
        assert await process.wait() in (0, -signal.SIGKILL)
        process._transport.close()  # type: ignore[attr-defined]  # its pipes may outlive a killed process


@asynccontextmanager
async def pool(role: str) -> AsyncIterator[hx.kv.Pool]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(hx.Engine("127.0.0.1:0", name=role))
        access = "write" if role == "consumer" else "none"
        yield await stack.enter_async_context(hx.kv.Pool(engine, VIEW, name=f"kv-{role}", access=access, shuffle=2))


async def test_two_processes() -> None:
    async with child("producer") as producer, pool("consumer") as target, target.reserve(blocks=8) as blocks:
        await producer.ask("reserve", blocks=8, value=40)
        stream = blocks.stream()
        await producer.ask("open", ticket=stream.ticket())
        await producer.ask("push", layers=[3, 1, 0, 2])
        async for layer in stream:
            assert values(target, blocks.ids, layer) == {40 + layer}
        assert await producer.ask("end", payload="token 7") == {}
        assert await stream.finished() == b"token 7"
        assert (await producer.ask("close"))["free"] == BLOCKS


async def test_killing_the_producer_in_the_middle() -> None:
    async with child("producer") as producer, pool("consumer") as target:
        async with target.reserve(blocks=8) as blocks:
            await producer.ask("reserve", blocks=8, value=40)
            stream = blocks.stream()
            await producer.ask("open", ticket=stream.ticket())
            await producer.ask("push", layers=[0, 1])
            await stream.layer(1)
            await producer.ask("push", layers=[2, 3], ready=False)
            killed_at = time.monotonic()
            producer.signal(signal.SIGKILL)
            with pytest.raises(hx.PeerLostError):
                await stream.finished()
            assert time.monotonic() - killed_at < 1
            await stream.layer(0)
            assert values(target, blocks.ids, 1) == {41}
            await asyncio.wait_for(stream.drained(), 1)
        assert target.statistics() == (BLOCKS, 0, 0, 0)


async def test_killing_the_consumer_in_the_middle() -> None:
    async with child("consumer") as consumer, pool("producer") as source, source.reserve(blocks=8) as blocks:
        await consumer.ask("reserve", blocks=8)
        ticket = await consumer.ask("ticket")
        peer = await source.engine.connect(ticket["address"])
        out = await source.open_stream(peer, ticket)
        out.push(0, blocks)
        assert await consumer.ask("layer", layer=0) == {"values": [0]}
        out.push(1, blocks, ready=lambda: False)
        killed_at = time.monotonic()
        consumer.signal(signal.SIGKILL)
        with pytest.raises(hx.PeerLostError) as caught:
            await out.finish()
        assert time.monotonic() - killed_at < 1
        assert caught.value.peer == "consumer"
        with pytest.raises(hx.PeerLostError):
            out.push(2, blocks)
    assert source.statistics() == (BLOCKS, 0, 0, 0)


@pytest.mark.parametrize("then", ["continue", "kill"])
async def test_a_stopped_producer(then: str) -> None:
    async with child("producer") as producer, pool("consumer") as target:
        async with target.reserve(blocks=8) as blocks:
            await producer.ask("reserve", blocks=8, value=40)
            stream = blocks.stream(lease=0.3)
            await producer.ask("open", ticket=stream.ticket())
            await producer.ask("push", layers=[0])
            await stream.layer(0)
            producer.signal(signal.SIGSTOP)
            producer.tell("push", layers=[1, 2, 3])
            with pytest.raises(hx.TransferTimeoutError, match="silent for 0.3 s"):
                await stream.finished()
        assert target.statistics() == (BLOCKS - 8, 0, 8, 0)
        # The user of the other blocks never sees what the producer may still write.
        async with target.reserve(blocks=BLOCKS - 8) as others:
            for layer in range(LAYERS):
                fill(target, others.ids, layer, 200)
            assert not set(others.ids) & set(blocks.ids)
            producer.signal(signal.SIGCONT if then == "continue" else signal.SIGKILL)
            await asyncio.wait_for(stream.drained(), 5)
            assert target.statistics() == (8, BLOCKS - 8, 0, 0)
            assert all(values(target, others.ids, layer) == {200} for layer in range(LAYERS))
        if then == "continue":
            await producer.answer()
            with pytest.raises(hx.StreamAbortedError, match="silent for 0.3 s"):
                await producer.ask("end")
        assert target.statistics() == (BLOCKS, 0, 0, 0)


async def test_a_stopped_consumer() -> None:
    async with child("consumer") as consumer, pool("producer") as source, source.reserve(blocks=8) as blocks:
        await consumer.ask("reserve", blocks=8)
        ticket = await consumer.ask("ticket")
        peer = await source.engine.connect(ticket["address"])
        out = await source.open_stream(peer, ticket, timeout=0.3)
        consumer.signal(signal.SIGSTOP)
        for layer in range(LAYERS):
            out.push(layer, blocks)
        with pytest.raises(hx.TransferTimeoutError, match="did not decide the end"):
            await out.finish()
        consumer.signal(signal.SIGCONT)
        assert await consumer.ask("finished") == {}, "everything was there"
        assert (await consumer.ask("close"))["free"] == BLOCKS


async def test_the_consumer_leaves_while_the_producer_computes() -> None:
    async with child("producer") as producer, pool("consumer") as target:
        async with target.reserve(blocks=8) as blocks:
            await producer.ask("reserve", blocks=8, value=40)
            stream = blocks.stream()
            await producer.ask("open", ticket=stream.ticket())
            await producer.ask("push", layers=[0, 1, 2])
            await producer.ask("push", layers=[3], ready=False)
        with pytest.raises(hx.StreamAbortedError, match="gave its blocks back"):
            await producer.ask("end")
        await asyncio.wait_for(stream.drained(), 5)
        assert target.statistics() == (BLOCKS, 0, 0, 0)


async def test_the_engine_of_the_producer_closes() -> None:
    async with pool("consumer") as target, target.reserve(blocks=8) as blocks:
        async with pool("producer") as source, source.reserve(blocks=8) as mine:
            peer = await source.engine.connect(target.engine.address)
            stream = blocks.stream()
            out = await source.open_stream(peer, stream.ticket())
            out.push(0, mine)
            await stream.layer(0)
        with pytest.raises(hx.StreamAbortedError, match="producer closed its pool"):
            await stream.finished()
        await stream.drained()


async def test_the_engine_closes_before_its_pool() -> None:
    async with pool("consumer") as target, target.reserve(blocks=8) as blocks:
        engine = hx.Engine("127.0.0.1:0", name="producer")
        await engine.open()
        source = hx.kv.Pool(engine, VIEW, name="kv", access="none")
        mine = await source.reserve(blocks=8)
        waiter = asyncio.ensure_future(source.reserve(blocks=BLOCKS))
        peer = await engine.connect(target.engine.address)
        stream = blocks.stream()
        out = await source.open_stream(peer, stream.ticket())
        out.push(0, mine)
        await engine.aclose()
        with pytest.raises(hx.ClosedError):
            await waiter
        with pytest.raises((hx.StreamAbortedError, hx.PeerLostError)):
            await stream.finished()
        await asyncio.wait_for(stream.drained(), 1)
        with pytest.raises((hx.StreamAbortedError, hx.PeerLostError)):
            await out.finish()
        await source.aclose()
        await mine.aclose()
