"""The owner of a slot, and the end of its ownership: C1, C2, C5."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from hixl_async import BusyError, TransferError, TransferState, TransferTimeoutError
from hixl_async.testing import until

from .conftest import World


def pinned(buffer: bytearray) -> bool:
    """A buffer that is still in use cannot be resized."""
    try:
        buffer.append(0)
    except BufferError:
        return True
    del buffer[-1:]
    return False


# -- C1: the slot is owned by the operation from accepted submit to release


async def test_c1_an_operation_holds_exactly_one_reference(world: World) -> None:
    world.plan.hold(nth=1)
    transfer = world.write()
    in_flight = sys.getrefcount(transfer)
    world.plan.release()
    await transfer.drained()
    assert sys.getrefcount(transfer) == in_flight - 1


async def test_c1_finished_inside_the_call_holds_none(world: World) -> None:
    transfer = world.write()
    assert transfer.done()
    assert sys.getrefcount(transfer) == 2  # the variable and the argument


async def test_c1_refused_holds_none(world: World) -> None:
    buffer = bytearray(b"hello")
    references = sys.getrefcount(buffer)
    world.plan.busy(nth=1)
    with pytest.raises(BusyError):
        world.write(buffer)
    assert sys.getrefcount(buffer) == references
    assert not pinned(buffer)


async def test_c1_survives_the_loss_of_every_handle(world: World) -> None:
    world.plan.hold()
    for i in range(300):  # more than any free list keeps
        world.write(bytes([i % 256]) * 16, 16 * i)
    gc.collect()
    noise = [bytearray(512) for _ in range(2000)]
    assert world.left.stats().pinned == 300
    world.plan.release()
    await world.left.drained(world.remote)
    assert world.landed[:4800] == b"".join(bytes([i % 256]) * 16 for i in range(300))
    assert noise


async def test_c1_slots_are_not_leaked(world: World) -> None:
    world.plan.pending()
    await asyncio.gather(*(world.write(b"x", i) for i in range(100)))
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        await asyncio.gather(*(world.write(b"x", i) for i in range(100)))
    gc.collect()
    assert len(gc.get_objects()) - before < 200


# -- C2: one completion, then one release; failure and safe-to-unpin are two events


async def test_c2_timeout_fails_and_only_the_driver_releases(world: World) -> None:
    buffer = bytearray(b"late!")
    world.plan.late(nth=1)
    transfer = world.write(buffer, timeout=0.02)
    with pytest.raises(TransferTimeoutError, match="timeout"):
        await transfer
    assert transfer.state is TransferState.FAILED
    stats = world.left.stats()
    assert (stats.in_flight, stats.pinned) == (0, 1)
    assert pinned(buffer)
    drained = asyncio.ensure_future(transfer.drained())
    await asyncio.sleep(0)
    assert not drained.done()
    assert world.landed[:5] == bytes(5)
    world.plan.release()
    await drained
    assert world.landed[:5] == b"late!", "the bytes of this transfer land after it has failed"
    assert not pinned(buffer)
    assert world.left.stats().pinned == 0
    assert transfer.state is TransferState.FAILED, "the driver's completion must not change an outcome"


@pytest.mark.parametrize("fault", ["late", "hold", "stall"])
@pytest.mark.parametrize("end", ["cancel", "timeout"])
async def test_c2_one_outcome_and_one_callback(world: World, fault: str, end: str) -> None:
    getattr(world.plan, fault)(nth=1)
    transfer = world.write(bytes(100), timeout=0.02 if end == "timeout" else None)
    outcomes = []
    transfer.add_done_callback(lambda done: outcomes.append(done.state))
    if end == "cancel":
        assert transfer.cancel()
        assert not transfer.cancel()
    await until(lambda: outcomes)
    world.plan.release()
    await transfer.drained()
    await asyncio.sleep(0)
    assert outcomes == [TransferState.CANCELLED if end == "cancel" else TransferState.FAILED]
    assert world.left.stats().failed == 1
    assert world.left.stats().in_flight == 0
    if end == "timeout":
        assert isinstance(transfer.exception(), TransferTimeoutError)


async def test_c2_refusal_leaves_nothing(world: World) -> None:
    before = world.left.stats()
    world.plan.busy()
    for call in (
        lambda: world.write(),
        lambda: world.left.read(bytearray(5), world.remote[0:5]),
        lambda: world.left.submit(world.batch([(0, 0, 8)])),
        lambda: world.left.notify(world.peer, "topic"),
    ):
        with pytest.raises(BusyError, match="was refused: the fault plan refused it") as caught:
            call()
        assert caught.value.retryable
    assert world.left.stats() == before
    assert world.here.pins == 0
    await world.works()


async def test_c2_accepted_is_counted_until_released(world: World) -> None:
    world.plan.hold()
    transfers = [world.write(b"x", i) for i in range(5)]
    stats = world.left.stats()
    assert (stats.in_flight, stats.pinned) == (5, 5)
    world.plan.release()
    await asyncio.gather(*transfers)
    await asyncio.gather(*(transfer.drained() for transfer in transfers))
    stats = world.left.stats()
    assert (stats.in_flight, stats.pinned, stats.failed) == (0, 0, 0)


# -- C5: cancelling ends the wait, never the pin


@pytest.mark.parametrize("how", ["transfer", "task", "wait_for", "timeout"])
async def test_c5_cancel_never_unpins(world: World, how: str) -> None:
    buffer = bytearray(b"hello")
    world.plan.late(nth=1)
    transfer = world.write(buffer)
    if how == "transfer":
        assert transfer.cancel()
    elif how == "task":

        async def wait() -> None:
            await transfer

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how == "wait_for":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(transfer, 0.01)
    else:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await transfer
    assert transfer.cancelled()
    assert pinned(buffer)
    assert world.left.stats().pinned == 1
    world.plan.release()
    await transfer.drained()
    assert not pinned(buffer)
    assert world.landed[:5] == b"hello"


async def test_c5_cancelled_region_memory_stays_pinned(world: World) -> None:
    world.plan.late(nth=1)
    transfer = world.left.write(world.here[0:8], world.remote[0:8])
    transfer.cancel()
    assert world.here.pins >= 1
    assert world.remote.pins >= 1
    world.plan.release()
    await transfer.drained()
    assert world.remote.pins == 0


async def test_c5_cancel_of_held_work_releases_it_unsent(world: World) -> None:
    buffer = bytearray(b"hello")
    world.plan.hold(nth=1)
    transfer = world.write(buffer)
    assert transfer.cancel()
    await transfer.drained()
    assert not pinned(buffer)
    world.plan.release()
    assert world.landed[:5] == bytes(5)


async def test_cancel_after_the_bytes_landed(world: World) -> None:
    transfer = world.write()
    assert not transfer.cancel()
    assert await transfer == 5
    world.plan.delay(0.02, part="outcome", nth=1)
    transfer = world.write(b"world")
    assert world.landed[:5] == b"world"
    assert transfer.cancel(), "the outcome was not known yet"
    with pytest.raises(asyncio.CancelledError):
        await transfer
    await transfer.drained()


async def test_the_error_states_what_is_undefined(world: World) -> None:
    world.plan.fail("system", native=5, index=1, nth=1)
    world.here.numpy()[:] = 9
    transfer = world.left.submit(world.batch([(0, 0, 4), (4, 4, 4), (9, 8, 8), (24, 16, 8)]))
    with pytest.raises(TransferError, match="undefined") as caught:
        await transfer
    assert caught.value.index == 2, "the first two rows are one descriptor"
    assert caught.value.native == 5
    assert caught.value.peer == "right"
    assert world.landed[:24] == b"\x09" * 8 + bytes(16), "what comes before the failed descriptor has landed"
