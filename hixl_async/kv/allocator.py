"""The state of each block of a pool.

Pure: no engine, no loop; a request that has to wait is an object that is granted later.

Blocks are counted references.  An *open* reference belongs to the program; a *held* one was given back by the program while a
peer or a push could still touch the blocks.  A block is free once it has neither.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["Allocator", "Request"]


class Request:
    """A place in the queue; `ids` is empty until it is granted."""

    __slots__ = ("count", "ids", "key")

    def __init__(self, count: int, key: tuple[int, int]) -> None:
        self.count = count
        #: The order of the queue: lower keys go first.
        self.key = key
        self.ids: tuple[int, ...] = ()


class Allocator:
    """The allocator of a pool's blocks: all or nothing; higher priorities first, and within one first come, first served.

    A small request never overtakes a large one of its priority.
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
        # The numbers of references to the blocks that are not free.
        self._open: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._quarantined = 0
        self._queue: list[Request] = []  # sorted by their keys
        self._asked = 0

    @property
    def reserved(self) -> int:
        """The number of blocks that the program has."""
        return len(self._open)

    @property
    def quarantined(self) -> int:
        """The number of blocks that were given back, and that a peer or a push may still touch."""
        return self._quarantined

    @property
    def free(self) -> int:
        """The number of blocks that can be lent."""
        return self.blocks - self.reserved - self.quarantined

    @property
    def waiting(self) -> int:
        """The number of requests that are not granted yet."""
        return len(self._queue)

    def request(self, count: int, priority: int = 0) -> Request:
        """Ask for `count` blocks: granted at once if there are enough and no request goes first, else queued."""
        self._asked += 1
        request = Request(count, (-priority, self._asked))
        place = len(self._queue)
        while place and self._queue[place - 1].key > request.key:
            place -= 1
        self._queue.insert(place, request)
        self._grant()
        return request

    def request_now(self, count: int, priority: int = 0) -> Request | None:
        """Ask for `count` blocks like `request`, but return None where it would have to wait."""
        if (self._queue and self._queue[0].key[0] <= -priority) or count > self.free:
            return None
        return self.request(count, priority)

    def withdraw(self, request: Request) -> list[Request]:
        """Give up a request, granted or not, and return the requests that this grants, oldest first."""
        if request.ids:
            ids, request.ids = request.ids, ()
            return self.release(ids)
        if request in self._queue:
            self._queue.remove(request)
        return self._grant()

    def shared(self, ids: Sequence[int]) -> list[int]:
        """Return those of the blocks that have more than one open reference."""
        return [block for block in ids if self._open[block] > 1]

    def share(self, ids: Sequence[int]) -> None:
        """Add an open reference to blocks that have one."""
        for block in ids:
            if block not in self._open:
                raise AssertionError(f"block {block} is not reserved, and cannot be shared")
            self._open[block] += 1

    def quarantine(self, ids: Sequence[int]) -> None:
        """Turn open references into held ones, because a peer or a push may still touch the blocks."""
        held = self._held
        for block in ids:
            last = self._drop(self._open, block)
            held[block] = held.get(block, 0) + 1
            if last:
                self._quarantined += 1

    def release(self, ids: Sequence[int]) -> list[Request]:
        """Drop open references, and return the requests that this grants, oldest first."""
        for block in ids:
            if self._drop(self._open, block):
                if block in self._held:
                    self._quarantined += 1
                else:
                    self._free(block)
        return self._grant()

    def release_held(self, ids: Sequence[int]) -> list[Request]:
        """Drop held references, and return the requests that this grants, oldest first."""
        for block in ids:
            if self._drop(self._held, block) and block not in self._open:
                self._quarantined -= 1
                self._free(block)
        return self._grant()

    def _grant(self) -> list[Request]:
        granted = []
        while self._queue and self._queue[0].count <= self.free:
            request = self._queue.pop(0)
            request.ids = tuple(self._order[self._take()] for _ in range(request.count))
            for block in request.ids:
                # A block that is lent twice would silently corrupt the cache of another request.
                if block in self._open or block in self._held:
                    raise AssertionError(f"block {block} is not free, and cannot be lent")
                self._open[block] = 1
            granted.append(request)
        return granted

    def _take(self) -> int:
        """Return the lowest free rank."""
        if self._returned:
            return heapq.heappop(self._returned)
        self._fresh += 1
        return self._fresh - 1

    def _free(self, block: int) -> None:
        heapq.heappush(self._returned, self._rank[block])

    @staticmethod
    def _drop(references: dict[int, int], block: int) -> bool:
        """Drop one reference, and return True if it was the last of its kind."""
        # A reference that is dropped twice would free a block that another request has.
        count = references.get(block)
        if count is None:
            raise AssertionError(f"block {block} was given back twice")
        if count > 1:
            references[block] = count - 1
            return False
        del references[block]
        return True
