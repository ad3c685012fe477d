"""Both ends of a stream, without a loop: every interleaving of messages, landings, aborts and losses keeps S1 to S4."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hixl_async.errors import (
    ClosedError,
    InvalidArgumentError,
    RangeError,
    StreamAbortedError,
    TicketError,
)
from hixl_async.kv.protocol import REASON_CHARACTERS, Abort, End, Open, Outcome, Verdict, parse
from hixl_async.kv.states import ConsumerState, Phase, ProducerState

LAYERS = 3


class Transfer:
    """The driver's work for one layer: write, perhaps store the word, report, release."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.cancelled = False
        self.writing = True
        self.reported = False
        self.released = False


class Streaming(RuleBasedStateMachine):
    """A producer and a consumer joined by two ordered queues, with a driver that is as slow and late as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.producer = ProducerState(LAYERS)
        self.producer.begin()
        self.consumer = ConsumerState(LAYERS)
        self.to_consumer: deque[str | End] = deque()
        self.to_producer: deque[str | Abort | Outcome] = deque()
        self.past: list[End | Abort | Outcome] = []
        self.words: set[int] = set()
        self.transfers: list[Transfer] = []
        self.connected = True
        self.dead = False
        self.gave_up = self.timed_out = False
        self.first: list[Outcome | None] = [None, None]

    @property
    def opened(self) -> bool:
        """True once the producer knows that the stream is open."""
        return self.producer.phase >= Phase.OPEN

    # ---- opening ----

    @initialize()
    def open(self) -> None:
        self.to_consumer.append("open")

    # ---- the producer ----

    def conclude(self) -> None:
        """Do what `Producer` does after every event."""
        state = self.producer
        state.conclude()
        if state.stopping is not None:
            for transfer in self.transfers:
                transfer.cancelled = True
        lost = state.outcome is not None and state.outcome.verdict is Verdict.LOST
        if state.phase is Phase.CONCLUDING and state.drained and not state.end_sent and not lost:
            self.to_consumer.append(state.end("id"))

    @precondition(lambda self: self.opened and not self.dead)
    @rule(layer=st.integers(0, LAYERS - 1))
    def push(self, layer: int) -> None:
        try:
            self.producer.check(layer)
        except (InvalidArgumentError, StreamAbortedError, ClosedError):
            return
        except Exception:
            assert self.producer.outcome is not None
            return
        self.producer.push(layer)
        if self.producer.start(layer):
            self.transfers.append(Transfer(layer))

    @precondition(lambda self: self.opened and not self.dead)
    @rule()
    def producer_aborts(self) -> None:
        self.producer.stop("producer")
        self.conclude()

    @precondition(lambda self: self.opened and self.producer.concluding and not self.dead)
    @rule()
    def producer_gives_up(self) -> None:
        self.gave_up = True
        self.producer.give_up("too slow")
        self.conclude()

    # ---- the driver ----

    def pending(self, wanted: str) -> list[Transfer]:
        if self.dead:
            return []
        tests = {
            "writing": lambda transfer: transfer.writing,
            "unreported": lambda transfer: not transfer.writing and not transfer.reported,
            "unreleased": lambda transfer: transfer.reported and not transfer.released,
        }
        return [transfer for transfer in self.transfers if tests[wanted](transfer)]

    @precondition(lambda self: self.pending("writing"))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(self.pending("writing")))
        transfer.writing = False
        self.words.add(transfer.layer)

    @precondition(lambda self: any(transfer.cancelled for transfer in self.pending("writing")))
    @rule(data=st.data())
    def stop_writing(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from([transfer for transfer in self.pending("writing") if transfer.cancelled]))
        transfer.writing = False

    @precondition(lambda self: self.pending("unreported"))
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(self.pending("unreported")))
        transfer.reported = True
        if transfer.layer in self.words and not transfer.cancelled:
            self.producer.land(transfer.layer)
        self.conclude()

    @precondition(lambda self: self.pending("unreleased"))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(self.pending("unreleased")))
        transfer.released = True
        self.producer.release(transfer.layer)
        self.conclude()

    # ---- the consumer ----

    @rule()
    def scan(self) -> None:
        self.consumer.land(self.words)

    @rule()
    def consumer_aborts(self) -> None:
        if self.consumer.stop(Outcome(Verdict.ABORTED, "consumer")) and self.connected:
            self.to_producer.append(Abort("id", "consumer"))

    @rule()
    def consumer_times_out(self) -> None:
        self.consumer.land(self.words)
        if self.consumer.stop(Outcome(Verdict.TIMEOUT, "stall")):
            self.timed_out = True
            if self.connected:
                self.to_producer.append(Abort("id", "stall"))

    # ---- the network ----

    @precondition(lambda self: self.to_consumer)
    @rule()
    def deliver_to_consumer(self) -> None:
        message = self.to_consumer.popleft()
        if isinstance(message, End):
            self.past.append(message)
            self.consumer_ends(message)
        else:
            try:
                self.consumer.open()
            except TicketError:
                self.to_producer.append("refused")
            else:
                self.to_producer.append("opened")

    def consumer_ends(self, message: End) -> None:
        if not message.complete:
            self.consumer.land(self.words)
        outcome, _ = self.consumer.end(message.complete, message.reason)
        self.to_producer.append(outcome)

    @precondition(lambda self: self.to_producer and not self.dead)
    @rule()
    def deliver_to_producer(self) -> None:
        message = self.to_producer.popleft()
        if message == "opened":
            self.producer.open()
        elif message == "refused":
            assert not self.consumer.opened
        elif isinstance(message, Abort):
            self.past.append(message)
            self.producer.abort(message.reason)
        elif isinstance(message, Outcome):
            self.past.append(message)
            self.producer.answer(Outcome.parse(message.body()))
        self.conclude()

    @precondition(lambda self: self.past and self.connected)
    @rule(data=st.data())
    def repeat_a_message(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.past))
        if isinstance(message, End):
            self.consumer_ends(message)
            self.to_producer.pop()
        elif isinstance(message, Abort):
            self.producer.abort(message.reason)
        else:
            self.producer.answer(Outcome.parse(message.body()))
        self.conclude()

    @precondition(lambda self: self.connected)
    @rule(dies=st.booleans())
    def disconnect(self, dies: bool) -> None:
        self.connected, self.dead = False, dies
        self.to_consumer.clear()
        self.to_producer.clear()
        if not dies:
            self.producer.lose("lost")
            self.conclude()
        self.consumer.land(self.words)
        if self.consumer.opened:
            self.consumer.lose("lost", dies)

    @precondition(lambda self: not self.connected and not self.dead)
    @rule()
    def death_is_confirmed(self) -> None:
        self.dead = True
        if self.consumer.opened:
            self.consumer.fence()

    # ---- invariants ----

    @invariant()
    def one_outcome(self) -> None:
        for index, state in enumerate((self.producer, self.consumer)):
            if self.first[index] is None:
                self.first[index] = state.outcome
            assert state.outcome == self.first[index]
        if self.producer.outcome is not None and self.producer.outcome.verdict is Verdict.FINISHED:
            assert self.consumer.outcome is not None
            assert self.consumer.outcome.verdict is Verdict.FINISHED

    @invariant()
    def fenced_blocks_are_not_written(self) -> None:
        if self.consumer.fenced and not self.dead:
            assert not self.pending("writing")

    @invariant()
    def landed_is_written(self) -> None:
        assert set(self.consumer.landed) <= self.words
        assert len(set(self.consumer.landed)) == len(self.consumer.landed)

    def teardown(self) -> None:
        """Let everything happen that is due; then both sides have ended, and agree."""
        if self.connected and self.to_consumer and self.to_consumer[0] == "open":
            self.deliver_to_consumer()
        for _ in range(4):
            while self.to_producer and not self.dead:
                self.deliver_to_producer()
            if self.opened and not self.dead and not self.producer.complete:
                self.producer.stop("left")
            for transfer in self.transfers if not self.dead else ():
                if transfer.writing:
                    transfer.writing = False
                    if not transfer.cancelled:
                        self.words.add(transfer.layer)
                if not transfer.reported:
                    transfer.reported = True
                    if transfer.layer in self.words and not transfer.cancelled:
                        self.producer.land(transfer.layer)
                transfer.released = True
                self.producer.release(transfer.layer)
            self.conclude()
            while self.to_consumer:
                self.deliver_to_consumer()
            self.one_outcome()
            self.fenced_blocks_are_not_written()
        if not self.consumer.opened:
            self.consumer.stop(Outcome(Verdict.TIMEOUT, "expired"))
            assert self.consumer.fenced
            return
        consumer, producer = self.consumer.outcome, self.producer.outcome
        assert consumer is not None
        assert self.consumer.ended
        assert self.consumer.fenced or not (self.connected or self.dead)
        if not self.dead:
            assert producer is not None
        if self.connected and not self.gave_up:
            assert producer is not None
            assert (producer.verdict is Verdict.FINISHED) == (consumer.verdict is Verdict.FINISHED)
            assert producer.verdict in (Verdict.FINISHED, Verdict.ABORTED)
            if not self.timed_out:
                assert producer.verdict is consumer.verdict


TestStreaming = Streaming.TestCase
TestStreaming.settings = settings(max_examples=500, stateful_step_count=40, deadline=None)


def opened(layers: int = LAYERS) -> ConsumerState:
    state = ConsumerState(layers)
    state.open()
    return state


def producing(layers: int) -> ProducerState:
    state = ProducerState(layers)
    state.begin()
    state.open()
    return state


class TestConsumer:
    def test_all_layers_finish_and_fence_it(self) -> None:
        state = opened()
        assert state.land([2, 2, 0]) == [2, 0]
        assert state.outcome is None
        assert state.land([0, 1]) == [1]
        assert state.outcome == Outcome(Verdict.FINISHED)
        assert state.fenced
        assert not state.ended
        assert state.landed == [2, 0, 1]

    def test_nothing_lands_before_opening_or_after_the_end(self) -> None:
        state = ConsumerState(LAYERS)
        assert state.land([0]) == []
        state.open()
        state.stop(Outcome(Verdict.ABORTED, "x"))
        assert state.land([0]) == []

    def test_a_ticket_is_used_once(self) -> None:
        state = opened()
        with pytest.raises(TicketError, match="used before"):
            state.open()

    def test_a_revoked_ticket_is_void_and_needs_no_fence(self) -> None:
        state = ConsumerState(LAYERS)
        assert not state.stop(Outcome(Verdict.ABORTED, "gone"))
        assert state.fenced
        assert state.ended
        with pytest.raises(TicketError, match="gone"):
            state.open()

    def test_a_timeout_leaves_the_fence_to_the_producer(self) -> None:
        state = opened()
        assert state.stop(Outcome(Verdict.TIMEOUT, "stall"))
        assert not state.fenced
        assert not state.stop(Outcome(Verdict.ABORTED, "again"))
        outcome, news = state.end(True, "")
        assert (outcome.verdict, news, state.fenced) == (Verdict.TIMEOUT, [], True)

    def test_a_complete_end_lands_missing_layers(self) -> None:
        state = opened()
        state.land([1])
        assert state.end(True, "") == (Outcome(Verdict.FINISHED), [0, 2])

    @pytest.mark.parametrize("dead", [True, False])
    def test_only_death_fences_a_lost_stream(self, dead: bool) -> None:
        state = opened()
        state.lose("gone", dead)
        assert state.outcome == Outcome(Verdict.LOST, "gone")
        assert state.fenced is dead
        state.fence()
        assert state.fenced


class TestProducer:
    def test_wrong_pushes(self) -> None:
        state = producing(2)
        state.push(0)
        with pytest.raises(InvalidArgumentError, match="pushed before"):
            state.check(0)
        for layer in (-1, 2):
            with pytest.raises(RangeError, match="does not exist"):
                state.check(layer)
        assert state.abort("no more")
        with pytest.raises(StreamAbortedError, match="no more"):
            state.check(1)

    def test_layers_are_pushed_while_it_is_open(self) -> None:
        state = ProducerState(1)
        for step in (state.begin, state.open):
            with pytest.raises(ClosedError, match="not open"):
                state.check(0)
            step()
        state.check(0)
        with pytest.raises(ClosedError, match="opened only once"):
            state.begin()

    def test_closing_aborts_streams_without_all_layers(self) -> None:
        state = producing(2)
        state.push(0)
        assert state.needs_pushes
        assert state.close()
        assert not state.close()
        with pytest.raises(StreamAbortedError, match="after 1 of 2 layers"):
            state.check(1)
        complete = producing(1)
        complete.push(0)
        assert not complete.needs_pushes
        assert not complete.close()
        assert complete.stopping is None

    def test_after_giving_up_nothing_waits(self) -> None:
        state = producing(1)
        state.abort("x")
        assert state.conclude()
        assert not state.conclude()
        assert not state.settled
        assert not state.give_up("too slow")
        assert state.settled
        assert state.outcome == Outcome(Verdict.ABORTED, "x")

    def test_nothing_starts_after_an_abort(self) -> None:
        state = producing(2)
        state.push(0)
        state.abort("stop")
        assert not state.start(0)

    def test_after_the_end_is_sent_it_is_too_late_to_stop(self) -> None:
        state = producing(1)
        state.push(0)
        state.start(0)
        state.land(0)
        state.release(0)
        assert state.end("id").complete
        state.stop("changed my mind")
        assert state.stopping is None

    def test_a_finished_answer_overrides_our_own_wish_to_stop(self) -> None:
        state = producing(1)
        state.push(0)
        state.start(0)
        state.stop("changed my mind")
        state.release(0)
        assert state.end("id") == End("id", False, "changed my mind")
        state.answer(Outcome(Verdict.FINISHED))
        state.abort("late")
        assert state.outcome == Outcome(Verdict.FINISHED)


def test_reasons_of_the_other_side_can_neither_forge_a_line_nor_control_a_terminal() -> None:
    reason = "bad\nWARNING forged\x1b[2J\r\u202e" + 500 * "x"
    for message in (
        parse({"say": "abort", "id": "1", "reason": reason}),
        parse({"say": "end", "id": "1", "complete": False, "reason": reason}),
        Outcome.parse({"outcome": "aborted", "reason": reason}),
    ):
        assert not isinstance(message, Open)
        assert message.reason.startswith("bad?WARNING forged?[2J??xxx")
        assert len(message.reason) == REASON_CHARACTERS
