"""Small public types: enums, named tuples and protocols without behaviour."""

from __future__ import annotations

from collections.abc import Callable
from enum import STRICT, Enum, IntFlag
from socket import AF_INET6, inet_pton
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from .display import shown

__all__ = [
    "Access",
    "AccessLike",
    "Address",
    "DriverInfo",
    "EngineStats",
    "PeerState",
    "Priority",
    "Ready",
    "TransferState",
]


class Access(IntFlag, boundary=STRICT):
    """The operations that peers may perform on a region.

    With `WRITE` alone, the kernel mapping of a peer on the same host can still read.
    """

    #: Peers may do nothing.
    NONE = 0
    #: Peers may read.
    READ = 1
    #: Peers may write.
    WRITE = 2
    #: Peers may read and write.
    READ_WRITE = 3

    @classmethod
    def parse(cls, value: AccessLike) -> Access:
        """Return the `Access` for a word.

        :param value: ``"none"``, ``"read"``, ``"write"``, ``"read-write"``, or an `Access` already.
        :return: the same rights as an `Access`.
        :raises ValueError: if `value` is none of these.
        """
        if isinstance(value, Access):
            return value
        try:
            return _ACCESS_WORDS[value]
        except (KeyError, TypeError):
            words = ", ".join(repr(word) for word in _ACCESS_WORDS)
            raise ValueError(f"access must be one of {words}, not {shown(value)}") from None

    def __str__(self) -> str:
        return next(word for word, access in _ACCESS_WORDS.items() if access == self)


#: An `Access`, or the word for it.
AccessLike: TypeAlias = Access | Literal["none", "read", "write", "read-write"]
#: The order in which a driver takes transfers that have not begun.
Priority: TypeAlias = Literal["low", "normal", "high"]

_ACCESS_WORDS: dict[str, Access] = {
    "none": Access.NONE,
    "read": Access.READ,
    "write": Access.WRITE,
    "read-write": Access.READ_WRITE,
}


class TransferState(Enum):
    """The outcome of a transfer so far; it does not say whether the transfer is drained (see ``Transfer.drained()``)."""

    #: The outcome is not known yet.
    ACTIVE = "active"
    #: All bytes are there.
    DONE = "done"
    #: It failed; the contents of the target range are undefined.
    FAILED = "failed"
    #: ``cancel()`` ended the wait; the contents of the target range are undefined.
    CANCELLED = "cancelled"


class PeerState(Enum):
    """The state of the connection to a peer."""

    #: The two sides are linking their drivers.
    CONNECTING = "connecting"
    #: Transfers, requests and notifications work.
    UP = "up"
    #: One side is leaving: work under way is drained, and new work is refused.
    CLOSING = "closing"
    #: The connection has ended; ``peer.error`` says why.
    DOWN = "down"


class Address(NamedTuple):
    """A host and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, value: str | Address) -> Address:
        """Return the `Address` for a text.

        :param value: ``"host:port"``, ``":port"`` (loopback), ``"[v6]:port"``, or an `Address` already.
        :return: the address.
        :raises ValueError: if `value` is none of these, the port is not in 0..65535, or an IPv6 address has no brackets.
        """
        address = value
        if isinstance(value, str):
            if value.count(":") > 1 and not {"[", "]"} & set(value):
                raise ValueError(f"an IPv6 address needs brackets, since a port follows it: write {_bracketed(value)}")
            host, colon, port = value.rpartition(":")
            bracketed = host.startswith("[") and host.endswith("]")
            if colon and port.isascii() and port.isdigit() and len(port) <= 5 and (":" not in host or bracketed):
                address = cls((host[1:-1] if bracketed else host) or "127.0.0.1", int(port))
        if not isinstance(address, Address) or not address._valid():
            raise ValueError(f"address must look like 'host:port' with a port in 0..65535, not {shown(value)}")
        return address

    def _valid(self) -> bool:
        host, port = self
        return (
            isinstance(host, str)
            and bool(host)
            and host.isprintable()
            and isinstance(port, int)
            and not isinstance(port, bool)
            and 0 <= port <= 65535
        )

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _bracketed(text: str) -> str:
    """Return the forms that the writer of an IPv6 address without brackets may have meant."""
    host, _, port = text.rpartition(":")
    try:
        inet_pton(AF_INET6, host)
    except OSError:
        return f"[{text}]:PORT"
    return f"[{text}]:PORT, or [{host}]:{port} if {port} is the port"


class DriverInfo(NamedTuple):
    """One row of ``hixl-async info``: a driver and whether it can be used here."""

    #: The name by which ``Engine(drivers=[...])`` asks for it.
    name: str
    #: Words for what it can do, e.g. ``("allocate", "notify")``; empty where it could not be loaded.
    capabilities: tuple[str, ...]
    #: Why it cannot be used, or None.
    problem: str | None


class EngineStats(NamedTuple):
    """The counters and gauges of one engine; every gauge returns to zero when all work is done and everything is closed."""

    #: Transfers accepted since the engine was opened.
    transfers: int
    #: The transfers among them that finished inside the call.
    inline: int
    #: Bytes that were transferred, by reads and writes together.
    bytes: int
    #: Transfers that failed, timed out or were cancelled.
    failed: int
    #: Gauge: transfers whose outcome is not known yet.
    in_flight: int
    #: Gauge: slots whose local memory is still pinned by the driver (includes `in_flight`).
    pinned: int
    #: Gauge: bytes of those transfers.
    bytes_in_flight: int
    #: Gauge: local regions.
    regions: int
    #: Gauge: imported regions of peers.
    remote_regions: int
    #: Gauge: connected peers.
    peers: int
    #: Notifications received, delivered or dropped.
    notifications: int
    #: Notifications dropped because a subscriber's queue, or the store for topics without a subscriber, was full.
    notifications_dropped: int
    #: Wake-ups of the loop by driver threads.
    wakeups: int


@runtime_checkable
class _Query(Protocol):
    def query(self) -> bool: ...


@runtime_checkable
class _IsSet(Protocol):
    def is_set(self) -> bool: ...


#: The type of ``push(ready=...)``: None (ready now), a ``torch`` device event, an event with ``is_set()``, or a callable.
Ready: TypeAlias = _Query | _IsSet | Callable[[], bool] | None
