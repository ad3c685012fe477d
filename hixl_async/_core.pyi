# The types of _core.pyx; see core/link.pyi.

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from typing_extensions import Buffer, disjoint_base

from .core.batch import Batch
from .core.in_flight import InFlightTable
from .core.link import Driver, Link
from .core.memory import LocalMemory, LocalSlice, Memory, RemoteMemory, RemoteSlice
from .core.transfer import Transfer
from .types import Priority

class _SupportsDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_Local: TypeAlias = LocalSlice | LocalMemory | Buffer | _SupportsDLPack
_Remote: TypeAlias = RemoteSlice | RemoteMemory
_Note: TypeAlias = tuple[str, Buffer]  # topic, payload
_Signal: TypeAlias = tuple[RemoteSlice, int]  # 8 remote bytes, value

@disjoint_base
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
    def drained(self, buffer: _Local | Memory | RemoteSlice) -> asyncio.Future[None]: ...

def set_object_support(
    core: Core,
    address_of: Callable[[Any, bool], tuple[int, int, object, bool]],  # address, bytes, owner, on a device
    begin_on_device: Callable[[Transfer], object],
) -> None: ...
def extent(core: Core, buffer: Any) -> tuple[int, int, bool, bool]: ...
def allocate(core: Core, memory: LocalMemory, driver: Driver, size: int, rights: int) -> None: ...
def borrow(core: Core, memory: LocalMemory, buffer: Buffer, rights: int) -> None: ...
def borrow_address(
    core: Core, memory: LocalMemory, owner: object, address: int, size: int, rights: int, device: bool
) -> None: ...
def register(core: Core, memory: LocalMemory, driver: Driver) -> bool: ...
def notify(core: Core, link: Link, notification: _Note, timeout: float | None = None) -> Transfer: ...
