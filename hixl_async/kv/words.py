"""The words that senders store after their data: a row for each sender of a pool's streams, a word for each layer."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeAlias

from ..core.signal_words import SignalWords
from ..errors import BusyError

__all__ = ["GENERATION_BITS", "LAYER_TOKENS", "WORD", "Landing", "WordTable", "pack_word", "parse_word"]

#: Bytes of a word.
WORD = 8
#: A word has, from its highest bits, the generation of its stream, the tokens that have landed, and whether these are all.
GENERATION_BITS, TOKEN_BITS = 40, 23
#: Streams have at most so many tokens of a layer.
LAYER_TOKENS = (1 << TOKEN_BITS) - 1


#: A word that has changed: the index of the layer among those of the pool, the generation, the number of tokens that have
#: landed, and True if these are all.
Landing: TypeAlias = tuple[int, int, int, bool]


def pack_word(generation: int, tokens: int, complete: bool) -> int:
    """Return the word of a layer of which so many tokens have landed.

    :param generation: the generation of the stream's ticket.
    :param tokens: the number of tokens, from the first of the layer's slice.
    :param complete: True if no more will follow.
    """
    return generation << TOKEN_BITS + 1 | tokens << 1 | complete


def parse_word(word: int) -> tuple[int, int, bool]:
    """Return the generation, the tokens and the completeness that a word says; the reverse of `pack_word`."""
    return word >> TOKEN_BITS + 1, word >> 1 & LAYER_TOKENS, bool(word & 1)


class WordTable:
    """The rows of words in one region.

    :param memory: the memory of the region.
    :param layers: the number of words in a row.
    """

    def __init__(self, memory: memoryview, layers: int) -> None:
        self._words = SignalWords(memory)
        self._layers = layers
        self._free: list[int] = []  # a heap of the free rows below
        self._fresh = 0  # this row and those above it were never taken
        self._used: set[int] = set()
        self._stop = 0  # no word from here on can change

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self._words.count // self._layers

    def take(self, count: int) -> tuple[int, ...]:
        """Take so many rows.

        :raises BusyError: if too few are free.
        """
        if count > self.rows - len(self._used):
            raise BusyError(
                f"{len(self._used)} of the pool's {self.rows} rows of words are in use, one for each sender of a stream that "
                "is not drained; wait until some are"
            )
        rows = tuple(self._take() for _ in range(count))
        self._used.update(rows)
        self._stop = max(self._stop, (max(rows) + 1) * self._layers)
        return rows

    def _take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._fresh += 1
        return self._fresh - 1

    def give(self, rows: Sequence[int]) -> None:
        """Give rows back, which no peer can write any more."""
        self._used.difference_update(rows)
        for row in rows:
            heapq.heappush(self._free, row)
        if self._stop == (max(rows) + 1) * self._layers:
            self._stop = (max(self._used, default=-1) + 1) * self._layers

    def landings(self) -> dict[int, list[Landing]]:
        """Return the words that have changed since the last call, by row."""
        rows: dict[int, list[Landing]] = {}
        for index, word in self._words.changes(self._stop):
            row, place = divmod(index, self._layers)
            rows.setdefault(row, []).append((place, *parse_word(word)))
        return rows

    def close(self) -> None:
        """Let go of the memory."""
        self._words.close()
