"""Both sides of control connections, for tests."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from hixl_async.control import Connection, Identity, Listener, codec, dial
from hixl_async.control.rendezvous import Scope
from hixl_async.errors import HixlError
from hixl_async.types import Address

ANYWHERE = Address("127.0.0.1", 0)
SECRET = b"a secret that only the two of us know"


def identity(name: str = "dialler", *, domain: str = "", incarnation: str | None = None) -> Identity:
    return Identity(name, domain, incarnation or secrets.token_hex(16), "", ("shm",))


class Watched(Listener):
    """A listener that also hands over the reasons for which it refused diallers."""

    refused: asyncio.Queue[HixlError]

    def _report(self, error: HixlError) -> None:
        super()._report(error)
        self.refused.put_nowait(error)


class Host:
    """A listener, the connections it accepted, and the reasons for which it refused others."""

    def __init__(self, me: Identity, secret: bytes | None, unix_dir: str | None) -> None:
        self.identity = me
        self.secret = secret
        self.unix_dir = unix_dir
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()
        self.mine: list[Connection] = []
        self.listener: Watched

    @classmethod
    async def open(
        cls,
        address: Address | None = ANYWHERE,
        *,
        me: Identity | None = None,
        secret: bytes | None = None,
        unix_dir: str | None = None,
        **options: Any,
    ) -> Host:
        self = cls(me or identity("listener"), secret, unix_dir)
        self.listener = await Watched.open(
            address,
            lambda: self.identity,
            secret=secret,
            unix_dir=unix_dir,
            **{"on_connection": self._connected, **options},
        )
        self.listener.refused = asyncio.Queue()
        return self

    @property
    def refused(self) -> asyncio.Queue[HixlError]:
        return self.listener.refused

    def _connected(self, connection: Connection) -> None:
        self.mine.append(connection)
        self.connections.put_nowait(connection)

    @property
    def address(self) -> Address:
        assert self.listener.address is not None
        return self.listener.address

    async def dial(self, me: Identity | None = None, **options: Any) -> Connection:
        """Dial this host with its own secret, unless told otherwise."""
        options = {"secret": self.secret, "unix_dir": self.unix_dir, "timeout": 5.0, **options}
        connection = await dial(self.address, me or identity(), **options)
        self.mine.append(connection)
        return connection

    async def pair(self, **options: Any) -> tuple[Connection, Connection]:
        """Make a new connection; return the dialler's end and the listener's."""
        connection = await self.dial(**options)
        return connection, await self.connections.get()

    async def aclose(self) -> None:
        await self.listener.aclose()
        for connection in self.mine:
            await connection.aclose()


HostFactory = Callable[..., Awaitable[Host]]


class Arrived(NamedTuple):
    kind: str
    body: dict[str, Any]
    fds: list[int]


class Inbox:
    """The messages of a connection, which it starts."""

    def __init__(self, connection: Connection) -> None:
        self.messages: asyncio.Queue[Arrived] = asyncio.Queue()
        self.lost: asyncio.Future[HixlError] = asyncio.get_running_loop().create_future()
        connection.start(lambda *message: self.messages.put_nowait(Arrived(*message)), self.lost.set_result)

    async def get(self) -> Arrived:
        return await self.messages.get()


class Stranger:
    """A raw TCP client that sends nonsense, or speaks the protocol by hand."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, address: Address) -> Stranger:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, tuple(address))
        return cls(sock)

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.sock, data)

    async def say(self, kind: str, body: dict[str, Any]) -> None:
        await self.send(codec.frame(codec.encode(kind, body)))

    async def receive(self) -> codec.Message:
        size = int.from_bytes(await self._exactly(4), "big")
        return codec.decode(await self._exactly(size))

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = await self.loop.sock_recv(self.sock, size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    async def closed(self) -> None:
        """Wait until the other side closes the connection."""
        try:
            while await self.loop.sock_recv(self.sock, 65536):
                pass
        except ConnectionError:
            pass

    def close(self) -> None:
        self.sock.close()


def memory(content: bytes = b"") -> int:
    """Return a descriptor of memory."""
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def is_open(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def same_file(one: int, other: int) -> bool:
    return os.path.samestat(os.fstat(one), os.fstat(other))


async def closed(sock: socket.socket) -> bytes:
    """Wait until the other side closes the connection; return what it said before."""
    said = b""
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(sock, 65536):
            said += data
    except ConnectionResetError:
        if sock.family == socket.AF_UNIX:
            said += await closed(sock)
    sock.close()
    return said


async def passes(number: int) -> None:
    """Let the loop run a number of passes."""
    loop = asyncio.get_running_loop()
    for _ in range(number):
        passed = loop.create_future()
        loop.call_soon(passed.set_result, None)
        await passed


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make diallers seem to be on another host from now on."""
    monkeypatch.setattr(Scope, "current", classmethod(lambda cls, unix_dir: Scope("e" * 32, "")))
