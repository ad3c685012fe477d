from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hixl_async.kv.ledger import BlockState, Ledger, Request

BLOCKS = 10


class Lending(RuleBasedStateMachine):
    """Random requests, withdrawals, quarantines and returns, against the obvious model."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(BLOCKS)
        self.queue: list[Request] = []
        self.held: list[Request] = []
        self.quarantined: list[Request] = []

    def granted(self, requests: list[Request]) -> None:
        for request in requests:
            assert request is self.queue.pop(0), "overtaken"
            self.held.append(request)

    @rule(count=st.integers(1, BLOCKS))
    def request(self, count: int) -> None:
        request = self.ledger.request(count)
        (self.held if request.ids else self.queue).append(request)

    @rule(count=st.integers(1, BLOCKS))
    def request_now(self, count: int) -> None:
        request = self.ledger.request_now(count)
        if request is None:
            assert self.queue or count > self.ledger.count(BlockState.FREE)
        else:
            self.held.append(request)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.queue.pop(data.draw(st.integers(0, len(self.queue) - 1)))
        self.granted(self.ledger.withdraw(request))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["release", "withdraw", "quarantine"]))
    def give_back(self, data: st.DataObject, how: str) -> None:
        request = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if how == "quarantine":
            self.ledger.quarantine(request.ids)
            self.quarantined.append(request)
        else:
            self.granted(self.ledger.release(request.ids) if how == "release" else self.ledger.withdraw(request))

    @precondition(lambda self: self.quarantined)
    @rule()
    def fence(self) -> None:
        self.granted(self.ledger.release(self.quarantined.pop().ids))

    @invariant()
    def nothing_is_lent_twice_and_nobody_waits_in_vain(self) -> None:
        lent = [block for request in self.held + self.quarantined for block in request.ids]
        assert len(set(lent)) == len(lent)
        assert all(len(request.ids) == request.count for request in self.held)
        counts = [self.ledger.count(state) for state in BlockState]
        quarantined = sum(len(request.ids) for request in self.quarantined)
        assert counts == [BLOCKS - len(lent), len(lent) - quarantined, quarantined]
        assert self.ledger.waiting == len(self.queue)
        if self.queue:
            assert self.queue[0].count > counts[0]


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_small_request_does_not_overtake() -> None:
    ledger = Ledger(4)
    held = ledger.request(3)
    large, small = ledger.request(2), ledger.request(1)
    assert not large.ids
    assert not small.ids
    assert ledger.request_now(1) is None
    assert ledger.release(held.ids) == [large, small]


def test_cancelling_the_first_lets_the_next_go() -> None:
    ledger = Ledger(4)
    ledger.request(3)
    large, small = ledger.request(2), ledger.request(1)
    assert ledger.withdraw(large) == [small]


def test_lowest_ids_first_or_the_given_order() -> None:
    assert Ledger(4).request(3).ids == (0, 1, 2)
    assert Ledger(4, [2, 0, 3, 1]).request(3).ids == (2, 0, 3)


def test_blocks_that_nobody_asked_for_cost_nothing() -> None:
    ledger = Ledger(1 << 60)
    first, second = ledger.request(3), ledger.request(2)
    ledger.release(first.ids[1:])
    assert second.ids == (3, 4)
    assert ledger.request(4).ids == (1, 2, 5, 6)
    assert ledger.count(BlockState.FREE) == (1 << 60) - 7


def test_a_block_cannot_come_back_twice() -> None:
    ledger = Ledger(2)
    ids = ledger.request(1).ids
    ledger.release(ids)
    with pytest.raises(AssertionError, match="block 0 is FREE"):
        ledger.release(ids)
    with pytest.raises(AssertionError, match="block 0 is FREE"):
        ledger.quarantine(ids)
