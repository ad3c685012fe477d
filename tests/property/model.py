"""The expected behaviour of engines, in plain bytes.

Memory is divided into cells.  While a transfer may touch a cell its contents are unknown, and no other transfer uses it.
After a success it holds what was sent; after a failure or a cancellation its contents are unknown until the next success.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hixl_async import Region, RemoteRegion, Transfer

CELLS, CELL = 6, 96


@dataclass(eq=False)
class Memory:
    """A region and its expected contents; None: unknown."""

    region: Region
    cells: list[bytes | None]
    busy: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, region: Region, seed: int) -> Memory:
        made = cls(region, [pattern(seed + cell) for cell in range(CELLS)])
        memoryview(region)[:] = b"".join(pattern(seed + cell) for cell in range(CELLS))
        return made

    def free(self) -> list[int]:
        return [cell for cell in range(CELLS) if not self.busy[cell]]

    def forget(self, cells: list[int]) -> None:
        """Mark cells as unknown, because a transfer of them failed."""
        for cell in cells:
            self.cells[cell] = None

    def check(self) -> None:
        """Compare the known contents with the actual ones."""
        view = memoryview(self.region)
        for cell in self.free():
            if self.cells[cell] is not None:
                found = bytes(view[cell * CELL : (cell + 1) * CELL])
                assert found == self.cells[cell], f"cell {cell} of {self.region!r}"


@dataclass(eq=False)
class Operation:
    """A transfer, the cells that it may touch, and its outcome."""

    transfer: Transfer
    verb: str
    #: (local, its cell, target, its cell), one for each descriptor.
    moves: list[tuple[Memory, int, Memory, int]]
    #: The contents of the source cells.
    data: list[bytes | None]
    #: The number that its notification carries.
    note: int | None
    resolved: bool = False

    def begin(self) -> None:
        for local, here, target, there in self.moves:
            local.busy[here] += 1
            target.busy[there] += 1

    def resolve(self) -> None:
        """Update the cells, because the outcome is known."""
        self.resolved = True
        succeeded = not self.transfer.cancelled() and self.transfer.exception() is None
        if succeeded:
            assert self.transfer.result() == len(self.moves) * CELL
        for (local, here, target, there), data in zip(self.moves, self.data, strict=True):
            if self.verb == "write":
                target.cells[there] = data if succeeded else None
            else:
                local.cells[here] = data if succeeded else None

    def end(self) -> None:
        """Free the cells, because it touches no memory any more."""
        for local, here, target, there in self.moves:
            local.busy[here] -= 1
            target.busy[there] -= 1


@dataclass(eq=False)
class Import:
    """A region as another engine sees it."""

    user: int
    owner: int
    memory: Memory
    remote: RemoteRegion


def pattern(number: int) -> bytes:
    """Return a cell's worth of bytes that no other number gives."""
    return (number.to_bytes(8, "big") * (CELL // 8 + 1))[:CELL]
