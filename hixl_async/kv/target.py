"""A pool, as the peers see it that write or read its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.memory import RemoteSlice
from ..errors import ProtocolError
from .placed import Placed
from .reshard import Share, owed
from .shapes import Shard, View
from .words import WORD

if TYPE_CHECKING:
    from ..engine.peer import Peer
    from ..engine.region import RemoteRegion

__all__ = ["Target", "groups_of_layers", "region_names", "tensor_bytes", "words_name"]


def region_names(pool: str, tensors: int) -> list[str]:
    """Return the names of the regions with a pool's tensors."""
    return [pool] if tensors == 1 else [f"{pool}.{tensor}" for tensor in range(tensors)]


def words_name(pool: str) -> str:
    """Return the name of the region with a pool's words."""
    return f"{pool}.words"


def groups_of_layers(views: Iterable[View]) -> dict[int, int]:
    """Return the index of the group of each layer that a pool holds, in the order of the layers' words."""
    found = {layer: group for group, view in enumerate(views) for layer in view.shard.layers}
    return dict(sorted(found.items()))


def tensor_bytes(views: Iterable[View]) -> list[int]:
    """Return the bytes of each tensor of a pool; views of several groups may share tensors."""
    sizes: list[int] = []
    for view in views:
        sizes += [0] * (len(view.tensor_bytes) - len(sizes))
        sizes[: len(view.tensor_bytes)] = map(max, sizes, view.tensor_bytes)
    return sizes


@dataclass(frozen=True, slots=True)
class Target:
    """The views of a peer's pool, and the regions to which they refer; `find` makes it."""

    #: The views with their regions, one for each group.
    placed: tuple[Placed[RemoteSlice], ...]
    #: The fingerprint of their description.
    fingerprint: str
    #: The regions of the tensors.
    tensors: tuple[RemoteRegion, ...]
    #: The region of the words that say what has landed; of the pins where the pool is read.
    words: RemoteRegion
    #: The index of each layer's word in a row.
    layers: dict[int, int]
    _owed: dict[tuple[Shard, ...], list[dict[int, tuple[Share, ...]]]] = field(default_factory=dict)

    @classmethod
    async def find(cls, peer: Peer, pool: str, views: Sequence[View], fingerprint: str, words: str) -> Target:
        """Import the regions of a pool.

        :param words: the name of the region of its words, or of its pins.

        :raises ProtocolError: if they are smaller than the views.
        :raises HixlError: like ``Peer.region``.
        """
        sizes = tensor_bytes(views)
        tensors = [await peer.region(name) for name in region_names(pool, len(sizes))]
        region = await peer.region(words)
        for tensor, size in zip(tensors, sizes, strict=True):
            if tensor.size < size:
                raise ProtocolError(
                    f"region {tensor.name!r} of peer {peer.name!r} has {tensor.size} bytes, and its pool's views {size}"
                )
        layers = {layer: index for index, layer in enumerate(groups_of_layers(views))}
        placed = tuple(Placed[RemoteSlice](view, tensors) for view in views)
        return cls(placed, fingerprint, tuple(tensors), region, layers)

    @property
    def alive(self) -> bool:
        """True while the consumer has not closed a region."""
        return self.words.alive and all(tensor.alive for tensor in self.tensors)

    def owed(self, sources: Sequence[Shard]) -> list[dict[int, tuple[Share, ...]]]:
        """Return what each source sends to the pool, by layer; see `reshard.owed`."""
        key = tuple(sources)
        if key not in self._owed:
            self._owed[key] = owed(sources, [placed.view for placed in self.placed])
        return self._owed[key]

    def has_row(self, row: int) -> bool:
        """Return True if the region of the words has a row of that number."""
        return (row + 1) * len(self.layers) * WORD <= self.words.size
