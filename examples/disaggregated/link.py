"""A link that is slower than this machine's memory.

Between two processes of one host a layer's keys and values move in a fraction of a millisecond, far less than
it takes to compute the layer on a CPU. Between two hosts they would not. A paced link shows what streaming is
then worth: the copies stay real, but each is held back until a wire of the given speed would have delivered it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class PacedLink:
    """A wire that carries one thing after another.

    :param bytes_per_second: its speed.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def carry(self, nbytes: int) -> Callable[[], bool]:
        """Puts something on the wire.

        :return: tells whether it has reached the other end by now. A KV stream takes that as ``ready=``: it
            copies a layer once this answers True.
        """
        start = max(time.monotonic(), self._free_at)
        self._free_at = arrival = start + nbytes / self._bytes_per_second
        return lambda: time.monotonic() >= arrival
