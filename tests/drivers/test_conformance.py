"""Requirements of every driver, in one process: two instances, the two ends of a link.

T1..T6 are the threading rules at the top of hxa_driver.h; vtable.py checks T4 in every test.
"""

from __future__ import annotations

import ctypes as c
import os
import random
import select
import sys
import threading
import time

import pytest
import vtable as vt
from conftest import World
from vtable import MAY_READ, MAY_WRITE, READ, WRITE, DriverError

SIZES = [
    1,
    2,
    7,
    8,
    63,
    64,
    4095,
    4096,
    4097,
    65536,
    (1 << 20) + 13,
    (1280 << 10) - 64,
    1280 << 10,
    (1280 << 10) + 1,
    5_000_003,
]
alloc = pytest.mark.needs("ALLOC")


def fill_ring(link: vt.Link, size: int = 1000) -> list[vt.Op]:
    """Send numbered notifications until no more is taken."""
    ops: list[vt.Op] = []
    while (op := vt.unless_busy(link.note, b"n", b"%06d" % len(ops) + bytes(size))) is not None:
        ops.append(op)
        if len(ops) == 100_000:
            pytest.skip("the driver takes any number of notifications")
    return ops


def refused(status: int | tuple[int, ...], call, *args, **kwargs) -> DriverError:
    with pytest.raises(DriverError) as caught:
        call(*args, **kwargs)
    assert caught.value.status in (status if isinstance(status, tuple) else (status,)), str(caught.value)
    return caught.value


# ---- life ------------------------------------------------------------------------------------------------------------


def test_open_close(open_instance) -> None:
    for _ in range(10):
        instance = open_instance()
        stats = instance.stats()
        assert all(getattr(stats, name) == 0 for name, _ in stats._fields_)
        instance.close()


def test_many_links_and_memories_leave_nothing(open_instance) -> None:
    a, b = open_instance(), open_instance()
    links = [vt.join(a, b) for _ in range(20)]
    memories = [b.alloc(4096 * (i + 1)) for i in range(20)] if vt.has(open_instance.driver, "ALLOC") else []
    for (left, _), memory in zip(links, memories, strict=False):
        left.imported(memory)
    assert a.stats().links == 20
    assert b.stats().memories == len(memories)


# ---- memory ----------------------------------------------------------------------------------------------------------


@alloc
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 1 << 20, 33 << 20])
def test_alloc(open_instance, size: int) -> None:
    memory = open_instance().alloc(size)
    assert memory.address % 64 == 0
    assert memory.view[0] == memory.view[size // 2] == memory.view[size - 1] == 0
    vt.fill(memory.view)
    memory.view[size - 1] = 7
    assert memory.view[size - 1] == 7


@alloc
def test_alloc_refusals(open_instance) -> None:
    instance = open_instance()
    refused(vt.INVALID, instance.alloc, 0)
    refused(vt.INVALID, instance.alloc, 4096, 4)
    refused(vt.NOMEM, instance.alloc, 1 << 62)
    refused(vt.NOMEM, instance.alloc, (1 << 64) - 1)
    assert instance.stats().memories == 0


@pytest.mark.needs("REGISTER")
def test_register_refusals(open_instance) -> None:
    instance = open_instance()
    buffer = (c.c_uint8 * 64)()
    refused(vt.INVALID, instance.register, buffer, 8)
    refused(vt.INVALID, instance.register, (c.c_uint8 * 0)())
    handle = c.c_void_p()
    assert instance.vt.mem_register(instance.handle, None, 8, vt.HOST, 3, c.byref(handle)) == -vt.INVALID
    assert instance.vt.mem_register(instance.handle, (1 << 64) - 8, 4096, vt.HOST, 3, c.byref(handle)) == -vt.INVALID
    assert instance.stats().memories == 0


@alloc
@pytest.mark.parametrize("allowed", [0, MAY_READ, MAY_WRITE, MAY_READ | MAY_WRITE])
@pytest.mark.parametrize("granted", [MAY_READ, MAY_WRITE, MAY_READ | MAY_WRITE])
@pytest.mark.parametrize("wanted", [MAY_READ, MAY_WRITE, MAY_READ | MAY_WRITE])
def test_rights(pair, allowed: int, granted: int, wanted: int) -> None:
    left, right = pair
    memory = right.instance.alloc(8192, allowed)
    vt.fill(memory.view)
    if granted & ~allowed:
        refused(vt.RIGHTS, memory.export, granted)
        return
    if wanted & ~granted:
        refused(vt.RIGHTS, left.load, memory.export(granted), 8192, wanted)
        return
    remote = left.load(memory.export(granted), 8192, wanted)
    remote.op.ok(left)
    here = left.instance.alloc(8192)
    for verb, right_needed in ((READ, MAY_READ), (WRITE, MAY_WRITE)):
        before = here.view.tobytes(), memory.view.tobytes()
        if wanted & right_needed:
            left.submit(verb, [(here, 0, remote, 0, 4096)]).ok(left, right)
            assert here.view[:4096] == memory.view[:4096]
        else:
            refused(vt.RIGHTS, left.submit, verb, [(here, 0, remote, 0, 4096)])
            assert before == (here.view.tobytes(), memory.view.tobytes())


@alloc
def test_export_refusals(pair) -> None:
    left, right = pair
    memory = right.instance.alloc(4096)
    refused(vt.INVALID, memory.export, 0)
    refused((vt.INVALID, vt.RIGHTS), memory.export, 7)
    remote = left.imported(memory)
    refused(vt.INVALID, remote.export, MAY_READ)


@alloc
def test_import_refusals(pair) -> None:
    left, right = pair
    memory = right.instance.alloc(8192)
    refused((vt.PROTOCOL, vt.RANGE), left.load, memory.export(MAY_READ), 8193, MAY_READ)
    refused((vt.PROTOCOL, vt.RANGE), left.load, memory.export(MAY_READ), 1 << 40, MAY_READ)
    refused((vt.INVALID, vt.PROTOCOL), left.load, memory.export(MAY_READ), 0, MAY_READ)
    refused(vt.INVALID, left.load, memory.export(MAY_READ), 8192, 0)
    metadata = memory.export(MAY_READ)
    metadata.len -= 1
    refused(vt.PROTOCOL, left.load, metadata, 8192, MAY_READ)
    metadata = memory.export(MAY_READ)
    c.memset(metadata.data, 0xA5, metadata.len)
    refused((vt.PROTOCOL, vt.RIGHTS), left.load, metadata, 8192, MAY_READ)
    refused(vt.PROTOCOL, left.load, vt.CMetadata(len=0), 8192, MAY_READ)
    assert left.instance.stats().memories == 0
    left.imported(memory)  # and it goes on working


@alloc
def test_import_needs_a_link_that_is_up(open_instance) -> None:
    a, b = open_instance(), open_instance()
    memory = b.alloc(4096)
    fresh = a.link()
    refused(vt.LINK, fresh.load, memory.export(MAY_READ), 4096, MAY_READ)
    left, _ = vt.join(a, b)
    left.stop().wait()
    refused(vt.LINK, left.load, memory.export(MAY_READ), 4096, MAY_READ)


@alloc
def test_memory_of_one_link_is_unknown_on_another(open_instance) -> None:
    a, b = open_instance(), open_instance()
    first, _ = vt.join(a, b)
    second, _ = vt.join(a, b)
    here, remote = a.alloc(4096), first.imported(b.alloc(4096))
    refused(vt.INVALID, second.submit, WRITE, [(here, 0, remote, 0, 8)])


# ---- links -----------------------------------------------------------------------------------------------------------


def test_metadata_is_small_and_has_the_descriptors_it_claims(open_instance) -> None:
    link = open_instance().link()
    assert 0 < link.metadata.len <= vt.METADATA_BYTES
    assert link.metadata.nfds <= vt.METADATA_FDS
    assert vt.has(open_instance.driver, "FDS") or link.metadata.nfds == 0


@pytest.mark.needs("SAME_HOST")
def test_link_metadata_begins_with_the_pid(open_instance) -> None:
    link = open_instance().link()
    assert int.from_bytes(bytes(link.metadata.data[:4]), sys.byteorder) == os.getpid()


def test_connect_refuses_garbage(open_instance) -> None:
    a, b = open_instance(), open_instance()
    for spoil in ("empty", "short", "magic"):
        left, right = a.link(1 + len(a.links)), b.link(50 + len(b.links))
        metadata = right.metadata
        if spoil == "short":
            metadata.len -= 1
        elif spoil == "magic":
            c.memset(metadata.data, 0x5A, metadata.len)
        else:
            metadata = vt.CMetadata()
        refused(vt.PROTOCOL, left.connect, metadata)
        if vt.has(open_instance.driver, "NOTIFY"):
            refused(vt.LINK, left.note, b"t")


def test_free_without_connect(open_instance) -> None:
    instance = open_instance()
    link = instance.link()
    link.stop().wait()
    link.free()
    assert instance.stats().links == 0


# ---- transfers -------------------------------------------------------------------------------------------------------


@alloc
@pytest.mark.parametrize("size", SIZES)
def test_write_then_read(pair, size: int) -> None:
    world = World(*pair, size=size + 64)
    world.write(5, 11, size).ok(*pair)
    assert world.there.view[11 : 11 + size] == world.here.view[5 : 5 + size]
    assert not any(world.there.view[:11]), "bytes before the range changed"
    assert not any(world.there.view[11 + size :]), "bytes after the range changed"
    vt.fill(world.there.view, 9)
    before = world.here.view.tobytes()
    world.read(7, 3, size).ok(*pair)
    assert world.here.view[7 : 7 + size] == world.there.view[3 : 3 + size]
    assert world.here.view[:7] == before[:7]
    assert world.here.view[7 + size :] == before[7 + size :]


@alloc
def test_64_mib(large: World) -> None:
    op = large.write(0, 0, 64 << 20)
    assert op.answer == vt.PENDING
    op.ok(large.left, large.right)
    assert op.bytes == 64 << 20
    assert large.left.progress(op) == 64 << 20
    assert large.there.view == large.here.view


@pytest.mark.needs("ALLOC", "LOCAL_ANY")
@pytest.mark.parametrize("size", [1, 5000, 2 << 20])
def test_any_local_buffer(pair, size: int) -> None:
    world = World(*pair, size=size)
    buffer = (c.c_uint8 * size)()
    vt.fill(memoryview(buffer).cast("B"), 5)
    world.left.submit(WRITE, [(None, c.addressof(buffer), world.remote, 0, size)]).ok(*pair)
    assert world.there.view == memoryview(buffer).cast("B")
    vt.fill(world.there.view, 6)
    world.left.submit(READ, [(None, c.addressof(buffer), world.remote, 0, size)]).ok(*pair)
    assert world.there.view == memoryview(buffer).cast("B")


@pytest.mark.needs("ALLOC", "REGISTER")
def test_registered_local_buffer(pair) -> None:
    world = World(*pair)
    buffer = (c.c_uint8 * 4096)()
    vt.fill(memoryview(buffer).cast("B"), 5)
    local = pair[0].instance.register(buffer, 0)
    pair[0].submit(WRITE, [(local, 96, world.remote, 0, 4000)]).ok(*pair)
    assert world.there.view[:4000] == memoryview(buffer).cast("B")[96:]
    refused(vt.RANGE, pair[0].submit, WRITE, [(local, 97, world.remote, 0, 4000)])


@alloc
@pytest.mark.parametrize("n", [1, 2, 255, 256, 1000, 10_000])
@pytest.mark.parametrize("length", [1, 100])
@pytest.mark.parametrize("verb", [READ, WRITE])
def test_lists(world: World, n: int, length: int, verb: int) -> None:
    limit = world.left.instance.limits().descriptors
    if n > limit:
        pytest.skip(f"the driver takes {limit} descriptors")
    world.make(n * (length + 3))
    vt.fill(world.there.view, 8)
    order = list(range(n))
    random.Random(n).shuffle(order)
    rows = [(world.here, i * (length + 3), world.remote, order[i] * (length + 3), length) for i in range(n)]
    source, target = (world.there, world.here) if verb == READ else (world.here, world.there)
    model, data = bytearray(target.view), source.view.tobytes()
    for _, loff, _, roff, _ in rows:
        start, end = (roff, loff) if verb == READ else (loff, roff)
        model[end : end + length] = data[start : start + length]
    world.left.submit(verb, rows).ok(world.left, world.right)
    assert target.view == model


@alloc
def test_lists_of_mixed_sizes_cut_into_chunks(world: World) -> None:
    """Large and tiny descriptors in one batch, so that chunks both split and gather."""
    lengths = [3 << 20, 1, 1, (1 << 20) - 1, 1 << 20, 5, 2_500_000, 17]
    world.make(sum(lengths) + len(lengths))
    rows, at = [], 0
    model = bytearray(world.size)
    for i, length in enumerate(lengths):
        rows.append((world.here, at, world.remote, at + i, length))
        model[at + i : at + i + length] = world.here.view[at : at + length]
        at += length
    op = world.left.submit(WRITE, rows).ok(world.left, world.right)
    assert op.bytes == at
    assert world.there.view == model


@alloc
def test_many_in_flight(world: World) -> None:
    world.make(16 << 20)
    ops = [world.write(i << 19, i << 19, 1 << 19, priority=i % 3 - 1) for i in range(32)]
    for op in ops:
        op.ok(world.left, world.right)
    assert world.there.view == world.here.view


@alloc
def test_bounds(world: World) -> None:
    size, here, remote = world.size, world.here, world.remote
    top = (1 << 64) - 1
    before = world.there.view.tobytes(), here.view.tobytes()
    for loff, roff, length in [
        (0, 0, size + 1), (1, 0, size), (0, 1, size), (size, 0, 1), (0, size, 1), (0, size - 7, 8), (top, 0, 1),
        (0, top, 1),
        (0, top - 7, 8), (top - 7, 0, 8), (0, 8, top), (8, 0, top - 4), (0, 1 << 63, 1 << 63),
    ]:  # fmt: skip
        for verb in (READ, WRITE):
            refused((vt.RANGE, vt.INVALID), world.left.submit, verb, [(here, loff, remote, roff, length)])
            refused(
                (vt.RANGE, vt.INVALID),
                world.left.submit,
                verb,
                [(here, 0, remote, 0, 64), (here, loff, remote, roff, length)],
            )
    refused((vt.RANGE, vt.INVALID), world.left.submit, WRITE, [(here, 0, remote, 0, 0)])
    refused(vt.INVALID, world.left.submit, 2, [(here, 0, remote, 0, 8)])
    refused(vt.INVALID, world.left.submit, WRITE, [])
    refused(vt.INVALID, world.left.submit, WRITE, [(here, 0, here, 0, 8)])
    refused(vt.INVALID, world.left.submit, WRITE, [(world.there, 0, remote, 0, 8)])
    assert before == (world.there.view.tobytes(), here.view.tobytes()), "a refused batch moved bytes"
    world.write(0, size - 8, 8).ok(world.left, world.right)


@alloc
def test_too_many_descriptors(world: World) -> None:
    limit = world.left.instance.limits().descriptors
    if limit > 1 << 17:
        pytest.skip("no limit worth testing")
    refused((vt.INVALID, vt.RANGE), world.left.submit, WRITE, [(world.here, 0, world.remote, 0, 1)] * (limit + 1))
    world.left.submit(WRITE, [(world.here, i, world.remote, i, 1) for i in range(limit)]).ok(world.left, world.right)


@alloc
def test_stats_count(world: World) -> None:
    world.make(2 << 20)
    world.write(0, 0, 4096).ok(world.left, world.right)
    world.write(0, 0, 2 << 20).ok(world.left, world.right)
    world.read(0, 0, 100).ok(world.left, world.right)
    stats = world.left.instance.stats()
    assert stats.bytes_written == 4096 + (2 << 20)
    assert stats.bytes_read == 100
    assert stats.ops_inline + stats.ops_queued >= 3
    assert stats.links == 1


# ---- notifications ---------------------------------------------------------------------------------------------------


@pytest.mark.needs("NOTIFY")
def test_notes_arrive_in_order(pair) -> None:
    left, right = pair
    sent = [(b"topic-%d" % (i % 3), bytes([i & 255]) * (i % 50)) for i in range(300)]
    for topic, text in sent:
        left.note(topic, text).ok(left, right)
    right.instance.until(lambda: len(right.notes()) == len(sent), right)
    assert right.notes() == sent
    assert left.notes() == []
    assert all(event.link == right.cookie for event in right.instance.events)


@pytest.mark.needs("NOTIFY")
def test_notes_both_ways_at_once(pair) -> None:
    left, right = pair
    for i in range(200):
        left.note(b"l", b"%d" % i).ok(left, right)
        right.note(b"r", b"%d" % i).ok(left, right)
    left.instance.until(lambda: len(left.notes()) == len(right.notes()) == 200, left, right)
    assert right.notes() == [(b"l", b"%d" % i) for i in range(200)]
    assert left.notes() == [(b"r", b"%d" % i) for i in range(200)]


@pytest.mark.needs("NOTIFY")
def test_note_sizes(pair) -> None:
    left, right = pair
    most = left.instance.limits().note_bytes
    sent = [
        (b"", b""),
        (b"t", b""),
        (b"", b"n"),
        (b"t" * 15, b"n"),
        (b"t", b"\0" * 16),
        (b"t" * 100, bytes(most - 100)),
        (b"x" * most, b""),
    ]
    for topic, text in sent:
        left.note(topic, text).ok(left, right)
    right.instance.until(lambda: len(right.notes()) == len(sent), right)
    assert right.notes() == sent
    refused(vt.RANGE, left.note, b"t", bytes(most))
    refused(vt.RANGE, left.note, b"x" * (most + 1))


@pytest.mark.needs("NOTIFY")
def test_poll_budget(pair) -> None:
    left, right = pair
    for i in range(20):
        left.note(b"t", b"%d" % i).ok(left)
    seen, polls = 0, 0
    while seen < 20:
        more = right.poll(3)
        polls += 1
        assert len(right.notes()) - seen <= 3
        seen = len(right.notes())
        assert more or seen == 20 or not vt.has(right.vt, "SAME_HOST")
        assert polls < 1000
    right.instance.until(lambda: not right.more, right)


@pytest.mark.needs("NOTIFY")
def test_wakes_only_sleepers(pair) -> None:
    """The receiver's descriptor is readable when there is something to take, and not once all is taken."""
    left, right = pair
    if right.fd < 0:
        pytest.skip("the driver polls without a descriptor")
    for _ in range(3):
        right.instance.until(
            lambda: not (right.poll() or select.select([right.fd], [], [], 0)[0]), what="still readable"
        )
        left.note(b"t").ok(left)
        assert select.select([right.fd], [], [], vt.DEADLINE)[0], "no wake-up"


@pytest.mark.needs("NOTIFY")
@pytest.mark.parametrize("size", [0, 1, 1000, 16000])
def test_full_ring_loses_and_reorders_nothing(pair, size: int) -> None:
    """The receiver does not read: notifications wait, then submits are refused; nothing is lost when it reads again."""
    left, right = pair
    ops = fill_ring(left, size)
    n = len(ops)
    # Newest first, because some drivers go on sending meanwhile.
    pending = [op for op in reversed(ops) if not op.released][::-1]
    assert pending
    assert pending == ops[-len(pending) :], "a later notification was finished before an earlier one"
    refused(vt.BUSY, left.note, b"n", b"again")
    right.instance.until(lambda: len(right.notes()) == n, left, right)
    assert [text[:6] for _, text in right.notes()] == [b"%06d" % i for i in range(n)]
    for op in ops:
        op.ok(left, right)
    left.note(b"n", b"more").ok(left, right)
    right.instance.until(lambda: len(right.notes()) == n + 1, left, right)
    assert left.instance.stats().notes_sent == n + 1
    assert right.instance.stats().notes_received == n + 1


@pytest.mark.needs("NOTIFY", "ALLOC")
def test_work_refused_for_back_pressure_moves_nothing(world: World) -> None:
    left = world.left
    fill_ring(left)
    refused(vt.BUSY, world.write, 0, 0, 4096, note=(b"t", b""))
    assert not any(world.there.view[:4096])
    world.write(0, 0, 4096).ok(left, world.right)  # without a notification nothing is in the way
    assert world.there.view[:4096] == world.here.view[:4096]


@pytest.mark.needs("NOTIFY", "ALLOC")
@pytest.mark.parametrize("size", [64, 3 << 20])
def test_note_after_data(world: World, size: int) -> None:
    world.make(3 << 20)
    world.write(0, 0, size, note=(b"topic", b"payload")).ok(world.left, world.right)
    world.right.instance.until(lambda: world.right.notes(), world.left, world.right)
    assert world.right.notes() == [(b"topic", b"payload")]
    assert world.there.view[:size] == world.here.view[:size]


@pytest.mark.needs("NOTIFY", "ALLOC")
def test_notes_of_large_and_small_batches_are_all_delivered(world: World) -> None:
    """Copy threads and the loop append to one ring at the same time."""
    world.make(60 * 600_000)
    ops = []
    for i in range(60):
        size = 600_000 if i % 3 == 0 else 16
        ops.append(world.write(i * 600_000, i * 600_000, size, note=(b"n", b"%d" % i)))
    for op in ops:
        op.ok(world.left, world.right)
    world.right.instance.until(lambda: len(world.right.notes()) == 60, world.left, world.right)
    assert sorted(int(text) for _, text in world.right.notes()) == list(range(60))


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.needs("SIGNAL", "ALLOC")
@pytest.mark.parametrize("size", [0, 64, 3 << 20])
def test_signal(world: World, size: int) -> None:
    world.make(4 << 20)
    rows = [(world.here, 0, world.remote, 4096, size)] if size else []
    world.left.submit(WRITE, rows, signal=(world.remote, 8, 0x1122334455667788)).ok(world.left, world.right)
    assert int.from_bytes(world.there.view[8:16], "little") == 0x1122334455667788
    assert world.there.view[4096 : 4096 + size] == world.here.view[:size]
    assert not any(world.there.view[:8])
    assert not any(world.there.view[16:4096])
    world.right.instance.until(world.right.signals, world.left, world.right)


@pytest.mark.needs("SIGNAL", "ALLOC")
def test_signal_refusals(world: World) -> None:
    size, left = world.size, world.left
    refused((vt.INVALID, vt.RANGE), left.submit, signal=(world.remote, 4, 1))
    for offset in (size, size - 7, size + 8, (1 << 64) - 8):
        refused((vt.INVALID, vt.RANGE), left.submit, signal=(world.remote, offset, 1))
    refused(vt.INVALID, left.submit, signal=(world.here, 0, 1))
    readable = left.load(world.there.export(MAY_READ), size, MAY_READ)
    readable.op.ok(left)
    refused(vt.RIGHTS, left.submit, signal=(readable, 0, 1))
    odd = left.imported(world.right.instance.alloc(20))
    refused((vt.INVALID, vt.RANGE), left.submit, signal=(odd, 16, 1))
    assert not any(world.there.view)
    left.submit(signal=(world.remote, size - 8, 1)).ok(left, world.right)


@pytest.mark.needs("SIGNAL", "ALLOC")
@pytest.mark.parametrize("size", [4096, 2 << 20])
def test_order_of_data_and_signal(world: World, size: int) -> None:
    """T5, seen by a reader that spins on the signal word while the data arrives."""
    world.make(size + 64)
    word = c.c_uint64.from_address(world.there.address)
    torn, done = [], threading.Event()

    def read() -> None:
        last = 0
        while not done.is_set():
            value = word.value
            if value != last:
                last = value
                first, final = world.there.view[64], world.there.view[63 + size]
                # Data of later rounds may already be here, of earlier ones not.
                if (first - value) & 255 > 128 or (final - value) & 255 > 128:
                    torn.append((value, first, final))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for i in range(1, 60):
            world.here.view[0], world.here.view[size - 1] = i, i
            world.left.submit(WRITE, [(world.here, 0, world.remote, 64, size)], signal=(world.remote, 0, i)).ok(
                world.left, world.right
            )
    finally:
        done.set()
        reader.join()
    assert not torn


@pytest.mark.needs("SIGNAL", "NOTIFY", "ALLOC")
@pytest.mark.parametrize("size", [64, 2 << 20])
def test_order_of_data_signal_and_note(open_instance, size: int) -> None:
    """T5 at delivery: when the notification is delivered, data and signal are there, and SIGNAL came first."""
    left, right = open_instance.pair()
    world = World(left, right, size + 64)
    word, wrong = c.c_uint64.from_address(world.there.address), []

    def look(event: vt.Event) -> None:
        if event.kind == vt.NOTE:
            i = int(event.data)
            if word.value < i or world.there.view[63 + size] < i or not right.signals():
                wrong.append((i, word.value, world.there.view[63 + size]))

    right.instance.on_event = look
    for i in range(1, 100):
        world.here.view[size - 1] = i
        world.left.submit(
            WRITE, [(world.here, 0, world.remote, 64, size)], signal=(world.remote, 0, i), note=(b"n", b"%d" % i)
        ).ok(left, right)  # fmt: skip
    right.instance.until(lambda: len(right.notes()) == 99, left, right)
    assert not wrong


# ---- cancel ----------------------------------------------------------------------------------------------------------


@pytest.mark.needs("CANCEL", "ALLOC")
def test_cancel_in_flight(large: World) -> None:
    op = large.write(0, 0, 64 << 20)
    large.left.instance.until(lambda: large.left.progress(op) > 0, what="no progress")
    early = large.left.cancel(op)
    status = op.wait(large.left, large.right)
    assert (status == vt.CANCELLED) == bool(early)
    if early:
        assert op.bytes < 64 << 20
    landed = large.there.view.tobytes()
    large.write(0, 0, 1).ok(large.left, large.right)
    assert large.there.view[1:] == landed[1:], "bytes moved after the release"


@pytest.mark.needs("CANCEL", "ALLOC")
def test_cancel_queued(large: World) -> None:
    first = large.write(0, 0, 64 << 20)
    queued = [large.write(0, 0, 2 << 20, note=(b"n", b"%d" % i)) for i in range(50)]
    early = [large.left.cancel(op) for op in queued]
    for op, stopped in zip(queued, early, strict=True):
        status = op.wait(large.left, large.right)
        assert (status == vt.CANCELLED) == bool(stopped)
    assert first.ok(large.left, large.right).bytes == 64 << 20
    # T5: in the order in which they finished; a driver that asks about several in turn may see that of a later one first.
    late = {op: b"%d" % i for i, (op, stopped) in enumerate(zip(queued, early, strict=True)) if not stopped}
    expected = [late[op] for op in large.left.instance.finished if op in late]
    assert len(expected) == len(late)
    large.right.instance.until(lambda: len(large.right.notes()) >= len(expected), large.right)
    assert [text for _, text in large.right.notes()] == expected, (
        "a cancelled batch sent its notification, or a late one did not"
    )


@pytest.mark.needs("CANCEL", "ALLOC", "SIGNAL", "NOTIFY")
def test_cancel_at_every_stage(open_instance) -> None:
    """At any moment cancel either stops both signal and notification, or comes too late for both."""
    left, right = open_instance.pair()
    world = World(left, right, 4 << 20)
    chance = random.Random(5)
    expected = []
    for i in range(1, 150):
        op = left.submit(
            WRITE,
            [(world.here, 0, world.remote, 8192, 2 << 20)],
            signal=(world.remote, 8 * i, i),
            note=(b"n", b"%d" % i),
        )
        patience = time.perf_counter() + chance.random() * 0.0006
        while time.perf_counter() < patience:
            pass
        early = left.cancel(op) if not op.released else 0
        status = op.wait(left, right)
        assert (status == vt.CANCELLED) == bool(early), f"cancel answered {early}, status {vt.STATUS[status]}"
        word = int.from_bytes(world.there.view[8 * i : 8 * i + 8], "little")
        assert word == (0 if early else i)
        if not early:
            expected.append(b"%d" % i)
    right.instance.until(lambda: len(right.notes()) >= len(expected), left, right)
    assert [text for _, text in right.notes()] == expected


@pytest.mark.needs("CANCEL", "NOTIFY")
def test_cancel_a_note_that_waits_for_room(pair) -> None:
    left, right = pair
    waiting, n = [], 0
    while len(waiting) < 20 and n < 100_000:
        op = left.note(b"n", b"%06d" % n + bytes(1000))
        n += 1
        if not op.released:
            waiting.append((n - 1, op))
    if not waiting:
        pytest.skip("the driver takes any number of notifications")
    cancelled = {i for i, op in waiting[::2] if left.cancel(op)}
    for i, op in waiting:
        if i in cancelled:
            assert op.wait(left) == vt.CANCELLED
    right.instance.until(lambda: len(right.notes()) == n - len(cancelled), left, right)
    assert [int(text[:6]) for _, text in right.notes()] == [i for i in range(n) if i not in cancelled]
    for i, op in waiting:
        if i not in cancelled:
            op.ok(left, right)


@pytest.mark.needs("CANCEL", "NOTIFY", "SIGNAL", "ALLOC")
@pytest.mark.parametrize("size", [8, 2 << 20])
def test_too_late_to_cancel_a_note_once_the_signal_is_out(world: World, size: int) -> None:
    world.make(4 << 20)
    left, right = world.left, world.right
    last = next(op for op in reversed(fill_ring(left)) if left.cancel(op))
    assert last.wait(left) == vt.CANCELLED  # now there is one place to wait, and none in the ring
    rows = [(world.here, 0, world.remote, 64, size)]
    op = left.submit(WRITE, rows, signal=(world.remote, 0, 5), note=(b"last", b""))
    left.instance.until(lambda: world.there.view[0] == 5, left)
    assert not op.released
    assert left.cancel(op) == 0
    right.instance.until(lambda: right.notes() and right.notes()[-1] == (b"last", b""), left, right)
    op.ok(left, right)


@pytest.mark.needs("CANCEL", "NOTIFY")
def test_the_loop_is_idle_after_all_waiting_notes_are_cancelled(pair) -> None:
    left, right = pair
    ops = fill_ring(left)
    cancelled = [op for op in ops if not op.released and left.cancel(op)]
    assert cancelled
    for op in cancelled:
        assert op.wait(left) == vt.CANCELLED
    n = len(ops) - len(cancelled)
    right.instance.until(lambda: len(right.notes()) == n, left, right)
    polls = 0
    while left.poll() or right.poll():
        polls += 1
        assert polls < 1000
    left.note(b"n", b"").ok(left)
    right.instance.until(lambda: len(right.notes()) == n + 1, right)


@pytest.mark.needs("CANCEL", "ALLOC")
def test_cancel_too_late(world: World) -> None:
    world.make(2 << 20)
    op = world.write(0, 0, 2 << 20)
    world.left.instance.until(lambda: op.released, world.left)
    assert world.left.cancel(op) == 0
    assert op.status == vt.OK


# ---- priorities ------------------------------------------------------------------------------------------------------


@pytest.mark.needs("ALLOC", "CANCEL")
def test_high_priority_overtakes(large: World) -> None:
    if large.left.vt.name != b"shm":
        pytest.skip("a hint that other drivers may ignore")
    low = [large.write(0, 0, 64 << 20, priority=-1) for _ in range(256)]
    high = large.write(0, 0, 2 << 20, priority=1)
    high.ok(large.left, large.right)
    assert not low[-1].released
    assert sum(op.released for op in low) < 100
    for op in low:
        large.left.cancel(op)
        op.wait(large.left, large.right)


@pytest.mark.needs("ALLOC", "CANCEL")
def test_low_priority_does_not_starve(large: World) -> None:
    if large.left.vt.name != b"shm":
        pytest.skip("a hint that other drivers may ignore")
    high = [large.write(0, 0, 64 << 20, priority=1) for _ in range(32)]
    low = large.write(0, 0, 2 << 20, priority=-1)
    low.ok(large.left, large.right)
    assert not high[-1].released, "the low one had to wait until all others were done"
    for op in high:
        large.left.cancel(op)
        op.wait(large.left, large.right)


# ---- stop ------------------------------------------------------------------------------------------------------------


@alloc
@pytest.mark.parametrize("dead", [False, True])
def test_stop_with_work_in_flight(large: World, dead: bool) -> None:
    left = large.left
    ops = [large.write(0, 0, 64 << 20) for _ in range(256)]  # minutes of work
    left.instance.until(lambda: left.progress(ops[0]) > 0, what="no progress")
    left.stop(dead).wait(left)
    assert all(op.released for op in ops), "stop finished before the ops were released"
    assert {op.status for op in ops} <= {vt.LINK, vt.OK}
    assert ops[-1].status == vt.LINK
    landed = large.there.view.tobytes()
    refused(vt.LINK, large.write, 0, 0, 8)
    assert large.there.view == landed
    left.free()


@pytest.mark.needs("NOTIFY")
def test_stop_with_notes_that_wait(pair) -> None:
    left, _ = pair
    ops = fill_ring(left)
    waiting = [op for op in ops if not op.released]
    left.stop().wait(left)
    assert all(op.released for op in waiting)
    # A driver with threads may have been about to send the first of them.
    assert {op.status for op in waiting} <= {vt.LINK, vt.OK}
    assert waiting[-1].status == vt.LINK


@pytest.mark.needs("NOTIFY")
def test_stop_reaches_the_peer_after_all_earlier_work(pair) -> None:
    left, right = pair
    for i in range(10):
        left.note(b"n", b"%d" % i).ok(left)
    left.stop().wait(left)
    left.free()
    right.instance.until(lambda: right.down, right)
    assert len(right.notes()) == 10
    kinds = [event.kind for event in right.instance.events]
    assert kinds == [vt.NOTE] * 10 + [vt.LINK_DOWN]
    assert right.down.status == vt.LINK
    assert right.down.data
    refused(vt.LINK, right.note, b"n")


def test_stop_twice(pair) -> None:
    left, right = pair
    left.stop().wait(left)
    left.stop(dead=True).wait(left)
    right.stop(dead=True).wait(right)


@alloc
def test_stop_twice_with_work_in_flight(large: World) -> None:
    ops = [large.write(0, 0, 64 << 20) for _ in range(256)]
    first = large.left.stop()
    second = large.left.stop(dead=True)
    first.wait(large.left)
    second.wait(large.left)
    assert all(op.released for op in ops)
    assert ops[-1].status == vt.LINK


@alloc
def test_other_links_are_not_disturbed(open_instance) -> None:
    a, b = open_instance(), open_instance()
    (first, peer1), (second, peer2) = vt.join(a, b), vt.join(a, b)
    here, there, spoilt = a.alloc(48 << 20), b.alloc(48 << 20), b.alloc(48 << 20)
    vt.fill(here.view)
    one, two = first.imported(spoilt), second.imported(there)
    doomed = [first.submit(WRITE, [(here, i << 24, one, i << 24, 1 << 24)]) for i in range(3)]
    kept = [second.submit(WRITE, [(here, i << 24, two, i << 24, 1 << 24)]) for i in range(3)]
    first.stop().wait(first)
    for op in kept:
        op.ok(second, peer1, peer2)
    assert {op.wait() for op in doomed} <= {vt.LINK, vt.OK}
    assert there.view == here.view


@alloc
def test_stop_during_import(open_instance) -> None:
    left, right = open_instance.pair()
    memory = right.instance.alloc(64 << 20)
    loaded = left.load(memory.export(MAY_READ), memory.size, MAY_READ)
    left.stop().wait(left)
    assert loaded.op.wait() in (vt.OK, vt.LINK)
    loaded.release()


# ---- fence -----------------------------------------------------------------------------------------------------------


@alloc
def test_fence_with_a_cooperating_peer(large: World) -> None:
    """After the fence the peer writes nothing more, whatever it had in flight; it can't submit any more."""
    left, right = large.left, large.right
    ops = [large.write(0, 0, 64 << 20) for _ in range(256)]
    left.instance.until(lambda: left.progress(ops[0]) > 0, what="no progress")
    right.fence().ok(left, right)
    landed = large.there.view.tobytes()
    assert {op.wait(left) for op in ops} <= {vt.LINK, vt.OK}
    assert ops[-1].status == vt.LINK
    refused(vt.LINK, large.write, 0, 0, 8)
    assert large.there.view == landed


def test_fence_waits_for_the_peer(pair) -> None:
    left, right = pair
    fence = right.fence()
    right.poll()
    assert not fence.released, "the peer was not asked yet"
    fence.ok(left, right)
    right.fence().ok()


def test_fence_ends_when_the_peer_is_dead(pair) -> None:
    left, right = pair
    fence = right.fence()
    right.stop(dead=False).wait(right)
    assert not fence.released, "stopping our side says nothing about the peer's"
    right.stop(dead=True).wait(right)
    assert fence.ok().status == vt.OK
    left.stop().wait(left)


def test_an_unanswered_fence_ends_with_the_link(pair) -> None:
    _, right = pair
    fence = right.fence()
    right.stop(dead=False).wait(right)
    right.free()
    assert fence.released
    assert fence.status == vt.LINK


def test_fence_of_a_peer_that_left(pair) -> None:
    left, right = pair
    left.stop().wait(left)
    left.free()
    right.instance.until(lambda: right.down, right)
    right.fence().ok(right)
