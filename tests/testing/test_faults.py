"""The effects of fault plans on transfers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from hixl_async import (
    BusyError,
    PeerDownError,
    PeerLostError,
    Region,
    RemoteRegion,
    Transfer,
    TransferError,
)
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until
from tests.signals import interrupted


@dataclass
class World:
    plan: FaultPlan
    pair: EnginePair
    region: Region
    remote: RemoteRegion

    def write(self, data: bytes = b"hello", start: int = 0, **options: Any) -> Transfer:
        return self.pair.left.write(data, self.remote[start : start + len(data)], **options)

    def read(self, size: int = 5, start: int = 0) -> Transfer:
        return self.pair.left.read(bytearray(size), self.remote[start : start + size])

    @property
    def landed(self) -> bytes:
        return bytes(memoryview(self.region))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    plan = FaultPlan(1)
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=2.0) as pair:
        yield World(plan, pair, *await pair.region("kv", 1 << 16))
        plan.release()
        await until(lambda: pair.left.stats().pinned == 0, what="the release of everything")


# -- an empty plan changes nothing


async def test_an_empty_plan_changes_nothing(world: World) -> None:
    assert world.write().done()
    assert await world.read() == 5
    assert world.plan.counts == (2, *(0,) * 13)


async def test_capabilities_are_the_wrapped_drivers(world: World) -> None:
    plain, wrapped = world.pair.right._drivers["shm"], world.pair.left._drivers["shm"]
    assert wrapped.capabilities == plain.capabilities
    assert world.pair.left.driver_limits() == world.pair.right.driver_limits()
    assert world.pair.peer.drivers == world.pair.back.drivers == ("shm",)


# -- selection


async def test_nth_every_count(world: World) -> None:
    world.plan.busy(nth=2).busy(every=5).busy(nth=12, every=1, count=2).busy(nth=100)
    refused = []
    for i in range(1, 21):
        try:
            world.write()
        except BusyError:
            refused.append(i)
    assert refused == [2, 5, 10, 12, 13, 15, 20]
    assert world.plan.counts.busy == 7


async def test_verbs(world: World) -> None:
    for verb, expected in {"read": "r", "write": "w", "note": "n", "transfer": "rw", "any": "rwn"}.items():
        world.plan.clear().busy(verb=verb)  # type: ignore[arg-type]
        refused = ""
        for name, call in (
            ("r", world.read),
            ("w", world.write),
            ("n", lambda: world.pair.left.notify(world.pair.peer, "t")),
        ):
            try:
                call()
            except BusyError:
                refused += name
        assert refused == expected


async def test_rules_count_from_when_they_are_added(world: World) -> None:
    for _ in range(5):
        world.write()
    world.plan.busy(nth=1)
    with pytest.raises(BusyError):
        world.write()
    world.write()


def draws(world: World, n: int) -> list[bool]:
    outcomes = []
    for _ in range(n):
        try:
            world.write()
            outcomes.append(False)
        except BusyError:
            outcomes.append(True)
    return outcomes


async def test_chance_is_seeded(world: World) -> None:
    world.plan.busy(chance=0.3)
    first = draws(world, 200)
    assert 30 < sum(first) < 90
    for seed, same in ((1, True), (2, False)):
        plan = FaultPlan(seed).busy(chance=0.3)
        async with engine_pair(drivers=faulty("shm", plan)) as pair:
            again = draws(World(plan, pair, *await pair.region()), 200)
            assert (again == first) is same


# -- signals


@pytest.mark.parametrize("kind", ["allocated", "registered"])
async def test_signals_that_the_program_handles(world: World, kind: str) -> None:
    if kind == "registered":
        world.pair.right.register("registered", bytearray(1 << 16), access="read-write")
        world.remote = await world.pair.peer.region("registered")
    heard = world.pair.right.notifications("n")
    world.plan.delay(0.0005, every=2).pending(every=3).hold(every=5)
    with interrupted() as signals:
        while signals.n < 50:
            work = [world.write(b"x" * 4096, notify=("n", b"")), world.read(4096)]
            world.plan.release()
            assert await asyncio.gather(*work) == [4096, 4096]
            await anext(heard)


# -- delays


async def test_delay_of_the_operation(world: World) -> None:
    world.plan.delay(0.02, nth=1)
    before = time.monotonic()
    transfer = world.write(notify=("n", b""))
    assert not transfer.done()
    assert world.landed[:5] == bytes(5)
    assert await transfer == 5
    assert 0.019 < time.monotonic() - before < 1
    assert world.landed[:5] == b"hello"
    assert world.plan.counts.delayed == 1


async def test_delay_of_the_outcome(world: World) -> None:
    world.plan.delay(0.02, part="outcome", nth=1)
    transfer = world.write()
    assert not transfer.done()
    assert world.landed[:5] == b"hello"
    assert transfer.progress() == 5
    assert await transfer == 5


async def test_delay_of_signal_and_note(world: World) -> None:
    notes = world.pair.right.notifications("n")
    world.plan.delay(0.02, part="note", nth=1)
    words = world.region.numpy("uint64")
    transfer = world.write(signal=(world.remote[4096:4104], 7), notify=("n", b"now"))
    assert world.landed[:5] == b"hello"
    assert words[512] == 0
    assert notes.get_nowait() is None
    assert (await notes.get()).payload == b"now"
    assert words[512] == 7
    assert await transfer == 5


async def test_random_delays_are_seeded() -> None:
    async def order(seed: int) -> list[int]:
        plan = FaultPlan(seed).delay(0, 0.05)
        done: list[int] = []
        async with engine_pair(drivers=faulty("shm", plan)) as pair:
            _, remote = await pair.region()
            transfers = [pair.left.write(b"x", remote[i : i + 1]) for i in range(8)]
            for i, transfer in enumerate(transfers):
                transfer.add_done_callback(lambda _, i=i: done.append(i))
            await asyncio.gather(*transfers)
            await asyncio.sleep(0)
        return done

    assert sorted(await order(1)) == list(range(8))
    assert await order(1) != list(range(8))


async def test_bandwidth(world: World) -> None:
    world.plan.bandwidth(1e6)
    before = time.monotonic()
    transfers = [world.write(bytes(10_000), i * 10_000) for i in range(4)]
    for i, transfer in enumerate(transfers, 1):
        await transfer
        assert time.monotonic() - before > i * 0.0099, "one virtual wire, first in, first out"
    assert time.monotonic() - before < 2
    assert world.plan.counts.paced == 4


async def test_pending(world: World) -> None:
    world.plan.pending()
    threads = world.pair.left.driver_stats()["shm"]["threads"]
    transfer = world.write()
    assert not transfer.done()
    assert world.landed[:5] == b"hello"
    assert await transfer == 5
    assert world.plan.counts.pending == 1
    assert world.pair.left.driver_stats()["shm"]["threads"] == threads + 1


# -- holding


async def test_hold_and_release_all(world: World) -> None:
    world.plan.hold()
    transfers = [world.write(bytes([i + 1]), i) for i in range(4)]
    assert world.plan.holding == 4
    await asyncio.sleep(0.01)
    assert not any(transfer.done() for transfer in transfers)
    assert world.landed[:4] == bytes(4)
    world.plan.release()
    assert world.landed[:4] == b"\x01\x02\x03\x04", "on the loop's thread it happens at once"
    assert await asyncio.gather(*transfers) == [1] * 4
    assert not world.write().done(), "the rule stays"
    assert world.plan.counts.released == 4


async def test_release_the_nth(world: World) -> None:
    world.plan.hold()
    transfers = [world.write(bytes([i + 1]), i) for i in range(4)]
    world.plan.release(3)
    assert await transfers[2] == 1
    assert world.landed[:4] == b"\x00\x00\x03\x00"
    world.plan.release(3)
    assert await transfers[3] == 1
    world.plan.release(5)  # there is none
    world.plan.release(1)
    assert await transfers[0] == 1
    assert world.plan.holding == 1


async def test_release_from_another_thread(world: World) -> None:
    world.plan.hold()
    transfers = [world.write(bytes([i + 1]), i) for i in range(3)]
    thread = threading.Thread(target=world.plan.release)
    thread.start()
    assert await asyncio.wait_for(asyncio.gather(*transfers), 5) == [1] * 3
    thread.join()


async def test_cancel_of_held_work(world: World) -> None:
    world.plan.hold()
    transfer = world.write()
    assert transfer.cancel()
    await transfer.drained()
    assert world.plan.holding == 0
    world.plan.release()
    assert world.landed[:5] == bytes(5)


async def test_late(world: World) -> None:
    world.plan.late(nth=1)
    notes = world.pair.right.notifications("n")
    transfer = world.write(notify=("n", b"late"))
    assert transfer.cancel()
    assert world.pair.left.stats().pinned == 1
    world.plan.release()
    assert world.landed[:5] == b"hello"
    await transfer.drained()
    assert (await notes.get()).payload == b"late"
    assert world.plan.counts.landed_late == 1


async def test_late_work_that_is_not_given_up_is_only_held(world: World) -> None:
    world.plan.late(nth=1)
    transfer = world.write()
    world.plan.release()
    assert await transfer == 5
    assert world.plan.counts.landed_late == 0


async def test_late_read(world: World) -> None:
    world.region.numpy()[:5] = list(b"hello")
    buffer = bytearray(5)
    world.plan.late(nth=1)
    transfer = world.pair.left.read(buffer, world.remote[0:5])
    transfer.cancel()
    assert buffer == bytes(5)
    world.plan.release()
    assert buffer == b"hello", "a cancelled read writes into the buffer later: that is why it stays pinned"
    await transfer.drained()


async def test_late_and_dropped(world: World) -> None:
    """A fault that breaks the link ends the work at once, late or not."""
    world.plan.late(nth=1).drop_peer(nth=1)
    transfer = world.write()
    with pytest.raises(PeerLostError):
        await transfer
    async with asyncio.timeout(5):
        await transfer.drained()


@pytest.mark.parametrize("after", [0.0, 0.3, 0.5, 0.99])
async def test_stall(world: World, after: float) -> None:
    world.plan.stall(after, nth=1)
    transfer = world.write(bytes([9]) * 1000)
    part = int(1000 * after)
    assert world.landed[:1001] == bytes([9]) * part + bytes(1001 - part)
    assert transfer.progress() == part
    assert world.plan.holding == 1
    world.plan.release()
    assert await transfer == 1000
    assert world.landed[:1001] == bytes([9]) * 1000 + bytes(1)


@pytest.mark.parametrize("also", ["hold", "late"])
async def test_one_release_is_enough(world: World, also: str) -> None:
    """An operation that is held whole, and would stall in the middle as well."""
    getattr(world.plan.stall(0.5, nth=1), also)(nth=1)
    transfer = world.write()
    assert world.landed[:5] == bytes(5)
    world.plan.release()
    assert await transfer == 5
    assert world.landed[:5] == b"hello"
    await transfer.drained()


async def test_stall_of_a_batch_and_cancel(world: World) -> None:
    from hixl_async import Batch

    here = world.pair.left.allocate("here", 100)
    here.numpy()[:] = 7
    world.plan.stall(0.55)
    batch = Batch("write", here, world.remote, [(i, 2 * i, 1) for i in range(0, 100, 10)])
    transfer = world.pair.left.submit(batch)
    await asyncio.sleep(0)
    assert [world.landed[2 * i] for i in range(0, 100, 10)] == [7] * 5 + [0] * 5
    assert transfer.cancel()
    await transfer.drained()
    world.plan.release()
    assert [world.landed[2 * i] for i in range(0, 100, 10)] == [7] * 5 + [0] * 5
    world.plan.clear().stall(0.55, nth=1)
    transfer = world.pair.left.submit(Batch("write", here, world.remote, [(0, 1000, 100)]))
    assert world.landed[1000:1100] == bytes([7]) * 55 + bytes(45)
    world.plan.release()
    assert await transfer == 100


async def test_everything_at_once(world: World) -> None:
    """Faults of several rules add up, and the right bytes arrive in the end."""
    notes = world.pair.right.notifications("n")
    world.plan.delay(0.001).delay(0.001, part="note").delay(0.001, part="outcome").bandwidth(1e7).stall(0.5).hold(
        every=2
    )
    transfers = [world.write(bytes([i + 1]) * 100, 100 * i, notify=("n", bytes([i]))) for i in range(6)]
    while not all(transfer.done() for transfer in transfers):
        world.plan.release()
        await asyncio.sleep(0.001)
    assert await asyncio.gather(*transfers) == [100] * 6
    assert world.landed[:600] == b"".join(bytes([i + 1]) * 100 for i in range(6))
    assert sorted([(await notes.get()).payload[0] for _ in range(6)]) == list(range(6))


# -- failures


async def test_fail(world: World) -> None:
    world.plan.fail("timeout", native=110, nth=2)
    assert await world.write(b"first", 0) == 5
    with pytest.raises(TransferError) as caught:
        await world.write(b"second", 10)
    assert (caught.value.code, caught.value.native, caught.value.index) == ("timeout", 110, None)
    assert world.landed[10:16] == bytes(6)
    assert await world.write(b"third", 20) == 5
    assert world.plan.counts.failed == 1


async def test_fail_breaks_the_link(world: World) -> None:
    world.plan.fail("link", link=True, nth=1)
    with pytest.raises(PeerLostError):
        await world.write()
    await until(lambda: world.pair.peer.state.value == "down")
    with pytest.raises(PeerDownError):
        world.write()
    await until(lambda: world.pair.back.state.value == "down")


async def test_drop_peer(world: World) -> None:
    world.plan.hold(nth=1).late(nth=2).delay(1, nth=3).drop_peer(nth=4)
    held, late, delayed, dropping = transfers = [world.write(bytes([i + 1]), i) for i in range(4)]
    for transfer in transfers:
        with pytest.raises(PeerLostError):
            await transfer
    await asyncio.gather(*(transfer.drained() for transfer in (held, delayed, dropping)))
    await until(lambda: world.pair.peer.state.value == "down")
    assert "broken by the fault plan" in str(world.pair.peer.error)
    assert world.pair.left.stats().pinned >= 1
    world.plan.release()
    await late.drained()
    assert world.plan.counts.broken == 1


async def test_break_links_now(world: World) -> None:
    world.plan.hold()
    transfer = world.write()
    world.plan.break_links()
    with pytest.raises(PeerLostError):
        await transfer
    await until(lambda: world.pair.peer.state.value == world.pair.back.state.value == "down")


async def test_break_links_from_another_thread(world: World) -> None:
    world.plan.hold()
    transfers = [world.write() for _ in range(10)]
    thread = threading.Thread(target=world.plan.break_links)
    thread.start()
    outcomes = await asyncio.gather(*transfers, return_exceptions=True)
    thread.join()
    assert all(isinstance(outcome, PeerLostError) for outcome in outcomes)


async def test_connect_again_after_a_drop(world: World) -> None:
    world.plan.drop_peer(nth=1)
    with pytest.raises(PeerLostError):
        await world.write()
    await until(lambda: world.pair.peer.state.value == world.pair.back.state.value == "down")
    world.plan.clear()
    peer = await world.pair.left.connect(world.pair.right.address)
    remote = await peer.region("kv")
    assert await world.pair.left.write(b"again", remote[0:5]) == 5
    assert world.landed[:5] == b"again"


# -- order


@pytest.mark.parametrize("window", [2, 3, 5])
async def test_reorder(world: World, window: int) -> None:
    notes = world.pair.right.notifications("n")
    world.plan.reorder(window, 5.0)
    order: list[int] = []
    transfers = [world.write(bytes([i + 1]), i, notify=("n", bytes([i]))) for i in range(2 * window)]
    for i, transfer in enumerate(transfers):
        transfer.add_done_callback(lambda _, i=i: order.append(i))
    await asyncio.gather(*transfers)
    await asyncio.sleep(0)
    expected = list(range(2 * window))
    assert sorted(order) == expected
    assert sorted(order[:window]) == expected[:window], "nothing leaves its window"
    assert order[:window] != expected[:window]
    arrived = [(await notes.get()).payload[0] for _ in range(2 * window)]
    assert arrived == order, "notifications arrive in the order in which their transfers finished"
    assert world.plan.counts.reordered == 2 * window


async def test_reorder_does_not_wait_forever(world: World) -> None:
    world.plan.reorder(100, 0.02)
    assert await asyncio.gather(*(world.write(b"x", i) for i in range(3))) == [1] * 3


async def test_cancelled_members_of_a_window(world: World) -> None:
    world.plan.reorder(4, 0.02)
    first = [world.write(b"x", i) for i in range(3)]
    for transfer in first:
        transfer.cancel()
    assert await asyncio.gather(*(world.write(b"x", i) for i in range(5))) == [1] * 5


# -- several engines, one plan


async def test_a_plan_for_both_engines() -> None:
    plan = FaultPlan(1).hold()
    drivers = faulty("shm", plan)
    async with engine_pair(drivers=drivers, other=drivers) as pair:
        _, remote = await pair.region("right")
        pair.left.allocate("left", 64, access="read-write")
        mirror = await pair.back.region("left")
        first, second = pair.left.write(b"1", remote[0:1]), pair.right.write(b"2", mirror[0:1])
        third = pair.left.write(b"3", remote[1:2])
        plan.release(2)
        assert await second == 1
        assert not first.done()
        plan.release()
        assert await first == await third == 1


async def test_a_faulty_engine_speaks_with_a_plain_one_both_ways(world: World) -> None:
    world.pair.left.allocate("left", 64, access="read-write")
    remote = await world.pair.back.region("left")
    assert await world.pair.right.write(b"hello", remote[0:5]) == 5
    notes = world.pair.left.notifications("n")
    await world.pair.right.notify(world.pair.back, "n", b"to the faulty one")
    assert (await notes.get()).payload == b"to the faulty one"


async def test_close_with_everything_in_flight() -> None:
    plan = FaultPlan(5).delay(0, 0.02, chance=0.5).hold(every=7).pending(chance=0.3).reorder(3, 0.01, chance=0.3)
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.3) as pair:
        _, remote = await pair.region()
        transfers = [pair.left.write(b"x" * 100, remote[100 * i : 100 * i + 100]) for i in range(100)]
        await asyncio.sleep(0.005)
    assert all(transfer.done() for transfer in transfers)
    await asyncio.gather(*transfers, return_exceptions=True)


async def test_stall_of_one_byte_after_a_delay(world: World) -> None:
    world.plan.stall(0.0).delay(0.005)
    transfer = world.write(b"x")
    await asyncio.sleep(0.02)
    assert not transfer.done()
    assert world.plan.counts.stalled == world.plan.holding == 1
    world.plan.release()
    assert await transfer == 1


async def test_delays_of_a_bare_note_add_up(world: World) -> None:
    notes = world.pair.right.notifications("n")
    world.plan.delay(0.02).delay(0.02, part="note")
    before = time.monotonic()
    await world.pair.left.notify(world.pair.peer, "n", b"bare")
    assert (await notes.get()).payload == b"bare"
    assert 0.039 < time.monotonic() - before < 1
