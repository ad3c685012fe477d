"""The side of a manager that serves its peers: it grants blocks to their pulls and pushes."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import AccessError, HixlError, InvalidArgumentError, TicketError
from ..description import describe
from ..pins import Pins
from .context import ManagerContext
from .holds import Use
from .index import KeyIndex
from .links import Links
from .messages import Describe, End, Grant, Link, Pull, Push, Stop, Unlink, parse, service
from .roles import Duty
from .served import Served, ServedPull, ServedPush
from .store import CacheStore

if TYPE_CHECKING:
    from ...engine.peer import Peer

__all__ = ["Owner"]


class Owner:
    """The pulls and pushes that peers make in a manager's caches.

    :param context: the context of the manager; its engine serves the messages from now on.
    :param index: the caches and their keys.
    :param links: the links of the manager.
    :param pins: the words of pulls.
    :raises InvalidArgumentError: if the engine has a manager of that name.
    """

    def __init__(self, context: ManagerContext, index: KeyIndex, links: Links, pins: Pins) -> None:
        self._context = context
        self._index = index
        self._links = links
        self._pins = pins
        self._served: dict[tuple[Peer, int], Served] = {}
        self._rows: dict[CacheStore, dict[int, ServedPush]] = {}  # the pushes that an expectation hears of
        self._watched: Counter[Peer] = Counter()
        context.engine.serve(service(context.name), self._on_message)

    def close(self) -> None:
        """Stop serving, and forget what peers do."""
        self._context.engine.unserve(service(self._context.name))
        for served in list(self._served.values()):
            served.end("the cache manager was closed")

    @property
    def served(self) -> tuple[Served, ...]:
        """What peers do in the caches."""
        return tuple(self._served.values())

    # ---- messages ----

    def _on_message(self, peer: Peer, body: dict[str, Any]) -> dict[str, Any] | None:
        # The reply is immediate, so that the messages of one peer are handled in order.
        message = parse(body, self._context.cluster)
        if isinstance(message, End):
            self._end(peer, message)
        elif isinstance(message, Stop):
            running = self._context.running.get((peer, message.hold))
            if running is not None:
                running.stop(message.reason)
        elif isinstance(message, Unlink):
            self._links.on_unlink(peer)
        elif self._context.closed:
            raise TicketError(f"the cache manager of {self._context} is closed")
        elif isinstance(message, Link):
            return self._links.on_link(peer, message)
        elif isinstance(message, Describe):
            return self._describe(peer, message)
        else:
            if (peer, message.hold) in self._served:
                raise InvalidArgumentError(f"hold {message.hold} is in use")
            grant = self._pull(peer, message) if isinstance(message, Pull) else self._push(peer, message)
            return grant.body()
        return None

    def _describe(self, peer: Peer, message: Describe) -> dict[str, Any]:
        cache = self._index.caches.get(message.cache)
        if cache is None:
            raise TicketError(f"cache {message.cache} of {self._context} does not exist, or was closed")
        return {"views": describe([cache.view]), "words": cache.writable_by(peer)}

    def _pull(self, peer: Peer, message: Pull) -> Grant:
        self._context.role.check(Duty.SERVE_PULLS, str(self._context))
        found = self._index.find(message.key, message.place)
        if not found.cache.readable_by(peer):
            raise self._no_right(found.cache, peer, "read")
        touched = found.place.touched(found.cache.view)
        hold = found.cache.holds.take(Use.READ, touched, f"a pull of peer {peer.name!r}")
        try:
            served = ServedPull(self._context, peer, found, hold, partial(self._forget, message.hold), self._pins)
        except BaseException:
            found.cache.holds.give(hold)
            raise
        self._served[peer, message.hold] = served
        lease = round(1000 * self._context.lease)
        return Grant(found.cache.number, found.place, served.pin, served.value, lease)

    def _push(self, peer: Peer, message: Push) -> Grant:
        self._context.role.check(Duty.ACCEPT_PUSHES, str(self._context))
        cache, place, _ = self._index.find(message.key, message.place)
        if not cache.writable_by(peer):
            raise self._no_right(cache, peer, "write")
        touched = place.touched(cache.view)
        expectation = None if message.req_id is None else cache.expected(message.req_id)
        hold = cache.holds.take(Use.WRITE, touched, f"a push of peer {peer.name!r}")
        row, writer = -1, None
        try:
            if expectation is not None and cache.words is not None:
                (row,) = cache.words.take(1)
                stop = partial(self._stop, peer, message.hold)
                writer = expectation.begin(message.shard, message.layers, message.last, touched, stop)
        except BaseException:
            cache.holds.give(hold)
            if row >= 0 and cache.words is not None:
                cache.words.give((row,))
            raise
        served = ServedPush(self._context, peer, cache, hold, partial(self._forget, message.hold), row)
        self._served[peer, message.hold] = served
        if expectation is not None and writer is not None:
            served.bring(expectation, writer)
            self._watch(served)
        sources = () if expectation is None else expectation.sources
        return Grant(cache.number, place, row, served.generation, 0, sources)

    def _no_right(self, cache: CacheStore, peer: Peer, verb: str) -> AccessError:
        return AccessError(f"cache {cache.number} of {self._context} grants peer {peer.name!r} no right to {verb}")

    def _end(self, peer: Peer, message: End) -> None:
        served = self._served.get((peer, message.hold))
        if served is not None:
            self._scan()  # what landed before the end
            served.end(message.reason)

    def _stop(self, peer: Peer, hold: int, reason: str) -> None:
        """Ask a peer to end its push."""
        if (peer, hold) in self._served:
            self._context.spawn(self._say_stop(peer, Stop(hold, reason)))

    async def _say_stop(self, peer: Peer, message: Stop) -> None:
        with suppress(HixlError):  # a peer that does not hear of it ends by itself, or is lost
            await peer.request(service(self._context.name), message.body())

    def _forget(self, hold: int, served: Served) -> None:
        del self._served[served.peer, hold]
        if isinstance(served, ServedPush) and served.row >= 0:
            self._unwatch(served)

    # ---- landings ----

    def _watch(self, served: ServedPush) -> None:
        self._rows.setdefault(served.cache, {})[served.row] = served
        self._watched[served.peer] += 1
        if self._watched[served.peer] == 1:
            served.peer.add_signal_callback(self._scan)

    def _unwatch(self, served: ServedPush) -> None:
        rows = self._rows[served.cache]
        del rows[served.row]
        if not rows:
            del self._rows[served.cache]
        self._watched[served.peer] -= 1
        if not self._watched[served.peer]:
            del self._watched[served.peer]
            served.peer.remove_signal_callback(self._scan)

    def _scan(self) -> None:
        """Hand the words that have changed to their pushes."""
        for cache, rows in list(self._rows.items()):
            for row, landings in (cache.words.landings() if cache.words else {}).items():
                served = rows.get(row)
                for place, generation, _, complete in landings:
                    if served is not None and complete and generation == served.generation:
                        served.land(place)
