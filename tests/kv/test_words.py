"""The rows of words that senders store, against a simple model."""

from __future__ import annotations

import mmap
import struct

import pytest

from hixl_async.errors import BusyError
from hixl_async.kv.words import LAYER_TOKENS, WORD, Landing, WordTable, pack_word
from tests.machine import Choices, Machine, event, programs

ROWS = 8
#: Generation, tokens, complete: what a word says.
Said = tuple[int, int, bool]


class Region:
    """Memory for some rows, into which peers store."""

    def __init__(self, rows: int, layers: int) -> None:
        self.layers = layers
        self.memory = mmap.mmap(-1, rows * layers * WORD)
        self.table = WordTable(memoryview(self.memory), layers)

    def store(self, row: int, place: int, said: Said) -> None:
        struct.pack_into("=Q", self.memory, (row * self.layers + place) * WORD, pack_word(*said))


class Words(Machine):
    """Rows are taken and given back, while peers store into any of them, also into those that are not theirs any more."""

    def begin(self, choose: Choices) -> None:
        self.region = Region(ROWS, layers=choose.between(1, 3))
        self.used: list[tuple[int, ...]] = []
        self.stored: dict[tuple[int, int], Said] = {}
        self.seen: dict[tuple[int, int], Said] = {}
        assert self.region.table.rows == ROWS

    @property
    def free(self) -> list[int]:
        return sorted(set(range(ROWS)) - {row for rows in self.used for row in rows})

    @event()
    def take(self, choose: Choices) -> None:
        free, count = self.free, choose.between(1, 3)
        if count > len(free):
            with pytest.raises(BusyError, match=f"{ROWS - len(free)} of the pool's {ROWS} rows of words are in use"):
                self.region.table.take(count)
        else:
            rows = self.region.table.take(count)
            assert rows == tuple(free[:count]), "the lowest rows keep looking at them short"
            self.used.append(rows)

    @event(lambda self: self.used)
    def give(self, choose: Choices) -> None:
        rows = choose.one_of(self.used)
        self.used.remove(rows)
        self.region.table.give(rows)

    @event()
    def store(self, choose: Choices) -> None:
        row, place = choose.below(ROWS), choose.below(self.region.layers)
        said = choose.between(0, 3), choose.between(0, LAYER_TOKENS), choose.flag()
        self.region.store(row, place, said)
        self.stored[row, place] = said

    def check(self) -> None:
        """Nothing behind the last used row is looked at."""
        stop = max((row for rows in self.used for row in rows), default=-1)
        changed: dict[int, list[Landing]] = {}
        for (row, place), said in sorted(self.stored.items()):
            if row <= stop and said != self.seen.get((row, place), (0, 0, False)):
                changed.setdefault(row, []).append((place, *said))
                self.seen[row, place] = said
        assert self.region.table.landings() == changed

    def end(self) -> None:
        self.region.table.close()
        self.region.memory.close()


test_words = programs(Words, 200, steps=30)


def test_rows_of_an_incomplete_last_one_are_not_lent() -> None:
    memory = mmap.mmap(-1, 7 * WORD)
    table = WordTable(memoryview(memory), 3)
    assert table.rows == 2
    assert table.take(2) == (0, 1)
    with pytest.raises(BusyError, match="wait until some are"):
        table.take(1)
    table.close()


def test_closing_lets_go_of_the_memory() -> None:
    region = Region(2, 2)
    region.table.take(1)
    region.store(0, 1, (3, 2, True))
    region.table.close()
    region.memory.close()
    assert region.table.landings() == {}
