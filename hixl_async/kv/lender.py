"""The lending of a pool's blocks: reservations that wait, shared references, and what was given back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import BusyError, ClosedError
from .allocator import Allocator, Request
from .context import PoolContext
from .loan import Loan

__all__ = ["Lender", "PoolStatistics"]


class PoolStatistics(NamedTuple):
    """The state of a pool's blocks; the first three sum up to its size."""

    #: Blocks that can be lent.
    free: int
    #: Blocks that are lent.
    reserved: int
    #: Blocks given back that a peer could still write, or a push still reads.
    quarantined: int
    #: Reservations that wait for blocks.
    waiting: int


class Lender:
    """The owner of a pool's allocator, which lends blocks as loans and takes them back.

    :param context: the context of the pool.
    :param order: a permutation of the block ids, in which they are lent; default: ascending.
    """

    def __init__(self, context: PoolContext, order: Sequence[int] | None = None) -> None:
        self._context = context
        self._allocator = Allocator(context.blocks, order)
        self._waiting: dict[Request, asyncio.Future[None]] = {}
        self._lent: set[Loan] = set()  # until the last hold of each ends
        self._written: set[int] = set()  # blocks that a peer may be writing

    def statistics(self) -> PoolStatistics:
        """Return the numbers of blocks in each state, and of waiting requests."""
        blocks = self._allocator
        return PoolStatistics(blocks.free, blocks.reserved, blocks.quarantined, blocks.waiting)

    # ---- reservations ----

    def take_now(self, count: int, priority: int) -> tuple[int, ...]:
        """Take so many blocks.

        :raises BusyError: if too few are free, or other requests go first.
        """
        request = self._allocator.request_now(count, priority)
        if request is None:
            free, waiting = self._allocator.free, self._allocator.waiting
            raise BusyError(
                f"pool {self._context.name!r} cannot lend {count} blocks now: {free} are free and {waiting} requests wait"
            )
        return request.ids

    async def take(self, count: int, priority: int) -> tuple[int, ...]:
        """Take so many blocks, when it is their turn; cancelling the wait leaks none.

        :raises ClosedError: if the pool is closed meanwhile.
        """
        request = self._allocator.request(count, priority)
        if not request.ids:
            future = self._waiting[request] = self._context.loop.create_future()
            try:
                await future
                self._context.check_usable()
            except BaseException:
                # It may have been granted at the same moment; then the blocks pass to the next request.
                self._wake(self._allocator.withdraw(request))
                raise
            finally:
                del self._waiting[request]
        return request.ids

    # ---- loans ----

    def loan(self, ids: tuple[int, ...], group: int, start: int) -> Loan:
        """Return the loan of blocks that were taken."""
        loan = Loan(self._context, ids, group, start, self._free, self._quarantine)
        self._lent.add(loan)
        return loan

    def share(self, ids: tuple[int, ...], group: int, start: int) -> Loan:
        """Return another loan of blocks that are lent.

        :raises BusyError: if a peer may be writing one of them.
        """
        self.refuse_if_written(ids, "can be shared")
        self._allocator.share(ids)
        return self.loan(ids, group, start)

    def instead(self, loan: Loan, ids: tuple[int, ...]) -> Loan:
        """Return a loan in place of another, of fewer of its first blocks, or with more that were taken behind them."""
        self._allocator.share(ids[: len(loan.ids)])
        other = self.loan(ids, loan.group, loan.start)
        loan.close()
        return other

    def give(self, ids: tuple[int, ...]) -> None:
        """Give back blocks that were taken."""
        self._wake(self._allocator.release(ids))

    def _quarantine(self, loan: Loan) -> None:
        if loan in self._lent:
            self._allocator.quarantine(loan.ids)

    def _free(self, loan: Loan) -> None:
        if loan in self._lent:  # else the pool was closed before
            self._lent.discard(loan)
            release = self._allocator.release_held if loan.quarantined else self._allocator.release
            self._wake(release(loan.ids))

    def _wake(self, granted: list[Request]) -> None:
        for request in granted:
            future = self._waiting.get(request)
            if future is not None and not future.done():
                future.set_result(None)

    # ---- blocks that peers write ----

    def begin_writing(self, ids: Sequence[int]) -> None:
        """Record that a peer may write these blocks from now on.

        :raises BusyError: if a peer may be writing one of them already, or one is shared.
        """
        self.refuse_if_written(ids, "can be granted again")
        if shared := self._allocator.shared(ids):
            raise BusyError(
                f"{_listed(shared)} shared with other Blocks, whose tokens a stream would overwrite; reserve other blocks"
            )
        self._written.update(ids)

    def end_writing(self, ids: Iterable[int]) -> None:
        """Record that no peer can write these blocks any more."""
        self._written.difference_update(ids)

    def refuse_if_written(self, ids: Sequence[int], what: str) -> None:
        """Return if nothing may be writing these blocks.

        :param what: what they can be afterwards, for the error.
        :raises BusyError: if a stream may be writing one of them.
        """
        if self._written and (written := [block for block in ids if block in self._written]):
            raise BusyError(
                f"{_listed(written)} being written by a stream; they {what} when `await stream.drained()` returns"
            )

    # ---- the end ----

    def refuse(self) -> None:
        """End the waits for blocks, because the pool closes."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ClosedError(f"pool {self._context.name!r} was closed"))

    def take_back(self) -> None:
        """Take all blocks back, because the pool is closed."""
        for loan in list(self._lent):
            self._free(loan)


def _listed(ids: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ids[:5])) + (", ..." if len(ids) > 5 else "")
    return f"block {numbers} is" if len(ids) == 1 else f"blocks {numbers} are"
