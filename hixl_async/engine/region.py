"""Regions: memory of ours that peers may use, memory of theirs that we may use, and the addresses of other objects."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.guard import guarded
from ..core.memory import LocalMemory, RemoteMemory, link_of
from ..core.sealed import Sealed
from ..display import shown
from ..errors import BufferTypeError, ClosedError, DriverError, InvalidArgumentError
from ..types import Access, AccessLike
from .closing import Closing

if TYPE_CHECKING:
    import numpy
    import torch

__all__ = ["MAX_NAME", "Operand", "Region", "RemoteRegion", "operand", "parse_access", "require_region_name"]

#: The most bytes of a region's name.
MAX_NAME = 256

#: What numpy and torch raise for a dtype or a shape that they do not know, or that memory does not fit.
MISFITS = (TypeError, ValueError, OverflowError, SyntaxError, RuntimeError)


def parse_access(value: AccessLike) -> Access:
    """Return the `Access` for a word, and raise this package's error if there is none.

    :raises InvalidArgumentError: if `value` is not an access word.
    """
    try:
        return Access.parse(value)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None


def require_region_name(value: object) -> None:
    """Return if `value` can be the name of a region.

    :raises InvalidArgumentError: if it cannot.
    """
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value.encode()) <= MAX_NAME:
        raise InvalidArgumentError(f"name must be a printable string of 1 to {MAX_NAME} bytes, not {shown(value)}")


class RegionOwner(Protocol):
    """The interface of an engine to its regions."""

    def must_be_here(self) -> None:
        """Return if the caller is in the engine's event loop, and raise the error otherwise."""

    def revoke(self, region: Region) -> None:
        """Refuse new work with the region, and free its name."""

    def withdraw(self, region: Region) -> Closing:
        """Revoke the region, and wait a while for its users."""


class Region(Sealed, LocalMemory, maker="engine.allocate() and engine.register()"):
    """Memory of this process under a name, which peers may read or write as far as its access allows.

    Slice it to name a range of bytes: ``region[0:4096]``.  It offers the buffer protocol: ``memoryview(region)``,
    ``region.numpy("float32")``; views keep the memory mapped, also after `aclose`.
    """

    # The number of the region in control messages; it is never used again.
    _number: int

    def __init__(
        self,
        owner: RegionOwner,
        name: str,
        access: Access,
        grant: Callable[[Any], AccessLike] | None = None,
        *,
        borrowed: bool = False,
    ) -> None:
        self._name = name
        self._access = access
        # True if the memory belongs to the caller, who may use it for other things once it is released.
        self._borrowed = borrowed
        # For drivers whose transport registers memory later: the reason why that failed, or None once it is registered.
        self._registrations: dict[str, asyncio.Future[DriverError | None]] = {}
        self._owner = owner
        self._grant = grant

    def __repr__(self) -> str:
        return f"<Region {self._name!r} {self.size} bytes, access={self.access}{'' if self.alive else ', closed'}>"

    @property
    def name(self) -> str:
        """The name by which peers ask for it."""
        return self._name

    @property
    def access(self) -> Access:
        """The most that any peer can be given."""
        return self._access

    def access_for(self, peer: Any) -> Access:
        """Return the access that a peer is given: `access`, limited by the ``grant=`` function; none if that fails.

        :param peer: the peer.
        :return: the peer's access.
        """
        if self._grant is None:
            return self.access
        grant = self._grant
        message = f"grant= of {self!r} failed; {peer!r} is given nothing"
        granted = guarded(asyncio.get_running_loop(), message, lambda: parse_access(grant(peer)))
        return self.access & (granted or Access.NONE)

    async def ready(self) -> None:
        """Wait until all drivers have registered the memory; peers and transfers wait by themselves.

        :raises DriverError: if a driver's transport cannot register the memory, so that the driver cannot use it.
        :raises ClosedError: if the engine is closed meanwhile.
        :raises WrongLoopError: if called in another event loop than that of the engine.
        """
        self._owner.must_be_here()
        for registration in self._registrations.values():
            await asyncio.wait([registration])
            if registration.cancelled():
                raise ClosedError(f"the engine was closed before {self!r} was ready")
            if (failure := registration.result()) is not None:
                raise DriverError(str(failure), native=failure.native)

    def numpy(self, dtype: Any = "uint8", shape: tuple[int, ...] | None = None) -> numpy.ndarray[Any, Any]:
        """Return the memory as a numpy array, without a copy.

        :param dtype: any numpy dtype.
        :param shape: the shape of the array, in elements; default: one dimension.
        :return: the array; it keeps the memory mapped.
        :raises InvalidArgumentError: if numpy has no such dtype or shape, or the size of the region does not fit them.
        """
        import numpy

        view = memoryview(self)
        try:
            array: numpy.ndarray[Any, Any] = numpy.frombuffer(view, dtype)
        except MISFITS as error:
            raise InvalidArgumentError(f"{self!r} is no array of dtype {shown(dtype)}: {error}") from error
        try:
            return array if shape is None else array.reshape(shape)
        except MISFITS as error:
            raise InvalidArgumentError(
                f"{self!r} cannot have shape {shown(shape)} of dtype {shown(dtype)}: {error}"
            ) from error

    def torch(self, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return the memory as a torch tensor on the CPU, without a copy.

        :param dtype: a torch dtype; default ``torch.uint8``.
        :param shape: the shape of the tensor, in elements; default: one dimension.
        :return: the tensor; it keeps the memory mapped.
        :raises InvalidArgumentError: if torch has no such dtype or shape, or the size of the region does not fit them.
        """
        import torch

        view = memoryview(self)
        try:
            tensor = torch.frombuffer(view, dtype=torch.uint8 if dtype is None else dtype)
        except MISFITS as error:
            raise InvalidArgumentError(f"{self!r} is no tensor of dtype {shown(dtype)}: {error}") from error
        try:
            return tensor if shape is None else tensor.reshape(shape)
        except MISFITS as error:
            raise InvalidArgumentError(
                f"{self!r} cannot have shape {shown(shape)} of dtype {shown(dtype)}: {error}"
            ) from error

    def revoke(self) -> None:
        """Withdraw the region without waiting: no new work may use it, and its name is free.  Idempotent.

        The memory stays pinned while work in flight or a peer still uses it.  `aclose` waits for them for a limited time,
        `released()` without a limit.

        :raises ClosedError: if the engine is closed.
        :raises WrongLoopError: if called in another event loop than that of the engine.
        """
        self._owner.revoke(self)

    def aclose(self) -> Closing:
        """Withdraw the region: refuse new work at once, then wait for the work and the peers that use it.  Idempotent.

        The wait ends after the engine's ``close_timeout``.  Work that has not ended by then keeps the memory pinned; so does a
        silent peer, until its death is confirmed.  Await ``region.released()`` before using a registered buffer for other
        things.  A transport that cannot deregister memory while it has links keeps it pinned until they end;
        ``engine.stats().regions`` counts it until then.

        :return: an awaitable; the region is withdrawn by the call, whether it is awaited or not.
        :raises WrongLoopError: if called in another event loop than that of the engine.
        """
        return self._owner.withdraw(self)

    async def __aenter__(self) -> Region:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class RemoteRegion(Sealed, RemoteMemory, maker="peer.region()"):
    """A peer's region, usable from here; slice it to name a range of bytes."""

    def __init__(self, name: str, access: Access) -> None:
        self._name = name
        self._access = access

    @property
    def name(self) -> str:
        """The name that the peer gave it."""
        return self._name

    @property
    def access(self) -> Access:
        """The access that the peer grants us."""
        return self._access

    def __repr__(self) -> str:
        link = link_of(self)
        owner = f" of {link.peer!r}" if link is not None else ""
        closed = "" if self.alive else ", closed"
        return f"<RemoteRegion {self.name!r}{owner} {self.size} bytes, access={self.access}{closed}>"


class Operand(NamedTuple):
    """The location of an object's memory."""

    address: int
    #: Bytes.
    size: int
    #: The object that keeps the memory alive.
    owner: object
    #: True if the memory is on a device, where the CPU cannot reach its address.
    device: bool


def operand(obj: Any, writable: bool, demand: str = "local must be a region's range or a") -> Operand:
    """Return the location of an object without the buffer protocol: a tensor, or an object that numpy can import by DLPack.

    torch and numpy are used only where the caller's process has imported them already.  A tensor may be on the CPU, on a CUDA
    or NPU device, or on the device that is registered as torch's private backend.

    :param demand: the beginning of the message that refuses an object without memory.
    :raises BufferTypeError: if `obj` has no contiguous memory that a driver can use, or is not writable and must be.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        device = obj.device.type
        if device not in ("cpu", "cuda", "npu", torch._C._get_privateuse1_backend_name()):
            raise BufferTypeError(f"a tensor on {obj.device} cannot be used by any driver; copy it to the CPU first")
        if not obj.is_contiguous():
            raise BufferTypeError("the tensor is not contiguous; pass tensor.contiguous()")
        if obj.is_conj() or obj.is_neg():
            raise BufferTypeError(
                "the tensor's values are not what its memory holds; pass tensor.resolve_conj().resolve_neg()"
            )
        # A second tensor on the same storage: the caller's may be given another one (``tensor.data = ...``).
        return Operand(obj.data_ptr(), obj.numel() * obj.element_size(), obj.detach(), device != "cpu")
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(obj, "__dlpack__"):
        try:
            array = numpy.from_dlpack(obj)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise BufferTypeError(f"{type(obj).__name__} cannot be used by DLPack: {error}") from error
        if not array.flags.c_contiguous:
            raise BufferTypeError(f"{type(obj).__name__} is not contiguous")
        if writable and not array.flags.writeable:
            raise BufferTypeError(f"{type(obj).__name__} is read-only; it cannot be read into")
        return Operand(array.ctypes.data, array.nbytes, array, False)
    raise BufferTypeError(
        f"{demand} contiguous buffer (bytes, memoryview, numpy array, CPU tensor), not {type(obj).__name__}"
    )
