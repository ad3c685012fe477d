"""The state of each block of a pool.

Pure: no engine, no loop; a request that has to wait is an object that is granted later.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from enum import IntEnum

__all__ = ["Allocator", "BlockState", "Request"]


class BlockState(IntEnum):
    """The state of a block."""

    FREE = 0
    RESERVED = 1
    QUARANTINED = 2


class Request:
    """A place in the queue; `ids` is empty until it is granted."""

    __slots__ = ("count", "ids")

    def __init__(self, count: int) -> None:
        self.count = count
        self.ids: tuple[int, ...] = ()


class Allocator:
    """The allocator of a pool's blocks: all or nothing, and strictly first come, first served.

    A small request never overtakes a large one.
    Without an order, the allocator's own memory grows with the blocks that were lent, not with the pool.

    :param blocks: size of the pool in blocks.
    :param order: a permutation of ``range(blocks)``; free blocks are lent in this order.  By default the lowest ids go
        first, which keeps reservations contiguous and their descriptors few.
    """

    def __init__(self, blocks: int, order: Sequence[int] | None = None) -> None:
        self.blocks = blocks
        self._order: Sequence[int] = range(blocks)
        self._rank: Sequence[int] | dict[int, int] = self._order
        if order is not None:
            self._order = tuple(order)
            self._rank = {block: rank for rank, block in enumerate(self._order)}
        self._fresh = 0  # this rank and those above it were never lent
        self._returned: list[int] = []  # a heap of the free ranks below
        self._states: dict[int, BlockState] = {}  # of the blocks that are not free
        self._counts = [blocks, 0, 0]
        self._queue: deque[Request] = deque()

    def count(self, state: BlockState) -> int:
        """Return the number of blocks in `state`."""
        return self._counts[state]

    @property
    def waiting(self) -> int:
        """The number of requests that are not granted yet."""
        return len(self._queue)

    def request(self, count: int) -> Request:
        """Ask for `count` blocks: granted at once if no request waits and there are enough, else queued."""
        request = Request(count)
        self._queue.append(request)
        self._grant()
        return request

    def request_now(self, count: int) -> Request | None:
        """Ask for `count` blocks like `request`, but return None where it would have to wait."""
        if self._queue or count > self._counts[BlockState.FREE]:
            return None
        return self.request(count)

    def withdraw(self, request: Request) -> list[Request]:
        """Give up a request, granted or not, and return the requests that this grants, oldest first."""
        if request.ids:
            ids, request.ids = request.ids, ()
            return self.release(ids)
        if request in self._queue:
            self._queue.remove(request)
        return self._grant()

    def quarantine(self, ids: Sequence[int]) -> None:
        """Quarantine reserved blocks that were given back, because a peer or a push may still touch them."""
        self._move(ids, {BlockState.RESERVED}, BlockState.QUARANTINED)

    def release(self, ids: Sequence[int]) -> list[Request]:
        """Free reserved or quarantined blocks, and return the requests that this grants, oldest first."""
        self._move(ids, {BlockState.RESERVED, BlockState.QUARANTINED}, BlockState.FREE)
        for block in ids:
            heapq.heappush(self._returned, self._rank[block])
        return self._grant()

    def _grant(self) -> list[Request]:
        granted = []
        while self._queue and self._queue[0].count <= self._counts[BlockState.FREE]:
            request = self._queue.popleft()
            request.ids = tuple(self._order[self._take()] for _ in range(request.count))
            self._move(request.ids, {BlockState.FREE}, BlockState.RESERVED)
            granted.append(request)
        return granted

    def _take(self) -> int:
        """Return the lowest free rank."""
        if self._returned:
            return heapq.heappop(self._returned)
        self._fresh += 1
        return self._fresh - 1

    def _move(self, ids: Sequence[int], expected: set[BlockState], state: BlockState) -> None:
        # All changes of a block's state happen here.  A block that is lent or returned twice would silently corrupt the
        # cache of another request.
        states, counts, free = self._states, self._counts, BlockState.FREE
        for block in ids:
            before = states.get(block, free)
            if before not in expected:
                raise AssertionError(f"block {block} is {before.name}, cannot become {state.name}")
            counts[before] -= 1
            counts[state] += 1
            if state is free:
                del states[block]
            else:
                states[block] = state
