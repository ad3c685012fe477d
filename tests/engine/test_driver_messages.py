"""Messages between drivers, carried over the control connection."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import Any

import pytest
from puppet import puppet, segment, stage
from tables import table

from hixl_async import Engine, PeerDownError, PeerState
from hixl_async.core.link import MESSAGE_LIMIT
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until

#: The topic under which a driver under a plan shows what it was told.
SAID = "faulty.said"


def talking(*plans: FaultPlan) -> Any:
    return engine_pair(faulty("shm", plans[0]), other=faulty("shm", plans[1]))


def listening(pair: EnginePair) -> tuple[Any, Any]:
    return pair.left.notifications(SAID), pair.right.notifications(SAID)


async def test_messages_arrive_in_order_in_both_directions() -> None:
    here, there = FaultPlan(1), FaultPlan(2)
    async with talking(here, there) as pair:
        left, right = listening(pair)
        sent = [bytes([number]) * (number * 37 % 1000 + 1) for number in range(200)]
        for data in sent:
            here.say(data)
            there.say(data[::-1] + b".")
            if len(data) % 7 == 0:
                await asyncio.sleep(0)
        assert [(await anext(right)).payload for _ in sent] == sent
        assert [(await anext(left)).payload for _ in sent] == [data + b"." for data in sent]


@pytest.mark.parametrize("size", [1, 1000, MESSAGE_LIMIT])
async def test_any_bytes_up_to_the_limit_arrive(size: int) -> None:
    here = FaultPlan(1)
    async with talking(here, FaultPlan(2)) as pair:
        _, right = listening(pair)
        data = bytes(i * 131 % 256 for i in range(size))
        here.say(data)
        note = await anext(right)
        assert note.payload == data
        assert note.peer is pair.back


async def test_a_driver_that_says_too_much_loses_its_link() -> None:
    here = FaultPlan(1)
    async with talking(here, FaultPlan(2)) as pair:
        here.say(bytes(MESSAGE_LIMIT + 1))
        await until(lambda: pair.peer.state is PeerState.DOWN)
        assert f"'shm' wants to send {MESSAGE_LIMIT + 1} bytes at once" in str(pair.peer.error)


async def test_a_message_that_the_driver_does_not_understand() -> None:
    here = FaultPlan(1)
    async with talking(here, FaultPlan(2)) as pair:
        here.say(b"")
        await until(lambda: pair.back.state is PeerState.DOWN)
        assert "broke the protocol: message of its driver" in str(pair.back.error)


async def test_a_driver_that_takes_no_messages() -> None:
    here = FaultPlan(1)
    async with engine_pair(faulty("shm", here)) as pair:
        here.say(b"hello")
        await until(lambda: pair.back.state is PeerState.DOWN)
        assert "driver 'shm' takes no messages" in str(pair.back.error)


async def test_each_driver_gets_its_own_messages() -> None:
    plans = [FaultPlan(number) for number in range(3)]
    second = [{"driver": table("shm"), "control": plan._block} for plan in plans]
    drivers: Any = {**faulty("shm", plans[0]), "faulty": second[1]}
    async with engine_pair(drivers, other={"shm": {}, "faulty": second[2]}) as pair:
        right = pair.right.notifications(SAID)
        plans[1].say(b"from the second")  # the first driver's link would not take it
        assert (await anext(right)).payload == b"from the second"


async def test_messages_before_and_after_the_connection_is_up() -> None:
    here = FaultPlan(1)
    async with (
        Engine("127.0.0.1:0", drivers=faulty("shm", FaultPlan(2))) as right,
        Engine(drivers=faulty("shm", here)) as left,
    ):
        heard = right.notifications(SAID)
        connecting = asyncio.create_task(left.connect(right.address))
        peer = None
        while peer is None or peer.state is PeerState.CONNECTING:
            here.say(b"early")  # from the moment that there is a link
            await asyncio.sleep(0)
            peer = next(iter(left._peers), None)
        peer = await connecting
        assert (await anext(heard)).payload == b"early"
        closing = asyncio.create_task(peer.aclose())
        await asyncio.sleep(0)
        here.say(b"late")
        await closing
        here.say(b"too late")
        await asyncio.sleep(0)
        assert "closed here" in str(peer.error), "its driver's words cost it its good end"


async def test_a_message_into_a_connection_that_broke() -> None:
    here = FaultPlan(1)
    async with talking(here, FaultPlan(2)) as pair:
        pair.peer._connection.abort(PeerDownError("cut"))
        here.say(b"into the void")
        await until(lambda: pair.peer.state is PeerState.DOWN)


# -- hostile peers


def words(data: bytes) -> str:
    return base64.b64encode(data).decode()


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"driver": "nothing", "data": words(b"x")}, "which is not linked"),
    ({"driver": 7, "data": words(b"x")}, "lacks a valid 'driver'"),
    ({"data": words(b"x")}, "lacks a valid 'driver'"),
    ({"driver": "shm"}, "lacks a valid 'data'"),
    ({"driver": "shm", "data": "?"}, "is not base64"),
    ({"driver": "shm", "data": words(bytes(MESSAGE_LIMIT + 1))}, f"a message of {MESSAGE_LIMIT + 1} bytes"),
    ({"driver": "shm", "data": words(b"")}, "message of its driver"),
]


@pytest.mark.parametrize(("body", "says"), HOSTILE)
async def test_hostile_messages_cost_the_connection(body: dict[str, Any], says: str) -> None:
    async with Engine("127.0.0.1:0", drivers=faulty("shm", FaultPlan(1))) as engine:
        accepted = engine.accepted()
        async with puppet(engine.address) as other:
            peer = await anext(accepted)
            other.say("driver", **body)
            await other.lost
            await until(lambda: peer.state is PeerState.DOWN)
            assert says in str(peer.error)
            assert isinstance(peer.error, PeerDownError)


async def test_a_message_before_the_link_is_joined() -> None:
    async with (
        stage() as listener,
        Engine(drivers=faulty("shm", FaultPlan(1))) as engine,
    ):
        connecting = asyncio.create_task(engine.connect(listener.address))
        other = await listener.puppets.get()
        other.start()
        await other.hear("link")
        other.say("driver", driver="shm", data=words(b"x"))
        with pytest.raises(Exception, match="which is not linked"):
            await connecting


async def test_a_region_that_is_fetched_twice_while_it_becomes_ready() -> None:
    plan = FaultPlan(1).hold(verb="ready")
    async with Engine("127.0.0.1:0", drivers=faulty("shm", plan)) as engine:
        region = engine.allocate("kv", 64, access="read")
        async with puppet(engine.address) as other:
            offer = await other.hear("region.up")
            for call in range(3):
                other.say("region.get", call=call, id=offer.body["id"])
            for _ in range(2):
                refusal = await other.hear("failure")
                assert refusal.body["error"] == "BusyError"
            plan.release()
            assert (await other.hear("region.metadata")).body["call"] == 0
            assert region.pins == 1


async def test_a_peer_that_gives_up_a_region_before_it_is_ready_gets_nothing() -> None:
    plan = FaultPlan(1).hold(verb="ready")
    async with Engine("127.0.0.1:0", drivers=faulty("shm", plan)) as engine:
        region = engine.allocate("kv", 64, access="read")
        async with puppet(engine.address) as other:
            offer = await other.hear("region.up")
            other.say("region.get", call=1, id=offer.body["id"])
            other.say("region.gone", id=offer.body["id"])
            other.say("call", call=7, service="hixl.ping", body={})
            await other.hear("answer")
            plan.release()
            await region.ready()
            other.say("call", call=8, service="hixl.ping", body={})
            await other.hear("answer")
            assert not other.heard("region.metadata")
            assert region.pins == 0
            other.say("region.get", call=2, id=offer.body["id"])
            assert (await other.hear("region.metadata")).body["call"] == 2


async def test_descriptors_with_a_message() -> None:
    async with Engine("127.0.0.1:0", drivers=faulty("shm", FaultPlan(1))) as engine:
        accepted = engine.accepted()
        async with puppet(engine.address) as other:
            peer = await anext(accepted)
            fd = segment(4096)
            other.say("driver", fds=[fd], driver="shm", data=words(b"x"))
            os.close(fd)
            await until(lambda: peer.state is PeerState.DOWN)
            assert "sent descriptors with a 'driver' message" in str(peer.error)


async def test_a_flood_of_messages_lets_the_loop_run() -> None:
    async with Engine("127.0.0.1:0", drivers=faulty("shm", FaultPlan(1))) as engine:
        heard, rounds = engine.notifications(SAID), 0
        async with puppet(engine.address) as other:
            for number in range(1000):
                other.say("driver", driver="shm", data=words(b"%d" % number))
            receiving = asyncio.create_task(anext(heard))
            while heard.dropped + len(heard._queue) < 1000 and rounds < 10_000:
                rounds += 1
                await asyncio.sleep(0)
            assert rounds > 10, "all were handled in one pass"
            assert (await receiving).payload == b"0"
