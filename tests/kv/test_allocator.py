"""The block allocator, against a simple model."""

from __future__ import annotations

from collections import Counter

import pytest

from hixl_async.kv.allocator import Allocator, Request
from tests.machine import Choices, Machine, event, programs

BLOCKS = 8


class Allocation(Machine):
    """Random requests, withdrawals, shares, quarantines and returns: two bags of references, and a queue."""

    def begin(self, choose: Choices) -> None:
        order = choose.shuffled(range(BLOCKS)) if choose.flag() else None
        self.allocator = Allocator(BLOCKS, order)
        self.order = order or list(range(BLOCKS))
        #: The requests that wait, with their priorities, in the order in which they came.
        self.queue: list[tuple[int, Request]] = []
        self.granted: list[Request] = []  # of which nothing was given back
        self.open: Counter[int] = Counter()
        self.held: Counter[int] = Counter()

    @property
    def free(self) -> list[int]:
        return [block for block in self.order if not self.open[block] and not self.held[block]]

    def lend(self, request: Request) -> None:
        assert request.ids == tuple(self.free[: request.count]), "a block was lent while referenced, or out of order"
        self.open.update(request.ids)
        self.granted.append(request)

    def wake(self, woken: list[Request]) -> None:
        """Check which requests a return of blocks has granted."""
        due = []
        for _, request in sorted(self.queue, key=lambda entry: -entry[0]):  # a stable sort
            if request.count > len(self.free):
                break
            due.append(request)
            self.lend(request)
        assert woken == due
        self.queue = [entry for entry in self.queue if entry[1] not in due]

    def some(self, choose: Choices, references: Counter[int]) -> list[int]:
        """Choose some references, of a block perhaps several."""
        count = choose.between(1, references.total())
        return choose.shuffled(list(references.elements()))[:count]

    # ---- requests ----

    @event()
    def request(self, choose: Choices) -> None:
        count, priority = choose.between(1, BLOCKS), choose.between(-1, 1)
        goes_first = all(other < priority for other, _ in self.queue)
        fits = count <= len(self.free)
        request = self.allocator.request(count, priority)
        if goes_first and fits:
            self.lend(request)
        else:
            assert request.ids == ()
            self.queue.append((priority, request))

    @event()
    def request_now(self, choose: Choices) -> None:
        count, priority = choose.between(1, BLOCKS), choose.between(-1, 1)
        goes_first = all(other < priority for other, _ in self.queue)
        fits = count <= len(self.free)
        request = self.allocator.request_now(count, priority)
        assert (request is not None) == (goes_first and fits)
        if request is not None:
            self.lend(request)

    @event(lambda self: self.queue)
    def withdraw_one_that_waits(self, choose: Choices) -> None:
        entry = choose.one_of(self.queue)
        self.queue.remove(entry)
        self.wake(self.allocator.withdraw(entry[1]))
        assert entry[1].ids == ()

    @event(lambda self: self.granted)
    def withdraw_one_that_was_granted(self, choose: Choices) -> None:
        request = choose.one_of(self.granted)
        self.forget(request.ids)
        self.open -= Counter(request.ids)
        woken = self.allocator.withdraw(request)
        assert request.ids == ()
        self.wake(woken)
        assert self.allocator.withdraw(request) == [], "a second time it gave something back"

    def forget(self, ids: list[int] | tuple[int, ...]) -> None:
        """Remember that references of some requests are gone, or shared, so that they cannot be withdrawn."""
        self.granted = [request for request in self.granted if not set(ids) & set(request.ids)]

    # ---- references ----

    @event(lambda self: self.open)
    def share(self, choose: Choices) -> None:
        ids = [choose.one_of(sorted(self.open)) for _ in range(choose.between(0, BLOCKS))]
        self.allocator.share(ids)
        self.open.update(ids)
        assert self.allocator.shared(sorted(self.open)) == [
            block for block in sorted(self.open) if self.open[block] > 1
        ]

    @event(lambda self: self.open)
    def release(self, choose: Choices) -> None:
        ids = self.some(choose, self.open)
        self.forget(ids)
        self.open -= Counter(ids)
        self.wake(self.allocator.release(ids))

    @event(lambda self: self.open)
    def quarantine(self, choose: Choices) -> None:
        ids = self.some(choose, self.open)
        self.forget(ids)
        self.open -= Counter(ids)
        self.held.update(ids)
        self.allocator.quarantine(ids)

    @event(lambda self: self.held)
    def release_held(self, choose: Choices) -> None:
        ids = self.some(choose, self.held)
        self.held -= Counter(ids)
        self.wake(self.allocator.release_held(ids))

    # ---- what always holds ----

    def check(self) -> None:
        self.the_counts_are_those_of_the_references()
        self.no_request_waits_in_vain()

    def the_counts_are_those_of_the_references(self) -> None:
        quarantined = [block for block in self.held if not self.open[block]]
        assert (self.allocator.reserved, self.allocator.quarantined) == (len(+self.open), len(quarantined))
        assert self.allocator.free == len(self.free)
        assert self.allocator.free + self.allocator.reserved + self.allocator.quarantined == BLOCKS
        assert self.allocator.waiting == len(self.queue)

    def no_request_waits_in_vain(self) -> None:
        if self.queue:
            _, first = max(self.queue, key=lambda entry: entry[0])  # of equal ones the first
            assert first.count > self.allocator.free

    def end(self) -> None:
        """Everything that is given back can be lent again."""
        while self.queue:
            self.wake(self.allocator.withdraw(self.queue.pop()[1]))
        assert self.allocator.release(list(self.open.elements())) == []
        assert self.allocator.release_held(list(self.held.elements())) == []
        assert self.allocator.request(BLOCKS).ids == tuple(self.order)


test_allocation = programs(Allocation, 200, steps=40)


def test_a_small_request_does_not_overtake() -> None:
    allocator = Allocator(4)
    lent = allocator.request(3)
    large, small = allocator.request(2), allocator.request(1)
    assert not large.ids
    assert not small.ids
    assert allocator.request_now(1) is None
    assert allocator.release(lent.ids) == [large, small]


def test_a_higher_priority_overtakes_those_that_wait() -> None:
    allocator = Allocator(4)
    lent = allocator.request(3)
    low, high = allocator.request(2, priority=-5), allocator.request(2, priority=7)
    assert allocator.request_now(1, priority=7) is None
    urgent = allocator.request_now(1, priority=8)
    assert urgent is not None
    assert allocator.release(lent.ids[:1]) == []
    assert allocator.release(lent.ids[1:2]) == [high]
    assert allocator.release(urgent.ids + lent.ids[2:]) == [low]


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
    assert allocator.free == (1 << 60) - 7


def test_a_block_is_free_once_it_has_neither_kind_of_reference() -> None:
    allocator = Allocator(1)
    ids = allocator.request(1).ids
    waiting = allocator.request(1)
    allocator.share(ids)
    allocator.quarantine(ids)
    assert (allocator.reserved, allocator.quarantined) == (1, 0)
    assert allocator.release(ids) == []
    assert (allocator.reserved, allocator.quarantined) == (0, 1)
    assert allocator.release_held(ids) == [waiting]


def test_a_reference_cannot_come_back_twice() -> None:
    allocator = Allocator(2)
    ids = allocator.request(1).ids
    allocator.quarantine(ids)
    for drop in (allocator.release, allocator.quarantine):
        with pytest.raises(AssertionError, match="block 0 was given back twice"):
            drop(ids)
    allocator.release_held(ids)
    with pytest.raises(AssertionError, match="block 0 was given back twice"):
        allocator.release_held(ids)


def test_only_reserved_blocks_are_shared() -> None:
    allocator = Allocator(2)
    ids = allocator.request(1).ids
    allocator.quarantine(ids)
    with pytest.raises(AssertionError, match="block 0 is not reserved"):
        allocator.share(ids)
