"""The work that the two processes of a competitor are asked to do, and the parts that the adapters in `peers` share."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple, Protocol

from rig.table import nbytes

__all__ = ["ASK", "BLOCK_STRIDE", "Initiator", "Kind", "Work", "idle", "new_loop", "page_memory", "serve_line"]

Kind = Literal["write", "list", "rows", "flight", "notify", "deliver", "idle"]

#: The kinds of work, in words.
ASK: dict[Kind, str] = {
    "write": "one range after another, each until its bytes are in the other process's memory, and this process knows it",
    "list": "blocks that do not touch, in one call that was prepared before",
    "rows": "the same, from an array of offsets, with nothing prepared",
    "flight": "several operations in flight; the time of one",
    "notify": "a write and its notification, one way: half of a round trip",
    "deliver": "a write, its notification, and the answer of the other side's program: a round trip",
    "idle": "nothing",
}

#: The distance between blocks of a list, in blocks, so that no two can be merged.
BLOCK_STRIDE = 2


class Work(NamedTuple):
    """One kind of operation."""

    kind: Kind
    #: Bytes of one operation, or of each of its blocks.
    size: int = 0
    #: Blocks of a list, operations in flight, or idle milliseconds.
    parts: int = 1

    @property
    def span(self) -> int:
        """The bytes of memory from its first to its last block."""
        return self.size * (1 if self.parts == 1 else self.parts * BLOCK_STRIDE)

    def describe(self) -> str:
        """Return it in words."""
        several = {
            "list": f"{self.parts} blocks, prepared",
            "rows": f"{self.parts} blocks, array in",
            "flight": f"{self.parts} in flight",
            "idle": f"{self.parts / 1000:g} s",
        }
        return ", ".join(filter(None, (self.kind, nbytes(self.size) if self.size else "", several.get(self.kind))))


class Initiator(Protocol):
    """The side that starts transfers, in a process of its own; made with the line to the target's process."""

    def run(self, work: Work, times: int) -> int | None:
        """Do `work` so many times; nanoseconds, or None if there is no way to do it."""


async def idle(work: Work) -> int:
    """Do nothing for as long as `work` says; the nanoseconds that it took."""
    start = perf_counter_ns()
    await asyncio.sleep(work.parts / 1000)
    return perf_counter_ns() - start


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    """Return a new event loop, ``"asyncio"`` or ``"uvloop"``, which is the current one from now on."""
    loop: asyncio.AbstractEventLoop
    if kind == "uvloop":
        import uvloop

        loop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def page_memory(size: int, fill: int) -> memoryview:
    """Return memory with pages of its own, all of them touched."""
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = bytes([fill]) * size
    return memory


async def serve_line(line: Connection, handle: Callable[[Any], Awaitable[Any]]) -> None:
    """Answer each message on `line` with what `handle` returns for it, on the running loop, until the other end is closed."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(line.fileno(), ready.set)
    try:
        while True:
            await ready.wait()
            ready.clear()
            while line.poll():
                line.send(await handle(line.recv()))
    except EOFError:
        pass
    finally:
        loop.remove_reader(line.fileno())
