"""One pull or push at the side that moves the bytes: from the request for the peer's blocks until they are given back."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...core.batch import Batch
from ...errors import (
    BusyError,
    HixlError,
    LayoutMismatchError,
    PeerDownError,
    PeerLostError,
    RangeError,
    RefusedError,
    StaleRegionError,
    StreamAbortedError,
    TransferTimeoutError,
    WaitTimeoutError,
)
from ..lease import BEATS
from ..placed import copies
from ..plan import Plan
from ..reshard import Share
from .context import ManagerContext
from .holds import Use
from .landings import Landings
from .messages import End, Grant, Pull, Push, service
from .place import Place
from .remote import REQUEST_TIMEOUT, RemoteCache, Remotes
from .roles import Duty
from .store import CacheStore

if TYPE_CHECKING:
    from ...core.transfer import Transfer
    from ...engine.peer import Peer

__all__ = ["Operation"]

#: Layers in flight; more of them would share the link, and each land later.
DEPTH = 4


class Operation(ABC):
    """The layers of one pull or push; it begins with the call.

    :param context: the context of the manager.
    :param remotes: the caches of its peers.
    :param peer: the owner of the other cache.
    :param cache: the cache of this side.
    :param here: the blocks of this side, and the tokens if the program names them.
    :param layers: the layers; None: all that both caches hold.
    :raises AccessError: if the manager's role does not do that.
    :raises ClosedError: if the cache is closed.
    :raises RangeError: if the blocks of this side do not hold the tokens, or the cache does not hold a layer.
    :raises BusyError: if they are in use.
    """

    verb: ClassVar[Literal["read", "write"]]
    use: ClassVar[Use]
    duty: ClassVar[Duty]

    def __init__(
        self,
        context: ManagerContext,
        remotes: Remotes,
        peer: Peer,
        cache: CacheStore,
        here: Place,
        layers: Sequence[int] | None,
    ) -> None:
        context.role.check(self.duty, str(context))
        cache.check_open()
        if layers is not None and (strange := set(layers) - set(cache.places)):
            raise RangeError(f"the cache does not hold layer {min(strange)}")
        self.landings = Landings(context.loop, layers)
        #: The bytes that have been moved.
        self.nbytes = 0
        self.peer = peer
        self.number = next(context.holds)
        self._context = context
        self._remotes = remotes
        self._cache = cache
        self._here = here
        self._layers = None if layers is None else tuple(layers)
        self._plans: dict[tuple[Share, ...] | None, Plan] = {}
        self._transfers: list[Transfer] = []
        self._in_flight: deque[tuple[int, Transfer]] = deque()
        self._stopped: str | None = None
        self._error: BaseException | None = None
        self.released: asyncio.Future[None] = context.loop.create_future()
        self._hold = cache.holds.take(self.use, here.touched(cache.view), f"a transfer with peer {peer.name!r}")
        self._interval = 0.0  # of the heartbeats that keep the owner's lease; 0: none
        context.running[peer, self.number] = self
        self.task: asyncio.Task[int]

    def start(self, timeout: float | None) -> None:
        """Begin, with a limit in seconds."""
        self.task = self._context.spawn(self._run(timeout))
        self.task.add_done_callback(self._on_done)

    def stop(self, reason: str) -> None:
        """End with a `StreamAbortedError`, unless it has ended."""
        if self._stopped is None and not self.task.done():
            self._stopped = reason
            self.task.cancel()

    # ---- what a pull and a push do differently ----

    @abstractmethod
    def _request(self) -> Pull | Push:
        """Return the request for the peer's blocks."""

    @abstractmethod
    async def _prepare(self, remote: RemoteCache, grant: Grant) -> None:
        """Note what the peer granted, before the first layer."""

    @abstractmethod
    def _shares(self, layer: int) -> tuple[Share, ...] | None:
        """Return what is moved of a layer; None: all that both sides hold."""

    @abstractmethod
    def _wait(self, layer: int) -> asyncio.Future[None] | None:
        """Return a future that is done when a layer may be moved; None if it may be moved now."""

    @abstractmethod
    def _submit(self, batch: Batch, layer: int, tokens: int) -> Transfer:
        """Start the transfer of a layer."""

    @abstractmethod
    async def _confirm(self, layer: int) -> None:
        """Return if the data of a layer that was moved are what they should be."""

    # ---- the work ----

    async def _run(self, timeout: float | None) -> int:
        try:
            async with asyncio.timeout(timeout):
                await self._work()
                for transfer in self._transfers:
                    await transfer.drained()
        except BaseException as error:
            self._error = self._translated(error, timeout)
            raise self._error from error.__cause__
        return self.nbytes

    async def _work(self) -> None:
        body = self._request().body()
        grant = Grant.parse(await self.peer.request(service(self._context.name), body, timeout=REQUEST_TIMEOUT))
        if grant.lease:
            self._interval = grant.lease / 1000 / BEATS
            self.peer.begin_heartbeats(self._interval)
        remote = await self._remotes.find(self.peer, grant.cache)
        await self._prepare(remote, grant)
        tokens = self._tokens(remote, grant.place)
        layers = self._layers
        if layers is None:
            layers = tuple(layer for layer in self._cache.view.shard.layers if layer in remote.places)
        if not layers:
            raise LayoutMismatchError("the two caches have no layer in common")
        self.landings.begin(layers)
        for layer in layers:
            await self._until_ready(layer)
            await self._start(layer, remote, grant.place, tokens)
            await self._land(DEPTH - 1)
        await self._land(0)

    def _tokens(self, remote: RemoteCache, there: Place) -> tuple[int, int]:
        """Return the range of the tokens: the program's, else the key's, else all that the blocks hold.

        :raises RangeError: if the key does not name the program's tokens, or the blocks of the two sides hold others.
        """
        named, there_are = self._here.tokens, there.tokens
        if named is None and there_are is None:
            ours, theirs = self._here.all_of(self._cache.view), there.all_of(remote.view)
            if ours == theirs:
                return ours
            raise RangeError(
                f"our blocks hold the tokens {ours[0]} to {ours[1]}, and the peer's {theirs[0]} to {theirs[1]}; name "
                "those to transfer with tokens="
            )
        if named is not None and there_are is not None and not there_are[0] <= named[0] < named[1] <= there_are[1]:
            raise RangeError(f"the key names the tokens {there_are[0]} to {there_are[1]}, not {named[0]} to {named[1]}")
        tokens = named or there_are
        assert tokens is not None
        return tokens

    async def _start(self, layer: int, remote: RemoteCache, there: Place, tokens: tuple[int, int]) -> None:
        shares = self._shares(layer)
        if shares == ():  # another writer brings it
            self.landings.land(layer)
            return
        plan = self._plans.get(shares)
        if plan is None:
            plan = self._plans[shares] = self._plan(remote, there, tokens, shares)
        await self._context.engine.room(plan.nbytes)
        parts = copies(plan, layer, self._cache.placed, remote.placed)
        transfer = self._submit(Batch.strided(self.verb, parts), layer, tokens[1] - tokens[0])
        self._transfers.append(transfer)
        self._in_flight.append((layer, transfer))
        self.nbytes += plan.nbytes

    def _plan(
        self, remote: RemoteCache, there: Place, tokens: tuple[int, int], shares: tuple[Share, ...] | None
    ) -> Plan:
        ours, theirs = self._cache.view, remote.view
        source, target = (theirs, ours) if self.verb == "read" else (ours, theirs)
        if found := source.group.differences(target.group):
            raise LayoutMismatchError(f"the caches of source and target differ: {'; '.join(found)}")
        # The copies are the same in both directions.
        plan = Plan(ours, theirs, self._here.blocks, there.blocks, tokens, shares)
        if not plan.nbytes:
            raise LayoutMismatchError("the two caches have no heads in common")
        return plan

    async def _until_ready(self, layer: int) -> None:
        waiting = self._wait(layer)
        if waiting is None:
            return
        try:
            while not waiting.done():
                flights: list[asyncio.Future[Any]] = [transfer for _, transfer in self._in_flight]
                await asyncio.wait([waiting, *flights], return_when=asyncio.FIRST_COMPLETED)
                while self._in_flight and self._in_flight[0][1].done():
                    await self._land(len(self._in_flight) - 1)
            waiting.result()
        finally:
            waiting.cancel()

    async def _land(self, most: int) -> None:
        """Wait until at most so many layers are in flight."""
        while len(self._in_flight) > most:
            layer, transfer = self._in_flight.popleft()
            await transfer
            await self._confirm(layer)
            self.landings.land(layer)

    # ---- the end ----

    def _translated(self, error: BaseException, timeout: float | None) -> BaseException:
        """Return the error that says what happened to the memory."""
        begun, name = bool(self._transfers), self.peer.name
        if isinstance(error, asyncio.CancelledError):
            return error if self._stopped is None else StreamAbortedError(self._stopped, peer=name)
        if isinstance(error, TimeoutError) and not isinstance(error, HixlError):
            kind = TransferTimeoutError if begun else WaitTimeoutError
            return kind(f"the transfer did not end within its timeout of {timeout:g} s", peer=name)
        if begun and isinstance(error, PeerDownError):
            lost = PeerLostError(str(error), peer=name)
            lost.confirmed_dead = error.confirmed_dead
            return lost
        if begun and isinstance(error, StaleRegionError):
            return StreamAbortedError(f"the peer closed its cache meanwhile: {error}", peer=name)
        return error

    def _on_done(self, task: asyncio.Task[int]) -> None:
        """Give the blocks of both sides back as soon as no transfer touches them, then tell the program."""
        if task.cancelled() and self._error is None:  # before it began
            self._error = asyncio.CancelledError()
        reason = "" if self._error is None else str(self._error) or "the peer cancelled its transfer"
        for transfer in self._transfers:
            transfer.cancel()
        pending = [drain for drain in (transfer.drained() for transfer in self._transfers) if not drain.done()]
        if pending:
            self._context.spawn(self._release_after(pending, reason))
        else:
            self._release(reason)
        self.landings.end(self._error)

    async def _release_after(self, pending: Sequence[asyncio.Future[None]], reason: str) -> None:
        await asyncio.wait(pending)
        self._release(reason)

    def _release(self, reason: str) -> None:
        self._cache.holds.give(self._hold)
        self._context.running.pop((self.peer, self.number), None)
        if self._interval:
            self.peer.end_heartbeats(self._interval)
        end = End(self.number, reason).body()
        try:
            self.peer.post(service(self._context.name), end)
        except BusyError:
            self._context.spawn(self._say(end))
        except RefusedError:
            pass  # the peer is down, and gives its blocks back by itself
        self.released.set_result(None)

    async def _say(self, end: dict[str, object]) -> None:
        with suppress(RefusedError):
            await self.peer.request(service(self._context.name), end, timeout=REQUEST_TIMEOUT)
