"""The listening side: the public TCP socket, the random Unix socket, and a `Reply` to every engine that dials."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Self

from ..errors import (
    AddressInUseError,
    BusyError,
    ConnectError,
    HixlError,
    InvalidArgumentError,
    PeerDownError,
    ProtocolError,
)
from ..types import Address
from . import socket_io
from .accept_limiter import AcceptLimiter
from .channel import TcpChannel, UnixChannel
from .codec import HANDSHAKE_LIMIT
from .connection import Connection
from .handshake import Action, Established, ListenerHandshake, LocalView, Send, Transport, connection_of, refusal
from .identity import Identity, Secret
from .limits import ConnectionLimits
from .process import Credentials, LocalUser, peer_credentials, start_time
from .rendezvous import Rendezvous, RendezvousName, Scope, admit_descriptors
from .scheduler import FairScheduler

__all__ = ["Listener"]

_log = logging.getLogger("hixl_async.control")

_BACKLOG = 1024
# Handshakes under way on each of the two sockets.
_MAX_HANDSHAKES = 64
# A handshake takes a few milliseconds; while others wait, this is all the time that one may have, in seconds.
_PATIENCE = 0.25
# Time that all handshakes together may take in a pass of the loop, and that one step of one takes, in seconds.
_HANDSHAKE_BUDGET, _HANDSHAKE_STEP = 0.0006, 0.0003
_TOO_MANY = BusyError("too many handshakes at once, or the listener closes")


class _Joined(NamedTuple):
    """The Unix socket of a handshake, and the message that came with it."""

    channel: UnixChannel
    credentials: Credentials
    message: bytes


class Reply:
    """The listening side's part in one handshake; owns its sockets until they are handed to a connection."""

    def __init__(
        self,
        sock: socket.socket,
        identity: Identity,
        secret: Secret,
        view: LocalView,
        name: RendezvousName,
        turns: FairScheduler,
    ) -> None:
        """
        :param view: the same for all diallers; the TCP connection is added here.
        :param turns: shares the time of the loop between all handshakes.
        :raises PeerDownError: if the dialler is gone already.
        """
        try:
            path = socket_io.tcp_path(sock.getpeername(), sock.getsockname())
            self._tcp = TcpChannel(sock)
        except OSError as error:
            raise PeerDownError(f"the dialler left at once: {error.strerror}", native=error.errno) from None
        self._host = sock.getpeername()[0]
        self._turns = turns
        self._owned: set[TcpChannel | UnixChannel] = {self._tcp}
        self._joined: asyncio.Future[_Joined] = asyncio.get_running_loop().create_future()
        self._handshake = ListenerHandshake(identity, secret, view._replace(tcp_path=path), name)

    @property
    def connection_id(self) -> str:
        """The name of this handshake in a message on the Unix socket."""
        return self._handshake.connection_id

    def join(self, channel: UnixChannel, message: bytes) -> None:
        """Take over a Unix socket on which `message` came for this handshake.

        :raises ProtocolError: if there is one already.
        """
        if self._joined.done():
            raise ProtocolError("this handshake has its Unix socket already")
        self._owned.add(channel)
        self._joined.set_result(_Joined(channel, peer_credentials(channel.sock), message))

    async def run(self, limits: ConnectionLimits, scheduler: FairScheduler) -> Connection:
        """Perform the whole handshake.

        :param limits: counts the connection from the moment at which the kernel, or the proof, says whose it is.
        :param scheduler: see `Connection`.
        :raises HixlError: if it fails.
        """
        raw: bytes | None = await socket_io.receive(self._tcp)
        while True:
            channel: TcpChannel | UnixChannel = self._tcp
            transport, credentials = Transport.TCP, None
            if raw is None:
                transport = Transport.UNIX
                channel, credentials, raw = self._joined.result()
            await self._turns.turn(_HANDSHAKE_STEP)
            actions = self._handshake.received(transport, raw, credentials)
            if transport is Transport.UNIX:
                # The other side has proved itself, and may send descriptors as soon as it knows that.
                admit_descriptors(channel.sock, True)
            if isinstance(actions[-1], Established):
                return await self._establish(channel, actions, credentials, limits, scheduler)
            await self._send(channel, actions)
            raw = await socket_io.receive(self._tcp, unless=self._joined)

    async def _establish(
        self,
        channel: TcpChannel | UnixChannel,
        actions: list[Action],
        credentials: Credentials | None,
        limits: ConnectionLimits,
        scheduler: FairScheduler,
    ) -> Connection:
        release = limits.admit(credentials or self._host)
        try:
            established = await self._send(channel, actions)
            assert established is not None
            self._owned.discard(channel)
            return Connection.over(channel, established, scheduler, dialled=False, on_closed=release)
        except BaseException:
            release()
            raise

    async def _send(self, channel: TcpChannel | UnixChannel, actions: list[Action]) -> Established | None:
        for action in actions:
            if isinstance(action, Established):
                return action
            assert isinstance(action, Send), "the listening side opens nothing"
            await socket_io.send(channel, action.message)
        return None

    def refuse(self, error: HixlError) -> None:
        """Tell the dialler why, wherever it listens, if that is possible without waiting."""
        for channel in self._owned:
            _refuse(channel, error)

    def close(self) -> None:
        """Close what was not handed over; idempotent."""
        for channel in self._owned:
            channel.close()


def _refuse(channel: TcpChannel | UnixChannel, error: HixlError) -> None:
    """Tell the other side of `channel` why it is refused, if that is possible without waiting."""
    with contextlib.suppress(HixlError):
        channel.send(refusal(error), ())


def _refuse_early(kind: type[TcpChannel | UnixChannel], sock: socket.socket, error: HixlError) -> None:
    """The same for a connection whose handshake has not begun."""
    with contextlib.suppress(OSError):
        channel = kind(sock)
        with contextlib.suppress(OSError):
            sock.recv(HANDSHAKE_LIMIT)  # a close with bytes unread would reset the connection, and the reason be lost
        _refuse(channel, error)


class Listener:
    """The listening side: authenticates engines that dial, and hands over their connections."""

    def __init__(
        self,
        identity_factory: Callable[[], Identity],
        *,
        secret: Secret,
        view: LocalView,
        handshake_timeout: float,
        on_connection: Callable[[Connection], None],
        scheduler: FairScheduler,
        limits: ConnectionLimits,
    ) -> None:
        """Use `open`."""
        #: Where it listens, with the actual port; None if it does not.
        self.address: Address | None = None
        self._identity_factory = identity_factory
        self._secret = secret
        self._view = view
        self._handshake_timeout = handshake_timeout
        self._on_connection = on_connection
        self._limits = limits
        self._turns = FairScheduler(_HANDSHAKE_BUDGET)
        self._scheduler = scheduler
        self._tcp: socket.socket | None = None
        self._rendezvous: Rendezvous | None = None
        self._accepting: list[AcceptLimiter] = []
        self._replies: dict[str, Reply] = {}  # the handshakes under way, by connection_id

    @classmethod
    async def open(
        cls,
        address: Address | None,
        identity_factory: Callable[[], Identity],
        *,
        secret: bytes | None = None,
        unix_dir: str | None = None,
        handshake_timeout: float = 5.0,
        on_connection: Callable[[Connection], None],
        scheduler: FairScheduler | None = None,
        limits: ConnectionLimits | None = None,
    ) -> Self:
        """Start to listen.

        :param address: where; port 0 picks a free one; None: nowhere, and nothing is created.
        :param identity_factory: returns our identity; called once per handshake.
        :param secret: the shared secret; None lets in processes of our own user on this host only.
        :param unix_dir: a directory shared with containers, in which the Unix socket is created as a file.
        :param handshake_timeout: seconds that one handshake may take.
        :param on_connection: takes each connection; its owner calls ``start`` and, in the end, ``aclose``.
        :param scheduler: shares the time of the loop between all connections of an engine; None: of this listener.
        :param limits: counts the connections of each process, user and host; None: with its defaults.
        :raises InvalidArgumentError: if `address` is no address of this machine or, without a secret, one that other
            machines can reach, or `unix_dir` is not usable.
        :raises AddressInUseError: if the port is taken.
        :raises ConnectError: if the system forbids to listen there.
        """
        self = cls(
            identity_factory,
            secret=Secret(secret),
            view=LocalView(Scope.current(unix_dir), LocalUser.current(), start_time(), tcp_path=""),
            handshake_timeout=handshake_timeout,
            on_connection=on_connection,
            scheduler=FairScheduler() if scheduler is None else scheduler,
            limits=ConnectionLimits() if limits is None else limits,
        )
        if address is not None:
            try:
                await self._listen(address, unix_dir)
            except BaseException:
                self._close_sockets()
                raise
        return self

    async def _listen(self, address: Address, unix_dir: str | None) -> None:
        targets = await socket_io.resolve(address)
        if not self._secret and not all(_is_loopback(target.address[0]) for target in targets):
            raise InvalidArgumentError(
                f"address {address} can be reached from other machines: pass secret= to authenticate them, "
                f"or listen on 127.0.0.1"
            )
        self._tcp = _listen(address, targets)
        try:
            self._rendezvous = Rendezvous(unix_dir, other_users=bool(self._secret))
        except OSError as error:
            raise ConnectError(f"cannot create a Unix socket: {error.strerror}", native=error.errno) from None
        self.address = Address(address.host or "127.0.0.1", self._tcp.getsockname()[1])
        for sock, perform, kind in (
            (self._tcp, self._reply_tcp, TcpChannel),
            (self._rendezvous.sock, self._join_unix, UnixChannel),
        ):
            refuse = functools.partial(self._refuse_early, kind)
            self._accepting.append(
                AcceptLimiter(
                    sock,
                    perform,
                    refuse,
                    capacity=_MAX_HANDSHAKES,
                    patience=_PATIENCE,
                    silence=self._handshake_timeout,
                )
            )

    async def aclose(self) -> None:
        """End listening and the handshakes under way, not the connections; idempotent."""
        for limiter in self._accepting:
            limiter.close()
        self._close_sockets()
        for limiter in self._accepting:
            await limiter.wait_empty()

    def abandon(self) -> None:
        """Close our descriptors and nothing else, for the child of a fork: the parent goes on listening."""
        for limiter in self._accepting:
            limiter.abandon()
        for reply in self._replies.values():
            reply.close()
        if self._tcp is not None:
            self._tcp.close()
        if self._rendezvous is not None:
            self._rendezvous.abandon()

    def _close_sockets(self) -> None:
        if self._tcp is not None:
            self._tcp.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    async def _reply_tcp(self, sock: socket.socket) -> None:
        """Perform the whole handshake with an engine that dialled, whichever transport it ends on."""
        assert self._rendezvous is not None
        reply: Reply | None = None
        try:
            await self._turns.turn(_HANDSHAKE_STEP)
            reply = Reply(sock, self._identity_factory(), self._secret, self._view, self._rendezvous.name, self._turns)
            self._replies[reply.connection_id] = reply
            async with self._in_time():
                connection = await reply.run(self._limits, self._scheduler)
        except HixlError as error:
            if reply is not None:
                reply.refuse(error)
            self._report(error)
            return
        except asyncio.CancelledError:
            if reply is not None:
                reply.refuse(_TOO_MANY)
            raise
        finally:
            if reply is None:
                sock.close()
            else:
                self._replies.pop(reply.connection_id, None)
                reply.close()
        try:
            self._on_connection(connection)
        except BaseException:
            connection.abort(ConnectError("the engine did not take the connection"))
            raise

    async def _join_unix(self, sock: socket.socket) -> None:
        """Hand a Unix socket to the handshake that its first message names."""
        channel = UnixChannel(sock)
        try:
            await self._turns.turn(_HANDSHAKE_STEP)
            async with self._in_time():
                message = await socket_io.receive(channel)
            reply = self._replies.get(connection_of(message))
            if reply is None:
                raise BusyError("no handshake waits for this Unix socket any more")
            reply.join(channel, message)
        except HixlError as error:
            _refuse(channel, error)
            channel.close()
            self._report(error)
        except asyncio.CancelledError:
            _refuse(channel, _TOO_MANY)
            raise

    def _refuse_early(self, kind: type[TcpChannel | UnixChannel], sock: socket.socket, error: HixlError) -> None:
        _refuse_early(kind, sock, error)
        if not isinstance(error, BusyError):
            self._report(error)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._handshake_timeout):
                yield
        except TimeoutError:
            raise ConnectError(f"the handshake took longer than {self._handshake_timeout:g} s") from None

    def _report(self, error: HixlError) -> None:
        _log.info("a dialler was refused: %s", error)


def _is_loopback(host: str) -> bool:
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_loopback


def _listen(address: Address, targets: list[socket_io.Target]) -> socket.socket:
    """Listen on the first of `targets` that this machine has."""
    problem: HixlError = ConnectError(f"cannot listen on {address}: nothing found")
    for target in targets:
        try:
            sock = socket.socket(target.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            problem = _listen_error(address, error)
            continue
        try:
            # Linux lets no other socket listen there meanwhile; it only ignores connections of the past (socket(7)).
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target.address)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            problem = _listen_error(address, error)
            if error.errno != errno.EADDRNOTAVAIL:
                break
        else:
            return sock
    raise problem


def _listen_error(address: Address, error: OSError) -> HixlError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUseError(
            f"another process or engine listens on {address} already; port 0 picks a free one", native=error.errno
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return InvalidArgumentError(f"{address} is no address of this machine", native=error.errno)
    remedy = ""
    if error.errno == errno.EACCES and 0 < address.port < 1024:
        remedy = "; a port below 1024 needs CAP_NET_BIND_SERVICE: take a higher one, or 0 for any that is free"
    return ConnectError(f"cannot listen on {address}: {error.strerror}{remedy}", native=error.errno)
