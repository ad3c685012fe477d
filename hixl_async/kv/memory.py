"""The regions of a cache: new memory, or memory of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError, RangeError
from ..types import AccessLike

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.peer import Peer
    from ..engine.region import Region

__all__ = ["make_regions"]


def make_regions(
    engine: Engine,
    names: Sequence[str],
    sizes: Sequence[int],
    memory: Any,
    access: AccessLike,
    grant: Callable[[Peer], AccessLike] | None,
) -> tuple[Region, ...]:
    """Return the regions of a cache's tensors: all, or none if one cannot be made.

    :param names: the names of the regions.
    :param sizes: the bytes of the tensors.
    :param memory: a buffer for each tensor, not in a sequence if there is only one; None: new memory.
    :raises InvalidArgumentError: if there is not a buffer for each tensor, or the engine has a region of that name.
    :raises RangeError: if a buffer is too small.
    :raises HixlError: like ``Engine.allocate`` and ``Engine.register``.
    """
    buffers: list[Any] = [None] * len(sizes)
    if memory is not None:
        buffers = [memory] if len(sizes) == 1 and not isinstance(memory, list | tuple) else list(memory)
    if len(buffers) != len(sizes):
        raise InvalidArgumentError(f"memory must have a buffer for each of {len(sizes)} tensors, not {len(buffers)}")
    regions: list[Region] = []
    try:
        for name, buffer, size in zip(names, buffers, sizes, strict=True):
            if memory is None:
                regions.append(engine.allocate(name, size, access=access, grant=grant))
                continue
            regions.append(engine.register(name, buffer, access=access, grant=grant))
            if regions[-1].size < size:
                raise RangeError(f"memory of region {name!r} has {regions[-1].size} bytes; the views need {size}")
    except BaseException:
        for region in regions:
            region.revoke()
        raise
    return tuple(regions)
