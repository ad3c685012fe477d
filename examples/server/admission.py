"""The door: requests come in as long as the pool can serve them in a reasonable time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.model import blocks_needed
from support.worker import BLOCK_TOKENS

from .errors import full
from .metrics import Metrics

MOST = 120  # requests at once: D handles 256 of its router, and all may be cancelled at the same time


class Admission:
    """Counts the blocks that all requests need if their answers are as long as they may be.

    :param blocks: the most of them.
    """

    def __init__(self, blocks: int, metrics: Metrics) -> None:
        self._blocks = blocks
        self._metrics = metrics
        self._needed = self._requests = 0

    @contextmanager
    def admitted(self, tokens: int) -> Iterator[None]:
        """Let a request of so many tokens in, for a while; an only one is always let in.

        :raises ApiError: if there is no room for it.
        """
        blocks = blocks_needed(tokens, BLOCK_TOKENS)
        if self._requests and (self._requests >= MOST or self._needed + blocks > self._blocks):
            self._metrics.refuse()
            raise full(f"{self._requests} requests need {self._needed} blocks already; try again later")
        self._needed += blocks
        self._requests += 1
        try:
            yield
        finally:
            self._needed -= blocks
            self._requests -= 1
