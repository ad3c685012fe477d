"""Existing memory as a region: what may be registered, and that it is not released too early."""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import mmap
import os
import shutil
import subprocess
import sys
import weakref
from subprocess import PIPE
from typing import Any

import numpy
import pytest
from puppet import puppet

from hixl_async import AccessError, BufferTypeError, ClosedError, Engine, HixlError, InvalidArgumentError, RangeError
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty, until


class Exporter:
    """Memory that is accessible by DLPack only."""

    def __init__(self, values: numpy.ndarray[Any, Any]) -> None:
        self._values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


class Array(numpy.ndarray):  # type: ignore[type-arg]
    """A numpy array that can be watched."""


BUFFERS = {
    "bytearray": lambda: bytearray(range(64)),
    "memoryview": lambda: memoryview(bytearray(range(64)))[16:48],
    "array": lambda: array.array("Q", range(8)),
    "ctypes": lambda: (ctypes.c_uint32 * 16)(*range(16)),
    "mmap": lambda: mmap.mmap(-1, 4096),
    "numpy": lambda: numpy.arange(16, dtype="float32").reshape(4, 4),
    "numpy, a part": lambda: numpy.arange(64, dtype="uint8")[8:24],
    "numpy, no buffer format": lambda: numpy.zeros(4, "datetime64[s]").view("int64"),
    "dlpack": lambda: Exporter(numpy.arange(16, dtype="float32")),
}


def raw(buffer: Any) -> bytes:
    return bytes(memoryview(buffer._values if isinstance(buffer, Exporter) else buffer))


@pytest.mark.parametrize("kind", BUFFERS)
async def test_peers_reach_it_where_it_lies(pair: EnginePair, kind: str) -> None:
    buffer = BUFFERS[kind]()
    region = pair.right.register("weights", buffer, access="read-write")
    remote = await pair.peer.region("weights")
    assert remote.size == region.size == len(raw(buffer))
    back = bytearray(remote.size)
    await pair.left.read(back, remote)
    assert back == raw(buffer)
    await pair.left.write(bytes(reversed(back)), remote)
    assert raw(buffer) == bytes(reversed(back))


IN_ITS_OWN_NAMESPACE = """
import asyncio, os, sys
from hixl_async import Engine

async def main():
    async with Engine() as engine:
        memory = bytearray(b"as process %d" % os.getpid())
        engine.register("weights", memory, access="read-write")
        await engine.connect(sys.argv[1])
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        print(memory.decode())

asyncio.run(main())
"""


@pytest.fixture
def unshare() -> tuple[str, ...]:
    """The beginning of a command that runs in a pid namespace of its own."""
    command = ("unshare", "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("makes a pid namespace, which is not permitted here")
    return command


async def test_peers_in_a_child_pid_namespace(engine: Engine, unshare: tuple[str, ...]) -> None:
    """The peer has another number there than the kernel has for it here."""
    child = await asyncio.create_subprocess_exec(
        *unshare, sys.executable, "-c", IN_ITS_OWN_NAMESPACE, engine.address, stdin=PIPE, stdout=PIPE
    )
    try:
        await until(lambda: engine.peers)
        remote = await engine.peers[0].region("weights")
        local = bytearray(remote.size)
        await engine.read(local, remote)
        assert local == b"as process 1"
        await engine.write(b"AS", remote[:2])
    finally:
        output, _ = await child.communicate(b"\n")
    assert output == b"AS process 1\n"


@pytest.mark.parametrize(
    "buffer", [b"constant", memoryview(bytearray(8)).toreadonly(), Exporter(numpy.zeros(8, "int8"))]
)
async def test_read_only_memory_may_only_be_read(pair: EnginePair, buffer: Any) -> None:
    if isinstance(buffer, Exporter):
        buffer._values.flags.writeable = False
    region = pair.right.register("weights", buffer, access="read")
    remote = await pair.peer.region("weights")
    await pair.left.read(bytearray(8), remote)
    with pytest.raises(AccessError):
        pair.left.write(b"12345678", remote)
    target = pair.left.allocate("target", 8, access="read")
    with pytest.raises(BufferTypeError, match="read-only"):
        pair.right.read(region, await pair.back.region("target"))
    await pair.right.aclose()
    for access in ("write", "read-write"):
        async with Engine() as other:
            with pytest.raises(BufferTypeError, match="read-only"):
                other.register("weights", buffer, access=access)
            assert other.regions == {}
    del target


@pytest.mark.torch
async def test_torch_tensors(pair: EnginePair) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(16, dtype=torch.bfloat16).reshape(4, 4)
    region = pair.right.register("weights", tensor, access="read-write")
    remote = await pair.peer.region("weights")
    back = torch.empty(16, dtype=torch.bfloat16)
    await pair.left.read(back, remote)
    assert torch.equal(back, tensor.flatten())
    await pair.left.write(back + 1, remote)
    assert torch.equal(tensor.flatten(), back + 1)
    assert torch.equal(pair.left.allocate("view", 32).torch(torch.bfloat16, (4, 4)), torch.zeros(4, 4).bfloat16())
    # Another storage in the same tensor object: the registered one stays what it is.
    tensor.data = torch.zeros(4, 4, dtype=torch.bfloat16)
    gc.collect()
    await pair.left.read(back, remote)
    assert back[5] == 6
    del region


@pytest.mark.torch
async def test_torch_views_that_do_not_fit(engine: Engine) -> None:
    torch = pytest.importorskip("torch")
    region = engine.allocate("kv", 63)
    for dtype in (True, False, 3, "float32", numpy.zeros(3), torch.float32):
        with pytest.raises(InvalidArgumentError, match="dtype"):
            region.torch(dtype)
    for shape in ("x", (3,), (1.5,), [[1]]):
        with pytest.raises(InvalidArgumentError, match="shape"):
            region.torch(torch.uint8, shape)


@pytest.mark.torch
@pytest.mark.parametrize("wrong", ["transposed", "meta", "conj", "neg"])
async def test_unusable_torch_tensors(pair: EnginePair, wrong: str) -> None:
    torch = pytest.importorskip("torch")
    complex = torch.zeros(2, 3, dtype=torch.complex64)
    tensor = {
        "transposed": lambda: torch.zeros(2, 3).T,
        "meta": lambda: torch.zeros(2, 3, device="meta"),
        "conj": lambda: complex.conj(),
        "neg": lambda: torch._neg_view(torch.zeros(2, 3)),
    }[wrong]()
    says = {"conj": "resolve_conj", "neg": "resolve_neg"}.get(wrong, "contiguous|meta")
    with pytest.raises(BufferTypeError, match=says):
        pair.left.register("weights", tensor)
    _, remote = await pair.region("kv", 4096)
    for call in (pair.left.read, pair.left.write):
        with pytest.raises(BufferTypeError, match=says):
            call(tensor, remote[: tensor.nbytes])


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (numpy.zeros((4, 4))[:, 1], BufferTypeError),
        (numpy.zeros(0), RangeError),
        (b"", RangeError),
        (7, BufferTypeError),
        ("text", BufferTypeError),
        (None, BufferTypeError),
        ([1, 2, 3], BufferTypeError),
        (Exporter(numpy.zeros((4, 4))[:, 1]), BufferTypeError),
        (Exporter(numpy.zeros(0)), RangeError),
    ],
)
async def test_objects_that_cannot_be_registered(engine: Engine, buffer: Any, error: type[HixlError]) -> None:
    with pytest.raises(error):
        engine.register("weights", buffer)
    assert engine.regions == {}
    assert engine.stats().regions == 0
    engine.register("weights", bytearray(1))


async def test_a_region_cannot_be_registered(engine: Engine) -> None:
    region = engine.allocate("kv", 8)
    for wrong in (region, region[0:4]):
        with pytest.raises(InvalidArgumentError, match="region already"):
            engine.register("again", wrong)


async def test_one_buffer_may_be_registered_twice(pair: EnginePair) -> None:
    """Each registration is a region of its own; the memory is released with the last one."""
    buffer = bytearray(8)
    one = pair.right.register("one", buffer, access="write")
    two = pair.right.register("two", buffer, access="read-write")
    remote_one, remote_two = await pair.peer.region("one"), await pair.peer.region("two")
    await pair.left.write(b"11111111", remote_one)
    await one.aclose()
    await one.aclose()
    await pair.left.write(b"22222222", remote_two)
    assert buffer == b"22222222"
    with pytest.raises(HixlError):
        pair.left.write(b"33333333", remote_one)
    with pytest.raises(BufferError):
        buffer.append(1)
    await two.aclose()
    buffer.append(1)
    assert buffer == b"22222222\1"


async def test_registering_again_and_again_keeps_nothing(pair: EnginePair) -> None:
    buffer = bytearray(4096)
    for _ in range(200):
        region = pair.right.register("weights", buffer, access="read")
        await region.aclose()
    assert pair.right.stats().regions == 0
    assert pair.right.driver_stats()["shm"]["memories"] == 0


async def test_overlapping_registrations(pair: EnginePair) -> None:
    buffer = bytearray(16)
    pair.right.register("low", memoryview(buffer)[:12], access="write")
    pair.right.register("high", memoryview(buffer)[4:], access="write")
    await pair.left.write(b"a" * 12, await pair.peer.region("low"))
    await pair.left.write(b"b" * 12, await pair.peer.region("high"))
    assert buffer == b"aaaa" + b"b" * 12


async def test_the_object_lives_as_long_as_a_peer_may_use_it() -> None:
    plan = FaultPlan(seed=1).late(verb="write")
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.2) as pair:
        buffer = numpy.zeros(4096, "uint8").view(Array)
        alive = weakref.ref(buffer)
        region = pair.right.register("weights", buffer, access="write")
        remote = await pair.peer.region("weights")
        transfer = pair.left.write(b"x" * 4096, remote)
        del buffer
        await region.aclose()
        gc.collect()
        assert alive() is not None, "a transfer of the peer still lands there"
        plan.release()
        await transfer
        await region.aclose()
        await until(lambda: not gc.collect() and alive() is None)


async def test_a_dropped_region_object_keeps_its_memory_registered(pair: EnginePair) -> None:
    buffer = bytearray(8)
    pair.right.register("weights", buffer, access="write")
    gc.collect()
    await pair.left.write(b"12345678", await pair.peer.region("weights"))
    assert buffer == b"12345678"


async def test_memory_of_others_is_leaked_rather_than_freed(loop_errors: list[dict[str, Any]]) -> None:
    """The engine ends; a user whose death is not confirmed could still write, and must not hit what is allocated next."""
    buffer = numpy.zeros(4096, "uint8").view(Array)
    alive = weakref.ref(buffer)
    readable = numpy.zeros(4096, "uint8").view(Array)
    freed = weakref.ref(readable)
    async with Engine("127.0.0.1:0", name="victim", close_timeout=0.2) as engine:
        engine.register("written", buffer, access="write")
        engine.register("read", readable, access="read")
        async with puppet(engine.address) as actor:
            assert (await actor.get("written")).kind == "region.metadata"
            assert (await actor.get("read")).kind == "region.metadata"
            del buffer, readable
            await actor.connection.aclose()
            await until(lambda: not engine.peers)
            await engine.aclose()
    gc.collect()
    assert alive() is not None
    assert freed() is None
    assert "is leaked" in loop_errors.pop()["message"]
    _forget_leaks(engine)


def _forget_leaks(engine: Engine) -> None:
    """Forget the leaked memory, because the puppet is this process and writes no more, so that the balance sheet is empty."""
    from hixl_async.core import memory
    from hixl_async.engine import regions

    for region in regions._leaked:
        memory.unpin(region)
    regions._leaked.clear()
    assert engine.stats().regions == 0


async def test_use_of_a_closed_registration(pair: EnginePair) -> None:
    _, remote = await pair.region("kv", 8)
    region = pair.left.register("mine", bytearray(8))
    await pair.left.write(region, remote)
    await region.aclose()
    with pytest.raises(ClosedError, match="'mine'"):
        pair.left.write(region, remote)
    with pytest.raises(ClosedError):
        pair.left.write(region[0:8], remote)


def test_nothing_of_torch_or_numpy_is_imported() -> None:
    from .test_lifecycle import run_python

    done = run_python("""
        import asyncio, sys
        from hixl_async import Engine

        async def main():
            async with Engine() as engine:
                engine.register("weights", bytearray(8))
                try:
                    engine.register("other", 7)
                except TypeError:
                    pass

        asyncio.run(main())
        print([name for name in ("numpy", "torch", "hypothesis") if name in sys.modules])
    """)
    assert done.stdout == "[]\n", done.stderr
    assert os.path.exists("/proc/self")
