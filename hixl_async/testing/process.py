"""A peer in a process of its own, which a test can kill, stop and control."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from .. import errors
from ..errors import HixlError
from ..types import AccessLike
from .plan import FaultPlan

__all__ = ["PeerProcess", "PeerProcessError", "peer_process"]

#: The longest line of the command channel, in bytes.
LINE = 1 << 26


class PeerProcessError(Exception):
    """The process ended, or an error other than a `HixlError` was raised there; the message says which."""


class PeerProcess:
    """An engine in another process, with a channel for commands; made by `peer_process`."""

    def __init__(
        self, popen: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        #: The id of the process.
        self.pid = popen.pid
        #: The address at which its engine listens, ``host:port``.
        self.address = ""
        self._popen = popen
        self._reader, self._writer = reader, writer
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next = 1
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._reading = self._loop.create_task(self._read())

    def __repr__(self) -> str:
        return f"<PeerProcess {self.pid} at {self.address or 'nowhere yet'}>"

    # -- commands

    async def run(self, target: str, /, **arguments: Any) -> Any:
        """Call ``function(engine, **arguments)`` in that process.

        :param target: ``"module:function"``, of a function or a coroutine function.
        :param arguments: the JSON-safe arguments of the function.
        :return: the function's result, which must be JSON-safe.
        :raises HixlError: the error that the function raised, with its type.
        :raises PeerProcessError: if the function raised another error, or the process has ended.
        """
        if self._exited.done():
            raise PeerProcessError(f"the process {self.pid} has ended")
        number = self._next
        self._next += 1
        answer = self._calls[number] = self._loop.create_future()
        try:
            self._writer.write(json.dumps({"id": number, "target": target, "arguments": arguments}).encode() + b"\n")
            await self._writer.drain()
            return await answer
        except ConnectionError as error:
            raise PeerProcessError(f"the process {self.pid} is gone: {error}") from error
        finally:
            self._calls.pop(number, None)

    async def _do(self, verb: str, **arguments: Any) -> Any:
        return await self.run(f"hixl_async.testing.child:{verb}", **arguments)

    async def allocate(self, name: str, size: int, *, access: AccessLike = "read-write") -> None:
        """Allocate a region in that process.

        :param name: unique in its engine.
        :param size: bytes.
        :param access: the access of peers: ``"none"``, ``"read"``, ``"write"`` or ``"read-write"``.
        :raises HixlError: the error that the allocation raised there.
        :raises PeerProcessError: if the process has ended.
        """
        await self._do("allocate", name=name, size=size, access=str(access))

    async def peek(self, region: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes of one of its regions.

        :param region: the name of the region.
        :param start: the offset of the first byte.
        :param stop: the offset after the last byte; default: the end of the region.
        :return: the bytes.
        :raises PeerProcessError: if there is no such region, or the process has ended.
        """
        return base64.b64decode(await self._do("peek", region=region, start=start, stop=stop))

    async def poke(self, region: str, data: bytes, start: int = 0) -> None:
        """Store bytes into one of its regions.

        :param region: the name of the region.
        :param data: the bytes.
        :param start: the offset in bytes at which they are stored.
        :raises PeerProcessError: if there is no such region, the bytes do not fit, or the process has ended.
        """
        await self._do("poke", region=region, data=_text(data), start=start)

    async def connect(self, address: str) -> None:
        """Connect its engine to another one.

        :param address: the address at which the other engine listens, ``"host:port"``.
        :raises ConnectError: if no connection could be made.
        :raises PeerProcessError: if the process has ended.
        """
        await self._do("connect", address=address)

    async def write(
        self, peer: str, region: str, data: bytes, start: int = 0, *, notify: tuple[str, bytes] | None = None
    ) -> None:
        """Have its engine write into a region of one of its peers, and wait for the outcome.

        :param peer: the name of the peer.
        :param region: the name of the region.
        :param data: the bytes.
        :param start: the offset in bytes at which they are stored.
        :param notify: the topic and payload of a notification after the data.
        :raises HixlError: the error that the write raised there.
        :raises PeerProcessError: if there is no such peer, or the process has ended.
        """
        note = None if notify is None else [notify[0], _text(notify[1])]
        await self._do("write", peer=peer, region=region, data=_text(data), start=start, notify=note)

    async def read(self, peer: str, region: str, start: int, stop: int) -> bytes:
        """Have its engine read from a region of one of its peers.

        :param peer: the name of the peer.
        :param region: the name of the region.
        :param start: the offset of the first byte.
        :param stop: the offset after the last byte.
        :return: the bytes.
        :raises HixlError: the error that the read raised there.
        :raises PeerProcessError: if there is no such peer, or the process has ended.
        """
        return base64.b64decode(await self._do("read", peer=peer, region=region, start=start, stop=stop))

    async def stats(self) -> dict[str, int]:
        """Return the counters and gauges of its engine by name; see `EngineStats`.

        :raises PeerProcessError: if the process has ended.
        """
        return dict(await self._do("stats"))

    # -- the process

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the process with SIGSTOP, so that it keeps its resources but does nothing until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process with SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, number)

    async def exited(self) -> int:
        """Wait for the end of the process.

        :return: its exit status, or minus the number of the signal that ended it.
        """
        return await asyncio.shield(self._exited)

    async def aclose(self, timeout: float = 10.0) -> None:
        """Ask the process to close its engine and to end; kill it if it does not.  Idempotent.

        :param timeout: seconds before the process is killed.
        """
        with contextlib.suppress(ConnectionError):
            if not self._exited.done():
                self.resume()
                self._writer.write_eof()
        try:
            async with asyncio.timeout(timeout):
                await self.exited()
        except TimeoutError:
            self.kill()
            await self.exited()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    # -- inside

    async def _read(self) -> None:
        while line := await self._reader.readline():
            self._take(json.loads(line))

    def _take(self, answer: dict[str, Any]) -> None:
        waiter = self._calls.get(answer["id"])
        if waiter is None or waiter.done():
            return
        if "error" not in answer:
            waiter.set_result(answer["result"])
            return
        kind = getattr(errors, answer["error"], None)
        if isinstance(kind, type) and issubclass(kind, HixlError):
            waiter.set_exception(kind(answer["message"]))
        else:
            waiter.set_exception(PeerProcessError(f"{answer['error']}: {answer['message']}"))

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._exited.set_result(self._popen.wait())
        for waiter in self._calls.values():
            if not waiter.done():
                waiter.set_exception(PeerProcessError(f"the process {self.pid} ended"))


@asynccontextmanager
async def peer_process(
    *,
    name: str = "child",
    driver: str = "shm",
    options: dict[str, Any] | None = None,
    plan: FaultPlan | None = None,
    loop: str = "asyncio",
    regions: dict[str, int] | None = None,
    **settings: Any,
) -> AsyncIterator[PeerProcess]:
    """Start another Python process with an engine of its own, and end it.

    ::

        async with peer_process(regions={"kv": 4096}) as process, Engine() as engine:
            peer = await engine.connect(process.address)
            await engine.write(b"hello", (await peer.region("kv"))[0:5])
            assert await process.peek("kv", 0, 5) == b"hello"
            process.kill()

    :param name: the name of its engine.
    :param driver: the name of its only driver.
    :param options: the options of its driver, JSON-safe.
    :param plan: the faults of its engine; the process makes an equal plan, with counters of its own.
    :param loop: ``"asyncio"`` or ``"uvloop"``.
    :param regions: the names and sizes (in bytes) of regions to allocate at once, for peers to read and write.
    :param settings: other arguments of its `Engine`, JSON-safe.
    :return: an async context manager of the `PeerProcess`.
    :raises PeerProcessError: on entering, if the process or its engine did not start.
    """
    ours, theirs = socket.socketpair()
    setup = {
        "name": name,
        "driver": driver,
        "options": options or {},
        "plan": None if plan is None else plan.spec(),
        "loop": loop,
        "regions": regions or {},
        "settings": settings,
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with theirs:
        # asyncio's own way needs a child watcher, which may start a thread.
        popen = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "hixl_async.testing.child", str(theirs.fileno()), json.dumps(setup)],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LINE)
    process = PeerProcess(popen, reader, writer)
    try:
        process.address = await process._do("address")
        yield process
    finally:
        await process.aclose()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
