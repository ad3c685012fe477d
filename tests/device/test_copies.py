"""Transfers whose local side lies on a device that copies by itself: the device is simulated here, all else is real."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hixl_async import (
    BufferTypeError,
    DriverError,
    Engine,
    PeerLostError,
    TransferError,
    TransferTimeoutError,
)
from hixl_async._core import set_object_support
from hixl_async.core import torch_device
from hixl_async.core.device_copies import DeviceCopies
from hixl_async.engine.region import Operand, operand
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until

SIZE = 4096


class Tensor:
    """A tensor of bytes on the device."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)


class Event:
    """The event of one copy, which happens when the test says so."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run
        self.done = False
        self.error: BaseException | None = None

    def finish(self) -> None:
        self.run()
        self.done = True

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done


class Device:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.pinned: list[tuple[int, int]] = []
        self.refusal: BaseException | None = None

    def pin(self, tensor: Tensor, address: int, nbytes: int) -> Callable[[], object]:
        self.pinned.append((address, nbytes))
        return lambda: self.pinned.remove((address, nbytes))

    def copy(self, tensor: Tensor, address: int, nbytes: int, to_device: bool) -> Event:
        if self.refusal is not None:
            raise self.refusal
        assert nbytes == len(tensor.data)
        host = (ctypes.c_char * nbytes).from_address(address)

        def run() -> None:
            if to_device:
                tensor.data[:] = host.raw
            else:
                host.raw = bytes(tensor.data)

        self.events.append(Event(run))
        return self.events[-1]

    def serve(self, engine: Engine) -> None:
        """Let the engine take tensors of this device."""

        def address_of(local: Any, writable: bool) -> Operand:
            return Operand(1, len(local.data), local, True) if isinstance(local, Tensor) else operand(local, writable)

        set_object_support(engine, address_of, DeviceCopies(engine, self.pin, self.copy).begin)


class Stream:
    """The work that a device was given by way of torch, and has not done."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def query(self) -> bool:
        return not self.work

    def finish(self) -> None:
        for work in self.work:
            work()
        self.work.clear()

    def torch(self, event: Callable[[], object]) -> Any:
        """Return the part of torch that a copy needs; `event` makes its events."""
        device = SimpleNamespace(device=lambda _: nullcontext(), current_stream=lambda _: self, Event=event)
        return SimpleNamespace(
            uint8="uint8",
            frombuffer=lambda memory, dtype: StreamTensor(self, memory),
            get_device_module=lambda _: device,
        )


class StreamTensor(Tensor):
    """Bytes on the device, or of the host, that a stream copies."""

    device = "npu:0"

    def __init__(self, stream: Stream, data: Any) -> None:
        self.stream, self.data = stream, data

    def reshape(self, _: int) -> StreamTensor:
        return self

    def view(self, _: object) -> StreamTensor:
        return self

    def copy_(self, source: StreamTensor, *, non_blocking: bool) -> None:
        assert non_blocking

        def work() -> None:
            memoryview(self.data).cast("B")[:] = memoryview(source.data).cast("B")

        self.stream.work.append(work)


class Scene:
    def __init__(self, pair: EnginePair, device: Device, region: Any, remote: Any) -> None:
        self.pair, self.device, self.region, self.remote = pair, device, region, remote
        self.engine: Engine = pair.left

    def landed(self, size: int = 5) -> bytes:
        return bytes(memoryview(self.region)[:size])


@pytest.fixture(params=["shm", "wrapped"])
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    device = Device()
    drivers = faulty("shm", FaultPlan(1)) if request.param == "wrapped" else ["shm"]
    async with engine_pair(drivers, close_timeout=0.2) as pair:
        device.serve(pair.left)
        yield Scene(pair, device, *(await pair.region("kv", SIZE)))
        for event in device.events:
            event.done = True
        await until(lambda: pair.left.stats().pinned == 0)
    assert device.pinned == []


async def settle(seconds: float = 0.01) -> None:
    await asyncio.sleep(seconds)


async def test_write(scene: Scene) -> None:
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5])
    await settle()
    assert not transfer.done()
    assert transfer.progress() == 0
    assert (scene.engine.stats().in_flight, scene.engine.stats().bytes_in_flight) == (1, 5)
    scene.device.events[0].finish()
    assert await transfer == 5
    assert transfer.progress() == 5
    assert scene.landed() == b"hello"
    assert scene.engine.stats().pinned == 0


async def test_read(scene: Scene) -> None:
    memoryview(scene.region)[100:105] = b"there"
    tensor = Tensor(bytes(5))
    transfer = scene.engine.read(tensor, scene.remote[100:105])
    scene.device.events[0].finish()
    assert await transfer == 5
    assert tensor.data == b"there"


async def test_a_notification_follows_the_data(scene: Scene) -> None:
    notes = scene.pair.right.notifications("t")
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5], notify=("t", b"done"))
    await settle()
    assert notes.get_nowait() is None
    scene.device.events[0].finish()
    assert (await notes.get()).payload == b"done"
    assert scene.landed() == b"hello"
    assert await transfer == 5


async def test_a_signal_follows_the_data(scene: Scene) -> None:
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5], signal=(scene.remote[8:16], 7))
    await settle()
    assert scene.landed(16) == bytes(16)
    scene.device.events[0].finish()
    assert await transfer == 5
    assert scene.landed(16) == b"hello" + bytes(3) + (7).to_bytes(8, "little")


async def test_events_may_finish_in_any_order(scene: Scene) -> None:
    transfers = [scene.engine.write(Tensor(bytes([i + 1])), scene.remote[i : i + 1]) for i in range(5)]
    for i in (3, 0, 4, 1, 2):
        scene.device.events[i].finish()
        assert await transfers[i] == 1
    assert scene.landed() == bytes([1, 2, 3, 4, 5])


async def test_cancelling_ends_the_wait_and_not_the_pin(scene: Scene) -> None:
    notes = scene.pair.right.notifications("t")
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5], notify=("t", b""))
    assert transfer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await transfer
    drained = asyncio.ensure_future(transfer.drained())
    await settle()
    assert not drained.done()
    assert scene.engine.stats().pinned == 1
    scene.device.events[0].finish()
    await drained
    await settle()
    assert notes.get_nowait() is None, "what was cancelled in time sends no notification"


async def test_a_timeout(scene: Scene) -> None:
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5], timeout=0.02)
    with pytest.raises(TransferTimeoutError):
        await transfer
    assert scene.engine.stats().pinned == 1
    assert await scene.engine.write(b"other", scene.remote[8:13]) == 5
    scene.device.events[0].finish()
    await transfer.drained()


async def test_the_device_fails(scene: Scene) -> None:
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5], notify=("t", b""))
    scene.device.events[0].error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(TransferError, match="illegal memory access") as caught:
        await transfer
    assert caught.value.peer == "right"
    await transfer.drained()


class Base(BaseException):
    """No Exception."""


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, Base])
async def test_the_device_fails_in_an_unusual_way(
    scene: Scene, loop_errors: list[dict[str, Any]], error: type[BaseException]
) -> None:
    """Other copies go on, and the memory of this one is free."""
    transfers = [scene.engine.write(Tensor(b"hello"), scene.remote[0:5]) for _ in range(2)]
    scene.device.events[0].error = error()
    with pytest.raises(TransferError, match="failed on the device, and the contents of its target are undefined"):
        await transfers[0]
    scene.device.events[1].finish()
    assert await transfers[1] == 5
    assert scene.engine.stats().pinned == 0
    assert [type(context["exception"]) for context in loop_errors] == [error]
    loop_errors.clear()


@pytest.mark.parametrize("error", [asyncio.CancelledError, Base])
async def test_the_device_refuses_in_an_unusual_way(scene: Scene, error: type[BaseException]) -> None:
    scene.device.refusal = error()
    with pytest.raises(error):
        scene.engine.write(Tensor(b"hello"), scene.remote[0:5])
    assert scene.engine.stats().pinned == 0
    await scene.region.aclose()  # which waits for what the driver has lent


async def test_a_device_that_does_not_let_go(scene: Scene, loop_errors: list[dict[str, Any]]) -> None:
    def pin(tensor: Tensor, address: int, nbytes: int) -> Callable[[], object]:
        def undo() -> None:
            raise Base

        return undo

    scene.device.pin = pin  # type: ignore[method-assign,assignment]
    scene.device.serve(scene.engine)
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5])
    scene.device.events[0].finish()
    await transfer
    await scene.region.aclose()
    await until(lambda: scene.engine.stats().remote_regions == 0)
    assert [type(context["exception"]) for context in loop_errors] == [Base]
    loop_errors.clear()


async def test_the_device_refuses(scene: Scene) -> None:
    scene.device.refusal = RuntimeError("out of memory")
    with pytest.raises(DriverError, match="refused.*out of memory"):
        scene.engine.write(Tensor(b"hello"), scene.remote[0:5])
    assert scene.engine.stats().pinned == 0
    scene.device.refusal = None
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5])
    scene.device.events[0].finish()
    assert await transfer == 5


async def test_an_event_that_cannot_be_recorded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy was queued before, so it is no refusal, and its memory is held until the stream is idle."""

    class Event:
        def record(self, stream: Stream) -> None:
            raise RuntimeError("out of events")

    stream = Stream()
    monkeypatch.setitem(sys.modules, "torch", stream.torch(Event))
    monkeypatch.setattr(scene.device, "copy", torch_device.copy)
    scene.device.serve(scene.engine)
    transfer = scene.engine.write(StreamTensor(stream, bytearray(b"hello")), scene.remote[0:5], notify=("t", b""))
    await settle()
    assert scene.engine.stats().pinned == 1
    assert not transfer.done()
    stream.finish()
    with pytest.raises(TransferError, match="failed on the device.*undefined: out of events"):
        await transfer
    await transfer.drained()
    assert scene.landed() == b"hello"


async def test_without_an_event_nothing_is_queued(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def event() -> object:
        raise RuntimeError("out of events")

    stream = Stream()
    monkeypatch.setitem(sys.modules, "torch", stream.torch(event))
    monkeypatch.setattr(scene.device, "copy", torch_device.copy)
    scene.device.serve(scene.engine)
    with pytest.raises(DriverError, match="refused.*out of events"):
        scene.engine.write(StreamTensor(stream, bytearray(b"hello")), scene.remote[0:5])
    assert not stream.work
    assert scene.engine.stats().pinned == 0


async def test_memory_that_the_device_cannot_reach(scene: Scene) -> None:
    scene.pair.right.register("registered", bytearray(64), access="write")
    remote = await scene.pair.peer.region("registered")
    with pytest.raises(BufferTypeError, match="registered.*CPU"):
        scene.engine.write(Tensor(b"hello"), remote[0:5])
    assert scene.engine.stats().pinned == 0


async def test_a_region_is_not_released_during_a_copy(scene: Scene) -> None:
    """Its owner's close waits for the copy, as it does for copies of this process's own threads."""
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5])
    closing = asyncio.ensure_future(scene.region.aclose())
    await settle(0.05)
    assert not closing.done()
    assert scene.region.pins
    scene.device.events[0].finish()
    await closing
    assert await transfer == 5
    assert not scene.region.pins


async def test_a_peer_is_not_left_during_a_copy(scene: Scene) -> None:
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5], notify=("t", b""))
    notes = scene.pair.right.notifications("t")
    closing = asyncio.ensure_future(scene.pair.peer.aclose())
    await settle(0.05)
    assert scene.engine.stats().pinned
    scene.device.events[0].finish()
    await closing
    assert await transfer == 5
    assert (await notes.get()).payload == b""
    assert scene.engine.stats().remote_regions == 0


async def test_a_mapping_is_pinned_once(scene: Scene) -> None:
    for _ in range(3):
        transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5])
        scene.device.events[-1].finish()
        await transfer
    assert [size for _, size in scene.device.pinned] == [SIZE]
    await scene.region.aclose()
    await until(lambda: not scene.device.pinned)


async def test_a_peer_that_is_lost_during_a_copy(scene: Scene) -> None:
    """Its memory stays mapped until the device is done with it."""
    transfer = scene.engine.write(Tensor(b"hello"), scene.remote[0:5], notify=("t", b""))
    await scene.pair.right.aclose()
    await until(lambda: not scene.engine.peers)
    assert scene.engine.stats().remote_regions == 1
    assert scene.device.pinned
    scene.device.events[0].finish()
    with pytest.raises(PeerLostError):
        await transfer
    await until(lambda: scene.engine.stats().remote_regions == 0)
    assert not scene.device.pinned
