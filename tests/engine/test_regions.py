"""Regions: their rights, their lifetime, and what is left of them."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from passes import settle
from puppet import mem_metadata, puppet, segment, stage, text

from hixl_async import (
    Access,
    AccessError,
    AccessLike,
    BusyError,
    ClosedError,
    Engine,
    HixlError,
    InvalidArgumentError,
    Peer,
    PeerDownError,
    PeerState,
    ProtocolError,
    Region,
    RemoteRegion,
    StaleRegionError,
    WaitTimeoutError,
)
from hixl_async.control.scheduler import Progress
from hixl_async.engine import regions
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until

WORDS: list[AccessLike] = ["none", "read", "write", "read-write"]


# -- memory


@pytest.mark.parametrize("size", [1, 7, 4096, 4097, 1 << 20])
async def test_new_memory_is_zeroed_and_moves_both_ways(pair: EnginePair, size: int) -> None:
    region, remote = await pair.region("kv", size)
    assert bytes(memoryview(region)) == bytes(size)
    assert len(region) == len(remote) == region.size == remote.size == size
    data = bytes(i % 251 for i in range(size))
    await pair.left.write(data, remote)
    assert bytes(memoryview(region)) == data
    back = bytearray(size)
    await pair.left.read(back, remote[0:size])
    assert back == data


async def test_local_regions_as_both_sides(pair: EnginePair) -> None:
    region, remote = await pair.region("kv", 64)
    local = pair.left.allocate("local", 64)
    memoryview(local)[:8] = b"12345678"
    await pair.left.write(local[2:6], remote[10:14])
    assert bytes(memoryview(region)[8:16]) == b"\0\0003456\0\0"
    await pair.left.read(local[20:24], remote[10:14])
    assert bytes(memoryview(local)[20:24]) == b"3456"
    await pair.left.write(local, remote)
    assert bytes(memoryview(region)) == bytes(memoryview(local))


async def test_slices_of_slices(pair: EnginePair) -> None:
    region, remote = await pair.region("kv", 100)
    part = remote[10:50][5:20]
    assert (part.offset, len(part)) == (15, 15)
    await pair.left.write(b"x" * 15, part)
    assert bytes(memoryview(region)[14:31]) == b"\0" + b"x" * 15 + b"\0"
    assert len(remote[20:20]) == 0


async def test_views(pair: EnginePair) -> None:
    region, remote = await pair.region("kv", 64)
    array = region.numpy("float32", (4, 4))
    array[1, 2] = 1.5
    back = numpy.zeros(16, "float32")
    await pair.left.read(back, remote)
    assert back[6] == 1.5
    assert memoryview(region[24:28]).cast("f")[0] == 1.5
    assert region.numpy().shape == (64,)
    await pair.left.write(numpy.arange(16, dtype="float32"), remote)
    assert array[3, 3] == 15


NO_DTYPES: list[Any] = [
    True,
    3,
    object(),
    "\ud800",
    "nonsense",
    "O",
    "S0",
    "3,(",
    b"\xff",
    {},
    (1,),
    numpy.zeros(3),
    "i,i,i,i,i",
]


async def test_views_that_do_not_fit(engine: Engine) -> None:
    region = engine.allocate("kv", 64)
    for dtype in NO_DTYPES:
        with pytest.raises(InvalidArgumentError, match="dtype"):
            region.numpy(dtype)
    shapes: list[Any] = ["x", (3,), (1.5,), (2**70,), [[1]], {}]
    for shape in shapes:
        with pytest.raises(InvalidArgumentError, match="shape"):
            region.numpy("uint8", shape)


async def test_views_outlive_region_and_engine() -> None:
    async with engine_pair() as pair:
        region, remote = await pair.region("kv", 4096)
        await pair.left.write(b"x" * 4096, remote)
        view, piece = region.numpy(), memoryview(region[8:16])
        await region.aclose()
        assert pair.right.stats().regions == 1  # a gauge of what is still there
        with pytest.raises(ClosedError, match="closed"):
            memoryview(region)
        with pytest.raises(ClosedError, match="closed"):
            memoryview(region[0:1])
    assert view.tobytes() == b"x" * 4096
    view[8:16] = 1
    assert bytes(piece) == b"\1" * 8
    assert pair.right.stats().regions == 1
    del view
    assert pair.right.stats().regions == 1
    piece.release()
    assert pair.right.stats().regions == 0


@pytest.mark.parametrize("when", ["while open", "after close"])
async def test_the_last_view_is_dropped_in_another_thread(when: str) -> None:
    async with engine_pair() as pair:
        region, _ = await pair.region("kv", 4096)
        views = [region.numpy()]
        await region.aclose()
        if when == "while open":
            await asyncio.to_thread(views.clear)
            await until(lambda: pair.right.stats().regions == 0)
    if when == "after close":
        thread = threading.Thread(target=views.clear)
        thread.start()
        thread.join()
    assert pair.right.stats().regions == 0


async def test_more_than_the_machine_has(engine: Engine) -> None:
    with pytest.raises(HixlError, match=r"allocation of \d+ bytes"):
        engine.allocate("kv", 1 << 60)
    engine.allocate("kv", 10)


# -- rights


@pytest.mark.parametrize("granted", WORDS)
async def test_rights(pair: EnginePair, granted: AccessLike) -> None:
    region = pair.right.allocate("kv", 8, access=granted)
    memoryview(region)[:] = b"original"
    other = pair.right.allocate("other", 8, access="read")
    await pair.peer.region(other.name)
    if granted == "none":
        assert pair.peer.regions == {"other": Access.READ}
        with pytest.raises(WaitTimeoutError, match="'kv'.*exports: other"):
            await pair.peer.region("kv", timeout=0.01)
        return
    remote = await pair.peer.region("kv")
    assert remote.access == Access.parse(granted) == pair.peer.regions["kv"]
    buffer = bytearray(8)
    if "read" in granted:
        await pair.left.read(buffer, remote)
        assert buffer == b"original"
    else:
        with pytest.raises(AccessError, match="does not grant 'read'.*access="):
            pair.left.read(buffer, remote)
    if "write" in granted:
        await pair.left.write(b"replaced", remote)
        assert bytes(memoryview(region)) == b"replaced"
    else:
        with pytest.raises(AccessError, match="does not grant 'write'.*access="):
            pair.left.write(b"replaced", remote)
        assert bytes(memoryview(region)) == b"original"


async def test_grants_differ_by_peer(engine: Engine) -> None:
    grants: dict[str, AccessLike] = {"reader": "read", "writer": "read-write", "stranger": "none"}
    engine.allocate("kv", 8, access="read-write", grant=lambda peer: grants[peer.name])
    engine.allocate("marker", 1, access="read")
    for name, granted in grants.items():
        async with Engine(name=name) as other:
            peer = await other.connect(engine.address)
            await peer.region("marker")
            assert peer.regions.get("kv", Access.NONE) == Access.parse(granted)


async def test_a_grant_never_exceeds_the_access(engine: Engine) -> None:
    engine.allocate("kv", 8, access="read", grant=lambda peer: "read-write")
    async with Engine() as other:
        remote = await (await other.connect(engine.address)).region("kv")
        assert remote.access == Access.READ


@pytest.mark.parametrize("grant", [lambda peer: 1 / 0, lambda peer: "everything", lambda peer: None])
async def test_a_grant_that_fails_gives_nothing(engine: Engine, loop_errors: list[dict[str, Any]], grant: Any) -> None:
    async with Engine(name="other") as other:
        before = engine.accepted()
        peer = await other.connect(engine.address)
        await before.get()
        engine.allocate("kv", 8, access="read", grant=grant)
        engine.allocate("marker", 1, access="read")
        await peer.region("marker")
        assert peer.regions == {"marker": Access.READ}
    assert loop_errors
    assert all("gives" in e["message"] or "given nothing" in e["message"] for e in loop_errors)
    loop_errors.clear()


# -- lookup


async def test_a_region_is_waited_for(pair: EnginePair) -> None:
    waiting = [asyncio.ensure_future(pair.peer.region("late")) for _ in range(3)]
    await settle()
    assert not any(task.done() for task in waiting)
    pair.right.allocate("other", 8, access="read")
    pair.right.allocate("late", 8, access="read")
    remotes = await asyncio.gather(*waiting)
    assert remotes[0] is remotes[1] is remotes[2]
    assert await pair.peer.region("late") is remotes[0]
    assert pair.left.stats().remote_regions == 1


async def test_regions_that_are_never_exported(pair: EnginePair) -> None:
    pair.right.allocate("kv", 8, access="read")
    await pair.peer.region("kv")
    for _ in range(100):
        with pytest.raises(WaitTimeoutError, match=r"'nothing' within 0\.001 s; it exports: kv"):
            await pair.peer.region("nothing", timeout=0.001)
    assert not pair.peer._imports._waiters
    with pytest.raises(HixlError, match="name must be a printable string of 1 to 256 bytes"):
        await pair.peer.region(7)  # type: ignore[arg-type]


async def test_a_long_wait_is_logged_once(
    pair: EnginePair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kv", "weights"):
        pair.right.allocate(name, 8, access="read")
    await pair.peer.region("weights")
    monkeypatch.setattr(regions, "PATIENCE", 0.001)
    monkeypatch.setattr(regions, "NAMES_SHOWN", 1)
    with caplog.at_level(logging.INFO, "hixl_async"):
        waiting = asyncio.ensure_future(pair.peer.region("kvv"))
        await until(lambda: caplog.records)
        for name in ("woken", "kvv"):
            pair.right.allocate(name, 8, access="read")
        await waiting
    (record,) = caplog.records
    assert "'right' did not export region 'kvv' within 0.001 s; it exports: kv and 1 more (" in record.getMessage()


async def test_a_short_wait_is_not_logged(pair: EnginePair, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[asyncio.TimerHandle] = []
    call_later = pair.left.loop.call_later
    loop = SimpleNamespace(call_later=lambda *args: timers.append(call_later(*args)) or timers[-1])
    monkeypatch.setattr(pair.peer._imports, "_loop", loop)
    waiting = asyncio.ensure_future(pair.peer.region("late"))
    await until(lambda: timers)
    pair.right.allocate("late", 8, access="read")
    await waiting
    assert timers[0].cancelled()


async def test_the_peer_leaves_during_a_wait_for_a_region() -> None:
    async with engine_pair() as pair:
        waiting = asyncio.ensure_future(pair.peer.region("never"))
        await settle()
        await pair.right.aclose()
        with pytest.raises(PeerDownError, match="'right' left"):
            await waiting


async def test_a_waiter_that_gives_up_does_not_disturb_the_others() -> None:
    async with Engine() as engine, stage() as theatre:
        connecting = asyncio.ensure_future(engine.connect(theatre.address))
        actor = await theatre.puppets.get()
        await actor.up()
        peer = await connecting
        actor.say("region.up", id=1, name="kv", size=4096, access=3)
        tasks = [asyncio.ensure_future(peer.region("kv")) for _ in range(3)]
        request = await actor.hear("region.get")
        tasks[0].cancel()
        await settle()
        fd = segment(4096)
        actor.say(
            "region.metadata",
            fds=[fd],
            call=request.body["call"],
            driver="shm",
            metadata=text(mem_metadata(4096)),
            size=4096,
            access=3,
        )
        assert await tasks[1] is await tasks[2]
        assert tasks[0].cancelled()
        assert not actor.heard("region.get")
        import os

        os.close(fd)


async def test_the_route_states_the_driver_and_the_reason(pair: EnginePair) -> None:
    _, remote = await pair.region("kv", 8)
    assert pair.peer.route("kv") == pair.peer.route(remote)
    assert "shm: first of this engine's drivers that can import 'kv', the only one" in pair.peer.route(remote)
    with pytest.raises(HixlError, match="not imported"):
        pair.peer.route("nothing")
    back = await pair.back.region(pair.left.allocate("back", 8, access="read").name)
    for wrong in (5, None, b"kv", [], ["kv"], remote[0:8], pair.left.allocate("local", 8), back):
        with pytest.raises(InvalidArgumentError, match="^region must be"):
            pair.peer.route(wrong)  # type: ignore[arg-type]


# -- close


async def test_a_closed_region_is_stale_for_its_users(pair: EnginePair) -> None:
    region, remote = await pair.region("kv", 8)
    batch_target = remote[0:4]
    await region.aclose()
    assert pair.right.stats().regions == 0
    with pytest.raises(StaleRegionError, match=r"'kv'.*closed by its owner"):
        pair.left.write(b"12345678", remote)
    with pytest.raises(StaleRegionError):
        pair.left.read(bytearray(4), batch_target)
    assert pair.peer.regions == {}
    assert pair.left.stats().remote_regions == 0
    with pytest.raises(WaitTimeoutError):
        await pair.peer.region("kv", timeout=0.01)
    assert pair.right.regions == {}


async def test_a_name_can_be_used_again_after_close(pair: EnginePair) -> None:
    first, old = await pair.region("kv", 8)
    await first.aclose()
    second, new = await pair.region("kv", 16)
    assert old is not new
    assert new.size == 16
    with pytest.raises(StaleRegionError):
        pair.left.write(b"12345678", old)
    await pair.left.write(b"x" * 16, new)
    assert bytes(memoryview(second)) == b"x" * 16


async def test_revoking_frees_the_name_at_once_and_aclose_waits_for_the_users(pair: EnginePair) -> None:
    region, remote = await pair.region("kv", 8)
    region.revoke()
    region.revoke()
    assert not region.alive
    async with pair.right.allocate("kv", 16, access="read"):
        assert pair.right.stats().regions == 2, "the peer uses the first one still"
    await region.aclose()
    with pytest.raises(StaleRegionError, match="closed by its owner"):
        pair.left.write(b"12345678", remote)
    assert pair.right.stats().regions == 0


async def test_close_twice_at_once_and_in_a_with_block(pair: EnginePair) -> None:
    region, _ = await pair.region("kv", 8)
    await asyncio.gather(region.aclose(), region.aclose())
    await region.aclose()
    async with pair.right.allocate("kv", 8, access="read") as again:
        await pair.peer.region("kv")
    assert not again.alive
    await pair.right.aclose()
    await again.aclose()


async def test_close_waits_for_transfers_of_peers() -> None:
    plan = FaultPlan(seed=1).delay(0.1, verb="write")
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        region, remote = await pair.region("kv", 4096)
        view = memoryview(region)
        transfer = pair.left.write(b"x" * 4096, remote)
        await region.aclose()
        assert transfer.done()
        assert transfer.result() == 4096
        assert bytes(view) == b"x" * 4096


async def test_close_waits_for_own_transfers() -> None:
    plan = FaultPlan(seed=1).delay(0.1, verb="write")
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        _, remote = await pair.region("kv", 4096)
        local = pair.left.allocate("local", 4096)
        transfer = pair.left.write(local, remote)
        await local.aclose()
        assert transfer.done()
        assert transfer.result() == 4096


async def test_memory_stays_pinned_while_a_peer_may_still_write_it(caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan(seed=1).late(verb="write")
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.2) as pair:
        region, remote = await pair.region("kv", 4096)
        transfer = pair.left.write(b"x" * 4096, remote)
        transfer.cancel()
        with caplog.at_level(logging.WARNING, "hixl_async"):
            await region.aclose()
        assert "its users ('left') did not release it" in caplog.text
        assert pair.right.stats().regions == 1
        assert region.pins == 1
        plan.release()
        await region.aclose()
        assert region.pins == 0
        assert pair.right.stats().regions == 0


async def test_a_signal_that_is_still_to_come_keeps_the_region() -> None:
    plan = FaultPlan(seed=1).late(verb="write")
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.2) as pair:
        _, remote = await pair.region("kv", 4096)
        words, remote_words = await pair.region("words", 64)
        transfer = pair.left.write(b"x" * 4096, remote, signal=(remote_words[8:16], 7))
        await words.aclose()
        assert words.pins == 1
        plan.release()
        await transfer
        await words.aclose()
        assert words.pins == 0


async def test_a_cancelled_close_has_withdrawn_the_region_all_the_same() -> None:
    plan = FaultPlan(seed=1).late(verb="write")
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        region, remote = await pair.region("kv", 4096)
        transfer = pair.left.write(b"x" * 4096, remote)
        closing = asyncio.ensure_future(region.aclose())
        await settle()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await until(lambda: not remote.alive)
        assert region.pins == 1
        plan.release()
        await transfer
        await region.aclose()
        assert region.pins == 0


async def test_regions_of_a_peer_that_left(pair: EnginePair) -> None:
    _, remote = await pair.region("kv", 8)
    mine, theirs = pair.left.allocate("back", 8, access="write"), await pair.back.region("back")
    await pair.right.write(b"12345678", theirs)
    assert mine.pins == 1
    await pair.right.aclose()
    await until(lambda: mine.pins == 0)
    with pytest.raises(PeerDownError, match="connect again"):
        pair.left.write(b"12345678", remote)
    assert pair.left.stats().remote_regions == 0


# -- misbehaving owners and users


async def _import_from(actor: Any, engine: Engine, peer: Any) -> tuple[asyncio.Task[RemoteRegion], int]:
    actor.say("region.up", id=7, name="kv", size=4096, access=3)
    task = asyncio.ensure_future(peer.region("kv"))
    return task, (await actor.hear("region.get")).body["call"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"metadata": text(b"nonsense")}, ProtocolError),
        ({"metadata": text(mem_metadata(4096, magic=1))}, ProtocolError),
        ({"metadata": text(mem_metadata(8192)), "size": 8192}, ProtocolError),  # larger than what is passed
        ({"metadata": text(bytes(2000))}, ProtocolError),
        ({"metadata": "not base64"}, ProtocolError),
        ({"size": 0}, ProtocolError),
        ({"size": -1}, ProtocolError),
        ({"size": True}, ProtocolError),
        ({"size": (1 << 64) - 1}, ProtocolError),
        ({"access": 4}, ProtocolError),
        ({"access": 0}, ProtocolError),
        ({"driver": "pigeon"}, ProtocolError),
        ({"driver": 7}, ProtocolError),
        ({"metadata": text(mem_metadata(4096, rights=1))}, AccessError),
        ({"metadata": text(mem_metadata(4096, kind=2, address=8))}, ProtocolError),  # with a descriptor
    ],
)
async def test_a_malformed_answer_of_the_owner(engine: Engine, answer: dict[str, Any], error: type[HixlError]) -> None:
    """The caller gets one error, the owner is told that its region is free, and everything goes on."""
    import os

    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        task, call = await _import_from(actor, engine, peer)
        fd = segment(4096)
        body = {"driver": "shm", "metadata": text(mem_metadata(4096)), "size": 4096, "access": 3, **answer}
        actor.say("region.metadata", fds=[fd], call=call, **body)
        with pytest.raises(error):
            await task
        assert (await actor.hear("region.gone")).body == {"id": 7}
        task, call = await _import_from(actor, engine, peer)
        good = {"driver": "shm", "metadata": text(mem_metadata(4096)), "size": 4096, "access": 3}
        actor.say("region.metadata", fds=[fd], call=call, **good)
        await engine.write(b"x" * 4096, await task)
        os.close(fd)


async def test_the_owner_closes_a_region_while_it_is_imported(engine: Engine) -> None:
    import os

    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        task, call = await _import_from(actor, engine, engine.peers[0])
        actor.say("region.down", id=7, name="kv")
        fd = segment(4096)
        actor.say(
            "region.metadata", fds=[fd], call=call, driver="shm", metadata=text(mem_metadata(4096)), size=4096, access=3
        )
        os.close(fd)
        with pytest.raises(StaleRegionError, match="while it was imported"):
            await task
        await actor.hear("region.gone")
        await until(lambda: engine.stats().remote_regions == 0)


async def test_large_imports_are_given_up_cleanly() -> None:
    """The end of the peer while copy threads still populate its memory."""
    async with engine_pair(drivers={"shm": {"threads": 1}}) as pair:
        pair.right.allocate("kv", 256 << 20, access="read-write")
        importing = asyncio.ensure_future(pair.peer.region("kv"))
        await until(lambda: pair.left.stats().remote_regions == 1)
        await pair.left.aclose()
        with pytest.raises(HixlError):
            await importing


async def test_a_user_that_asks_for_more_than_it_may_have(engine: Engine) -> None:
    secret = engine.allocate("secret", 4096)
    choosy = engine.allocate("choosy", 4096, access="read-write", grant=lambda peer: "none")
    async with puppet(engine.address) as actor:
        for call, number in enumerate([secret._number, choosy._number, 0, 1 << 62], 1):
            actor.say("region.get", call=call, id=number)
            failure = await actor.hear("failure", "region.metadata")
            assert failure.kind == "failure"
            assert failure.body["error"] in ("AccessError", "StaleRegionError")
    assert secret.pins == choosy.pins == 0


async def test_a_user_that_never_releases(engine: Engine) -> None:
    """Its connection breaks while its process lives, so it may still be writing."""
    region = engine.allocate("kv", 4096, access="write")
    async with puppet(engine.address) as actor:
        await actor.get("kv")
        peer = engine.peers[0]
        assert region.pins == 1
        lost: list[Any] = []
        peer.add_lost_callback(lost.append)
        await actor.connection.aclose()
        await until(lambda: lost)
        fencing = asyncio.ensure_future(peer.fenced())
        await settle()
        assert not fencing.done()
        assert not peer.confirmed_dead
        assert engine.stats().peers == 1
        closing = asyncio.ensure_future(region.aclose())
        await closing
        assert region.pins == 1
        await engine.aclose()
        with pytest.raises(ClosedError, match="closed before"):
            await fencing
    assert region.pins == 0


async def test_a_lost_peer_that_holds_nothing_is_harmless_and_forgotten(engine: Engine) -> None:
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        await actor.connection.aclose()
        await peer.fenced()
        await until(lambda: engine.stats().peers == 0)


async def test_region_repr() -> None:
    async with engine_pair() as pair:
        region, remote = await pair.region("kv", 8, access="read")
        assert repr(region) == "<Region 'kv' 8 bytes, access=read>"
        assert repr(remote) == "<RemoteRegion 'kv' of 'right' 8 bytes, access=read>"
        assert isinstance(region, Region)
        await region.aclose()
        assert repr(region) == "<Region 'kv' 8 bytes, access=read, closed>"


async def test_an_offer_that_is_replaced_before_its_import_begins(pair: EnginePair) -> None:
    """The owner closes a region and makes one of the same name, just after a user has asked for the first."""
    first, second = bytearray(8), bytearray(8)
    region = pair.right.register("x", first, access="write")
    await until(lambda: "x" in pair.peer.regions)
    early = pair.peer.region("x").__await__()
    early.send(None)  # the task of the import is made, and has not begun
    region.revoke()
    again = pair.right.register("x", second, access="write")
    while pair.peer._connection._read_next() is Progress.MORE:
        pass  # both messages come now
    remote = await pair.peer.region("x")
    with pytest.raises(StaleRegionError):
        while True:
            early.send(None)
            await asyncio.sleep(0.001)
    await pair.left.write(b"received", remote)
    assert bytes(second) == b"received"
    await again.aclose()
    assert pair.right.stats().regions == 0
    with pytest.raises(StaleRegionError):
        pair.left.write(b"too late", remote)
    assert (bytes(first), bytes(second)) == (bytes(8), b"received")
    assert pair.left.stats().remote_regions == 0


async def test_thousands_of_regions_before_and_after_connecting() -> None:
    async with Engine("127.0.0.1:0", name="many") as many, Engine() as engine:
        memory = bytearray(8)
        for n in range(1500):
            many.register(f"{n}", memory, access="read")
        peer = await engine.connect(many.address)
        await until(lambda: len(peer.regions) == 1500)
        for n in range(1500, 3000):
            many.register(f"{n}", memory, access="read")
        await until(lambda: len(peer.regions) == 3000)
        for region in list(many.regions.values()):
            region.revoke()
        await until(lambda: not peer.regions)
        assert peer.state is PeerState.UP


async def test_more_regions_than_a_peer_records(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hixl_async.engine.region_table.MAX_OFFERS", 3)
    for n in range(3):
        engine.allocate(f"{n}", 8, access="read")
    for n in range(5):
        engine.allocate(f"private {n}", 8)
    with pytest.raises(BusyError, match="3 regions are exported, which is the most"):
        engine.allocate("one too many", 8, access="read")
    engine.regions["0"].revoke()
    engine.allocate("instead", 8, access="read")


async def test_a_grant_that_closes_its_own_region(pair: EnginePair) -> None:
    def grant(peer: Peer) -> str:
        pair.right.regions["shy"].revoke()
        return "read"

    await pair.right.peers[0].request("hixl.ping", {})
    pair.right.allocate("first", 8, access="read")
    region = pair.right.allocate("shy", 8, access="read", grant=grant)
    await until(lambda: "first" in pair.peer.regions)
    pair.right.allocate("last", 8, access="read")
    await until(lambda: "last" in pair.peer.regions)
    assert not region.alive
    assert "shy" not in pair.peer.regions
    with pytest.raises(ClosedError, match="closed"):
        memoryview(region[0:4])
