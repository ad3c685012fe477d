# The types of _core.pyx; see _link.pyi.  Methods with an underscore are for engine.py, peer.py and group.py alone.

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from typing_extensions import Buffer, disjoint_base

from ._batch import Batch
from ._link import Driver, Hub, Link
from ._memory import LocalMemory, Memory, RemoteMemory, Slice
from ._transfer import Transfer
from .types import Priority

class _SupportsDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_Local: TypeAlias = Slice | LocalMemory | Buffer | _SupportsDLPack
_Remote: TypeAlias = Slice | RemoteMemory
_Note: TypeAlias = tuple[str, Buffer]  # topic, payload
_Signal: TypeAlias = tuple[Slice, int]  # 8 remote bytes, value
_Handler: TypeAlias = Callable[
    [Driver, int, int, int, bytes, bytes], object
]  # driver, kind, cookie, status, topic, data

@disjoint_base
class Core(Hub):
    @property
    def closed(self) -> bool: ...
    @property
    def forked(self) -> bool: ...
    @property
    def stall(self) -> float: ...
    @property
    def pinned(self) -> int: ...
    def write(
        self,
        local: _Local,
        remote: _Remote,
        *,
        notify: _Note | None = None,
        signal: _Signal | None = None,
        deadline: float | None = None,
        priority: Priority | None = None,
    ) -> Transfer: ...
    def read(
        self,
        local: _Local,
        remote: _Remote,
        *,
        notify: _Note | None = None,
        signal: _Signal | None = None,
        deadline: float | None = None,
        priority: Priority | None = None,
    ) -> Transfer: ...
    def submit(
        self,
        batch: Batch,
        *,
        notify: _Note | None = None,
        signal: _Signal | None = None,
        deadline: float | None = None,
        priority: Priority | None = None,
    ) -> Transfer: ...
    def drained(self, buffer: _Local | Memory) -> asyncio.Future[None]: ...
    def _waiter(self) -> Transfer: ...
    def drain(self) -> None: ...
    def _open(self, loop: asyncio.AbstractEventLoop, handler: _Handler, stall: float, burst: int) -> None: ...
    def _must_be_open(self) -> None: ...
    def _refuse(self) -> None: ...
    def _adopt(self, memory: LocalMemory, driver: Driver, size: int, rights: int) -> None: ...
    def _borrow(self, memory: LocalMemory, buffer: Buffer, rights: int) -> None: ...
    def _borrow_address(
        self, memory: LocalMemory, owner: object, address: int, size: int, rights: int, device: bool
    ) -> None: ...
    def _register(self, memory: LocalMemory, driver: Driver) -> bool: ...
    # address, bytes, owner, on a device
    def _address_of(self, local: object, writable: bool) -> tuple[int, int, object, bool]: ...
    def _post_note(self, link: Link, notify: _Note, deadline: float | None = None) -> Transfer: ...
    def _drained_transfers(self, transfers: list[Transfer]) -> asyncio.Future[None]: ...
    def _all_drained(self) -> asyncio.Future[None]: ...
    def _refuse_work(self) -> None: ...
    def _finish(self) -> int: ...
    def _after_fork(self) -> None: ...
    def _counters(self) -> tuple[int, int, int, int, int]: ...  # transfers, inline, bytes, failed, wake-ups
