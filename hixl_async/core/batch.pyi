# The types of _batch.pyx; see _link.pyi.

from collections.abc import Sequence
from typing import Literal, TypeAlias, final, overload

from typing_extensions import Buffer

from .link import Link
from .memory import LocalMemory, RemoteMemory, Slice

_Verb: TypeAlias = Literal["read", "write"]
_Local: TypeAlias = Slice | LocalMemory
_Remote: TypeAlias = Slice | RemoteMemory
_Rows: TypeAlias = Buffer | Sequence[Sequence[int]]  # N x 3: local offset, remote offset, length
# N x 6: local offset, local stride, remote offset, remote stride, length, count
_Runs: TypeAlias = Buffer | Sequence[Sequence[int]]
_Part: TypeAlias = tuple[_Local, _Remote] | tuple[_Local, _Remote, _Rows]

@final
class Batch:
    @overload
    def __new__(cls, verb: _Verb, local: _Local, remote: _Remote, rows: _Rows | None = None) -> Batch: ...
    @overload
    def __new__(cls, verb: _Verb, local: Sequence[_Part]) -> Batch: ...
    @classmethod
    def strided(cls, verb: _Verb, local: _Local, remote: _Remote, runs: _Runs) -> Batch: ...
    def shifted(self, local: int = 0, remote: int = 0) -> Batch: ...
    @property
    def count(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def link(self) -> Link: ...
    def __len__(self) -> int: ...
