"""Waiting for sockets during a handshake; the same on asyncio and uvloop."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any, NamedTuple, TypeAlias, overload

from ..errors import ConnectError, InvalidArgumentError, ProtocolError, UnknownHostError
from ..types import Address
from .channel import Channel, close_descriptors
from .rendezvous import RendezvousName
from .rendezvous import connect as connect_rendezvous

__all__ = ["connect_tcp", "connect_unix", "receive", "resolve", "send", "tcp_path"]

# Seconds before the next try.  A Unix socket whose queue is full refuses at once and never reports room (unix_stream_connect
# in net/unix/af_unix.c), so that only polling is possible.
_FULL_QUEUE_RETRY = 0.005

_LOOK_UP: dict[str, Any] = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP}
#: The codes by which the name service says that another attempt would find no more.
_NO_SUCH_HOST = (socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY)

SocketAddress: TypeAlias = tuple[Any, ...]


class Target(NamedTuple):
    """One socket address to which an `Address` resolves."""

    family: int
    address: SocketAddress


async def resolve(address: Address) -> list[Target]:
    """Look up the host of `address`.

    :raises InvalidArgumentError: if the host cannot be a name.
    :raises UnknownHostError: if the name service has no entry for it.
    :raises ConnectError: if the name service fails, with its code in `native`.
    """
    try:
        try:  # without a thread where there is nothing to look up
            found = socket.getaddrinfo(*address, flags=socket.AI_NUMERICHOST, **_LOOK_UP)
        except socket.gaierror:
            found = await _look_up(address)
    except UnicodeError as error:
        raise InvalidArgumentError(f"the host of address {address} cannot be found: it is no name: {error}") from None
    except OSError as error:
        kind = UnknownHostError if error.errno in _NO_SUCH_HOST else ConnectError
        reason = error.strerror or error
        raise kind(f"the host of address {address} cannot be found: {reason}", native=error.errno) from None
    return [Target(family, sockaddr) for family, _, _, _, sockaddr in found]


async def _look_up(address: Address) -> Any:
    return await asyncio.get_running_loop().getaddrinfo(*address, **_LOOK_UP)


async def connect_tcp(address: Address) -> socket.socket:
    """Connect to the first target that answers.

    :raises ConnectError: if none does, or the name service fails.
    :raises UnknownHostError: if the name service has no entry for the host of `address`.
    :raises InvalidArgumentError: if the host of `address` cannot be a name, or its port is 0.
    """
    if not address.port:
        raise InvalidArgumentError(f"address {address} has port 0, which no engine can listen on")
    reason = "nothing found"
    for target in await resolve(address):
        sock = socket.socket(target.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            code = sock.connect_ex(target.address)
            if code == errno.EINPROGRESS:
                await _ready(sock.fileno(), writable=True)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0:
                return sock
        except OSError as error:
            code = error.errno or 0
        except BaseException:
            sock.close()
            raise
        sock.close()
        reason = os.strerror(code)
    raise ConnectError(f"cannot connect to {address}: {reason}")


async def connect_unix(name: RendezvousName, unix_dir: str | None) -> socket.socket:
    """Connect to a rendezvous, as soon as there is room in its queue.

    :raises OSError: if no socket listens there.
    """
    while True:
        try:
            return connect_rendezvous(name, unix_dir)
        except BlockingIOError:
            await asyncio.sleep(_FULL_QUEUE_RETRY)


def tcp_path(dialler: SocketAddress, listener: SocketAddress) -> str:
    """Return a text for the two ends of a TCP connection that is the same on both sides."""
    # A socket for both versions of IP shows an address of version 4 as one of version 6.
    return " > ".join(f"{end[0].removeprefix('::ffff:')} {end[1]}" for end in (dialler, listener))


@overload
async def receive(channel: Channel) -> bytes: ...
@overload
async def receive(channel: Channel, *, unless: asyncio.Future[Any]) -> bytes | None: ...
async def receive(channel: Channel, *, unless: asyncio.Future[Any] | None = None) -> bytes | None:
    """Return the next message of a handshake, or None if `unless` is done first.

    :raises PeerDownError: if the other side is gone.
    :raises ProtocolError: if it sent something other than a message, or descriptors, which are not allowed yet.
    """
    while unless is None or not unless.done():
        if (packet := channel.receive()) is not None:
            if packet.descriptors:
                close_descriptors(packet.descriptors)
                raise ProtocolError("descriptors came before the two sides had authenticated each other")
            return packet.data
        await _ready(channel.fileno(), writable=False, unless=unless)
    return None


async def send(channel: Channel, data: bytes) -> None:
    """Send a message of a handshake.

    :raises PeerDownError: if the other side is gone.
    """
    while not channel.send(data, ()):
        await _ready(channel.fileno(), writable=True)
    while not channel.flush():
        await _ready(channel.fileno(), writable=True)


async def _ready(descriptor: int, *, writable: bool, unless: asyncio.Future[Any] | None = None) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake(_: object = None) -> None:
        if not ready.done():
            ready.set_result(None)

    if writable:
        loop.add_writer(descriptor, wake)
    else:
        loop.add_reader(descriptor, wake)
    if unless is not None:
        unless.add_done_callback(wake)
    try:
        await ready
    finally:
        if unless is not None:
            unless.remove_done_callback(wake)
        if writable:
            loop.remove_writer(descriptor)
        else:
            loop.remove_reader(descriptor)
