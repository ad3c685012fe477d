"""The block allocator, against a simple model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hixl_async.kv.allocator import Allocator, BlockState, Request

BLOCKS = 10


class Lending(RuleBasedStateMachine):
    """Random requests, withdrawals, quarantines and returns, against the obvious model."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(BLOCKS)
        self.queue: list[Request] = []
        self.held: list[Request] = []
        self.quarantined: list[Request] = []

    def granted(self, requests: list[Request]) -> None:
        for request in requests:
            assert request is self.queue.pop(0), "granted out of order"
            self.held.append(request)

    @rule(count=st.integers(1, BLOCKS))
    def request(self, count: int) -> None:
        request = self.allocator.request(count)
        (self.held if request.ids else self.queue).append(request)

    @rule(count=st.integers(1, BLOCKS))
    def request_now(self, count: int) -> None:
        request = self.allocator.request_now(count)
        if request is None:
            assert self.queue or count > self.allocator.count(BlockState.FREE)
        else:
            self.held.append(request)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.queue.pop(data.draw(st.integers(0, len(self.queue) - 1)))
        self.granted(self.allocator.withdraw(request))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["release", "withdraw", "quarantine"]))
    def give_back(self, data: st.DataObject, how: str) -> None:
        request = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if how == "quarantine":
            self.allocator.quarantine(request.ids)
            self.quarantined.append(request)
        else:
            self.granted(self.allocator.release(request.ids) if how == "release" else self.allocator.withdraw(request))

    @precondition(lambda self: self.quarantined)
    @rule()
    def fence(self) -> None:
        self.granted(self.allocator.release(self.quarantined.pop().ids))

    @invariant()
    def nothing_is_lent_twice_and_no_request_waits_in_vain(self) -> None:
        lent = [block for request in self.held + self.quarantined for block in request.ids]
        assert len(set(lent)) == len(lent)
        assert all(len(request.ids) == request.count for request in self.held)
        counts = [self.allocator.count(state) for state in BlockState]
        quarantined = sum(len(request.ids) for request in self.quarantined)
        assert counts == [BLOCKS - len(lent), len(lent) - quarantined, quarantined]
        assert self.allocator.waiting == len(self.queue)
        if self.queue:
            assert self.queue[0].count > counts[0]


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_small_request_does_not_overtake() -> None:
    allocator = Allocator(4)
    held = allocator.request(3)
    large, small = allocator.request(2), allocator.request(1)
    assert not large.ids
    assert not small.ids
    assert allocator.request_now(1) is None
    assert allocator.release(held.ids) == [large, small]


def test_cancelling_the_first_lets_the_next_go() -> None:
    allocator = Allocator(4)
    allocator.request(3)
    large, small = allocator.request(2), allocator.request(1)
    assert allocator.withdraw(large) == [small]


def test_lowest_ids_first_or_the_given_order() -> None:
    assert Allocator(4).request(3).ids == (0, 1, 2)
    assert Allocator(4, [2, 0, 3, 1]).request(3).ids == (2, 0, 3)


def test_blocks_that_were_never_lent_cost_nothing() -> None:
    allocator = Allocator(1 << 60)
    first, second = allocator.request(3), allocator.request(2)
    allocator.release(first.ids[1:])
    assert second.ids == (3, 4)
    assert allocator.request(4).ids == (1, 2, 5, 6)
    assert allocator.count(BlockState.FREE) == (1 << 60) - 7


def test_a_block_cannot_come_back_twice() -> None:
    allocator = Allocator(2)
    ids = allocator.request(1).ids
    allocator.release(ids)
    with pytest.raises(AssertionError, match="block 0 is FREE"):
        allocator.release(ids)
    with pytest.raises(AssertionError, match="block 0 is FREE"):
        allocator.quarantine(ids)
