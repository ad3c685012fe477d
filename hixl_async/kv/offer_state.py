"""The owner's end of an offer as a state machine.  Pure: no engine, no loop, no clock; `offering` drives it.

An offer has one owner and a fixed number of readers.  Layers are published in chunks, in order; each reader reads them when it
likes, and ends once.  The readers are independent: the failure of one ends no other, and is reported at the end.

Invariants for all interleavings (``tests/kv/test_offer_state.py``):

O1  The offer gets exactly one outcome, which never changes.
O2  It is *finished* only if all was published, and all readers ended with all of it.
O3  The blocks are released exactly once: after the outcome, and after the end of each reader that has opened the offer.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ClosedError, InvalidArgumentError, RangeError, TicketError
from .outcome import Outcome, Verdict
from .states import FINISHED

__all__ = ["OfferState"]


class OfferState:
    """An offer, from the ticket until no reader needs the blocks.

    :param tokens: for each layer that is offered the position of the first token, and the one after the last.
    :param readers: the number of readers.
    """

    __slots__ = (
        "_announced",
        "_expired",
        "_tokens",
        "awaited",
        "ended",
        "opened",
        "outcome",
        "payload",
        "published",
        "setback",
    )

    def __init__(self, tokens: Mapping[int, tuple[int, int]], readers: int) -> None:
        self._tokens = dict(tokens)
        self._announced: dict[int, tuple[int, bool]] = {}  # like `published`, with what is not ready yet
        self._expired = False
        #: The readers that may still open the offer.
        self.awaited = readers
        #: The readers that have opened it, and those of them that have ended.
        self.opened = self.ended = 0
        #: What was published of each layer: the position after the last token, and True if no more follow.
        self.published: dict[int, tuple[int, bool]] = {}
        #: What is handed over with the end, once the program has finished the offer.
        self.payload: bytes | None = None
        #: The first failure of a reader, or None.
        self.setback: Outcome | None = None
        self.outcome: Outcome | None = None

    @property
    def layers(self) -> int:
        """The number of layers that are offered."""
        return len(self._tokens)

    @property
    def announced(self) -> int:
        """The number of layers of which the program has published all, ready or not."""
        return sum(complete for _, complete in self._announced.values())

    @property
    def complete(self) -> bool:
        """True once all of all layers may be read, and the program has finished the offer."""
        return self.payload is not None and sum(complete for _, complete in self.published.values()) == self.layers

    @property
    def released(self) -> bool:
        """True once no reader needs the blocks, and none will."""
        return self.outcome is not None and self.opened == self.ended

    def check_going_on(self) -> None:
        """Return if more can be published.

        :raises StreamAbortedError: if the offer was aborted; likewise the errors of the other outcomes.
        :raises ClosedError: if it has ended.
        """
        if self.outcome is not None:
            raise self.outcome.error() or ClosedError("the offer has ended")

    def announce(self, layer: int, tokens: tuple[int, int] | None, complete: bool) -> tuple[int, bool]:
        """Record that the program publishes some tokens of a layer, or all that are left.

        :return: the position after the last one, and True if no more follow.
        :raises InvalidArgumentError: if all of the layer was published before, or tokens are left out or published twice.
        :raises RangeError: if the offer does not have the tokens.
        """
        begin, end = self._tokens[layer]
        after, whole = self._announced.get(layer, (begin, False))
        if whole:
            raise InvalidArgumentError(f"all of layer {layer} was published before; every token is published once")
        first, last = tokens or (after, end)
        if not begin <= first < last <= end:
            raise RangeError(f"the offer has the tokens {begin} to {end} of layer {layer}, not {first} to {last}")
        if first != after:
            raise InvalidArgumentError(
                f"tokens from {first} of layer {layer} were published where those from {after} are next; publish them in order"
            )
        self._announced[layer] = announced = (last, complete or last == end)
        return announced

    def publish(self, layer: int, after: int, complete: bool) -> None:
        """Record that the tokens of a layer before a position may be read."""
        self.published[layer] = (after, complete)
        self._conclude()

    def finish(self, payload: bytes) -> None:
        """Record that the program has finished the offer.

        :raises ClosedError: if it did before, or a layer is missing.
        """
        self.check_going_on()
        if self.payload is not None:
            raise ClosedError("the offer was finished before")
        if missing := self.layers - self.announced:
            raise ClosedError(f"{missing} of {self.layers} layers were not published; publish them, or abort the offer")
        self.payload = payload
        self._conclude()

    def open(self) -> None:
        """Record that a reader uses the ticket.

        :raises TicketError: if as many as were announced did before, or the ticket has expired, or the offer has ended.
        """
        if self.outcome is not None:
            raise TicketError(f"this ticket is void: {self.outcome.reason or 'the offer has ended'}")
        if self._expired:
            raise TicketError("this ticket has expired: not every reader opened it in time")
        if not self.awaited:
            raise TicketError(f"this ticket was used by all of its {self.opened} readers")
        self.awaited -= 1
        self.opened += 1

    def end(self, outcome: Outcome) -> None:
        """Record that a reader needs the blocks no more."""
        self.ended += 1
        self._note(outcome)

    def expire(self, outcome: Outcome) -> None:
        """Record that no further reader can open the offer: its end, if none has."""
        if not self.awaited:
            return
        self.awaited = 0
        self._expired = True
        if self.opened:
            self._note(outcome)
        else:
            self.stop(outcome)

    def stop(self, outcome: Outcome) -> bool:
        """Give up with this outcome, or as void if no reader has opened the offer.

        :return: True if this call ended the offer.
        """
        if self.outcome is not None:
            return False
        self.outcome = outcome if self.opened else Outcome(Verdict.VOID, outcome.reason)
        return True

    def _note(self, outcome: Outcome) -> None:
        if outcome != FINISHED and self.setback is None:
            self.setback = outcome
        self._conclude()

    def _conclude(self) -> None:
        if self.outcome is None and self.complete and not self.awaited and self.opened == self.ended:
            self.outcome = self.setback or FINISHED
