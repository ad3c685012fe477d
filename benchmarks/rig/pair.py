"""The process pair: this process starts the transfers, and a second one owns the region that they go to.

Both run the same kind of event loop.  Beside their engines they share two eventfds, which are the floor of every wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeVar

from hixl_async import Engine, Peer, Region, RemoteRegion

__all__ = ["Bell", "Pair", "open_pair", "run_loop"]

T = TypeVar("T")

#: The names of the target's region, and of the word in this process that the target writes back to.
TARGET, BACK = "target", "back"
#: Topics of a round trip.
PING, PONG = "ping", "pong"


def run_loop(main: Coroutine[Any, Any, T], loop: str) -> T:
    """Run a coroutine on a new event loop, ``"asyncio"`` or ``"uvloop"``."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


class Bell:
    """An eventfd that resumes a coroutine through add_reader: the least cost of a wake-up by another process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._loop.add_reader(fd, self._on_ring)

    def _on_ring(self) -> None:
        os.eventfd_read(self._fd)
        if self._waiter is not None:
            self._waiter.set_result(None)
            self._waiter = None

    def wait(self) -> asyncio.Future[None]:
        """Return a future for the next ring after this call."""
        self._waiter = self._loop.create_future()
        return self._waiter

    def close(self) -> None:
        """Stop listening."""
        self._loop.remove_reader(self._fd)


@dataclass(frozen=True)
class Pair:
    """This process's side."""

    engine: Engine
    #: The target's engine.
    peer: Peer
    #: This process's region, as large as the target's.
    local: Region
    #: The target's region.
    remote: RemoteRegion
    #: The address at which this process has the pages of `remote` mapped.
    mapped: int
    #: The bell that the target rings; a coroutine of the target waits for the other one.
    bell: Bell
    their_bell: int

    @property
    def driver(self) -> str:
        """The name of the driver that carries the transfers."""
        return self.peer.route(self.remote).partition(":")[0]

    async def ask(self, service: str, *, timeout: float = 60.0, **body: Any) -> dict[str, Any]:
        """Request a service of the target; see `_Target`."""
        return await self.peer.request(service, body, timeout=timeout)


@contextlib.asynccontextmanager
async def open_pair(loop: str, size: int, pin: tuple[int, int] | None = None) -> AsyncIterator[Pair]:
    """Open a pair with regions of `size` bytes.

    :param pin: a CPU for each process and all of its threads; default: the kernel chooses.
    """
    _raise_descriptor_limit()
    if pin is not None:
        os.sched_setaffinity(0, {pin[0]})
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_target, args=(theirs, loop, size, pin[1] if pin else None), daemon=True)
    process.start()
    theirs.close()
    bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
    try:
        for fd in bells:
            send_handle(ours, fd, process.pid or 0)
        try:
            address = ours.recv()
        except EOFError:
            raise RuntimeError("the target process ended before it listened; its own message is above") from None
        async with Engine("127.0.0.1:0", name="initiator") as engine:
            engine.allocate(BACK, 4096, access="write")
            local = engine.allocate("local", size)
            peer = await engine.connect(address)
            remote = await peer.region(TARGET)
            # Every page is touched now, in both directions, so that no later figure includes the first touch.
            await engine.read(local[:], remote[:])
            await engine.write(local[:], remote[:])
            token = secrets.token_bytes(16)
            await engine.write(token, remote[:16])
            mapped = _find_mapping(token, local, remote)
            bell = Bell(bells[1])
            yield Pair(engine, peer, local, remote, mapped, bell, bells[0])
            bell.close()
    finally:
        ours.close()  # this tells the target to leave
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
        for fd in bells:
            os.close(fd)


def _find_mapping(token: bytes, local: Region, remote: RemoteRegion) -> int:
    """Return the address of the peer's region: that of the mapping of its size which begins with the token just written."""
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            start, end = (int(word, 16) for word in span.split("-"))
            if rights.startswith("rw") and end - start >= len(remote) and start != local.address:
                memory.seek(start)
                if memory.read(len(token)) == token:
                    return start
    raise RuntimeError(f"{remote!r} is not mapped into this process, so there is no memory for a bare copy")


def _raise_descriptor_limit() -> None:
    """Raise the soft limit, because hundreds of connections need more descriptors than the usual 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ---- the other process -----------------------------------------------------------------------------------------------


def _run_target(connection: Connection, loop: str, size: int, cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    _raise_descriptor_limit()
    bells = [recv_handle(connection) for _ in range(2)]
    run_loop(_target(connection, size, bells[0], bells[1]), loop)


async def _target(connection: Connection, size: int, bell: int, their_bell: int) -> None:
    leave = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection.fileno(), leave.set)
    async with Engine("127.0.0.1:0", name="target") as engine:
        engine.allocate(TARGET, size, access="read-write")
        target = _Target(engine)
        floor = asyncio.create_task(_answer_bell(Bell(bell), their_bell))
        connection.send(engine.address)
        await leave.wait()
        floor.cancel()
        await target.aclose()


async def _answer_bell(bell: Bell, their_bell: int) -> None:
    while True:
        await bell.wait()
        os.eventfd_write(their_bell, 1)


class _Target:
    """The services that the initiator can request, one for each method."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._regions = 0
        self._echo: asyncio.Task[None] | None = None
        self._clients: list[Engine] = []
        for service in (self.echo, self.fresh, self.cpu, self.dial, self.hang_up):
            engine.serve(service.__name__, service)

    async def echo(self, peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Answer each notification on PING with a write and one on PONG, from a coroutine that waits for it."""
        back = await peer.region(BACK)
        word = self._engine.allocate("word", 4096)
        notes = self._engine.notifications(PING)

        async def answer() -> None:
            async for _ in notes:
                await self._engine.write(word[:8], back[:8], notify=(PONG, b""))

        self._echo = asyncio.create_task(answer())
        return {}

    async def fresh(self, peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Allocate a region whose pages are untouched."""
        self._regions += 1
        name = f"fresh-{self._regions}"
        self._engine.allocate(name, body["size"], access="read-write")
        return {"name": name}

    async def cpu(self, peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Return the CPU nanoseconds of the target so far, all threads."""
        return {"ns": time.process_time_ns()}

    async def dial(self, peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Connect further engines to the one that asks."""
        for _ in range(body["count"]):
            client = await Engine(None).open()
            self._clients.append(client)
            await client.connect(body["address"])
        return {}

    async def hang_up(self, peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        """Close the engines that `dial` opened."""
        await self.aclose()
        return {}

    async def aclose(self) -> None:
        if self._echo is not None:
            self._echo.cancel()
        clients, self._clients = self._clients, []
        await asyncio.gather(*(client.aclose() for client in clients))
