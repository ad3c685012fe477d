"""The words that peers store: what has changed since the last look, and nothing else."""

from __future__ import annotations

import mmap
import pickle
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hixl_async import InvalidArgumentError
from hixl_async.core.signal_words import SignalWords

WORDS = 6
TOP = (1 << 64) - 1


def memory() -> mmap.mmap:
    """Return the memory of some words, aligned as that of regions."""
    return mmap.mmap(-1, 8 * WORDS)


def store(where: mmap.mmap, index: int, value: int) -> None:
    struct.pack_into("=Q", where, 8 * index, value)


def test_each_change_is_reported_once() -> None:
    where = memory()
    words = SignalWords(where)
    assert words.count == WORDS
    assert words.changes(WORDS) == []
    store(where, 4, TOP)
    store(where, 1, 7)
    assert words.changes(WORDS) == [(1, 7), (4, TOP)]
    assert words.changes(WORDS) == []
    store(where, 1, 8)
    store(where, 1, 9)
    assert words.changes(WORDS) == [(1, 9)]
    store(where, 1, 0)
    assert words.changes(WORDS) == [(1, 0)]
    words.close()
    where.close()


def test_what_was_there_before_is_a_change() -> None:
    where = memory()
    store(where, 2, 5)
    words = SignalWords(where)
    assert words.changes(WORDS) == [(2, 5)]
    words.close()


@given(
    steps=st.lists(
        st.tuples(st.integers(0, WORDS - 1), st.sampled_from([0, 1, TOP]) | st.integers(0, TOP))
        | st.integers(0, WORDS + 3)
    )
)
def test_words_from_the_stop_on_are_seen_by_a_later_look(steps: list[tuple[int, int] | int]) -> None:
    where = memory()
    words = SignalWords(where)
    now, seen = [0] * WORDS, [0] * WORDS
    for step in [*steps, TOP]:
        if isinstance(step, tuple):
            index, value = step
            now[index] = value
            store(where, index, value)
        else:
            found = words.changes(step)
            assert found == [(n, now[n]) for n in range(min(step, WORDS)) if now[n] != seen[n]]
            for index, value in found:
                seen[index] = value
    assert seen == now
    words.close()


@pytest.mark.parametrize("stop", [-1, 1 << 64, None, "1"])
def test_a_malformed_stop(stop: Any) -> None:
    words = SignalWords(memory())
    with pytest.raises((OverflowError, TypeError)):
        words.changes(stop)
    words.close()


@pytest.mark.parametrize(("first", "last"), [(0, 7), (0, 12), (1, 17), (4, 20), (7, 15)])
def test_memory_that_does_not_consist_of_words(first: int, last: int) -> None:
    where = memory()
    with pytest.raises(InvalidArgumentError, match="8 bytes each, aligned to 8"):
        SignalWords(memoryview(where)[first:last])
    where.close()  # which raises while a buffer of it is in use


@pytest.mark.parametrize("wrong", [None, 7, "text", memoryview(bytes(64))[::2]])
def test_what_is_not_memory(wrong: Any) -> None:
    with pytest.raises((TypeError, BufferError)):
        SignalWords(wrong)


def test_words_that_cannot_be_written_here_are_read() -> None:
    where = memory()
    store(where, 3, 9)
    words = SignalWords(memoryview(where)[16:].toreadonly())
    assert words.count == WORDS - 2
    assert words.changes(WORDS) == [(1, 9)]
    words.close()


def test_closing_lets_go_of_the_memory() -> None:
    where = memory()
    words = SignalWords(where)
    store(where, 0, 1)
    with pytest.raises(BufferError):
        where.close()
    words.close()
    words.close()
    assert words.count == 0
    assert words.changes(WORDS) == []
    where.close()
    assert words.changes(WORDS) == []


def test_so_does_dropping_them() -> None:
    where = memory()
    words = SignalWords(where)
    del words
    where.close()


def test_no_words_at_all() -> None:
    words = SignalWords(memoryview(memory())[:0])
    assert words.count == 0
    assert words.changes(1) == []
    words.close()


def test_they_stay_in_their_process() -> None:
    words = SignalWords(memory())
    with pytest.raises(TypeError, match="look at the words in the process that owns them"):
        pickle.dumps(words)
    words.close()
