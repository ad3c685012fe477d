"""The owner's end of an offer, without a loop: every interleaving of publications, readers and limits keeps O1 to O3."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from hixl_async.errors import (
    ClosedError,
    HixlError,
    InvalidArgumentError,
    PeerLostError,
    RangeError,
    StreamAbortedError,
    TicketError,
    TransferTimeoutError,
)
from hixl_async.kv.offer_state import OfferState
from hixl_async.kv.outcome import Outcome, Verdict
from hixl_async.kv.states import FINISHED
from tests.machine import Choices, Machine, event, programs

#: The tokens that are offered of each layer.
TOKENS = {0: (4, 8), 3: (4, 8), 5: (0, 2)}
ABORTED = Outcome(Verdict.ABORTED, "enough")
LOST = Outcome(Verdict.LOST, "gone")
TIMEOUT = Outcome(Verdict.TIMEOUT, "too late")
#: How the part of a reader ends; mostly well, so that offers get anywhere.
ENDS = [FINISHED, FINISHED, FINISHED, FINISHED, ABORTED, LOST, TIMEOUT]


class Interleavings(Machine):
    """An offer as `Offering` drives it, and what its program and its readers know."""

    def begin(self, choose: Choices) -> None:
        readers = choose.between(1, 3)
        self.state = OfferState(TOKENS, readers)
        self.readers = readers
        self.next = {layer: first for layer, (first, _) in TOKENS.items()}
        self.queue: deque[tuple[int, int, bool]] = deque()  # published, and not ready
        self.reading = 0
        self.ends: list[Outcome] = []
        self.past: Outcome | None = None
        self.releases = 0

    # ---- the program ----

    @event(lambda self: self.missing())
    def announce(self, choose: Choices) -> None:
        layer = choose.one_of(self.missing())
        first, end = self.next[layer], TOKENS[layer][1]
        rest, last = choose.flag(), choose.seldom()
        after = end if rest else choose.between(first + 1, end)
        if self.state.outcome is not None:
            with pytest.raises(HixlError):
                self.state.check_going_on()
            return
        announced = self.state.announce(layer, None if rest else (first, after), rest or last)
        assert announced == (after, last or after == end)
        self.next[layer] = end if announced[1] else after
        self.queue.append((layer, *announced))

    @event(lambda self: self.queue)
    def become_ready(self, choose: Choices) -> None:
        layer, after, complete = self.queue.popleft()
        if self.state.outcome is None:  # else the queue was dropped
            self.state.publish(layer, after, complete)
            assert self.state.published[layer] == (after, complete)

    @event()
    def finish(self, choose: Choices) -> None:
        payload = bytes(choose.below(256) for _ in range(choose.below(4)))
        finished, ended = self.state.payload is not None, self.state.outcome is not None
        try:
            self.state.finish(payload)
        except HixlError:
            assert finished or ended or self.missing()
        else:
            assert not finished
            assert not ended
            assert not self.missing()
            assert self.state.payload == payload

    @event()
    def stop(self, choose: Choices) -> None:
        outcome = choose.one_of([ABORTED, TIMEOUT])
        if choose.seldom():
            ended = self.state.outcome is not None
            assert self.state.stop(outcome) is not ended
            if not ended:
                assert self.state.outcome == (outcome if self.opened else Outcome(Verdict.VOID, outcome.reason)), (
                    "nothing was read of a void offer"
                )

    # ---- the readers ----

    @event()
    def open(self, choose: Choices) -> None:
        usable = self.state.outcome is None and self.state.awaited > 0
        try:
            self.state.open()
        except TicketError:
            assert not usable
        else:
            assert usable
            assert self.releases == 0
            self.reading += 1

    @event(lambda self: self.reading)
    def reader_ends(self, choose: Choices) -> None:
        self.end_reading(choose.one_of(ENDS))

    def end_reading(self, outcome: Outcome) -> None:
        self.reading -= 1
        self.ends.append(outcome)
        self.state.end(outcome)

    @event()
    def expire(self, choose: Choices) -> None:
        if choose.seldom():
            self.state.expire(TIMEOUT)
            with pytest.raises(TicketError):
                self.state.open()

    # ---- what holds ----

    def check(self) -> None:
        self.o1_one_outcome()
        self.o2_finished_is_all()
        self.o3_released_once()
        self.the_numbers_agree()

    def missing(self) -> list[int]:
        return [layer for layer, (_, end) in TOKENS.items() if self.next[layer] < end]

    @property
    def opened(self) -> int:
        return self.reading + len(self.ends)

    def o1_one_outcome(self) -> None:
        if self.past is not None:
            assert self.state.outcome == self.past
        self.past = self.state.outcome

    def o2_finished_is_all(self) -> None:
        all_read = self.ends == [FINISHED] * self.readers
        if self.state.outcome == FINISHED:
            assert all_read
            assert not self.missing()
            assert self.state.payload is not None
            assert all(self.state.published[layer][1] for layer in TOKENS)
        elif self.state.outcome is None:
            assert not (all_read and self.state.complete), "nothing is awaited"

    def o3_released_once(self) -> None:
        released = self.state.outcome is not None and not self.reading
        assert self.state.released is released
        assert released or not self.releases, "the blocks were released before"
        self.releases |= released

    def the_numbers_agree(self) -> None:
        state = self.state
        assert (state.opened, state.ended) == (self.opened, len(self.ends))
        assert state.opened + state.awaited <= self.readers
        assert state.layers == len(TOKENS)
        assert state.announced == len(TOKENS) - len(self.missing())
        failures = [end for end in self.ends if end != FINISHED]
        if failures:
            assert state.setback in {failures[0], TIMEOUT}

    def end(self) -> None:
        """Whatever happened, the offer ends once its program and its readers do."""
        self.state.stop(ABORTED)
        while self.reading:
            self.end_reading(FINISHED)
        assert self.state.released


test_interleavings = programs(Interleavings, 300, steps=30)


def offer(readers: int = 1) -> OfferState:
    return OfferState({0: (4, 8), 1: (4, 8)}, readers)


def published(readers: int = 1) -> OfferState:
    """Return an offer of which all is published and finished."""
    state = offer(readers)
    for layer in range(2):
        state.announce(layer, None, True)
        state.publish(layer, 8, True)
    state.finish(b"token")
    return state


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ((3, 5), RangeError, "has the tokens 4 to 8 of layer 0, not 3 to 5"),
        ((6, 9), RangeError, "has the tokens 4 to 8 of layer 0, not 6 to 9"),
        ((6, 6), RangeError, "not 6 to 6"),
        ((7, 8), InvalidArgumentError, "from 7 of layer 0 were published where those from 6 are next"),
        ((4, 8), InvalidArgumentError, "from 4 of layer 0 were published where those from 6 are next"),
    ],
)
def test_tokens_are_published_in_order(tokens: tuple[int, int], error: type[HixlError], message: str) -> None:
    state = offer()
    state.announce(0, (4, 6), False)
    with pytest.raises(error, match=message):
        state.announce(0, tokens, False)
    assert state.announce(0, None, True) == (8, True)


@pytest.mark.parametrize(("tokens", "complete"), [(None, True), ((4, 8), False), ((4, 5), True)])
def test_a_layer_is_published_once(tokens: tuple[int, int] | None, complete: bool) -> None:
    state = offer()
    state.announce(0, tokens, complete)
    with pytest.raises(InvalidArgumentError, match="all of layer 0 was published before"):
        state.announce(0, None, True)
    assert state.announced == 1


def test_what_is_not_ready_is_not_published() -> None:
    state = offer()
    state.announce(0, None, True)
    state.announce(1, None, True)
    state.finish(b"")
    state.open()
    assert not state.published
    assert not state.complete
    state.publish(0, 8, True)
    state.publish(1, 8, True)
    assert state.complete
    assert state.outcome is None
    state.end(FINISHED)
    assert state.outcome == FINISHED


def test_an_offer_is_finished_once_and_whole() -> None:
    state = offer()
    state.announce(0, None, True)
    with pytest.raises(ClosedError, match="1 of 2 layers were not published"):
        state.finish(b"")
    assert state.payload is None
    state = published()
    with pytest.raises(ClosedError, match="finished before"):
        state.finish(b"")
    state.open()
    state.end(FINISHED)
    with pytest.raises(ClosedError, match="has ended"):
        state.finish(b"")
    with pytest.raises(ClosedError, match="has ended"):
        state.check_going_on()


def test_a_ticket_is_used_once_by_each_reader() -> None:
    state = offer(readers=2)
    state.open()
    state.open()
    with pytest.raises(TicketError, match="used by all of its 2 readers"):
        state.open()
    state.stop(ABORTED)
    with pytest.raises(TicketError, match="void: enough"):
        state.open()


def test_the_ticket_of_an_offer_that_has_finished_is_void() -> None:
    state = published()
    state.open()
    state.end(FINISHED)
    with pytest.raises(TicketError, match="void: the offer has ended"):
        state.open()


def test_an_expired_ticket_says_so() -> None:
    state = offer(readers=2)
    state.open()
    state.expire(TIMEOUT)
    assert state.outcome is None
    with pytest.raises(TicketError, match="has expired"):
        state.open()


@pytest.mark.parametrize(
    ("outcome", "error"), [(ABORTED, StreamAbortedError), (TIMEOUT, TransferTimeoutError), (LOST, PeerLostError)]
)
def test_what_ends_an_offer_is_raised(outcome: Outcome, error: type[HixlError]) -> None:
    state = offer()
    state.open()
    assert state.stop(outcome)
    assert not state.stop(FINISHED)
    calls: list[Any] = [state.check_going_on, lambda: state.finish(b"")]
    for call in calls:
        with pytest.raises(error, match=outcome.reason):
            call()
    assert not state.released
    state.end(FINISHED)
    assert state.released


def test_an_offer_that_is_not_opened_in_time_is_void() -> None:
    state = published()
    state.expire(TIMEOUT)
    assert state.outcome == Outcome(Verdict.VOID, "too late")
    assert state.released


@pytest.mark.parametrize("failure", [ABORTED, LOST, TIMEOUT])
def test_the_first_failure_is_the_outcome_once_all_have_ended(failure: Outcome) -> None:
    state = published(readers=4)
    for _ in range(3):
        state.open()
    for end in (FINISHED, failure, Outcome(Verdict.ABORTED, "another")):
        state.end(end)
        assert state.outcome is None
    state.expire(TIMEOUT)
    assert state.outcome == failure
    assert state.released
