"""Words that keep their values as long as blocks stay as they are, for those who read the blocks."""

from __future__ import annotations

import heapq
import secrets
from typing import TYPE_CHECKING

from ...errors import BusyError
from ..protocol import WORD

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...engine.region import Region

__all__ = ["Pins", "pins_name"]

#: The most pulls from one manager at a time.
PINS = 4096


def pins_name(manager: str) -> str:
    """Return the name of the region with a manager's words."""
    return f"{manager}.pins"


class Pins:
    """The words of the pulls that a manager serves.

    A peer reads its word after the data.  If the word has moved on, the blocks may have been written before they were read,
    even if the peer was stopped for an hour in between.

    :param engine: the engine that holds the words.
    :param manager: the name of the manager.
    """

    def __init__(self, engine: Engine, manager: str) -> None:
        self.region: Region = engine.allocate(pins_name(manager), PINS * WORD, access="read")
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
            raise BusyError(f"{PINS} pulls are being served already")
        return index, self._words[index]

    def move_on(self, index: int) -> None:
        """Let the word say that its blocks may change from now on, and free it."""
        self._words[index] += 1
        heapq.heappush(self._free, index)

    def close(self) -> None:
        """Let go of the memory, and withdraw the region."""
        self._words.release()
        self.region.revoke()
