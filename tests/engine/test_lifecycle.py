"""Opening and closing: idempotent, bounded, and without a trace, at any moment."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from passes import settle

from hixl_async import (
    AddressInUseError,
    ClosedError,
    ConnectError,
    DriverError,
    DriverLoadError,
    Engine,
    HixlError,
    InvalidArgumentError,
    PeerLostError,
    RequestLostError,
    WrongLoopError,
)
from hixl_async.testing import FaultPlan, engine_pair, faulty, until

from .conftest import deaf


def run_python(script: str, *options: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"},
    )


# -- closing what was hardly used


async def test_closing_an_unused_engine() -> None:
    engine = await Engine("127.0.0.1:0").open()
    await engine.aclose()
    await engine.aclose()
    assert engine.closed


async def test_closing_an_engine_that_was_never_opened() -> None:
    engine = Engine("127.0.0.1:0")
    await engine.aclose()
    assert repr(engine).endswith(" not open>")
    with pytest.raises(ClosedError, match="not open"):
        engine.allocate("kv", 10)


async def test_closing_twice_at_once() -> None:
    engine = await Engine("127.0.0.1:0").open()
    await asyncio.gather(engine.aclose(), engine.aclose())
    assert engine.closed


async def test_an_engine_is_opened_once() -> None:
    async with Engine() as engine:
        with pytest.raises(ClosedError, match="opened before"):
            await engine.open()
        engine.allocate("still-works", 1)
    with pytest.raises(ClosedError, match="opened before"):
        await engine.open()


async def test_repr_states_the_address_and_whether_it_is_closed() -> None:
    engine = await Engine("127.0.0.1:0", name="prefill-0").open()
    assert repr(engine) == f"<Engine 'prefill-0' at {engine.address}>"
    await engine.aclose()
    assert "closed" in repr(engine)


async def test_an_error_of_the_body_is_raised_and_the_engine_is_closed() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Engine("127.0.0.1:0") as engine:
            engine.allocate("kv", 4096)
            raise ZeroDivisionError
    assert engine.closed
    assert engine.stats().regions == 0


# -- what cannot be opened


async def test_a_driver_that_does_not_exist() -> None:
    engine = Engine("127.0.0.1:0", drivers=["shm", "no-such-driver"])
    with pytest.raises(DriverLoadError, match=r"no driver 'no-such-driver'.*installed: .*shm"):
        await engine.open()
    assert engine.closed
    await engine.aclose()


async def test_a_driver_that_refuses_its_options() -> None:
    engine = Engine("127.0.0.1:0", drivers={"shm": {"threads": 0}})
    with pytest.raises(InvalidArgumentError, match=r"'shm'.*threads=0"):
        await engine.open()
    await engine.aclose()


async def test_an_address_in_use_is_named_and_its_owner_undisturbed() -> None:
    async with Engine("127.0.0.1:0") as first:
        second = Engine(first.address)
        with pytest.raises(AddressInUseError, match=first.address):
            await second.open()
        await second.aclose()
        async with Engine() as third:
            await third.connect(first.address)


async def test_an_address_that_others_can_reach_needs_a_secret() -> None:
    engine = Engine("0.0.0.0:0")
    with pytest.raises(InvalidArgumentError, match="secret="):
        await engine.open()
    async with Engine("0.0.0.0:0", secret="long enough") as open_to_all:
        assert open_to_all.address.startswith("0.0.0.0:")


async def test_port_0_picks_a_port_and_without_an_address_nothing_listens() -> None:
    async with Engine("127.0.0.1:0") as one, Engine("127.0.0.1:0") as two, Engine() as dialler:
        assert one.address != two.address
        assert not one.address.endswith(":0")
        assert dialler.address == ""
        peer = await dialler.connect(one.address)
        assert peer.address == one.address


async def test_open_that_is_cancelled_leaves_nothing() -> None:
    opening = asyncio.ensure_future(Engine("localhost:0").open())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


def test_out_of_descriptors() -> None:
    """Wherever descriptors run out: one of our errors, nothing left over, and both engines go on."""
    done = run_python("""
        import asyncio, os, resource
        from hixl_async import Engine, HixlError
        from hixl_async.testing import BalanceSheet, until

        async def late(address):
            async with Engine(name="late", close_timeout=0.2) as engine:
                peer = await engine.connect(address, timeout=0.3)
                await peer.region("kv", timeout=1)

        async def main():
            heard = []
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
            async with Engine("127.0.0.1:0", name="victim") as victim, Engine(name="friend") as friend:
                await friend.connect(victim.address)
                victim.allocate("kv", 4096, access="read")
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                taken = []
                while not taken or taken[-1] < 200:
                    taken.append(os.dup(0))  # so that numbers are used without gaps
                resource.setrlimit(resource.RLIMIT_NOFILE, (201 + 24, hard))
                spare = [os.dup(0) for _ in range(24)]
                outcomes = set()
                while spare:
                    os.close(spare.pop())
                    try:
                        await late(victim.address)
                        outcomes.add("connected")
                    except HixlError as error:
                        outcomes.add(type(error).__name__)
                    assert await friend.peers[0].request("hixl.ping", {"n": 1}) == {"n": 1}
                for fd in taken:
                    os.close(fd)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                await until(lambda: victim.stats().peers == 1)
                await late(victim.address)
            print(sorted(outcomes), heard)

        async def balanced():
            async with BalanceSheet():
                await main()

        asyncio.run(balanced())
    """)
    assert done.returncode == 0, done.stderr
    assert "'connected'" in done.stdout
    assert "'ConnectError'" in done.stdout
    assert done.stdout.endswith("] []\n"), done.stdout


# -- closing in the middle of things


async def test_close_lets_work_in_flight_finish() -> None:
    plan = FaultPlan(seed=1).delay(0.1)
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        region, remote = await pair.region("kv", 4096)
        view = memoryview(region)
        transfer = pair.left.write(b"x" * 4096, remote[0:4096], notify=("t", b"done"))
        subscription = pair.right.notifications("t")
        await pair.left.aclose()
        assert await transfer == 4096
        assert bytes(view) == b"x" * 4096
        assert (await subscription.get()).payload == b"done"


async def test_close_fails_slow_work_and_waits_for_its_memory() -> None:
    plan = FaultPlan(seed=1).hold()
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.2) as pair:
        region, remote = await pair.region("kv", 4096)
        transfer = pair.left.write(b"x" * 4096, remote[0:4096])
        await pair.left.aclose()
        with pytest.raises(PeerLostError):
            await transfer
        assert bytes(memoryview(region)) == bytes(4096)
        assert pair.left.stats().pinned == 0


async def test_close_leaks_memory_that_a_driver_still_holds_with_a_warning() -> None:
    # In a process of its own: what is leaked stays.
    done = run_python("""
        import asyncio, time
        from hixl_async import Engine, ClosedError
        from hixl_async.engine import engine
        from hixl_async.testing import FaultPlan, engine_pair, faulty

        engine.LINGER = 0.1

        async def main():
            heard = []
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context["message"]))
            plan = FaultPlan(seed=1).late()
            async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.1) as pair:
                region, remote = await pair.region("kv", 4096)
                buffer = bytearray(b"x" * 4096)
                transfer = pair.left.write(buffer, remote[0:4096])
                start = time.monotonic()
                await pair.left.aclose()
                print("closed", time.monotonic() - start < 8)
                print("failed", type(transfer.exception()).__name__)
                try:
                    buffer.append(1)
                except BufferError:
                    print("still pinned")
                print(*(message for message in heard if "leaked" in message))
                plan.release()  # the driver finishes after all: nothing crashes, although its engine is gone
                await asyncio.sleep(0.05)
            print("alive")

        asyncio.run(main())
    """)
    assert done.returncode == 0, done.stderr
    for line in ("closed True", "failed", "still pinned", "of 2 transfers or calls at close; it is leaked", "alive"):
        assert line in done.stdout, done.stdout


async def test_a_cancelled_close_continues() -> None:
    plan = FaultPlan(seed=1).delay(0.1)
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        _, remote = await pair.region("kv", 4096)
        transfer = pair.left.write(b"x" * 4096, remote[0:4096])
        closing = asyncio.ensure_future(pair.left.aclose())
        await settle(3)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not transfer.done()
        await pair.left.aclose()
        assert transfer.result() == 4096
        assert pair.left.stats().peers == 0


async def test_close_ends_a_connect_that_waits() -> None:
    async with Engine(close_timeout=60) as engine:
        with deaf() as address:
            connecting = asyncio.ensure_future(engine.connect(address, timeout=60))
            await settle(30)
            async with asyncio.timeout(20):
                await engine.aclose()
            with pytest.raises(ClosedError, match="closed while it connected"):
                await connecting


async def test_close_from_a_handler_of_the_engine_itself() -> None:
    async with engine_pair() as pair:

        async def close(peer: Any, body: dict[str, Any]) -> dict[str, Any]:
            await pair.right.aclose()
            return {}

        pair.right.serve("close", close)
        with pytest.raises(RequestLostError):
            await pair.peer.request("close", {})
        await until(lambda: pair.right.closed)


async def test_close_from_a_lost_callback() -> None:
    """A lost-callback that closes the engine, called from the middle of the peer's end."""
    async with engine_pair() as pair:
        closing: list[asyncio.Future[None]] = []
        pair.back.add_lost_callback(lambda error: closing.append(asyncio.ensure_future(pair.right.aclose())))
        await pair.left.aclose()
        await until(lambda: closing)
        await closing[0]


async def test_close_callbacks_are_called_and_may_fail(loop_errors: list[dict[str, Any]]) -> None:
    called = []

    def unwanted() -> None:
        called.append(0)

    def first() -> None:
        called.append(1)
        engine.remove_close_callback(first)

    def last() -> None:
        called.append(2)

    async with Engine() as engine:
        engine.add_close_callback(first)
        engine.add_close_callback(lambda: 1 / 0)
        engine.add_close_callback(last)
        engine.add_close_callback(unwanted)
        engine.remove_close_callback(unwanted)
        engine.remove_close_callback(print)
        with pytest.raises(InvalidArgumentError, match="callback must be a function, not None"):
            engine.add_close_callback(None)  # type: ignore[arg-type]
    assert called == [1, 2]
    assert isinstance(loop_errors.pop()["exception"], ZeroDivisionError)


async def test_close_ends_subscriptions_and_acceptors() -> None:
    engine = await Engine("127.0.0.1:0").open()

    async def read(items: Any) -> list[Any]:
        return [item async for item in items]

    readers = [asyncio.ensure_future(read(items)) for items in (engine.notifications(), engine.accepted())]
    await settle(3)
    await engine.aclose()
    assert await asyncio.gather(*readers) == [[], []]


USES = {
    "allocate": lambda engine, peer, remote: engine.allocate("more", 1),
    "register": lambda engine, peer, remote: engine.register("more", bytearray(1)),
    "connect": lambda engine, peer, remote: engine.connect("127.0.0.1:1"),
    "accepted": lambda engine, peer, remote: engine.accepted(),
    "serve": lambda engine, peer, remote: engine.serve("more", print),
    "notify": lambda engine, peer, remote: engine.notify(peer, "topic"),
    "notifications": lambda engine, peer, remote: engine.notifications("topic"),
    "group": lambda engine, peer, remote: engine.group(),
    "write": lambda engine, peer, remote: engine.write(b"x", remote[0:1]),
    "read": lambda engine, peer, remote: engine.read(bytearray(1), remote[0:1]),
    "drained": lambda engine, peer, remote: engine.drained(bytearray(1)),
    "peer.region": lambda engine, peer, remote: peer.region("kv"),
    "peer.request": lambda engine, peer, remote: peer.request("hixl.ping", {}),
    "peer.post": lambda engine, peer, remote: peer.post("hixl.ping", {}),
}


@pytest.mark.parametrize("use", USES)
async def test_use_after_close(use: str) -> None:
    async with engine_pair() as pair:
        _, remote = await pair.region("kv", 10)
        await pair.left.aclose()
        with pytest.raises(ClosedError):
            answer = USES[use](pair.left, pair.peer, remote)
            if asyncio.iscoroutine(answer):
                await answer


# -- without a close


def test_an_engine_that_is_never_closed_warns() -> None:
    done = run_python(
        """
        import asyncio, gc
        from hixl_async import Engine

        async def main():
            await Engine(name="forgotten").open()

        asyncio.run(main())
        gc.collect()
        print("alive")
        """,
        "-Walways",
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    assert "ResourceWarning: <Engine 'forgotten'> was never closed" in done.stderr


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_exit_with_everything_open_and_in_flight(loop: str) -> None:
    """Neither a hang nor a crash nor a second error, whatever exists when the interpreter ends."""
    done = run_python(
        f"""
        import asyncio, {loop}
        from hixl_async.testing import FaultPlan, engine_pair, faulty

        async def main():
            plan = FaultPlan(seed=1).hold()
            context = engine_pair(drivers=faulty("shm", plan))
            pair = await context.__aenter__()
            region, remote = await pair.region("kv", 1 << 20)
            globals().update(pair=pair, context=context, view=memoryview(region), remote=remote)
            pair.left.write(bytes(1 << 20), remote)
            asyncio.ensure_future(pair.peer.region("never"))
            asyncio.ensure_future(pair.right.notifications("never").get())
            await asyncio.sleep(0)
            asyncio.ensure_future(pair.left.aclose())

        asyncio.Runner(loop_factory={loop}.new_event_loop).run(main())
        print("alive")
        """
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    assert "Traceback" not in done.stderr.replace("Traceback (most recent call last):\nResourceWarning", ""), (
        done.stderr
    )


def test_two_loops_one_after_another(runner: asyncio.Runner) -> None:
    async def main() -> Engine:
        async with engine_pair() as pair:
            _, remote = await pair.region("kv", 10)
            await pair.left.write(b"x" * 10, remote)
        return pair.left

    first = asyncio.run(main())
    second = runner.run(main())
    assert first.closed
    assert second.closed


def test_an_engine_of_a_loop_that_is_gone(runner: asyncio.Runner) -> None:
    done = run_python("""
        import asyncio
        from hixl_async import Engine, HixlError

        async def use(engine):
            for call in (lambda: engine.allocate("kv", 1), engine.accepted, engine.group):
                try:
                    call()
                except HixlError as error:
                    print(type(error).__name__)
            for call in (lambda: engine.connect("127.0.0.1:1"), engine.aclose):
                try:
                    await call()
                except HixlError as error:
                    print(type(error).__name__)

        engine = asyncio.run(Engine().open())
        asyncio.run(use(engine))
    """)
    assert (done.returncode, done.stdout.split()) == (0, ["WrongLoopError"] * 5), done.stderr


# -- counters


async def test_every_gauge_is_zero_after_everything_was_closed() -> None:
    async with engine_pair() as pair:
        _region, remote = await pair.region("kv", 1 << 20)
        await pair.left.write(bytes(1 << 20), remote, notify=("t", b""))
        await pair.left.write(b"1234", remote[0:4])
        busy = pair.left.stats()
        assert (busy.transfers, busy.bytes, busy.peers, busy.remote_regions) == (2, (1 << 20) + 4, 1, 1)
        assert pair.right.stats().regions == 1
        assert pair.left.driver_stats()["shm"]["links"] == 1
    for engine in (pair.left, pair.right):
        stats = engine.stats()
        gauges = (stats.in_flight, stats.pinned, stats.regions, stats.remote_regions, stats.peers)
        assert gauges == (0, 0, 0, 0, 0)
        assert engine.driver_stats() == {"shm": {}}


async def test_the_error_of_open_is_the_first_one() -> None:
    with pytest.raises(HixlError) as caught:
        async with Engine("127.0.0.1:0", drivers=["no-such-driver"]):
            pytest.fail("it opened")
    assert isinstance(caught.value, DriverError)
    gc.collect()


async def test_an_engine_in_two_loops_at_once(engine: Engine) -> None:
    def in_another_thread() -> list[str]:
        async def use() -> list[str]:
            found = []
            for call in (engine.aclose, lambda: engine.connect("127.0.0.1:1")):
                try:
                    await call()
                except WrongLoopError as error:
                    found.append(type(error).__name__)
            return found

        return asyncio.run(use())

    assert await asyncio.to_thread(in_another_thread) == ["WrongLoopError"] * 2
    assert not engine.closed
    with pytest.raises(ConnectError):
        await engine.connect("127.0.0.1:1")
