"""The lending of blocks as loans, against a simple model; the test is the loop, and resumes each wait when it likes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hixl_async.errors import BusyError, ClosedError
from hixl_async.kv.context import PoolContext
from hixl_async.kv.lender import Lender
from hixl_async.kv.loan import Loan

BLOCKS = 8
COUNTS = st.integers(1, BLOCKS)
PRIORITIES = st.integers(-1, 1)


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


class Lending(RuleBasedStateMachine):
    """Random waits, cancellations, loans, shares, holds and streams, against bags of references."""

    @initialize(order=st.none() | st.permutations(range(BLOCKS)))
    def begin(self, order: list[int] | None) -> None:
        self.lender = lender(order)
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

    @rule(count=COUNTS, priority=PRIORITIES)
    def take(self, count: int, priority: int) -> None:
        at_once = self.goes_first(priority) and count <= self.free
        wait = Wait(self.lender.take(count, priority), count, priority)
        ids = wait.step(lambda: wait.work.send(None))
        assert (ids is not None) == at_once
        if ids is None:
            self.waits.append(wait)
        else:
            self.take_in(ids, count)

    @rule(count=COUNTS, priority=PRIORITIES)
    def take_now(self, count: int, priority: int) -> None:
        if self.goes_first(priority) and count <= self.free:
            self.take_in(self.lender.take_now(count, priority), count)
        else:
            with pytest.raises(BusyError, match=f"cannot lend {count} blocks now: {self.free} are free"):
                self.lender.take_now(count, priority)

    @precondition(lambda self: any(wait.due for wait in self.waits))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        wait = data.draw(st.sampled_from([wait for wait in self.waits if wait.due]))
        self.waits.remove(wait)
        self.take_in(wait.resume(), wait.count)

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Also a task whose blocks are there, but that has not gone on yet."""
        wait = data.draw(st.sampled_from(self.waits))
        self.waits.remove(wait)
        with pytest.raises(asyncio.CancelledError):
            wait.step(lambda: wait.work.throw(asyncio.CancelledError()))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        ids = data.draw(st.sampled_from(self.taken))
        self.taken.remove(ids)
        self.lender.give(ids)

    # ---- loans ----

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def loan(self, data: st.DataObject) -> None:
        ids = data.draw(st.sampled_from(self.taken))
        self.taken.remove(ids)
        loan = self.lender.loan(ids, 0, 4)
        assert (loan.ids, loan.group, loan.start, loan.closed) == (ids, 0, 4, False)
        self.loans.append(loan)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        loan = data.draw(st.sampled_from(self.lent))
        ids = loan.ids[data.draw(st.integers(0, len(loan.ids) - 1)) :]
        if set(ids) & self.blocks_written:
            with pytest.raises(BusyError, match="being written by a stream; they can be shared when"):
                self.lender.share(ids, 0, 0)
        else:
            self.loans.append(self.lender.share(ids, 0, 0))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        loan = data.draw(st.sampled_from(self.lent))
        self.replace(loan, loan.ids[: data.draw(st.integers(1, len(loan.ids)))])

    @precondition(lambda self: self.lent and self.taken)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        loan, ids = data.draw(st.sampled_from(self.lent)), data.draw(st.sampled_from(self.taken))
        self.taken.remove(ids)
        self.replace(loan, loan.ids + ids)

    def replace(self, loan: Loan, ids: tuple[int, ...]) -> None:
        other = self.lender.instead(loan, ids)
        assert (other.ids, other.group, other.start) == (ids, loan.group, loan.start)
        assert loan.closed
        self.loans.append(other)
        self.forget_closed()

    @precondition(lambda self: self.loans)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        loan = data.draw(st.sampled_from(self.loans))
        if loan.closed:
            with pytest.raises(ClosedError, match="given back"):
                loan.hold()
        else:
            loan.hold()
            self.read.append(loan)

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        loan = data.draw(st.sampled_from(self.read))
        self.read.remove(loan)
        loan.unhold()
        self.forget_closed()

    @precondition(lambda self: self.loans)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        loan = data.draw(st.sampled_from(self.loans))
        loan.close()
        self.forget_closed()

    def forget_closed(self) -> None:
        held = self.read + self.written
        self.loans = [loan for loan in self.loans if not loan.closed or loan in held]

    # ---- streams ----

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def begin_writing(self, data: st.DataObject) -> None:
        """As a stream does, which holds the blocks until no peer can write them."""
        loan = data.draw(st.sampled_from(self.lent))
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

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def end_writing(self, data: st.DataObject) -> None:
        loan = data.draw(st.sampled_from(self.written))
        self.written.remove(loan)
        self.lender.end_writing(loan.ids)
        loan.unhold()
        self.forget_closed()

    # ---- what always holds ----

    @invariant()
    def the_statistics_are_those_of_the_references(self) -> None:
        free, reserved, quarantined, waiting = self.lender.statistics()
        assert free + reserved + quarantined == BLOCKS
        assert (free, quarantined) == (self.free, len(self.held - set(self.open)))
        assert waiting == sum(not wait.due for wait in self.waits)

    @invariant()
    def no_request_waits_in_vain(self) -> None:
        waiting = [wait for wait in self.waits if not wait.due]
        if waiting:
            assert max(waiting, key=lambda wait: wait.priority).count > self.free

    def teardown(self) -> None:
        """Close the pool: the waits end, everything comes back, and what ends later changes nothing."""
        if not hasattr(self, "lender"):
            return
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


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


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
