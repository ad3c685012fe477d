"""Peers that share several drivers: a link for each, and what happens where one of them cannot be made."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy
import pytest
from puppet import stage
from tables import table

from hixl_async import (
    ConnectError,
    DriverError,
    Engine,
    HandshakeError,
    PeerDownError,
    PeerState,
    kv,
)
from hixl_async.core.memory import link_of
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until
from tests.hixlsim.build import build


def two(first: FaultPlan, second: FaultPlan | None = None) -> dict[str, Any]:
    """Two drivers, each shared memory below: "faulty" is preferred to "shm"."""
    return {
        "faulty": {"driver": table("shm"), "control": first._block},
        **faulty("shm", second if second is not None else FaultPlan(1)),
    }


async def works(pair: EnginePair) -> None:
    region, remote = await pair.region("kv", 8)
    assert await pair.left.write(b"12345678", remote, notify=("there", b"")) == 8
    assert (await anext(pair.right.notifications("there"))).peer is pair.back
    assert bytes(memoryview(region)) == b"12345678"
    assert link_of(remote).driver.name == pair.peer.drivers[0]
    await region.aclose()


async def test_all_drivers_are_linked_and_the_first_is_used() -> None:
    async with engine_pair(two(FaultPlan(1)), other=two(FaultPlan(1))) as pair:
        assert pair.peer.drivers == pair.back.drivers == ("faulty", "shm")
        await works(pair)


@pytest.mark.parametrize("where", ["left", "right", "both"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("late", [False, True])
async def test_a_driver_that_cannot_be_linked_is_left_out(
    where: str, which: int, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def plans(side: str) -> dict[str, Any]:
        plan = FaultPlan(1)
        if where in (side, "both"):
            plan.fail("system", native=7, verb="connect", nth=1)
        if late:  # the peer has said that it is ready long before
            plan.delay(0.05, verb="connect")
        return two(plan, FaultPlan(1)) if which == 0 else two(FaultPlan(1), plan)

    with caplog.at_level(logging.WARNING, "hixl_async"):
        async with engine_pair(plans("left"), other=plans("right")) as pair:
            rest = "shm" if which == 0 else "faulty"
            assert pair.peer.drivers == pair.back.drivers == (rest,)
            await works(pair)
            assert pair.peer.state is PeerState.UP
    lost = "faulty" if which == 0 else "shm"
    told = [record.getMessage() for record in caplog.records if "is linked without driver" in record.getMessage()]
    assert len(told) == 2, "once on each side"
    assert all(f"without driver {lost!r}" in text for text in told)


async def test_the_error_lists_all_failures_if_no_driver_can_be_linked() -> None:
    plan, other = FaultPlan(1).fail("system", verb="connect"), FaultPlan(1).fail("system", native=11, verb="connect")
    async with (
        Engine("127.0.0.1:0", name="right", drivers=two(FaultPlan(1))) as right,
        Engine(name="left", drivers=two(plan, other)) as left,
    ):
        with pytest.raises(ConnectError, match=r"driver '\w+': link: .*'right'.*; driver '\w+': link:") as caught:
            await left.connect(right.address)
        assert "'shm'" in str(caught.value)
        assert "'faulty'" in str(caught.value)
        await until(lambda: not right.stats().peers)
        assert left.stats().peers == 0
        plan.clear()
        other.clear()
        peer = await left.connect(right.address)
        assert peer.drivers == ("faulty", "shm")


async def test_a_driver_that_cannot_make_its_half_of_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails before anything is sent; the peer's metadata for it arrives all the same."""
    async with (
        Engine("127.0.0.1:0", name="right", drivers=two(FaultPlan(1))) as right,
        Engine(name="left", drivers=two(FaultPlan(1))) as left,
    ):
        shared = left._host.shared_drivers

        class Broken:
            name = "faulty"

            def link_new(self, cookie: int, peer: str) -> Any:
                raise DriverError("no more links")

        def drivers(*words: Any) -> list[Any]:
            return [Broken() if driver.name == "faulty" else driver for driver in shared(*words)]

        monkeypatch.setattr(left._peers, "_host", left._host._replace(shared_drivers=drivers))
        peer = await left.connect(right.address)
        assert peer.drivers == ("shm",)
        await until(lambda: right.peers)
        assert right.peers[0].drivers == ("shm",)


async def test_a_peer_that_dies_while_a_driver_is_left_out() -> None:
    """The link that failed is stopped and given back with the others."""
    plan = FaultPlan(1).fail("system", verb="connect", nth=1)
    async with Engine("127.0.0.1:0", name="right", drivers=two(plan)) as right:
        left = await Engine(name="left", drivers=two(FaultPlan(1))).open()
        peer = await left.connect(right.address)
        assert peer.drivers == ("shm",)
        back = right.peers[0]
        peer._connection.abort(PeerDownError("cut"))
        await until(lambda: back.state is PeerState.DOWN)
        await left.aclose()
        await until(lambda: not right.stats().peers)


async def test_connecting_is_given_up_while_a_link_is_made() -> None:
    plan = FaultPlan(1).hold(verb="connect", nth=1)
    async with (
        Engine("127.0.0.1:0", name="right", drivers=two(FaultPlan(1))) as right,
        Engine(name="left", drivers=two(plan)) as left,
    ):
        connecting = asyncio.ensure_future(left.connect(right.address))
        await until(lambda: plan.holding)
        connecting.cancel()
        await asyncio.wait([connecting])
        plan.release()
        await until(lambda: not left.stats().peers and not right.stats().peers)
        plan.clear()
        assert (await left.connect(right.address)).drivers == ("faulty", "shm")


async def test_a_peer_without_the_only_driver(engine: Engine) -> None:
    """It says so: that is the end of it, with its words."""
    async with stage(name="poor") as theatre:
        connecting = asyncio.ensure_future(engine.connect(theatre.address))
        actor = await theatre.puppets.get()
        actor.start()
        await actor.hear("link")
        actor.say("link.failed", driver="shm", text="out of everything " * 10)
        with pytest.raises(ConnectError, match="peer 'poor' could not make the link: out of everything"):
            await connecting
    assert not engine.stats().peers


async def test_a_dialled_peer_says_why() -> None:
    plan = FaultPlan(1).fail("nomem", verb="connect")
    async with (
        Engine("127.0.0.1:0", name="right", drivers=faulty("shm", plan)) as right,
        Engine(name="left") as left,
    ):
        with pytest.raises(
            ConnectError, match="peer 'right' could not make the link: driver 'shm': link: memory, descriptors"
        ):
            await left.connect(right.address)


async def test_unexpected_failures(engine: Engine) -> None:
    async with stage(name="odd") as theatre:
        connecting = asyncio.ensure_future(engine.connect(theatre.address))
        actor = await theatre.puppets.get()
        actor.start()
        await actor.hear("link")
        actor.say("link.failed", driver="hixl", text="?")
        with pytest.raises(HandshakeError, match="'hixl' that was not expected"):
            await connecting
    assert not engine.stats().peers


@pytest.mark.parametrize("where", ["left", "right"])
async def test_a_link_that_does_not_come_up_in_time_is_left_out(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """A transport that hangs while it connects costs its own link, and not the others."""
    plan = FaultPlan(1).hold(verb="connect", nth=1)
    left, right = (two(plan), two(FaultPlan(1))) if where == "left" else (two(FaultPlan(1)), two(plan))
    with caplog.at_level(logging.WARNING, "hixl_async"):
        async with engine_pair(left, other=right, connect_timeout=1.0) as pair:
            assert pair.peer.drivers == pair.back.drivers == ("shm",)
            await works(pair)
            plan.release()
    assert "driver 'faulty' did not connect within" in caplog.text


async def test_a_limit_holds_for_all_drivers_or_for_none() -> None:
    """The second one cannot limit its bandwidth; the first is as fast as before."""
    options = {"library": str(build()), "backend": "cs"}
    drivers = {"shm": {}, "hixl": options}
    async with engine_pair(drivers, other=drivers) as pair:
        assert pair.peer.drivers == ("shm", "hixl")
        with pytest.raises(DriverError, match="'hixl' cannot limit"):
            pair.peer.limit_bandwidth(1000)
        _, remote = await pair.region("kv", 8)
        assert pair.left.write(b"12345678", remote).done(), "what is limited never finishes in the call"
        await pair.region("late", 8)  # all is registered


async def test_a_stream_over_the_second_driver() -> None:
    """The second driver did not allocate the memory, but the first one did; layers arrive and are seen all the same."""
    options = {"library": str(build()), "backend": "cs"}
    group = kv.Group.attention(3, kv_heads=1, head_dim=16, dtype="bfloat16")
    view = kv.View.ordered(group, blocks=4, block_tokens=4)
    async with (
        engine_pair(["shm"], other={"hixl": options, "shm": {}}) as pair,
        kv.Pool(pair.right, view) as target,
        kv.Pool(pair.left, view, access="none") as source,
        target.reserve(blocks=2) as blocks,
        source.reserve(blocks=2) as mine,
    ):
        assert pair.peer.drivers == ("shm",)
        ours, theirs = (numpy.frombuffer(pool.regions[0], "uint16").reshape(3, 2, 4, -1) for pool in (source, target))
        ours[:] = numpy.arange(ours.size).reshape(ours.shape)
        stream = blocks.stream()
        async with source.open_stream(pair.peer, stream.ticket()) as out:
            for layer in range(3):
                out.push(layer, mine)
        assert [layer async for layer in stream] == [0, 1, 2]
        assert (ours[:, :, mine.ids] == theirs[:, :, blocks.ids]).all()
