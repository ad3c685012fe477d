"""C9: an engine belongs to one loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hixl_async import Batch, Engine, WrongLoopError
from hixl_async.core.in_flight import drain
from hixl_async.testing import until

from .conftest import World


def elsewhere(call: Callable[[], Any], *, loop: bool) -> BaseException | None:
    """Return what `call` raises in another thread, with or without a running loop there."""
    raised: list[BaseException] = []

    async def main() -> None:
        attempt()

    def attempt() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=(lambda: asyncio.run(main())) if loop else attempt)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize("loop", [False, True], ids=["no loop", "another loop"])
async def test_c9_foreign_threads_are_refused(world: World, loop: bool) -> None:
    batch = world.batch([(0, 0, 8)])
    world.plan.hold(nth=1)
    held, done = world.write(), world.write()
    await done
    region, collector = world.left.allocate("region", 64), world.left.coalesce()
    heard, silent = world.left.notifications("heard"), world.left.notifications("silent")
    await world.right.notify(world.pair.back, "heard")
    await until(lambda: len(heard) == 1)
    copy = collector.write(world.here[0:8], world.remote[0:8])
    callbacks: list[Any] = []
    calls: dict[str, Callable[[], Any]] = {
        "write": lambda: world.write(),
        "read": lambda: world.left.read(bytearray(5), world.remote[0:5]),
        "submit": lambda: world.left.submit(batch),
        "drain": lambda: drain(world.left),
        "notify": lambda: world.left.notify(world.peer, "topic"),
        "allocate": lambda: world.left.allocate("new", 64),
        "register": lambda: world.left.register("new", bytearray(8)),
        "notifications": lambda: world.left.notifications("topic"),
        "accepted": lambda: world.left.accepted(),
        "group": lambda: world.left.group(),
        "drained": lambda: world.left.drained(b"x"),
        "serve": lambda: world.left.serve("service", lambda peer, body: body),
        "unserve": lambda: world.left.unserve("service"),
        "room": lambda: world.left.room(1).send(None),
        "connect": lambda: world.left.connect("127.0.0.1:1").send(None),
        "coalesce": lambda: world.left.coalesce(),
        "coalescer.write": lambda: collector.write(world.here[0:8], world.remote[0:8]),
        "coalescer.flush": lambda: collector.flush(),
        "add_close_callback": lambda: world.left.add_close_callback(print),
        "remove_close_callback": lambda: world.left.remove_close_callback(print),
        "aclose": lambda: world.left.aclose(),
        "subscription.get": lambda: heard.get().send(None),
        "subscription.get, empty": lambda: silent.get().send(None),
        "subscription.get_nowait": lambda: heard.get_nowait(),
        "subscription.close": lambda: heard.close(),
        "subscription.aclose": lambda: heard.aclose(),
        "peer.region": lambda: world.peer.region("there").send(None),
        "peer.request": lambda: world.peer.request("hixl.ping", {}).send(None),
        "peer.post": lambda: world.peer.post("hixl.ping", {}),
        "peer.limit_bandwidth": lambda: world.peer.limit_bandwidth(1e9),
        "peer.fenced": lambda: world.peer.fenced().send(None),
        "peer.add_signal_callback": lambda: world.peer.add_signal_callback(lambda: callbacks.append(0)),
        "peer.remove_signal_callback": lambda: world.peer.remove_signal_callback(print),
        "peer.add_lost_callback": lambda: world.peer.add_lost_callback(callbacks.append),
        "peer.remove_lost_callback": lambda: world.peer.remove_lost_callback(print),
        "peer.aclose": lambda: world.peer.aclose(),
        "transfer.add_done_callback": lambda: held.add_done_callback(callbacks.append),
        "transfer.add_done_callback, done": lambda: done.add_done_callback(callbacks.append),
        "transfer.remove_done_callback": lambda: held.remove_done_callback(callbacks.append),
        "region.revoke": lambda: region.revoke(),
        "region.aclose": lambda: region.aclose(),
        "region.ready": lambda: region.ready().send(None),
        "transfer.drained": lambda: held.drained(),
        "transfer.drained, done": lambda: done.drained(),
        "transfer.cancel": lambda: held.cancel(),
        "transfer.at_least": lambda: held.at_least(1).send(None),
        "region.drained": lambda: region.drained(),
        "region.drained, a range": lambda: region[0:8].drained(),
        "region.released": lambda: region.released(),
        "remote.drained": lambda: world.remote.drained(),
    }
    for name, call in calls.items():
        error = elsewhere(call, loop=loop)
        assert isinstance(error, WrongLoopError), f"{name}: {error!r}"
        assert "belongs to the event loop" in str(error)
    assert not held.done()
    world.plan.release()
    await asyncio.gather(held, copy)
    assert region.alive
    assert heard.get_nowait() is not None
    await world.works()
    await world.peer.aclose()
    assert callbacks == []


@pytest.mark.parametrize("loop", [False, True], ids=["no loop", "another loop"])
async def test_c9_what_has_ended_is_closed_anywhere(world: World, loop: bool) -> None:
    """Nothing is left that a call in another thread could harm."""
    queue = world.left.notifications("topic")
    await world.left.aclose()
    for call in (queue.close, lambda: world.left.unserve("service"), lambda: world.left.remove_close_callback(print)):
        assert elsewhere(call, loop=loop) is None


def test_c9_the_next_loop_of_the_same_thread(runner: asyncio.Runner) -> None:
    engine = Engine(name="first")

    async def open_engine() -> Any:
        await engine.open()
        return engine.allocate("kv", 64)

    runner.run(open_engine())

    async def second() -> None:
        with pytest.raises(WrongLoopError):
            engine.allocate("other", 64)
        with pytest.raises(WrongLoopError):
            await engine.connect("127.0.0.1:1")

    other = asyncio.new_event_loop()
    try:
        other.run_until_complete(second())
    finally:
        other.close()
    runner.run(engine.aclose())


def test_c9_calls_while_the_loop_does_not_run(runner: asyncio.Runner) -> None:
    """A synchronous program, or a cell of a notebook, calls on the right thread between two runs of the loop."""
    engine = Engine(name="between runs")
    runner.run(engine.open())
    with pytest.raises(
        WrongLoopError, match=r"that loop is not running: make the call inside a coroutine.*runner\.run"
    ):
        engine.allocate("kv", 64)

    async def allocate() -> None:
        engine.allocate("kv", 64)

    runner.run(allocate())
    runner.run(engine.aclose())


async def test_views_may_be_dropped_in_other_threads(world: World) -> None:
    """The last view of a closed region may be dropped anywhere; the driver is told on the loop's thread."""
    region = world.left.allocate("viewed", 4096)
    views = [memoryview(region)]
    await region.aclose()
    assert world.left.stats().regions == 2
    thread = threading.Thread(target=lambda: views.pop().release())
    thread.start()
    thread.join()
    await asyncio.sleep(0.01)
    assert world.left.stats().regions == 1


async def test_batches_belong_to_no_thread(world: World) -> None:
    """Preparing reads only; the engine's thread submits."""
    made: list[Batch] = []
    thread = threading.Thread(target=lambda: made.append(world.batch([(0, 0, 8)])))
    thread.start()
    thread.join()
    assert await world.left.submit(made[0]) == 8
