"""The rows of words that senders store, against a simple model."""

from __future__ import annotations

import mmap
import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hixl_async.errors import BusyError
from hixl_async.kv.words import LAYER_TOKENS, WORD, Landing, WordTable, pack_word

ROWS = 8
WORDS = st.tuples(st.integers(0, 3), st.integers(0, LAYER_TOKENS), st.booleans())
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


class Words(RuleBasedStateMachine):
    """Rows are taken and given back, while peers store into any of them, also into those that are not theirs any more."""

    @initialize(layers=st.integers(1, 3))
    def begin(self, layers: int) -> None:
        self.region = Region(ROWS, layers)
        self.used: list[tuple[int, ...]] = []
        self.stored: dict[tuple[int, int], Said] = {}
        self.seen: dict[tuple[int, int], Said] = {}
        assert self.region.table.rows == ROWS

    @property
    def free(self) -> list[int]:
        return sorted(set(range(ROWS)) - {row for rows in self.used for row in rows})

    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        free = self.free
        if count > len(free):
            with pytest.raises(BusyError, match=f"{ROWS - len(free)} of the pool's {ROWS} rows of words are in use"):
                self.region.table.take(count)
        else:
            rows = self.region.table.take(count)
            assert rows == tuple(free[:count]), "the lowest rows keep looking at them short"
            self.used.append(rows)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        rows = data.draw(st.sampled_from(self.used))
        self.used.remove(rows)
        self.region.table.give(rows)

    @rule(data=st.data(), row=st.integers(0, ROWS - 1), said=WORDS)
    def store(self, data: st.DataObject, row: int, said: Said) -> None:
        place = data.draw(st.integers(0, self.region.layers - 1))
        self.region.store(row, place, said)
        self.stored[row, place] = said

    @invariant()
    def nothing_behind_the_last_used_row_is_looked_at(self) -> None:
        stop = max((row for rows in self.used for row in rows), default=-1)
        changed: dict[int, list[Landing]] = {}
        for (row, place), said in sorted(self.stored.items()):
            if row <= stop and said != self.seen.get((row, place), (0, 0, False)):
                changed.setdefault(row, []).append((place, *said))
                self.seen[row, place] = said
        assert self.region.table.landings() == changed

    def teardown(self) -> None:
        if hasattr(self, "region"):
            self.region.table.close()
            self.region.memory.close()


TestWords = Words.TestCase
TestWords.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


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
