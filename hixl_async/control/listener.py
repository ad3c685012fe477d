"""The listening side: the public TCP socket, the random Unix socket, and an `Answer` for everybody who comes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Self

from ..errors import AddressInUseError, BusyError, ConnectError, HixlError, InvalidArgumentError
from ..types import Address
from . import waiting
from .answer import Answer, refuse
from .channel import UnixChannel
from .connection import Connection
from .door import Door
from .fields import connection_of
from .handshake import Sight
from .identity import Identity
from .process import LocalUser, start_time
from .rendezvous import Rendezvous, Scope
from .scheduler import FairScheduler
from .secret import Secret

__all__ = ["Listener"]

_log = logging.getLogger("hixl_async.control")

_BACKLOG = 1024
# A handshake takes a few milliseconds of everybody's time; when others wait, this is all that one may have.
_PATIENCE = 0.25
_TOO_MANY = BusyError("too many handshakes at once, or the listener closes")


class Listener:
    """Waits for dialling engines, authenticates them, and hands over their connections."""

    def __init__(
        self,
        identity_factory: Callable[[], Identity],
        *,
        secret: Secret,
        sight: Sight,
        handshake_timeout: float,
        max_handshakes: int,
        on_connection: Callable[[Connection], None],
        on_refused: Callable[[HixlError], None] | None,
        scheduler: FairScheduler,
    ) -> None:
        """Use `open`."""
        #: Where it listens, with the actual port; None if it does not.
        self.address: Address | None = None
        self._identity_factory = identity_factory
        self._secret = secret
        self._sight = sight
        self._handshake_timeout = handshake_timeout
        self._max_handshakes = max_handshakes
        self._on_connection = on_connection
        self._on_refused = on_refused
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._tcp: socket.socket | None = None
        self._rendezvous: Rendezvous | None = None
        self._doors: list[Door] = []
        self._answers: dict[str, Answer] = {}  # the handshakes under way, by connection_id

    @classmethod
    async def open(
        cls,
        address: Address | None,
        identity_factory: Callable[[], Identity],
        *,
        secret: bytes | None = None,
        unix_dir: str | None = None,
        handshake_timeout: float = 5.0,
        max_handshakes: int = 64,
        on_connection: Callable[[Connection], None],
        on_refused: Callable[[HixlError], None] | None = None,
        scheduler: FairScheduler | None = None,
    ) -> Self:
        """Starts to listen.

        :param address: where; port 0 picks a free one; None: nowhere, and nothing is created.
        :param identity_factory: says who we are; asked once per handshake.
        :param secret: the shared secret; None lets in processes of our own user on this host only.
        :param unix_dir: a directory shared with containers, in which the Unix socket is created as a file.
        :param handshake_timeout: seconds that one handshake may take.
        :param max_handshakes: how many may be under way on each of the two sockets; the others wait.
        :param on_connection: takes each connection; its owner calls ``start`` and, in the end, ``aclose``.
        :param on_refused: takes the reason of each handshake that failed; else it is logged at level INFO.
        :param scheduler: shares the time of the loop between all connections of an engine; None: of this listener.
        :raises InvalidArgumentError: if `address` is no address of this machine or, without a secret, one that other
            machines can reach, or `unix_dir` is not usable.
        :raises AddressInUseError: if somebody listens there already.
        :raises ConnectError: if the system forbids to listen there.
        """
        self = cls(
            identity_factory,
            secret=Secret(secret),
            sight=Sight(Scope.current(unix_dir), LocalUser.current(), start_time(), tcp_path=""),
            handshake_timeout=handshake_timeout,
            max_handshakes=max_handshakes,
            on_connection=on_connection,
            on_refused=on_refused,
            scheduler=scheduler or FairScheduler(),
        )
        if address is not None:
            try:
                await self._listen(address, unix_dir)
            except BaseException:
                self._close_sockets()
                raise
        return self

    async def _listen(self, address: Address, unix_dir: str | None) -> None:
        targets = await waiting.resolve(address)
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
        for sock, visit in ((self._tcp, self._visit_tcp), (self._rendezvous.sock, self._visit_unix)):
            self._doors.append(Door(sock, visit, capacity=self._max_handshakes, patience=_PATIENCE))

    async def aclose(self) -> None:
        """Ends listening and the handshakes under way, not the connections; idempotent."""
        for door in self._doors:
            door.close()
        self._close_sockets()
        for door in self._doors:
            await door.wait_empty()

    def abandon(self) -> None:
        """Closes our descriptors and nothing else, for the child of a fork: the parent goes on listening."""
        for door in self._doors:
            door.abandon()
        for answer in self._answers.values():
            answer.close()
        if self._tcp is not None:
            self._tcp.close()
        if self._rendezvous is not None:
            self._rendezvous.abandon()

    def _close_sockets(self) -> None:
        if self._tcp is not None:
            self._tcp.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    async def _visit_tcp(self, sock: socket.socket) -> None:
        """Somebody dialled: the whole handshake, whichever leg it ends on."""
        assert self._rendezvous is not None
        answer: Answer | None = None
        try:
            answer = Answer(
                sock, self._identity_factory(), self._secret, self._sight, self._rendezvous.name, self._scheduler
            )
            self._answers[answer.connection_id] = answer
            async with self._in_time():
                connection = await answer.run()
        except HixlError as error:
            if answer is not None:
                answer.refuse(error)
            self._report(error)
            return
        except asyncio.CancelledError:
            if answer is not None:
                answer.refuse(_TOO_MANY)
            raise
        finally:
            if answer is None:
                sock.close()
            else:
                self._answers.pop(answer.connection_id, None)
                answer.close()
        try:
            self._on_connection(connection)
        except BaseException:
            connection.abort(ConnectError("nobody takes the connection"))
            raise

    async def _visit_unix(self, sock: socket.socket) -> None:
        """The Unix leg of a handshake, or a stranger."""
        channel = UnixChannel(sock)
        try:
            async with self._in_time():
                message = await waiting.receive(channel)
            answer = self._answers.get(connection_of(message))
            if answer is None:
                raise BusyError("no handshake waits for this Unix leg any more")
            answer.join(channel, message)
        except HixlError as error:
            refuse(channel, error)
            channel.close()
            self._report(error)
        except asyncio.CancelledError:
            refuse(channel, _TOO_MANY)
            raise

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._handshake_timeout):
                yield
        except TimeoutError:
            raise ConnectError(f"the handshake took longer than {self._handshake_timeout:g} s") from None

    def _report(self, error: HixlError) -> None:
        if self._on_refused is not None:
            self._on_refused(error)
        else:
            _log.info("a dialler was refused: %s", error)


def _is_loopback(host: str) -> bool:
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_loopback


def _listen(address: Address, targets: list[waiting.Target]) -> socket.socket:
    """Listens on the first of `targets` that this machine has."""
    problem: HixlError = ConnectError(f"cannot listen on {address}: nothing found")
    for target in targets:
        try:
            sock = socket.socket(target.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            problem = _listen_error(address, error)
            continue
        try:
            # Linux lets nobody else listen there meanwhile; it only ignores connections of the past (socket(7)).
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
        return AddressInUseError(f"somebody listens on {address} already; port 0 picks a free one", native=error.errno)
    if error.errno == errno.EADDRNOTAVAIL:
        return InvalidArgumentError(f"{address} is no address of this machine", native=error.errno)
    return ConnectError(f"cannot listen on {address}: {error.strerror}", native=error.errno)
