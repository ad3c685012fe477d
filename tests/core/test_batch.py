"""Prepared batches: merged, repeated and shifted rows, each compared with plain bytes."""

from __future__ import annotations

import array
import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hixl_async import Batch, BufferTypeError, InvalidArgumentError, RangeError, TransferError
from hixl_async.testing import engine_pair

from .conftest import SIZE, World

Rows = list[tuple[int, int, int]]


def expected(world: World, rows: Rows) -> bytes:
    """Return what the rows make of the remote region."""
    there, here = bytearray(world.landed), bytes(memoryview(world.here))
    for loff, roff, length in rows:
        there[roff : roff + length] = here[loff : loff + length]
    return bytes(there)


def scribble(world: World, seed: int = 1) -> None:
    world.here.numpy()[:] = np.random.default_rng(seed).integers(0, 256, SIZE, "uint8")


async def submitted(world: World, batch: Batch) -> bytes:
    assert await world.left.submit(batch) == batch.nbytes
    return world.landed


# -- merging


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([(0, 0, 8), (8, 8, 8), (16, 16, 8)], 1),
        ([(0, 0, 8), (8, 8, 8), (17, 16, 8)], 2),  # a gap here
        ([(0, 0, 8), (8, 8, 8), (16, 17, 8)], 2),  # a gap there
        ([(8, 8, 8), (0, 0, 8)], 2),  # neighbours, but the other way round
        ([(0, 0, 8), (0, 0, 8)], 2),
        ([(0, 0, 8), (100, 50, 1), (101, 51, 1), (300, 300, 8), (308, 308, 8)], 3),
    ],
)
async def test_neighbours_are_merged(world: World, rows: Rows, count: int) -> None:
    scribble(world)
    wanted = expected(world, rows)
    batch = world.batch(rows)
    assert (len(batch), batch.count, batch.nbytes) == (len(rows), count, sum(row[2] for row in rows))
    assert await submitted(world, batch) == wanted


async def test_pairs_of_slices_are_merged(world: World) -> None:
    scribble(world)
    here, remote = world.here, world.remote
    batch = Batch("write", [(here[0:4], remote[8:12]), (here[4:10], remote[12:18]), (here[11:12], remote[18:19])])
    assert (len(batch), batch.count) == (3, 2)
    assert await submitted(world, batch) == expected(world, [(0, 8, 10), (11, 18, 1)])


async def test_parts_are_not_merged_with_each_other(world: World) -> None:
    """A part may be shifted only within its own ranges."""
    here, remote = world.here, world.remote
    batch = Batch("write", [(here[0:8], remote[0:8], [(0, 0, 8)]), (here[8:16], remote[8:16], [(0, 0, 8)])])
    assert batch.count == 2


async def test_the_error_names_the_failed_row_of_merged_ones(world: World) -> None:
    rows = [(0, 0, 4), (4, 4, 4), (16, 16, 4), (32, 32, 4), (36, 36, 4), (40, 40, 4), (64, 64, 4)]
    batch = world.batch(rows)
    assert batch.count == 4
    for descriptor, row in enumerate([0, 2, 3, 6]):
        for tried in (batch, batch.shifted(8, 8)):
            world.plan.clear()
            world.plan.fail("system", index=descriptor, nth=1)
            with pytest.raises(TransferError) as caught:
                await world.left.submit(tried)
            assert caught.value.index == row


async def test_a_merged_list_may_be_longer_than_the_limit(world: World) -> None:
    limit = world.left.driver_limits()["shm"]["descriptors"]
    places = np.arange(3 * limit, dtype="uint64")
    batch = world.batch(np.stack([places, places, np.ones_like(places)], axis=1))
    assert (len(batch), batch.count, batch.nbytes) == (3 * limit, 1, 3 * limit)
    scribble(world)
    assert await submitted(world, batch) == expected(world, [(0, 0, 3 * limit)])


# -- strides


def unrolled(runs: list[tuple[int, int, int, int, int, int]]) -> Rows:
    return [
        (loff + k * lstride, roff + k * rstride, length)
        for loff, lstride, roff, rstride, length, count in runs
        for k in range(count)
    ]


@pytest.mark.parametrize(
    ("runs", "count"),
    [
        ([(0, 64, 8, 32, 16, 10)], 10),
        ([(0, 64, 8, 32, 16, 10), (2000, 0, 1000, 8, 8, 3)], 13),  # one place here to several there
        ([(0, 16, 0, 16, 16, 10)], 1),  # no gaps at all
        ([(0, 16, 0, 16, 16, 10), (160, 8, 160, 8, 8, 2)], 1),
        ([(0, 16, 0, 32, 16, 3)], 3),
        ([(5, 1 << 40, 7, 1 << 63, 1, 1)], 1),  # a stride that is never used
    ],
)
@pytest.mark.parametrize("form", ["list", "numpy", "array"])
async def test_strided(world: World, runs: Any, count: int, form: str) -> None:
    table: Any = runs
    if form == "numpy":
        table = np.array(runs, "uint64")
    elif form == "array":
        flat = array.array("Q", [number for run in runs for number in run])
        table = memoryview(flat).cast("B").cast("Q", (len(runs), 6))
    scribble(world)
    batch = Batch.strided("write", world.here, world.remote, table)
    rows = unrolled(runs)
    assert (len(batch), batch.count, batch.nbytes) == (len(rows), count, sum(row[2] for row in rows))
    assert await submitted(world, batch) == expected(world, rows)


async def test_strided_counts_from_the_ranges_given(world: World) -> None:
    scribble(world)
    batch = Batch.strided("write", world.here[100:200], world.remote[1000:1100], [(0, 20, 10, 30, 10, 3)])
    assert await submitted(world, batch) == expected(world, [(100, 1010, 10), (120, 1040, 10), (140, 1070, 10)])


TOP = (1 << 64) - 1
BAD_RUNS: list[tuple[tuple[int, ...], str]] = [
    ((0, 8, 0, 8, 0, 1), "empty"),
    ((0, 8, 0, 8, 8, 0), "empty"),
    ((0, 8, 0, 8, SIZE + 1, 1), "outside"),
    ((SIZE, 8, 0, 8, 1, 1), "outside"),
    ((0, 8, SIZE - 7, 8, 8, 1), "outside"),
    ((0, SIZE // 4, 0, 8, 8, 5), "outside"),
    ((0, 8, 8, SIZE // 4, 8, 5), "outside"),
    ((0, TOP, 0, 8, 8, 2), "outside"),  # these overflow 64 bits
    ((0, 1 << 62, 0, 8, 8, 5), "outside"),
    ((8, TOP - 7, 0, 8, 8, 2), "outside"),
    ((0, 1, 0, 1, 1, TOP), "outside"),
    ((TOP, 1, 0, 1, 1, 1), "outside"),
]


@pytest.mark.parametrize(("run", "says"), BAD_RUNS)
async def test_an_impossible_run(world: World, run: tuple[int, ...], says: str) -> None:
    with pytest.raises(RangeError, match=says) as caught:
        Batch.strided("write", world.here, world.remote, [(0, 8, 0, 8, 8, 2), run])
    assert caught.value.index == 1


async def test_strided_parts(world: World) -> None:
    """Each part counts from the start of its own ranges, and is not merged with another."""
    scribble(world)
    table = np.array([(0, 20, 10, 30, 10, 3)], "uint64")
    parts = [
        (world.here[100:200], world.remote[1000:1100], table),
        (world.here, world.remote, [(0, 16, 0, 16, 16, 4), (64, 0, 64, 8, 8, 2)]),
        (world.here[64:80], world.remote[80:96], [(0, 8, 0, 8, 8, 2)]),
    ]
    batch = Batch.strided("write", parts)
    rows = [(100, 1010, 10), (120, 1040, 10), (140, 1070, 10), (0, 0, 64), (64, 64, 8), (64, 72, 8), (64, 80, 16)]
    assert (len(batch), batch.count, batch.nbytes) == (3 + 6 + 2, 3 + 2 + 1, 30 + 80 + 16)
    assert await submitted(world, batch) == expected(world, rows)
    assert await submitted(world, Batch.strided("write", tuple(parts[:1]))) == expected(world, rows[:3])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.tuples(
            st.integers(0, 64),
            st.integers(0, 64),
            st.lists(
                st.tuples(
                    st.integers(0, 64),
                    st.integers(0, 40),
                    st.integers(0, 64),
                    st.integers(0, 40),
                    st.integers(1, 20),
                    st.integers(1, 5),
                ),
                min_size=1,
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
async def test_strided_parts_are_batches_of_their_own_after_each_other(world: World, parts: Any) -> None:
    scribble(world, seed=len(parts))
    rows = [(left + loff, right + roff, length) for left, right, runs in parts for loff, roff, length in unrolled(runs)]
    wanted = expected(world, rows)
    batch = Batch.strided("write", [(world.here[left:], world.remote[right:], runs) for left, right, runs in parts])
    assert len(batch) == len(rows)
    assert await submitted(world, batch) == wanted


async def test_the_error_names_the_failed_copy_of_strided_parts(world: World) -> None:
    """Copies are counted through all parts, as rows are."""
    runs = [(0, 8, 0, 8, 8, 2), (100, 20, 100, 20, 10, 2)]
    batch = Batch.strided("write", [(world.here, world.remote, runs), (world.here, world.remote, runs[1:])])
    assert (len(batch), batch.count) == (6, 5)
    for descriptor, copy in enumerate([0, 2, 3, 4, 5]):
        world.plan.clear()
        world.plan.fail("system", index=descriptor, nth=1)
        with pytest.raises(TransferError) as caught:
            await world.left.submit(batch)
        assert caught.value.index == copy


@pytest.mark.parametrize(("run", "says"), BAD_RUNS)
async def test_an_impossible_run_of_a_later_part(world: World, run: tuple[int, ...], says: str) -> None:
    parts = [(world.here, world.remote, [(0, 8, 0, 8, 8, 2)]), (world.here, world.remote, [(0, 8, 0, 8, 8, 2), run])]
    with pytest.raises(RangeError, match=says) as caught:
        Batch.strided("write", parts)
    assert caught.value.index == 1, "its number in the part"


async def test_a_part_reaches_no_further_than_its_range(world: World) -> None:
    whole = (world.here, world.remote, [(0, 8, 0, 8, 8, 2)])
    for part in [
        (world.here[:15], world.remote, [(0, 8, 0, 8, 8, 2)]),
        (world.here, world.remote[:15], [(0, 8, 0, 8, 8, 2)]),
    ]:
        with pytest.raises(RangeError, match="outside"):
            Batch.strided("write", [whole, part])


@pytest.mark.parametrize(
    "part", [(), (1,), ("here",), ("here", "remote"), ("here", "remote", None), ("here", "remote", []), ("here", 7, [])]
)
async def test_malformed_strided_parts(world: World, part: Any) -> None:
    names = {"here": world.here, "remote": world.remote}
    wrong = tuple(names.get(item, item) if isinstance(item, str) else item for item in part)
    whole = (world.here, world.remote, [(0, 8, 0, 8, 8, 2)])
    for parts in ([wrong], [whole, wrong]):
        with pytest.raises(InvalidArgumentError):
            Batch.strided("write", parts)


@pytest.mark.parametrize("parts", [[], (), [1], 7, None, "text"])
async def test_what_is_not_strided_parts(world: World, parts: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Batch.strided("write", parts)


async def test_too_many_copies_of_all_strided_parts(world: World) -> None:
    limit = world.left.driver_limits()["shm"]["descriptors"]
    parts = [(world.here, world.remote, [(0, 0, 0, 2, 1, count)]) for count in (limit - 1, 1)]
    assert len(Batch.strided("write", parts)) == limit
    with pytest.raises(InvalidArgumentError, match=f"more than the {limit} descriptors"):
        Batch.strided("write", [*parts, (world.here, world.remote, [(0, 8, 0, 8, 8, 1)])])


async def test_strided_parts_of_several_peers(world: World) -> None:
    async with engine_pair() as other:
        _, remote = await other.region("other", 64)
        runs = [(0, 8, 0, 8, 8, 2)]
        with pytest.raises(InvalidArgumentError, match="must belong to one peer"):
            Batch.strided("write", [(world.here, world.remote, runs), (world.here, remote, runs)])


@pytest.mark.parametrize("runs", [[], [(1, 2, 3)], [(0, 8, 0, 8, 8, -1)], [(0, 8, 0, 8, 8, "1")], 7])
async def test_malformed_runs(world: World, runs: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Batch.strided("write", world.here, world.remote, runs)


async def test_too_many_copies_of_a_run(world: World) -> None:
    limit = world.left.driver_limits()["shm"]["descriptors"]
    with pytest.raises(InvalidArgumentError, match=f"more than the {limit} descriptors"):
        Batch.strided("write", world.here, world.remote, [(0, 0, 0, 2, 1, limit + 1)])
    assert len(Batch.strided("write", world.here, world.remote, [(0, 0, 0, 2, 1, limit)])) == limit


# -- other places


async def test_shifted(world: World) -> None:
    scribble(world)
    rows = [(0, 64, 8), (8, 72, 8), (100, 200, 50)]
    batch = world.batch(rows)
    for local, remote in [(0, 0), (16, 0), (0, 1000), (5, -64), (SIZE - 150, SIZE - 250)]:
        moved = batch.shifted(local, remote)
        assert (len(moved), moved.count, moved.nbytes) == (len(batch), batch.count, batch.nbytes)
        wanted = expected(world, [(loff + local, roff + remote, length) for loff, roff, length in rows])
        assert await submitted(world, moved) == wanted
    again = batch.shifted(remote=100).shifted(local=7, remote=-100).shifted(local=-7)
    assert await submitted(world, again) == expected(world, rows)


async def test_shifted_while_it_is_in_flight(world: World) -> None:
    """The one in flight is another."""
    scribble(world)
    batch = world.batch([(0, 0, 64), (128, 128, 64)])
    wanted = expected(world, [(0, 0, 64), (128, 128, 64), (0, 1000, 64), (128, 1128, 64)])
    world.plan.hold(nth=1)
    first = world.left.submit(batch)
    second = world.left.submit(batch.shifted(remote=1000))
    del batch
    assert await second == 128
    world.plan.release()
    assert await first == 128
    assert world.landed == wanted


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (-1, 0),
        (0, -66),
        (SIZE - 149, 0),
        (0, SIZE - 249),
        (1 << 62, 0),
        (-(1 << 63), 0),
        (0, (1 << 63) - 1),
        (1 << 70, 0),
    ],
)
async def test_shifted_outside_the_region(world: World, local: int, remote: int) -> None:
    batch = world.batch([(0, 65, 8), (100, 200, 50)])
    with pytest.raises(RangeError, match="reaches outside"):
        batch.shifted(local, remote)


async def test_shifted_never_leaves_the_ranges_it_was_made_for(world: World) -> None:
    rows = [(0, 0, 10)]
    batch = Batch("write", world.here[100:120], world.remote[200:220], rows)
    assert batch.shifted(10, 10).nbytes == 10
    for local, remote in [(11, 0), (0, 11), (-1, 0), (0, -1)]:
        with pytest.raises(RangeError):
            batch.shifted(local, remote)
    pairs = Batch("write", [(world.here[100:110], world.remote[200:210])])  # these are of the regions
    assert pairs.shifted(-100, SIZE - 210).nbytes == 10
    with pytest.raises(RangeError):
        pairs.shifted(-101)


@pytest.mark.parametrize("wrong", ["1", 1.5, None])
async def test_a_shift_that_is_not_a_number(world: World, wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="whole numbers"):
        world.batch([(0, 0, 1)]).shifted(wrong)


# -- all of it


ROW = st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(1, 40))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(ROW, min_size=1, max_size=20), local=st.integers(-50, 50), remote=st.integers(-50, 50))
def test_any_rows_give_the_bytes_of_single_rows(rows: Rows, local: int, remote: int) -> None:
    """Merged or shifted, the bytes are those of the rows one by one, as long as no two write to one place."""
    free = [0] * 400
    for _, roff, length in rows:
        for at in range(roff, roff + length):
            free[at] += 1
    if max(free) > 1:
        rows = rows[:1]

    async def main() -> None:
        async with engine_pair() as pair:
            there, seen = await pair.region("there", 400)
            here = pair.left.allocate("here", 400)
            memoryview(here)[:] = bytes(i % 251 for i in range(400))
            batch = Batch("write", here, seen, rows)
            moved = [(loff + local, roff + remote, length) for loff, roff, length in rows]
            fits = all(a >= 0 and a + n <= 400 and b >= 0 and b + n <= 400 for a, b, n in moved)
            if not fits:
                with pytest.raises(RangeError):
                    batch.shifted(local, remote)
                moved, local_batch = rows, batch
            else:
                local_batch = batch.shifted(local, remote)
            await pair.left.submit(local_batch)
            wanted = bytearray(400)
            for loff, roff, length in moved:
                wanted[roff : roff + length] = bytes(memoryview(here)[loff : loff + length])
            assert memoryview(there) == wanted

    asyncio.run(main())


@pytest.mark.torch
async def test_rows_of_a_tensor(world: World) -> None:
    torch = pytest.importorskip("torch")
    rows = torch.tensor([[0, 8, 4], [16, 32, 4]], dtype=torch.int64)
    world.here.numpy()[:] = 7
    assert await world.left.submit(Batch("write", world.here, world.remote, rows)) == 8
    assert world.landed[:40] == bytes(8) + b"\7" * 4 + bytes(20) + b"\7" * 4 + bytes(4)
    for wrong in (rows.to(torch.int32), rows.to(torch.float64)):
        with pytest.raises(InvalidArgumentError, match="64-bit integers"):
            Batch("write", world.here, world.remote, wrong)
    with pytest.raises(BufferTypeError, match="C-contiguous"):
        Batch("write", world.here, world.remote, torch.zeros(3, 2, dtype=torch.int64).T)
    with pytest.raises(BufferTypeError, match="rows: Tensor cannot be used by DLPack"):
        Batch("write", world.here, world.remote, torch.zeros(2, 3, device="meta", dtype=torch.int64))
