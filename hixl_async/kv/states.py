"""The two ends of a stream as state machines.  Pure: no engine, no loop, no clock; `stream` and `push` feed them.

What they keep, for all interleavings of messages, aborts and losses (``tests/kv/test_states.py``):

S1  Each side gets exactly one outcome, and never another.
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
    """The consumer's end: a granted ticket, then an open stream, then an outcome; the fence comes with or after it.

    :param layers: number of layers that make the stream complete.
    """

    __slots__ = ("_is_landed", "ended", "fenced", "landed", "opened", "outcome")

    def __init__(self, layers: int) -> None:
        self._is_landed = bytearray(layers)
        #: Layers whose data is here, in the order in which they came.
        self.landed: list[int] = []
        self.opened = False
        self.outcome: Outcome | None = None
        #: True once no peer can write the blocks any more.
        self.fenced = False
        #: True once no more messages of the producer are to be expected; the stream can be forgotten.
        self.ended = False

    def is_landed(self, layer: int) -> bool:
        """Return True if the data of `layer` is here."""
        return bool(self._is_landed[layer])

    def open(self) -> None:
        """Note that a producer uses the ticket.

        :raises TicketError: if it was used before, or is void.
        """
        if self.opened:
            raise TicketError("this ticket was used before")
        if self.outcome is not None:
            raise TicketError(f"this ticket is void: {self.outcome.reason}")
        self.opened = True

    def land(self, layers: Iterable[int]) -> list[int]:
        """Note that the data of these layers is here, and return those for which this is news."""
        if self.outcome is not None or not self.opened:
            return []
        news = [layer for layer in dict.fromkeys(layers) if not self._is_landed[layer]]
        for layer in news:
            self._is_landed[layer] = True
        self.landed.extend(news)
        if len(self.landed) == len(self._is_landed):
            self.outcome = FINISHED
            # Every layer is written once and its word follows its data: there is nothing left that could write.
            self.fenced = True
        return news

    def end(self, complete: bool, reason: str) -> tuple[Outcome, list[int]]:
        """Take the producer's last message, and return the outcome and the layers that are news."""
        # A complete stream's words were stored before this message was sent, but another transport may bring them
        # later.
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
        """Note that the producer is lost.

        :param dead: True if its process is confirmed to have ended.
        """
        if self.outcome is None:
            self.outcome = Outcome(Verdict.LOST, reason)
        self.fenced |= dead
        self.ended = True

    def cut(self) -> None:
        """Expect no more messages of the producer: the pool waits no longer."""
        self.ended = True

    def fence(self) -> None:
        """Note that the producer's process can no longer touch the blocks."""
        self.fenced = True


class Phase(IntEnum):
    """The progress of a producer's stream, which only ever moves down this list."""

    #: Not opened yet.
    NEW = 0
    #: The consumer is asked.
    OPENING = 1
    #: Layers may be pushed.
    OPEN = 2
    #: Nothing new starts; what is in flight drains, then the consumer is asked for the outcome.
    CONCLUDING = 3
    #: Nothing of the stream works any more.
    CONCLUDED = 4


class ProducerState:
    """The producer's end: opening, pushing, stopping or complete, drained, then the consumer's reply.

    Methods that can end the pushing return True if this call has ended it: what is queued has to be dropped then, and what
    is in flight has to be cancelled.

    :param layers: number of layers that make the stream complete.
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
        #: True once draining, or the consumer's reply, has taken too long: the program waits no longer.
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
        """True once nothing new will start: what is in flight has to drain, then the consumer is asked."""
        return self.complete or self.stopping is not None

    @property
    def needs_pushes(self) -> bool:
        """True while the stream can only go on by further pushes."""
        return self.phase is Phase.OPEN and self.stopping is None and self.pushed < self.layers

    @property
    def settled(self) -> bool:
        """True once the program has nothing left to wait for."""
        return self.outcome is not None and (self.phase is Phase.CONCLUDED or self.impatient)

    # ---- opening ----

    def begin(self) -> None:
        """Note that the stream is being opened.

        :raises ClosedError: if that was tried before.
        """
        if self.phase is not Phase.NEW:
            raise ClosedError("a stream is opened once")
        self.phase = Phase.OPENING

    def open(self) -> None:
        """Note that the consumer has accepted the ticket."""
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
        """Note that the layer is handed over; `check` has been called."""
        self._pushed[layer] = True

    def start(self, layer: int) -> bool:
        """Note that a transfer of the layer is about to start, or return False if it must not any more."""
        if self.stopping is not None:
            return False
        self._in_flight.add(layer)
        return True

    def land(self, layer: int) -> None:
        """Note that a layer is in the consumer's memory; its transfer may still hold the producer's."""
        self._complete += 1

    def release(self, layer: int) -> None:
        """Note that the transfer of the layer can touch neither side's memory any more."""
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
        """Note that the consumer gave up, which is final."""
        return self._decide(Outcome(Verdict.ABORTED, reason))

    def lose(self, reason: str) -> bool:
        """Note that the consumer is lost."""
        return self._decide(Outcome(Verdict.LOST if self.phase >= Phase.OPEN else Verdict.VOID, reason))

    def give_up(self, reason: str) -> bool:
        """Wait no longer: draining, or the consumer's reply, takes too long."""
        self.impatient = True
        return self._decide(Outcome(Verdict.TIMEOUT, reason))

    # ---- the end ----

    def conclude(self) -> bool:
        """Enter the conclusion if the time for it has come, and return True if this call did."""
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
        """Take the consumer's reply to `end`, or the reason why there is none."""
        return self._decide(outcome)

    def finish(self) -> None:
        """Note that nothing of the stream works any more."""
        self.phase = Phase.CONCLUDED

    def _decide(self, outcome: Outcome) -> bool:
        if self.outcome is None:
            self.outcome = outcome
        if self.stopping is not None or outcome.verdict is Verdict.FINISHED:
            return False
        self.stopping = outcome.reason
        return True
