"""The dialling side: drives a `DiallerHandshake` over real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

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
from . import waiting
from .channel import TcpChannel, UnixChannel
from .connection import Connection
from .dialler_handshake import DiallerHandshake
from .handshake import Action, Established, Leg, OpenUnix, Sight
from .identity import Identity
from .process import LocalUser, peer_credentials, start_time
from .rendezvous import Scope
from .secret import Secret

__all__ = ["dial"]

# Bounds of the pause before a listener that has too many visitors is dialled again, in seconds.
_BUSY_RETRY = (0.05, 0.2)


async def dial(
    address: Address,
    identity: Identity,
    *,
    secret: bytes | None = None,
    unix_dir: str | None = None,
    timeout: float = 5.0,
    expect: Callable[[Identity], None] | None = None,
) -> Connection:
    """Connects to the engine that listens on `address`, and authenticates both sides.

    :param identity: what to say about ourselves.
    :param secret: the shared secret; None connects processes of one user on one host only.
    :param unix_dir: the directory shared with containers in which to look for the other side's Unix socket.
    :param timeout: seconds for everything together.
    :param expect: looks at the other side's identity; what it raises is raised here, and the connection dropped.
    :raises AuthenticationError: if one side does not, or cannot, trust the other, or their domains differ.
    :raises HandshakeError: if the other side is no engine, or speaks no protocol version that we do.
    :raises ConnectError: if nobody listens there, or it took too long.
    :raises InvalidArgumentError: if an argument is malformed, or the address is our own.
    """
    if problem := identity.problem():
        raise InvalidArgumentError(problem)
    call = _Call(address, identity, Secret(secret), unix_dir)
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    established = await call.run()
                    break
                except BusyError:
                    call.close()
                    call.step = "it is busy"
                    await asyncio.sleep(random.uniform(*_BUSY_RETRY))
        if expect is not None:
            expect(established.identity)
        return call.connection(established)
    except TimeoutError:
        raise ConnectError(f"{address} did not answer within {timeout:g} s ({call.step})") from None
    except PeerDownError as error:
        raise ConnectError(f"{address} broke off the handshake ({call.step}): {error}", native=error.native) from None
    except ProtocolError as error:
        raise HandshakeError(f"{address}: {error}", native=error.native) from None
    except HixlError as error:
        if str(address) not in str(error):
            error.args = (f"{address}: {error}", *error.args[1:])
        raise
    except OSError as error:
        raise ConnectError(f"{address}: {error.strerror} ({call.step})", native=error.errno) from None
    finally:
        call.close()


class _Call:
    """One attempt; owns its sockets until they are handed to a connection."""

    def __init__(self, address: Address, identity: Identity, secret: Secret, unix_dir: str | None) -> None:
        self._address = address
        self._identity = identity
        self._secret = secret
        self._unix_dir = unix_dir
        self._scope = Scope.current(unix_dir)
        self._owned: dict[Leg, TcpChannel | UnixChannel] = {}
        #: What is being done, for messages.
        self.step = "connecting"

    async def run(self) -> Established:
        sock = await waiting.connect_tcp(self._address)
        self._owned[Leg.TCP] = TcpChannel(sock)
        handshake = DiallerHandshake(
            self._identity,
            self._secret,
            Sight(
                self._scope,
                LocalUser.current(),
                start_time(),
                waiting.tcp_path(sock.getsockname(), sock.getpeername()),
            ),
        )
        actions = handshake.start()
        leg = Leg.TCP
        while True:
            for action in actions:
                if isinstance(action, Established):
                    return action
                if isinstance(action, OpenUnix):
                    actions = await self._open_unix(handshake, action)
                    break
                leg = action.leg
                self.step = f"saying hello over {leg.value}"
                await waiting.send(self._owned[leg], action.message)
            else:
                self.step = f"waiting for an answer over {leg.value}"
                actions = handshake.received(leg, await waiting.receive(self._owned[leg]))

    async def _open_unix(self, handshake: DiallerHandshake, action: OpenUnix) -> list[Action]:
        self.step = "connecting the Unix socket"
        try:
            sock = await waiting.connect_unix(action.name, self._unix_dir)
        except OSError as error:
            return handshake.unix_failed(error.strerror or str(error))
        self._owned[Leg.UNIX] = UnixChannel(sock)
        return handshake.unix_opened(peer_credentials(sock))

    def connection(self, established: Established) -> Connection:
        """Hands over the socket of the leg that was chosen."""
        return Connection.over(self._owned.pop(established.leg), established, dialled=True)

    def close(self) -> None:
        """Closes what was not handed over."""
        for channel in self._owned.values():
            channel.close()
        self._owned.clear()
