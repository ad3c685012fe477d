"""The caches of peers, as pulls and pushes see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ...core.memory import RemoteSlice
from ...errors import ProtocolError
from ..description import parse_views
from ..fields import field
from ..pins import pins_name
from ..placed import Placed
from ..shapes import View
from ..target import region_names, words_name
from ..words import WORD
from .messages import Describe, service

if TYPE_CHECKING:
    from ...engine.peer import Peer
    from ...engine.region import RemoteRegion

__all__ = ["REQUEST_TIMEOUT", "RemoteCache", "Remotes", "cache_name"]

#: Seconds that a peer may take to answer, and to offer a region.
REQUEST_TIMEOUT = 10.0


def cache_name(manager: str, cache: int) -> str:
    """Return the name after which the regions of a cache are called."""
    return f"{manager}.{cache}"


@dataclass(frozen=True, slots=True)
class RemoteCache:
    """A cache of a peer."""

    view: View
    placed: Placed[RemoteSlice]
    #: The regions of the tensors.
    tensors: tuple[RemoteRegion, ...]
    #: The region of the words that say which layers have landed; None if the cache cannot be written.
    words: RemoteRegion | None
    #: The index of each layer's word in a row.
    places: dict[int, int]

    @property
    def alive(self) -> bool:
        """True while the owner has not closed a region."""
        return all(tensor.alive for tensor in self.tensors)

    def word(self, row: int, layer: int) -> slice:
        """Return the range of a layer's word in the region of the words."""
        place = WORD * (row * len(self.places) + self.places[layer])
        return slice(place, place + WORD)


class Remotes:
    """The caches of all peers that were used here.

    :param manager: the name of the manager, here and at the peers.
    """

    def __init__(self, manager: str) -> None:
        self._manager = manager
        self._caches: WeakKeyDictionary[Peer, dict[int, RemoteCache]] = WeakKeyDictionary()

    async def find(self, peer: Peer, number: int) -> RemoteCache:
        """Return a cache of a peer, imported at its first use.

        :raises ProtocolError: if the peer's description is malformed, or does not fit its regions.
        :raises HixlError: like ``peer.request`` and ``peer.region``.
        """
        known = self._caches.get(peer, {})
        if number in known and known[number].alive:
            return known[number]
        found = await self._import(peer, number)
        alive = {other: cache for other, cache in self._caches.get(peer, {}).items() if cache.alive}
        self._caches[peer] = {**alive, number: found}
        return found

    async def _import(self, peer: Peer, number: int) -> RemoteCache:
        reply = await peer.request(service(self._manager), Describe(number).body(), timeout=REQUEST_TIMEOUT)
        (view,) = parse_views(field(reply, "views", list)[:1])
        name = cache_name(self._manager, number)
        tensors = []
        for region, size in zip(region_names(name, len(view.tensor_bytes)), view.tensor_bytes, strict=True):
            tensors.append(await peer.region(region, timeout=REQUEST_TIMEOUT))
            if tensors[-1].size < size:
                raise ProtocolError(f"region {region!r} of peer {peer.name!r} is smaller than its view", peer=peer.name)
        words = None
        if field(reply, "words", bool):
            words = await peer.region(words_name(name), timeout=REQUEST_TIMEOUT)
        places = {layer: n for n, layer in enumerate(sorted(view.places))}
        return RemoteCache(view, Placed(view, tensors), tuple(tensors), words, places)

    async def pins(self, peer: Peer) -> RemoteRegion:
        """Return the words of the pulls that a peer serves."""
        return await peer.region(pins_name(self._manager), timeout=REQUEST_TIMEOUT)
