"""How two engines connect, and every way in which connecting may fail."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from passes import settle
from puppet import GONE, Puppet, puppet, stage

from hixl_async import (
    AuthenticationError,
    ClosedError,
    ConnectError,
    DriverError,
    Engine,
    HandshakeError,
    InvalidArgumentError,
    NoRouteError,
    PeerDownError,
    PeerState,
    StaleRegionError,
    UnknownHostError,
)
from hixl_async.control import codec
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until
from tests.hixlsim.build import build

from .conftest import deaf

SECRET = "a secret that both of us know"


# -- one connection for each peer


async def test_concurrent_connects_to_one_address_are_one(engine: Engine) -> None:
    async with Engine(name="dialler") as dialler:
        peers = await asyncio.gather(*(dialler.connect(engine.address) for _ in range(10)))
        assert len(set(map(id, peers))) == 1
        assert dialler.stats().peers == engine.stats().peers == 1
        assert await dialler.connect(engine.address) is peers[0]


async def test_another_name_of_the_address_leads_to_the_same_peer(engine: Engine) -> None:
    port = engine.address.rpartition(":")[2]
    async with Engine() as dialler:
        peer = await dialler.connect(engine.address)
        assert await dialler.connect(f"localhost:{port}") is peer
        assert await dialler.connect(f":{port}") is peer
        await until(lambda: engine.stats().peers == 1)


async def test_connecting_back_gives_the_peer_that_is_there(pair: EnginePair) -> None:
    assert await pair.right.connect(pair.left.address) is pair.back
    assert await pair.left.connect(pair.right.address) is pair.peer


@pytest.mark.parametrize("round", range(5))
async def test_both_connect_to_each_other_at_once(round: int) -> None:
    async with Engine("127.0.0.1:0", name="a") as a, Engine("127.0.0.1:0", name="b") as b:
        region_a, region_b = a.allocate("a", 4, access="write"), b.allocate("b", 4, access="write")
        peer_b, peer_a = await asyncio.gather(a.connect(b.address), b.connect(a.address))
        await asyncio.gather(a.write(b"to b", await peer_b.region("b")), b.write(b"to a", await peer_a.region("a")))
        assert bytes(memoryview(region_a)) + bytes(memoryview(region_b)) == b"to ato b"


async def test_sockets_do_not_accumulate(engine: Engine) -> None:
    async with Engine() as dialler:
        for _ in range(20):
            peer = await dialler.connect(engine.address)
            await peer.aclose()
            await until(lambda: not engine.peers)
        await until(lambda: engine.stats().peers == 0)
        assert dialler.stats().peers == 0


async def test_a_thousand_small_transfers_need_one_connection(pair: EnginePair) -> None:
    _, _remote = await pair.region("kv", 8)
    for _ in range(1000):
        peer = await pair.left.connect(pair.right.address)
        await pair.left.write(b"12345678", await peer.region("kv"))
    assert pair.left.driver_stats()["shm"]["links"] == 1
    assert pair.right.stats().peers == 1


# -- wrong addresses


async def test_an_engine_does_not_connect_to_itself(engine: Engine) -> None:
    port = engine.address.rpartition(":")[2]
    for address in (engine.address, f"localhost:{port}", f"127.0.0.1:{port}"):
        with pytest.raises(InvalidArgumentError, match="itself|own"):
            await engine.connect(address)
    assert engine.stats().peers == 0


@pytest.mark.parametrize(
    "address",
    ["", "nowhere", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:0", 7, None, ("a", 1)],
)
async def test_malformed_addresses(engine: Engine, address: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="address"):
        await engine.connect(address)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1"])
async def test_malformed_timeouts(engine: Engine, timeout: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout"):
        await engine.connect("127.0.0.1:1", timeout=timeout)


async def test_a_host_that_does_not_exist(engine: Engine) -> None:
    with pytest.raises(UnknownHostError, match=r"no such host\.invalid:1 cannot be found") as caught:
        await engine.connect("no such host.invalid:1")
    assert not caught.value.retryable


async def test_no_listener(engine: Engine) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(ConnectError, match=address) as caught:
            await engine.connect(address)
    assert caught.value.retryable


async def test_a_listener_that_says_nothing(engine: Engine) -> None:
    with deaf() as address, pytest.raises(ConnectError, match=rf"{address}.*within 0\.[01]"):
        await engine.connect(address, timeout=0.1)


async def test_a_caller_waits_no_longer_than_it_said_although_another_dials(engine: Engine) -> None:
    with deaf() as address:
        slow = asyncio.ensure_future(engine.connect(address, timeout=60))
        await settle()
        with pytest.raises(ConnectError, match=address):
            await engine.connect(address, timeout=0.05)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow


async def test_the_next_caller_dials_when_the_first_gives_up(engine: Engine) -> None:
    async with stage() as theatre:
        first = asyncio.ensure_future(engine.connect(theatre.address))
        actor = await theatre.puppets.get()
        second = asyncio.ensure_future(engine.connect(theatre.address))
        await settle()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await actor.aclose()
        actor = await theatre.puppets.get()
        await actor.up()
        peer = await second
        assert peer.state is PeerState.UP
        await actor.aclose()


# -- engines that do not belong together


@pytest.fixture
async def guarded() -> AsyncIterator[Engine]:
    async with Engine("127.0.0.1:0", name="guarded", secret=SECRET, domain="red") as engine:
        yield engine


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"secret": "some other secret", "domain": "red"}, "secret"),
        ({"domain": "red"}, "has none"),
        ({"secret": SECRET, "domain": "blue"}, "'blue'.*'red'|'red'.*'blue'"),
    ],
)
async def test_strangers_are_refused(guarded: Engine, settings: dict[str, str], reason: str) -> None:
    async with Engine("127.0.0.1:0", **settings) as stranger:
        with pytest.raises(AuthenticationError, match=reason) as caught:
            await stranger.connect(guarded.address)
        assert not caught.value.retryable
        with pytest.raises(AuthenticationError):
            await guarded.connect(stranger.address)
        async with Engine(secret=SECRET, domain="red") as friend:
            await friend.connect(guarded.address)
        assert stranger.stats().peers == guarded.stats().peers - len(guarded.peers) == 0


async def test_a_secret_in_the_environment(monkeypatch: pytest.MonkeyPatch, guarded: Engine) -> None:
    monkeypatch.setenv("HIXL_ASYNC_SECRET", SECRET)
    async with Engine(domain="red") as friend:
        await friend.connect(guarded.address)


async def test_no_driver_in_common(engine: Engine) -> None:
    async with stage(drivers=["carrier-pigeon"]) as theatre:
        with pytest.raises(NoRouteError, match="carrier-pigeon"):
            await engine.connect(theatre.address)
    await until(lambda: engine.stats().peers == 0)


@contextlib.asynccontextmanager
async def server(answer: bytes) -> AsyncIterator[str]:
    """Something else that listens: it sends a fixed answer to every client, and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"


HELLO = {
    "magic": "hixl-async", "secret": False, "nonce": "0" * 64, "network": "", "directory": "",
    "connection": "0" * 32, "socket": "abstract:" + "0" * 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", HandshakeError, "not a hixl_async engine"),
        (b"\0\0\0\2{}", HandshakeError, "not a valid message"),
        (b"\xff" * 100, HandshakeError, "not a hixl_async engine"),
        (b"", ConnectError, "closed"),
        (codec.frame(codec.encode("hello", {**HELLO, "versions": [99, 101]})), HandshakeError, "versions 99 to 101"),
        (
            codec.frame(codec.encode("hello", {**HELLO, "magic": "x", "versions": [1, 1]})),
            HandshakeError,
            "not a hixl_async",
        ),
    ],
)
async def test_something_else_listens(engine: Engine, answer: bytes, error: type[Exception], text: str) -> None:
    async with server(answer) as address:
        with pytest.raises(error, match=text) as caught:
            await engine.connect(address)
    assert address in str(caught.value)


# -- giving up at every step

Step = Callable[[Puppet], Awaitable[None]]


async def _nothing(actor: Puppet) -> None:
    """It has answered the handshake, and no more."""


async def _listening(actor: Puppet) -> None:
    actor.start()
    await actor.hear("link")


async def _linked(actor: Puppet) -> None:
    actor.start()
    await actor.join()
    await actor.hear("ready")


async def _ready_without_link(actor: Puppet) -> None:
    actor.start()
    actor.say("ready")
    await actor.hear("link")


STEPS: dict[str, Step] = {
    "established": _nothing, "listening": _listening, "linked": _linked, "ready without link": _ready_without_link,
}  # fmt: skip


async def _nowhere(engine: Engine) -> None:
    """Assert that nothing of an attempt is left."""
    await until(lambda: engine.stats().peers == 0)
    await until(lambda: engine.driver_stats()["shm"]["links"] == 0)


@pytest.mark.parametrize("step", STEPS)
async def test_a_cancelled_connect_leaves_nothing(engine: Engine, step: str) -> None:
    async with stage() as theatre:
        connecting = asyncio.ensure_future(engine.connect(theatre.address))
        actor = await theatre.puppets.get()
        await STEPS[step](actor)
        await settle()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await _nowhere(engine)


@pytest.mark.parametrize("ticks", range(0, 60, 3))
async def test_a_connect_cancelled_at_any_moment_leaves_nothing(engine: Engine, ticks: int) -> None:
    async with Engine() as dialler:
        connecting = asyncio.ensure_future(dialler.connect(engine.address))
        await settle(ticks)
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await connecting).aclose()
        await _nowhere(dialler)
        await _nowhere(engine)


@pytest.mark.parametrize("step", STEPS)
async def test_a_connect_times_out(engine: Engine, step: str) -> None:
    async with stage(name="slow") as theatre:
        connecting = asyncio.ensure_future(engine.connect(theatre.address, timeout=0.3))
        actor = await theatre.puppets.get()
        await STEPS[step](actor)
        with pytest.raises(ConnectError, match=theatre.address):
            await connecting
        await _nowhere(engine)


@pytest.mark.parametrize("step", STEPS)
async def test_the_other_side_breaks_off(engine: Engine, step: str) -> None:
    async with stage() as theatre:
        connecting = asyncio.ensure_future(engine.connect(theatre.address))
        actor = await theatre.puppets.get()
        await STEPS[step](actor)
        await actor.aclose()
        with pytest.raises(ConnectError, match="broke"):
            await connecting
        await _nowhere(engine)


@pytest.mark.parametrize("step", STEPS)
async def test_a_dialler_breaks_off(engine: Engine, step: str) -> None:
    accepted = engine.accepted()
    actor = await Puppet.dial(engine.address)
    await STEPS[step](actor)
    await actor.aclose()
    await _nowhere(engine)
    assert not accepted


@pytest.mark.parametrize("step", STEPS)
async def test_a_dialler_that_stops_half_way_is_given_up(step: str) -> None:
    async with Engine("127.0.0.1:0", connect_timeout=0.3) as engine:
        actor = await Puppet.dial(engine.address)
        await STEPS[step](actor)
        await until(lambda: engine.stats().peers == 1)
        await _nowhere(engine)
        await actor.aclose()


@pytest.mark.parametrize("step", STEPS)
async def test_close_during_an_incoming_handshake(step: str) -> None:
    async with Engine("127.0.0.1:0") as engine:
        actor = await Puppet.dial(engine.address)
        await STEPS[step](actor)
        await until(lambda: engine.stats().peers == 1)
    assert engine.stats().peers == 0
    await actor.aclose()


@pytest.mark.parametrize("step", STEPS)
async def test_close_while_connecting(step: str) -> None:
    async with stage() as theatre, Engine() as engine:
        connecting = asyncio.ensure_future(engine.connect(theatre.address))
        actor = await theatre.puppets.get()
        await STEPS[step](actor)
        await engine.aclose()
        with pytest.raises(ClosedError):
            await connecting
        assert engine.stats().peers == 0


# -- accepted peers


async def test_accepted_peers(engine: Engine) -> None:
    first, second = engine.accepted(), engine.accepted()
    async with Engine(name="one") as one, Engine(name="two") as two:
        await one.connect(engine.address)
        await two.connect(engine.address)
        assert [(await anext(first)).name, (await anext(first)).name] == ["one", "two"]
        assert [peer.name async for peer in _take(second, 2)] == ["one", "two"]
        late = engine.accepted()
        assert late.get_nowait() is None
        assert {peer.name for peer in engine.peers} == {"one", "two"}


async def _take(items: Any, count: int) -> AsyncIterator[Any]:
    for _ in range(count):
        yield await anext(items)


async def test_an_acceptor_that_is_dropped_is_forgotten(engine: Engine) -> None:
    async with Engine() as dialler:
        await dialler.connect(engine.address)
        reading = asyncio.ensure_future(_first(engine))
        await settle(3)
        await (await dialler.connect(engine.address)).aclose()
        await dialler.connect(engine.address)
        await reading
        assert not engine._peers._acceptors


async def _first(engine: Engine) -> Any:
    async for peer in engine.accepted():
        return peer
    return None


async def test_two_tasks_may_not_share_an_acceptor(engine: Engine) -> None:
    accepted = engine.accepted()
    waiting = asyncio.ensure_future(accepted.get())
    await settle(3)
    with pytest.raises(ClosedError, match="two tasks"):
        await accepted.get()
    accepted.close()
    with pytest.raises(ClosedError):
        await waiting
    assert [peer async for peer in accepted] == []


async def test_a_peer_states_its_identity(pair: EnginePair) -> None:
    assert pair.peer.name == "right"
    assert pair.peer.address == pair.right.address
    assert pair.peer.identity.incarnation == pair.right.incarnation != pair.left.incarnation
    assert pair.peer.same_host
    assert pair.peer.drivers == ("shm",)
    assert repr(pair.peer) == f"<Peer 'right' {pair.right.address} up>"


# -- the same address, another engine


async def test_a_peer_restarts_at_the_same_address() -> None:
    async with Engine(name="dialler") as dialler:
        first = await Engine("127.0.0.1:0", name="decode-0").open()
        address = first.address
        old_region = first.allocate("kv", 4, access="write")
        peer = await dialler.connect(address)
        remote = await peer.region("kv")
        await dialler.write(b"1111", remote)
        await first.aclose()
        async with Engine(address, name="decode-0") as second:
            region = second.allocate("kv", 4, access="write")
            with pytest.raises(PeerDownError):
                dialler.write(b"2222", remote)
            with pytest.raises(PeerDownError):
                await peer.region("kv")
            with pytest.raises(PeerDownError):
                await peer.request("hixl.ping", {})
            again = await dialler.connect(address)
            assert again is not peer
            assert again.identity.incarnation == second.incarnation != peer.identity.incarnation
            with pytest.raises((PeerDownError, StaleRegionError)):
                dialler.write(b"3333", remote)
            await dialler.write(b"4444", await again.region("kv"))
            assert bytes(memoryview(region)) == b"4444"
        del old_region
        await until(lambda: dialler.stats().peers == 0)


async def test_a_peer_that_was_closed_here() -> None:
    async with engine_pair() as pair:
        _, remote = await pair.region("kv", 4)
        lost: list[Any] = []
        pair.back.add_lost_callback(lost.append)
        await pair.peer.aclose()
        await pair.peer.aclose()
        assert pair.peer.state is PeerState.DOWN
        with pytest.raises(ClosedError, match="closed here"):
            await pair.peer.request("hixl.ping", {})
        with pytest.raises(PeerDownError):
            pair.left.write(b"1234", remote)
        await until(lambda: lost)
        assert isinstance(lost[0], PeerDownError)
        assert "left" in str(lost[0])
        late: list[Any] = []
        pair.back.add_lost_callback(late.append)
        await until(lambda: late)
        again = await pair.left.connect(pair.right.address)
        await pair.left.write(b"1234", await again.region("kv"))


async def test_connect_does_not_return_a_leaving_peer(engine: Engine) -> None:
    """Between the break of its link and the goodbye that explains it, `connect` does not return the peer."""
    async with stage() as theatre:
        connecting = asyncio.ensure_future(engine.connect(theatre.address))
        actor = await theatre.puppets.get()
        await actor.up()
        peer = await connecting
        assert await engine.connect(theatre.address) is peer
        assert actor.link is not None
        actor.link.theirs[GONE] = 1
        actor.link.ring()
        await until(lambda: not engine.peers)
        connecting = asyncio.ensure_future(engine.connect(theatre.address))
        second = await theatre.puppets.get()
        await second.up()
        assert await connecting is not peer


async def test_connect_does_not_trust_a_claimed_address(engine: Engine) -> None:
    """A dialler can claim any address as its own."""
    async with Engine("127.0.0.1:0", name="true") as true, puppet(engine.address, name="false", address=true.address):
        await until(lambda: engine.peers)
        assert engine.peers[0].address == true.address
        peer = await engine.connect(true.address)
        assert (peer.name, peer.identity.incarnation) == ("true", true.incarnation)


# -- limits of bandwidth


@pytest.mark.parametrize("drivers", [["shm"], faulty("shm", FaultPlan(1))], ids=["shm", "wrapped"])
async def test_a_limited_peer(drivers: Any) -> None:
    async with engine_pair(drivers) as pair:
        region, remote = await pair.region("kv", 1 << 20)
        pair.peer.limit_bandwidth(10e6)
        started = asyncio.get_running_loop().time()
        transfers = [pair.left.write(bytes([i + 1]) * (1 << 18), remote[i << 18 : (i + 1) << 18]) for i in range(4)]
        assert not any(transfer.done() for transfer in transfers)
        assert sum(await asyncio.gather(*transfers)) == 1 << 20
        assert asyncio.get_running_loop().time() - started >= (1 << 20) / 10e6 - 0.02
        assert memoryview(region)[-1] == 4
        pair.peer.limit_bandwidth(None)
        assert pair.left.write(b"x", remote[:1]).done()


async def test_work_that_a_limit_delays_is_not_stalled() -> None:
    """A limit lets each of many wait much longer than a stall takes; the link moves all the time."""
    async with engine_pair(stall=0.1) as pair:
        _, remote = await pair.region("kv", 1 << 16)
        pair.peer.limit_bandwidth(4e6)
        transfers = [pair.left.write(bytes(1 << 16), remote) for _ in range(40)]
        assert sum(await asyncio.gather(*transfers)) == 40 << 16


async def test_a_limit_is_reached_by_small_work_too(pair: EnginePair) -> None:
    """However late the thread wakes up between two of them, it catches up; at least when the machine has time for it."""
    _, remote = await pair.region("kv", 2 << 20)
    loop = asyncio.get_running_loop()
    pair.peer.limit_bandwidth(100e6)

    async def seconds(size: int) -> float:
        started = loop.time()
        await asyncio.gather(*(pair.left.write(bytes(size), remote[:size]) for _ in range((2 << 20) // size)))
        return loop.time() - started

    for _ in range(20):
        if await seconds(4096) < 2 * await seconds(2 << 20):
            break
    else:
        pytest.fail("small writes take more than twice as long as one large one")


@pytest.mark.parametrize("limit", [0, -1, 0.5, True, float("nan"), float("inf"), "fast", 1 << 63])
async def test_a_malformed_limit(pair: EnginePair, limit: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="bytes_per_second"):
        pair.peer.limit_bandwidth(limit)


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_driver_without_limits(wrapped: bool) -> None:
    options = {"library": str(build()), "backend": "cs"}
    drivers = faulty("hixl", FaultPlan(1), **options) if wrapped else {"hixl": options}
    async with engine_pair(drivers, other={"hixl": options}) as pair:
        with pytest.raises(DriverError, match="driver 'hixl' cannot limit"):
            pair.peer.limit_bandwidth(1e6)
