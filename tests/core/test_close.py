"""C7: closing refuses new work, drains within a timeout, and leaks, with a warning, what a device might still write."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from hixl_async import ClosedError, Engine, PeerLostError
from hixl_async.testing import FaultPlan, engine_pair, faulty, until

from .conftest import World


async def test_c7_close_refuses_new_work(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write()
    closing = asyncio.create_task(world.left.aclose())
    await until(lambda: world.left.closed)
    assert not closing.done()
    for call in (
        lambda: world.write(),
        lambda: world.left.read(bytearray(5), world.remote[0:5]),
        lambda: world.left.submit(world.batch([(0, 0, 8)])),
        lambda: world.left.allocate("new", 64),
        lambda: world.left.register("new", bytearray(8)),
        lambda: world.left.notifications("topic"),
        lambda: world.left.accepted(),
        lambda: world.left.group(),
        lambda: world.left.serve("service", lambda peer, body: body),
    ):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        await world.left.connect("127.0.0.1:1")
    world.plan.release()
    await closing
    assert transfer.done()
    with contextlib.suppress(Exception):
        await transfer


async def test_c7_close_drains_work_in_flight() -> None:
    plan = FaultPlan(1).delay(0.1)
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=3.0) as pair:
        region, remote = await pair.region("kv", 4096)
        buffer = bytearray(b"hello")
        transfer = pair.left.write(buffer, remote[0:5])
        await pair.left.aclose()
        assert transfer.result() == 5, "it was cut short"
        assert bytes(memoryview(region)[:5]) == b"hello"
        assert pair.left.stats().pinned == 0
        buffer.append(1)  # it is not held any more


async def test_c7_close_waits_for_the_links_of_lost_peers(loop_errors: list[Any]) -> None:
    plan = FaultPlan(1).late()
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=3.0) as pair:
        region, remote = await pair.region("kv", 4096)
        buffer = bytearray(b"hello")
        transfer = pair.left.write(buffer, remote[0:5])
        plan.break_links()
        with pytest.raises(PeerLostError):
            await transfer
        assert pair.left.stats().pinned >= 1
        asyncio.get_running_loop().call_later(0.1, plan.release)
        await pair.left.aclose()
        assert pair.left.stats().pinned == 0
        buffer.append(1)
        assert not [context for context in loop_errors if "still held the memory" in context["message"]]
        loop_errors.clear()  # of the right engine's region, which a peer that is not dead may still write
        assert region


async def test_c7_close_is_idempotent_and_survives_cancellation(world: World) -> None:
    closing = asyncio.create_task(world.left.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await world.left.aclose()
    await world.left.aclose()
    assert world.left.stats().peers == 0


async def test_c7_a_region_in_use_stays_until_its_transfers_are_released(world: World) -> None:
    region = world.left.allocate("source", 64)
    world.plan.late(nth=1)
    transfer = world.left.write(region[0:8], world.remote[0:8])
    closing = asyncio.create_task(region.aclose())
    await asyncio.sleep(0.01)
    assert not closing.done()
    assert world.left.stats().regions == 2
    transfer.cancel()
    await asyncio.sleep(0)
    assert not closing.done()
    world.plan.release()
    await closing
    assert world.left.stats().regions == 1


async def test_c7_views_outlive_the_engine() -> None:
    async with Engine(name="alone") as engine:
        view = memoryview(engine.allocate("kv", 4096))
        view[0:5] = b"hello"
    gc.collect()
    assert bytes(view[0:5]) == b"hello"
    view.release()


# In a process of its own, because what it leaks on purpose is a leak.
STUCK = """
    import asyncio, gc, sys, time
    from hixl_async import TransferError
    from hixl_async.engine import engine
    from hixl_async.testing import FaultPlan, engine_pair, faulty

    engine.LINGER = 0.1

    async def main():
        told = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        plan = FaultPlan(1).late()
        async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.1) as pair:
            region, remote = await pair.region("kv", 4096)
            transfer = pair.left.write(bytearray(b"stuck"), remote[0:5])
            drained = asyncio.ensure_future(transfer.drained())
            by_buffer = asyncio.ensure_future(pair.left.drained(remote))
            await asyncio.sleep(0)
            before = time.monotonic()
            await pair.left.aclose()
            took = time.monotonic() - before
            assert took < 3, f"close took {took} s"
            assert any("it is leaked" in message for message in told), told
            for waiter in (drained, by_buffer):
                try:
                    await waiter
                except TransferError as error:
                    assert "leaked" in str(error)
                else:
                    raise AssertionError("drained() promised what is not so")
            assert isinstance(transfer.exception(), Exception)
            del transfer, drained, by_buffer, waiter
            gc.collect()
            assert pair.left.stats().pinned >= 1
            # The device finishes after all: the memory must still be there on both sides.
            plan.release()
            await asyncio.sleep(0.05)
            view = memoryview(region)
            assert bytes(view[:5]) in (b"stuck", bytes(5))
            view.release()

    asyncio.run(main(), debug=True)
    print("survived")
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_c7_memory_that_a_device_holds_is_leaked_loudly(loop: str) -> None:
    code = textwrap.dedent(STUCK)
    if loop == "uvloop":
        pytest.importorskip("uvloop")
        code = code.replace("asyncio.run(main(), debug=True)", "import uvloop; uvloop.run(main(), debug=True)")
    done = subprocess.run(
        [sys.executable, "-P", "-X", "faulthandler", "-c", code], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "survived\n", done.stderr


async def test_an_engine_that_was_never_closed_warns() -> None:
    engine = Engine(name="forgotten")
    await engine.open()
    address = engine.address
    assert address == ""
    with pytest.warns(ResourceWarning, match=r"forgotten.*never closed; use 'async with'"):
        engine.__del__()
    await engine.aclose()


async def test_use_before_open() -> None:
    engine = Engine(name="unopened")
    for call in (lambda: engine.allocate("kv", 64), lambda: engine.notifications("t"), lambda: engine.drained(b"x")):
        with pytest.raises(ClosedError, match=r"not open.*async with"):
            call()
    await engine.aclose()


async def test_open_twice(world: World) -> None:
    with pytest.raises(ClosedError, match="make a new one"):
        await world.left.open()


async def test_failed_open_leaves_nothing(loop_errors: list[Any]) -> None:
    from hixl_async import DriverError, DriverLoadError, InvalidArgumentError

    for drivers, kind, says in (
        (["no such"], DriverLoadError, "there is no driver 'no such'; installed: .*shm"),
        (["faulty"], InvalidArgumentError, "wraps another driver"),
        ({"shm": {"threads": "many"}}, InvalidArgumentError, "threads=many"),
        ({"shm": {"wrapper": "nothing"}}, DriverLoadError, "there is no driver 'nothing'"),
        ({"shm": {"wrapper": "faulty", "inner.threads": 0}}, InvalidArgumentError, "threads=0"),
        ({"shm": {"wrapper": "faulty", "speed": 3}}, InvalidArgumentError, "no option speed"),
        ({"shm": {}, "faulty": {}}, InvalidArgumentError, "wraps another driver"),
    ):
        with pytest.raises(DriverError if kind is DriverLoadError else kind, match=says):
            await Engine(name="x", drivers=drivers).open()
