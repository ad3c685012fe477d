"""Words that keep their values as long as blocks stay as they are, for those who read the blocks."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import BusyError
from ..types import AccessLike
from .words import WORD

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.peer import Peer
    from ..engine.region import Region

__all__ = ["Pins", "pins_name"]

#: The most readers at a time.
PINS = 4096


def pins_name(owner: str) -> str:
    """Return the name of the region with the words of a pool or a manager."""
    return f"{owner}.pins"


class Pins:
    """The words of those who read blocks of one pool or manager.

    A peer reads its word after the data.  If the word has moved on, the blocks may have been written before they were read,
    even if the peer was stopped for an hour in between.

    :param engine: the engine that holds the words.
    :param owner: the name of the pool or the manager.
    :param grant: the access of single peers, as for ``engine.allocate``; default: all may read the words.
    """

    def __init__(self, engine: Engine, owner: str, grant: Callable[[Peer], AccessLike] | None = None) -> None:
        self.region: Region = engine.allocate(pins_name(owner), PINS * WORD, access="read", grant=grant)
        self._words = memoryview(self.region).cast("Q")
        self._free: list[int] = []
        self._fresh = 0
        self._first = 1 + secrets.randbits(62)

    def take(self) -> tuple[int, int]:
        """Return the index of a word and its value.

        :raises BusyError: if all are in use.
        """
        if self._free:
            index = heapq.heappop(self._free)
        elif self._fresh < PINS:
            index, self._fresh = self._fresh, self._fresh + 1
            self._words[index] = self._first
        else:
            raise BusyError(f"{PINS} peers read blocks here already")
        return index, self._words[index]

    def move_on(self, index: int) -> None:
        """Let the word say that its blocks may change from now on, and free it."""
        self._words[index] += 1
        heapq.heappush(self._free, index)

    def close(self) -> None:
        """Let go of the memory, and withdraw the region."""
        self._words.release()
        self.region.revoke()
