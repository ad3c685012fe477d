# The types of paged.pyx; see link.pyi.

from collections.abc import Iterable
from typing import TypeAlias, final

_Geometry: TypeAlias = tuple[int, int, int, int, int]

@final
class BlockTable:
    def __new__(cls, ids: Iterable[int], start: int = 0) -> BlockTable: ...
    def __len__(self) -> int: ...
    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def largest(self) -> int: ...

def paged_runs(
    here: BlockTable,
    ours: _Geometry,
    there: BlockTable,
    theirs: _Geometry,
    first: int,
    last: int,
    item: int,
    heads: int,
) -> memoryview: ...
