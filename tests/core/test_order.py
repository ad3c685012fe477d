"""C11: data before signal before notification; one batch carries all three."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hixl_async.testing import FaultPlan, engine_pair, faulty

from .conftest import World

FAULTS = {
    "none": FaultPlan(3),
    "slow data": FaultPlan(3).delay(0.005, 0.02, verb="transfer"),
    "late notes": FaultPlan(3).delay(0.005, 0.02, part="note"),
    "other threads": FaultPlan(3).pending(),
    "shuffled": FaultPlan(3).reorder(3, 0.005),
    "halves": FaultPlan(3).delay(0.001, 0.004, chance=0.5).delay(0.001, 0.003, part="note", chance=0.5),
}


@pytest.mark.parametrize("size", [64, 3 << 20], ids=["inline", "copied"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_c11_data_before_signal_before_notification(fault: str, size: int) -> None:
    plan = FaultPlan.parse(FAULTS[fault].spec())
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        region, remote = await pair.region("kv", 4 * size + 64)
        notes = pair.right.notifications("n")
        words = region.numpy("uint64", None)[-8:]
        data = region.numpy()[: 4 * size].reshape(4, size)
        signalled: list[tuple[int, bool]] = []

        def on_signal() -> None:
            for i in range(4):
                if words[i]:
                    signalled.append((i, bool((data[i] == i + 1).all())))

        pair.back.add_signal_callback(on_signal)
        transfers = [
            pair.left.write(
                np.full(size, i + 1, "uint8"),
                remote[i * size : (i + 1) * size],
                signal=(remote[4 * size + 8 * i : 4 * size + 8 * i + 8], i + 1),
                notify=("n", bytes([i])),
            )
            for i in range(4)
        ]
        for _ in range(4):
            (i,) = (await notes.get()).payload
            assert words[i] == i + 1, "the notification came before the signal"
            assert (data[i] == i + 1).all(), "the notification came before the data"
        assert await asyncio.gather(*transfers) == [size] * 4
        assert signalled
        assert all(complete for _, complete in signalled), "the signal came before the data"
        assert plan.counts.ops == 4, "data, signal and notification are one piece of work"


async def test_c11_no_note_of_a_transfer_that_failed(world: World) -> None:
    notes = world.right.notifications("n")
    world.plan.fail(nth=1)
    transfer = world.write(notify=("n", b"failed"))
    await world.write(notify=("n", b"fine"))
    await asyncio.wait([transfer])
    assert transfer.exception() is not None
    assert (await notes.get()).payload == b"fine"
    assert notes.get_nowait() is None


async def test_notes_of_one_peer_arrive_in_order(world: World) -> None:
    notes = world.right.notifications("n")
    for i in range(500):
        await world.write(notify=("n", i.to_bytes(2)))
    assert [int.from_bytes((await notes.get()).payload) for _ in range(500)] == list(range(500))
