"""C6: everything is checked before anything is sent, and every bad input has an error of its own that states the remedy."""

from __future__ import annotations

import array
import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from hixl_async import (
    Access,
    AccessError,
    Batch,
    BufferTypeError,
    ClosedError,
    InvalidArgumentError,
    LocalSlice,
    PeerDownError,
    RangeError,
    Region,
    RemoteRegion,
    RemoteSlice,
    StaleRegionError,
    Transfer,
    UsageError,
)
from hixl_async.testing import engine_pair, until

from .conftest import SIZE, World

TOP = 2**64


@asynccontextmanager
async def refused(world: World, kind: type[Exception], says: str) -> AsyncIterator[pytest.ExceptionInfo[Exception]]:
    """Expect the body to raise `kind` with a reason; nothing is sent, and the engine goes on working."""
    ops, stats, before = world.plan.counts.ops, world.left.stats(), world.landed
    pins = world.here.pins, world.remote.pins
    with pytest.raises(kind) as caught:
        yield caught
    assert re.search(says, str(caught.value)), f"{caught.value} does not say {says!r}"
    assert world.plan.counts.ops == ops, "something was handed to the driver"
    assert world.left.stats() == stats
    assert world.landed == before
    assert (world.here.pins, world.remote.pins) == pins
    await world.works()


# -- ranges of regions


SLICES = [
    (slice(0, SIZE + 1), RangeError, "never clamped"),
    (slice(SIZE + 1, None), RangeError, "outside"),
    (slice(8, 4), RangeError, "ends before it begins"),
    (slice(-4, None), RangeError, "start is -4"),
    (slice(None, -1), RangeError, "stop is -1"),
    (slice(0, TOP), RangeError, "stop is 18446744073709551616"),
    (slice(0, 8, 2), RangeError, "step 1"),
    (slice(8, 0, -1), RangeError, "step 1"),
    (slice("a", 8), RangeError, "start is 'a'"),
    (slice(0, 2.5), RangeError, "stop is 2.5"),
    (0, InvalidArgumentError, r"region\[0:4096\]"),
    ("name", InvalidArgumentError, r"region\[0:4096\]"),
    ((slice(0, 1), slice(0, 1)), InvalidArgumentError, r"region\[0:4096\]"),
]


async def test_bad_slices(world: World) -> None:
    for key, kind, says in SLICES:
        for memory in (world.here, world.remote, world.remote[:]):
            async with refused(world, kind, says):
                memory[key]


async def test_slices_of_slices_stay_inside(world: World) -> None:
    part = world.remote[100:200]
    assert (part[10:20].offset, part[10:20].length) == (110, 10)
    async with refused(world, RangeError, "outside of 100 bytes"):
        part[0:101]
    assert len(part[100:]) == 0
    assert len(world.remote) == len(world.remote[:]) == SIZE


async def test_integers_of_other_libraries_are_integers(world: World) -> None:
    assert await world.left.write(b"abcd", world.remote[np.int64(4) : np.uint32(8)]) == 4
    assert world.landed[4:8] == b"abcd"


# -- one transfer


LOCALS = [
    (b"", 0, 0, RangeError, "0 local and 0 remote bytes"),
    (b"", 0, 8, RangeError, "0 local and 8 remote"),
    (b"abc", 0, 4, RangeError, "3 local and 4 remote bytes; the lengths must be equal"),
    (b"abc", 0, 0, RangeError, "must be equal and not 0"),
    (memoryview(b"abcdefgh")[::2], 0, 4, BufferTypeError, "contiguous"),
    (np.zeros((8, 8), "uint8")[:, 0], 0, 8, BufferTypeError, "contiguous"),
    ("text", 0, 4, BufferTypeError, "str"),
    (7, 0, 4, BufferTypeError, "int"),
    (None, 0, 4, BufferTypeError, "NoneType"),
    ([1, 2], 0, 2, BufferTypeError, "list"),
]


async def test_bad_local(world: World) -> None:
    for local, start, stop, kind, says in LOCALS:
        async with refused(world, kind, says):
            world.left.write(local, world.remote[start:stop])


@pytest.mark.parametrize("local", [b"12345678", memoryview(b"12345678"), np.frombuffer(b"12345678", "uint8")])
async def test_read_into_read_only(world: World, local: Any) -> None:
    async with refused(world, BufferTypeError, "writable|read-only"):
        world.left.read(local, world.remote[0:8])


async def test_read_into_a_region_of_read_only_memory(world: World) -> None:
    region = world.left.register("constant", b"x" * 64, access="read")
    async with refused(world, BufferTypeError, "read-only"):
        world.left.read(region[0:8], world.remote[0:8])
    async with refused(world, BufferTypeError, "read-only"):
        Batch("read", region, world.remote, [(0, 0, 8)])
    assert await world.left.write(region[0:8], world.remote[0:8]) == 8


@pytest.mark.parametrize("remote", [b"12345678", bytearray(8), None, 7, "there", np.zeros(8)])
async def test_bad_remote(world: World, remote: Any) -> None:
    async with refused(world, InvalidArgumentError, "^remote must be a region"):
        world.left.write(b"12345678", remote)


async def test_a_target_of_the_engine_itself_is_refused(world: World) -> None:
    """An engine's own region is no target; copy within the process instead."""
    for verb in (world.left.write, world.left.read):
        says = "remote must be a region of a peer, not <Region 'here'"
        async with refused(world, InvalidArgumentError, says):
            verb(bytearray(8), world.here[0:8])
        async with refused(world, InvalidArgumentError, says):
            verb(world.here, world.here)
    says = "local must be local: a region of this engine"
    async with refused(world, InvalidArgumentError, says):
        world.left.write(world.remote[0:8], world.remote[8:16])
    async with refused(world, InvalidArgumentError, says):
        world.left.write(world.remote, world.remote)


async def test_rights(world: World) -> None:
    world.right.allocate("read only", 64, access="read")
    world.right.allocate("write only", 64, access="write")
    readable, writable = await world.peer.region("read only"), await world.peer.region("write only")
    cases = [
        (lambda: world.left.write(b"x" * 8, readable[0:8]), "write"),
        (lambda: Batch("write", world.here, readable, [(0, 0, 8)]), "write"),
        (lambda: world.left.read(bytearray(8), writable[0:8]), "read"),
        (lambda: Batch("read", world.here, writable, [(0, 0, 8)]), "read"),
    ]
    for call, word in cases:
        async with refused(world, AccessError, f"does not grant '{word}'.*access="):
            call()
    assert await world.left.read(bytearray(8), readable[0:8]) == 8
    assert await world.left.write(bytes(8), writable[0:8]) == 8


async def test_region_of_another_engine(world: World) -> None:
    async with engine_pair() as other:
        region, remote = await other.region("elsewhere", 64)
        async with refused(world, InvalidArgumentError, "another engine"):
            world.left.write(b"x" * 8, remote[0:8])
        async with refused(world, UsageError, "another engine"):
            world.left.write(region[0:8], world.remote[0:8])
        batch = Batch("write", other.left.allocate("local", 64), remote, [(0, 0, 8)])
        async with refused(world, InvalidArgumentError, "another engine"):
            world.left.submit(batch)


async def test_a_batch_cannot_mix_engines(world: World) -> None:
    async with engine_pair() as other:
        region, _ = await other.region("elsewhere", 64)
        says = "another engine"
        async with refused(world, InvalidArgumentError, says):
            Batch("write", region, world.remote, [(0, 0, 8)])


async def test_closed_local_region(world: World) -> None:
    region = world.left.allocate("short-lived", 64)
    piece = region[0:8]
    batch = Batch("write", region, world.remote, [(0, 0, 8)])
    await region.aclose()
    async with refused(world, ClosedError, "closed"):
        world.left.write(piece, world.remote[0:8])
    async with refused(world, ClosedError, "closed"):
        world.left.write(region, world.remote[0:64])
    async with refused(world, ClosedError, "'short-lived'.*closed"):
        world.left.submit(batch)
    async with refused(world, ClosedError, "closed"):
        memoryview(region)


async def test_closed_remote_region(world: World) -> None:
    gone, remote = await world.pair.region("gone", 64)
    batch = Batch("write", world.here, remote, [(0, 0, 8)])
    await gone.aclose()
    await until(lambda: not remote.alive)
    says = r"'gone'.*closed by its owner; await peer\.region"
    async with refused(world, StaleRegionError, says):
        world.left.write(b"x" * 8, remote[0:8])
    async with refused(world, StaleRegionError, says):
        world.left.submit(batch)


async def test_peer_that_left(world: World) -> None:
    batch = world.batch([(0, 0, 8)])
    piece = world.remote[0:8]
    await world.pair.back.aclose()
    await until(lambda: world.peer.state.value == "down")
    for call in (
        lambda: world.left.write(b"x" * 8, piece),
        lambda: world.left.submit(batch),
        lambda: world.left.notify(world.peer, "topic"),
    ):
        with pytest.raises(PeerDownError) as caught:
            call()
        assert caught.value.retryable
        assert "right" in str(caught.value)
    assert world.left.stats().in_flight == 0


# -- options


OPTIONS = [
    ({"timeout": 0}, "timeout must be a positive number of seconds"),
    ({"timeout": -1.0}, "timeout"),
    ({"timeout": float("nan")}, "timeout"),
    ({"timeout": float("inf")}, "timeout"),
    ({"timeout": "soon"}, "timeout"),
    ({"priority": "urgent"}, "priority must be 'low', 'normal' or 'high'"),
    ({"priority": 3}, "priority"),
    ({"priority": []}, "priority"),
    ({"notify": "topic"}, "notify must be"),
    ({"notify": ("topic",)}, "notify must be"),
    ({"notify": (b"topic", b"")}, "notify must be"),
    ({"notify": ("topic", "text")}, "notify must be"),
    ({"notify": ("topic", 3)}, "notify must be"),
    ({"notify": ("\ud800", b"")}, "topic .* holds half a surrogate pair"),
    ({"notify": ("", b"")}, "topic is empty"),
    ({"notify": ("topic", bytes(1 << 20))}, "write the payload into a region"),
    ({"signal": 5}, "signal must be"),
    ({"signal": (None, 5)}, "signal"),
]


async def test_bad_options(world: World) -> None:
    for options, says in OPTIONS:
        async with refused(world, InvalidArgumentError, says):
            world.write(**options)
        async with refused(world, InvalidArgumentError, says):
            world.left.submit(world.batch([(0, 0, 8)]), **options)


SIGNALS = [
    (0, 4, 1, "8 aligned bytes"),
    (4, 12, 1, "8 aligned bytes"),
    (0, 8, -1, "value in 0"),
    (0, 8, TOP, "value in 0"),
    (0, 8, "1", "signal must be"),
]


async def test_bad_signal(world: World) -> None:
    for start, stop, value, says in SIGNALS:
        piece = world.remote[start:stop]
        async with refused(world, InvalidArgumentError, says):
            world.write(signal=(piece, value))


async def test_signal_into_local_or_read_only_memory(world: World) -> None:
    async with refused(world, InvalidArgumentError, "remote region"):
        world.write(signal=(world.here[0:8], 1))
    world.right.allocate("constant", 64, access="read")
    constant = await world.peer.region("constant")
    async with refused(world, AccessError, "does not grant 'write'"):
        world.write(signal=(constant[0:8], 1))


async def test_notification_limit_is_exact(world: World) -> None:
    limit = world.left.driver_limits()["shm"]["notification_bytes"]
    notes = world.right.notifications("t")
    await world.write(notify=("t", bytes(limit - 1)))
    assert len((await notes.get()).payload) == limit - 1
    async with refused(world, InvalidArgumentError, f"takes {limit}"):
        world.write(notify=("t", bytes(limit)))
    says = f"takes {limit}"
    async with refused(world, InvalidArgumentError, says):
        world.left.notify(world.peer, "t", bytes(limit))


# -- batches


ROWS = [
    ([], InvalidArgumentError, "no descriptors", None),
    (np.zeros((0, 3), "uint64"), InvalidArgumentError, "no descriptors", None),
    (np.zeros((4, 2), "uint64"), InvalidArgumentError, r"shape \(N, 3\).*got \(4, 2\)", None),
    (np.zeros((4, 4), "uint64"), InvalidArgumentError, r"got \(4, 4\)", None),
    (np.zeros(6, "uint64"), InvalidArgumentError, r"got \(6,\)", None),
    (np.zeros((1, 3), "float64"), InvalidArgumentError, "64-bit integers", None),
    (np.zeros((1, 3), "uint32"), InvalidArgumentError, "64-bit integers", None),
    (np.ones((2, 3), ">u8"), InvalidArgumentError, "64-bit integers", None),
    (np.ones((3, 3), "uint64").T, BufferTypeError, "ascontiguousarray", None),
    (np.ones((4, 3), "uint64")[::2], BufferTypeError, "ascontiguousarray", None),
    ([(0, 0)], InvalidArgumentError, "sequences", None),
    ([(0, 0, 1, 1)], InvalidArgumentError, "sequences", None),
    ([(0, 0, "1")], InvalidArgumentError, "sequences", None),
    ([(0, 0, -1)], InvalidArgumentError, "sequences", None),
    ([(0, 0, TOP)], InvalidArgumentError, "sequences", None),
    ([7], InvalidArgumentError, "sequences", None),
    (7, InvalidArgumentError, "sequences", None),
    ("abc", InvalidArgumentError, "sequences", None),
    ([(0, 0, 8), (0, 0, 0)], RangeError, "descriptor 1 .*empty", 1),
    ([(0, 0, SIZE), (1, 0, SIZE)], RangeError, "descriptor 1 ", 1),
    ([(0, 0, 8), (0, SIZE - 7, 8)], RangeError, "descriptor 1 ", 1),
    ([(0, 0, 8), (SIZE, 0, 1)], RangeError, "descriptor 1 ", 1),
    ([(0, 0, 8), (0, 0, SIZE + 1)], RangeError, "descriptor 1 ", 1),
    # Sums that overflow 64 bits to something small.
    ([(0, 0, 8), (TOP - 8, 0, 16)], RangeError, "descriptor 1 ", 1),
    ([(0, 0, 8), (0, TOP - 8, 16)], RangeError, "descriptor 1 ", 1),
    ([(0, 0, 8), (16, 0, TOP - 8)], RangeError, "descriptor 1 ", 1),
    ([(0, 0, 8), (8, 8, TOP - 1)], RangeError, "descriptor 1 ", 1),
    (np.array([(0, 0, 8), (-8, 0, 8)], "int64"), RangeError, "descriptor 1 ", 1),
    (np.array([(0, 0, 8), (0, 0, -8)], "int64"), RangeError, "descriptor 1 ", 1),
]


async def test_bad_rows(world: World) -> None:
    for rows, kind, says, index in ROWS:
        world.here.numpy()[:] = 9
        async with refused(world, kind, says) as error:
            world.left.submit(world.batch(rows))
        assert error.value.index == index


async def test_rows_count_from_the_ranges_given(world: World) -> None:
    world.here.numpy()[:] = np.arange(SIZE) % 251
    batch = Batch("write", world.here[100:200], world.remote[1000:1100], [(10, 20, 30), (40, 50, 50)])
    assert await world.left.submit(batch) == 80
    assert world.landed[1020:1050] == bytes(world.here.numpy()[110:140])
    assert world.landed[1050:1100] == bytes(world.here.numpy()[140:190])
    async with refused(world, RangeError, "100") as error:
        Batch("write", world.here[100:200], world.remote[1000:1100], [(51, 0, 50)])
    assert error.value.index == 0


PARTS = [
    (lambda w: ("copy", w.here, w.remote, [(0, 0, 1)]), "verb must be 'read' or 'write'"),
    (lambda w: (["write"], w.here, w.remote, [(0, 0, 1)]), "verb must be"),
    (lambda w: ("write", [(w.here,)]), "parts must be a sequence"),
    (lambda w: ("write", [7]), "parts must be"),
    (lambda w: ("write", 7), "parts must be"),
    (lambda w: ("write", []), "no descriptors"),
    (lambda w: ("write", b"bytes", w.remote, [(0, 0, 1)]), "local must be a region"),
    (lambda w: ("write", w.here, b"bytes", [(0, 0, 1)]), "remote must be a region"),
    (lambda w: ("write", w.remote, w.here, [(0, 0, 1)]), "local must be local|remote must be"),
    (lambda w: ("write", [(w.here[0:8], w.remote[0:9])]), "8 local and 9 remote bytes"),
    (lambda w: ("write", [(w.here[0:0], w.remote[0:0])]), "not 0"),
]


async def test_bad_parts(world: World) -> None:
    for arguments, says in PARTS:
        async with refused(world, InvalidArgumentError, says):
            Batch(*arguments(world))


async def test_too_many_descriptors(world: World) -> None:
    limit = world.left.driver_limits()["shm"]["descriptors"]
    places = 2 * np.arange(limit + 1)
    rows = np.stack([places, places, np.ones(limit + 1)], axis=1).astype("uint64")
    says = f"{limit + 1} copies make more than the {limit} descriptors.*split"
    async with refused(world, InvalidArgumentError, says):
        world.batch(rows)
    assert await world.left.submit(world.batch(rows[:limit])) == limit


async def test_submit_needs_a_batch(world: World) -> None:
    for wrong in (None, [(0, 0, 1)]):
        with pytest.raises((InvalidArgumentError, TypeError)):
            world.left.submit(wrong)
    await world.works()


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 8, 4), (4, 0, 4)],
        ((0, 8, 4), (4, 0, 4)),
        np.array([(0, 8, 4), (4, 0, 4)], "uint64"),
        np.array([(0, 8, 4), (4, 0, 4)], "int64"),
        memoryview(array.array("Q", [0, 8, 4, 4, 0, 4])).cast("B").cast("Q", (2, 3)),
        [[np.uint64(0), np.int32(8), 4], (4, 0, 4)],
    ],
)
async def test_good_rows(world: World, rows: Any) -> None:
    world.here.numpy()[:8] = list(b"abcdefgh")
    batch = world.batch(rows)
    assert (len(batch), batch.count, batch.nbytes) == (2, 2, 8)
    transfer = world.left.submit(batch)
    assert transfer.nbytes == 8
    assert await transfer == 8
    assert world.landed[:12] == b"efgh" + bytes(4) + b"abcd"


async def test_a_batch_may_be_submitted_many_times_and_at_once(world: World) -> None:
    batch = world.batch([(0, 0, 64)])
    world.plan.pending()
    transfers = [world.left.submit(batch) for _ in range(20)]
    assert await asyncio.gather(*transfers) == [64] * 20


async def test_a_batch_in_flight_needs_no_handle(world: World) -> None:
    world.here.numpy()[:] = 3
    world.plan.hold()
    transfer = world.left.submit(world.batch(np.array([(i, i, 1) for i in range(500)], "uint64")))
    noise = [np.ones((500, 5), "uint64") for _ in range(50)]
    world.plan.release()
    assert await transfer == 500
    assert world.landed[:501] == b"\x03" * 500 + b"\x00"
    assert noise


async def test_parts_of_several_regions(world: World) -> None:
    other, remote = await world.pair.region("other", 256)
    here = world.left.register("mine", bytearray(b"0123456789"), access="read")
    world.here.numpy()[:4] = list(b"abcd")
    batch = Batch("write", [(world.here[0:4], remote[0:4]), (here, world.remote, [(0, 8, 2), (8, 10, 2)])])
    assert await world.left.submit(batch) == 8
    assert bytes(memoryview(other)[:4]) == b"abcd"
    assert world.landed[8:12] == b"0189"


# -- objects made by hand


async def test_objects_made_by_hand(world: World) -> None:
    for kind in (Transfer, LocalSlice, RemoteSlice):
        with pytest.raises(TypeError, match="made by"):
            kind()
    orphan, unborn = RemoteRegion._make(RemoteRegion), Region._make(Region)  # what no program can do
    orphan.__init__("orphan", Access.READ_WRITE)
    unborn.__init__(world.left, "unborn", Access.READ_WRITE)
    says = "belongs to no engine"
    async with refused(world, InvalidArgumentError, says):
        world.left.write(b"", orphan)
    async with refused(world, InvalidArgumentError, says):
        Batch("write", world.here, orphan, [(0, 0, 8)])
    async with refused(world, UsageError, "engine"):
        world.left.write(unborn, world.remote)
    async with refused(world, InvalidArgumentError, says):
        Batch("write", unborn, world.remote, [(0, 0, 8)])
    for memory in (orphan, unborn):
        with pytest.raises(InvalidArgumentError, match=says):
            memory.drained()
    with pytest.raises(InvalidArgumentError, match=says):
        unborn.released()
