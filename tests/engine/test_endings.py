"""The end of a connection: what each side hears, in which order, and that nothing said before is lost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from passes import settle
from puppet import ARMED, GONE, HEAD, puppet

from hixl_async import (
    ClosedError,
    Engine,
    HixlError,
    InvalidArgumentError,
    PeerDownError,
    PeerLostError,
    PeerState,
    RequestLostError,
)
from hixl_async.engine.session import Mark
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until

# -- both at once


@pytest.mark.parametrize("ticks", range(8))
async def test_both_sides_close_at_once(ticks: int) -> None:
    """Whichever side is faster: a leave is never reported as a loss, and nothing waits for its timeout."""
    async with engine_pair(close_timeout=30) as pair:
        lost: list[Any] = []
        pair.peer.add_lost_callback(lost.append)
        pair.back.add_lost_callback(lost.append)
        closing = asyncio.ensure_future(pair.left.aclose())
        await settle(ticks)
        async with asyncio.timeout(10):
            await asyncio.gather(closing, pair.right.aclose())
        assert len(lost) == 2
        assert all("closed here" in str(error) or "left" in str(error) for error in lost), lost
        assert pair.peer.state is pair.back.state is PeerState.DOWN


@pytest.mark.parametrize("ticks", range(8))
async def test_both_peers_close_at_once_with_work_in_flight(ticks: int) -> None:
    async with engine_pair(close_timeout=30) as pair:
        _, remote = await pair.region("kv", 8 << 20)
        back = await pair.back.region(pair.left.allocate("back", 8 << 20, access="write").name)
        transfers = [
            pair.left.write(bytes(8 << 20), remote, notify=("t", b"x")),
            pair.right.write(bytes(8 << 20), back, notify=("t", b"x")),
        ]
        closing = asyncio.ensure_future(pair.peer.aclose())
        await settle(ticks)
        async with asyncio.timeout(10):
            await asyncio.gather(closing, pair.back.aclose(), pair.peer.aclose())
        for transfer in transfers:
            await transfer.drained()
            with contextlib.suppress(PeerLostError):
                await transfer
        for engine in (pair.left, pair.right):
            await until(lambda engine=engine: engine.stats().peers == 0)
            assert engine.stats().pinned == 0
        again = await pair.left.connect(pair.right.address)
        assert (await again.region("kv")).size == 8 << 20


async def test_closing_a_peer_that_is_leaving(pair: EnginePair) -> None:
    """A local `aclose` joins the end that the peer's goodbye began, and does not cut it short."""
    for _ in range(10):
        closing = asyncio.ensure_future(pair.peer.aclose())
        await until(lambda: pair.back.state is not PeerState.UP)
        await pair.back.aclose()
        await closing
        assert isinstance(pair.back.error, PeerDownError)
        assert "left" in str(pair.back.error)
        accepted = pair.right.accepted()
        peer = await pair.left.connect(pair.right.address)
        pair = pair._replace(peer=peer, back=await accepted.get())


# -- what was said before the end


@pytest.mark.parametrize("end", ["engine", "peer"])
async def test_notes_sent_right_before_leaving_arrive(end: str) -> None:
    async with engine_pair() as pair:
        notes = pair.right.notifications()
        for i in range(2000):
            await pair.left.notify(pair.peer, "t", i.to_bytes(2, "big"))
        await (pair.left if end == "engine" else pair.peer).aclose()
        assert pair.right.stats().notifications == 2000
        assert [(await notes.get()).payload for _ in range(2000)] == [i.to_bytes(2, "big") for i in range(2000)]


async def test_notes_to_a_leaving_peer_arrive(pair: EnginePair) -> None:
    """The other direction: notifications in the ring of a leaving engine are still delivered to it."""
    notes = pair.left.notifications()
    await asyncio.gather(*(pair.right.notify(pair.back, "t", bytes([i])) for i in range(50)))
    await pair.peer.aclose()
    assert len(notes) == 50


async def test_the_loss_is_reported_after_the_notes() -> None:
    async with engine_pair() as pair:
        order: list[str] = []
        pair.back.add_lost_callback(lambda error: order.append("lost"))
        notes = pair.right.notifications("t")

        async def read() -> None:
            async for note in notes:
                order.append(note.payload.decode())

        reading = asyncio.ensure_future(read())
        await settle(3)
        await pair.left.notify(pair.peer, "t", b"last words")
        await pair.left.aclose()
        await until(lambda: len(order) == 2)
        assert sorted(order) == ["last words", "lost"]
        reading.cancel()


# -- a link that breaks


async def test_a_link_that_ends_without_goodbye(engine: Engine) -> None:
    """No new work at once; lost after a moment in which a goodbye might explain it."""
    engine.allocate("kv", 8, access="write")
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        assert actor.link is not None
        actor.link.theirs[GONE] = 1
        actor.link.ring()
        await until(lambda: peer.state is not PeerState.UP)
        with pytest.raises(HixlError):
            engine.notify(peer, "t", b"x")
        await until(lambda: peer.state is PeerState.DOWN)
        with pytest.raises(PeerDownError, match="the link to peer 'puppet' ended"):
            await peer.request("hixl.ping", {})


async def test_a_link_that_breaks_on_one_side_only() -> None:
    """The other side hears of it at once, although work that does not stop keeps the goodbye back."""
    plan = FaultPlan(seed=1).late(verb="write")
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        region, remote = await pair.region()
        offered = pair.left.allocate("offered", 8, access="write")
        await until(lambda: "offered" in pair.back.regions)
        transfer = pair.left.write(b"12345678", remote[0:8])
        pair.left.serve("never", lambda peer, body: asyncio.get_running_loop().create_future())
        asked = asyncio.ensure_future(pair.back.request("never", {}, timeout=60))
        await settle(20)
        plan.break_links()
        async with asyncio.timeout(5):
            await until(lambda: pair.back.state is PeerState.DOWN)
            for asking, kind in ((asked, RequestLostError), (pair.back.region("offered"), PeerDownError)):
                with pytest.raises(kind, match="peer 'left' lost its link to us: broken by the fault plan") as caught:
                    await asking
                assert type(caught.value) is kind
        with pytest.raises(PeerLostError, match="broken by the fault plan"):
            await transfer
        # Memory that may still be written stays pinned.
        assert region.pins == 1
        assert not pair.back.confirmed_dead
        assert not transfer.drained().done()
        await offered.aclose()
        plan.release()
        await transfer.drained()
        await pair.back.fenced()
        await until(lambda: region.pins == 0)


async def test_closing_a_peer_does_not_wait_for_a_driver_that_holds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The goodbye is said when the memory is released, because until then the driver may still write."""
    monkeypatch.setattr("hixl_async.engine.peer.STOP_GRACE", 0.05)
    plan = FaultPlan(seed=1).late(verb="write")
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.1) as pair:
        region, remote = await pair.region()
        transfer = pair.left.write(b"12345678", remote[0:8])
        async with asyncio.timeout(5):
            await pair.peer.aclose()
        assert pair.peer.state is PeerState.DOWN
        assert isinstance(transfer.exception(), PeerLostError)
        assert not transfer.drained().done()
        assert region.pins == 1
        plan.release()
        await transfer.drained()
        await pair.back.fenced()
        await until(lambda: region.pins == 0)
        await until(lambda: pair.left.stats().peers == 0)


async def test_a_goodbye_that_follows_its_link_explains_it(engine: Engine) -> None:
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        assert actor.link is not None
        actor.link.theirs[GONE] = 1
        actor.link.ring()
        await until(lambda: peer.state is PeerState.CLOSING)
        actor.say("goodbye")
        await actor.hear("goodbye")
        await until(lambda: peer.state is PeerState.DOWN)
        assert str(peer.error) == "peer 'puppet' left"
        await peer.fenced()


async def test_a_goodbye_before_its_link_ends(engine: Engine) -> None:
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        actor.say("goodbye")
        await actor.hear("goodbye")
        assert str(peer.error or "") in ("", "peer 'puppet' left")
        await peer.fenced()
        await until(lambda: engine.stats().peers == 0)


async def test_a_goodbye_that_is_never_answered() -> None:
    """It is waited for as long as `close_timeout`; the memory does not count as free before the peer is dead."""
    async with Engine("127.0.0.1:0", close_timeout=0.2) as engine, puppet(engine.address) as actor:
        region = engine.allocate("kv", 4096, access="write")
        await actor.get("kv")
        peer = engine.peers[0]
        start = asyncio.get_running_loop().time()
        await peer.aclose()
        assert 0.18 < asyncio.get_running_loop().time() - start < 10
        assert region.pins == 1
        fencing = asyncio.ensure_future(peer.fenced())
        await settle()
        assert not fencing.done()
        fencing.cancel()


async def test_a_broken_connection_is_not_a_goodbye(engine: Engine) -> None:
    """While we wait for its goodbye: the end of a socket proves nothing, the memory stays pinned."""
    region = engine.allocate("kv", 4096, access="write")
    async with puppet(engine.address) as actor:
        await actor.get("kv")
        peer = engine.peers[0]
        closing = asyncio.ensure_future(peer.aclose())
        await actor.hear("goodbye")
        await actor.connection.aclose()
        await closing
        assert peer.state is PeerState.DOWN
        assert region.pins == 1


async def test_a_broken_link_leaves_no_memory_behind() -> None:
    """Link and connection are separate: if one breaks, the two sides still part properly over the other."""
    plan = FaultPlan(seed=1)
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=30) as pair:
        region, remote = await pair.region("kv", 64)
        back = pair.left.allocate("back", 64, access="write")
        await pair.right.write(bytes(64), await pair.back.region("back"))
        plan.drop_peer(nth=1)
        with pytest.raises(PeerLostError, match="broken by the fault plan"):
            await pair.left.write(bytes(64), remote)
        await asyncio.gather(pair.peer.fenced(), pair.back.fenced())
        assert region.pins == back.pins == 0
        for peer in (pair.peer, pair.back):
            await until(lambda peer=peer: peer.state is PeerState.DOWN)
        await until(lambda: pair.left.stats().peers == pair.right.stats().peers == 0)
        again = await pair.left.connect(pair.right.address)
        await pair.left.write(bytes(64), await again.region("kv"))


async def test_nothing_waits_for_a_peer_that_cannot_answer(engine: Engine) -> None:
    region = engine.allocate("kv", 4096, access="write")
    async with puppet(engine.address) as actor:
        await actor.get("kv")
        await actor.connection.aclose()
        await until(lambda: not engine.peers)
        start = asyncio.get_running_loop().time()
        await region.aclose()
        assert asyncio.get_running_loop().time() - start < 0.9, "the engine's close_timeout is a second"
        assert region.pins == 1


async def test_messages_after_the_end_still_count(engine: Engine) -> None:
    """The link broke and the grace is over: a late "gone", and a late goodbye, are heard."""
    first, second = (engine.allocate(name, 4096, access="write") for name in ("first", "second"))
    async with puppet(engine.address) as actor:
        await actor.get("first")
        await actor.get("second")
        peer = engine.peers[0]
        assert actor.link is not None
        actor.link.theirs[GONE] = 1
        actor.link.ring()
        await actor.hear("goodbye")
        await until(lambda: peer.state is PeerState.DOWN)
        assert first.pins == second.pins == 1
        actor.say("region.gone", id=first._number)
        await until(lambda: first.pins == 0)
        assert second.pins == 1
        actor.say("goodbye")
        await peer.fenced()
        assert second.pins == 0
        await until(lambda: engine.stats().peers == 0)


async def test_a_peer_comes_back_before_its_earlier_transfers_end() -> None:
    """A transfer of the earlier connection is still in flight, so its owner is not told that all of that is over."""
    plan = FaultPlan(seed=1).late(nth=1, verb="write")
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=1) as pair:
        region, remote = await pair.region("kv", 64)
        late = pair.left.write(bytes(64), remote)
        pair.peer._connection.abort(PeerDownError("cut"))
        for peer in (pair.peer, pair.back):
            await until(lambda peer=peer: peer.state is PeerState.DOWN)
        again = await pair.left.connect(pair.right.address)
        await pair.left.write(bytes(64), await again.region("kv"))
        assert region.pins == 2
        assert not pair.back._session.has(Mark.FENCED)
        await again.aclose()
        plan.release()
        with contextlib.suppress(PeerLostError):
            await late
        await late.drained()
        await until(lambda: pair.peer._session.has(Mark.WOUND_DOWN))
        await pair.left.connect(pair.right.address)
        await pair.back.fenced()
        assert region.pins == 0


async def test_work_in_flight_when_the_peer_leaves() -> None:
    plan = FaultPlan(seed=1).hold()
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        _, remote = await pair.region("kv", 4096)
        transfer = pair.left.write(bytes(4096), remote)
        await pair.right.aclose()
        with pytest.raises(PeerLostError):
            await transfer
        await transfer.drained()


async def test_failing_callbacks_disturb_nothing(pair: EnginePair, loop_errors: list[dict[str, Any]]) -> None:
    heard: list[str] = []
    pair.back.add_lost_callback(lambda error: 1 / 0)
    pair.back.add_lost_callback(lambda error: heard.append("lost"))
    pair.back.add_signal_callback(lambda: 1 / 0)
    pair.back.add_signal_callback(lambda: heard.append("signal"))
    _, remote = await pair.region("kv", 8)
    await pair.left.write(b"12345678", remote, signal=(remote[0:8], 7))
    await until(lambda: heard == ["signal"])
    await pair.left.aclose()
    await until(lambda: heard == ["signal", "lost"])
    assert len(loop_errors) == 2
    loop_errors.clear()
    for add in (pair.back.add_lost_callback, pair.back.add_signal_callback):
        with pytest.raises(InvalidArgumentError, match="callback must be a function, not None"):
            add(None)  # type: ignore[arg-type]
    pair.back.remove_lost_callback(print)
    pair.back.remove_signal_callback(print)


async def test_calls_before_the_loss_of_a_connection_is_reported(engine: Engine) -> None:
    """Between the break of the socket and its report by the loop: errors of the right class, and no other effect."""
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        peer._connection.abort(PeerDownError("cut"))
        assert peer.state is PeerState.UP
        with pytest.raises(PeerDownError):
            peer.post("anything", {})
        with pytest.raises(PeerDownError):
            await peer.request("anything", {})
        region = engine.allocate("new", 8, access="read")
        assert engine.regions == {"new": region}
        del actor


# -- a peer that breaks the protocol


SAYINGS: dict[str, dict[str, Any]] = {
    "unknown": {"kind": "hello-again"},
    "link again": {"kind": "link", "driver": "shm", "metadata": ""},
    "ready again": {"kind": "ready"},
    "region.up without a name": {"kind": "region.up", "id": 1, "size": 1, "access": 1},
    "region.up with odd rights": {"kind": "region.up", "name": "x", "id": 1, "size": 1, "access": 999},
    "region.up without rights": {"kind": "region.up", "name": "x", "id": 1, "size": 1, "access": 0},
    "region.up with a huge name": {"kind": "region.up", "name": "x" * 300, "id": 1, "size": 1, "access": 1},
    "region.up with a negative number": {"kind": "region.up", "name": "x", "id": -1, "size": 1, "access": 1},
    "region.down of nothing": {"kind": "region.down"},
    "region.get of text": {"kind": "region.get", "call": 1, "id": "kv"},
    "region.gone of nothing": {"kind": "region.gone"},
    "call without a service": {"kind": "call", "call": 1, "body": {}},
    "call with a list": {"kind": "call", "call": 1, "service": "hixl.ping", "body": []},
    "call with a flag for a number": {"kind": "call", "call": True, "service": "hixl.ping", "body": {}},
    "post without a body": {"kind": "post", "service": "hixl.ping"},
    "answer without a number": {"kind": "answer", "body": {}},
    "failure without a number": {"kind": "failure", "error": "x", "message": "y"},
}


@pytest.mark.parametrize("saying", SAYINGS)
async def test_nonsense_ends_its_connection_only(engine: Engine, saying: str) -> None:
    async with Engine(name="friend") as friend, puppet(engine.address) as actor:
        await friend.connect(engine.address)
        await until(lambda: len(engine.peers) == 2)
        actor.say(**SAYINGS[saying])
        await actor.lost
        await until(lambda: len(engine.peers) == 1)
        assert await friend.peers[0].request("hixl.ping", {"n": 1}) == {"n": 1}


@pytest.mark.parametrize(
    "kind", ["goodbye", "region.gone", "answer", "call", "region.get", "region.up", "post", "unknown"]
)
async def test_messages_out_of_turn_before_it_is_up(engine: Engine, kind: str) -> None:
    from puppet import Puppet

    actor = await Puppet.dial(engine.address)
    actor.start()
    actor.say(kind, call=1, id=1, name="x", size=1, access=1, service="hixl.ping", body={})
    await actor.lost
    await until(lambda: engine.stats().peers == 0)
    await actor.aclose()


@pytest.mark.parametrize("kind", ["region.gone", "answer", "call", "post", "goodbye", "region.up"])
async def test_unexpected_descriptors_are_closed(engine: Engine, kind: str) -> None:
    """All of them are closed, as the balance sheet shows, and nothing else happens."""
    import os

    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        fds = [os.memfd_create("stray") for _ in range(4)]
        body = {"call": 1, "id": 1, "name": "x", "size": 1, "access": 1, "service": "hixl.ping", "body": {}}
        actor.say(kind, fds=fds, **body)
        for fd in fds:
            os.close(fd)
        await actor.lost
        await until(lambda: not any("stray" in _target(fd) for fd in os.listdir("/proc/self/fd")))


def _target(fd: str) -> str:
    import os

    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


async def test_a_link_right_after_nonsense(engine: Engine) -> None:
    """The connection is lost by the first message; the second one must not wake a link that is gone."""
    from puppet import Puppet, ShmEnd, text

    for last in ("link", "ready", "region.get"):
        actor = await Puppet.dial(engine.address)
        actor.start()
        offer = await actor.hear("link")
        actor._fds.clear()
        link = ShmEnd(offer.fds)
        actor.link = link
        actor.say("nonsense")
        if last == "link":
            actor.say("link", driver="shm", metadata=text(link.metadata), fds=link.fds)
        else:
            actor.say(last, call=1, id=1)
        await actor.lost
        await until(lambda: engine.stats().peers == 0)
        await actor.aclose()
    async with Engine() as friend:
        await friend.connect(engine.address)


async def test_a_link_metadata_over_the_limit(engine: Engine) -> None:
    import os

    from puppet import Puppet, text

    for metadata in (bytes(1025), bytes(3), b"", bytes(40)):
        actor = await Puppet.dial(engine.address)
        actor.start()
        await actor.hear("link")
        fds = [os.memfd_create("stray") for _ in range(3)]
        actor.say("link", driver="shm", metadata=text(metadata), fds=fds)
        for fd in fds:
            os.close(fd)
        await actor.lost
        await until(lambda: not any("stray" in _target(fd) for fd in os.listdir("/proc/self/fd")))
        await actor.aclose()


async def test_too_many_regions(engine: Engine) -> None:
    from hixl_async.engine.regions import MAX_OFFERS

    async with puppet(engine.address) as actor:
        for number in range(MAX_OFFERS):
            actor.say("region.up", name=f"region {number}", id=number, size=1, access=1)
            if number % 100 == 0:
                await until(lambda: not actor.connection._queue)
        await until(lambda: len(engine.peers[0].regions) == MAX_OFFERS)
        actor.say("region.up", name="region 7", id=9999, size=1, access=2)
        actor.say("region.up", name="one more", id=9998, size=1, access=1)
        await actor.lost
        assert actor.link is not None
        assert actor.link.theirs[HEAD] == 0
        assert actor.link.ours[ARMED] in (0, 1)


async def test_close_with_a_peer_that_went_silent() -> None:
    """The engine's own close is bounded, although a peer never answers."""
    async with Engine("127.0.0.1:0", close_timeout=0.2) as engine, puppet(engine.address):
        await until(lambda: engine.peers)
        async with asyncio.timeout(20):
            await engine.aclose()
        with pytest.raises(ClosedError):
            engine.allocate("kv", 1)
