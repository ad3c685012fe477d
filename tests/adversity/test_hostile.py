"""A peer that authenticates and then attacks: the loop keeps running, nothing outside its grants is touched, and other peers
are not disturbed.

The victim has memory of every kind: granted to the hostile peer for writing and for reading, granted to a friend, and to
no peer.  During the attack the friend works, the victim works with the friend, and a pulse measures the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from hixl_async import AccessError, ConnectError, Engine, HixlError, Peer, PeerState, RemoteRegion
from hixl_async.testing import PeerProcess, peer_process, until

from .hostile import ATTACKS
from .pulse import Pulse

Figure = Callable[[str, float], None]
SIZE = 1 << 20
SECONDS = 0.4


class Scene:
    """The victim and its memory."""

    def __init__(self, victim: Engine, villain: PeerProcess, friend: PeerProcess) -> None:
        self.victim, self.villain, self.friend = victim, villain, friend
        self.granted = victim.allocate("granted", SIZE, access="read-write", grant=_to("hostile"))
        self.readable = victim.allocate("readable", SIZE, access="read-write", grant=_reading)
        self.shared = victim.allocate("shared", 4096, access="read-write", grant=_to("friend"))
        self.private = victim.allocate("private", SIZE)
        self.untouched = {}
        for region in (self.readable, self.private):
            pattern = os.urandom(region.size)
            memoryview(region)[:] = pattern
            self.untouched[region] = pattern

    def check(self) -> None:
        for region, pattern in self.untouched.items():
            # As bytes: two views are compared element by element, which takes the loop of a pulse that beats 4 ms per MiB.
            assert memoryview(region).tobytes() == pattern, f"{region!r} was changed"


def _to(name: str) -> Callable[[Peer], Any]:
    return lambda peer: "read-write" if peer.name.startswith(name) else "none"


def _reading(peer: Peer) -> Any:
    return "read" if peer.name.startswith("hostile") else "none"


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with (
        peer_process(name="villain") as villain,
        peer_process(name="friend") as friend,
        Engine("127.0.0.1:0", name="victim", close_timeout=0.3) as victim,
    ):
        scene = Scene(victim, villain, friend)
        yield scene
        scene.check()
        villain.kill()
        await villain.exited()
        await until(lambda: not any(peer.name.startswith("hostile") for peer in victim._peers))
        assert scene.granted.pins == scene.readable.pins == 0


async def _use(scene: Scene, peer: Peer) -> None:
    """Go on using the hostile peer as if nothing were wrong; every error must be one of ours."""
    region = scene.victim.allocate("victim's own", 4096)
    remote: RemoteRegion | None = None
    while peer.state is PeerState.UP:
        with contextlib.suppress(HixlError):
            scene.victim.notify(peer, "to the hostile one", b"x" * 100)
            if remote is None or not remote.alive:
                remote = None
                remote = await peer.region("bogus", timeout=0.02)
            transfer = scene.victim.write(
                region[0 : min(4096, remote.size)], remote[0 : min(4096, remote.size)], timeout=0.2
            )
            await transfer
            await scene.victim.read(region[0:1], remote[remote.size - 1 : remote.size], timeout=0.2)
        with contextlib.suppress(HixlError):
            await peer.request("anything", {}, timeout=0.02)
        await asyncio.sleep(0)
    await region.drained()
    await region.aclose()


@pytest.mark.parametrize("what", ATTACKS)
async def test_an_attack_harms_no_others(scene: Scene, what: str, figure: Figure) -> None:
    victim, accepted = scene.victim, scene.victim.accepted()
    notes = victim.notifications("friend")
    exercising = asyncio.ensure_future(scene.friend.run("adversity.work:exercise", address=victim.address, rounds=30))
    await notes.get()
    await accepted.get()
    async with Pulse() as pulse:
        attacking = asyncio.ensure_future(
            scene.villain.run("adversity.hostile:attack", address=victim.address, what=what, seconds=SECONDS)
        )
        peer = await accepted.get()
        using = asyncio.ensure_future(_use(scene, peer))
        answer = await attacking
        # Whatever it did, the others were served meanwhile and are served now.
        assert await exercising == 30
        assert await scene.friend.run("adversity.work:exercise", address=victim.address, rounds=5) == 5
        scene.check()
        scene.villain.kill()
        await until(lambda: peer.state is PeerState.DOWN)
        async with asyncio.timeout(20):
            await using
    figure(f"loop stall, wall: {what}", pulse.worst)
    figure(f"loop stall, CPU:  {what}", pulse.worst_cpu)
    assert pulse.beats > 3, f"the loop did not run: {pulse}; {answer}"
    assert pulse.worst_cpu < 0.5, f"the loop was kept busy: {pulse}; {answer}"


async def test_a_peer_reaches_no_more_than_its_grants(scene: Scene) -> None:
    """Through the descriptors themselves; what processes of one user can do to each other by /proc is not covered."""
    answer = await scene.villain.run(
        "adversity.hostile:attack", address=scene.victim.address, what="write_what_is_readable", seconds=0.1
    )
    assert "PermissionError" in answer[1] or "OSError" in answer[1], answer
    assert "Error" in answer[0], answer


async def test_forwarded_descriptors_convey_the_grants_only(scene: Scene) -> None:
    """It can pass on what it was granted, and nothing else; the death that counts is its own."""
    child = await scene.villain.run("adversity.hostile:attack_and_forward", address=scene.victim.address)
    peer = scene.victim.peers[0]
    await until(lambda: bytes(memoryview(scene.granted)[:64]) != bytes(64))
    scene.villain.kill()
    await until(lambda: peer.confirmed_dead)
    await peer.fenced()
    scene.check()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, 9)


async def test_many_short_connections_keep_no_peer_out(scene: Scene, figure: Figure) -> None:
    """Hundreds of incomplete handshakes, and silent connections that stay: a friend still connects."""
    victim = scene.victim
    async with Pulse() as pulse:
        coming = asyncio.ensure_future(
            scene.villain.run("adversity.hostile:half_handshakes", address=victim.address, seconds=1.0)
        )
        assert await scene.friend.run("adversity.work:exercise", address=victim.address, rounds=20) == 20
        assert await coming > 20
    figure("loop stall, wall: half handshakes", pulse.worst)
    figure("loop stall, CPU:  half handshakes", pulse.worst_cpu)
    async with Engine() as late:
        await late.connect(victim.address, timeout=30)


async def test_a_claimed_pid_gives_no_access(scene: Scene) -> None:
    """The intruder names a third process: no memory of that process is read or written."""
    buffer = ctypes.create_string_buffer(os.urandom(64), 64)
    before = buffer.raw
    closing = []
    for pid in (os.getpid(), scene.friend.pid, 1, await scene.friend.run("adversity.work:dead_pid"), 0, 0x7FFFFFFF):
        claiming = asyncio.ensure_future(
            scene.villain.run(
                "adversity.hostile:claim_a_pid",
                address=scene.victim.address,
                pid=pid,
                target=ctypes.addressof(buffer),
            )
        )
        accepted = scene.victim.accepted()
        peer = await accepted.get()
        with pytest.raises(AccessError, match="can't be reached|forbids"):
            await peer.region("stolen")
        assert await claiming == "region.gone"
        assert buffer.raw == before
        closing.append(asyncio.ensure_future(peer.aclose()))  # it gets no goodbye
    await asyncio.gather(*closing)


async def test_an_impostor_takes_no_peers_place(scene: Scene) -> None:
    """It claims to be the friend; a dialler of the friend's address gets the friend all the same."""
    true = await scene.friend.run("adversity.work:who")
    await scene.villain.run(
        "adversity.hostile:impersonate",
        address=scene.victim.address,
        other=scene.friend.address,
        incarnation=true["incarnation"],
    )
    impostor = scene.victim.peers[0]
    assert (impostor.name, impostor.address) == ("friend", scene.friend.address)
    peer = await scene.victim.connect(scene.friend.address)
    assert peer is not impostor
    assert (await peer.request("adversity.who", {}))["pid"] == scene.friend.pid


async def test_a_hostile_listener(scene: Scene) -> None:
    """The same at the other end: the listener is hostile."""
    for step in ("established", "listening", "linked"):
        address = await scene.villain.run("adversity.hostile:stage_that_stops", step=step)
        with pytest.raises(ConnectError):
            await scene.victim.connect(address, timeout=0.3)


async def test_close_during_an_attack() -> None:
    for what in ("flood_control", "scribble", "flood_notes"):
        async with peer_process(name="villain") as villain, Engine("127.0.0.1:0", close_timeout=0.5) as victim:
            victim.allocate("granted", SIZE, access="read-write")
            readable = victim.allocate("readable", SIZE, access="read")
            attacking = asyncio.ensure_future(
                villain.run("adversity.hostile:attack", address=victim.address, what=what, seconds=5)
            )
            await until(lambda: readable.pins == 1)
            async with asyncio.timeout(20):
                await victim.aclose()
            villain.kill()
            await asyncio.gather(attacking, return_exceptions=True)
