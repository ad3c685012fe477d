# The types of _core.pyx; see _link.pyi.  Methods with an underscore are for engine.py, peer.py and group.py alone.

import asyncio
from typing import Any, Protocol, TypeAlias

from typing_extensions import Buffer

from .core.batch import Batch
from .core.in_flight import InFlightTable
from .core.link import Driver, Link
from .core.memory import LocalMemory, Memory, RemoteMemory, Slice
from .core.transfer import Transfer
from .types import Priority

class _SupportsDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_Local: TypeAlias = Slice | LocalMemory | Buffer | _SupportsDLPack
_Remote: TypeAlias = Slice | RemoteMemory
_Note: TypeAlias = tuple[str, Buffer]  # topic, payload
_Signal: TypeAlias = tuple[Slice, int]  # 8 remote bytes, value

class Core(InFlightTable):
    def write(
        self,
        local: _Local,
        remote: _Remote,
        *,
        notify: _Note | None = None,
        signal: _Signal | None = None,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Transfer: ...
    def read(
        self,
        local: _Local,
        remote: _Remote,
        *,
        notify: _Note | None = None,
        signal: _Signal | None = None,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Transfer: ...
    def submit(
        self,
        batch: Batch,
        *,
        notify: _Note | None = None,
        signal: _Signal | None = None,
        timeout: float | None = None,
        priority: Priority | None = None,
    ) -> Transfer: ...
    def drained(self, buffer: _Local | Memory) -> asyncio.Future[None]: ...
    def _begin_on_device(self, transfer: Transfer) -> None: ...
    def _adopt(self, memory: LocalMemory, driver: Driver, size: int, rights: int) -> None: ...
    def _borrow(self, memory: LocalMemory, buffer: Buffer, rights: int) -> None: ...
    def _borrow_address(
        self, memory: LocalMemory, owner: object, address: int, size: int, rights: int, device: bool
    ) -> None: ...
    def _register(self, memory: LocalMemory, driver: Driver) -> bool: ...
    # address, bytes, owner, on a device
    def _address_of(self, local: object, writable: bool) -> tuple[int, int, object, bool]: ...
    def _post_note(self, link: Link, notify: _Note, timeout: float | None = None) -> Transfer: ...
