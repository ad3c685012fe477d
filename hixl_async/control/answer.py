"""One handshake on the listening side: drives a `ListenerHandshake` over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import NamedTuple

from ..errors import HixlError, PeerLostError, ProtocolError
from . import waiting
from .channel import TcpChannel, UnixChannel
from .connection import Connection
from .handshake import Established, Leg, Send, Sight
from .identity import Identity
from .listener_handshake import ListenerHandshake
from .process import Credentials, peer_credentials
from .refusal import refusal
from .rendezvous import RendezvousName, admit_descriptors
from .scheduler import FairScheduler
from .secret import Secret

__all__ = ["Answer", "refuse"]


class _Joined(NamedTuple):
    """The Unix leg, and the message that came with it."""

    channel: UnixChannel
    credentials: Credentials
    message: bytes


class Answer:
    """Answers one dialler; owns its sockets until they are handed to a connection."""

    def __init__(
        self,
        sock: socket.socket,
        identity: Identity,
        secret: Secret,
        sight: Sight,
        name: RendezvousName,
        scheduler: FairScheduler,
    ) -> None:
        """
        :param sight: what we see whoever dials; the TCP connection is added here.
        :raises PeerLostError: if the dialler is gone already.
        """
        try:
            path = waiting.tcp_path(sock.getpeername(), sock.getsockname())
            self._tcp = TcpChannel(sock)
        except OSError as error:
            raise PeerLostError(f"the dialler left at once: {error.strerror}", native=error.errno) from None
        self._scheduler = scheduler
        self._owned: set[TcpChannel | UnixChannel] = {self._tcp}
        self._joined: asyncio.Future[_Joined] = asyncio.get_running_loop().create_future()
        self._handshake = ListenerHandshake(identity, secret, sight._replace(tcp_path=path), name)

    @property
    def connection_id(self) -> str:
        """What a message on the Unix leg calls this handshake."""
        return self._handshake.connection_id

    def join(self, channel: UnixChannel, message: bytes) -> None:
        """Takes over a Unix leg on which `message` came for this handshake.

        :raises ProtocolError: if there is one already.
        """
        if self._joined.done():
            raise ProtocolError("this handshake has its Unix leg already")
        self._owned.add(channel)
        self._joined.set_result(_Joined(channel, peer_credentials(channel.sock), message))

    async def run(self) -> Connection:
        """The whole handshake.

        :raises HixlError: if it fails.
        """
        channel: TcpChannel | UnixChannel = self._tcp
        leg, credentials = Leg.TCP, None
        raw: bytes | None = await waiting.receive(self._tcp)
        while True:
            if raw is None:
                leg = Leg.UNIX
                channel, credentials, raw = self._joined.result()
            actions = self._handshake.received(leg, raw, credentials)
            if leg is Leg.UNIX:
                # It has proved itself, and may send descriptors as soon as we have said so.
                admit_descriptors(channel.sock, True)
            for action in actions:
                if isinstance(action, Established):
                    self._owned.discard(channel)
                    return Connection.over(channel, action, self._scheduler, dialled=False)
                assert isinstance(action, Send), "the listening side opens nothing"
                assert action.leg is leg, "it answers where it was asked"
                await waiting.send(channel, action.message)
            raw = await waiting.receive(self._tcp, unless=self._joined)

    def refuse(self, error: HixlError) -> None:
        """Tells the dialler why, wherever it listens, if that is possible without waiting."""
        for channel in self._owned:
            refuse(channel, error)

    def close(self) -> None:
        """Closes what was not handed over; idempotent."""
        for channel in self._owned:
            channel.close()


def refuse(channel: TcpChannel | UnixChannel, error: HixlError) -> None:
    """Tells the other side of `channel` why it is refused, if that is possible without waiting."""
    with contextlib.suppress(HixlError):
        channel.send(refusal(error), ())
