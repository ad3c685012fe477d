"""References to blocks, as their pool and its streams know them."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ClosedError
from .context import PoolContext

__all__ = ["Loan"]


class Loan:
    """One reference to each of some blocks, from a reservation until no peer and no push needs it any more.

    The user holds it as `Blocks`.  Background work refers to the loan alone, so that the loss of a `Blocks` object is noticed.

    :param context: the context of the pool that lends the blocks.
    :param ids: the block ids, in the order of the tokens.
    :param group: the index of the view that the blocks belong to.
    :param start: the position in the sequence of the first token of the first block.
    :param free: called when the reference ends.
    :param quarantine: called when the user gave the blocks back, but they are still held.
    """

    __slots__ = ("_free", "_holds", "_quarantine", "closed", "context", "group", "ids", "quarantined", "start")

    def __init__(
        self,
        context: PoolContext,
        ids: tuple[int, ...],
        group: int,
        start: int,
        free: Callable[[Loan], None],
        quarantine: Callable[[Loan], None],
    ) -> None:
        self.context = context
        self.ids = ids
        self.group = group
        self.start = start
        #: True once the user gave the blocks back.
        self.closed = False
        #: True if they were still held then.
        self.quarantined = False
        self._free = free
        self._quarantine = quarantine
        self._holds = 0  # incremented by any thread, decremented by the loop: both under the pool's lock

    def check_open(self) -> None:
        """Return if the blocks are lent.

        :raises ClosedError: if they were given back.
        """
        if self.closed:
            raise ClosedError("these blocks were given back; reserve new ones with pool.reserve()")

    def hold(self) -> None:
        """Keep the blocks from being lent again until `unhold`; legal from any thread.

        :raises ClosedError: if they were given back.
        """
        with self.context.lock:
            if self.closed:
                raise ClosedError("these blocks were given back; push them before leaving their `async with`")
            self._holds += 1

    def unhold(self) -> None:
        """Undo one `hold`."""
        with self.context.lock:
            self._holds -= 1
            idle = self.closed and self._holds == 0
        if idle:
            self._free(self)

    def close(self) -> None:
        """Give the blocks back: at once, or after the last `unhold`.  Idempotent."""
        with self.context.lock:
            if self.closed:
                return
            self.closed = True
            self.quarantined = self._holds > 0
        if self.quarantined:
            self._quarantine(self)
        else:
            self._free(self)
