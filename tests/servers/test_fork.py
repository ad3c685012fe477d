"""fork(): the child's calls are refused, the parent is not disturbed, and neither keeps what belongs to the other."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

import hixl_async as hx
from hixl_async.testing import PeerProcess, peer_process, until

#: More than is copied inside a call, so that transfers are in flight when the process forks.
LARGE = 32 << 20


class Child:
    """A forked child that does one thing, reports the result, and then waits to be released."""

    def __init__(self, action: Callable[[], object]) -> None:
        reader, told = os.pipe()
        waiting, self._leash = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and newer warn of what these tests are about.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            # Whatever happens, the child must never get back into pytest.
            try:
                os.close(self._leash)
                try:
                    text = f"{action()}"
                except BaseException:
                    text = traceback.format_exc()
                os.write(told, text.encode())
                os.close(told)
                os.read(waiting, 1)
            finally:
                os._exit(0)
        os.close(told)
        os.close(waiting)
        self._reader = reader

    async def said(self) -> str:
        """Return the result."""
        parts = []
        while part := await asyncio.to_thread(os.read, self._reader, 1 << 16):
            parts.append(part)
        os.close(self._reader)
        return b"".join(parts).decode()

    def leave(self) -> None:
        """Let the child end."""
        os.close(self._leash)
        assert os.waitpid(self.pid, 0)[1] == 0


@contextlib.asynccontextmanager
async def child(action: Callable[[], object]) -> AsyncIterator[Child]:
    forked = Child(action)
    try:
        yield forked
    finally:
        forked.leave()


@contextlib.asynccontextmanager
async def connected(size: int = 4096) -> AsyncIterator[tuple[hx.Engine, PeerProcess, hx.Peer, hx.RemoteRegion]]:
    """An engine that is connected to another process with a region ``kv``."""
    async with peer_process(regions={"kv": size}) as process, hx.Engine("127.0.0.1:0", name="parent") as engine:
        peer = await engine.connect(process.address)
        yield engine, process, peer, await peer.region("kv")


def outcome(call: Callable[[], object]) -> str:
    """The type of error that a call of the child ends with, or what it returned."""

    async def awaited(result: Awaitable[object]) -> object:
        return await result

    try:
        result = call()
        if inspect.isawaitable(result):
            result = asyncio.run(awaited(result))
    except hx.HixlError as error:
        told = "in each process" in str(error)
        return type(error).__name__ + ("" if told else f" without a remedy: {error}")
    return f"{result!r}"


# ---- the child's calls are refused -----------------------------------------------------------------------------------


async def test_calls_of_the_child_raise_with_the_remedy() -> None:
    async with connected() as (engine, process, peer, remote):
        local = engine.allocate("local", 4096)
        batch = hx.Batch("write", local, remote, [(0, 0, 8)])
        group = hx.kv.Group.attention(2, kv_heads=1, head_dim=8, dtype="float16")
        pool = hx.kv.Pool(engine, hx.kv.View.ordered(group, blocks=4, block_tokens=4))
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: engine.write(local[:8], remote[:8]),
            "write a buffer": lambda: engine.write(b"x" * 8, remote[:8]),
            "read": lambda: engine.read(local[:8], remote[:8]),
            "submit": lambda: engine.submit(batch),
            "notify": lambda: engine.notify(peer, "topic", b"payload"),
            "notifications": lambda: engine.notifications("topic"),
            "allocate": lambda: engine.allocate("new", 4096),
            "register": lambda: engine.register("new", bytearray(4096)),
            "connect": lambda: engine.connect(process.address),
            "accepted": engine.accepted,
            "serve": lambda: engine.serve("service", lambda peer, body: body),
            "group": engine.group,
            "region": lambda: peer.region("other", timeout=1),
            "request": lambda: peer.request("service", {}, timeout=1),
            "post": lambda: peer.post("service", {}),
            "close a peer": peer.aclose,
            "close a region": local.aclose,
            "reserve": lambda: pool.reserve(tokens=1).__aenter__(),
        }
        async with child(lambda: {name: outcome(call) for name, call in calls.items()}) as forked:
            said = await forked.said()
        assert said == str(dict.fromkeys(calls, "EngineForkedError"))
        await pool.aclose()


async def test_the_child_may_ask_about_and_close_what_it_cannot_use() -> None:
    """Cleaning up in the child, as `async with` and atexit handlers do, is allowed, and does nothing to the parent."""
    async with connected() as (engine, process, peer, remote):
        local = engine.allocate("local", 4096)
        local.numpy()[:] = 7

        def ask() -> object:
            asyncio.run(engine.aclose())
            return engine.forked, bytes(local[:2]), repr(engine)[:7], repr(peer)[:5], engine.stats().transfers

        async with child(ask) as forked:
            assert await forked.said() == str((True, b"\7\7", "<Engine", "<Peer", 0))
        assert not engine.forked
        assert peer.state is hx.PeerState.UP
        await engine.write(local[:4], remote[:4])
        assert await process.peek("kv", 0, 5) == b"\7\7\7\7\0"


# ---- the parent is not disturbed -------------------------------------------------------------------------------------


async def test_transfers_of_the_parent_go_on() -> None:
    async with connected(LARGE) as (engine, _, _, remote):
        local = engine.allocate("local", LARGE)
        local.numpy("uint32")[:] = range(LARGE // 4)
        transfers = [engine.write(local[: LARGE // 2], remote[: LARGE // 2]) for _ in range(4)]
        rest = engine.write(local[LARGE // 2 :], remote[LARGE // 2 :], notify=("done", b""))
        async with child(lambda: outcome(lambda: engine.write(local[:8], remote[:8]))) as forked:
            assert await forked.said() == "EngineForkedError"
            assert await asyncio.gather(*transfers, rest) == [LARGE // 2] * 5
        back = bytearray(LARGE)
        await engine.read(back, remote)
        assert back == bytes(local)


async def test_the_end_of_the_child_closes_nothing_of_the_parent() -> None:
    async with connected() as (engine, process, peer, remote):
        for number in range(3):
            async with child(lambda: "here") as forked:
                assert await forked.said() == "here"
            await engine.write(bytes([number]) * 8, remote[:8])
            assert await process.peek("kv", 0, 8) == bytes([number]) * 8
            await peer.request("hixl.ping", {})
        assert (await process.stats())["peers"] == 1


def test_a_child_that_ends_as_any_program_does(tmp_path: Path) -> None:
    """Not by os._exit: with atexit handlers, collected objects, and a loop that is closed."""
    result = subprocess.run(
        [sys.executable, "-X", "dev", str(Path(__file__).with_name("fork_and_end.py"))],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "child: EngineForkedError",
        "child: ends",
        "parent: goes on",
        "parent: closed",
    ]


# ---- neither keeps what belongs to the other -------------------------------------------------------------------------


async def test_the_child_holds_no_port_and_no_connection() -> None:
    """The parent closes; its address is free again and the peer is rid of it, although the child lives."""
    async with connected() as (engine, process, _, _), child(lambda: "here") as forked:
        assert await forked.said() == "here"
        address = engine.address
        await engine.aclose()
        while (await process.stats())["peers"]:
            await asyncio.sleep(0.01)
        async with hx.Engine(address, name="successor") as successor:
            assert (await successor.connect(process.address)).name == "child"


async def test_the_child_keeps_no_descriptor_of_the_engine() -> None:
    """Sockets, pipes, handles of processes and of memory: whatever the engine opened is closed there."""

    def files() -> set[str]:
        links = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        return {link for link in links if "/proc/" not in link}

    async with peer_process(regions={"kv": 4096}) as process:
        before = files()
        async with hx.Engine("127.0.0.1:0", name="parent") as engine:
            await (await engine.connect(process.address)).region("kv")
            engine.allocate("local", 4096, access="read-write")
            opened = files() - before
            assert len(opened) > 5
            async with child(lambda: sorted(files() & opened)) as forked:
                assert await forked.said() == "[]"


async def test_the_child_maps_no_memory_of_a_peer() -> None:
    """It could write there without permission; its own copies of the parent's regions are not covered."""
    async with connected(1 << 20) as (engine, process, _, remote):
        await engine.write(b"12345678", remote[:8])
        theirs = mapped(f"/proc/{process.pid}/maps")
        assert theirs & mapped("/proc/self/maps"), "the parent has mapped it"
        async with child(lambda: sorted(theirs & mapped("/proc/self/maps"))) as forked:
            assert await forked.said() == "[]"


def mapped(path: str) -> set[str]:
    """Inodes of the memfds that a process maps."""
    return {line.split()[4] for line in Path(path).read_text().splitlines() if "/memfd:hixl_async:region" in line}


async def test_the_child_can_open_an_engine_of_its_own() -> None:
    async with connected() as (engine, process, _, remote):

        async def work() -> str:
            async with hx.Engine("127.0.0.1:0", name="of the child") as own:
                peer = await own.connect(process.address)
                back = bytearray(8)
                region = await peer.region("kv")
                await own.write(b"children", region[:8])
                await own.read(back, region[:8])
                window = own.allocate("window", 4096, access="write")
                return f"{back.decode()} {len(window)} {own.incarnation != engine.incarnation}"

        async with child(lambda: asyncio.run(work())) as forked:
            assert await forked.said() == "children 4096 True"
        assert await process.peek("kv", 0, 8) == b"children"
        await engine.write(b"parents!", remote[:8])
        assert await process.peek("kv", 0, 8) == b"parents!"


async def test_parent_and_child_are_peers_like_any_others() -> None:
    async with hx.Engine("127.0.0.1:0", name="parent") as engine:
        region = engine.allocate("kv", 4096, access="read-write")
        address = engine.address

        async def work() -> str:
            async with hx.Engine(name="of the child") as own:
                remote = await (await own.connect(address)).region("kv")
                return str(await own.write(b"from the child", remote[:14]))

        async with child(lambda: asyncio.run(work())) as forked:
            assert await forked.said() == "14"
        assert bytes(region[:14]) == b"from the child"
        await until(lambda: not engine.peers)


# ---- multiprocessing -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _tracker() -> None:
    """Start the helper process of multiprocessing, which stays, before a test counts what is there."""
    resource_tracker.ensure_running()


#: Objects that children made by fork find in their copy of this module.
inherited: list[Any] = []


def use_inherited(results: Any) -> None:
    engine, remote = inherited
    results.send(outcome(lambda: engine.write(b"12345678", remote[:8])))


async def _write_to(address: str) -> str:
    async with hx.Engine(name="spawned") as engine:
        remote = await (await engine.connect(address)).region("kv")
        return str(await engine.write(b"spawned", remote[:7]))


def write_to(results: Any, address: str) -> None:
    results.send(asyncio.run(_write_to(address)))


async def run(context: Any, target: Callable[..., None], *arguments: Any) -> str:
    """Return what a multiprocessing child sent."""
    ours, theirs = context.Pipe()
    with ours, theirs:
        process = context.Process(target=target, args=(theirs, *arguments))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        answer = str(await asyncio.to_thread(ours.recv))
        await asyncio.to_thread(process.join)
        assert process.exitcode == 0
        process.close()
        return answer


async def test_multiprocessing_fork() -> None:
    async with connected() as (engine, process, _, remote):
        inherited[:] = [engine, remote]
        try:
            assert await run(multiprocessing.get_context("fork"), use_inherited) == "EngineForkedError"
        finally:
            inherited.clear()
        await engine.write(b"12345678", remote[:8])
        assert await process.peek("kv", 0, 8) == b"12345678"


async def test_multiprocessing_spawn() -> None:
    async with hx.Engine("127.0.0.1:0", name="parent") as engine:
        region = engine.allocate("kv", 4096, access="write")
        assert await run(multiprocessing.get_context("spawn"), write_to, engine.address) == "7"
        assert bytes(region[:7]) == b"spawned"
        await until(lambda: not engine.peers)


async def test_nothing_can_be_sent_to_another_process_by_pickle() -> None:
    async with connected() as (engine, _, peer, remote):
        local = engine.allocate("local", 4096)
        things = {
            "engine": engine,
            "peer": peer,
            "region": local,
            "range": local[:8],
            "remote region": remote,
            "remote range": remote[:8],
            "batch": hx.Batch("write", local, remote, [(0, 0, 8)]),
            "transfer": engine.write(local[:8], remote[:8]),
        }
        pickled = []
        for name, thing in things.items():
            with contextlib.suppress(TypeError, pickle.PicklingError, AttributeError):
                pickle.dumps(thing)
                pickled.append(name)
        assert pickled == []


@pytest.mark.parametrize("listens", [True, False])
def test_fork_outside_of_the_loop(listens: bool, runner: asyncio.Runner) -> None:
    """As pre-forking servers do it: the engine is open, and its loop stands still."""
    engine = runner.run(hx.Engine("127.0.0.1:0" if listens else None, name="parent").open())
    forked = Child(lambda: outcome(lambda: engine.allocate("new", 4096)))
    assert runner.run(forked.said()) == "EngineForkedError"
    forked.leave()

    async def go_on() -> None:
        async with hx.Engine("127.0.0.1:0", name="other") as other:
            region = other.allocate("kv", 4096, access="write")
            remote = await (await engine.connect(other.address)).region("kv")
            await engine.write(b"goes on", remote[:7])
            assert bytes(region[:7]) == b"goes on"
        await engine.aclose()

    runner.run(go_on())
    if listens:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", 1)) != 0
