"""An established, authenticated connection between two engines."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from ..core.guard import report
from ..errors import ClosedError, HixlError, PeerDownError, ProtocolError
from . import codec
from .channel import MAX_DESCRIPTORS, Channel, Packet, TcpChannel, UnixChannel, close_descriptors
from .codec import Seal
from .handshake import Established
from .identity import Identity
from .process import Credentials, open_pidfd, peer_credentials
from .scheduler import FairScheduler, Progress

__all__ = ["Connection", "LostCallback", "MessageCallback"]

#: A function that takes the kind, body and descriptors of one message.
MessageCallback: TypeAlias = Callable[[str, dict[str, Any], list[int]], None]
#: A function that takes the reason of the loss.
LostCallback: TypeAlias = Callable[[HixlError], None]

# The most that is queued for a peer that does not read, before the connection is given up.
_MAX_QUEUED_MESSAGES = 65536
_MAX_QUEUED_BYTES = 32 << 20
_MAX_QUEUED_DESCRIPTORS = 64
# The queue from which on callers that can wait should wait.
_CROWDED_MESSAGES = 512
_CROWDED_BYTES = 1 << 20
# Longer messages, in bytes, may take more than a pass's budget to handle, and are only handled at its beginning.
_LARGE = 8 << 10
# Seconds that aclose() waits for a peer that does not read.
_FLUSH_TIMEOUT = 1.0


class _State(Enum):
    OPEN = "open"
    CLOSING = "closing"  # aclose() flushes
    LOST = "lost"
    CLOSED = "closed"


class _Queued(NamedTuple):
    data: bytes
    descriptors: list[int]  # our own duplicates


class Connection:
    """An ordered channel of messages, until it is lost or closed; it belongs to the loop in which it was made.

    No message is read before `start`, so that early ones wait in the kernel.
    """

    _state = _State.CLOSED  # for __del__, should __init__ fail

    def __init__(
        self,
        channel: Channel,
        identity: Identity,
        *,
        version: int,
        credentials: Credentials | None,
        pidfd: int | None,
        fallback: str,
        scheduler: FairScheduler,
        on_closed: Callable[[], None] | None = None,
    ) -> None:
        #: The identity that the other side announced.
        self.identity = identity
        #: The protocol version that both sides speak.
        self.version = version
        #: The process at the other end, according to the kernel; None without a Unix transport.
        self.credentials = credentials
        #: A descriptor that becomes readable when that process has died, or None.  It is open until `aclose` or `abandon`,
        #: also after the connection was lost.
        self.pidfd = pidfd
        #: Why there is no Unix transport; "" if there is one.
        self.fallback = fallback
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._state = _State.OPEN
        self._on_message: MessageCallback | None = None
        self._on_lost: LostCallback | None = None
        self._error: HixlError | None = None  # why it was lost, until on_lost is called
        self._queue: deque[_Queued] = deque()
        self._waiting: list[asyncio.Future[None]] = []  # for room in the queue
        self._queued_bytes = 0
        self._queued_descriptors = 0
        self._scheduler = scheduler
        self._on_closed = on_closed
        self._held: Packet | None = None  # a message that was read before its turn
        self._first: asyncio.Handle | None = None  # the first reading of messages that came before `start`
        self._flushed: asyncio.Future[None] | None = None

    @classmethod
    def over(
        cls,
        channel: TcpChannel | UnixChannel,
        established: Established,
        scheduler: FairScheduler,
        *,
        dialled: bool,
        on_closed: Callable[[], None] | None = None,
    ) -> Connection:
        """Make a connection from the result of a handshake over `channel`, which belongs to it from now on.

        :param scheduler: shares the time of the loop between this connection and others.
        :param dialled: True on the side that dialled.
        :param on_closed: called once everything is closed.
        """
        to_listener, to_dialler = (Seal(key) for key in established.keys)
        channel.establish(*((to_dialler, to_listener) if dialled else (to_listener, to_dialler)))
        credentials = pidfd = None
        if isinstance(channel, UnixChannel):
            credentials = peer_credentials(channel.sock)
            pidfd = open_pidfd(channel.sock, credentials, established.started)
        return cls(
            channel,
            established.identity,
            version=established.version,
            credentials=credentials,
            pidfd=pidfd,
            fallback=established.fallback,
            scheduler=scheduler,
            on_closed=on_closed,
        )

    def __repr__(self) -> str:
        transport = "unix" if self.same_host else "tcp"
        return f"<Connection to {self.identity.name!r} over {transport}, {self._state.value}>"

    def __del__(self) -> None:
        if self._state is not _State.CLOSED:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            self.abandon()

    @property
    def same_host(self) -> bool:
        """True if the two processes met on a Unix socket: they share a machine, and descriptors can be sent."""
        return not self.fallback

    def start(self, on_message: MessageCallback, on_lost: LostCallback) -> None:
        """Deliver messages from now on, the earlier ones first; never from inside this call.

        :param on_message: called with kind, body and descriptors; it owns the descriptors, also if it raises.  If it raises a
            `HixlError` the connection is lost with that error; any other exception is also passed to the loop's exception
            handler.
        :param on_lost: called with the reason, at most once, and not after `aclose` or `abandon`.
        :raises ClosedError: if the connection was closed.
        """
        if self._state in (_State.CLOSING, _State.CLOSED):
            raise ClosedError(f"the connection to {self.identity.name!r} is closed")
        assert self._on_message is None, "start() is called once"
        self._on_message, self._on_lost = on_message, on_lost
        if self._state is _State.LOST:
            self._loop.call_soon(self._tell_lost)
            return
        self._loop.add_reader(self._channel.fileno(), self._pump)
        # Some messages may have come with the end of the handshake, and are buffered here, not in the kernel.
        self._first = self._loop.call_soon(self._pump_first)

    def send(self, kind: str, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message, or queue it; never blocks.

        The caller keeps `fds`, and may close them as soon as this returns, because those of queued messages are duplicated.  If
        the peer does not read until the queue is full, the connection is lost.

        :raises ProtocolError: if the message cannot be encoded, is too long, or has descriptors that this connection
            cannot transport.
        :raises ClosedError: if the connection is closed or lost.
        """
        if self._state is not _State.OPEN:
            raise ClosedError(f"the connection to {self.identity.name!r} is {self._state.value}")
        data = codec.encode(kind, body)
        if fds:
            if not self.same_host:
                raise ProtocolError(f"descriptors cannot be sent to {self.identity.name!r}: {self.fallback}")
            if len(fds) > MAX_DESCRIPTORS:
                raise ProtocolError(f"a message carries at most {MAX_DESCRIPTORS} descriptors, not {len(fds)}")
        try:
            if not self._queue and self._channel.send(data, fds):
                if not self._channel.flush():
                    self._loop.add_writer(self._channel.fileno(), self._flush)
                return
        except PeerDownError as error:
            self._lose(error)
            return
        if (
            len(self._queue) >= _MAX_QUEUED_MESSAGES
            or self._queued_bytes + len(data) > _MAX_QUEUED_BYTES
            or self._queued_descriptors + len(fds) > _MAX_QUEUED_DESCRIPTORS
        ):
            self._lose(PeerDownError("it does not read its messages; too many are queued", peer=self.identity.name))
            return
        queued = _Queued(data, _duplicates(fds))
        if not self._queue:
            self._loop.add_writer(self._channel.fileno(), self._flush)
        self._queue.append(queued)
        self._queued_bytes += len(data)
        self._queued_descriptors += len(fds)

    @property
    def crowded(self) -> bool:
        """True while so much is queued that callers that can wait should wait."""
        return len(self._queue) >= _CROWDED_MESSAGES or self._queued_bytes >= _CROWDED_BYTES

    async def room(self) -> None:
        """Wait while it is crowded; return at once if the connection has ended."""
        while self._state is _State.OPEN and self.crowded:
            waiter = self._loop.create_future()
            self._waiting.append(waiter)
            await waiter

    def _make_room(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def abort(self, error: HixlError) -> None:
        """Drop the connection at once; the loop calls `on_lost` with `error` soon.  Idempotent."""
        if self._state is _State.OPEN:
            self._lose(error)

    async def aclose(self) -> None:
        """Send the queued messages, waiting at most a second for a slow peer, and close everything.  Idempotent."""
        if self._state is _State.OPEN:
            self._state = _State.CLOSING
            self._stop_reading()
            self._flushed = self._loop.create_future()
            self._flush()
        try:
            if self._flushed is not None and not self._flushed.done():
                await asyncio.wait((self._flushed,), timeout=_FLUSH_TIMEOUT)
        finally:
            self.close()

    def close(self) -> None:
        """Close everything at once, and drop the queued messages.  Idempotent."""
        if self._state is not _State.CLOSED:
            self._disconnect()
            self.abandon()

    def abandon(self) -> None:
        """Close only our descriptors, for the child of a fork: the parent's connection stays open."""
        self._state = _State.CLOSED
        self._channel.close()
        self._drop_messages()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        if self._on_closed is not None:
            self._on_closed()
            self._on_closed = None

    def _pump(self) -> None:
        """Deliver the messages that have arrived, when it is the connection's turn."""
        self._scheduler.submit(self._read_next)

    def _pump_first(self) -> None:
        self._first = None
        self._pump()

    def _read_next(self) -> Progress:
        """Deliver one message; the step that the scheduler runs.

        It is repeated until no message is left, because uvloop reports the end of a broken connection only once.
        """
        if self._state is not _State.OPEN:
            return Progress.IDLE
        try:
            packet, self._held = self._held or self._channel.receive(), None
            if packet is None:
                return Progress.IDLE
            if len(packet.data) > _LARGE and not self._scheduler.fresh:
                self._held = packet
                return Progress.POSTPONED
            self._dispatch(packet.data, packet.descriptors)
            if self._state is _State.OPEN:  # no handler has closed the connection
                self._held = self._channel.receive()
        except HixlError as error:
            self._lose(error)
        return Progress.IDLE if self._held is None else Progress.MORE

    def _dispatch(self, data: bytes, descriptors: list[int]) -> None:
        assert self._on_message is not None
        try:
            kind, body = codec.decode(data)
        except ProtocolError:
            close_descriptors(descriptors)
            raise
        try:
            self._on_message(kind, body, descriptors)
        except HixlError:
            raise
        except BaseException as error:
            report(self._loop, f"hixl_async: a message of {self.identity.name!r} could not be handled", error)
            raise ProtocolError("a message could not be handled", peer=self.identity.name) from error

    def _flush(self) -> None:
        try:
            while self._channel.flush():
                if not self._queue:
                    self._loop.remove_writer(self._channel.fileno())
                    if self._flushed is not None and not self._flushed.done():
                        self._flushed.set_result(None)
                    return
                data, descriptors = self._queue[0]
                if not self._channel.send(data, descriptors):
                    return
                self._queue.popleft()
                self._queued_bytes -= len(data)
                self._queued_descriptors -= len(descriptors)
                close_descriptors(descriptors)
                if self._waiting and not self.crowded:
                    self._make_room()
        except PeerDownError as error:
            self._lose(error)

    def _lose(self, error: HixlError) -> None:
        if self._state is _State.CLOSING and self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)
        if self._state is not _State.OPEN:
            return
        self._state = _State.LOST
        self._error = error
        if error.peer is None:
            error.peer = self.identity.name
        self._disconnect()
        if self._on_lost is not None:
            self._loop.call_soon(self._tell_lost)

    def _tell_lost(self) -> None:
        # aclose() may have been called in between.
        if self._state is _State.LOST and self._error is not None and self._on_lost is not None:
            error, self._error = self._error, None
            self._on_lost(error)

    def _stop_reading(self) -> None:
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
        if self._first is not None:
            self._first.cancel()
            self._first = None
        self._scheduler.withdraw(self._read_next)

    def _drop_messages(self) -> None:
        """Drop the messages that wait to be sent or delivered."""
        for queued in self._queue:
            close_descriptors(queued.descriptors)
        self._queue.clear()
        if self._held is not None:
            close_descriptors(self._held.descriptors)
            self._held = None

    def _disconnect(self) -> None:
        """Unregister from the loop, and close the socket."""
        self._stop_reading()
        if self._channel.fileno() >= 0:
            self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self._drop_messages()
        self._queued_bytes = self._queued_descriptors = 0
        self._make_room()


def _duplicates(descriptors: Sequence[int]) -> list[int]:
    result: list[int] = []
    try:
        for descriptor in descriptors:
            result.append(os.dup(descriptor))  # not inheritable
    except OSError as error:
        close_descriptors(result)
        raise ProtocolError(f"a descriptor cannot be sent: {error.strerror}", native=error.errno) from None
    return result
