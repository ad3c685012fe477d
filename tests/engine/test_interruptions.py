"""Disturbances from outside of asyncio: signals that the program handles, and doorbells that never stop ringing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from puppet import Puppet, puppet, stage

from hixl_async import Engine, HandshakeError
from hixl_async.testing import EnginePair, until

MIB = 1 << 20


@pytest.fixture
def fired() -> Iterator[list[int]]:
    """The signals that came so far from a timer that interrupts this thread a thousand times a second."""
    came: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: came.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    yield came
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("size", [64, 3 * MIB], ids=["inline", "on threads"])
@pytest.mark.parametrize("kind", ["allocated", "registered"])
async def test_signals_that_the_program_handles(pair: EnginePair, fired: list[int], kind: str, size: int) -> None:
    if kind == "allocated":
        pair.right.allocate("there", size, access="read-write")
    else:
        pair.right.register("there", bytearray(size), access="read-write")
    remote = await pair.peer.region("there")
    local = pair.left.allocate("here", size)
    heard = pair.right.notifications("done")
    while len(fired) < 60:
        await pair.left.write(local, remote, notify=("done", b""))
        await pair.left.read(local, remote)
        await anext(heard)


def open_again(flags: int) -> Callable[[int], int]:
    return lambda fd: os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


@pytest.mark.parametrize(
    "bell",
    [
        pytest.param(open_again(os.O_RDWR), id="open for writing too"),
        pytest.param(open_again(os.O_RDONLY), id="opened again"),
    ],
)
async def test_a_doorbell_that_would_ring_forever_is_refused(bell: Callable[[int], int]) -> None:
    async with stage() as theatre, Engine() as engine:
        dialling = asyncio.ensure_future(engine.connect(theatre.address))
        actor: Puppet = await theatre.puppets.get()
        actor.start()
        link = await actor.join(bell=bell)
        link.ring()
        with pytest.raises(HandshakeError):
            await dialling
        assert engine.driver_stats()["shm"]["links"] == 0


async def test_a_doorbell_that_is_made_to_ring_forever_costs_the_link(engine: Engine) -> None:
    """After a splice the pipe refuses RWF_NOWAIT, without which the engine could never empty it."""
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        assert actor.link is not None
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            os.splice(actor.link.read_end, writer, 1, flags=os.SPLICE_F_NONBLOCK)
        os.close(reader)
        os.close(writer)
        actor.link.ring()
        assert isinstance(await actor.lost, Exception)
        await until(lambda: engine.driver_stats()["shm"]["links"] == 0)
