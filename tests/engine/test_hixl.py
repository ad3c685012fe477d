"""Engines over HIXL: the simulated library in each of its three back-ends."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import pytest

from hixl_async import (
    BufferTypeError,
    ConnectError,
    DriverError,
    DriverLoadError,
    Engine,
    HixlError,
    InvalidArgumentError,
    PeerLostError,
    PeerState,
    StaleRegionError,
    TransferTimeoutError,
    kv,
)
from hixl_async.control import binary_text
from hixl_async.engine import links as engine_links
from hixl_async.testing import EnginePair, engine_pair, peer_process, until
from tests.hixlsim.build import build
from tests.signals import interrupted

VIEW = kv.View.ordered(kv.Group.attention(4, kv_heads=2, head_dim=16, dtype="bfloat16"), blocks=32, block_tokens=4)


@pytest.fixture(scope="session")
def root() -> Path:
    return build()


@pytest.fixture(params=["comm", "cs", "fab"])
def drivers(request: pytest.FixtureRequest, root: Path) -> Any:
    return {"hixl": {"library": str(root), "backend": request.param}}


@pytest.fixture
def simulate(root: Path) -> Iterator[Callable[[str, object], None]]:
    """Set a variable of the simulation for the time of the test."""
    library = ctypes.CDLL(str(root / "lib64" / "libcann_hixl.so"))
    plain = {"FAULTS": "", "LATENCY_US": 0, "JITTER_US": 0, "GBPS": 0, "ORDER": "fifo"}
    used = set()

    def change(name: str, value: object) -> None:
        used.add(name)
        assert library.hixlsim_set(name.encode(), str(value).encode()) == 0

    yield change
    for name in used:
        change(name, plain[name])


@pytest.fixture
async def pair(drivers: Any) -> Any:
    async with engine_pair(drivers, other=drivers, close_timeout=5.0) as pair:
        yield pair
        assert pair.left.stats().in_flight == 0


# -- it works


async def test_bytes_move_both_ways(pair: EnginePair) -> None:
    there, remote = await pair.region("there", 1 << 20)
    here = pair.left.allocate("here", 1 << 20)
    numpy.frombuffer(here, "uint8")[:] = numpy.arange(1 << 20, dtype="uint64").astype("uint8") * 7
    await pair.left.write(here, remote)
    assert bytes(memoryview(there)) == bytes(memoryview(here))
    memoryview(here)[:] = bytes(1 << 20)
    await pair.left.read(here[4096:8192], remote[4096:8192])
    assert bytes(memoryview(here)[4096:8192]) == bytes(memoryview(there)[4096:8192])
    assert not any(memoryview(here)[:4096])
    stats = pair.left.stats()
    assert stats.bytes == (1 << 20) + 4096
    assert stats.failed == 0


async def test_work_in_both_directions_at_once(pair: EnginePair) -> None:
    async def side(engine: Engine, peer: Any, name: str) -> None:
        region = engine.allocate(f"{name}.source", 4096)
        memoryview(region)[:] = name.encode() * (4096 // len(name))
        remote = await peer.region(f"{'right' if name == 'left' else 'left'}.target")
        for number in range(64):
            await engine.write(region[0:64], remote[number * 64 : number * 64 + 64])

    left = pair.left.allocate("left.target", 4096, access="write")
    right = pair.right.allocate("right.target", 4096, access="write")
    await asyncio.gather(side(pair.left, pair.peer, "left"), side(pair.right, pair.back, "righ"))
    assert bytes(memoryview(right)) == b"left" * 1024
    assert bytes(memoryview(left)) == b"righ" * 1024


async def test_a_registered_buffer_and_parts_of_it(pair: EnginePair) -> None:
    there, remote = await pair.region("there", 4096)
    array = numpy.arange(512, dtype="int64")
    pair.left.register("array", array)
    await pair.left.write(array[100:108], remote[0:64])
    assert bytes(memoryview(there)[:64]) == array[100:108].tobytes()
    with pytest.raises(BufferTypeError, match=r"'hixl' moves memory only where it is registered"):
        pair.left.write(b"somewhere", remote[0:9])


async def test_a_buffer_that_comes_back_is_registered_once(pair: EnginePair) -> None:
    there, remote = await pair.region("there", 4096)
    numbers = numpy.arange(512, dtype="int64")
    async with pair.left.registration_cache() as cache:
        for part in (slice(0, 512), slice(100, 108), slice(0, 512)):
            await pair.left.write(cache.local(numbers[part]), remote[0 : numbers[part].nbytes])
            assert bytes(memoryview(there)[: numbers[part].nbytes]) == numbers[part].tobytes()
        assert len(pair.left.regions) == 1
    assert not pair.left.regions


async def test_notifications_come_after_their_data_and_in_order(pair: EnginePair) -> None:
    there, remote = await pair.region("there", 4096)
    here = pair.left.allocate("here", 4096)
    notes = pair.right.notifications("landed")
    for number in range(100):
        memoryview(here)[number] = number
        pair.left.write(here[number : number + 1], remote[number : number + 1], notify=("landed", bytes([number])))
    for number in range(100):
        note = await anext(notes)
        assert note.payload == bytes([number])
        assert note.peer is pair.back
        assert memoryview(there)[number] == number
    long = bytes(range(256)) * 200
    await pair.left.notify(pair.peer, "landed", long)
    assert (await anext(notes)).payload == long


async def test_a_stream_of_layers(pair: EnginePair) -> None:
    async with (
        kv.Pool(pair.right, VIEW, shuffle=1) as target,
        kv.Pool(pair.left, VIEW, access="none", shuffle=2) as source,
        target.reserve(tokens=60) as blocks,
        source.reserve(tokens=60) as mine,
    ):
        values = numpy.random.default_rng(7).integers(0, 1 << 16, (4, 2, 15, 4, 2, 16), dtype=numpy.uint16)
        ours, theirs = (pool.regions[0].numpy("uint16", (4, 2, 32, 4, 2, 16)) for pool in (source, target))
        ours[:, :, mine.ids] = values
        stream = blocks.stream()
        async with source.open_stream(pair.peer, stream.ticket()) as out:
            for layer in (2, 0, 3, 1):
                out.push(layer, mine)
            landed = [layer async for layer in stream]
        assert sorted(landed) == [0, 1, 2, 3]
        assert (theirs[:, :, blocks.ids] == values).all()
        del ours, theirs


async def test_signals_that_the_program_handles(pair: EnginePair) -> None:
    there, remote = await pair.region("there", 4096)
    here = pair.left.allocate("here", 4096)
    memoryview(here)[:] = bytes(range(256)) * 16
    heard = pair.right.notifications("n")
    with interrupted() as signals:
        while signals.n < 50:
            assert await pair.left.write(here, remote, notify=("n", b"")) == 4096
            assert await pair.left.read(here, remote) == 4096
            await anext(heard)
    assert bytes(memoryview(there)) == bytes(range(256)) * 16


# -- memory that comes and goes while links live


async def test_memory_registered_after_the_connection(pair: EnginePair) -> None:
    running = True
    _, steady = await pair.region("steady", 4096)
    source = pair.left.allocate("source", 4096)

    async def traffic() -> int:
        done = 0
        while running:
            done += await pair.left.write(source[0:64], steady[0:64])
        return done

    under_way = asyncio.create_task(traffic())
    for number in range(3):
        late, remote = await pair.region(f"late {number}", 4096)
        ours = pair.left.allocate(f"ours {number}", 4096)
        memoryview(ours)[:] = bytes([number + 1]) * 4096
        await pair.left.write(ours, remote)
        assert bytes(memoryview(late)) == bytes([number + 1]) * 4096
    running = False
    assert await under_way > 0
    assert pair.left.stats().failed == 0, "work was lost when the connection was renewed"


async def test_a_closed_region_is_revoked_at_once_and_forgotten_later(pair: EnginePair) -> None:
    buffer = bytearray(4096)
    region = pair.right.register("lent", buffer, access="read-write")
    remote = await pair.peer.region("lent")
    here = pair.left.allocate("here", 4096)
    await pair.left.write(here, remote)
    await region.aclose()
    with pytest.raises(StaleRegionError):
        pair.left.write(here, remote)
    # Other regions go on, and the memory is free once the transport has released it.
    _, other = await pair.region("other", 4096)
    await pair.left.write(here, other)
    await until(lambda: pair.right.stats().regions == 1)
    buffer.append(1)
    pair.right.register("lent", buffer, access="read-write")
    await pair.left.write(here, (await pair.peer.region("lent"))[0:4096])


# -- what goes wrong


@pytest.mark.parametrize("code", [207001, 503900])
async def test_memory_that_hixl_refuses(pair: EnginePair, simulate: Callable[[str, object], None], code: int) -> None:
    _, remote = await pair.region("there", 64)
    simulate("FAULTS", f"register={code}")
    refused = pair.right.allocate("refused", 64, access="write")
    with pytest.raises(DriverError, match="'refused'.*cannot be used by driver 'hixl'"):
        await pair.peer.region("refused")
    with pytest.raises(DriverError, match="cannot be used") as caught:
        await refused.ready()
    assert caught.value.native == code
    ours = pair.left.allocate("ours", 64)
    with pytest.raises(HixlError) as failed:
        await pair.left.write(ours, remote, timeout=5.0)
    assert not isinstance(failed.value, PeerLostError), "the link is fine, and it is our own memory"
    simulate("FAULTS", "")
    await refused.aclose()
    await ours.aclose()
    await pair.left.write(pair.left.allocate("others", 64), remote)


async def test_a_timeout_costs_the_link_and_the_next_write_works(
    pair: EnginePair, simulate: Callable[[str, object], None]
) -> None:
    there, remote = await pair.region("there", 4096)
    here = pair.left.allocate("here", 4096)
    await pair.left.write(here, remote)
    simulate("FAULTS", "hang@1")
    memoryview(here)[:] = b"x" * 4096
    transfer = pair.left.write(here, remote, timeout=0.1)
    with pytest.raises(TransferTimeoutError, match="timeout"):
        await transfer
    await transfer.drained()
    simulate("FAULTS", "")
    assert pair.peer.state is PeerState.UP
    await pair.left.write(here, remote)
    assert bytes(memoryview(there)) == b"x" * 4096
    assert pair.left.stats().pinned == 0


@pytest.mark.parametrize("drivers", ["comm"], indirect=True)
async def test_a_timeout_passes_while_hixl_stays_in_a_call(
    pair: EnginePair, simulate: Callable[[str, object], None]
) -> None:
    """The wait ends, but its memory is held until HIXL has returned, and the link goes on after it."""
    there, remote = await pair.region("there", 4096)
    here = pair.left.allocate("here", 4096)
    await pair.left.write(here, remote)
    simulate("FAULTS", "stall@1=60")
    memoryview(here)[:] = b"x" * 4096
    transfer = pair.left.write(here, remote, timeout=0.05)
    with pytest.raises(TransferTimeoutError, match="timeout"):
        await transfer
    assert pair.left.stats().pinned == 1
    simulate("FAULTS", "")
    await transfer.drained()
    await pair.left.write(here, remote)
    assert bytes(memoryview(there)) == b"x" * 4096


@pytest.mark.parametrize("drivers", ["comm"], indirect=True)
async def test_a_listener_that_never_answers_delays_no_other(drivers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drivers = {"hixl": {**drivers["hixl"], "connect_timeout_ms": 50}}
    async with Engine("127.0.0.1:0", drivers=drivers) as there, Engine(drivers=drivers) as here:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"127.0.0.1:{mute.getsockname()[1]}".encode().ljust(64, b"\0")
            monkeypatch.setattr(engine_links, "binary_text", lambda metadata: binary_text(metadata[:-64] + address))
            with pytest.raises(ConnectError, match="did not complete the connection in time"):
                await here.connect(there.address, timeout=0.3)
            await asyncio.gather(here.aclose(), there.aclose())  # the loop's exception handler is not called


STUCK = """
import asyncio, ctypes, sys
from hixl_async import Engine

async def main(drivers, library):
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: print(context["message"]))
    there = await Engine("127.0.0.1:0", drivers=drivers, close_timeout=0.1).open()
    here = await Engine(drivers=drivers, close_timeout=0.1).open()
    region, mine = there.allocate("there", 64, access="write"), here.allocate("here", 64)
    remote = await (await here.connect(there.address)).region("there")
    await here.write(mine, remote)
    library.hixlsim_set(b"FAULTS", b"stall@1=3600")
    here.write(mine, remote)
    await asyncio.sleep(0.05)
    await here.aclose()
    await there.aclose()
    print("closed")

root = sys.argv[1]
library = ctypes.CDLL(root + "/lib64/libcann_hixl.so")
asyncio.run(main({"hixl": {"library": root, "backend": "comm"}}, library))
"""


@pytest.mark.slow
def test_an_engine_closes_while_hixl_stays_in_a_call(root: Path) -> None:
    """In a process of its own, because it leaks the memory that HIXL may still use, and warns of it."""
    run = subprocess.run([sys.executable, "-c", STUCK, str(root)], capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    assert "drivers still held the memory" in run.stdout
    assert run.stdout.endswith("closed\n")


async def test_hardware_that_fails_costs_one_transfer(
    pair: EnginePair, simulate: Callable[[str, object], None]
) -> None:
    _, remote = await pair.region("there", 4096)
    here = pair.left.allocate("here", 4096)
    await pair.left.write(here, remote)
    simulate("FAULTS", "transfer@1")
    with pytest.raises((PeerLostError, TransferTimeoutError)) as caught:
        await pair.left.write(here, remote, timeout=0.3)
    assert caught.value.retryable
    simulate("FAULTS", "")
    await pair.left.write(here, remote)
    assert pair.peer.state is PeerState.UP


async def test_a_peer_that_dies(drivers: Any) -> None:
    async with (
        peer_process(driver="hixl", options=drivers["hixl"], regions={"there": 4096}) as process,
        Engine("127.0.0.1:0", drivers=drivers, close_timeout=5.0) as engine,
    ):
        peer = await engine.connect(process.address)
        remote = await peer.region("there")
        here = engine.allocate("here", 4096, access="read")
        await engine.write(here, remote)
        process.kill()
        with pytest.raises(PeerLostError):
            while True:
                await engine.write(here, remote, timeout=2.0)
        await engine.drained(here)
        await until(lambda: peer.state is PeerState.DOWN)


async def test_a_peer_that_leaves_and_comes_back(drivers: Any) -> None:
    async with Engine("127.0.0.1:0", name="stays", drivers=drivers) as stays:
        region = stays.allocate("there", 64, access="write")
        for number in range(3):
            async with Engine(name="comes", drivers=drivers) as comes:
                here = comes.allocate("here", 64)
                memoryview(here)[:] = bytes([number]) * 64
                peer = await comes.connect(stays.address)
                await comes.write(here, await peer.region("there"))
                assert bytes(memoryview(region)) == bytes([number]) * 64
        await until(lambda: stays.stats().peers == 0)


async def test_peers_of_different_back_ends(root: Path) -> None:
    """Another driver takes over if there is one; otherwise the error names both back-ends."""

    def using(backend: str, *more: str) -> dict[str, Any]:
        return {"hixl": {"library": str(root), "backend": backend}, **{name: {} for name in more}}

    async with (
        Engine("127.0.0.1:0", name="right", drivers=using("cs", "shm")) as right,
        Engine(name="left", drivers=using("comm")) as left,
        Engine(name="versatile", drivers=using("fab", "shm")) as versatile,
    ):
        with pytest.raises(ConnectError, match="back-end is (comm here and cs|cs here and comm) at the peer"):
            await left.connect(right.address)
        peer = await versatile.connect(right.address)
        assert peer.drivers == ("shm",)
        region = right.allocate("there", 8, access="write")
        await versatile.write(b"12345678", await peer.region("there"))
        assert bytes(memoryview(region)) == b"12345678"


# -- options and the library


async def test_a_missing_library(tmp_path: Path) -> None:
    with pytest.raises(DriverLoadError, match=r"libcann_hixl\.so cannot be loaded; install CANN") as caught:
        await Engine(drivers={"hixl": {"library": str(tmp_path)}}).open()
    assert str(tmp_path / "lib64") in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hixl_ip": "everywhere"}, "hixl_ip"),
        ({"LocalCommRes": {"version": 1.3}}, "LocalCommRes=.*version"),
    ],
)
async def test_options_that_the_driver_refuses(root: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        await Engine(drivers={"hixl": {"library": str(root), **options}}).open()


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        ({"RdmaTrafficClass": 3}, ""),
        ({"GlobalResourceConfig": {"comm_resource_config.qos": 8}}, ""),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_options_that_hixl_refuses(
    root: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], unknown: str
) -> None:
    with pytest.raises(InvalidArgumentError, match="options must be known to HIXL"):
        await Engine(drivers={"hixl": {"library": str(root), **options}}).open()
    warned = [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()]
    assert len(warned) == bool(unknown)
    assert all(unknown in line for line in warned)


async def test_an_option_of_a_later_hixl(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIXLSIM_OPTIONS", "NextOption=1")
    async with Engine(drivers={"hixl": {"library": str(root), "NextOption": True}}):
        pass
    warned = [record for record in caplog.records if "NextOption" in record.getMessage()]
    assert [record.levelname for record in warned] == ["WARNING"]


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"LocalCommRes": {"version": "1.3"}, "AutoConnect": False}, "cs, by LocalCommRes of version 1.3"),
        ({"GlobalResourceConfig": {"comm_resource_config.protocol_desc": ("roce:device",)}}, "cs, by comm_resource_config"),
        ({"EnableUseFabricMem": True, "GlobalResourceConfig": MappingProxyType({"fabric_memory": {"task_stream_num": 1}})},
         "fab, by EnableUseFabricMem=1"),
        ({"EnableUseFabricMem": 0, "RdmaTrafficClass": numpy.int64(128), "device": 1}, "comm, by "),
    ],
)  # fmt: skip
async def test_options_may_be_mappings_numbers_and_booleans(root: Path, options: dict[str, Any], backend: str) -> None:
    async with Engine(drivers={"hixl": {"library": root, **options}}) as engine:
        assert engine.driver_facts()["hixl"]["back-end"].startswith(backend)


async def test_a_path_within_a_mapping(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "ressources \u00e9"
    path.write_text('{"version": "1.3"}')
    async with Engine(
        drivers={"hixl": {"library": root, "GlobalResourceConfig": {"local_comm_res_path": path}}}
    ) as engine:
        assert engine.driver_facts()["hixl"]["back-end"].startswith("cs, by local_comm_res_path")


async def test_an_engine_that_cannot_be_initialized(drivers: Any, simulate: Callable[[str, object], None]) -> None:
    simulate("FAULTS", "init=507899")
    engine = Engine(drivers=drivers)
    with pytest.raises(DriverError, match="start of driver 'hixl'.*507899"):
        await engine.open()
    assert engine.driver_facts()["hixl"]["version"].endswith("simulated")
