"""All ends of a stream, without a loop: every interleaving of messages, landings, aborts and losses keeps S1 to S4."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import pytest

from hixl_async.errors import (
    ClosedError,
    HixlError,
    InvalidArgumentError,
    StreamAbortedError,
    TicketError,
    TransferTimeoutError,
)
from hixl_async.kv.outcome import Outcome, Verdict
from hixl_async.kv.protocol import Decision, End, parse, parse_reply
from hixl_async.kv.states import FINISHED, ConsumerState, Phase, ProducerState
from tests.machine import Choices, Machine, event, programs

LAYERS = range(3)
#: The position of the first token of the stream, and the one after the last.
FIRST, LAST = 4, 8


class Chunk(NamedTuple):
    """Some tokens of a layer that were pushed."""

    layer: int
    first: int
    last: int
    complete: bool


class Transfer:
    """The driver's work for one chunk: write, store the word, report, release."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.cancelled = False
        self.writing = True
        self.landed = False  # and not failed
        self.reported = False
        self.released = False


class Sending:
    """One sender as `Producer` and `Sender` drive it, and its connection to the consumer.

    :param owed: the layers that it brings; it pushes others in vain.
    """

    def __init__(self, number: int, owed: Collection[int]) -> None:
        self.number = number
        self.owed = owed
        self.state = ProducerState(LAYERS)
        self.queue: deque[Chunk] = deque()
        self.pushed = dict.fromkeys(LAYERS, FIRST)  # positions
        self.transfers: list[Transfer] = []
        #: What the driver has stored, and what of it the consumer can see: the tokens, and whether they are all.
        self.words: dict[int, tuple[int, bool]] = {}
        self.visible: dict[int, tuple[int, bool]] = {}
        #: What has been written: the position after the last token of each layer, as far as there is no gap.
        self.written = dict.fromkeys(LAYERS, FIRST)
        # A request, or a message without a reply, to the consumer; its replies; and its decisions, which may overtake replies.
        self.to_consumer: deque[str | End] = deque()
        self.replies: deque[str | Decision | None] = deque()
        self.decisions: deque[Decision] = deque()
        self.asked = self.answered = False
        self.connected = True
        self.alive = True
        self.knows_of_loss = False
        #: True if the program, or a timer, has stopped waiting.
        self.gave_up = False
        self.past: list[Decision] = []

    # ---- events ----

    def change(self, change: Callable[..., bool], *arguments: object) -> None:
        """Do what `Producer` does after every event."""
        if change(*arguments):
            assert self.state.stopping is not None
            self.queue.clear()
            for transfer in self.transfers:
                transfer.cancelled = True
        self.state.conclude()
        if self.state.stopping is not None and not self.asked:
            self.opening_failed("the ticket is not awaited any more", Verdict.ABORTED)
        self.drain()

    def drain(self) -> None:
        state = self.state
        if state.phase is not Phase.CONCLUDING or not all(transfer.released for transfer in self.transfers):
            return
        state.drained = True
        if (state.outcome is None or state.outcome.verdict is not Verdict.LOST) and not state.end_sent:
            self.send(state.end("id", self.number))
        if state.outcome is not None and (self.answered or self.knows_of_loss):
            state.conclude_all()

    def send(self, message: str | End) -> None:
        if self.connected:
            self.to_consumer.append(message)

    def opening_failed(self, reason: str, verdict: Verdict = Verdict.VOID) -> None:
        assert not self.transfers
        self.state.decide(Outcome(verdict, reason))
        self.queue.clear()
        self.state.drained = True
        self.state.conclude_all()

    @property
    def opening(self) -> bool:
        """True while the consumer is asked."""
        return self.alive and self.asked and self.state.phase is Phase.OPENING

    # ---- the program ----

    def ask(self) -> None:
        self.asked = True
        self.send("open")
        if self.knows_of_loss:
            self.opening_failed("lost")

    def push(self, layer: int, first: int, last: int, complete: bool) -> None:
        self.state.check_going_on()
        self.state.check(layer, first, FIRST)
        self.queue.append(Chunk(layer, first, last, complete))
        self.state.push(layer, None if complete else last)
        self.pushed[layer] = last

    def push_all(self) -> None:
        """Push the rest of all layers, and finish."""
        for layer, first in self.pushed.items():
            if self.state._pushed.get(layer, FIRST) is not None:
                self.push(layer, first, LAST, True)
        self.change(self.state.finish, b"from %d" % self.number)

    def time_out(self) -> None:
        """Stop waiting: for the opening, for transfers, or for the reply to the end."""
        if self.opening:
            self.gave_up = True
            self.send(End("id", self.number, False, "the stream did not open in time"))
            self.opening_failed("the stream did not open in time")
        elif self.state.phase is Phase.CONCLUDING:
            self.gave_up = True
            self.change(self.state.give_up, "too slow")
            assert self.state.settled
            if self.state.end_sent:
                self.state.conclude_all()

    # ---- the driver ----

    def start(self) -> bool:
        """Start the first chunk, unless one of its layer is in flight; return True if there may be more."""
        if not self.queue or self.state.phase is Phase.OPENING:
            return False
        chunk = self.queue[0]
        if not self.state.owes(chunk.layer):
            self.queue.popleft()
            return True
        if any(transfer.chunk.layer == chunk.layer and not transfer.reported for transfer in self.transfers):
            return False
        assert self.state.start(), "chunks are left of a stream that is stopping"
        self.transfers.append(Transfer(self.queue.popleft()))
        return True

    def in_flight(self, wanted: str) -> list[Transfer]:
        if not self.alive:
            return []
        tests: dict[str, Callable[[Transfer], bool]] = {
            "writing": lambda transfer: transfer.writing,
            "unreported": lambda transfer: not transfer.writing and not transfer.reported,
            "unreleased": lambda transfer: transfer.reported and not transfer.released,
        }
        return [transfer for transfer in self.transfers if tests[wanted](transfer)]

    def land(self, transfer: Transfer) -> None:
        layer, first, last, complete = transfer.chunk
        transfer.writing = False
        transfer.landed = True
        assert self.written[layer] == first
        self.written[layer] = last
        self.words[layer] = (last - FIRST, complete)

    def report(self, transfer: Transfer, cancelled: bool) -> None:
        """Report what became of a transfer: one that has landed may still be cancelled."""
        transfer.reported = True
        if transfer.landed and not cancelled:
            self.state.land(transfer.chunk.layer, transfer.chunk.complete)
            self.change(lambda: False)
        else:
            self.change(self.state.stop, "the transfer failed")

    def release(self, transfer: Transfer) -> None:
        transfer.released = True
        self.state.release()
        self.drain()

    def fly(self) -> None:
        """Let the driver do all that is due, at once."""
        while self.start():
            pass
        for transfer in self.in_flight("writing"):
            if transfer.cancelled:
                transfer.writing = False
            else:
                self.land(transfer)
        for transfer in self.in_flight("unreported"):
            self.report(transfer, transfer.cancelled)
        for transfer in self.in_flight("unreleased"):
            self.release(transfer)

    # ---- messages ----

    def deliver_reply(self) -> None:
        reply = self.replies.popleft()
        if self.state.phase is Phase.CONCLUDED:
            return  # it is not waited for any more
        if reply == "opened":
            self.change(self.state.open, self.owed)
        elif reply == "refused":
            self.opening_failed("refused")
        else:
            self.answered = True
            assert not isinstance(reply, str)
            decision = parse_reply({} if reply is None else reply.body())
            if decision is None:
                self.drain()
            else:
                self.change(self.state.decide, decision.outcome)

    def deliver_decision(self) -> None:
        message = self.decisions.popleft()
        self.past.append(message)
        self.decide(message)

    def decide(self, message: Decision) -> None:
        parsed = parse(message.body())
        assert isinstance(parsed, Decision)
        self.change(self.state.decide, parsed.outcome)

    def learn_of_loss(self) -> None:
        self.knows_of_loss = True
        opening = self.opening
        self.change(self.state.lose, "lost")
        if opening:
            self.opening_failed("lost")
        elif self.state.end_sent:
            self.state.conclude_all()


class Streaming(Machine):
    """A consumer and one to three senders, each with a driver that is as slow and late as it likes."""

    def begin(self, choose: Choices) -> None:
        """Each layer is owed by some senders, and a sender perhaps owes none.  Some senders have got further than others."""
        count = choose.between(1, 3)
        owners = [choose.some_of(range(count), least=1) for _ in LAYERS]
        owed = [[layer for layer in LAYERS if number in owners[layer]] for number in range(count)]
        self.senders = [Sending(number, layers) for number, layers in enumerate(owed)]
        self.consumer = ConsumerState(LAYERS, owed)
        #: The senders that the consumer has accepted, and whether each knows the outcome; and those whose loss it knows.
        self.links: dict[int, bool] = {}
        self.lost: set[int] = set()
        self.over = self.closed = self.fenced = False
        self.past: list[tuple[int, End]] = []
        self.payloads = dict.fromkeys(range(count), b"")  # of those that have ended before the outcome
        self.first: dict[int | None, Outcome] = {}
        for sender in self.senders:
            for step in (sender.ask, partial(self.deliver, sender), sender.deliver_reply, sender.push_all)[
                : choose.between(0, 4)
            ]:
                step()

    def pick(self, choose: Choices, test: Callable[[Sending], object]) -> Sending:
        return choose.one_of([sender for sender in self.senders if test(sender)])

    def any(self, test: Callable[[Sending], object]) -> bool:
        return any(map(test, self.senders))

    # ---- the senders ----

    @event(lambda self: self.any(_may_ask))
    def ask(self, choose: Choices) -> None:
        self.pick(choose, _may_ask).ask()

    @event(lambda self: self.any(_alive))
    def push(self, choose: Choices) -> None:
        sender = self.pick(choose, _alive)
        layer, last = choose.one_of(LAYERS), choose.flag()
        first = sender.pushed[layer]
        end = min(first + choose.between(1, LAST - FIRST), LAST)
        try:
            sender.push(layer, first, end, last or end == LAST)
        except InvalidArgumentError:
            assert sender.state._pushed[layer] is None
        except ClosedError:
            assert sender.state.payload is not None or sender.state._closing is not None
        except HixlError:
            assert sender.state.stopping is not None or sender.state.outcome is not None

    @event(lambda self: self.any(_pushing))
    def push_all(self, choose: Choices) -> None:
        self.pick(choose, _pushing).push_all()

    @event(lambda self: self.any(_alive))
    def finish(self, choose: Choices) -> None:
        sender = self.pick(choose, _alive)
        sender.change(sender.state.finish, b"from %d" % sender.number)

    @event(lambda self: self.any(_alive))
    def sender_ends(self, choose: Choices) -> None:
        sender = self.pick(choose, _alive)
        if not choose.seldom():
            return
        how = choose.one_of(["close", "abort", "time out"])
        if how == "time out":
            sender.time_out()
        else:
            sender.change(sender.state.close if how == "close" else sender.state.stop, how)

    # ---- the drivers ----

    @event(lambda self: self.any(lambda sender: sender.alive and sender.queue))
    def start(self, choose: Choices) -> None:
        self.pick(choose, lambda sender: sender.alive and sender.queue).start()

    def transfer(self, choose: Choices, wanted: str) -> tuple[Sending, Transfer]:
        sender = self.pick(choose, lambda sender: sender.in_flight(wanted))
        return sender, choose.one_of(sender.in_flight(wanted))

    @event(lambda self: self.any(lambda sender: sender.in_flight("writing")))
    def write(self, choose: Choices) -> None:
        sender, transfer = self.transfer(choose, "writing")
        if choose.below(3) == 2:
            transfer.writing = False
        else:
            sender.land(transfer)

    @event(lambda self: self.any(lambda sender: sender.in_flight("unreported")))
    def report(self, choose: Choices) -> None:
        sender, transfer = self.transfer(choose, "unreported")
        sender.report(transfer, transfer.cancelled and choose.flag())

    @event(lambda self: self.any(lambda sender: sender.in_flight("unreleased")))
    def release(self, choose: Choices) -> None:
        sender, transfer = self.transfer(choose, "unreleased")
        sender.release(transfer)

    @event(lambda self: self.any(_flying))
    def fly(self, choose: Choices) -> None:
        self.pick(choose, _flying).fly()

    # ---- the consumer ----

    def settle(self) -> None:
        """Do what `Consumer` does after every event."""
        state = self.consumer
        if state.outcome is None or self.over:
            return
        self.over = True
        for number, informed in self.links.items():
            # A sender that has still to end is told with the reply to that, unless it must stop.
            if not informed and number not in self.lost and (state.senders[number].ended or state.outcome != FINISHED):
                self.links[number] = True
                if self.senders[number].connected:
                    self.senders[number].decisions.append(self.decision())

    def decision(self) -> Decision:
        outcome = self.consumer.outcome
        assert outcome is not None
        return Decision("id", outcome == FINISHED, outcome.reason)

    def scan(self) -> None:
        for sender in self.senders:
            for layer, (tokens, complete) in sender.visible.items():
                before = self.consumer_snapshot()
                news = self.consumer.land(sender.number, layer, tokens, complete)
                assert news == (self.consumer_snapshot() != before)
                assert not (news and self.over)
        self.settle()

    @event(lambda self: self.any(_has_news))
    def words_become_visible(self, choose: Choices) -> None:
        sender = self.pick(choose, _has_news)
        sender.visible = dict(sender.words)
        self.scan()

    @event()
    def consumer_ends(self, choose: Choices) -> None:
        if not choose.seldom():
            return
        how = choose.one_of(["abort", "time out", "leave"])
        self.scan()
        if how == "leave":
            outcome = FINISHED if self.consumer.landed else Outcome(Verdict.ABORTED, "left")
        else:
            outcome = Outcome(Verdict.ABORTED if how == "abort" else Verdict.TIMEOUT, how)
        before = self.consumer_snapshot()
        assert self.consumer.stop(outcome) != self.over
        assert not self.over or self.consumer_snapshot() == before
        self.settle()

    @event(lambda self: self.over and not self.closed)
    def consumer_closes(self, choose: Choices) -> None:
        """The pool no longer waits for messages of the senders."""
        self.closed = True
        self.consumer.cut()
        assert self.consumer.ended

    # ---- the network ----

    @event(lambda self: self.any(lambda sender: sender.to_consumer))
    def deliver_to_consumer(self, choose: Choices) -> None:
        """Deliver a sender's next message; its ticket may have been changed on its way."""
        self.deliver(self.pick(choose, lambda sender: sender.to_consumer), choose.seldom())

    def deliver(self, sender: Sending, changed: bool = False) -> None:
        message = sender.to_consumer.popleft()
        if isinstance(message, End):
            self.past.append((sender.number, message))
            reply = self.consumer_hears(sender.number, message)
            if sender.state.end_sent:  # else it was posted, and has no reply
                sender.replies.append(reply)
        else:
            sender.replies.append(self.consumer_opens(sender.number, changed))

    def consumer_opens(self, number: int, changed: bool) -> str:
        if self.closed:
            return "refused"
        try:
            self.consumer.open(number)
        except TicketError:
            assert self.over
            return "refused"
        if changed:
            self.consumer.stop(Outcome(Verdict.INVALID_TICKET, "changed"))
            self.consumer.end(number, False, "changed")
            self.settle()
            return "refused"
        self.links[number] = False
        return "opened"

    def consumer_hears(self, number: int, message: End) -> Decision | None:
        parsed = parse(message.body())
        assert isinstance(parsed, End)
        if number in self.links and not self.closed:
            self.scan()
            if parsed.complete and not self.over:
                self.payloads[number] = parsed.payload
            self.consumer.end(number, parsed.complete, parsed.reason, parsed.payload)
            self.links[number] |= self.consumer.outcome is not None
            self.settle()
        return self.decision() if self.over else None

    @event(lambda self: self.any(lambda sender: sender.alive and sender.replies))
    def deliver_reply(self, choose: Choices) -> None:
        self.pick(choose, lambda sender: sender.alive and sender.replies).deliver_reply()

    @event(lambda self: self.any(lambda sender: sender.alive and sender.decisions))
    def deliver_decision(self, choose: Choices) -> None:
        self.pick(choose, lambda sender: sender.alive and sender.decisions).deliver_decision()

    @event(lambda self: self.past)
    def repeat_an_end(self, choose: Choices) -> None:
        number, message = choose.one_of(self.past)
        before = self.consumer_snapshot()
        self.consumer_hears(number, message)
        assert self.consumer_snapshot() == before

    @event(lambda self: self.any(lambda sender: sender.alive and sender.past))
    def repeat_a_decision(self, choose: Choices) -> None:
        sender = self.pick(choose, lambda sender: sender.alive and sender.past)
        before = (sender.state.outcome, sender.state.stopping, sender.state.phase)
        sender.decide(choose.one_of(sender.past))
        assert (sender.state.outcome, sender.state.stopping, sender.state.phase) == before

    @event(lambda self: self.links)
    def repeat_an_opening(self, choose: Choices) -> None:
        before = self.consumer_snapshot()
        with pytest.raises(TicketError, match="used before"):
            self.consumer.open(choose.one_of(sorted(self.links)))
        assert self.consumer_snapshot() == before

    @event(lambda self: self.any(lambda sender: sender.connected))
    def disconnect(self, choose: Choices) -> None:
        sender = self.pick(choose, lambda sender: sender.connected)
        if not choose.seldom():
            return
        sender.connected, sender.alive = False, choose.flag()
        for queue in (sender.to_consumer, sender.replies, sender.decisions):
            queue.clear()

    @event(lambda self: self.any(_has_to_learn))
    def sender_learns_of_the_loss(self, choose: Choices) -> None:
        self.pick(choose, _has_to_learn).learn_of_loss()

    def unknown_losses(self) -> list[int]:
        """The senders that the consumer has accepted, and of whose loss it has not heard."""
        return [number for number in self.links if not self.senders[number].connected and number not in self.lost]

    @event(lambda self: not self.closed and self.unknown_losses())
    def consumer_learns_of_a_loss(self, choose: Choices) -> None:
        number = choose.one_of(self.unknown_losses())
        self.consumer_loses(number, choose.flag() and not self.senders[number].alive)

    def consumer_loses(self, number: int, dead: bool) -> None:
        self.lost.add(number)
        self.scan()
        before, ended = self.consumer.outcome, self.consumer.senders[number].ended
        self.consumer.lose(number, "lost", dead)
        assert self.consumer.outcome == (before if before or ended else Outcome(Verdict.LOST, "lost"))
        self.settle()

    @event(lambda self: self.lost)
    def lost_sender_is_fenced(self, choose: Choices) -> None:
        self.fence(choose.one_of(sorted(self.lost)))

    def fence(self, number: int) -> None:
        """Let the process die, or its driver stop, and confirm that."""
        self.senders[number].alive = False
        before = self.consumer.outcome
        self.consumer.fence(number)
        assert self.consumer.outcome == before

    # ---- what always holds ----

    def check(self) -> None:
        self.one_outcome()
        self.fenced_blocks_are_not_written()
        self.a_finished_stream_has_all()
        self.drained_senders_are_quiet()

    def consumer_snapshot(self) -> object:
        state = self.consumer
        landed = [(dict(sender.landed), set(sender.complete)) for sender in state.senders]
        return state.outcome, state.ended, state.fenced, state.payload, landed, list(state.complete)

    def one_outcome(self) -> None:
        """S1 and S2."""
        for number, outcome in [
            (None, self.consumer.outcome),
            *((one.number, one.state.outcome) for one in self.senders),
        ]:
            if outcome is not None:
                assert self.first.setdefault(number, outcome) == outcome
            assert (outcome is not None) == (number in self.first)
            if outcome == FINISHED:
                assert self.consumer.outcome == FINISHED

    def fenced_blocks_are_not_written(self) -> None:
        """S3."""
        assert self.consumer.fenced >= self.fenced, "the fence has fallen again"
        self.fenced = self.consumer.fenced
        if self.fenced:
            assert not self.any(lambda sender: sender.in_flight("writing"))

    def a_finished_stream_has_all(self) -> None:
        state = self.consumer
        assert sorted(state.complete) == [layer for layer in LAYERS if state.is_complete(layer)]
        assert state.landed == (len(state.complete) == len(LAYERS))
        assert state.landed or state.outcome != FINISHED
        assert state.payload == next(filter(None, self.payloads.values()), b"")
        for layer in LAYERS:
            owing = [sender for sender in self.senders if layer in sender.owed]
            assert state.tokens(layer) <= min(sender.written[layer] for sender in owing) - FIRST
            missing = [one.number for one in owing if not state.senders[one.number].complete & {layer}]
            assert state.waiting_for(layer) == missing
            assert state.is_complete(layer) == (not missing)
            for sender in owing:
                if sender.number not in missing:
                    assert sender.words[layer] == (sender.written[layer] - FIRST, True)

    def drained_senders_are_quiet(self) -> None:
        for sender in self.senders:
            state = sender.state
            if state.drained:
                assert all(transfer.released for transfer in sender.transfers)
                assert not any(state.owes(chunk.layer) for chunk in sender.queue)
            assert state.drained or not state.end_sent
            assert state.drained or state.phase is not Phase.CONCLUDED

    def end(self) -> None:
        """Let everything happen that is due; then all sides have ended, and agree."""
        for _ in range(4):
            for sender in self.senders:
                self.let_happen(sender)
            for number in self.unknown_losses() if not self.closed else ():
                self.consumer_loses(number, dead=False)
            if not self.any(lambda sender: sender.to_consumer or sender.replies or sender.decisions) and not self.over:
                self.consumer.stop(Outcome(Verdict.TIMEOUT, "expired"))
                self.settle()
            self.one_outcome()
            self.fenced_blocks_are_not_written()
        self.everything_has_ended()
        self.those_that_opened_agree()

    def let_happen(self, sender: Sending) -> None:
        if sender.alive and not sender.connected and not sender.knows_of_loss:
            sender.learn_of_loss()
        if _may_ask(sender):
            sender.ask()
        while sender.to_consumer:
            self.deliver(sender)
        if not sender.alive:
            return
        while sender.replies:
            sender.deliver_reply()
        while sender.decisions:
            sender.deliver_decision()
        sender.fly()
        sender.change(sender.state.close, "left")
        sender.fly()

    def everything_has_ended(self) -> None:
        assert self.consumer.outcome is not None
        assert self.consumer.ended
        dangerous = [number for number in self.lost if self.senders[number].in_flight("writing")]
        assert not dangerous
        for number in self.lost:
            self.fence(number)
        if not self.closed:
            assert self.consumer.fenced
        for sender in self.senders:
            if sender.alive:
                assert sender.state.phase is Phase.CONCLUDED
                assert sender.state.settled
                assert sender.state.drained

    def those_that_opened_agree(self) -> None:
        ours = self.consumer.outcome
        assert ours is not None
        for number in self.links:
            sender = self.senders[number]
            theirs = sender.state.outcome
            if not sender.connected or sender.gave_up:
                continue
            assert theirs is not None
            assert (theirs == FINISHED) == (ours == FINISHED)
            assert theirs.verdict in (Verdict.FINISHED, Verdict.ABORTED)
            assert theirs.reason == ours.reason


def _may_ask(sender: Sending) -> bool:
    return sender.alive and not sender.asked and sender.state.phase is Phase.OPENING


def _alive(sender: Sending) -> bool:
    return sender.alive


def _pushing(sender: Sending) -> bool:
    return sender.alive and sender.state.unfinished and sender.state.outcome is None


def _flying(sender: Sending) -> bool:
    return sender.alive and bool(sender.queue or not all(transfer.released for transfer in sender.transfers))


def _has_news(sender: Sending) -> bool:
    return sender.visible != sender.words


def _has_to_learn(sender: Sending) -> bool:
    return sender.alive and not sender.connected and not sender.knows_of_loss


test_streaming = programs(Streaming, 500, steps=40)


def opened(*owed: Collection[int]) -> ConsumerState:
    """Return the state of a consumer whose senders have all opened the stream."""
    state = ConsumerState(LAYERS, owed or [LAYERS])
    for number in range(len(owed) or 1):
        state.open(number)
    return state


def producing(layers: int) -> ProducerState:
    """Return the state of a sender whose stream is open."""
    state = ProducerState(range(layers))
    state.open(range(layers))
    return state


def deliver(state: ProducerState, layer: int) -> None:
    """Push a layer, and let it land."""
    state.push(layer, None)
    assert state.start()
    state.land(layer, complete=True)
    state.release()


class TestConsumer:
    def test_all_layers_fence_it_and_the_end_finishes_it(self) -> None:
        state = opened()
        assert [state.land(0, layer, 4, complete=True) for layer in (2, 2, 0)] == [True, False, True]
        assert not state.fenced
        assert state.land(0, 1, 4, complete=True)
        assert state.landed
        assert state.fenced
        assert state.complete == [2, 0, 1]
        assert state.outcome is None
        state.end(0, True, "", b"token")
        assert state.outcome == FINISHED
        assert state.ended
        assert state.payload == b"token"

    def test_leaving_once_all_has_landed_finishes_it(self) -> None:
        state = opened()
        for layer in LAYERS:
            state.land(0, layer, 4, complete=True)
        assert state.stop(FINISHED)
        assert state.outcome == FINISHED
        assert not state.ended
        state.end(0, False, "too late")
        assert state.outcome == FINISHED
        assert state.ended

    def test_a_layer_lands_in_chunks(self) -> None:
        state = opened()
        assert state.land(0, 1, 2, complete=False)
        assert not state.land(0, 1, 2, complete=False)
        assert not state.land(0, 1, 1, complete=False), "an older word"
        assert (state.tokens(1), state.is_complete(1)) == (2, False)
        assert state.land(0, 1, 4, complete=False)
        assert state.land(0, 1, 4, complete=True)
        assert (state.tokens(1), state.is_complete(1), state.complete) == (4, True, [1])

    def test_a_layer_needs_all_that_owe_it(self) -> None:
        state = opened([0, 1, 2], [1], [])
        state.land(0, 1, 4, complete=True)
        assert (state.tokens(1), state.is_complete(1), state.waiting_for(1)) == (0, False, [1])
        assert not state.land(1, 0, 4, complete=True), "it does not owe this layer"
        assert not state.land(2, 1, 4, complete=True), "it owes none"
        assert state.waiting_for(0) == [0]
        state.land(1, 1, 3, complete=False)
        assert state.tokens(1) == 3
        state.land(1, 1, 4, complete=True)
        assert (state.tokens(1), state.is_complete(1), state.waiting_for(1)) == (4, True, [])

    def test_it_is_finished_when_all_senders_have_ended(self) -> None:
        state = opened([0, 1, 2], [1], [])
        state.end(1, True, "", b"second")
        state.end(2, True, "", b"third")
        assert state.outcome is None
        assert not state.ended
        state.end(0, True, "")
        assert state.outcome == FINISHED
        assert state.payload == b"second", "the first that is not empty"

    def test_nothing_lands_before_opening_or_after_the_end(self) -> None:
        state = ConsumerState(LAYERS, [LAYERS])
        assert not state.land(0, 0, 4, complete=True)
        state.open(0)
        state.stop(Outcome(Verdict.ABORTED, "x"))
        assert not state.land(0, 0, 4, complete=True)
        assert state.tokens(0) == 0

    def test_a_sender_uses_a_ticket_once(self) -> None:
        state = ConsumerState(LAYERS, [LAYERS, []])
        state.open(0)
        with pytest.raises(TicketError, match="used before"):
            state.open(0)
        state.open(1)

    def test_a_revoked_ticket_is_void_and_needs_no_fence(self) -> None:
        state = ConsumerState(LAYERS, [LAYERS])
        assert state.stop(Outcome(Verdict.ABORTED, "gone"))
        assert state.outcome == Outcome(Verdict.VOID, "gone")
        assert state.fenced
        assert state.ended
        with pytest.raises(TicketError, match="gone"):
            state.open(0)

    def test_a_sender_that_never_opened_needs_no_fence(self) -> None:
        state = ConsumerState(LAYERS, [[0], [1, 2]])
        state.open(0)
        state.stop(Outcome(Verdict.ABORTED, "gone"))
        assert not state.fenced
        state.end(0, False, "gone")
        assert state.fenced
        assert state.ended

    def test_a_sender_that_may_still_open_it_keeps_it_unfenced(self) -> None:
        state = ConsumerState(LAYERS, [[0], [1, 2]])
        state.open(0)
        state.land(0, 0, 4, complete=True)
        state.end(0, True, "")
        assert not state.fenced
        state.open(1)
        state.land(1, 1, 4, complete=True)
        assert not state.fenced
        state.land(1, 2, 4, complete=True)
        assert state.fenced

    def test_a_timeout_leaves_the_fence_to_the_sender(self) -> None:
        state = opened()
        assert state.stop(Outcome(Verdict.TIMEOUT, "stall"))
        assert not state.fenced
        assert not state.stop(Outcome(Verdict.ABORTED, "again"))
        state.end(0, True, "")
        assert (state.outcome, state.complete, state.fenced) == (Outcome(Verdict.TIMEOUT, "stall"), [], True)

    def test_a_complete_end_lands_missing_layers(self) -> None:
        state = opened()
        state.land(0, 1, 4, complete=True)
        state.end(0, True, "")
        assert state.outcome == FINISHED
        assert state.complete == [1, 0, 2]

    def test_a_word_that_arrives_after_its_sender_has_ended_completes_no_layer_again(self) -> None:
        state = opened([0, 1, 2], [0])
        state.end(0, True, "")
        assert state.complete == [1, 2]
        assert state.land(0, 1, 4, complete=True)
        assert not state.land(0, 1, 4, complete=True)
        assert (state.tokens(1), state.complete, state.landed) == (4, [1, 2], False)

    @pytest.mark.parametrize("dead", [True, False])
    def test_only_death_fences_a_lost_stream(self, dead: bool) -> None:
        state = opened()
        state.lose(0, "gone", dead)
        assert state.outcome == Outcome(Verdict.LOST, "gone")
        assert state.fenced is dead
        state.fence(0)
        assert state.fenced

    def test_the_loss_of_one_sender_is_that_of_the_stream(self) -> None:
        state = opened([0, 1], [2])
        state.lose(1, "gone", dead=True)
        assert state.outcome == Outcome(Verdict.LOST, "gone")
        assert not state.fenced, "the other may write"
        assert not state.ended
        state.end(0, False, "gone")
        assert state.fenced
        assert state.ended

    @pytest.mark.parametrize("dead", [True, False])
    def test_the_loss_of_a_sender_that_has_ended_loses_nothing(self, dead: bool) -> None:
        state = opened([0, 1], [2])
        state.end(1, True, "")
        state.lose(1, "gone", dead)
        assert state.outcome is None
        state.end(0, True, "")
        assert state.outcome == FINISHED
        assert state.fenced

    def test_a_closing_pool_awaits_no_more_messages(self) -> None:
        state = opened([0, 1], [2])
        state.stop(Outcome(Verdict.ABORTED, "closed"))
        state.cut()
        assert state.ended
        assert not state.fenced


class TestProducer:
    def test_wrong_pushes(self) -> None:
        state = producing(2)
        state.check(0, 4, 4)
        state.push(0, 6)
        for first in (4, 5, 7):
            with pytest.raises(InvalidArgumentError, match=f"from {first} of layer 0 .* from 6 are next"):
                state.check(0, first, 4)
        state.check(0, 6, 4)
        state.push(0, None)
        with pytest.raises(InvalidArgumentError, match="all of layer 0 was pushed before"):
            state.check(0, 8, 4)
        with pytest.raises(InvalidArgumentError, match="from 5 of layer 1 .* from 4 are next"):
            state.check(1, 5, 4)
        assert state.decide(Outcome(Verdict.ABORTED, "no more"))
        with pytest.raises(StreamAbortedError, match="no more"):
            state.check_going_on()

    def test_layers_are_pushed_while_it_opens_and_until_it_is_finished(self) -> None:
        state = ProducerState([3])
        state.check_going_on()
        state.finish(b"")
        state.check_going_on()
        state.push(3, None)
        with pytest.raises(ClosedError, match="was finished"):
            state.check_going_on()
        state.open([3])
        with pytest.raises(ClosedError, match="was finished"):
            state.check_going_on()

    def test_only_what_is_owed_has_to_be_pushed(self) -> None:
        state = ProducerState(LAYERS)
        assert (state.layers, state.pushed) == (3, 0)
        state.push(1, None)
        state.open([0, 1])
        assert (state.layers, state.pushed) == (2, 1)
        assert [state.owes(layer) for layer in LAYERS] == [True, True, False]
        deliver(state, 0)
        deliver(state, 1)
        state.finish(b"")
        assert state.complete
        assert state.conclude()

    def test_closing_aborts_streams_without_all_layers(self) -> None:
        state = producing(2)
        state.push(0, None)
        assert state.unfinished
        assert state.close("left")
        assert not state.close("left")
        with pytest.raises(StreamAbortedError, match="left after 1 of 2 layers"):
            state.check_going_on()
        complete = producing(1)
        complete.push(0, None)
        assert complete.unfinished
        assert not complete.close("left")
        assert not complete.unfinished
        assert complete.stopping is None
        assert complete.payload == b""

    @pytest.mark.parametrize(("owed", "reason"), [([0], None), ([0, 1], "left after 1 of 2 layers")])
    def test_closing_while_it_opens_waits_for_what_is_owed(self, owed: list[int], reason: str | None) -> None:
        state = ProducerState([0, 1])
        state.push(0, None)
        assert not state.close("left")
        assert not state.unfinished
        with pytest.raises(ClosedError, match="was finished"):
            state.check_going_on()
        assert state.open(owed) == (reason is not None)
        assert state.stopping == reason

    def test_after_giving_up_nothing_waits(self) -> None:
        state = producing(1)
        state.decide(Outcome(Verdict.ABORTED, "x"))
        assert state.conclude()
        assert not state.conclude()
        assert not state.settled
        assert not state.give_up("too slow")
        assert state.settled
        assert state.outcome == Outcome(Verdict.ABORTED, "x")

    def test_giving_up_is_a_timeout(self) -> None:
        state = producing(1)
        state.push(0, None)
        state.start()
        state.stop("changed my mind")
        state.conclude()
        state.give_up("too slow")
        assert state.settled
        with pytest.raises(TransferTimeoutError, match="too slow"):
            state.check_going_on()

    def test_nothing_starts_after_an_abort(self) -> None:
        state = producing(2)
        state.push(0, None)
        state.decide(Outcome(Verdict.ABORTED, "stop"))
        assert not state.start()

    def test_the_end_waits_for_the_release_of_the_last_transfer(self) -> None:
        state = producing(1)
        state.start()
        state.start()
        state.stop("changed my mind")
        for _ in range(2):
            with pytest.raises(AssertionError):
                state.end("id", 3)
            state.release()
        assert state.end("id", 3) == End("id", 3, False, "changed my mind")

    def test_after_the_end_is_sent_it_is_too_late_to_stop(self) -> None:
        state = producing(1)
        deliver(state, 0)
        state.finish(b"token")
        assert state.end("id", 3) == End("id", 3, True, "", b"token")
        assert not state.stop("changed my mind")
        assert state.stopping is None

    def test_a_finished_reply_overrides_our_own_wish_to_stop(self) -> None:
        state = producing(1)
        state.push(0, None)
        state.start()
        state.stop("changed my mind")
        state.release()
        assert state.end("id", 0) == End("id", 0, False, "changed my mind")
        state.decide(FINISHED)
        state.decide(Outcome(Verdict.ABORTED, "late"))
        assert state.outcome == FINISHED

    @pytest.mark.parametrize(("opened", "verdict"), [(True, Verdict.LOST), (False, Verdict.VOID)])
    def test_a_loss_before_the_opening_makes_the_ticket_void(self, opened: bool, verdict: Verdict) -> None:
        state = producing(1) if opened else ProducerState([0])
        assert state.lose("gone")
        assert state.outcome == Outcome(verdict, "gone")
