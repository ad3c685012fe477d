"""The reads of one owner's layers: started as they are published, confirmed by the pin, then reported."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..core.batch import Batch
from ..core.transfer import all_drained
from ..errors import RangeError
from .context import PoolContext
from .placed import copies
from .plan import BlockTable, Plan
from .protocol import Published
from .reshard import Share
from .target import Target
from .ticket import Slice
from .window import has_room
from .words import WORD

if TYPE_CHECKING:
    from ..core.memory import RemoteSlice
    from ..core.transfer import Transfer

__all__ = ["Chunk", "Claim", "Reading"]


class Claim(NamedTuple):
    """What an owner lets this side read; known once it has accepted the ticket."""

    target: Target
    #: The owner's blocks of each group.
    slices: tuple[Slice, ...]
    #: What this side reads of each layer.
    shares: dict[int, tuple[Share, ...]]
    #: The place of the pin, and its value while the blocks stay as they are.
    pin: RemoteSlice
    value: int


class Chunk(NamedTuple):
    """Some tokens of a layer, to be read."""

    layer: int
    #: The position of the first token, and the one after the last.
    first: int
    last: int
    #: True if no more tokens of the layer follow.
    complete: bool


class Reading:
    """The reads from one owner, in the order in which it publishes.

    A chunk has landed once its data are there and the owner's pin, read after them, has still its value.

    :param context: the context of the reader's pool.
    :param slices: the blocks to be filled, of each group.
    :param landed: called with the chunks that have landed.
    :param failed: called with a reason and its cause when a read has failed.
    :param expired: called when the pin has moved on.
    """

    def __init__(
        self,
        context: PoolContext,
        slices: Sequence[Slice],
        landed: Callable[[Sequence[Chunk]], None],
        failed: Callable[[str, BaseException | None], None],
        expired: Callable[[], None],
    ) -> None:
        self._context = context
        self._slices = slices
        self._landed = landed
        self._failed = failed
        self._expired = expired
        self._claim: Claim | None = None
        self._next: dict[int, int] = {}  # the position of the next token to read, by layer
        self._plans: dict[tuple[int, int, int, int], Plan] = {}
        self._queue: deque[Chunk] = deque()
        self._in_flight: dict[Chunk, int] = {}  # bytes
        self._unconfirmed: list[Chunk] = []
        self._otherwise: Callable[[], None] | None = None  # to be called if the pin has not moved on
        self._confirming = self._stopped = False
        self._transfers: list[Transfer] = []

    def begin(self, claim: Claim) -> None:
        """Read what the owner publishes from now on.

        :raises RangeError: if the owner's blocks do not hold the tokens that are to be read.
        """
        for ours, theirs in zip(self._slices, claim.slices, strict=True):
            if not theirs.first <= ours.first < ours.last <= theirs.last:
                raise RangeError(
                    f"the owner offers the tokens {theirs.first} to {theirs.last}, not {ours.first} to {ours.last}"
                )
        self._claim = claim

    def add(self, published: Published) -> None:
        """Read what has become readable of the layers that are needed from this owner."""
        assert self._claim is not None
        groups = self._context.groups
        for layer, after, complete in published.layers:
            if layer not in self._claim.shares:
                continue
            ours = self._slices[groups[layer]]
            first, last = self._next.get(layer, ours.first), min(after, ours.last)
            whole = bool(complete) or last == ours.last
            if first < last:
                self._queue.append(Chunk(layer, first, last, whole))
                self._next[layer] = last
            elif whole and layer not in self._next:
                self._landed([Chunk(layer, first, first, whole)])  # it ends before the tokens that are to be read
        self._pump()

    def check(self, otherwise: Callable[[], None]) -> None:
        """Look at the pin, and call `otherwise` unless it has moved on."""
        if self._claim is None:
            otherwise()
        else:
            self._otherwise = otherwise
            self._confirm()

    def stop(self) -> None:
        """Start no more reads, and cancel those in flight."""
        self._stopped = True
        self._queue.clear()
        for transfer in self._transfers:
            transfer.cancel()

    async def drained(self) -> None:
        """Wait until no read can write the blocks, and none will start."""
        if self._transfers:
            await all_drained(*self._transfers)

    def _pump(self) -> None:
        while self._queue and not self._stopped:
            chunk = self._queue[0]
            try:
                plan = self._plan_of(chunk)
                flying = self._in_flight
                if any(other.layer == chunk.layer for other in flying):
                    return  # the tokens of a layer land in order; the next landing calls this again
                if not has_room(flying.values(), plan.nbytes):
                    return
                self._queue.popleft()
                self._start(chunk, plan)
            except Exception as error:
                self._failed(f"layer {chunk.layer} could not be read: {error}", error)
                return

    def _start(self, chunk: Chunk, plan: Plan) -> None:
        assert self._claim is not None
        group = self._context.groups[chunk.layer]
        parts = copies(plan, chunk.layer, self._context.placed[group], self._claim.target.placed[group])
        transfer = self._context.engine.submit(Batch.strided("read", parts))
        self._transfers.append(transfer)
        self._in_flight[chunk] = plan.nbytes
        if transfer.done():
            self._on_read(chunk, transfer)
        else:
            transfer.add_done_callback(partial(self._on_read_later, chunk))

    def _plan_of(self, chunk: Chunk) -> Plan:
        """Return the plan of a chunk, made once for all layers of the same blocks, tokens and shares."""
        assert self._claim is not None
        group, shares = self._context.groups[chunk.layer], self._claim.shares[chunk.layer]
        key = (group, chunk.first, chunk.last, id(shares))
        if key not in self._plans:
            ours, theirs = self._slices[group], self._claim.slices[group]
            self._plans[key] = Plan(
                self._context.views[group],
                self._claim.target.placed[group].view,
                BlockTable(ours.blocks, ours.start),
                BlockTable(theirs.blocks, theirs.start),
                (chunk.first, chunk.last),
                shares,
            )
        return self._plans[key]

    def _on_read_later(self, chunk: Chunk, transfer: Transfer) -> None:
        self._on_read(chunk, transfer)
        self._pump()

    def _on_read(self, chunk: Chunk, transfer: Transfer) -> None:
        del self._in_flight[chunk]
        if self._stopped:
            return
        if transfer.cancelled():
            self._failed(f"the read of layer {chunk.layer} was cancelled", None)
        elif (error := transfer.exception()) is not None:
            self._failed(f"the read of layer {chunk.layer} failed: {error}", error)
        else:
            self._unconfirmed.append(chunk)
            self._confirm()

    def _confirm(self) -> None:
        """Read the pin after the data of all chunks that wait for it."""
        if self._confirming or self._stopped or not (self._unconfirmed or self._otherwise):
            return
        assert self._claim is not None
        chunks, self._unconfirmed = self._unconfirmed, []
        otherwise, self._otherwise = self._otherwise, None
        found = bytearray(WORD)
        try:
            transfer = self._context.engine.read(found, self._claim.pin)
        except Exception as error:
            self._failed(f"the owner's pin could not be read: {error}", error)
            return
        self._confirming = True
        self._transfers.append(transfer)
        if transfer.done():
            self._on_confirmed(chunks, otherwise, found, transfer)
        else:
            transfer.add_done_callback(partial(self._on_confirmed, chunks, otherwise, found))

    def _on_confirmed(
        self, chunks: Sequence[Chunk], otherwise: Callable[[], None] | None, found: bytearray, transfer: Transfer
    ) -> None:
        self._confirming = False
        if self._stopped:
            return
        assert self._claim is not None
        if transfer.cancelled():
            self._failed("the read of the owner's pin was cancelled", None)
        elif (error := transfer.exception()) is not None:
            self._failed(f"the owner's pin could not be read: {error}", error)
        elif int.from_bytes(found, sys.byteorder) != self._claim.value:
            self._expired()
        else:
            self._landed(chunks)
            if otherwise is not None:
                otherwise()
            self._confirm()
