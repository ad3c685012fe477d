"""The two ends of a stream as state machines.  Pure: no engine, no loop, no clock; `stream` and `push` drive them.

Invariants for all interleavings of messages, aborts and losses (``tests/kv/test_states.py``):

S1  Each side gets exactly one outcome, which never changes.
S2  The producer's outcome is *finished* only if the consumer's is; without a loss or a timeout the two are equal.
S3  While the consumer is not fenced its blocks are not reused; once it is, no transfer of the producer can write them.
S4  Messages that arrive after an outcome change nothing but the fence.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from ..errors import ClosedError, InvalidArgumentError, RangeError, TicketError
from .protocol import End, Outcome, Verdict

__all__ = ["ConsumerState", "Phase", "ProducerState"]

FINISHED = Outcome(Verdict.FINISHED)


class ConsumerState:
    """The consumer's end: a granted ticket, then an open stream, then an outcome, and the fence with or after it.

    :param layers: the number of layers that make the stream complete.
    """

    __slots__ = ("_is_landed", "ended", "fenced", "landed", "opened", "outcome")

    def __init__(self, layers: int) -> None:
        self._is_landed = bytearray(layers)
        #: Layers whose data has landed, in the order of landing.
        self.landed: list[int] = []
        self.opened = False
        self.outcome: Outcome | None = None
        #: True once no peer can write the blocks any more.
        self.fenced = False
        #: True once no more messages of the producer can arrive, so that the stream can be forgotten.
        self.ended = False

    def is_landed(self, layer: int) -> bool:
        """Return True if the data of `layer` has landed."""
        return bool(self._is_landed[layer])

    def open(self) -> None:
        """Record that a producer uses the ticket.

        :raises TicketError: if it was used before, or is void.
        """
        if self.opened:
            raise TicketError("this ticket was used before")
        if self.outcome is not None:
            raise TicketError(f"this ticket is void: {self.outcome.reason}")
        self.opened = True

    def land(self, layers: Iterable[int]) -> list[int]:
        """Record that the data of these layers has landed, and return those that had not landed before."""
        if self.outcome is not None or not self.opened:
            return []
        news = [layer for layer in dict.fromkeys(layers) if not self._is_landed[layer]]
        for layer in news:
            self._is_landed[layer] = True
        self.landed.extend(news)
        if len(self.landed) == len(self._is_landed):
            self.outcome = FINISHED
            # Every layer is written once and its word follows its data, so no write can be outstanding.
            self.fenced = True
        return news

    def end(self, complete: bool, reason: str) -> tuple[Outcome, list[int]]:
        """Handle the producer's last message, and return the outcome and the layers that had not landed before."""
        # A complete stream's words were stored before this message was sent, but another transport may deliver them later.
        news = self.land(range(len(self._is_landed))) if complete else []
        if self.outcome is None:
            self.outcome = Outcome(Verdict.ABORTED, reason)
        self.fenced = self.ended = True
        return self.outcome, news

    def stop(self, outcome: Outcome) -> bool:
        """Give up with this outcome, or as void if no producer has opened the stream.

        :return: True if the producer has to be told.
        """
        if self.outcome is not None:
            return False
        self.outcome = outcome
        if not self.opened:  # no peer was given anything
            self.outcome = Outcome(Verdict.VOID, outcome.reason)
            self.fenced = self.ended = True
        return self.opened

    def lose(self, reason: str, dead: bool) -> None:
        """Record that the producer is lost.

        :param dead: True if its process is confirmed to have ended.
        """
        if self.outcome is None:
            self.outcome = Outcome(Verdict.LOST, reason)
        self.fenced |= dead
        self.ended = True

    def cut(self) -> None:
        """End the wait for messages of the producer, because the pool closes."""
        self.ended = True

    def fence(self) -> None:
        """Record that the producer's process can no longer touch the blocks."""
        self.fenced = True


class Phase(IntEnum):
    """The progress of a producer's stream, which only ever moves down this list."""

    #: Not opened yet.
    NEW = 0
    #: The consumer is asked.
    OPENING = 1
    #: Layers may be pushed.
    OPEN = 2
    #: No new transfer starts; those in flight drain, then the consumer is asked for the outcome.
    CONCLUDING = 3
    #: The stream has ended and is drained.
    CONCLUDED = 4


class ProducerState:
    """The producer's end: opening, pushing, stopping or complete, drained, then the consumer's reply.

    Methods that can end the pushing return True if this call has ended it: the caller then drops the queued layers, and cancels
    the transfers in flight.

    :param layers: the number of layers that make the stream complete.
    """

    __slots__ = (
        "_complete",
        "_in_flight",
        "_pushed",
        "closed",
        "end_sent",
        "impatient",
        "outcome",
        "phase",
        "stopping",
    )

    def __init__(self, layers: int) -> None:
        self._pushed = bytearray(layers)
        self._in_flight: set[int] = set()
        self._complete = 0
        self.phase = Phase.NEW
        #: The reason why nothing more may start, or None.
        self.stopping: str | None = None
        self.end_sent = False
        #: True once draining, or the consumer's reply, has taken too long, so that the program no longer waits.
        self.impatient = False
        self.outcome: Outcome | None = None

    @property
    def layers(self) -> int:
        """The number of layers that make the stream complete."""
        return len(self._pushed)

    @property
    def pushed(self) -> int:
        """The number of layers pushed."""
        return sum(self._pushed)

    @property
    def complete(self) -> bool:
        """True once all layers have landed."""
        return self._complete == len(self._pushed)

    @property
    def drained(self) -> bool:
        """True while no transfer can read the producer's memory or write the consumer's."""
        return not self._in_flight

    @property
    def concluding(self) -> bool:
        """True once no new transfer will start: those in flight drain, then the consumer is asked."""
        return self.complete or self.stopping is not None

    @property
    def needs_pushes(self) -> bool:
        """True while the stream needs further pushes."""
        return self.phase is Phase.OPEN and self.stopping is None and self.pushed < self.layers

    @property
    def settled(self) -> bool:
        """True once the program no longer has to wait."""
        return self.outcome is not None and (self.phase is Phase.CONCLUDED or self.impatient)

    # ---- opening ----

    def begin(self) -> None:
        """Record that the stream is being opened.

        :raises ClosedError: if that was tried before.
        """
        if self.phase is not Phase.NEW:
            raise ClosedError("a stream can be opened only once")
        self.phase = Phase.OPENING

    def open(self) -> None:
        """Record that the consumer has accepted the ticket."""
        assert self.phase is Phase.OPENING
        self.phase = Phase.OPEN

    # ---- layers ----

    def check(self, layer: int) -> None:
        """Return if the layer may be pushed.

        :raises RangeError: if there is no such layer.
        :raises InvalidArgumentError: if the layer was pushed before.
        :raises StreamAbortedError: if the stream was aborted; likewise the errors of the other outcomes.
        :raises ClosedError: if the stream is not open yet.
        """
        if self.phase < Phase.OPEN:
            raise ClosedError("the stream is not open: enter it with `async with`, or await it, before pushing")
        if not 0 <= layer < len(self._pushed):
            raise RangeError(f"layer {layer} does not exist: the stream has layers 0 to {len(self._pushed) - 1}")
        outcome = self.outcome
        if outcome is None and self.stopping is not None:
            outcome = Outcome(Verdict.ABORTED, self.stopping)
        if outcome is not None and (error := outcome.error()) is not None:
            raise error
        if self._pushed[layer]:
            raise InvalidArgumentError(f"layer {layer} was pushed before; every layer is pushed once")

    def push(self, layer: int) -> None:
        """Record that the layer is pushed; `check` has been called."""
        self._pushed[layer] = True

    def start(self, layer: int) -> bool:
        """Record that a transfer of the layer is about to start, or return False if it must not start."""
        if self.stopping is not None:
            return False
        self._in_flight.add(layer)
        return True

    def land(self, layer: int) -> None:
        """Record that a layer has landed; its transfer may still hold the producer's memory."""
        self._complete += 1

    def release(self, layer: int) -> None:
        """Record that the transfer of the layer can no longer touch either side's memory."""
        self._in_flight.discard(layer)

    # ---- giving up ----

    def close(self) -> bool:
        """Give up unless all layers were pushed."""
        reason = f"the producer closed the stream after {self.pushed} of {self.layers} layers"
        return self.pushed < self.layers and self.stop(reason)

    def stop(self, reason: str) -> bool:
        """Give up.  The outcome is the consumer's reply to `end`."""
        if self.stopping is not None or self.end_sent or self.outcome is not None:
            return False
        self.stopping = reason
        return True

    def abort(self, reason: str) -> bool:
        """Record that the consumer gave up, which is final."""
        return self._decide(Outcome(Verdict.ABORTED, reason))

    def lose(self, reason: str) -> bool:
        """Record that the consumer is lost."""
        return self._decide(Outcome(Verdict.LOST if self.phase >= Phase.OPEN else Verdict.VOID, reason))

    def give_up(self, reason: str) -> bool:
        """Stop waiting, because draining, or the consumer's reply, takes too long."""
        self.impatient = True
        return self._decide(Outcome(Verdict.TIMEOUT, reason))

    # ---- the end ----

    def conclude(self) -> bool:
        """Enter the conclusion if it is due, and return True if this call did."""
        # While the stream is opening, the consumer has not replied yet.
        if self.phase is not Phase.OPEN or not self.concluding:
            return False
        self.phase = Phase.CONCLUDING
        return True

    def end(self, id: str) -> End:
        """Return the producer's last message, to be sent once everything is drained."""
        assert self.concluding
        assert self.drained
        assert not self.end_sent
        self.end_sent = True
        return End(id, self.stopping is None, self.stopping or "")

    def answer(self, outcome: Outcome) -> bool:
        """Record the consumer's reply to `end`, or the reason why there is none."""
        return self._decide(outcome)

    def finish(self) -> None:
        """Record that the stream has ended and is drained."""
        self.phase = Phase.CONCLUDED

    def _decide(self, outcome: Outcome) -> bool:
        if self.outcome is None:
            self.outcome = outcome
        if self.stopping is not None or outcome.verdict is Verdict.FINISHED:
            return False
        self.stopping = outcome.reason
        return True
