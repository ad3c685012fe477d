"""The dialling side, which performs a `DiallerHandshake` over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket

from ..errors import (
    BusyError,
    ConnectError,
    HandshakeError,
    HixlError,
    InvalidArgumentError,
    PeerDownError,
    ProtocolError,
)
from ..types import Address
from . import socket_io
from .channel import TcpChannel, UnixChannel
from .connection import Connection
from .handshake import Action, DiallerHandshake, Established, LocalView, OpenUnix, Transport, raise_if_refusal
from .identity import Identity, Secret
from .process import LocalUser, peer_credentials, start_time
from .rendezvous import Scope
from .scheduler import FairScheduler

__all__ = ["dial"]

# Bounds of the pause before the next attempt, in seconds, where a listener is busy or the name service has failed for now.
_RETRY = (0.05, 0.2)


async def dial(
    address: Address,
    identity: Identity,
    *,
    secret: bytes | None = None,
    unix_dir: str | None = None,
    timeout: float = 5.0,
    until: float | None = None,
    scheduler: FairScheduler | None = None,
) -> Connection:
    """Connect to the engine that listens on `address`, and authenticate both sides.

    :param identity: our own.
    :param secret: the shared secret; None connects processes of one user on one host only.
    :param unix_dir: the directory shared with containers in which to look for the other side's Unix socket.
    :param timeout: seconds for everything together.
    :param until: the loop's time at which the timeout ends, if it began before the call.
    :param scheduler: shares the time of the loop between the connections of an engine; None for a scheduler of its own.
    :raises AuthenticationError: if one side does not, or cannot, trust the other, or their domains differ.
    :raises HandshakeError: if the other side is not an engine, or has no protocol version in common with this one.
    :raises ConnectError: if no engine listens there, its Unix socket cannot be connected, the system is out of descriptors,
        the other side has too many connections, or the timeout passed.
    :raises UnknownHostError: if the name service has no entry for the host of `address`.
    :raises InvalidArgumentError: if an argument is malformed, or the address is our own.
    """
    if problem := identity.problem():
        raise InvalidArgumentError(problem)
    attempt = _Attempt(address, identity, Secret(secret), unix_dir)
    obstacle = ""
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + timeout if until is None else until):
            while True:
                try:
                    established = await attempt.run()
                    break
                except (BusyError, ConnectError) as error:
                    if isinstance(error, ConnectError) and error.native != socket.EAI_AGAIN:
                        raise
                    attempt.close()
                    obstacle = f"it is busy: {error}" if isinstance(error, BusyError) else str(error)
                    await asyncio.sleep(random.uniform(*_RETRY))
        return attempt.connection(established, FairScheduler() if scheduler is None else scheduler)
    except TimeoutError:
        raise ConnectError(f"{address} did not answer within {timeout:g} s ({obstacle or attempt.step})") from None
    except PeerDownError as error:
        raise ConnectError(
            f"{address} broke off the handshake ({attempt.step}): {error}", native=error.native
        ) from None
    except ProtocolError as error:
        raise HandshakeError(f"{address}: {error}", native=error.native) from None
    except HixlError as error:
        if str(address) not in str(error):
            error.args = (f"{address}: {error}", *error.args[1:])
        raise
    except OSError as error:
        raise ConnectError(f"{address}: {error.strerror} ({attempt.step})", native=error.errno) from None
    finally:
        attempt.close()


class _Attempt:
    """One attempt to connect; it owns its sockets until they are handed to a connection."""

    def __init__(self, address: Address, identity: Identity, secret: Secret, unix_dir: str | None) -> None:
        self._address = address
        self._identity = identity
        self._secret = secret
        self._unix_dir = unix_dir
        self._owned: dict[Transport, TcpChannel | UnixChannel] = {}
        #: The step under way, for messages.
        self.step = "connecting"

    async def run(self) -> Established:
        """Perform the handshake.

        :raises HixlError: if it fails.
        :raises OSError: if the system refuses a descriptor.
        """
        self.step = "connecting"
        scope = Scope.current(self._unix_dir)
        sock = await socket_io.connect_tcp(self._address)
        self._owned[Transport.TCP] = TcpChannel(sock)
        handshake = DiallerHandshake(
            self._identity,
            self._secret,
            LocalView(
                scope,
                LocalUser.current(),
                start_time(),
                socket_io.tcp_path(sock.getsockname(), sock.getpeername()),
            ),
        )
        actions = handshake.start()
        transport = Transport.TCP
        while True:
            for action in actions:
                if isinstance(action, Established):
                    return action
                if isinstance(action, OpenUnix):
                    actions = await self._open_unix(handshake, action)
                    break
                transport = action.transport
                self.step = f"saying hello over {transport.value}"
                await self._send(self._owned[transport], action.message)
            else:
                self.step = f"waiting for an answer over {transport.value}"
                actions = handshake.received(transport, await socket_io.receive(self._owned[transport]))

    async def _send(self, channel: TcpChannel | UnixChannel, message: bytes) -> None:
        try:
            await socket_io.send(channel, message)
        except PeerDownError:
            # The listener may have refused us without reading; its reason arrived before the connection broke.
            with contextlib.suppress(PeerDownError, ProtocolError):
                if packet := channel.receive():
                    raise_if_refusal(packet.data)
            raise

    async def _open_unix(self, handshake: DiallerHandshake, action: OpenUnix) -> list[Action]:
        self.step = "connecting the Unix socket"
        try:
            sock = await socket_io.connect_unix(action.name, self._unix_dir)
        except OSError as error:
            return handshake.unix_failed(error)
        self._owned[Transport.UNIX] = UnixChannel(sock)
        return handshake.unix_opened(peer_credentials(sock))

    def connection(self, established: Established, scheduler: FairScheduler) -> Connection:
        """Hand over the socket of the transport that was chosen."""
        return Connection.over(self._owned.pop(established.transport), established, scheduler, dialled=True)

    def close(self) -> None:
        """Close the sockets that were not handed over."""
        for channel in self._owned.values():
            channel.close()
        self._owned.clear()
