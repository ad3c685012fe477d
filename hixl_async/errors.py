"""Every exception of the package.

The class of an error tells what happened to the memory of transfers: there are two disjoint roots::

    HixlError
    ├── RefusedError                      nothing was sent, and no transfer memory changed
    │   ├── UsageError                    the call is wrong; the engine goes on working
    │   │   ├── InvalidArgumentError      (ValueError) a malformed argument
    │   │   │   ├── RangeError            (IndexError) outside a region, or lengths that differ
    │   │   │   └── BufferTypeError       (TypeError) memory that cannot be used as it is
    │   │   ├── AccessError               (PermissionError) the region's rights forbid it
    │   │   ├── ClosedError               (RuntimeError) the engine, region, pool or stream was closed
    │   │   ├── BusyError                 a bounded resource is in use; retryable
    │   │   ├── WrongLoopError            (RuntimeError) used from another event loop or thread
    │   │   └── EngineForkedError         (RuntimeError) used in a child of fork()
    │   ├── DriverError                   a driver could not be opened, or cannot do what was asked
    │   │   └── DriverLoadError           (ImportError) its module or library could not be loaded
    │   ├── ConnectError                  (ConnectionError) no connection to the peer was made
    │   │   ├── AuthenticationError       one side could not prove itself to the other
    │   │   ├── HandshakeError            the other side is no engine, or one of another version
    │   │   ├── AddressInUseError         another program listens on the engine's address
    │   │   ├── UnknownHostError          the name service has no entry for the host of an address
    │   │   └── NoRouteError              no driver that both sides have reaches the peer's memory
    │   ├── ProtocolError                 a message on a standing connection is malformed
    │   ├── PeerDownError                 (ConnectionError) the peer is down; it was before the call, or while the caller waited
    │   │   └── RequestLostError          the peer went down before it answered; its handler may have run
    │   ├── StaleRegionError              the remote region was closed by its owner
    │   ├── WaitTimeoutError              (TimeoutError) a wait for a region or a stream's opening took too long
    │   ├── RequestTimeoutError           (TimeoutError) a request was not answered in time; its handler may have run
    │   ├── RemoteError                   the peer's handler of a request failed, because of the peer's own work
    │   ├── TicketError                   a KV stream's ticket is unknown, used, expired or not for this peer
    │   └── LayoutMismatchError           (ValueError) the two sides' KV caches differ
    └── TransferError                     accepted work failed: the target's contents are undefined until drained
        ├── PeerLostError                 (ConnectionError) the peer went down, or was closed here, with the transfer in flight
        ├── TransferTimeoutError          (TimeoutError) no progress, or the timeout passed
        ├── StreamAbortedError            a KV stream ended without all of its layers
        └── LeaseExpiredError             the blocks of an offer were not kept until they were read

`TicketError`, `LayoutMismatchError`, `StreamAbortedError` and `LeaseExpiredError` are also `StreamError`, which stands beside
the two roots.

Waiting, connecting and requests belong to the first root, because the roots speak of transfer memory.  `retryable` says
whether the same call may succeed later without a change.
"""

from __future__ import annotations

__all__ = [
    "AccessError",
    "AddressInUseError",
    "AuthenticationError",
    "BufferTypeError",
    "BusyError",
    "ClosedError",
    "ConnectError",
    "DriverError",
    "DriverLoadError",
    "EngineForkedError",
    "HandshakeError",
    "HixlError",
    "InvalidArgumentError",
    "LayoutMismatchError",
    "LeaseExpiredError",
    "NoRouteError",
    "PeerDownError",
    "PeerLostError",
    "ProtocolError",
    "RangeError",
    "RefusedError",
    "RemoteError",
    "RequestLostError",
    "RequestTimeoutError",
    "StaleRegionError",
    "StreamAbortedError",
    "StreamError",
    "TicketError",
    "TransferError",
    "TransferTimeoutError",
    "UnknownHostError",
    "UsageError",
    "WaitTimeoutError",
    "WrongLoopError",
]


#: The most characters of a message; a long one, such as the repr of a wrong argument, is shown in part.
_MOST = 4000


class HixlError(Exception):
    """The base of all errors of this package; every error that is raised has one of the roots below it."""

    #: A stable, machine-readable word for the kind of error.
    code: str = "error"
    #: True if the same call may succeed later without a change.
    retryable: bool = False

    def __init__(
        self, message: str, *, peer: str | None = None, index: int | None = None, native: int | None = None
    ) -> None:
        text = str(message)
        super().__init__(text if len(text) <= _MOST else f"{text[: _MOST // 2]} ... {text[-_MOST // 4 :]}")
        #: The name of the peer concerned, where there is one.
        self.peer = peer
        #: The index of the failed descriptor in its batch, where known.
        self.index = index
        #: The transport's or operating system's own code, where there is one.
        self.native = native

    def __str__(self) -> str:
        # Some subclasses are also OSErrors or ImportErrors, whose own __str__ would show something else.
        return str(self.args[0]) if self.args else self.code


class RefusedError(HixlError):
    """The root of all errors after which no transfer memory has changed, because nothing was sent."""

    code = "refused"


class UsageError(RefusedError):
    """The call is wrong; nothing was sent and nothing changed."""

    code = "usage"


class InvalidArgumentError(UsageError, ValueError):
    """An argument is malformed; the message names it and says what is expected."""

    code = "invalid-argument"


class RangeError(InvalidArgumentError, IndexError):
    """A range lies outside its region or is empty, or two ranges differ in length."""

    code = "range"


class BufferTypeError(InvalidArgumentError, TypeError):
    """An object has no memory that can be used as it is: not contiguous, read-only, or no buffer at all."""

    code = "buffer"


class AccessError(UsageError, PermissionError):
    """The rights of the region do not allow the call."""

    code = "access"


class ClosedError(UsageError, RuntimeError):
    """The engine, region, pool, stream or subscription was closed before, or while the caller waited."""

    code = "closed"


class BusyError(UsageError):
    """A bounded resource is in use; the same call may succeed later."""

    code = "busy"
    retryable = True


class WrongLoopError(UsageError, RuntimeError):
    """The engine belongs to another event loop or thread."""

    code = "wrong-loop"


class EngineForkedError(UsageError, RuntimeError):
    """The engine was opened before fork(); a child process must open its own."""

    code = "forked"


class DriverError(RefusedError):
    """A driver cannot be opened, or cannot do what was asked."""

    code = "driver"


class DriverLoadError(DriverError, ImportError):
    """A driver's module or library cannot be loaded; the message lists every attempt."""

    code = "driver-load"


class ConnectError(RefusedError, ConnectionError):
    """No connection to the peer was made."""

    code = "connect"
    retryable = True


class AuthenticationError(ConnectError):
    """One side could not prove that it knows the secret, or that it is the same user."""

    code = "authentication"
    retryable = False


class HandshakeError(ConnectError):
    """The other side is no engine of this package, or speaks another version of the protocol."""

    code = "handshake"
    retryable = False


class AddressInUseError(ConnectError):
    """Another program listens on the engine's address."""

    code = "address-in-use"


class UnknownHostError(ConnectError):
    """The host of an address has no entry in the name service."""

    code = "unknown-host"
    retryable = False


class NoRouteError(ConnectError):
    """No driver that both sides have can reach the peer's memory."""

    code = "no-route"
    retryable = False


class ProtocolError(RefusedError):
    """A message on a standing connection is malformed, or comes where it has no place."""

    code = "protocol"


class PeerDownError(RefusedError, ConnectionError):
    """The peer is down: its process ended, it left, or its link broke, before the call or while the caller waited.

    A transfer that was in flight then fails with `PeerLostError` instead.
    """

    code = "peer-down"
    retryable = True
    #: True if the peer's process is known to have ended, so that it cannot touch any memory again.
    confirmed_dead: bool = False


class RequestLostError(PeerDownError):
    """The peer went down before it answered a request; its handler may have run."""

    code = "request-lost"


class StaleRegionError(RefusedError):
    """The remote region was closed by its owner, or belongs to an earlier incarnation of the peer."""

    code = "stale-region"


class WaitTimeoutError(RefusedError, TimeoutError):
    """A wait for something other than a transfer took longer than its ``timeout=``."""

    code = "wait-timeout"
    retryable = True


class RequestTimeoutError(RefusedError, TimeoutError):
    """The peer did not answer a request within its ``timeout=``; its handler may have run, or may still run."""

    code = "request-timeout"
    retryable = True


class RemoteError(RefusedError):
    """The peer's handler of a request failed, because of the peer's own work and not because of the request.

    The message has the class and the text of an error of this package.  Of any other exception it has neither, because they may
    be confidential: the peer's loop reports them there.
    """

    code = "remote"
    #: The name of the class of the error that the peer reports; ``"RemoteError"`` if its handler failed with an exception that
    #: is not of this package.
    remote_class: str = "RemoteError"


class TransferError(HixlError):
    """The root of all failures of accepted work.

    The contents of its target range are undefined, and the local memory stays pinned until ``transfer.drained()``.
    """

    code = "transfer"


class PeerLostError(TransferError, ConnectionError):
    """The peer went down, or was closed here, with the transfer in flight; the message says why, as far as it is known."""

    code = "peer-lost"
    retryable = True
    #: True if the peer's process is known to have ended, so that it cannot touch any memory again.
    confirmed_dead: bool = False


class TransferTimeoutError(TransferError, TimeoutError):
    """A transfer made no progress, or did not finish within its ``timeout=``.

    The memory it uses stays pinned until the driver gives it back: await ``transfer.drained()`` before reusing it.
    """

    code = "timeout"
    retryable = True


class StreamError(HixlError):
    """The base of the errors that only KV streams raise; each of them has one of the two roots as well."""

    code = "stream"


class StreamAbortedError(StreamError, TransferError):
    """One of the two sides aborted the stream; the message carries its reason."""

    code = "stream-aborted"


class LeaseExpiredError(StreamError, TransferError):
    """The owner of blocks did not keep them until they were read, because it had heard nothing for too long."""

    code = "lease-expired"


class TicketError(StreamError, RefusedError):
    """A ticket is unknown, was changed or used before, has expired, or belongs to another peer."""

    code = "ticket"


class LayoutMismatchError(StreamError, RefusedError, ValueError):
    """The KV caches of the two sides differ, or the senders do not hold all that is needed; the message says in what."""

    code = "layout"
