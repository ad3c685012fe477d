"""Transports whose own calls block while they start, register, deregister and shut down.

The driver is shared memory under a plan that delays, holds or fails these calls; see ``verb=`` of `FaultPlan`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
from tables import table, vt

from hixl_async import (
    BufferTypeError,
    ClosedError,
    DriverError,
    DriverLoadError,
    Engine,
    InvalidArgumentError,
    TransferState,
    TransferTimeoutError,
    WaitTimeoutError,
    drivers,
)
from hixl_async.testing import FaultPlan, engine_pair, faulty, until

from .conftest import World


def opened(plan: FaultPlan, **settings: Any) -> Engine:
    return Engine("127.0.0.1:0", name="blocking", drivers=faulty("shm", plan), **settings)


# -- start


async def test_open_waits_for_the_start(loop_errors: list[Any]) -> None:
    plan = FaultPlan(1).hold(verb="start")
    engine = opened(plan)
    opening = asyncio.create_task(engine.open())
    await until(lambda: plan.holding)
    await asyncio.sleep(0.01)
    assert not opening.done()
    assert engine.address == "", "it listens before it can serve"
    plan.release()
    await opening
    assert engine.address
    await engine.aclose()


@pytest.mark.parametrize(
    ("status", "kind"), [("nomem", DriverError), ("system", DriverError), ("invalid", InvalidArgumentError)]
)
async def test_a_start_that_fails(status: Any, kind: type[Exception]) -> None:
    engine = opened(FaultPlan(1).fail(status, native=13, verb="start"))
    with pytest.raises(kind, match="start of driver 'shm'") as caught:
        await engine.open()
    assert caught.value.native == 13  # type: ignore[attr-defined]
    assert engine.closed
    assert engine.stats().pinned == 0


async def test_when_one_start_fails_the_others_are_shut_down() -> None:
    good, bad = FaultPlan(1).hold(verb="shutdown"), FaultPlan(1).fail("system", verb="start")
    engine = Engine(drivers={**faulty("shm", good), "faulty": {"driver": table("shm"), "control": bad._block}})
    opening = asyncio.create_task(engine.open())
    await until(lambda: good.holding)
    assert not opening.done()
    good.release()
    with pytest.raises(DriverError, match="start of driver 'faulty'"):
        await opening
    assert engine.driver_stats() == {"shm": {}, "faulty": {}}, "a driver is open"


async def test_open_that_is_cancelled_during_the_start() -> None:
    plan = FaultPlan(1).hold(verb="start")
    engine = opened(plan)
    opening = asyncio.create_task(engine.open())
    await until(lambda: plan.holding)
    opening.cancel()
    await asyncio.sleep(0.01)
    assert not opening.done(), "a driver that starts cannot be closed"
    plan.release()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert engine.driver_stats() == {"shm": {}}


# -- shutdown


async def test_close_waits_for_the_shutdown() -> None:
    plan = FaultPlan(1).hold(verb="shutdown")
    engine = await opened(plan).open()
    closing = asyncio.create_task(engine.aclose())
    await until(lambda: plan.holding)
    await asyncio.sleep(0.01)
    assert not closing.done()
    assert engine.driver_stats()["shm"], "it was closed while it shut down"
    plan.release()
    await closing
    assert engine.driver_stats() == {"shm": {}}


async def test_a_shutdown_that_fails_is_reported(loop_errors: list[Any]) -> None:
    engine = await opened(FaultPlan(1).fail("timeout", verb="shutdown")).open()
    await engine.aclose()
    (context,) = loop_errors
    assert "could not be shut down" in context["message"]
    assert "shutdown of driver 'shm'" in str(context["exception"])
    loop_errors.clear()
    assert engine.driver_stats() == {"shm": {}}, "it is closed all the same"


# In a process of its own, because what it leaks on purpose is a leak.
STUCK = """
    import asyncio, time
    from hixl_async import Engine
    from hixl_async.engine import engine as module
    from hixl_async.testing import FaultPlan, faulty

    module.LINGER = 0.1

    async def main():
        told = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        plan = FaultPlan(1).hold(verb="{verb}")
        engine = await Engine(drivers=faulty("shm", plan), close_timeout=0.1).open()
        buffer = bytearray(4096)
        region = engine.register("lent", buffer)
        before = time.monotonic()
        await engine.aclose()
        assert time.monotonic() - before < 4
        assert any("still held the memory of 1 " in message for message in told), told
        assert engine.driver_stats()["shm"], "the driver was closed under its own call"
        del region
        try:
            buffer.append(1)
        except BufferError:
            print("kept")
        else:
            print("given back")
        plan.release()
        await asyncio.sleep(0.05)

    asyncio.run(main())
"""


async def test_open_that_is_cancelled_during_a_start_that_never_ends(loop_errors: list[Any]) -> None:
    plan = FaultPlan(1).hold(verb="start")
    engine = opened(plan, close_timeout=0.1)
    opening = asyncio.create_task(engine.open())
    await until(lambda: plan.holding)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    (context,) = loop_errors
    assert "still held the memory of 1 transfers or calls" in context["message"]
    loop_errors.clear()
    assert engine.driver_stats()["shm"], "the driver was closed under its own call"
    # Leaked memory is released here, so that the balance sheet is empty.
    plan.release()
    await until(lambda: plan.counts.released == 1)
    engine._drivers["shm"].close()


@pytest.mark.parametrize(("verb", "buffer"), [("shutdown", "given back"), ("retire", "kept"), ("ready", "kept")])
def test_c7_a_call_that_does_not_end_leaks_loudly(verb: str, buffer: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(STUCK.format(verb=verb))],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{buffer}\n", done.stderr


# -- memory that is deregistered later


async def test_a_closed_region_is_kept_until_its_transport_releases_it() -> None:
    plan = FaultPlan(1).hold(verb="retire")
    async with opened(plan) as engine:
        buffer = bytearray(b"lent" * 1024)
        region = engine.register("lent", buffer)
        await region.aclose()  # it is revoked, which is what a user waits for
        assert plan.holding == 1
        assert region.pins == 0, "it is not in use"
        await region.released()
        assert engine.stats().regions == 1
        with pytest.raises(BufferError):
            buffer.append(1)
        engine.register("lent", bytearray(8))  # the name is free
        plan.release()
        await until(lambda: engine.stats().regions == 1)
        buffer.append(1)
        plan.clear()


async def test_views_hold_a_region_back() -> None:
    plan = FaultPlan(1).hold(verb="retire")
    async with opened(plan) as engine:
        region = engine.allocate("kv", 4096)
        view = memoryview(region)
        await region.aclose()
        assert plan.holding == 0, "it is retired while a view exists"
        view[:4] = b"here"
        view.release()
        assert plan.holding == 1
        assert engine.stats().regions == 1
        plan.release()
        await until(lambda: engine.stats().regions == 0)


async def test_close_waits_until_memory_is_released() -> None:
    plan = FaultPlan(1).hold(verb="retire").hold(verb="shutdown")
    engine = await opened(plan).open()
    engine.allocate("kv", 4096)
    closing = asyncio.create_task(engine.aclose())
    await until(lambda: plan.holding)
    await asyncio.sleep(0.01)
    assert plan.holding == 1, "it is shut down before its memory is let go"
    assert engine.stats().regions == 1
    plan.release()
    await until(lambda: plan.holding)
    assert engine.stats().regions == 0
    assert not closing.done()
    plan.release()
    await closing


async def test_the_allocator_releases_memory_last() -> None:
    first, second = FaultPlan(1).hold(verb="retire"), FaultPlan(1).hold(verb="retire")
    other = {"faulty": {"driver": table("shm"), "control": second._block}}
    async with Engine(drivers={**faulty("shm", first), **other}) as engine:
        region = engine.allocate("kv", 4096)
        await region.aclose()
        assert (first.holding, second.holding) == (0, 1), "its pages go before others have forgotten them"
        second.release()
        await until(lambda: first.holding)
        assert engine.stats().regions == 1
        first.release()
        await until(lambda: engine.stats().regions == 0)
        assert engine.driver_stats()["shm"]["memories"] == 0


@pytest.mark.parametrize("allocated", [True, False])
async def test_memory_that_a_transport_cannot_release_is_leaked_loudly(loop_errors: list[Any], allocated: bool) -> None:
    plan = FaultPlan(1).fail("system", verb="retire", nth=1)
    async with opened(plan) as engine:
        buffer = bytearray(64)
        region = engine.allocate("kv", 64) if allocated else engine.register("kv", buffer)
        await region.aclose()
        await until(lambda: loop_errors)
        (context,) = loop_errors
        assert "is leaked: its transport did not release" in context["message"]
        assert "retirement of a region" in str(context["exception"])
        loop_errors.clear()
        assert engine.stats().regions == 1
        if not allocated:
            with pytest.raises(BufferError):
                buffer.append(1)
        await engine.allocate("next", 64).aclose()
        await until(lambda: engine.stats().regions == 1)


REFUSED = """
    import asyncio, sys
    sys.path.insert(0, {tests!r})
    from hixl_async import Engine
    from hixl_async.engine import engine as module
    from tables import table, vt

    module.LINGER = 0.3

    async def main():
        told = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        driver = table("shm", mem_retire=lambda memory, op: -vt.NOMEM)
        async with Engine(drivers={{"faulty": {{"driver": driver}}}}, close_timeout=0.2) as engine:
            buffer = bytearray(64)
            region = engine.register("kv", buffer)
            await region.aclose()
            assert told and "is leaked: its transport did not release" in told[0], told
            assert engine.stats().regions == 1
            del region
        try:
            buffer.append(1)
        except BufferError:
            print("kept")

    asyncio.run(main())
"""


def test_c7_memory_that_a_transport_refuses_to_release_is_leaked_loudly() -> None:
    code = textwrap.dedent(REFUSED.format(tests=str(Path(__file__).resolve().parents[1])))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "kept\n", done.stderr


# -- memory that is ready later


async def test_peers_wait_until_memory_is_ready() -> None:
    plan = FaultPlan(1).hold(verb="ready")
    async with engine_pair(other=faulty("shm", plan)) as pair:
        region = pair.right.allocate("kv", 64, access="write")
        fetching = asyncio.create_task(pair.peer.region("kv"))
        ready = asyncio.create_task(region.ready())
        await until(lambda: "kv" in pair.peer.regions)
        await asyncio.sleep(0.02)
        assert not fetching.done()
        assert not ready.done()
        plan.release()
        await pair.left.write(b"x" * 64, await fetching)
        await ready
        await region.ready()
        # One that is ready already is answered at once.
        plan.clear()
        pair.right.allocate("next", 64, access="write")
        assert await pair.peer.region("next")


async def test_memory_that_cannot_be_registered(caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan(1).fail("nomem", native=207001, verb="ready", nth=1)
    async with engine_pair(other=faulty("shm", plan)) as pair:
        with caplog.at_level(logging.WARNING, "hixl_async"):
            region = pair.right.allocate("kv", 64, access="write")
            with pytest.raises(DriverError, match=r"'kv'.*cannot be used by driver 'shm'.*registration") as caught:
                await pair.peer.region("kv")
        assert caught.value.peer == "right"
        assert "cannot be used by driver 'shm'" in caplog.text
        for _ in range(2):
            with pytest.raises(DriverError, match="cannot be used by driver 'shm'") as caught:
                await region.ready()
            assert caught.value.native == 207001
        assert region.pins == 0
        await region.aclose()
        await pair.right.allocate("next", 64, access="write").ready()
        await pair.left.write(bytes(64), await pair.peer.region("next"))


async def test_a_registration_that_has_failed_already() -> None:
    quick: Any = {"faulty": {"driver": table("shm", mem_ready=lambda memory, op: -vt.NOMEM)}}
    async with engine_pair({"faulty": {"driver": table("shm")}}, other=quick) as pair:
        region = pair.right.allocate("kv", 64, access="write")
        for call in (region.ready, lambda: pair.peer.region("kv")):
            with pytest.raises(DriverError, match="cannot be used by driver 'faulty'"):
                await call()
        await region.aclose()


async def test_another_driver_takes_over_for_one_that_cannot_register() -> None:
    plan = FaultPlan(1).fail("nomem", verb="ready", nth=1)
    both: Any = {"shm": {}, "faulty": {"driver": table("shm")}}
    async with engine_pair(both, other={**faulty("shm", plan), "faulty": {"driver": table("shm")}}) as pair:
        pair.right.allocate("kv", 64, access="write")
        remote = await pair.peer.region("kv")
        assert pair.peer.route(remote).startswith("faulty: ")
        await pair.left.write(bytes(64), remote)
        pair.right.allocate("next", 64, access="write")
        assert pair.peer.route(await pair.peer.region("next")).startswith("shm: ")


async def test_an_importer_that_does_not_wait_leaves_no_pin() -> None:
    plan = FaultPlan(1).hold(verb="ready")
    async with engine_pair(other=faulty("shm", plan)) as pair:
        region = pair.right.allocate("kv", 64, access="write")
        with pytest.raises(WaitTimeoutError):
            await pair.peer.region("kv", timeout=0.05)
        again = asyncio.create_task(pair.peer.region("kv"))
        await asyncio.sleep(0.02)
        again.cancel()
        third = asyncio.create_task(pair.peer.region("kv"))
        await asyncio.sleep(0.02)
        plan.release()
        await pair.left.write(bytes(64), await third)
        assert region.pins == 1
        await region.aclose()
        assert region.pins == 0


@pytest.mark.parametrize("end", ["region", "peer", "engine"])
async def test_ends_while_memory_becomes_ready(end: str) -> None:
    plan = FaultPlan(1).hold(verb="ready")
    async with engine_pair(other=faulty("shm", plan), close_timeout=2.0) as pair:
        region = pair.right.allocate("kv", 64, access="write")
        fetching = asyncio.create_task(pair.peer.region("kv"))
        ready = asyncio.create_task(region.ready())
        await until(lambda: "kv" in pair.peer.regions)
        asyncio.get_running_loop().call_later(0.05, plan.release)
        await {"region": region.aclose, "peer": pair.left.aclose, "engine": pair.right.aclose}[end]()
        await asyncio.wait([fetching, ready])
        assert fetching.exception() is not None
        assert ready.exception() is None or isinstance(ready.exception(), ClosedError)
        await until(lambda: region.pins == 0)


async def test_work_may_use_memory_that_is_not_ready() -> None:
    plan = FaultPlan(1).hold(verb="ready")
    async with engine_pair(faulty("shm", plan)) as pair:
        there, remote = await pair.region("there", 64)
        here = pair.left.allocate("here", 64)
        await pair.left.write(here, remote)
        plan.release()
        await here.ready()
        del there


# -- work that runs out of time


async def test_a_timeout_takes_memory_back_from_a_transport_that_hangs(world: World) -> None:
    world.plan.stuck(nth=1)
    buffer = bytearray(b"stuck")
    transfer = world.write(buffer, timeout=0.02)
    with pytest.raises(TransferTimeoutError, match="timeout"):
        await transfer
    await transfer.drained()
    buffer.append(1)
    assert world.plan.holding == 0
    await world.works()


async def test_stalled_work_is_taken_back_too() -> None:
    plan = FaultPlan(1).stuck(nth=1)
    async with engine_pair(faulty("shm", plan), stall=0.1) as pair:
        _, remote = await pair.region("there", 64)
        transfer = pair.left.write(bytes(8), remote[0:8])
        with pytest.raises(TransferTimeoutError, match="no progress"):
            await transfer
        await transfer.drained()
        assert plan.holding == 0


async def test_cancelling_costs_no_link_until_nothing_moves() -> None:
    plan = FaultPlan(1).stuck(nth=1)
    async with engine_pair(faulty("shm", plan), stall=0.5) as pair:
        _, remote = await pair.region("there", 64)
        transfer = pair.left.write(bytes(8), remote[0:8], timeout=0.01)
        transfer.cancel()
        await asyncio.sleep(0.05)
        assert plan.holding == 1, "a cancel gave the link up"
        assert transfer.state is TransferState.CANCELLED
        await transfer.drained()
        assert plan.holding == 0
        assert pair.left.stats().in_flight == pair.left.stats().pinned == 0


async def test_what_can_be_cancelled_is_not_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    load = drivers.load
    faulty_table = table("faulty", abandon=lambda link, op: asked.append(1) or -vt.UNSUPPORTED)
    monkeypatch.setattr(drivers, "load", lambda name: faulty_table if name == "faulty" else load(name))
    plan = FaultPlan(1).late(nth=1).stuck(nth=2)
    async with engine_pair(faulty("shm", plan)) as pair:
        _, remote = await pair.region("there", 64)
        for calls in (0, 1):
            transfer = pair.left.write(bytes(8), remote[0:8], timeout=0.01)
            with pytest.raises(TransferTimeoutError):
                await transfer
            assert len(asked) == calls, "cancelling was enough" if calls == 0 else "the driver was not told"
            plan.release()
            await transfer.drained()


# -- tables


async def test_a_table_of_the_older_interface_works() -> None:
    # The memory behind it belongs to others, and holds no function.
    old = table("shm", size=vt.CDriver.start.offset, rest=b"\xff" * 256)
    both: Any = {"faulty": {"driver": old}}
    async with engine_pair(both, other=both) as pair:
        region, remote = await pair.region("kv", 64)
        await pair.left.write(b"x" * 64, remote)
        assert bytes(memoryview(region)) == b"x" * 64
        assert all(driver.about() == {} for driver in pair.left._drivers.values())


@pytest.mark.parametrize(("size", "fits"), [(0, True), (-8, False)])
async def test_tables_that_are_too_short_are_refused(monkeypatch: pytest.MonkeyPatch, size: int, fits: bool) -> None:
    old = table("shm", size=vt.CDriver.start.offset + size, rest=b"\xff" * 256)
    monkeypatch.setattr(drivers, "load", lambda name: old)
    engine = Engine()
    if fits:
        async with engine:
            await engine.allocate("kv", 64).aclose()
    else:
        with pytest.raises(DriverLoadError, match="bytes, this core needs"):
            await engine.open()


# -- local memory of drivers that move registered memory only


def narrow(plan: FaultPlan | None = None) -> Any:
    options = {} if plan is None else {"control": plan._block}
    return {"faulty": {"driver": table("shm", lacks=("LOCAL_ANY",)), **options}}


async def test_a_buffer_is_found_in_its_region() -> None:
    import numpy

    async with engine_pair(narrow(), other=narrow()) as pair:
        there, remote = await pair.region("there", 4096)
        array = numpy.arange(512, dtype="int64")
        region = pair.left.register("array", array)
        own = pair.left.allocate("own", 4096)
        await pair.left.write(array[8:16], remote[0:64])
        assert bytes(memoryview(there)[:64]) == array[8:16].tobytes()
        await pair.left.read(array[0:8], remote[0:64])
        assert (array[0:8] == array[8:16]).all()
        await pair.left.write(array, remote)
        await pair.left.write(memoryview(own)[4000:4096], remote[0:96])
        await pair.left.write(region[0:8], remote[0:8])
        for stranger in (bytes(8), bytearray(8), numpy.zeros(1), memoryview(bytearray(64))[3:11]):
            with pytest.raises(
                BufferTypeError, match=r"'faulty' moves memory only where it is registered.*engine\.register"
            ):
                pair.left.write(stranger, remote[0:8])
        await region.aclose()
        with pytest.raises(BufferTypeError, match=r"engine\.register"):
            pair.left.write(array[8:16], remote[0:64])
        assert pair.left.stats().pinned == 0


async def test_a_buffer_pins_the_region_that_it_lies_in() -> None:
    plan = FaultPlan(1)
    async with engine_pair(narrow(plan), other=narrow()) as pair:
        _, remote = await pair.region("there", 4096)
        buffer = bytearray(4096)
        region = pair.left.register("buffer", buffer)
        plan.hold(nth=1)
        transfer = pair.left.write(memoryview(buffer)[10:20], remote[0:10])
        assert region.pins == 1
        drained = asyncio.ensure_future(pair.left.drained(memoryview(buffer)[15:16]))
        beside = pair.left.drained(memoryview(buffer)[20:30])
        await beside
        assert not drained.done()
        closing = asyncio.create_task(region.aclose())
        await asyncio.sleep(0)
        with pytest.raises(BufferTypeError, match=r"engine\.register"):
            pair.left.write(memoryview(buffer)[10:20], remote[0:10])  # it is closed, although it is still in use
        plan.release()
        await transfer
        await drained
        await closing
        assert region.pins == 0
        gone = weakref.ref(region)
        del region, transfer, closing
        gc.collect()
        assert gone() is None, "something still refers to it"


async def test_regions_that_overlap() -> None:
    async with engine_pair(narrow(), other=narrow()) as pair:
        _, remote = await pair.region("there", 4096)
        whole = memoryview(bytearray(4096))
        outer = pair.left.register("outer", whole)
        pieces = [pair.left.register(f"piece {at}", whole[at : at + 16]) for at in (0, 64, 128, 4080)]
        for start, stop in ((0, 16), (0, 17), (60, 70), (64, 80), (70, 100), (130, 4096), (4080, 4096), (0, 4096)):
            await pair.left.write(whole[start:stop], remote[0 : stop - start])
        await outer.aclose()
        for start, stop in ((0, 16), (70, 80), (4080, 4096)):
            await pair.left.write(whole[start:stop], remote[0 : stop - start])
        for start, stop in ((0, 17), (60, 70), (16, 20), (130, 146), (4079, 4096)):
            with pytest.raises(BufferTypeError):
                pair.left.write(whole[start:stop], remote[0 : stop - start])
        for piece in pieces:
            await piece.aclose()


async def test_a_region_that_the_driver_does_not_know() -> None:
    both: Any = {"shm": {}, "faulty": {"driver": table("shm", lacks=("LOCAL_ANY", "REGISTER"))}}
    plain: Any = {"faulty": {}}
    plain["faulty"]["driver"] = table("shm")
    from hixl_async import Batch

    async with engine_pair(both, other=plain) as pair:
        _, remote = await pair.region("there", 64)
        here = pair.left.allocate("here", 64)
        for call in (
            lambda: pair.left.write(here, remote),
            lambda: pair.left.write(here[0:8], remote[0:8]),
            lambda: Batch("write", here, remote, [(0, 0, 8)]),
        ):
            with pytest.raises(BufferTypeError, match=r"'here'.*is not known to driver 'faulty'"):
                call()
        assert here.pins == 0
