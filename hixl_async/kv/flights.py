"""The pushed layers of one stream: queued until they are ready, then flying, then released."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import hixl_async

from .protocol import WORD, Ticket

if TYPE_CHECKING:
    from .. import RemoteRegion, Transfer
    from .blocks import Blocks
    from .pool import Pool
    from .states import ProducerState

__all__ = ["Flights"]

#: Layers share the link while they fly, and one that waits for its turn lands no later.  So only as many fly as keep the link
#: busy: this many bytes, and at least two layers.
WINDOW = 8 << 20


class _Push(NamedTuple):
    layer: int
    ids: tuple[int, ...]
    question: Callable[[], Any] | None


class Flights:
    """Starts the layers of a stream, in the order of the pushes, each as soon as its ready mark says so.

    :param pool: the producer's pool.
    :param ticket: where the layers go.
    :param state: the stream's state, told of every start, landing and release.
    :param lock: guards `state` and what `add` touches, for layers are added by any thread.
    :param landed: called after a landing.
    :param failed: called with a reason and its cause when a layer cannot fly, or has failed.
    """

    def __init__(
        self,
        pool: Pool,
        ticket: Ticket,
        state: ProducerState,
        lock: threading.Lock,
        landed: Callable[[], None],
        failed: Callable[[str, BaseException | None], None],
    ) -> None:
        self.remote: RemoteRegion | None = None
        self.signals: RemoteRegion | None = None
        self._pool = pool
        self._ticket = ticket
        self._state = state
        self._lock = lock
        self._landed = landed
        self._failed = failed
        self._rows: dict[tuple[int, ...], Any] = {}
        self._transfers: dict[int, Transfer] = {}
        self._flying: dict[int, int] = {}  # bytes by layer
        self._queue: deque[_Push] = deque()
        self._sources: set[Blocks] = set()
        self._pump_is_due = False

    def add(self, layer: int, blocks: Blocks, question: Callable[[], Any] | None) -> bool:
        """Queues a layer; the lock is held.  Answers whether `pump` has to be called, and nobody has seen to it yet.

        :raises ClosedError: if the blocks were given back.
        """
        if blocks not in self._sources:
            blocks._hold()
            self._sources.add(blocks)
        self._queue.append(_Push(layer, blocks.ids, question))
        was_due, self._pump_is_due = self._pump_is_due, True
        return not was_due

    def pump(self) -> None:
        """Starts what is ready, and has the poller ask about the rest."""
        if not self._start_ready():
            self._pool._poller.watch(self._start_ready)

    def cancel(self) -> None:
        """Nothing more starts, and what flies is asked to stop."""
        self._pool._poller.forget(self._start_ready)
        with self._lock:
            self._queue.clear()
        for transfer in self._transfers.values():
            transfer.cancel()

    async def drained(self) -> None:
        """Waits until nothing flies any more, then gives the source blocks back."""
        for layer, transfer in list(self._transfers.items()):
            await transfer.drained()
            self._state.release(layer)
        with self._lock:
            sources, self._sources = self._sources, set()
        for blocks in sources:
            blocks._unhold()

    def _start_ready(self) -> bool:
        """Starts what is ready; answers whether nothing is left to wait for."""
        while True:
            with self._lock:
                self._pump_is_due = False
                if not self._queue:
                    return True
                push = self._queue[0]
            if not self._has_room(push):
                return True  # the next landing leads here again
            try:
                if push.question is not None and not push.question():
                    return False
                with self._lock:
                    # The question may itself have pushed, or ended the stream.
                    if not self._queue or self._queue[0] is not push or not self._state.start(push.layer):
                        continue
                    self._queue.popleft()
                self._start(push)
            except Exception as error:
                self._state.release(push.layer)
                self._failed(f"layer {push.layer} could not be pushed: {type(error).__name__}: {error}", error)
                return True

    def _start(self, push: _Push) -> None:
        assert self.remote is not None
        assert self.signals is not None
        pool, ticket, layer = self._pool, self._ticket, push.layer
        local_bytes, remote_bytes = pool.layout.layer_bytes(pool.blocks), pool.layout.layer_bytes(ticket.pool_blocks)
        batch = hixl_async.Batch(
            "write",
            pool.region[layer * local_bytes : (layer + 1) * local_bytes],
            self.remote[layer * remote_bytes : (layer + 1) * remote_bytes],
            self._rows_of(push.ids),
        )
        word = WORD * (ticket.slot * ticket.layers + layer)
        transfer = pool.engine.submit(batch, signal=(self.signals[word : word + WORD], ticket.generation))
        self._transfers[push.layer] = transfer
        if transfer.done():
            self._on_done(push.layer, transfer)
        else:
            self._flying[push.layer] = self._size(push)
            transfer.add_done_callback(partial(self._on_landing, push.layer))

    def _has_room(self, push: _Push) -> bool:
        return len(self._flying) < 2 or sum(self._flying.values()) + self._size(push) <= WINDOW

    def _size(self, push: _Push) -> int:
        return self._pool.layout.layer_bytes(len(push.ids))

    def _on_landing(self, layer: int, transfer: Transfer) -> None:
        del self._flying[layer]
        self._on_done(layer, transfer)
        self.pump()

    def _rows_of(self, ids: tuple[int, ...]) -> Any:
        """The descriptors of a layer, counted from its start in both pools: the same for every layer."""
        if ids not in self._rows:
            ticket, pool = self._ticket, self._pool
            self._rows[ids] = pool.layout.rows(0, ids, ticket.blocks[: len(ids)], pool.blocks, ticket.pool_blocks)
        return self._rows[ids]

    def _on_done(self, layer: int, transfer: Transfer) -> None:
        if transfer.cancelled():
            self._failed(f"the transfer of layer {layer} was cancelled", None)
        elif (error := transfer.exception()) is not None:
            self._failed(f"the transfer of layer {layer} failed: {error}", error)
        else:
            with self._lock:
                self._state.land(layer)
            self._landed()
