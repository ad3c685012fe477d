"""Notifications: addressed, bounded, in order, after their data, and never delivered to another subscription."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from typing import Any

import numpy
import pytest
from passes import settle

from hixl_async import (
    BufferTypeError,
    BusyError,
    ClosedError,
    Engine,
    InvalidArgumentError,
    PeerDownError,
    Subscription,
    TransferTimeoutError,
)
from hixl_async.engine.notifications import Subscriptions
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, peer_process, until


async def test_what_a_subscription_shows(pair: EnginePair) -> None:
    red, everything = pair.right.notifications("red", limit=1), pair.right.notifications()
    accepted = pair.right.accepted()
    for _ in range(3):
        await pair.left.notify(pair.peer, "red", b"1")
    await until(lambda: len(everything) == 3)
    assert repr(red) == "<Subscription to 'red', 1 waiting, 2 dropped>"
    assert repr(everything) == "<Subscription to all topics, 3 waiting>"
    assert repr(accepted) == "<SubscriptionQueue, 0 waiting>"
    red.close()
    assert repr(red) == "<Subscription to 'red', 1 waiting, 2 dropped, closed>"


async def test_topics_are_separate(pair: EnginePair) -> None:
    red, blue, everything = (pair.right.notifications(topic) for topic in ("red", "blue", None))
    for topic, payload in [("red", b"1"), ("blue", b"2"), ("green", b"3"), ("red", b"")]:
        await pair.left.notify(pair.peer, topic, payload)
    await until(lambda: len(everything) == 4)
    assert [(await red.get()).payload for _ in range(2)] == [b"1", b""]
    assert (await blue.get()).payload == b"2"
    assert [(note.topic, note.payload) for note in drain(everything)] == [
        ("red", b"1"), ("blue", b"2"), ("green", b"3"), ("red", b""),
    ]  # fmt: skip
    assert red.get_nowait() is blue.get_nowait() is None
    assert pair.right.stats().notifications_dropped == 0


def drain(subscription: Subscription) -> list[Any]:
    notes = []
    while (note := subscription.get_nowait()) is not None:
        notes.append(note)
    return notes


async def test_a_note_tells_its_sender(pair: EnginePair) -> None:
    await pair.left.notify(pair.peer, "topic", memoryview(b"payload"))
    note = await pair.right.notifications("topic").get()
    assert (note.peer, note.topic, note.payload) == (pair.back, "topic", b"payload")


@pytest.mark.parametrize("size", [8, 2 << 20])
async def test_the_data_is_there_before_the_note(pair: EnginePair, size: int) -> None:
    """With the copy inline and on threads."""
    region, remote = await pair.region("kv", size)
    view = memoryview(region)
    notes = pair.right.notifications("kv")
    for value in range(1, 30):
        transfer = pair.left.write(bytes([value]) * size, remote, notify=("kv", bytes([value])))
        note = await notes.get()
        assert view[0] == view[size // 2] == view[size - 1] == note.payload[0] == value
        await transfer


async def test_the_data_is_there_whatever_the_order_of_completions() -> None:
    plan = FaultPlan(seed=3).reorder(4, 0.002)
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        region, remote = await pair.region("kv", 64 * 16)
        view = memoryview(region)
        notes = pair.right.notifications("kv")
        transfers = [
            pair.left.write(bytes([i + 1]) * 16, remote[16 * i : 16 * i + 16], notify=("kv", bytes([i])))
            for i in range(64)
        ]
        seen = set()
        for _ in range(64):
            i = (await notes.get()).payload[0]
            assert bytes(view[16 * i : 16 * i + 16]) == bytes([i + 1]) * 16
            seen.add(i)
        assert seen == set(range(64))
        await asyncio.gather(*transfers)


async def test_a_failed_transfer_sends_no_notification() -> None:
    plan = FaultPlan(seed=1).fail(nth=1, verb="write")
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        _, remote = await pair.region("kv", 8)
        notes = pair.right.notifications("kv")
        with pytest.raises(Exception, match="failed"):
            await pair.left.write(b"12345678", remote, notify=("kv", b"first"))
        await pair.left.write(b"12345678", remote, notify=("kv", b"second"))
        assert (await notes.get()).payload == b"second"


async def test_order(pair: EnginePair) -> None:
    notes = pair.right.notifications("t")
    for i in range(2000):
        with contextlib.suppress(BusyError):
            pair.left.notify(pair.peer, "t", i.to_bytes(4, "big"))
        if i % 100 == 0:
            await asyncio.sleep(0)
    await pair.left.notify(pair.peer, "t", (1 << 31).to_bytes(4, "big"))
    numbers = []
    while not numbers or numbers[-1] != 1 << 31:
        numbers.append(int.from_bytes((await notes.get()).payload, "big"))
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 1000


# -- subscriptions


async def test_late_subscriptions_miss_nothing(pair: EnginePair) -> None:
    """The consumer subscribes after the last message."""
    for i in range(5):
        await pair.left.notify(pair.peer, "layer", bytes([i]))
        await pair.left.notify(pair.peer, "other", bytes([i]))
    await until(lambda: pair.right.stats().notifications == 10)
    late = pair.right.notifications("layer")
    assert [note.payload[0] for note in drain(late)] == list(range(5))
    assert [note.topic for note in drain(pair.right.notifications())] == ["other"] * 5
    assert drain(pair.right.notifications()) == []


async def test_two_subscriptions_each_get_every_notification(pair: EnginePair) -> None:
    one, two = pair.right.notifications("t"), pair.right.notifications("t")
    await pair.left.notify(pair.peer, "t", b"x")
    assert (await one.get()).payload == (await two.get()).payload == b"x"
    one.close()
    await pair.left.notify(pair.peer, "t", b"y")
    assert (await two.get()).payload == b"y"
    with pytest.raises(ClosedError):
        await one.get()


async def test_overflow_drops_the_newest_and_counts(pair: EnginePair) -> None:
    small, large = pair.right.notifications("t", limit=3), pair.right.notifications("t")
    for i in range(10):
        await pair.left.notify(pair.peer, "t", bytes([i]))
    await until(lambda: len(large) == 10)
    assert small.dropped == 7
    assert large.dropped == 0
    assert pair.right.stats().notifications_dropped == 7
    assert [note.payload[0] for note in drain(small)] == [0, 1, 2]
    await pair.left.notify(pair.peer, "t", b"\xff")
    assert (await small.get()).payload == b"\xff"


async def test_unclaimed_notifications_are_bounded_and_keep_the_newest() -> None:
    async with engine_pair(notification_limit=4) as pair:
        for i in range(10):
            await pair.left.notify(pair.peer, f"topic-{i % 2}", bytes([i]))
        await until(lambda: pair.right.stats().notifications == 10)
        assert pair.right.stats().notifications_dropped == 6
        assert [note.payload[0] for note in drain(pair.right.notifications())] == [6, 7, 8, 9]


async def test_unclaimed_notifications_are_bounded_by_bytes_and_fair(engine: Engine) -> None:
    """A flood of large messages without a subscription costs 16 MiB, and displaces no message of another peer."""
    async with Engine(name="modest") as modest, Engine(name="flood", drivers={"shm": {"ring_bytes": 1 << 22}}) as flood:
        quiet, loud = await modest.connect(engine.address), await flood.connect(engine.address)
        await modest.notify(quiet, "mine", b"keep this")
        payload = bytes(60_000)
        for _ in range(400):
            await flood.notify(loud, "flood", payload)
        await until(lambda: engine.stats().notifications == 401, timeout=20)
        assert engine.stats().notifications_dropped > 100
        assert engine.notifications("mine").get_nowait().payload == b"keep this"
        held = drain(engine.notifications("flood"))
        assert 200 < len(held) < 280
        assert sum(len(note.payload) for note in held) <= 16 << 20


async def test_remembered_topics_are_bounded(engine: Engine) -> None:
    """Peers choose topics: neither many nor long ones may accumulate."""
    subscriptions, peer = Subscriptions(engine, 10_000), object()
    everything = subscriptions.subscribe(None)
    for n in range(5000):
        subscriptions.deliver(peer, b"%d" % n + bytes(60_000 if n % 2 else 0), b"")  # type: ignore[arg-type]
        assert everything.get_nowait() is not None
    assert sum(map(len, subscriptions._takers)) < 1 << 20
    for n in range(5000):
        subscriptions.deliver(peer, b"short %d" % n, b"")  # type: ignore[arg-type]
    assert len(subscriptions._takers) <= 4096
    subscriptions.close()


async def test_a_queue_is_bounded_by_bytes(pair: EnginePair) -> None:
    notes = pair.right.notifications("t")
    for _ in range(400):
        await pair.left.notify(pair.peer, "t", bytes(60_000))
    await until(lambda: pair.right.stats().notifications == 400, timeout=20)
    assert len(notes) + notes.dropped == 400
    assert 200 < len(notes) < 280
    while len(notes):
        await notes.get()
    await pair.left.notify(pair.peer, "t", b"there is room again")
    assert (await notes.get()).payload == b"there is room again"


async def test_iteration_close_and_break(pair: EnginePair) -> None:
    async def first() -> bytes:
        async for note in pair.right.notifications("t"):
            return note.payload
        raise AssertionError

    for i in range(3):
        reading = asyncio.ensure_future(first())
        await settle(3)
        await pair.left.notify(pair.peer, "t", bytes([i]))
        assert await reading == bytes([i])
    gc.collect()
    assert pair.right._subscriptions is not None
    assert pair.right._subscriptions._queues == {}, "a dropped subscription is forgotten"

    async with pair.right.notifications("t") as notes:
        await pair.left.notify(pair.peer, "t", b"x")
        await until(lambda: len(notes) == 1)
    assert [note.payload async for note in notes] == [b"x"], "what it holds can still be read"
    notes.close()
    await notes.aclose()


async def test_a_waiting_subscription_cannot_vanish(pair: EnginePair) -> None:
    """Only the task refers to it, and only the loop refers to the task."""
    got: list[bytes] = []

    async def read() -> None:
        async for note in pair.right.notifications("t"):
            got.append(note.payload)
            if note.payload == b"end":
                return

    asyncio.ensure_future(read())
    await settle(3)
    gc.collect()
    await pair.left.notify(pair.peer, "t", b"x")
    await pair.left.notify(pair.peer, "t", b"end")
    await until(lambda: got == [b"x", b"end"])


async def test_two_tasks_on_one_subscription(pair: EnginePair) -> None:
    notes = pair.right.notifications("t")
    waiting = asyncio.ensure_future(notes.get())
    await settle(3)
    with pytest.raises(ClosedError, match="two tasks wait on one Subscription"):
        await notes.get()
    waiting.cancel()
    taking_over = asyncio.ensure_future(notes.get())
    await settle(3)
    await pair.left.notify(pair.peer, "t", b"x")
    assert (await taking_over).payload == b"x"
    assert waiting.cancelled()


async def test_cancelling_a_wait_loses_no_message(pair: EnginePair) -> None:
    notes = pair.right.notifications("t")
    for i in range(20):
        waiting = asyncio.ensure_future(notes.get())
        await settle(2)
        await pair.left.notify(pair.peer, "t", bytes([i]))
        await settle(i % 4)
        waiting.cancel()
        try:
            note = await waiting
        except asyncio.CancelledError:
            note = await notes.get()
        assert note.payload == bytes([i])


# -- limits and errors


async def test_a_notification_over_the_limit(pair: EnginePair) -> None:
    limit = pair.left.driver_limits()["shm"]["notification_bytes"]
    _, remote = await pair.region("kv", 8)
    notes = pair.right.notifications("t")
    await pair.left.notify(pair.peer, "t", bytes(limit - 1))
    assert len((await notes.get()).payload) == limit - 1
    for call in (
        lambda: pair.left.notify(pair.peer, "t", bytes(limit)),
        lambda: pair.left.write(b"12345678", remote, notify=("t", bytes(limit))),
        lambda: pair.left.notify(pair.peer, "t" * (limit + 1)),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"{limit + 1} bytes.*takes {limit}.*region"):
            call()
    assert bytes(await _read(pair, remote)) == bytes(8), "nothing was sent"
    await pair.left.notify(pair.peer, "t", b"still works")
    assert (await notes.get()).payload == b"still works"


@pytest.mark.parametrize(
    "payload",
    [
        bytearray(b"12345678"), memoryview(b"1a2b3c4d5e6f7g8h")[::2], numpy.arange(8).astype("M8[s]"),
        numpy.arange(12, dtype="i4").reshape(3, 4).T, numpy.zeros(3, [("O", "u1")]), b"",
    ],
)  # fmt: skip
async def test_payloads_of_any_kind(pair: EnginePair, payload: Any) -> None:
    notes = pair.right.notifications("t")
    await pair.left.notify(pair.peer, "t", payload)
    assert (await notes.get()).payload == (payload.tobytes() if hasattr(payload, "tobytes") else bytes(payload))


async def test_payloads_are_not_references(pair: EnginePair) -> None:
    _, remote = await pair.region("kv", 8)
    for payload in (numpy.array([None]), numpy.array([None] * 4)[::2], memoryview(numpy.array([None]))):
        for call in (
            lambda payload=payload: pair.left.notify(pair.peer, "t", payload),
            lambda payload=payload: pair.left.write(b"12345678", remote, notify=("t", payload)),
        ):
            with pytest.raises(BufferTypeError, match="references to Python objects"):
                call()
    assert bytes(await _read(pair, remote)) == bytes(8), "nothing was sent"


async def _read(pair: EnginePair, remote: Any) -> bytearray:
    buffer = bytearray(len(remote))
    await pair.left.read(buffer, remote)
    return buffer


@pytest.mark.parametrize(
    "notify", [7, "topic", ("topic",), ("", b"x"), (7, b"x"), ("topic", 7), ("topic", "text"), ("\ud800", b"")]
)
async def test_malformed_notifications(pair: EnginePair, notify: Any) -> None:
    _, remote = await pair.region("kv", 8)
    with pytest.raises(InvalidArgumentError, match="notify|topic"):
        pair.left.write(b"12345678", remote, notify=notify)
    assert await _read(pair, remote) == bytes(8)
    assert pair.left.stats().pinned == 0


@pytest.mark.parametrize(
    "wrong", [{"topic": ""}, {"topic": 7}, {"topic": b"t"}, {"limit": 0}, {"limit": -1}, {"limit": "1"}]
)
async def test_malformed_subscriptions(engine: Engine, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="topic|limit"):
        engine.notifications(**wrong)


async def test_notify_a_peer_of_another_engine(pair: EnginePair) -> None:
    for wrong in (pair.back, None, "right"):
        with pytest.raises(InvalidArgumentError, match="peer of this engine"):
            pair.left.notify(wrong, "t", b"x")  # type: ignore[arg-type]


async def test_notify_a_peer_that_is_gone() -> None:
    async with engine_pair() as pair:
        await pair.right.aclose()
        await until(lambda: not pair.left.peers)
        with pytest.raises(PeerDownError):
            pair.left.notify(pair.peer, "t", b"x")


async def test_a_receiver_that_does_not_read_blocks_no_other() -> None:
    """Notifications beyond ring and queue are refused; those that wait time out; the loop goes on."""
    async with Engine("127.0.0.1:0", name="reader") as reader, peer_process(stall=0.3) as process:
        region = reader.allocate("kv", 8, access="write")
        await process.connect(reader.address)
        async with Engine(stall=0.3, drivers={"shm": {"ring_bytes": 4096, "pending_notes": 4}}) as sender:
            peer = await sender.connect(process.address)
            process.stop()
            waiting = []
            with pytest.raises(BusyError, match="notification to .* was refused: too many notifications wait"):
                for _ in range(100_000):
                    note = sender.notify(peer, "t", bytes(500))
                    if not note.done():
                        waiting.append(note)
            assert len(waiting) == 4
            for note in waiting:
                with pytest.raises(TransferTimeoutError, match="no progress"):
                    await note
            process.resume()
            await sender.notify(peer, "t", b"read again")
        assert region.pins <= 1


# -- between processes


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_ping_pong_between_processes(loop: str) -> None:
    async with (
        peer_process(loop=loop, regions={"kv": 1 << 20}) as process,
        Engine("127.0.0.1:0", name="here") as engine,
    ):
        peer = await engine.connect(process.address)
        await process.run("engine.echo:start")
        notes = engine.notifications("pong")
        remote = await peer.region("kv")
        for i in range(200):
            await engine.write(i.to_bytes(8, "big"), remote[0:8], notify=("ping", i.to_bytes(8, "big")))
            assert (await notes.get()).payload == i.to_bytes(8, "big") * 2
        for i in range(20):
            data = bytes([i]) * (1 << 20)
            engine.write(data, remote, notify=("ping", data[:8]))
            assert (await notes.get()).payload == data[:16]


# -- storms


async def test_a_storm_shares_the_loop() -> None:
    """Between two batches of notifications every other task that is ready runs once."""
    passes = 0

    async def count() -> None:
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    async with engine_pair(notify_batch_size=16) as pair:
        notes = pair.right.notifications("storm")
        for i in range(800):
            pair.left.notify(pair.peer, "storm", b"%d" % i)
        counter = asyncio.create_task(count())
        held = []
        while len(notes) < 800:
            held.append(len(notes))
            await asyncio.sleep(0)
        counter.cancel()
        assert passes >= 800 // 16 - 2  # none need come before the first batch or after the last
        assert max(after - before for before, after in itertools.pairwise(held)) <= 16
        assert [note.payload for note in drain(notes)] == [b"%d" % i for i in range(800)]


async def test_a_storm_is_never_lost_silently() -> None:
    """100,000 at once: each is delivered, refused to the sender, or counted as dropped."""
    async with engine_pair(notification_limit=1000) as pair:
        notes = pair.right.notifications("storm")
        refused = 0
        for i in range(100_000):
            try:
                pair.left.notify(pair.peer, "storm", b"%d" % i)
            except BusyError:
                refused += 1
                await asyncio.sleep(0)
        sent = 100_000 - refused
        await until(lambda: pair.right.stats().notifications == sent)
        assert 0 < len(notes) <= 1000
        assert len(notes) + notes.dropped == sent
        assert pair.right.stats().notifications_dropped == notes.dropped
        await pair.left.notify(pair.peer, "after", b"")
        assert (await pair.right.notifications("after").get()).payload == b""


async def test_the_batch_size_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIXL_NOTIFY_BATCH_SIZE", "7")
    assert Engine().config.notify_batch_size == 7
    assert Engine(notify_batch_size=9).config.notify_batch_size == 9
    for text in ("many", "0", "-1"):
        monkeypatch.setenv("HIXL_NOTIFY_BATCH_SIZE", text)
        with pytest.raises(InvalidArgumentError, match=r"HIXL_NOTIFY_BATCH_SIZE|notify_batch_size"):
            Engine()


async def test_aclose_ends_a_subscription_at_the_call(pair: EnginePair) -> None:
    """As it does for regions and peers, also if it is not awaited."""
    notes, peers = pair.right.notifications("topic"), pair.right.accepted()
    notes.aclose()
    for queue in (notes, peers):
        await asyncio.create_task(queue.aclose())
        with pytest.raises(ClosedError, match="is closed"):
            await queue.get()
    await notes.aclose()
