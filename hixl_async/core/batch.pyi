# The types of batch.pyx; see link.pyi.

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, final, overload

from typing_extensions import Buffer

from .link import Link
from .memory import LocalMemory, LocalSlice, RemoteMemory, RemoteSlice

class _SupportsDLPack(Protocol):  # for type checkers, numpy arrays are not a Buffer before Python 3.12
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_Verb: TypeAlias = Literal["read", "write"]
_Local: TypeAlias = LocalSlice | LocalMemory
_Remote: TypeAlias = RemoteSlice | RemoteMemory
_Table: TypeAlias = Buffer | _SupportsDLPack | Sequence[Sequence[int]]
_Rows: TypeAlias = _Table  # N x 3: local offset, remote offset, length
_Runs: TypeAlias = _Table  # N x 6: local offset, local stride, remote offset, remote stride, length, count
_Part: TypeAlias = tuple[_Local, _Remote] | tuple[_Local, _Remote, _Rows]
_Strided: TypeAlias = tuple[_Local, _Remote, _Runs]

@final
class Batch:
    @overload
    def __new__(cls, verb: _Verb, local: _Local, remote: _Remote, rows: _Rows | None = None) -> Batch: ...
    @overload
    def __new__(cls, verb: _Verb, local: Sequence[_Part]) -> Batch: ...
    @overload
    @classmethod
    def strided(cls, verb: _Verb, local: _Local, remote: _Remote, runs: _Runs) -> Batch: ...
    @overload
    @classmethod
    def strided(cls, verb: _Verb, local: Sequence[_Strided], remote: None = None, runs: None = None) -> Batch: ...
    def shifted(self, local: int = 0, remote: int = 0) -> Batch: ...
    @property
    def count(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...

def link_of(batch: Batch) -> Link: ...
