"""The error of lost work states the cause known at the failure, and whether the peer is known to be dead."""

from __future__ import annotations

import asyncio
import select
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import pytest

from hixl_async import (
    ClosedError,
    Engine,
    HixlError,
    Peer,
    PeerDownError,
    PeerLostError,
    PeerState,
    RemoteRegion,
    Transfer,
    TransferTimeoutError,
)
from hixl_async.control import Incoming
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, peer_process, until

SIZE = 4 << 20


@pytest.fixture(params=["shm", "faulty"])
def drivers(request: pytest.FixtureRequest) -> Any:
    return {"shm": {}} if request.param == "shm" else faulty("shm", FaultPlan(1))


@pytest.fixture
async def pair(drivers: Any) -> AsyncIterator[EnginePair]:
    async with engine_pair(drivers=drivers, close_timeout=0.2) as pair:
        yield pair


def in_flight(engine: Engine, peer: Peer, remote: RemoteRegion) -> Transfer:
    """Start a write that will not end by itself."""
    peer.limit_bandwidth(1)
    transfer = engine.write(bytes(SIZE), remote)
    assert not transfer.done()
    return transfer


async def lost(transfer: Transfer, *causes: str) -> PeerLostError:
    """Wait for the failure of a transfer, and check that it states one of the causes."""
    with pytest.raises(PeerLostError) as caught:
        await transfer
    await transfer.drained()
    failed = f"write to {caught.value.peer!r} of {SIZE} bytes failed, and the contents of its target are undefined: "
    assert str(caught.value) in [failed + cause for cause in causes]
    return caught.value


def leave(pair: EnginePair) -> Any:
    return pair.right.aclose()


def close(pair: EnginePair) -> Any:
    return pair.peer.aclose()


def cut(pair: EnginePair) -> None:
    pair.peer._connection.abort(PeerDownError("cut"))


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (leave, "peer 'right' left"),
        (close, "the connection to 'right' was closed here"),
        (cut, "the connection to peer 'right' broke: cut"),
    ],
)
async def test_the_cause(pair: EnginePair, end: Callable[[EnginePair], Any], cause: str) -> None:
    _, remote = await pair.region("kv", SIZE)
    transfer = in_flight(pair.left, pair.peer, remote)
    ending = end(pair)
    error = await lost(transfer, cause)
    assert not error.confirmed_dead
    await until(lambda: pair.peer.state is PeerState.DOWN)
    with pytest.raises(PeerDownError, match=rf"peer 'right' is down; connect again \({cause}\)") as refused:
        pair.left.write(bytes(SIZE), remote)
    assert not refused.value.confirmed_dead
    if ending is not None:
        await ending


async def test_a_broken_link() -> None:
    plan = FaultPlan(1)
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.2) as pair:
        _, remote = await pair.region("kv", SIZE)
        pair.left.allocate("back", SIZE, access="write")
        back = await pair.back.region("back")
        ours, theirs = in_flight(pair.left, pair.peer, remote), in_flight(pair.right, pair.back, back)
        plan.break_links()
        await lost(ours, "the link to peer 'right' ended: broken by the fault plan")
        await lost(theirs, "peer 'left' lost its link to us: broken by the fault plan")


@pytest.mark.parametrize("first", ["its death", "the link", "the connection"])
async def test_a_death(drivers: Any, first: str) -> None:
    """Whatever the loop sees first."""
    async with peer_process(regions={"kv": SIZE}) as process, Engine(drivers=drivers) as engine:
        peer = await engine.connect(process.address)
        remote = await peer.region("kv")
        transfer = in_flight(engine, peer, remote)
        pidfd = peer._process._pidfd
        assert pidfd is not None
        if first != "its death":
            asyncio.get_running_loop().remove_reader(pidfd)
        process.kill()
        select.select([pidfd], [], [])  # the loop sees its links break and its death together
        if first == "the connection":
            peer._on_connection_lost(ClosedError("the other side closed the connection"))
        error = await lost(transfer, f"the process of peer {peer.name!r} ended")
        assert error.confirmed_dead
        if first == "its death":
            with pytest.raises(PeerDownError, match="ended") as refused:
                engine.write(bytes(SIZE), remote)
            assert refused.value.confirmed_dead


async def test_a_death_that_takes_long() -> None:
    """The kernel closes the sockets of a process before it frees its memory, and only then is the death known."""
    async with peer_process(regions={"private": 256 << 20, "kv": SIZE}) as process, Engine() as engine:
        peer = await engine.connect(process.address)
        remote = await peer.region("kv")
        transfer = in_flight(engine, peer, remote)
        waiting = asyncio.ensure_future(peer.region("never"))
        told: list[HixlError] = []
        peer.add_lost_callback(told.append)
        await asyncio.sleep(0)
        process.kill()
        death = f"the process of peer {peer.name!r} ended"
        error = await lost(transfer, death)
        with pytest.raises(PeerDownError, match=death) as down:
            await waiting
        assert error.confirmed_dead
        assert down.value.confirmed_dead
        assert peer.confirmed_dead
        assert [str(error) for error in told] == [death]


#: A program that does not close its engine.
PROGRAM = f"""
import asyncio, sys, hixl_async as hx

async def main():
    engine = await hx.Engine("127.0.0.1:0", name="program").open()
    region = engine.allocate("kv", {SIZE}, access="write")
    print(engine.address, flush=True)
    await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


async def test_a_program_that_ends_without_closing() -> None:
    """Its sockets are closed some time before its process ends, and that is what the peers learn."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-c", PROGRAM, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert program.stdin is not None
    assert program.stdout is not None
    address = (await program.stdout.readline()).decode().strip()
    async with Engine() as engine:
        peer = await engine.connect(address)
        remote = await peer.region("kv")
        transfer = in_flight(engine, peer, remote)
        waiting = asyncio.ensure_future(peer.region("never"))
        await asyncio.sleep(0)
        program.stdin.write(b"\n")
        error = await lost(transfer, "the process of peer 'program' ended")
        with pytest.raises(PeerDownError, match="ended") as down:
            await waiting
        assert error.confirmed_dead
        assert down.value.confirmed_dead
    await program.wait()
    program.stdin.close()


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of all peers seem to be ending."""
    monkeypatch.setattr("hixl_async.engine.process_watch.is_ending", lambda pid: True)
    monkeypatch.setattr("hixl_async.engine.peer.DEATH_GRACE", 0.2)


class Losing(NamedTuple):
    """Two transfers whose driver has reported that they failed with their link; the peer's process seems to be ending."""

    pair: EnginePair
    remote: RemoteRegion
    transfer: Transfer
    hasty: Transfer  # its timeout passes soon


@pytest.fixture
async def losing(dying: None) -> AsyncIterator[Losing]:
    async with engine_pair(drivers={"shm": {}}, close_timeout=0.2) as pair:
        _, remote = await pair.region("kv", SIZE)
        transfer = in_flight(pair.left, pair.peer, remote)
        hasty = pair.left.write(bytes(SIZE), remote, timeout=0.05)
        await pair.back._links.stop()
        await until(lambda: pair.peer.state is PeerState.CLOSING)
        await asyncio.sleep(0.01)
        yield Losing(pair, remote, transfer, hasty)


async def test_a_death_that_does_not_come(losing: Losing) -> None:
    """Its peer is lost all the same, a moment later."""
    pair, remote, transfer, hasty = losing
    assert not transfer.done()
    ending = "the process of peer 'right' is ending"
    with pytest.raises(PeerDownError, match=ending):
        pair.left.write(bytes(8), remote)
    with pytest.raises(TransferTimeoutError):
        await hasty
    await hasty.drained()
    error = await lost(transfer, ending)
    assert not error.confirmed_dead
    assert pair.peer.state is PeerState.DOWN
    await until(lambda: pair.left.stats().peers == 0)


async def test_other_links_that_are_slow_to_stop_hold_up_no_failure(
    losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer has a link of each driver, which stop one after the other; the cause is known before."""
    slow, stop = asyncio.Event(), losing.pair.peer._links.stop

    async def stop_later() -> None:
        await slow.wait()
        await stop()

    monkeypatch.setattr(losing.pair.peer._links, "stop", stop_later)
    async with asyncio.timeout(5):
        await lost(losing.transfer, "the process of peer 'right' is ending")
    assert losing.pair.peer.state is PeerState.DOWN
    slow.set()


async def test_a_transfer_is_cancelled_while_the_death_is_awaited(losing: Losing) -> None:
    assert losing.transfer.cancel()
    assert losing.transfer.cancelled()
    await losing.transfer.drained()
    assert losing.pair.peer.state is PeerState.DOWN


async def test_the_engine_closes_while_the_death_is_awaited(losing: Losing) -> None:
    await losing.pair.left.aclose()
    assert isinstance(losing.transfer.exception(), PeerLostError)
    await losing.transfer.drained()


async def test_a_goodbye_while_the_death_is_awaited(losing: Losing) -> None:
    """The goodbye of a process that ends in good order was still on its way."""
    losing.pair.peer._on_goodbye(Incoming("goodbye", {}))
    await lost(losing.transfer, "peer 'right' left")


async def test_work_that_is_refused_while_the_loss_is_reported(pair: EnginePair) -> None:
    """The peer is down then: its regions were not closed by their owner."""
    _, remote = await pair.region("kv", SIZE)
    refused: list[Exception] = []

    def write(error: HixlError) -> None:
        try:
            pair.left.write(bytes(SIZE), remote)
        except HixlError as error:
            refused.append(error)

    pair.peer.add_lost_callback(write)
    cut(pair)
    await until(lambda: pair.peer.state is PeerState.DOWN)
    assert [type(error) for error in refused] == [PeerDownError]
