"""The ends of streams."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ..errors import (
    HixlError,
    LayoutMismatchError,
    LeaseExpiredError,
    PeerLostError,
    StreamAbortedError,
    TicketError,
    TransferTimeoutError,
)

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = ["Outcome", "Verdict"]


class Verdict(Enum):
    """The way in which a stream ended."""

    #: All layers have landed, and all senders have ended.
    FINISHED = "finished"
    #: One of the two sides gave up.
    ABORTED = "aborted"
    #: A time limit passed: of the lease, of the whole stream, or of its end.
    TIMEOUT = "timeout"
    #: The peer was lost.
    LOST = "lost"
    #: The two sides' caches differ.
    REFUSED = "refused"
    #: The producer's ticket differs from the one that was issued.
    INVALID_TICKET = "invalid-ticket"
    #: The stream ended before it was open on this side, so that nothing was written.
    VOID = "void"
    #: The owner of offered blocks did not keep them until they were read.
    EXPIRED = "expired"


_ERRORS: dict[Verdict, type[HixlError]] = {
    Verdict.ABORTED: StreamAbortedError,
    Verdict.TIMEOUT: TransferTimeoutError,
    Verdict.LOST: PeerLostError,
    Verdict.REFUSED: LayoutMismatchError,
    Verdict.INVALID_TICKET: TicketError,
    Verdict.VOID: TicketError,
    Verdict.EXPIRED: LeaseExpiredError,
}


class Outcome(NamedTuple):
    """The end of a stream, as one side sees it."""

    #: The way in which the stream ended.
    verdict: Verdict
    #: An explanation for people; empty if the stream finished.
    reason: str = ""

    def error(self, peer: Peer | None = None) -> HixlError | None:
        """Return a new exception for this outcome, or None if it is *finished*.

        :param peer: the other side, which the exception names.
        """
        if self.verdict is Verdict.FINISHED:
            return None
        error = _ERRORS[self.verdict](self.reason, peer=None if peer is None else peer.name)
        if isinstance(error, PeerLostError) and peer is not None:
            error.confirmed_dead = peer.confirmed_dead
        return error
