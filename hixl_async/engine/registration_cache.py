"""Registrations that are kept, because buffers come back."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from ..core.in_flight import must_be_on_thread, must_be_open
from ..core.memory import LocalMemory, LocalSlice
from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..errors import ClosedError, InvalidArgumentError, RangeError
from .started import Started, already_over

if TYPE_CHECKING:
    from .._core import Core
    from .region import Region

__all__ = ["RegistrationCache"]

#: The numbers in the names of cached regions, which must differ from those of other caches of the same engine.
_numbers = itertools.count(1)


class _Extent(NamedTuple):
    """Where some memory is."""

    address: int
    #: Bytes.
    size: int
    #: True if it is on a device, whose addresses are others than those of the host.
    device: bool

    def offset_of(self, part: _Extent) -> int | None:
        """Return where a part of this memory begins in it, or None if it is not a part."""
        offset = part.address - self.address
        inside = part.device == self.device and offset >= 0 and offset + part.size <= self.size
        return offset if inside else None


class RegistrationCache(Sealed, maker="engine.registration_cache()"):
    """Regions of the program's buffers, registered at their first use and kept for the next, made by the engine.

    Use it with a driver that moves only registered memory, such as HIXL: a registration costs it far more than a copy.  Give
    each transfer ``cache.local(buffer)`` in place of the buffer.  Two objects with the same memory, such as two views of an
    array, have the same registration, and so has a part of registered memory.

    A kept region keeps its buffer alive, so that no other object can get its memory.  The cache therefore has limits, beyond
    which it closes the regions that were not used for longest; transfers that still use one keep its memory pinned.  Call
    `discard` before memory is freed by other means than its object's end.

    The cache is an async context manager; leaving it closes all its regions.
    """

    __reduce__ = unpicklable("make one there, with an engine of its own")

    def __init__(self, core: Core, register: Callable[[str, Any], Region], nbytes: int, count: int) -> None:
        self._core = core
        self._register = register
        self._most_bytes, self._most = nbytes, count
        self._regions: OrderedDict[_Extent, Region] = OrderedDict()  # those used last are last
        self._bytes = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<RegistrationCache of {len(self)} regions, {self._bytes} bytes>"

    def __len__(self) -> int:
        """Return the number of regions that are kept."""
        return len(self._regions)

    @property
    def nbytes(self) -> int:
        """The bytes of the regions that are kept."""
        return self._bytes

    def local(self, buffer: Any) -> LocalSlice:
        """Return a range of a region that is the memory of `buffer`; register the memory if that was not done before.

        :param buffer: any contiguous buffer, a tensor, or an object that numpy can import by DLPack.
        :return: the range; use it for transfers as long as the cache is open, and ask again for each use.
        :raises BufferTypeError: if `buffer` has no contiguous memory.
        :raises RangeError: if it is empty, or larger than what the cache may keep.
        :raises InvalidArgumentError: if it is, or lies in, a region of the engine already.
        :raises DriverError: if no driver can register it.
        :raises ClosedError: if the cache or the engine is closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        must_be_open(self._core)
        if self._closed:
            raise ClosedError("the registration cache is closed")
        if isinstance(buffer, LocalMemory | LocalSlice):
            raise InvalidArgumentError(f"{buffer!r} is, or lies in, a region already; use it as it is")
        address, size, device, readonly = _core.extent(self._core, buffer)
        extent = _Extent(address, size, device)
        found = self._find(extent) if size else None
        if found is not None and not readonly and self._regions[found[0]].readonly:
            self._drop(found[0])  # it was registered by a view of the memory that may not be written
            found = None
        if found is None:
            return self._keep(extent, buffer)[:]
        whole, offset = found
        self._regions.move_to_end(whole)
        return self._regions[whole][offset : offset + extent.size]

    def discard(self, buffer: Any) -> None:
        """Close the regions that share memory with `buffer`; no error if there are none.

        :param buffer: as for `local`.
        :raises BufferTypeError: if `buffer` has no contiguous memory.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        must_be_on_thread(self._core)
        address, size, device, _ = _core.extent(self._core, buffer)
        for extent in list(self._regions):
            if extent.device == device and extent.address < address + size and address < extent.address + extent.size:
                self._drop(extent)

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Close all regions at the call; memory that a transfer still uses stays pinned until it is drained.  Idempotent.

        :return: an awaitable, for uniformity with other resources; it is done at once.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        must_be_on_thread(self._core)
        self._closed = True
        for extent in list(self._regions):
            self._drop(extent)
        return Started(already_over)

    def _find(self, extent: _Extent) -> tuple[_Extent, int] | None:
        """Return the kept memory that has all of `extent`, and where it begins there."""
        if extent in self._regions and self._regions[extent].alive:
            return extent, 0
        for whole, region in list(self._regions.items()):
            if not region.alive:  # the program has closed it
                self._drop(whole)
            elif (offset := whole.offset_of(extent)) is not None:
                return whole, offset
        return None

    def _keep(self, extent: _Extent, buffer: Any) -> Region:
        if extent.size > self._most_bytes:
            raise RangeError(f"the buffer has {extent.size} bytes, and the cache keeps {self._most_bytes} at most")
        while self._regions and (len(self) >= self._most or self._bytes + extent.size > self._most_bytes):
            self._drop(next(iter(self._regions)))
        region = self._register(f"registered.{next(_numbers)}", buffer)
        self._regions[extent] = region
        self._bytes += extent.size
        return region

    def _drop(self, extent: _Extent) -> None:
        self._regions.pop(extent).revoke()
        self._bytes -= extent.size

    async def __aenter__(self) -> RegistrationCache:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
