"""The lending of blocks as loans, against a simple model; the test is the loop, and resumes each wait when it likes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hixl_async.errors import BusyError, ClosedError
from hixl_async.kv.context import PoolContext
from hixl_async.kv.lender import Lender
from hixl_async.kv.loan import Loan
from tests.machine import Choices, Machine, event, programs

BLOCKS = 8


class Promise:
    """A future of the test's loop."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._done = False

    def done(self) -> bool:
        return self._done

    def set_result(self, result: None) -> None:
        assert not self._done
        self._done = True

    def set_exception(self, error: BaseException) -> None:
        self.set_result(None)
        self._error = error

    def __await__(self) -> Generator[Promise, None, None]:
        yield self
        if self._error is not None:
            raise self._error


class Context:
    """What a lender needs of its pool."""

    def __init__(self) -> None:
        self.blocks, self.name, self.closed = BLOCKS, "kv", False
        self.lock = threading.Lock()
        self.loop = SimpleNamespace(create_future=Promise)

    def check_usable(self) -> None:
        if self.closed:
            raise ClosedError("closed")


def lender(order: list[int] | None = None) -> Lender:
    return Lender(cast(PoolContext, Context()), order)


class Wait:
    """A task that waits for blocks."""

    def __init__(self, work: Coroutine[Any, Any, tuple[int, ...]], count: int, priority: int) -> None:
        self.work, self.count, self.priority = work, count, priority
        self.promise: Promise | None = None

    def step(self, step: Callable[[], Promise]) -> tuple[int, ...] | None:
        """Run the task to its next wait, and return what it has taken if it has ended."""
        try:
            self.promise = step()
        except StopIteration as stop:
            return cast("tuple[int, ...]", stop.value)
        return None

    def resume(self) -> tuple[int, ...]:
        ids = self.step(lambda: self.work.send(None))
        assert ids is not None
        return ids

    @property
    def due(self) -> bool:
        """True once the blocks are there, and the task has only to go on."""
        assert self.promise is not None
        return self.promise.done()


class Lending(Machine):
    """Random waits, cancellations, loans, shares, holds and streams, against bags of references."""

    def begin(self, choose: Choices) -> None:
        self.lender = lender(choose.shuffled(range(BLOCKS)) if choose.flag() else None)
        self.waits: list[Wait] = []  # in the order in which they came
        self.taken: list[tuple[int, ...]] = []  # without a loan so far
        self.loans: list[Loan] = []  # that are lent, or held
        #: The loans that are held: by pushes, and by streams whose peers can write the blocks.
        self.read: list[Loan] = []
        self.written: list[Loan] = []

    # ---- the model ----

    @property
    def open(self) -> Counter[int]:
        lent = [loan.ids for loan in self.loans if not loan.closed]
        return Counter(block for ids in self.taken + lent for block in ids)

    @property
    def held(self) -> set[int]:
        return {block for loan in self.loans if loan.closed for block in loan.ids}

    @property
    def referenced(self) -> set[int]:
        return set(self.open) | self.held

    @property
    def blocks_written(self) -> set[int]:
        return {block for loan in self.written for block in loan.ids}

    @property
    def free(self) -> int:
        """The number of blocks that no task has, nor is about to have."""
        granted = sum(wait.count for wait in self.waits if wait.due)
        return BLOCKS - len(self.referenced) - granted

    @property
    def lent(self) -> list[Loan]:
        return [loan for loan in self.loans if not loan.closed]

    def goes_first(self, priority: int) -> bool:
        return all(wait.priority < priority for wait in self.waits if not wait.due)

    def take_in(self, ids: tuple[int, ...], count: int) -> None:
        assert len(set(ids)) == len(ids) == count
        assert not set(ids) & self.referenced, "a block was lent while referenced"
        assert not set(ids) & self.blocks_written, "a block was lent while a peer can write it"
        self.taken.append(ids)

    # ---- reservations ----

    @event()
    def take(self, choose: Choices) -> None:
        count, priority = choose.between(1, BLOCKS), choose.between(-1, 1)
        at_once = self.goes_first(priority) and count <= self.free
        wait = Wait(self.lender.take(count, priority), count, priority)
        ids = wait.step(lambda: wait.work.send(None))
        assert (ids is not None) == at_once
        if ids is None:
            self.waits.append(wait)
        else:
            self.take_in(ids, count)

    @event()
    def take_now(self, choose: Choices) -> None:
        count, priority = choose.between(1, BLOCKS), choose.between(-1, 1)
        if self.goes_first(priority) and count <= self.free:
            self.take_in(self.lender.take_now(count, priority), count)
        else:
            with pytest.raises(BusyError, match=f"cannot lend {count} blocks now: {self.free} are free"):
                self.lender.take_now(count, priority)

    @event(lambda self: any(wait.due for wait in self.waits))
    def resume(self, choose: Choices) -> None:
        wait = choose.one_of([wait for wait in self.waits if wait.due])
        self.waits.remove(wait)
        self.take_in(wait.resume(), wait.count)

    @event(lambda self: self.waits)
    def cancel(self, choose: Choices) -> None:
        """Also a task whose blocks are there, but that has not gone on yet."""
        wait = choose.one_of(self.waits)
        self.waits.remove(wait)
        with pytest.raises(asyncio.CancelledError):
            wait.step(lambda: wait.work.throw(asyncio.CancelledError()))

    @event(lambda self: self.taken)
    def give(self, choose: Choices) -> None:
        ids = choose.one_of(self.taken)
        self.taken.remove(ids)
        self.lender.give(ids)

    # ---- loans ----

    @event(lambda self: self.taken)
    def loan(self, choose: Choices) -> None:
        ids = choose.one_of(self.taken)
        self.taken.remove(ids)
        loan = self.lender.loan(ids, 0, 4)
        assert (loan.ids, loan.group, loan.start, loan.closed) == (ids, 0, 4, False)
        self.loans.append(loan)

    @event(lambda self: self.lent)
    def share(self, choose: Choices) -> None:
        loan = choose.one_of(self.lent)
        ids = loan.ids[choose.between(0, len(loan.ids) - 1) :]
        if set(ids) & self.blocks_written:
            with pytest.raises(BusyError, match="being written by a stream; they can be shared when"):
                self.lender.share(ids, 0, 0)
        else:
            self.loans.append(self.lender.share(ids, 0, 0))

    @event(lambda self: self.lent)
    def trim(self, choose: Choices) -> None:
        loan = choose.one_of(self.lent)
        self.replace(loan, loan.ids[: choose.between(1, len(loan.ids))])

    @event(lambda self: self.lent and self.taken)
    def extend(self, choose: Choices) -> None:
        loan, ids = choose.one_of(self.lent), choose.one_of(self.taken)
        self.taken.remove(ids)
        self.replace(loan, loan.ids + ids)

    def replace(self, loan: Loan, ids: tuple[int, ...]) -> None:
        other = self.lender.instead(loan, ids)
        assert (other.ids, other.group, other.start) == (ids, loan.group, loan.start)
        assert loan.closed
        self.loans.append(other)
        self.forget_closed()

    @event(lambda self: self.loans)
    def hold(self, choose: Choices) -> None:
        loan = choose.one_of(self.loans)
        if loan.closed:
            with pytest.raises(ClosedError, match="given back"):
                loan.hold()
        else:
            loan.hold()
            self.read.append(loan)

    @event(lambda self: self.read)
    def unhold(self, choose: Choices) -> None:
        loan = choose.one_of(self.read)
        self.read.remove(loan)
        loan.unhold()
        self.forget_closed()

    @event(lambda self: self.loans)
    def close(self, choose: Choices) -> None:
        loan = choose.one_of(self.loans)
        loan.close()
        self.forget_closed()

    def forget_closed(self) -> None:
        held = self.read + self.written
        self.loans = [loan for loan in self.loans if not loan.closed or loan in held]

    # ---- streams ----

    @event(lambda self: self.lent)
    def begin_writing(self, choose: Choices) -> None:
        """As a stream does, which holds the blocks until no peer can write them."""
        loan = choose.one_of(self.lent)
        if set(loan.ids) & self.blocks_written:
            with pytest.raises(BusyError, match="being written by a stream; they can be granted again when"):
                self.lender.begin_writing(loan.ids)
        elif any(self.open[block] > 1 for block in loan.ids):
            with pytest.raises(BusyError, match="shared with other Blocks"):
                self.lender.begin_writing(loan.ids)
        else:
            self.lender.begin_writing(loan.ids)
            self.written.append(loan)
            loan.hold()

    @event(lambda self: self.written)
    def end_writing(self, choose: Choices) -> None:
        loan = choose.one_of(self.written)
        self.written.remove(loan)
        self.lender.end_writing(loan.ids)
        loan.unhold()
        self.forget_closed()

    # ---- what always holds ----

    def check(self) -> None:
        self.the_statistics_are_those_of_the_references()
        self.no_request_waits_in_vain()

    def the_statistics_are_those_of_the_references(self) -> None:
        free, reserved, quarantined, waiting = self.lender.statistics()
        assert free + reserved + quarantined == BLOCKS
        assert (free, quarantined) == (self.free, len(self.held - set(self.open)))
        assert waiting == sum(not wait.due for wait in self.waits)

    def no_request_waits_in_vain(self) -> None:
        waiting = [wait for wait in self.waits if not wait.due]
        if waiting:
            assert max(waiting, key=lambda wait: wait.priority).count > self.free

    def end(self) -> None:
        """Close the pool: the waits end, everything comes back, and what ends later changes nothing."""
        cast(Any, self.lender)._context.closed = True
        self.lender.refuse()
        for wait in self.waits:
            with pytest.raises(ClosedError):
                wait.resume()
        for ids in self.taken:
            self.lender.give(ids)
        self.lender.take_back()
        assert self.lender.statistics() == (BLOCKS, 0, 0, 0)
        for loan in self.read + self.written:
            loan.unhold()
        for loan in self.loans:
            loan.close()
        assert self.lender.statistics() == (BLOCKS, 0, 0, 0)


test_lending = programs(Lending, 200, steps=40)


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (1, "block 0 is being written by a stream; they can be shared"),
        (2, "blocks 0, 1 are being written by a stream"),
        (7, r"blocks 0, 1, 2, 3, 4, \.\.\. are being written by a stream"),
    ],
)
def test_errors_name_the_first_blocks(count: int, says: str) -> None:
    blocks = lender()
    ids = blocks.take_now(count, 0)
    blocks.begin_writing(ids)
    with pytest.raises(BusyError, match=says):
        blocks.share(ids, 0, 0)
