"""Each wrong call gets one typed error that names what is wrong; nothing is sent, nothing changes, and the engine goes on.

Checks of regions, connections, notifications and requests alone stand beside their other tests.
"""

from __future__ import annotations

import array
import copy
import ctypes
import mmap
import os
import pickle
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy
import pytest

from hixl_async import (
    Access,
    AccessError,
    Address,
    Batch,
    BufferTypeError,
    ClosedError,
    Coalescer,
    Engine,
    EngineConfig,
    Group,
    HixlError,
    InvalidArgumentError,
    Peer,
    PeerDownError,
    RangeError,
    Region,
    RemoteRegion,
    StaleRegionError,
    Subscription,
    SubscriptionQueue,
    UsageError,
    kv,
)
from hixl_async.engine.arguments import number_of
from hixl_async.testing import EnginePair, engine_pair, until

HUGE = (1 << 64) - 1
#: The wrong values of a parameter that is a number of at least 1.
NO_NUMBERS: tuple[Any, ...] = (0, -1, 1 << 64, True, 1.5, "many", [])


class World:
    """A pair, memory on both sides, and the proof that nothing happened."""

    def __init__(self, pair: EnginePair, local: Region, region: Region, remote: RemoteRegion) -> None:
        self.pair, self.left = pair, pair.left
        self.local, self.region, self.remote = local, region, remote
        self.peer = pair.peer
        memoryview(local)[:] = b"L" * 100
        memoryview(region)[:] = b"R" * 100
        self.before = self.left.stats()

    async def check(self) -> None:
        assert bytes(memoryview(self.local)) == b"L" * 100
        assert bytes(memoryview(self.region)) == b"R" * 100
        after = self.left.stats()
        assert (after.transfers, after.pinned, after.in_flight) == (self.before.transfers, 0, 0)
        assert self.local.pins == self.remote.pins == 0
        assert await self.left.write(self.local, self.remote) == 100
        assert bytes(memoryview(self.region)) == b"L" * 100


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with engine_pair() as pair:
        region, remote = await pair.region("kv", 100)
        world = World(pair, pair.left.allocate("local", 100), region, remote)
        yield world
        await world.check()


# -- ranges


@pytest.mark.parametrize(
    ("start", "stop", "step"),
    [
        (0, 101, None), (101, 101, None), (101, 102, None), (60, 50, None), (-1, 50, None), (0, -1, None), (-10, None, None),
        (HUGE, HUGE, None), (0, HUGE, None), (0, 1 << 64, None), (1 << 200, None, None),
        (0, 50, 2), (50, 0, -1), (0, 50, -1), (0, 50, 0), (0.5, 50, None), ("0", 50, None),
    ],
)  # fmt: skip
async def test_ranges_outside(world: World, start: Any, stop: Any, step: Any) -> None:
    for memory in (world.local, world.remote, world.remote[0:100]):
        with pytest.raises(RangeError, match="slice|range"):
            memory[start:stop:step]


@pytest.mark.parametrize("key", [0, -1, "a", None, (0, 1), ...])
async def test_indexes_that_are_not_slices(world: World, key: Any) -> None:
    for memory in (world.local, world.remote, world.remote[0:10]):
        with pytest.raises(InvalidArgumentError, match="slice of bytes"):
            memory[key]


@pytest.mark.parametrize(("local", "remote"), [(10, 11), (11, 10), (0, 0), (0, 10), (10, 0)])
async def test_lengths_that_differ_or_are_zero(world: World, local: int, remote: int) -> None:
    for left in (world.local[0:local], bytearray(local)):
        for call in (world.left.read, world.left.write):
            with pytest.raises(RangeError, match=rf"{local} local and {remote} remote bytes"):
                call(left, world.remote[0:remote])
    with pytest.raises(RangeError, match="descriptor 0"):
        Batch("write", [(world.local[0:local], world.remote[0:remote])])


# -- buffers


@pytest.mark.parametrize(
    "buffer",
    [
        numpy.zeros((10, 10), "uint8")[:, 1], numpy.zeros(20, "uint8")[::2], numpy.zeros((2, 5), "uint8").T,
        memoryview(bytearray(20))[::2], 7, "text", None, [1] * 10, object(), (b"1234567890",),
    ],
)  # fmt: skip
async def test_objects_that_are_not_buffers(world: World, buffer: Any) -> None:
    for call in (world.left.read, world.left.write):
        with pytest.raises(BufferTypeError, match="contiguous"):
            call(buffer, world.remote[0:10])


async def test_registering_what_has_no_memory(world: World) -> None:
    for buffer in ([1, 2], 7, None, "text"):
        with pytest.raises(BufferTypeError, match=r"^buffer must be a contiguous buffer \(.*, not "):
            world.left.register("none", buffer)


async def test_assigning_to_ranges(world: World) -> None:
    for target, way in (
        (world.local, r"memoryview\(region\)\[0:4\] = .*region\.numpy\(\)"),
        (world.local[0:8], r"memoryview\(region\)\[0:4\] = "),
        (world.remote, r"await engine\.write\(.*, remote\[0:4\]\)"),
        (world.remote[0:8], r"await engine\.write\("),
    ):
        changeable: Any = target
        with pytest.raises(TypeError, match=way):
            changeable[0:4] = b"abcd"
        with pytest.raises(TypeError, match="does not support item deletion"):
            del changeable[0:4]


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_what_can_be_neither_pickled_nor_copied(world: World, act: Callable[[Any], Any]) -> None:
    transfer = world.left.write(b"L" * 100, world.remote)
    notifications = world.left.notifications("topic")
    for thing in (
        *(world.left, world.pair.peer, world.left.group(), world.left.coalesce(), notifications),
        *(world.local, world.remote, world.local[0:1], world.remote[0:1]),
        *(transfer, Batch("write", world.local, world.remote)),
    ):
        with pytest.raises(TypeError, match=rf"^{type(thing).__name__} objects can be neither .* process: \w+"):
            act(thing)
    memoryview(world.region)[:] = b"R" * 100
    world.before = world.left.stats()


def frozen() -> Any:
    array = numpy.zeros(10, "uint8")
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("buffer", [b"1234567890", memoryview(bytearray(10)).toreadonly(), frozen()])
async def test_read_only_buffers_as_the_target_of_a_read(world: World, buffer: Any) -> None:
    with pytest.raises(BufferTypeError, match=r"writable|read-only"):
        world.left.read(buffer, world.remote[0:10])
    registered = world.left.register("constant", buffer)
    for call in (
        lambda: world.left.read(registered, world.remote[0:10]),
        lambda: Batch("read", [(registered[0:10], world.remote[0:10])]),
    ):
        with pytest.raises(BufferTypeError, match="read-only"):
            call()


@pytest.mark.parametrize(
    "buffer",
    [
        numpy.array([None]), memoryview(numpy.array([None])),
        numpy.zeros(1, "O").view(numpy.recarray), (ctypes.py_object * 1)(),
        numpy.zeros(1, [("inner", [("plain", "i8"), ("object", "O")])])["inner"],
        memoryview(numpy.zeros(1, [("plain", "i8"), ("object", "O")])),
    ],
)  # fmt: skip
async def test_references_to_objects(world: World, buffer: Any) -> None:
    """To read into them would crash the process, or worse."""
    remote = world.remote[0 : memoryview(buffer).nbytes]
    references = sys.getrefcount(buffer)
    for call in (
        lambda: world.left.read(buffer, remote),
        lambda: world.left.write(buffer, remote),
        lambda: world.left.register("objects", buffer),
    ):
        with pytest.raises(BufferTypeError, match="references to Python objects"):
            call()
    assert sys.getrefcount(buffer) == references


@pytest.mark.parametrize(
    "buffer",
    [
        numpy.array([7], "M8[s]"), numpy.array([7], "e"), memoryview(numpy.zeros(1, [("Offset", "i4"), ("ORIGIN", "i4")])),
        numpy.zeros(1, [("O", "i8")]), array.array("d", [1.0]), (ctypes.c_char * 8)(), mmap.mmap(-1, 8),
        memoryview(bytearray(8)),
    ],
)  # fmt: skip
async def test_plain_data_of_any_kind(buffer: Any) -> None:
    view = buffer.view("uint8") if isinstance(buffer, numpy.ndarray) else memoryview(buffer).cast("B")
    async with engine_pair() as pair:
        region, remote = await pair.region("kv", len(view))
        memoryview(region)[:] = content = os.urandom(len(view))
        await pair.left.read(buffer, remote)
        assert bytes(view) == content
        await pair.left.write(pair.left.register("plain", buffer), remote)
        await pair.left.write(buffer, remote)


# -- whose memory


async def test_sides_that_are_not_regions(world: World) -> None:
    for wrong in (world.local, world.local[0:10], b"1234567890", None, 7, "kv"):
        with pytest.raises(InvalidArgumentError, match="remote must be"):
            world.left.write(b"1234567890", wrong)
    for wrong in (world.remote, world.remote[0:10]):
        with pytest.raises(InvalidArgumentError, match="local must be"):
            world.left.write(wrong, world.remote[0:10])


async def test_memory_of_another_engine(world: World) -> None:
    back = await world.pair.back.region(world.left.allocate("back", 100, access="read-write").name)
    with pytest.raises(InvalidArgumentError, match="another engine"):
        world.left.write(b"x" * 100, back)
    with pytest.raises(InvalidArgumentError, match="another engine"):
        world.left.submit(Batch("write", [(world.pair.right.allocate("r", 10), back[0:10])]))
    with pytest.raises(UsageError, match="another engine"):
        world.left.write(world.region, world.remote)
    with pytest.raises(UsageError, match="another engine"):
        world.left.submit(Batch("write", [(world.region, world.remote)]))


async def test_memory_of_two_peers_in_one_batch(world: World) -> None:
    async with Engine("127.0.0.1:0") as third:
        third.allocate("kv", 100, access="read-write")
        other = await (await world.left.connect(third.address)).region("kv")
        with pytest.raises(InvalidArgumentError, match="one peer"):
            Batch("write", [(world.local[0:10], world.remote[0:10]), (world.local[0:10], other[0:10])])
        with pytest.raises(InvalidArgumentError, match="another peer"):
            world.left.write(world.local[0:8], world.remote[0:8], signal=(other[0:8], 1))


async def test_dead_memory_and_dead_peers() -> None:
    async with engine_pair() as pair:
        region, remote = await pair.region("kv", 10)
        local = pair.left.allocate("local", 10)
        batch = Batch("write", [(local[0:10], remote[0:10])])
        await local.aclose()
        for call in (lambda: pair.left.write(local, remote), lambda: pair.left.submit(batch)):
            with pytest.raises(ClosedError, match="closed"):
                call()
        local = pair.left.allocate("local", 10)
        batch = Batch("write", [(local[0:10], remote[0:10])])
        await region.aclose()
        await until(lambda: not remote.alive)
        for call in (lambda: pair.left.write(local, remote), lambda: pair.left.submit(batch)):
            with pytest.raises(StaleRegionError, match="closed by its owner"):
                call()
        _, remote = await pair.region("kv", 10)
        batch = Batch("write", [(local[0:10], remote[0:10])])
        await pair.right.aclose()
        await until(lambda: not pair.left.peers)
        for call in (lambda: pair.left.write(local, remote), lambda: pair.left.submit(batch)):
            with pytest.raises(PeerDownError, match="'right'"):
                call()
        assert pair.left.stats().pinned == 0


# -- batches


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, 101)], [(1, 0, 100)], [(0, 1, 100)], [(100, 0, 1)], [(0, 0, 0)], [(0, 0, 1), (0, 0, 0)],
        [(HUGE, 0, 1)], [(0, HUGE, 1)], [(0, 0, HUGE)], [(HUGE, HUGE, HUGE)], [(50, 0, HUGE - 49)], [(0, 50, HUGE - 49)],
    ],
)  # fmt: skip
async def test_rows_outside_or_beyond_64_bits(world: World, rows: list[tuple[int, int, int]]) -> None:
    for table in (rows, numpy.array(rows, "uint64")):
        with pytest.raises(RangeError, match=r"descriptor \d+ .*empty or reaches outside") as caught:
            Batch("write", world.local, world.remote, table)
        assert caught.value.index == len(rows) - 1


async def test_rows_below_zero(world: World) -> None:
    with pytest.raises(RangeError, match="outside"):
        Batch("write", world.local, world.remote, numpy.array([[-1, 0, 1]]))
    with pytest.raises(InvalidArgumentError, match=r"0\.\.2\*\*64-1"):
        Batch("write", world.local, world.remote, [(-1, 0, 1)])


@pytest.mark.parametrize(
    "rows",
    [
        numpy.zeros((4, 2), "uint64"), numpy.zeros((4, 4), "uint64"), numpy.zeros(12, "uint64"), numpy.zeros((4, 3), "uint32"),
        numpy.zeros((4, 3), "float64"), numpy.zeros((4, 3, 1), "uint64"), numpy.zeros((0, 3), "uint64"),
        numpy.ones((3, 4), "uint64").T, numpy.ones((4, 3), ">u8"), [], [(1, 2)], [(1, 2, 3, 4)], [1, 2, 3], ["abc"], 7,
        [(1, 2, 1 << 64)], [(1.5, 2, 3)], [(None, 2, 3)], b"123",
    ],
)  # fmt: skip
async def test_rows_of_the_wrong_shape(world: World, rows: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="rows|descriptors"):
        Batch("write", world.local, world.remote, rows)


def released() -> memoryview:
    view = memoryview(bytearray(72))
    view.release()
    return view


def closed() -> mmap.mmap:
    memory = mmap.mmap(-1, 72)
    memory.close()
    return memory


@pytest.mark.parametrize(
    "table",
    [
        numpy.ones((4, 3), "M8[s]"), numpy.ones((4, 3), "m8[s]"), numpy.ones((4, 6), "M8[s]"), numpy.array([[1]], "M8[s]"),
        released(), closed(), numpy.array([[None] * 6]), numpy.ones((4, 6), "complex64"), numpy.array(7),
        [released()], [numpy.ones(6, "M8[s]")],
    ],
)  # fmt: skip
async def test_malformed_tables(world: World, table: Any) -> None:
    for make in (Batch, Batch.strided):
        with pytest.raises(InvalidArgumentError, match="rows must"):
            make("write", world.local, world.remote, table)
        with pytest.raises(InvalidArgumentError, match="rows must"):
            Batch("write", [(world.local, world.remote, table)])


@pytest.mark.parametrize("parts", [[], [()], [(1,)], [1], 7, None, "text", [(None, None)], [("a", "b", "c", "d")]])
async def test_malformed_parts(world: World, parts: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Batch("write", parts)


@pytest.mark.parametrize("verb", ["", "put", "WRITE", None, 1, []])
async def test_verbs(world: World, verb: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="verb must be 'read' or 'write'"):
        Batch(verb, world.local, world.remote, [(0, 0, 1)])


async def test_more_descriptors_than_the_driver_takes(world: World) -> None:
    limit = world.left.driver_limits()["shm"]["descriptors"]
    rows = numpy.tile(numpy.array([[0, 0, 1]], "uint64"), (limit + 1, 1))
    with pytest.raises(InvalidArgumentError, match=rf"{limit + 1} copies.*{limit} descriptors.*split"):
        Batch("write", world.local, world.remote, rows)


async def test_objects_that_are_not_batches(world: World) -> None:
    for wrong in (None, 7, [(world.local, world.remote)]):
        with pytest.raises((InvalidArgumentError, TypeError)):
            world.left.submit(wrong)  # type: ignore[arg-type]


async def test_rights_of_a_batch(world: World) -> None:
    world.pair.right.allocate("readable", 10, access="read")
    world.pair.right.allocate("writable", 10, access="write")
    readable, writable = await world.pair.peer.region("readable"), await world.pair.peer.region("writable")
    for verb, target in (("write", readable), ("read", writable)):
        with pytest.raises(AccessError, match=verb):
            Batch(verb, [(world.local[0:10], target[0:10])])
    with pytest.raises(AccessError, match="write"):
        world.left.read(world.local[0:8], readable[0:8], signal=(readable[0:8], 1))


# -- options of a transfer


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1", [], True and "soon"])
async def test_timeouts(world: World, timeout: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout"):
        world.left.write(world.local, world.remote, timeout=timeout)


@pytest.mark.parametrize("priority", ["", "urgent", 1, [], b"high"])
async def test_priorities(world: World, priority: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="priority must be 'low', 'normal' or 'high'"):
        world.left.write(world.local, world.remote, priority=priority)


async def test_signals(world: World) -> None:
    place = world.remote[8:16]
    for wrong in (
        7,
        (),
        (place,),
        (place, -1),
        (place, 1 << 64),
        (place, "x"),
        (place, 1.5),
        (None, 1),
        (world.local[8:16], 1),
    ):
        with pytest.raises(InvalidArgumentError, match="signal"):
            world.left.write(world.local[0:8], world.remote[0:8], signal=wrong)
    for wrong in (world.remote[0:4], world.remote[4:12], world.remote[0:16], world.remote[0:0]):
        with pytest.raises(InvalidArgumentError, match="8 aligned bytes"):
            world.left.write(world.local[0:8], world.remote[0:8], signal=(wrong, 1))


# -- regions


@pytest.mark.parametrize("name", ["", "x" * 257, "é" * 129, "line\nbreak", "\0", "\ud800", None, 7, b"kv"])
async def test_region_names(world: World, name: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="name must be"):
        world.left.allocate(name, 10)
    with pytest.raises(InvalidArgumentError, match="name must be"):
        world.left.register(name, bytearray(10))
    with pytest.raises(InvalidArgumentError, match="name must be"):
        await world.peer.region(name, timeout=5)  # no peer can have one of that name


@pytest.mark.parametrize("size", [*NO_NUMBERS, None, 1 << 62])
async def test_region_sizes(world: World, size: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="size"):
        world.left.allocate("new", size)


@pytest.mark.parametrize("nbytes", [*NO_NUMBERS[1:], None, 1 << 62])
async def test_room_for_what_is_no_number_of_bytes(world: World, nbytes: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="nbytes must be a .*, not "):
        await world.left.room(nbytes)


@pytest.mark.parametrize("limit", NO_NUMBERS)
async def test_limits_of_subscriptions(world: World, limit: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="limit must be a .*, not "):
        world.left.notifications("topic", limit=limit)


async def test_numbers_that_python_refuses_to_print(world: World) -> None:
    huge: Any = 1 << 20000
    left, local, remote, peer = world.left, world.local, world.remote, world.peer
    batch = Batch("write", local, remote)
    for call in (
        lambda: left.allocate("new", huge),
        lambda: left.notifications(limit=-huge),
        lambda: left.room(huge).send(None),
        lambda: Engine(max_bytes_in_flight=huge),
        lambda: Engine(huge),
        lambda: Engine(Address("127.0.0.1", huge)),
        lambda: Engine(name=huge),
        lambda: Engine(stall=huge),
        lambda: Engine(unix_dir=huge),
        lambda: Engine(secret=huge),
        lambda: Engine(drivers={huge: {}}),
        lambda: Engine(drivers={"shm": huge}),
        lambda: Engine(drivers=huge),
        lambda: left.serve(huge, print),
        lambda: left.serve("x", huge),
        lambda: left.unserve(huge),
        lambda: left.allocate(huge, 1),
        lambda: left.allocate("new", 1, access=huge),
        lambda: left.allocate("new", 1, grant=huge),
        lambda: left.register("new", huge),
        lambda: left.connect(huge).send(None),
        lambda: left.connect("127.0.0.1:1", timeout=huge).send(None),
        lambda: left.add_close_callback(huge),
        lambda: left.notify(huge, "x"),
        lambda: left.notify(peer, huge),
        lambda: left.notify(peer, "x", huge),
        lambda: left.notifications(huge),
        lambda: left.drained(huge),
        lambda: left.submit(huge),
        lambda: left.write(huge, remote),
        lambda: left.write(local, huge),
        lambda: left.write(local, remote, priority=huge),
        lambda: left.write(local, remote, timeout=huge),
        lambda: left.write(local, remote, timeout=[huge]),
        lambda: left.write(local, remote, signal=huge),
        lambda: left.write(local, remote, signal=(remote[0:8], huge)),
        lambda: left.write(local, remote, signal=(huge, 1)),
        lambda: left.write(local, remote, notify=huge),
        lambda: left.write(local, remote, notify=("x", huge)),
        lambda: local[huge],
        lambda: local[0:huge],
        lambda: local[-huge:],
        lambda: remote[0:8:huge],
        lambda: local.numpy(huge),
        lambda: local.numpy("uint8", (huge,)),
        lambda: Batch(huge, local, remote),
        lambda: Batch("write", huge),
        lambda: Batch("write", [huge]),
        lambda: Batch("write", local, remote, huge),
        lambda: Batch("write", local, remote, [huge]),
        lambda: Batch("write", local, remote, [(0, 0, huge)]),
        lambda: Batch.strided("write", local, remote, [(0, 0, 0, 0, 1, huge)]),
        lambda: Batch.strided("write", [(local, remote)]),
        lambda: batch.shifted(huge),
        lambda: batch.shifted([huge]),
        lambda: peer.limit_bandwidth(huge),
        lambda: peer.route(huge),
        lambda: peer.region(huge).send(None),
        lambda: peer.region("x", timeout=huge).send(None),
        lambda: peer.request(huge, {}).send(None),
        lambda: peer.request("x", huge).send(None),
        lambda: peer.request("x", {}, timeout=huge).send(None),
        lambda: peer.post("x", {"n": huge}),
        lambda: peer.post("x", {huge: 1}),
        lambda: peer.begin_heartbeats(huge),
        lambda: peer.end_heartbeats(huge),
        lambda: peer.add_lost_callback(huge),
        lambda: peer.add_signal_callback(huge),
    ):
        with pytest.raises(InvalidArgumentError):
            call()


def test_values_that_cannot_be_printed() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    with pytest.raises(InvalidArgumentError, match="stall must be a positive number of seconds, not a Odd that cannot"):
        Engine(stall=Odd())  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgumentError, match="size must be a number of bytes in .*, not an integer of 20001 bits"
    ):
        number_of("bytes", "size", 1 << 20000, 1, 62)


async def test_flags_are_no_numbers(world: World) -> None:
    batch = Batch("write", world.local, world.remote)
    transfer = world.left.write(b"L" * 100, world.remote)
    for call in (
        lambda: world.left.write(world.local, world.remote, timeout=True),
        lambda: world.left.write(world.local, world.remote, signal=(world.remote[0:8], True)),
        lambda: batch.shifted(True),
        lambda: batch.shifted(remote=False),
        lambda: transfer.at_least(True).send(None),
        lambda: world.peer.limit_bandwidth(True),
        lambda: Batch("write", world.local, world.remote, [(0, 0, 1), (0, 0, True)]),
        lambda: Batch("write", [(world.local, world.remote, [(False, 0, 1)])]),
        lambda: Batch.strided("write", world.local, world.remote, [(0, True, 0, 1, 1, 1)]),
        lambda: world.local[False:8],
        lambda: world.remote[0:True],
        lambda: world.remote[0:8:True],
        lambda: world.local[0:8][True:],
    ):
        with pytest.raises(InvalidArgumentError, match="(True|False)"):
            call()
    memoryview(world.region)[:] = b"R" * 100
    world.before = world.left.stats()


def test_other_rights_do_not_exist() -> None:
    for value in (4, 7, 8):
        with pytest.raises(ValueError, match="invalid value"):
            Access(value)


@pytest.mark.parametrize("access", ["", "rw", "all", 3, None, [], "READ"])
async def test_region_access(world: World, access: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="access must be one of 'none', 'read', 'write', 'read-write'"):
        world.left.allocate("new", 10, access=access)
    with pytest.raises(InvalidArgumentError, match="access must be"):
        world.left.register("new", bytearray(10), access=access)


async def test_a_name_twice(world: World) -> None:
    with pytest.raises(InvalidArgumentError, match=r"region 'local' exists already; close it first"):
        world.left.allocate("local", 10)
    with pytest.raises(InvalidArgumentError, match="exists already"):
        world.left.register("local", bytearray(10))
    assert world.left.regions == {"local": world.local}


async def test_grants(world: World) -> None:
    with pytest.raises(InvalidArgumentError, match="grant"):
        world.left.allocate("new", 10, grant="read")  # type: ignore[arg-type]


# -- messages


async def test_what_messages_say(world: World) -> None:
    """They name the argument, show the value, and are whole sentences."""
    left, local, remote = world.left, world.local, world.remote
    for call, message in (
        (lambda: left.notify(world.peer, 5), "topic must be a string and payload bytes, not 5 and b''"),
        (lambda: left.notify(world.peer, "topic", "text"), "topic must be .* bytes, not 'topic' and 'text'"),
        (lambda: left.write(local, remote, notify=5), "notify must be .*, not 5$"),
        (lambda: left.write(local, remote, signal=5), r"signal must be .* value in 0\.\.2\*\*64-1\), not 5$"),
        (
            lambda: left.write(local, remote, signal=(7, 5)),
            "signal's range must be 8 aligned bytes of a remote region, not 7$",
        ),
        (
            lambda: left.read(b"x" * 100, remote),
            "local bytes cannot be used: [^.;]*; it must be contiguous and writable",
        ),
        (lambda: Batch("write", local, remote, [(0, 0, 1), (0, 0, -1)]), r"rows must be .*, not \(0, 0, -1\)$"),
        (lambda: Batch("write", local, remote, 7), "rows must be .*, not 7$"),
        (lambda: Batch("write", local), "^remote is missing: a batch has two sides"),
        (lambda: Batch.strided("write", local[0:8]), "^remote is missing"),
        (lambda: local[5:2], r"^range \[5:2\] ends before it begins$"),
        (lambda: remote[5:2], r"^range \[5:2\] ends before it begins$"),
        (lambda: left.notify(world.peer, "\udc80"), r"^the topic '\\udc80' holds half a surrogate pair"),
        (lambda: left.notifications("\udc80"), r"^the topic '\\udc80' holds half a surrogate pair"),
        (lambda: Engine(secret=bytearray(32)), "^secret must be bytes or a string, not bytearray$"),  # type: ignore[arg-type]
        (lambda: Engine(secret=True), "^secret must be bytes or a string, not bool$"),  # type: ignore[arg-type]
        (lambda: Batch("write", [(1, 2, 3, 4)]), r"parts must be .*, not \(1, 2, 3, 4\)$"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            call()


# -- objects that only the package makes


@pytest.mark.parametrize(
    ("kind", "maker"),
    [
        (Region, r"engine\.allocate"), (RemoteRegion, r"peer\.region"), (Peer, r"engine\.connect"), (Group, r"engine\.group"),
        (Coalescer, r"engine\.coalesce"), (Subscription, r"engine\.notifications"), (SubscriptionQueue, r"engine\.accepted"),
        (kv.Blocks, r"pool\.reserve"), (kv.Reservation, r"pool\.reserve"), (kv.PushStream, r"pool\.open_stream"),
        (kv.LayerStream, r"blocks\.stream"),
    ],
)  # fmt: skip
def test_objects_without_their_parts(kind: Any, maker: str) -> None:
    """Nor is there a half-made one, whose finalizer would fail."""
    for make in (
        kind,
        lambda: kind(1),
        lambda: kind(None, None, None),
        lambda: kind(core=1),
        lambda: kind.__new__(kind),
        lambda: kind.__new__(kind, 1),
        lambda: kind.__new__(kind, *[None] * 20),
        lambda: type("Sub", (kind,), {}).__new__(kind, 1),
    ):
        with pytest.raises(TypeError, match=f"^{kind.__name__} objects are made by .*{maker}"):
            make()


def test_an_engine_without_its_settings_can_be_shown() -> None:
    assert repr(Engine.__new__(Engine)) == "<Engine, not initialised>"


# -- settings


@pytest.mark.parametrize(
    "settings",
    [
        {"address": "nowhere"}, {"address": 7}, {"address": "127.0.0.1:70000"}, {"address": b"127.0.0.1:1"},
        {"name": ""}, {"name": "x" * 129}, {"name": 7}, {"name": "line\nbreak"},
        {"domain": ""}, {"domain": None}, {"domain": "\x1b[31m"},
        {"secret": "short"}, {"secret": b""}, {"secret": 12345678}, {"secret": ["12345678"]},
        {"drivers": []}, {"drivers": {}}, {"drivers": "shm"}, {"drivers": [7]}, {"drivers": [[]]}, {"drivers": {"shm": None}},
        {"drivers": {7: {}}}, {"drivers": {"shm": ["threads"]}}, {"drivers": 5}, {"drivers": 0}, {"drivers": 1.5},
        {"drivers": True}, {"drivers": ...}, {"drivers": b"shm"}, {"drivers": int},
        {"unix_dir": 7}, {"unix_dir": "/tmp/\0"}, {"unix_dir": "/tmp/\ud800"},
        {"secret": "half a pair: \ud800"}, {"address": Address("127.0.0.1", 70000)}, {"address": Address("127.0.0.1", True)},
        {"stall": 0}, {"stall": -1}, {"stall": float("nan")}, {"stall": "10"}, {"stall": None},
        {"connect_timeout": 0}, {"close_timeout": float("inf")},
        *({name: wrong} for name in ("notification_limit", "notify_batch_size", "max_bytes_in_flight") for wrong in NO_NUMBERS),
    ],
    ids=repr,
)  # fmt: skip
def test_settings(settings: dict[str, Any]) -> None:
    name = next(iter(settings))
    with pytest.raises(InvalidArgumentError, match=name) as caught:
        Engine(**settings)
    assert "half a pair" not in str(caught.value), "a secret is not shown"
    with pytest.raises(HixlError):
        EngineConfig.build(**{"address": None, **settings})


def test_unknown_settings() -> None:
    with pytest.raises(TypeError, match="colour"):
        Engine(colour="red")  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match="colour"):
        EngineConfig.build(None, colour="red")


def test_settings_that_are_shown_to_people_hide_the_secret() -> None:
    config = EngineConfig.build("127.0.0.1:0", secret="do not show this")
    assert "do not show this" not in repr(config)
    assert config.address == Address("127.0.0.1", 0)


def test_drivers_cannot_be_changed_afterwards() -> None:
    inner: dict[str, Any] = {"threads": 2, "deep": {"list": [1, {"x": 2}]}}
    given = {"shm": inner}
    engine = Engine(drivers=given)
    config = engine.config
    assert config.drivers == {"shm": {"threads": 2, "deep": {"list": (1, {"x": 2})}}}
    inner["threads"] = 3
    inner["deep"]["list"][1]["x"] = 3
    given["faulty"] = {}
    drivers: Any = config.drivers
    for frozen, key in ((drivers, "shm"), (drivers["shm"], "threads"), (drivers["shm"]["deep"]["list"][1], "x")):
        with pytest.raises(TypeError, match="does not support item assignment"):
            frozen[key] = 1
        with pytest.raises(TypeError, match="does not support item deletion"):
            del frozen[key]
    assert config.drivers == {"shm": {"threads": 2, "deep": {"list": (1, {"x": 2})}}}
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert repr(config.drivers) == "{'shm': {'threads': 2, 'deep': {'list': (1, {'x': 2})}}}"
    inner["deep"]["list"].append(inner)
    with pytest.raises(InvalidArgumentError, match="drivers holds a mapping or list that contains itself"):
        Engine(drivers=given)


def test_the_default_drivers_cannot_be_changed() -> None:
    config: Any = EngineConfig(address=None, name="x")
    with pytest.raises(TypeError):
        config.drivers["shm"]["threads"] = 1


def test_drivers_in_any_iterable() -> None:
    for names in (("shm",), {"shm"}, iter(["shm"]), {"shm": 1}.keys()):
        assert EngineConfig.build(None, drivers=names).drivers == {"shm": {}}  # type: ignore[arg-type]


@pytest.mark.parametrize("drivers", [5, None, ["shm"], "shm"])
def test_drivers_of_a_config_that_are_not_a_mapping(drivers: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="drivers"):
        EngineConfig(address=None, name="engine", drivers=drivers)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"threads": "many"}, "threads"), ({"colour": "red"}, "no option colour; there are threads, inline_bytes, .*, nowait$"),
         ({"ring_bytes": 5000}, "ring_bytes"), ({"threads": True}, "threads=true is not a whole number"),
        ({"inline_bytes": False}, "inline_bytes=false is not a whole number"), ({"nowait": "yes"}, "nowait=yes is not"),
        ({"threads": 1 << 20000}, "'threads' must be text, .*, not an integer of 20001 bits"),
        ({"threads": [1 << 20000]}, "'threads' must be text, .*, not a tuple that cannot be printed"),
        ({"wrapper": 1 << 20000}, "option 'wrapper' must be the name of a driver, not an integer of 20001 bits"),
        ({str(i): 1 for i in range(65)}, "64 options"),
        ({"threads": None}, "'threads' must be text, a number, a path, or a mapping or list of these, not None"),
        ({"threads": b"2"}, "'threads'"), ({"threads": 2j}, "'threads'"), ({"threads": "2\0"}, "'threads'"),
        ({"threads": {1: object()}}, "'threads'"), ({"threads": [float("nan")]}, "'threads'"),
        ({"threads": "\ud800"}, "'threads'"), ({None: 2}, "option 'name' must be text"), ({"threads": [b"2"]}, "'threads'"),
    ],
)  # fmt: skip
async def test_driver_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'shm'.*{text}"):
        await Engine(drivers={"shm": options}).open()


@pytest.mark.parametrize("flag", [True, False, 1, 0, "1", "0", "true", "false"])
async def test_flags_of_drivers(flag: Any) -> None:
    async with Engine(drivers={"shm": {"nowait": flag}}):
        pass


async def test_messages_stay_readable_whatever_is_passed(world: World) -> None:
    for mistake in ("x" * 10**5, list(range(10**5)), "ä" * 10**5):
        with pytest.raises(InvalidArgumentError, match="timeout must be a positive number") as caught:
            world.left.write(world.local, world.remote, timeout=mistake)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 5000
        with pytest.raises(InvalidArgumentError, match="name must be") as caught:
            world.left.allocate(mistake, 8)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 5000
