"""Small copies that leave together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hixl_async import AccessError, ClosedError, InvalidArgumentError, PeerLostError, RangeError, TransferError
from hixl_async.engine.coalescer import MOST
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until


class Scene:
    def __init__(self, pair: EnginePair, plan: FaultPlan, there: Any, remote: Any) -> None:
        self.pair, self.plan, self.there, self.remote = pair, plan, there, remote
        self.here = pair.left.allocate("here", 4096, access="read")
        memoryview(self.here)[:] = bytes(i % 251 for i in range(4096))

    @property
    def sent(self) -> int:
        return self.plan.counts.ops


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    plan = FaultPlan(1)
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        yield Scene(pair, plan, *(await pair.region("kv", 4096)))
        plan.release()


async def test_copies_of_one_pass_are_one_batch(scene: Scene) -> None:
    few = scene.pair.left.coalesce()
    for turn in range(3):
        landed = [few.write(scene.here[i * 8 : i * 8 + 8], scene.remote[i * 16 : i * 16 + 8]) for i in range(100)]
        assert scene.sent == turn, "nothing leaves before the pass is over"
        assert await asyncio.gather(*landed) == [8] * 100
        assert scene.sent == turn + 1
    for i in range(100):
        assert memoryview(scene.there)[i * 16 : i * 16 + 8] == memoryview(scene.here)[i * 8 : i * 8 + 8]


async def test_verbs_and_peers_are_kept_apart(scene: Scene) -> None:
    async with engine_pair() as other:
        memoryview(scene.there)[100:104] = b"back"
        async with scene.pair.left.coalesce() as few:
            few.write(scene.here[0:8], scene.remote[0:8])
            few.read(scene.here[1000:1004], scene.remote[100:104])
        assert scene.sent == 2
        assert bytes(memoryview(scene.here)[1000:1004]) == b"back"
        _, foreign = await other.region("kv", 64)
        with pytest.raises(InvalidArgumentError, match="another engine"):
            scene.pair.left.coalesce().write(scene.here[0:8], foreign[0:8])


async def test_leaving_sends_and_waits(scene: Scene) -> None:
    scene.plan.pending()
    async with scene.pair.left.coalesce() as few:
        landed = [few.write(scene.here[i : i + 1], scene.remote[i : i + 1]) for i in range(10)]
    assert [future.result() for future in landed] == [1] * 10
    assert scene.pair.left.stats().pinned == 0
    with pytest.raises(ClosedError):
        few.write(scene.here[0:1], scene.remote[0:1])


async def test_flush(scene: Scene) -> None:
    few = scene.pair.left.coalesce()
    landed = few.write(scene.here[0:8], scene.remote[0:8])
    few.flush()
    assert scene.sent == 1
    assert landed.result() == 8
    few.flush()
    assert scene.sent == 1


async def test_mistakes_are_raised_at_once(scene: Scene) -> None:
    few = scene.pair.left.coalesce()
    with pytest.raises(RangeError):
        few.write(scene.here[0:8], scene.remote[0:9])
    with pytest.raises(InvalidArgumentError):
        few.write(b"12345678", scene.remote[0:8])
    scene.pair.right.allocate("readable", 64, access="read")
    with pytest.raises(AccessError):
        few.write(scene.here[0:8], (await scene.pair.peer.region("readable"))[0:8])
    await asyncio.sleep(0)
    assert scene.sent == 0


async def test_a_failure_reaches_all_of_its_batch(scene: Scene) -> None:
    scene.plan.fail("system", nth=1)
    few = scene.pair.left.coalesce()
    landed = [few.write(scene.here[i : i + 1], scene.remote[i : i + 1]) for i in range(3)]
    for future in landed:
        with pytest.raises(TransferError):
            await future
    assert await few.write(scene.here[0:1], scene.remote[0:1]) == 1


async def test_a_failure_is_raised_at_the_exit(scene: Scene) -> None:
    scene.plan.fail("system", nth=1)
    with pytest.raises(ExceptionGroup) as caught:
        async with scene.pair.left.coalesce() as few:
            for i in range(3):
                few.write(scene.here[i : i + 1], scene.remote[i : i + 1])
    assert [type(error) for error in caught.value.exceptions] == [TransferError]


async def test_an_error_in_the_body_sends_nothing(scene: Scene) -> None:
    async def body() -> None:
        async with scene.pair.left.coalesce() as few:
            landed.append(few.write(scene.here[0:1], scene.remote[0:1]))
            raise KeyError("x")

    landed: list[asyncio.Future[int]] = []
    with pytest.raises(KeyError):
        await body()
    await asyncio.sleep(0)
    assert landed[0].cancelled()
    assert scene.sent == 0


async def test_what_is_cancelled_in_time_is_not_sent(scene: Scene) -> None:
    few = scene.pair.left.coalesce()
    first, second = (few.write(scene.here[i : i + 1], scene.remote[i : i + 1]) for i in (0, 7))
    first.cancel()
    assert await second == 1
    assert bytes(memoryview(scene.there)[:8]) == bytes(7) + b"\x07"


async def test_a_region_that_closes_in_between_fails_only_its_own(scene: Scene) -> None:
    few = scene.pair.left.coalesce()
    doomed = scene.pair.left.allocate("doomed", 64)
    lost = few.write(doomed[0:8], scene.remote[0:8])
    kept = few.write(scene.here[8:16], scene.remote[8:16])
    closing = asyncio.ensure_future(doomed.aclose())
    doomed.revoke()
    assert await kept == 8
    with pytest.raises(ClosedError):
        await lost
    await closing


async def test_more_than_a_batch_takes(scene: Scene) -> None:
    async with scene.pair.left.coalesce() as few:
        for i in range(MOST + 1):
            few.write(scene.here[i % 2 : i % 2 + 1], scene.remote[i % 2 * 9 : i % 2 * 9 + 1])
        assert scene.sent == 1
    assert scene.sent == 2


async def test_a_peer_that_is_lost(scene: Scene) -> None:
    few = scene.pair.left.coalesce()
    landed = few.write(scene.here[0:8], scene.remote[0:8])
    scene.plan.drop_peer(nth=1)
    with pytest.raises(PeerLostError):
        await landed


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
async def test_the_block_ends_when_the_memory_is_free(scene: Scene, how: str) -> None:
    """A block that is interrupted at its exit cancels its transfers, and still waits until none touches the memory."""
    scene.plan.late()
    engine, landed = scene.pair.left, []

    async def use() -> None:
        async with engine.coalesce() as few:
            landed.append(few.write(scene.here[0:8], scene.remote[0:8]))

    using = asyncio.ensure_future(asyncio.wait_for(use(), 0.05) if how == "timeout" else use())
    await until(lambda: scene.plan.holding)
    if how == "cancelled":
        using.cancel()
    await asyncio.sleep(0.1)
    assert not using.done()
    assert engine.stats().pinned == 1
    scene.plan.release()
    with pytest.raises((asyncio.CancelledError, TimeoutError)):
        await using
    assert engine.stats().pinned == 0
    assert landed[0].cancelled()


async def test_an_open_coalescer_keeps_nothing_of_finished_batches(scene: Scene) -> None:
    scene.plan.pending()
    async with scene.pair.left.coalesce() as few:
        for _ in range(50):
            assert await few.write(scene.here[0:8], scene.remote[0:8]) == 8
        await until(lambda: not few._flying)
        assert not few._landing
