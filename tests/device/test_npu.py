"""Tensors and events of NPUs, as torch_npu has them, by a stand-in for the device; the transport is the simulated HIXL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hixl_async import Batch, BufferTypeError, DriverError, Engine, RangeError, kv
from hixl_async.kv.ready import predicate
from hixl_async.testing import engine_pair, until
from tests.hixlsim.build import build

pytestmark = pytest.mark.torch

# Brought by the fixture, so that a run of other tests does not load torch.
torch: Any
Event: Any
Tensor: Any


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    global torch, Event, Tensor
    torch = pytest.importorskip("torch")
    if not str(torch.__version__).startswith("2.13."):
        pytest.skip("the stand-in for a device knows torch 2.13 alone")
    from . import standin

    standin.install()
    Event, Tensor = standin.Event, standin.Tensor


@pytest.fixture(scope="module")
def drivers() -> Any:
    return {"hixl": {"library": str(build())}}


def tensor(*shape: int, dtype: str = "bfloat16") -> Any:
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    return Tensor(whole.to(getattr(torch, dtype)).reshape(shape))


async def test_a_tensor_on_the_device_moves_both_ways(drivers: Any) -> None:
    async with engine_pair(drivers, other=drivers) as pair:
        weights = tensor(64, 64)
        region = pair.right.register("weights", weights, access="read-write")
        assert region.size == 64 * 64 * 2
        assert region.device
        remote = await pair.peer.region("weights")
        here = Tensor(torch.zeros(64, 64, dtype=torch.bfloat16))
        pair.left.register("here", here)
        await pair.left.read(here, remote)
        assert torch.equal(here.host, weights.host)
        here.host.add_(1)
        await pair.left.write(here[8:16], remote[8 * 128 : 16 * 128])
        assert torch.equal(weights.host[8:16], here.host[8:16])
        assert torch.equal(weights.host[:8] + 1, here.host[:8])


async def test_lists_of_device_and_host_memory(drivers: Any) -> None:
    async with engine_pair(drivers, other=drivers) as pair:
        there = pair.right.register("there", Tensor(torch.zeros(4096, dtype=torch.uint8)), access="read-write")
        remote = await pair.peer.region("there")
        ours = tensor(1024, dtype="uint8")
        device, host = pair.left.register("device", ours), pair.left.allocate("host", 1024)
        memoryview(host)[:] = b"h" * 1024
        batch = Batch("write", [(device[0:1024], remote[0:1024]), (host[0:1024], remote[1024:2048])])
        await pair.left.submit(batch)
        landed = bytes(ours.host.numpy()) + b"h" * 1024
        back = pair.left.allocate("back", 2048)
        await pair.left.read(back, remote[0:2048])
        assert bytes(memoryview(back)) == landed
        assert there.pins == 1


async def test_device_memory_is_not_read(drivers: Any) -> None:
    async with Engine(drivers=drivers) as engine:
        region = engine.register("weights", tensor(8, 8))
        for look in (lambda: memoryview(region), lambda: memoryview(region[0:8]), lambda: region.numpy()):
            with pytest.raises(BufferError, match="is on a device; copy it to the host"):
                look()
        await engine.drained(tensor(8))


async def test_drivers_of_host_memory_refuse_tensors_on_devices(drivers: Any) -> None:
    async with Engine(drivers=["shm"]) as engine:
        with pytest.raises(DriverError, match="none of the drivers.*shm.*registers device memory"):
            engine.register("weights", tensor(8))
        assert engine.stats().regions == 0
    both = {"shm": {}, **drivers}
    async with engine_pair(both, other=both) as pair:
        weights = tensor(64)
        region = pair.right.register("weights", weights, access="read-write")
        remote = await pair.peer.region("weights")
        assert pair.peer.route(remote).startswith("hixl: "), "shared memory cannot reach a device"
        # shm must never get the address of device memory, because it would copy from it.
        host = pair.right.allocate("host", 128, access="read-write")
        there = await pair.peer.region("host")
        assert pair.peer.route(there).startswith("shm: ")
        local = tensor(64)
        mine = pair.left.register("mine", local)
        for call in (
            lambda: pair.left.write(mine, there),
            lambda: pair.left.write(mine[0:8], there[0:8]),
            lambda: Batch("write", mine, there, [(0, 0, 8)]),
        ):
            with pytest.raises(BufferTypeError, match="is not known to driver 'shm'"):
                call()
        with pytest.raises(BufferTypeError, match="'hixl' moves device memory only where it is registered"):
            pair.left.write(tensor(64), remote)
        await pair.left.write(local, remote)
        assert torch.equal(weights.host, local.host)
        assert host.pins == region.pins == 1


async def test_unusable_tensors(drivers: Any) -> None:
    async with Engine(drivers=drivers) as engine:
        with pytest.raises(BufferTypeError, match="not contiguous"):
            engine.register("weights", Tensor(torch.zeros(4, 6).T))
        with pytest.raises(RangeError, match="empty"):
            engine.register("weights", Tensor(torch.zeros(0)))
        with pytest.raises(BufferTypeError, match="a tensor on meta cannot be used"):
            engine.register("weights", torch.zeros(4, device="meta"))
        assert engine.stats().regions == 0


# -- events


def test_an_event_that_was_never_recorded_is_not_ready() -> None:
    event = Event()
    question = predicate(event)
    assert question is not None
    assert event.query(), "which is what torch says of it"
    assert not question()
    event.record()
    assert not question()
    event.finish()
    assert question()
    event.record()
    assert not question()


def test_events_of_other_devices() -> None:
    class Cuda:
        cuda_event = 0

        def query(self) -> bool:
            return True

    class Generic:
        event_id = 0

        def query(self) -> bool:
            return True

    class Unknown:
        def query(self) -> bool:
            return True

    for event, name in ((Cuda(), "cuda_event"), (Generic(), "event_id")):
        question = predicate(event)
        assert question is not None
        assert not question()
        setattr(event, name, 7)
        assert question()
    question = predicate(Unknown())
    assert question is not None
    assert question()


async def test_layers_leave_in_the_order_of_their_events(drivers: Any) -> None:
    group = kv.Group.attention(4, kv_heads=2, head_dim=8, dtype="bfloat16")
    view, small = (kv.View.ordered(group, blocks=blocks, block_tokens=4) for blocks in (8, 4))
    (size,) = view.tensor_bytes
    source = Tensor(torch.arange(size, dtype=torch.int64).to(torch.uint8))
    target = Tensor(torch.zeros(size, dtype=torch.uint8))
    async with (
        engine_pair(drivers, other=drivers) as pair,
        kv.Pool(pair.left, view, name="source", access="none", memory=source) as ours,
        kv.Pool(pair.right, view, name="target", memory=target) as theirs,
    ):
        events = [Event() for _ in range(4)]
        landed: list[int] = []
        async with theirs.reserve(tokens=20) as blocks, ours.reserve(tokens=20) as mine:
            stream = blocks.stream()
            receiving = asyncio.create_task(_collect(stream, landed))
            async with ours.open_stream(pair.peer, stream.ticket()) as out:
                for layer in range(4):
                    out.push(layer, mine, ready=events[layer])
                await asyncio.sleep(0.01)
                for layer in (3, 1, 2, 0):
                    events[layer].record()
                for layer in (3, 2, 1):
                    events[layer].finish()
                await asyncio.sleep(0.01)
                assert landed == [], "the first one is not ready"
                assert [event.asked for event in events[1:]] == [0, 0, 0], "only the oldest is asked"
                events[0].finish()
                await until(lambda: len(landed) == 4)
            await receiving
            assert landed == [0, 1, 2, 3]
            sent, arrived = (tensor.host.reshape(4, 2, 8, -1) for tensor in (source, target))
            assert torch.equal(sent[:, :, list(mine.ids)], arrived[:, :, list(blocks.ids)])
        with pytest.raises(RangeError, match="memory of region .other. has 100 bytes"):
            kv.Pool(pair.left, small, name="other", memory=source[:100])


async def _collect(stream: Any, landed: list[int]) -> None:
    async for layer in stream:
        landed.append(layer)
