"""drained() by transfer, by range, by region and by buffer, with or without handles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from hixl_async import Batch, BufferTypeError, InvalidArgumentError

from .conftest import World


async def settles(world: World, waiter: Awaitable[None], *, waits: bool) -> None:
    """Assert that a wait is done at once, or only when what is held has been released."""
    future = asyncio.ensure_future(waiter)
    await asyncio.sleep(0)
    assert future.done() is not waits
    if waits:
        world.plan.release()
        await future


async def test_by_transfer(world: World) -> None:
    await settles(world, world.write().drained(), waits=False)
    world.plan.late(nth=1)
    transfer = world.write()
    transfer.cancel()
    await settles(world, transfer.drained(), waits=True)
    await settles(world, transfer.drained(), waits=False)


OVERLAPS = [
    (0, 100, False),
    (0, 101, True),
    (100, 108, True),
    (107, 108, True),
    (108, 200, False),
    (104, 104, False),
    (50, 200, True),
]


SIDES: dict[str, Callable[[World, slice], Awaitable[None]]] = {
    "local range": lambda world, piece: world.here[piece].drained(),
    "remote range": lambda world, piece: world.remote[piece].drained(),
    "view": lambda world, piece: world.left.drained(memoryview(world.here)[piece]),
    "numpy": lambda world, piece: world.left.drained(world.here.numpy()[piece]),
}


@pytest.mark.parametrize("side", SIDES)
async def test_by_range(world: World, side: str) -> None:
    for start, stop, touches in OVERLAPS:
        world.plan.clear().hold(nth=1)
        world.left.write(world.here[100:108], world.remote[100:108])  # the handle is lost
        await settles(world, SIDES[side](world, slice(start, stop)), waits=touches)
        world.plan.release()
        await world.here.drained()


async def test_by_region(world: World) -> None:
    other, remote = await world.pair.region("other", 64)
    world.plan.hold(nth=1)
    world.left.write(world.here[0:8], world.remote[0:8])
    for quiet in (remote, remote[:]):
        await settles(world, quiet.drained(), waits=False)
    await settles(world, world.here.drained(), waits=True)
    world.plan.hold(nth=1)
    world.left.write(world.here[0:8], world.remote[0:8])
    await settles(world, world.remote.drained(), waits=True)
    assert other


@pytest.mark.parametrize("kind", ["bytearray", "memoryview", "numpy", "region"])
async def test_by_buffer(world: World, kind: str) -> None:
    raw = bytearray(64)
    buffer: Any = {
        "bytearray": raw,
        "memoryview": memoryview(raw)[8:16],
        "numpy": np.frombuffer(raw, "uint8")[8:16],
        "region": world.left.register("registered", raw, access="none"),
    }[kind]
    whole = world.remote[0:64] if kind in ("bytearray", "region") else world.remote[8:16]
    world.plan.hold(nth=1)
    world.left.write(buffer, whole)
    await settles(world, world.left.drained(bytearray(64)), waits=False)
    await settles(world, world.left.drained(memoryview(raw)[32:40]), waits=kind in ("bytearray", "region"))
    world.plan.release()
    await world.left.drained(raw)
    world.plan.hold(nth=1)
    world.left.write(buffer, whole)
    await settles(world, world.left.drained(raw), waits=True)
    world.plan.hold(nth=1)
    world.left.read(buffer, whole)
    await settles(world, world.left.drained(buffer), waits=True)


async def test_by_batch(world: World) -> None:
    world.plan.hold(nth=1)
    other = world.left.allocate("other", 64)
    world.left.submit(
        Batch("write", [(world.here, world.remote, [(0, 0, 8), (64, 64, 8)]), (other[0:8], world.remote[128:136])])
    )
    for quiet in (
        world.here[8:64],
        world.here[72:],
        world.remote[8:64],
        world.remote[136:],
        other[8:],
        other[100 - 50 : 60],
    ):
        await settles(world, quiet.drained(), waits=False)
    for touched in (world.here[64:65], world.remote[71:72], world.remote[128:129], other[0:1]):
        future = asyncio.ensure_future(touched.drained())
        await asyncio.sleep(0)
        assert not future.done(), touched
        future.cancel()
    await settles(world, other.drained(), waits=True)


async def test_by_signal_word(world: World) -> None:
    world.plan.hold(nth=1)
    world.write(b"hello", 0, signal=(world.remote[4096:4104], 1))
    await settles(world, world.remote[4104:4112].drained(), waits=False)
    await settles(world, world.remote[4096:4104].drained(), waits=True)


async def test_several_waiters_and_transfers(world: World) -> None:
    world.plan.late()
    transfers = [world.left.write(world.here[i : i + 1], world.remote[i : i + 1]) for i in range(10)]
    waiters = [asyncio.ensure_future(world.here[0 : i + 1].drained()) for i in range(10)]
    await asyncio.sleep(0)
    for i in range(10):
        assert [waiter.done() for waiter in waiters] == [True] * i + [False] * (10 - i)
        world.plan.release(1)
        await transfers[i].drained()
        await waiters[i]


async def test_cancelling_a_waiter_ends_only_the_wait(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write()
    one, two = asyncio.ensure_future(transfer.drained()), asyncio.ensure_future(transfer.drained())
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    assert not transfer.done()
    world.plan.release()
    await two
    assert await transfer == 5


async def test_objects_without_memory_are_refused(world: World) -> None:
    for wrong in ("text", 7, None, memoryview(b"abcd")[::2]):
        with pytest.raises((BufferTypeError, InvalidArgumentError)):
            world.left.drained(wrong)


async def test_drained_before_the_outcome_is_retrieved(world: World) -> None:
    """A failure whose drain was awaited is still reported by the await that follows."""
    world.plan.fail(nth=1)
    transfer = world.write()
    await transfer.drained()
    assert transfer.done()
    assert transfer.exception() is not None


async def test_reuse_after_drained_is_safe(world: World) -> None:
    buffer = bytearray(b"first")
    world.plan.late(nth=1)
    transfer = world.write(buffer, 0)
    transfer.cancel()
    waiter = asyncio.ensure_future(world.left.drained(buffer))
    await asyncio.sleep(0)
    world.plan.release()
    await waiter
    buffer[:] = b"other"
    assert world.landed[:5] == b"first"
