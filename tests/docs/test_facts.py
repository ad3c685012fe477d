"""Facts on pages that would go out of date unnoticed."""

from __future__ import annotations

import asyncio
import random
import re
import struct
from collections.abc import Callable
from typing import Any

import pytest

from hixl_async import Engine, InvalidArgumentError
from hixl_async.cli import commands

from .pages import PAGES, ROOT, blocks

FOLDERS = "hixl_async|tests|docs|examples|benchmarks"


def test_named_files_exist() -> None:
    missing = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", page.read_text())
        if not (ROOT / name).exists()
    }
    assert missing == set()


async def test_options_of_the_shm_driver_are_those_in_the_table() -> None:
    with pytest.raises(InvalidArgumentError, match="no option nonsense; there are") as caught:
        await Engine(drivers={"shm": {"nonsense": 1}}).open()
    known = set(str(caught.value).split("there are ")[1].split(", "))
    assert known == set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/shm.md").read_text(), re.MULTILINE))


@pytest.mark.parametrize("command", ["info", "ping"])
def test_options_of_the_command_are_documented(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main([command, "--help"])
    options = set(re.findall(r"^ +(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    text = (ROOT / "docs/reference/command.md").read_text()
    section = text.split(f"## hixl-async {command}")[1].split("\n## ")[0]
    assert options == set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE))


# -- the recipe of the memory model


@pytest.fixture
def recipe() -> dict[str, Any]:
    """The definitions of docs/concepts/memory-model.md."""
    [block] = [block for block in blocks(ROOT / "docs/concepts/memory-model.md") if "async def read_row" in block.code]
    namespace: dict[str, Any] = {"struct": struct}
    exec(block.code.partition("\n\nrow = ")[0], namespace)
    return namespace


class Range:
    """A range of memory that the fake engine below reads and writes."""

    def __init__(self, memory: bytearray, start: int, stop: int) -> None:
        self.memory, self.start, self.stop = memory, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, key: slice) -> Range:
        start, stop, _ = key.indices(len(self))
        return Range(self.memory, self.start + start, self.start + stop)


class StepwiseEngine:
    """An engine whose writes land byte by byte, in any order, each step of which lets others run."""

    def __init__(self, order: random.Random) -> None:
        self._order = order
        #: Called between two bytes of a read: the work of another process meanwhile.
        self.meanwhile: Callable[[], None] = lambda: None

    async def write(self, data: bytes, where: Range, *, signal: tuple[Range, int] | None = None) -> None:
        for offset in self._order.sample(range(len(data)), len(data)):
            where.memory[where.start + offset] = data[offset]
            await asyncio.sleep(0)
        if signal is not None:  # atomic, and after the data
            word, value = signal
            word.memory[word.start : word.stop] = struct.pack("<Q", value)

    async def read(self, buffer: bytearray, where: Range) -> None:
        for offset in self._order.sample(range(len(where)), len(where)):
            buffer[offset] = where.memory[where.start + offset]
            self.meanwhile()


def one_step(writing: Any) -> None:
    """Run a coroutine up to its next step."""
    try:
        writing.send(None)
    except StopIteration:
        raise IndexError from None


def test_a_row_that_is_read_is_never_torn(recipe: dict[str, Any]) -> None:
    for seed in range(500):
        version, data = read_while_written(recipe, random.Random(seed))
        assert data == bytes([version]) * 8, seed


def read_while_written(recipe: dict[str, Any], order: random.Random) -> tuple[int, bytes]:
    """Read a row by the recipe while four versions of it are published."""
    memory = bytearray(16 + 8)
    engine, slot = StepwiseEngine(order), Range(memory, 0, len(memory))

    async def write_all() -> None:
        for version in range(1, 5):
            await recipe["publish"](engine, slot, version, bytes([version]) * 8)

    writing, running = write_all(), True

    def meanwhile() -> None:
        nonlocal running
        for _ in range(order.choice((0, 0, 1, 3, 20))):
            if running:
                try:
                    one_step(writing)
                except IndexError:
                    running = False

    engine.meanwhile = meanwhile
    reading = recipe["read_row"](engine, slot)
    with pytest.raises(StopIteration) as ended:
        reading.send(None)
    writing.close()
    result: tuple[int, bytes] = ended.value.value
    return result


def test_the_same_reads_without_the_versions_are_torn() -> None:
    """The engine above does tear rows, so that the test above can fail."""
    torn = 0
    for seed in range(100):
        order = random.Random(seed)
        memory, buffer = bytearray(8), bytearray(8)
        engine = StepwiseEngine(order)
        writing = engine.write(b"\1" * 8, Range(memory, 0, 8))
        engine.meanwhile = lambda writing=writing: writing.send(None)  # type: ignore[misc]
        reading = engine.read(buffer, Range(memory, 0, 8))
        with pytest.raises(StopIteration):
            reading.send(None)
        torn += len(set(buffer)) > 1
        writing.close()
    assert torn > 0
