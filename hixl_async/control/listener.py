"""The listening side: the public TCP socket, the random Unix socket, and a `Reply` to every engine that dials."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Self

from ..core.log import Log
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

_log = Log("hixl_async.control")

_BACKLOG = 1024
# Handshakes under way on each of the two sockets.
_MAX_HANDSHAKES = 64
# Seconds that a handshake may take while others wait; it usually takes a few milliseconds.
_PATIENCE = 0.25
# Seconds that all handshakes together may take in a pass of the loop, and that one step of a handshake takes.
_HANDSHAKE_BUDGET, _HANDSHAKE_STEP = 0.0006, 0.0003
_TOO_MANY = BusyError("too many handshakes at once, or the listener closes")


class _Joined(NamedTuple):
    """The Unix socket of a handshake, and its first message."""

    channel: UnixChannel
    credentials: Credentials
    message: bytes


class Reply:
    """The listening side's part in one handshake; it owns its sockets until they are handed to a connection."""

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

        :param limits: counts the connection once the kernel, or the proof, says whose it is.
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
                # The other side is authenticated, and may send descriptors as soon as it knows that.
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
        """Tell the dialler why it is refused, on each of its sockets, if that is possible without waiting."""
        for channel in self._owned:
            _refuse(channel, error)

    def close(self) -> None:
        """Close the sockets that were not handed over; idempotent."""
        for channel in self._owned:
            channel.close()


def _refuse(channel: TcpChannel | UnixChannel, error: HixlError) -> None:
    """Tell the other side of `channel` why it is refused, if that is possible without waiting."""
    with contextlib.suppress(HixlError):
        channel.send(refusal(error), ())


def _refuse_early(kind: type[TcpChannel | UnixChannel], sock: socket.socket, error: HixlError) -> None:
    """Tell the other side why it is refused, before its handshake has begun."""
    with contextlib.suppress(OSError):
        channel = kind(sock)
        with contextlib.suppress(OSError):
            sock.recv(HANDSHAKE_LIMIT)  # closing with unread bytes would reset the connection and lose the reason
        _refuse(channel, error)


class Listener:
    """The listening side, which authenticates engines that dial, and hands over their connections."""

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
        #: The address on which it listens, with the actual port; None if it does not listen.
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

        :param address: the address to listen on; port 0 picks a free one; with None no socket is created.
        :param identity_factory: returns our identity; called once per handshake.
        :param secret: the shared secret; with None only processes of our own user on this host are admitted.
        :param unix_dir: a directory shared with containers, in which the Unix socket is created as a file.
        :param handshake_timeout: seconds that one handshake may take.
        :param on_connection: called with each connection; its owner calls ``start`` and, in the end, ``aclose``.
        :param scheduler: shares the time of the loop between the connections of an engine; None for a scheduler of its own.
        :param limits: counts the connections of each process, user and host; None for the default limits.
        :raises InvalidArgumentError: if `address` is not an address of this machine or, without a secret, one that other
            machines can reach, or `unix_dir` is not usable.
        :raises AddressInUseError: if the port is taken.
        :raises ConnectError: if the system forbids listening there.
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
        self.address = Address(address.host, self._tcp.getsockname()[1])
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
        """Stop listening, and end the handshakes in progress, but not the connections; idempotent."""
        for limiter in self._accepting:
            limiter.close()
        self._close_sockets()
        for limiter in self._accepting:
            await limiter.wait_empty()

    def abandon(self) -> None:
        """Close only our descriptors, for the child of a fork: the parent continues to listen."""
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
        """Perform the whole handshake with an engine that dialled, on both transports."""
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
            # On Linux this lets no second socket listen there; it only ignores past connections (socket(7)).
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
        return InvalidArgumentError(f"{address} is not an address of this machine", native=error.errno)
    remedy = ""
    if error.errno == errno.EACCES and 0 < address.port < 1024:
        remedy = "; a port below 1024 needs CAP_NET_BIND_SERVICE: use a higher one, or 0 for any free port"
    return ConnectError(f"cannot listen on {address}: {error.strerror}{remedy}", native=error.errno)
