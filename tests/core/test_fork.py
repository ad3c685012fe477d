"""C10: after fork() the child's calls raise EngineForkedError and tear nothing down for the parent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import traceback
from collections.abc import Callable

import pytest

from hixl_async import EngineForkedError
from hixl_async.testing import FaultPlan, engine_pair, faulty, peer_process, until

from .conftest import World


async def in_child(check: Callable[[], None]) -> None:
    """Run `check` in a forked child, and fail with its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        problem = pipe.read().decode()
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222  It has closed its pipe.
    assert os.waitstatus_to_exitcode(status) == 0, problem or f"the child ended with {status}"


async def test_c10_calls_in_the_child(world: World) -> None:
    batch = world.batch([(0, 0, 8)])
    subscription, accepted = world.left.notifications("topic"), world.left.accepted()
    region = world.left.allocate("region", 64)
    done = world.write()
    await done

    def check() -> None:
        for call in (
            lambda: subscription.get().send(None),
            lambda: accepted.get().send(None),
            lambda: done.drained(),
            lambda: region.drained(),
            lambda: region[0:8].drained(),
            lambda: region.released(),
            lambda: world.write(),
            lambda: world.left.read(bytearray(5), world.remote[0:5]),
            lambda: world.left.submit(batch),
            lambda: world.left.notify(world.peer, "topic"),
            lambda: world.left.allocate("new", 64),
            lambda: world.left.register("new", bytearray(8)),
            lambda: world.left.notifications("topic"),
            lambda: world.left.group(),
            lambda: world.left.drained(b"x"),
        ):
            with pytest.raises(EngineForkedError, match=r"opened before fork.*open one in each process"):
                call()
        assert world.left.forked

    await in_child(check)
    assert not world.left.forked
    subscription.close()
    accepted.close()
    await world.works()


async def test_c10_the_child_tears_nothing_down(world: World) -> None:
    world.plan.hold(nth=1)
    held = world.write(b"held!", 100)

    def check() -> None:
        # All that a child may do: close, drop and collect.
        loop = asyncio.new_event_loop()
        loop.run_until_complete(world.left.aclose())
        loop.run_until_complete(world.right.aclose())
        loop.close()
        world.__dict__.clear()
        gc.collect()

    await in_child(check)
    assert world.peer.state.value == world.pair.back.state.value == "up"
    world.plan.release()
    assert await held == 5
    assert world.landed[100:105] == b"held!"
    await world.works()
    notes = world.right.notifications("after")
    await world.left.notify(world.peer, "after", b"fork")
    assert (await notes.get()).payload == b"fork"


def descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


async def test_c10_the_child_holds_no_descriptor_of_the_parent() -> None:
    """Otherwise the parent's death would go unnoticed, and its port stay taken, while a child lives."""
    await asyncio.sleep(0)
    before = descriptors()
    async with engine_pair(drivers=faulty("shm", FaultPlan(1).hold())) as pair:
        region, remote = await pair.region("kv", 4096)
        transfer = pair.left.write(b"x", remote[0:1])
        ours = {
            fd: target for fd, target in descriptors().items() if before.get(fd) != target and target != "/dev/null"
        }
        assert len(ours) > 10

        def check() -> None:
            left = {fd: target for fd, target in descriptors().items() if ours.get(fd) == target}
            assert not left

        await in_child(check)
        transfer.cancel()
        assert region


async def test_c10_the_child_may_open_an_engine_of_its_own(world: World) -> None:
    def check() -> None:
        async def main() -> None:
            async with engine_pair() as pair:
                region, remote = await pair.region("kv", 64)
                assert await pair.left.write(b"child", remote[0:5]) == 5
                assert bytes(memoryview(region)[:5]) == b"child"

        asyncio.new_event_loop().run_until_complete(main())

    await in_child(check)
    await world.works()


async def test_c10_death_of_a_peer_is_seen_although_a_child_lives(world: World) -> None:
    """A child of this process hides neither the peer's death from it, nor its death from the peer."""
    async with peer_process(regions={"kv": 4096}) as process:
        peer = await world.left.connect(process.address)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        os.close(reading)
        process.kill()
        await until(lambda: peer.confirmed_dead)
        os.close(writing)
        os.waitpid(child, 0)  # noqa: ASYNC222
