"""Every exception of the package.

::

    HixlError
    ├── UsageError                        you called it wrongly; nothing was sent, the engine goes on working
    │   ├── InvalidArgumentError          (ValueError) a malformed argument
    │   │   ├── RangeError                (IndexError) outside a region, or lengths that differ
    │   │   └── BufferTypeError           (TypeError) memory that cannot be used as it is
    │   ├── AccessError                   (PermissionError) the region's rights forbid it
    │   ├── ClosedError                   (RuntimeError) the engine, region, pool or stream was closed
    │   ├── BusyError                     a bounded resource is in use; retryable
    │   ├── WrongLoopError                (RuntimeError) used from another event loop or thread
    │   └── EngineForkedError             (RuntimeError) used in a child of fork()
    ├── DriverError                       a driver could not be loaded, opened or lacks a capability
    │   └── DriverLoadError               (ImportError)
    ├── ConnectError                      (ConnectionError) no usable connection came to be
    │   ├── AuthenticationError           the peer could not prove itself, or refused our proof
    │   ├── ProtocolError                 the peer speaks another version, or nonsense
    │   ├── AddressInUseError             (OSError) somebody listens there already
    │   └── NoRouteError                  no driver that both sides have reaches the peer's memory
    ├── TransferError                     accepted work failed; the target range's contents are undefined
    │   ├── PeerLostError                 (ConnectionError) the peer died, left or broke the link
    │   ├── TransferTimeoutError          (TimeoutError) no progress, or the deadline passed
    │   └── StaleRegionError              the remote region was closed or belongs to an earlier incarnation
    └── StreamError                       a KV stream ended without all of its layers
        ├── StreamAbortedError            one of the two sides gave up
        ├── TicketError                   the ticket is unknown, used, expired or not for this peer
        └── LayoutMismatchError           (ValueError) the two sides' KV layouts differ

`UsageError` means that your code should change, `ConnectError` and `TransferError` that the world did; `retryable` says
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
    "HixlError",
    "InvalidArgumentError",
    "LayoutMismatchError",
    "NoRouteError",
    "PeerLostError",
    "ProtocolError",
    "RangeError",
    "StaleRegionError",
    "StreamAbortedError",
    "StreamError",
    "TicketError",
    "TransferError",
    "TransferTimeoutError",
    "UsageError",
    "WrongLoopError",
]


#: Characters of a message; whatever a caller passed by mistake is shown in part.
_MOST = 4000


class HixlError(Exception):
    """The root of all errors of this package."""

    #: A stable, machine-readable word for the kind of error.
    code: str = "error"
    #: True if the same call may succeed later without a change.
    retryable: bool = False

    def __init__(
        self, message: str, *, peer: str | None = None, index: int | None = None, native: int | None = None
    ) -> None:
        text = str(message)
        super().__init__(text if len(text) <= _MOST else f"{text[: _MOST // 2]} ... {text[-_MOST // 4 :]}")
        #: Name of the peer concerned, where there is one.
        self.peer = peer
        #: Index of the failed descriptor in its batch, where known.
        self.index = index
        #: The transport's or operating system's own code, where there is one.
        self.native = native

    def __str__(self) -> str:
        # Some subclasses are also OSErrors or ImportErrors, whose own __str__ would show something else.
        return str(self.args[0]) if self.args else self.code


class UsageError(HixlError):
    """The call was wrong; nothing was sent and nothing changed."""

    code = "usage"


class InvalidArgumentError(UsageError, ValueError):
    """An argument is malformed; the message names it and says what is expected."""

    code = "invalid-argument"


class RangeError(InvalidArgumentError, IndexError):
    """A range lies outside its region, is empty, or two ranges differ in length."""

    code = "range"


class BufferTypeError(InvalidArgumentError, TypeError):
    """An object has no memory that can be used as it is: not contiguous, read-only, or no buffer at all."""

    code = "buffer"


class AccessError(UsageError, PermissionError):
    """The rights of the region do not allow this."""

    code = "access"


class ClosedError(UsageError, RuntimeError):
    """The engine, region, pool, stream or subscription was closed before."""

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


class DriverError(HixlError):
    """A driver refused to open, or cannot do what was asked."""

    code = "driver"


class DriverLoadError(DriverError, ImportError):
    """A driver's module or library could not be loaded; the message lists every attempt."""

    code = "driver-load"


class ConnectError(HixlError, ConnectionError):
    """No usable connection to the peer came to be."""

    code = "connect"
    retryable = True


class AuthenticationError(ConnectError):
    """One side could not prove that it knows the secret, or is the same user."""

    code = "authentication"
    retryable = False


class ProtocolError(ConnectError):
    """The other side speaks another protocol version, or sent something that is no valid message."""

    code = "protocol"
    retryable = False


class AddressInUseError(ConnectError):
    """The engine cannot listen on its address, because somebody else does."""

    code = "address-in-use"


class NoRouteError(ConnectError):
    """No driver that both sides have can reach the peer's memory."""

    code = "no-route"
    retryable = False


class TransferError(HixlError):
    """Accepted work failed.  The contents of its target range are undefined."""

    code = "transfer"


class PeerLostError(TransferError, ConnectionError):
    """The peer's process ended, it left, or its link broke."""

    code = "peer-lost"
    retryable = True
    #: True if the peer's process is known to have ended, so that it cannot touch any memory again.
    confirmed_dead: bool = False


class TransferTimeoutError(TransferError, TimeoutError):
    """A transfer made no progress, or missed its deadline.

    The memory it uses stays pinned until the driver gives it back: await ``transfer.drained()`` before reusing it.
    """

    code = "timeout"
    retryable = True


class StaleRegionError(TransferError):
    """The remote region was closed by its owner, or belongs to an earlier incarnation of the peer."""

    code = "stale-region"


class StreamError(HixlError):
    """A KV stream ended without all of its layers."""

    code = "stream"


class StreamAbortedError(StreamError):
    """One of the two sides aborted the stream; the message carries its reason."""

    code = "stream-aborted"


class TicketError(StreamError):
    """A ticket is unknown, was used before, or belongs to somebody else."""

    code = "ticket"


class LayoutMismatchError(StreamError, ValueError):
    """The KV layouts of the two sides differ; the message lists the fields."""

    code = "layout"
