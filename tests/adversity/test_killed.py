"""SIGKILL of either side at any moment: a typed error at once, no hang, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hixl_async import (
    BusyError,
    ConnectError,
    Engine,
    HixlError,
    Peer,
    PeerDownError,
    PeerLostError,
    PeerState,
    StaleRegionError,
)
from hixl_async.testing import PeerProcess, peer_process, until

Figure = Callable[[str, float], None]
SIZE = 64 << 20


async def _failure(what: Any) -> BaseException:
    try:
        await what
    except BaseException as error:
        return error
    raise AssertionError("it succeeded")


async def test_the_owner_is_killed_with_everything_in_flight(figure: Figure) -> None:
    """Large writes, reads, notifications that wait for room, requests, and waits without an answer."""
    drivers = {"shm": {"ring_bytes": 4096, "pending_notes": 64, "threads": 1, "chunk_bytes": 65536}}
    async with peer_process(regions={"kv": SIZE}) as process, Engine(drivers=drivers) as engine:
        peer = await engine.connect(process.address)
        remote = await peer.region("kv")
        local = engine.allocate("local", SIZE)
        await process.run("adversity.work:serve_nothing")
        lost: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        peer.add_lost_callback(lambda error: lost.done() or lost.set_result(time.perf_counter()))
        writes = [engine.write(local, remote, notify=("t", b"x")) for _ in range(20)]
        reads = [engine.read(local, remote) for _ in range(20)]
        asking = asyncio.ensure_future(peer.request("never", {}, timeout=60))
        waiting = asyncio.ensure_future(peer.region("never"))
        fencing = asyncio.ensure_future(peer.fenced())
        await asyncio.sleep(0)
        killed = time.perf_counter()
        process.kill()
        figure("owner killed: until the loss is told", await lost - killed)
        for end in (asking, waiting):
            error = await _failure(end)
            assert isinstance(error, PeerDownError)
        assert peer.confirmed_dead
        assert peer.state is PeerState.DOWN
        await fencing
        for transfer in writes + reads:
            with contextlib.suppress(PeerLostError):
                await transfer
        assert isinstance(writes[-1].exception(), PeerLostError), "that much cannot have been done in time"
        figure("owner killed: until all 40 transfers ended", time.perf_counter() - killed)
        await asyncio.gather(*(transfer.drained() for transfer in writes + reads))
        with pytest.raises(PeerDownError, match="connect again"):
            engine.write(local, remote)
        await until(lambda: engine.stats().peers == 0)
        assert engine.stats().remote_regions == engine.stats().pinned == 0
        assert engine.driver_stats()["shm"]["links"] == 0


async def test_the_owner_is_killed_while_notifications_wait(figure: Figure) -> None:
    drivers = {"shm": {"ring_bytes": 4096, "pending_notes": 64}}
    async with peer_process() as process, Engine(drivers=drivers) as engine:
        peer = await engine.connect(process.address)
        process.stop()
        notes = []
        with pytest.raises(BusyError):
            while True:
                notes.append(engine.notify(peer, "t", bytes(500)))
        killed = time.perf_counter()
        process.kill()
        error = await _failure(notes[-1])
        figure("owner killed: until a waiting notification failed", time.perf_counter() - killed)
        assert isinstance(error, PeerLostError)
        for note in notes:
            with contextlib.suppress(PeerLostError):
                await note
        await until(lambda: engine.stats().peers == 0)


@pytest.mark.parametrize("round", range(3))
async def test_the_writer_is_killed_during_a_write(round: int, figure: Figure) -> None:
    """Its death is confirmed, so the memory that it was writing is free again at once."""
    async with peer_process() as process, Engine("127.0.0.1:0", name="owner", close_timeout=30) as engine:
        region = engine.allocate("kv", SIZE, access="write")
        borrowed = bytearray(2 << 20)
        engine.register("borrowed", borrowed, access="write")
        accepted = engine.accepted()
        await process.connect(engine.address)
        peer = await accepted.get()
        await process.run("adversity.work:hammer", peer="owner", region="kv", size=SIZE, notify=True)
        await process.run("adversity.work:hammer", peer="owner", region="borrowed", size=2 << 20, notify=True)
        notes = engine.notifications("hammer")
        for _ in range(3):
            await notes.get()
        lost: asyncio.Future[HixlError] = asyncio.get_running_loop().create_future()
        peer.add_lost_callback(lambda error: lost.done() or lost.set_result(error))
        killed = time.perf_counter()
        process.kill()
        error = await lost
        figure("writer killed: until the loss is told", time.perf_counter() - killed)
        assert isinstance(error, PeerDownError)
        await peer.fenced()
        assert peer.confirmed_dead
        await region.aclose()
        await engine.regions["borrowed"].aclose()
        figure("writer killed: until its memory is free", time.perf_counter() - killed)
        borrowed.append(1)
        await until(lambda: engine.stats().peers == 0)
        assert engine.stats().regions == 0


async def test_a_killed_process_leaves_no_names() -> None:
    async with peer_process(regions={"kv": 4096}) as process, Engine() as engine:
        await (await engine.connect(process.address)).region("kv")
        names = await process.run("adversity.work:names")
        assert names
        process.kill()
        await process.exited()
        assert not names_of(names)
        assert not [name for name in os.listdir("/dev/shm") if str(process.pid) in name]


def names_of(wanted: list[str]) -> list[str]:
    present = Path("/proc/net/unix").read_text()
    return [name for name in wanted if name in present]


@pytest.mark.parametrize("step", ["established", "listening", "linked"])
async def test_killed_while_connecting(step: str, figure: Figure) -> None:
    """Not after the timeout, but at once."""
    async with peer_process() as process, Engine("127.0.0.1:0", connect_timeout=60) as engine:
        accepted = engine.accepted()
        address = await process.run("adversity.hostile:stage_that_stops", step=step)
        connecting = asyncio.ensure_future(engine.connect(address))
        await process.run("adversity.hostile:reached")
        killed = time.perf_counter()
        process.kill()
        error = await _failure(connecting)
        figure("killed while connecting: until connect fails", time.perf_counter() - killed)
        assert isinstance(error, ConnectError)
        await until(lambda: engine.stats().peers == 0)
        assert not accepted


@pytest.mark.parametrize("step", ["established", "listening", "linked"])
async def test_killed_while_being_accepted(step: str) -> None:
    async with peer_process() as process, Engine("127.0.0.1:0", connect_timeout=60) as engine:
        await process.run("adversity.hostile:dial_and_stop", address=engine.address, step=step)
        await until(lambda: engine.stats().peers == 1)
        process.kill()
        await until(lambda: engine.stats().peers == 0)
        assert engine.driver_stats()["shm"]["links"] == 0


def fixed_port() -> int:
    """Return a free port below those that the system chooses itself, so that nothing else takes it between two listeners."""
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


async def test_killed_and_restarted_at_the_same_address(figure: Figure) -> None:
    """Old handles fail at once, and `connect` gives the new peer, also right after the kill, before the death is noticed."""
    async with Engine() as engine:
        address, remotes, peers = f"127.0.0.1:{fixed_port()}", [], []
        for _round in range(5):
            async with peer_process() as process:
                incarnation = await process.run("adversity.work:listen", address=address)
                start = time.perf_counter()
                peer = await engine.connect(address)
                figure("restarted at the same address: until connected", time.perf_counter() - start)
                assert peer.identity.incarnation == incarnation
                assert peer not in peers
                remote = await peer.region("kv")
                for old in remotes:
                    with pytest.raises((PeerDownError, StaleRegionError)):
                        await engine.write(bytes(4096), old)
                await engine.write(bytes(4096), remote)
                remotes.append(remote)
                peers.append(peer)
                process.kill()
                await process.exited()
        await until(lambda: engine.stats().peers == 0)
        assert engine.driver_stats()["shm"]["links"] == 0


async def test_connect_right_after_an_unnoticed_death() -> None:
    """The loop has not run since: `connect` checks by itself, and does not return the dead peer."""
    async with peer_process() as process, Engine() as engine:
        peer = await engine.connect(process.address)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  The loop must not run.
        assert peer.state is PeerState.UP
        with pytest.raises(ConnectError):
            await engine.connect(process.address)
        assert peer.confirmed_dead


async def test_a_child_of_the_dead_holds_its_sockets_open(figure: Figure) -> None:
    """Its death counts, not the end of its connections."""
    async with peer_process(regions={"kv": 4096}) as process, Engine() as engine:
        peer = await engine.connect(process.address)
        await peer.region("kv")
        child = await process.run("adversity.hostile:leave_a_child")
        killed = time.perf_counter()
        process.kill()
        await until(lambda: peer.confirmed_dead)
        figure("killed, sockets held open by a child: until confirmed", time.perf_counter() - killed)
        await until(lambda: engine.stats().peers == 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)


async def test_a_third_process_survives_the_death_of_both() -> None:
    async with (
        Engine("127.0.0.1:0", name="third") as engine,
        peer_process(name="one") as one,
        peer_process(name="two") as two,
        peer_process(name="friend") as friend,
    ):
        engine.allocate("shared", 4096, access="read-write")
        for process in (one, two):
            await process.connect(engine.address)
        exercising = asyncio.ensure_future(friend.run("adversity.work:exercise", address=engine.address, rounds=200))
        notes = engine.notifications("friend")
        for _ in range(20):
            await notes.get()
        one.kill()
        two.kill()
        assert await exercising == 200
        await until(lambda: [peer.name for peer in engine.peers] == ["friend"])


async def test_killed_while_leaving() -> None:
    """Between its goodbye and ours, or ours and its."""
    for victim_leaves in (True, False):
        async with peer_process(regions={"kv": 4096}) as process, Engine(close_timeout=60) as engine:
            peer = await engine.connect(process.address)
            await peer.region("kv")
            if victim_leaves:
                process.stop()
                leaving = asyncio.ensure_future(peer.aclose())
                await until(lambda: peer.state is PeerState.CLOSING)
                process.kill()
                await leaving
            else:
                ending = asyncio.ensure_future(_end(process))
                await until(lambda: peer.state is not PeerState.UP)
                process.kill()
                await ending
            await until(lambda: engine.stats().peers == 0)


async def _end(process: PeerProcess) -> None:
    await process.aclose()


async def test_many_deaths_leave_nothing() -> None:
    async with Engine("127.0.0.1:0", name="survivor") as engine:
        region = engine.allocate("kv", 4096, access="read-write")
        known: list[Peer] = []
        for _ in range(8):
            async with peer_process(regions={"back": 4096}) as process:
                await process.connect(engine.address)
                await process.write("survivor", "kv", b"x" * 4096)
                peer = engine.peers[0]
                await engine.write(bytes(4096), await peer.region("back"))
                known.append(peer)
                process.kill()
                await process.exited()
        await until(lambda: engine.stats().peers == 0)
        assert region.pins == 0
        assert engine.stats().remote_regions == 0
        assert all(peer.confirmed_dead for peer in known)
