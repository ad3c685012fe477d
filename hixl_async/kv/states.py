"""The two ends of a stream as state machines.  Pure: no engine, no loop, no clock; `stream` and `push` drive them.

A stream has one consumer and one or several senders, each of which owes some layers.  A layer is brought in chunks: each sender
brings its tokens in order, and a layer is complete when all that owe it have brought all.

Invariants for all interleavings of messages, aborts and losses (``tests/kv/test_states.py``):

S1  Each side gets exactly one outcome, which never changes.
S2  A sender's outcome is *finished* only if the consumer's is; without a loss or a timeout the two are equal, at senders whose
    opening was accepted.
S3  While the consumer is not fenced its blocks are not reused; once it is, no transfer of a sender can write them.
S4  Messages that arrive after an outcome change nothing but the fence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

from ..errors import ClosedError, InvalidArgumentError, TicketError
from .outcome import Outcome, Verdict
from .protocol import End

__all__ = ["FINISHED", "ConsumerState", "Incoming", "Phase", "ProducerState"]

#: The outcome of a stream that brought all.
FINISHED = Outcome(Verdict.FINISHED)


class Incoming:
    """One sender, as the consumer knows it.

    :param owed: the layers that it brings.
    """

    __slots__ = ("complete", "ended", "harmless", "landed", "opened", "payload")

    def __init__(self, owed: Collection[int]) -> None:
        #: The tokens of each layer that have landed.
        self.landed = dict.fromkeys(owed, 0)
        #: The layers of which no more tokens will come.
        self.complete: set[int] = set()
        self.opened = False
        #: True once no more messages of it can arrive.
        self.ended = False
        #: True once it can no longer write the blocks.
        self.harmless = False
        self.payload = b""

    @property
    def delivered(self) -> bool:
        """True once it has brought all that it owes; each byte is written once, so that nothing is in flight."""
        return len(self.complete) == len(self.landed)


class ConsumerState:
    """The consumer's end: a granted ticket, then an open stream, then an outcome, and the fence before or after it.

    :param layers: the numbers of the layers that make the stream complete.
    :param owed: for each sender the layers that it brings.
    """

    __slots__ = ("_owing", "complete", "ended", "fenced", "outcome", "senders")

    def __init__(self, layers: Collection[int], owed: Sequence[Collection[int]]) -> None:
        self.senders = [Incoming(layers) for layers in owed]
        self._owing = dict.fromkeys(layers, 0)  # the number of senders that have not brought all of a layer
        for brought in owed:
            for layer in brought:
                self._owing[layer] += 1
        #: The layers that have landed whole, in the order of landing.
        self.complete: list[int] = []
        self.outcome: Outcome | None = None
        #: True once no peer can write the blocks any more.
        self.fenced = False
        #: True once no more messages of a sender can arrive, so that the stream can be forgotten.
        self.ended = False

    @property
    def opened(self) -> bool:
        """True once a sender has opened the stream."""
        return any(sender.opened for sender in self.senders)

    def has(self, layer: int) -> bool:
        """Return True if the stream brings this layer."""
        return layer in self._owing

    def is_complete(self, layer: int) -> bool:
        """Return True if all of a layer has landed."""
        return not self._owing[layer]

    def tokens(self, layer: int) -> int:
        """Return the tokens of a layer that have landed, from the first."""
        return min(sender.landed[layer] for sender in self.senders if layer in sender.landed)

    def waiting_for(self, layer: int) -> list[int]:
        """Return the senders that still owe tokens of a layer."""
        return [n for n, sender in enumerate(self.senders) if layer in sender.landed and layer not in sender.complete]

    @property
    def landed(self) -> bool:
        """True once all layers have landed."""
        return len(self.complete) == len(self._owing)

    @property
    def payload(self) -> bytes:
        """What the senders handed over with their ends: the first that is not empty."""
        return next((sender.payload for sender in self.senders if sender.payload), b"")

    def open(self, number: int) -> None:
        """Record that a sender uses the ticket.

        :raises TicketError: if it did before, or the ticket is void.
        """
        sender = self.senders[number]
        if sender.opened:
            raise TicketError("this ticket was used before")
        if self.outcome is not None:
            raise TicketError(f"this ticket is void: {self.outcome.reason or 'the stream has ended'}")
        sender.opened = True

    def land(self, number: int, layer: int, tokens: int, complete: bool) -> bool:
        """Record that a sender's tokens of a layer have landed, and return True if that is news."""
        sender = self.senders[number]
        if self.outcome is not None or not sender.opened or layer not in sender.landed:
            return False
        completes = complete and layer not in sender.complete
        if tokens <= sender.landed[layer] and not completes:
            return False
        sender.landed[layer] = max(tokens, sender.landed[layer])
        if completes:
            sender.complete.add(layer)
            self._owing[layer] -= 1
            if not self._owing[layer]:
                self.complete.append(layer)
            if len(sender.complete) == len(sender.landed):
                self._conclude()
        return True

    def end(self, number: int, finished: bool, reason: str, payload: bytes = b"") -> None:
        """Handle a sender's last message."""
        sender = self.senders[number]
        if self.outcome is None and finished:
            sender.payload = payload
            # Its words were stored before this message was sent, but another transport may deliver them later.
            for layer in [layer for layer in sender.landed if layer not in sender.complete]:
                self.land(number, layer, sender.landed[layer], complete=True)
        elif self.outcome is None:
            self.outcome = Outcome(Verdict.ABORTED, reason)
        sender.ended = sender.harmless = True
        self._conclude()

    def stop(self, outcome: Outcome) -> bool:
        """Give up with this outcome, or as void if no sender has opened the stream.

        :return: True if this call ended the stream.
        """
        if self.outcome is not None:
            return False
        self.outcome = outcome if self.opened else Outcome(Verdict.VOID, outcome.reason)
        self._conclude()
        return True

    def lose(self, number: int, reason: str, dead: bool) -> None:
        """Record that a sender is lost, which ends the stream unless the sender had ended its part.

        :param dead: True if its process is confirmed to have ended.
        """
        sender = self.senders[number]
        if self.outcome is None and not sender.ended:
            self.outcome = Outcome(Verdict.LOST, reason)
        sender.ended = True
        sender.harmless |= dead
        self._conclude()

    def cut(self) -> None:
        """End the wait for messages of the senders, because the pool closes."""
        for sender in self.senders:
            sender.ended = True
        self._conclude()

    def fence(self, number: int) -> None:
        """Record that a sender's process can no longer touch the blocks."""
        self.senders[number].harmless = True
        self._conclude()

    def _conclude(self) -> None:
        if self.outcome is None and all(sender.ended for sender in self.senders):
            self.outcome = FINISHED
        over = self.outcome is not None
        # A sender that has not opened the stream by the outcome never will.
        self.fenced = all(
            sender.harmless or sender.delivered or (over and not sender.opened) for sender in self.senders
        )
        self.ended = over and all(sender.ended or not sender.opened for sender in self.senders)


class Phase(IntEnum):
    """The progress of a sender's end of a stream, which only ever moves down this list."""

    #: The consumer is asked; layers that are pushed wait.
    OPENING = 0
    #: Layers are sent.
    OPEN = 1
    #: No new transfer starts; those in flight drain, then the consumer is asked for the outcome.
    CONCLUDING = 2
    #: The stream has ended and is drained.
    CONCLUDED = 3


class ProducerState:
    """A sender's end: opening, pushing, stopping or finishing, drained, then the consumer's decision.

    Methods that can end the pushing return True if this call has ended it: the caller then drops the queued layers, and cancels
    the transfers in flight.

    :param layers: the numbers of the layers that the sender holds.
    """

    __slots__ = (
        "_closing",
        "_in_flight",
        "_landed",
        "_missing",
        "_owed",
        "_pushed",
        "drained",
        "end_sent",
        "impatient",
        "outcome",
        "payload",
        "phase",
        "stopping",
    )

    def __init__(self, layers: Collection[int]) -> None:
        self._owed = set(layers)
        self._pushed: dict[int, int | None] = {}  # the position after the last token pushed; None: all were
        self._missing = set(layers)  # of which not all was pushed
        self._landed: set[int] = set()  # whole
        self._in_flight = 0  # transfers
        self._closing: str | None = None  # the reason of a close before the opening
        self.phase = Phase.OPENING
        #: The reason why nothing more may start, or None.
        self.stopping: str | None = None
        #: What is handed over with the end, once the program has finished the stream.
        self.payload: bytes | None = None
        #: True once no transfer can read the sender's memory or write the consumer's, and none will start.
        self.drained = False
        self.end_sent = False
        #: True once draining, or the consumer's decision, has taken too long, so that the program no longer waits.
        self.impatient = False
        self.outcome: Outcome | None = None

    @property
    def layers(self) -> int:
        """The number of layers that make this part of the stream complete."""
        return len(self._owed)

    @property
    def pushed(self) -> int:
        """The number of layers of which all was pushed."""
        return len(self._owed) - len(self._missing)

    @property
    def complete(self) -> bool:
        """True once all layers have landed, and the program has finished the stream."""
        return self.payload is not None and len(self._landed) == len(self._owed)

    @property
    def concluding(self) -> bool:
        """True once no new transfer will start: those in flight drain, then the consumer is asked."""
        return self.complete or self.stopping is not None

    @property
    def unfinished(self) -> bool:
        """True while the program has to push further layers, or to finish the stream."""
        return (
            self.phase < Phase.CONCLUDING and self.stopping is None and self.payload is None and self._closing is None
        )

    @property
    def settled(self) -> bool:
        """True once the program no longer has to wait."""
        return self.outcome is not None and (self.phase is Phase.CONCLUDED or self.impatient)

    # ---- opening ----

    def open(self, owed: Collection[int]) -> bool:
        """Record that the consumer has accepted the ticket.

        :param owed: the layers that this sender brings; others may be pushed, and are not sent.
        """
        assert self.phase is Phase.OPENING
        self.phase = Phase.OPEN
        self._owed = set(owed)
        self._missing &= self._owed
        return self._closing is not None and self.close(self._closing)

    def owes(self, layer: int) -> bool:
        """Return True if the layer has to be sent."""
        return layer in self._owed

    # ---- layers ----

    def check_going_on(self) -> None:
        """Return if the stream takes pushes.

        :raises StreamAbortedError: if it was aborted; likewise the errors of the other outcomes.
        :raises ClosedError: if it was closed, or finished with all layers.
        """
        outcome = self.outcome
        if outcome is None and self.stopping is not None:
            outcome = Outcome(Verdict.ABORTED, self.stopping)
        if outcome is not None and (error := outcome.error()) is not None:
            raise error
        if self._closing is not None or (self.payload is not None and not self._missing):
            raise ClosedError("the stream was finished; no more can be pushed")

    def check(self, layer: int, first: int, begin: int) -> None:
        """Return if tokens of the layer may be pushed; `check_going_on` has been called.

        :param first: the position of the first token.
        :param begin: the position of the first token of all.
        :raises InvalidArgumentError: if all of the layer was pushed before, or tokens are left out or pushed twice.
        """
        after = self._pushed.get(layer, begin)
        if after is None:
            raise InvalidArgumentError(f"all of layer {layer} was pushed before; every token is pushed once")
        if first != after:
            raise InvalidArgumentError(
                f"tokens from {first} of layer {layer} were pushed where those from {after} are next; push them in order"
            )

    def push(self, layer: int, after: int | None) -> None:
        """Record that tokens of the layer were pushed; `check` has been called.

        :param after: the position after the last token; None if no more follow.
        """
        self._pushed[layer] = after
        if after is None:
            self._missing.discard(layer)

    def start(self) -> bool:
        """Record that a transfer is about to start, or return False if it must not start."""
        if self.stopping is not None:
            return False
        self._in_flight += 1
        return True

    def land(self, layer: int, complete: bool) -> bool:
        """Record that tokens of a layer have landed; their transfer may still hold the sender's memory.

        :return: True if the stream is complete.
        """
        if complete:
            self._landed.add(layer)
        return self.complete

    def release(self, transfers: int = 1) -> None:
        """Record that so many transfers can no longer touch either side's memory."""
        assert transfers <= self._in_flight
        self._in_flight -= transfers

    # ---- giving up ----

    def finish(self, payload: bytes) -> bool:
        """Record that the program has finished the stream: its end is sent once all layers were pushed and have landed.

        :return: False, because the pushing goes on.
        """
        if self.payload is None:
            self.payload = payload
        return False

    def close(self, reason: str) -> bool:
        """Finish the stream if all layers were pushed, else give up; once it is known which layers are needed."""
        if not self._missing:
            self.finish(b"")
            return False
        if self.phase is Phase.OPENING:
            self._closing = reason
            return False
        return self.stop(f"{reason} after {self.pushed} of {self.layers} layers")

    def stop(self, reason: str) -> bool:
        """Give up.  The outcome is the consumer's decision."""
        if self.stopping is not None or self.end_sent or self.outcome is not None:
            return False
        self.stopping = reason
        return True

    def decide(self, outcome: Outcome) -> bool:
        """Record the consumer's decision, which is final, or the reason why there is none."""
        if self.outcome is None:
            self.outcome = outcome
        if self.stopping is not None or outcome.verdict is Verdict.FINISHED:
            return False
        self.stopping = outcome.reason
        return True

    def lose(self, reason: str) -> bool:
        """Record that the consumer is lost."""
        return self.decide(Outcome(Verdict.LOST if self.phase >= Phase.OPEN else Verdict.VOID, reason))

    def give_up(self, reason: str) -> bool:
        """Stop waiting, because draining, or the consumer's decision, takes too long."""
        self.impatient = True
        return self.decide(Outcome(Verdict.TIMEOUT, reason))

    # ---- the end ----

    def conclude(self) -> bool:
        """Enter the conclusion if it is due, and return True if this call did."""
        # While the stream is opening, the consumer has not replied yet.
        if self.phase is not Phase.OPEN or not self.concluding:
            return False
        self.phase = Phase.CONCLUDING
        return True

    def end(self, id: str, sender: int) -> End:
        """Return the sender's last message, to be sent once everything is drained."""
        assert self.concluding
        assert not self._in_flight
        assert not self.end_sent
        self.end_sent = True
        return End(id, sender, self.stopping is None, self.stopping or "", self.payload or b"")

    def conclude_all(self) -> None:
        """Record that the stream has ended and is drained."""
        self.phase = Phase.CONCLUDED
