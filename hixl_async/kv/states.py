"""The two ends of a stream as state machines.  Pure: no engine, no loop, no clock; `stream` and `push` feed them.

What they keep, for all interleavings of messages, aborts and losses (``tests/kv/test_states.py``):

S1  Each side gets exactly one outcome, and never another.
S2  The producer says *finished* only if the consumer does; without a loss or a timeout the two outcomes are equal.
S3  While the consumer is not fenced its blocks are not reused, and when it is, no flight of the producer can write
them. S4  Whatever arrives after an outcome changes nothing but the fence.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ClosedError, InvalidArgumentError, RangeError, TicketError
from .protocol import End, Outcome, Verdict

__all__ = ["ConsumerState", "ProducerState"]

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
        #: True once the producer has nothing more to say; the stream can be forgotten.
        self.ended = False

    def is_landed(self, layer: int) -> bool:
        return bool(self._is_landed[layer])

    def open(self) -> None:
        """The producer uses the ticket.

        :raises TicketError: if it was used before, or is void.
        """
        if self.opened:
            raise TicketError("this ticket was used before")
        if self.outcome is not None:
            raise TicketError(f"this ticket is void: {self.outcome.reason}")
        self.opened = True

    def land(self, layers: Iterable[int]) -> list[int]:
        """Data of these layers is here.  Answers those for which this is news."""
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
        """The producer's last word.  Answers the outcome and the layers that are news."""
        # A complete stream's words were stored before this message was sent, but another transport may bring them
        # later.
        news = self.land(range(len(self._is_landed))) if complete else []
        if self.outcome is None:
            self.outcome = Outcome(Verdict.ABORTED, reason)
        self.fenced = self.ended = True
        return self.outcome, news

    def stop(self, outcome: Outcome) -> bool:
        """Give the stream up with this outcome, or as void if no producer has opened it.

        :return: True if the producer has to be told.
        """
        if self.outcome is not None:
            return False
        self.outcome = outcome
        if not self.opened:
            self.outcome = Outcome(Verdict.VOID, outcome.reason)
            self.fenced = self.ended = True
        return self.opened

    def lose(self, reason: str, dead: bool) -> None:
        """The producer is lost; `dead` says that its process is confirmed to be gone."""
        if self.outcome is None:
            self.outcome = Outcome(Verdict.LOST, reason)
        self.fenced |= dead
        self.ended = True

    def fence(self) -> None:
        """The producer's process can no longer touch our memory."""
        self.fenced = True


class ProducerState:
    """The producer's end: opening, pushing, stopping or complete, drained, then the consumer's answer.

    :param layers: number of layers that make the stream complete.
    """

    __slots__ = ("_complete", "_flying", "_pushed", "closed", "end_sent", "outcome", "stopping")

    def __init__(self, layers: int) -> None:
        self._pushed = bytearray(layers)
        self._flying: set[int] = set()
        self._complete = 0
        self.closed = False
        #: Why nothing more may start, or None.
        self.stopping: str | None = None
        self.end_sent = False
        self.outcome: Outcome | None = None

    @property
    def layers(self) -> int:
        return len(self._pushed)

    @property
    def pushed(self) -> int:
        """Number of layers pushed."""
        return sum(self._pushed)

    @property
    def complete(self) -> bool:
        """True once all layers have landed."""
        return self._complete == len(self._pushed)

    @property
    def drained(self) -> bool:
        """True while no flight can read our memory or write the consumer's."""
        return not self._flying

    @property
    def concluding(self) -> bool:
        """True once nothing new will start: what flies has to drain, then the consumer is asked."""
        return self.complete or self.stopping is not None

    def check(self, layer: int) -> None:
        """Returns if the layer may be pushed.

        :raises RangeError: if there is no such layer.
        :raises InvalidArgumentError: if the layer was pushed before.
        :raises StreamAbortedError: if the stream was aborted; likewise the errors of the other outcomes.
        :raises ClosedError: if the stream was closed.
        """
        if not 0 <= layer < len(self._pushed):
            raise RangeError(f"layer {layer} does not exist: the stream has layers 0 to {len(self._pushed) - 1}")
        outcome = self.outcome
        if outcome is None and self.stopping is not None:
            outcome = Outcome(Verdict.ABORTED, self.stopping)
        if outcome is not None and (error := outcome.error()) is not None:
            raise error
        if self._pushed[layer]:
            raise InvalidArgumentError(f"layer {layer} was pushed before; every layer is pushed once")
        if self.closed:
            raise ClosedError(f"layer {layer} was pushed after the stream was closed")

    def push(self, layer: int) -> None:
        """The layer is handed over; `check` has been called."""
        self._pushed[layer] = True

    def start(self, layer: int) -> bool:
        """The layer is about to fly.  Answers False if it must not any more."""
        if self.stopping is not None:
            return False
        self._flying.add(layer)
        return True

    def land(self, layer: int) -> None:
        """The layer is in the consumer's memory; its flight may still hold ours."""
        self._complete += 1

    def release(self, layer: int) -> None:
        """The flight of the layer can touch neither side's memory any more."""
        self._flying.discard(layer)

    def stop(self, reason: str) -> None:
        """We give up.  The outcome is the consumer's answer to `end`."""
        if self.stopping is None and not self.end_sent and self.outcome is None:
            self.stopping = reason

    def abort(self, reason: str) -> None:
        """The consumer gave up: that is final."""
        self._conclude(Outcome(Verdict.ABORTED, reason))

    def lose(self, reason: str) -> None:
        """The consumer is lost."""
        self._conclude(Outcome(Verdict.LOST, reason))

    def give_up(self, reason: str) -> None:
        """Draining, or the consumer's answer, takes too long."""
        self._conclude(Outcome(Verdict.TIMEOUT, reason))

    def end(self, id: str) -> End:
        """The last word, to be sent once everything is drained."""
        assert self.concluding
        assert self.drained
        assert not self.end_sent
        self.end_sent = True
        return End(id, self.stopping is None, self.stopping or "")

    def answer(self, outcome: Outcome) -> None:
        """The consumer's answer to `end`."""
        self._conclude(outcome)

    def _conclude(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
        if self.stopping is None and outcome.verdict is not Verdict.FINISHED:
            self.stopping = outcome.reason
