"""The pushed layers of one stream: queued until they are ready, then in flight, then released."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.batch import Batch
from .context import PoolContext
from .lease import Lease
from .protocol import WORD, Ticket
from .states import ProducerState

if TYPE_CHECKING:
    from ..core.transfer import Transfer
    from ..engine.region import RemoteRegion

__all__ = ["Sender"]

#: The most bytes of layers in flight, beyond two layers.  Layers in flight share the link, so that a layer lands no later if it
#: waits for its turn; it suffices to keep the link busy.
WINDOW = 8 << 20


class _Push(NamedTuple):
    layer: int
    ids: tuple[int, ...]
    question: Callable[[], Any] | None


class Sender:
    """The sender of a stream's layers: it starts them in the order of the pushes, each once it is ready.

    :param context: the context of the producer's pool.
    :param ticket: the ticket that names the consumer's blocks.
    :param state: the stream's state, which records every start, landing and release.
    :param lock: the lock of `state` and of the queue, because any thread may add layers.
    :param landed: called after a landing.
    :param failed: called with a reason and its cause when a layer cannot be sent, or has failed.
    """

    def __init__(
        self,
        context: PoolContext,
        ticket: Ticket,
        state: ProducerState,
        lock: threading.Lock,
        landed: Callable[[], None],
        failed: Callable[[str, BaseException | None], None],
    ) -> None:
        self._context = context
        self._ticket = ticket
        self._state = state
        self._lock = lock
        self._landed = landed
        self._failed = failed
        self._remote: RemoteRegion | None = None
        self._signals: RemoteRegion | None = None
        self._rows: dict[tuple[int, ...], Any] = {}
        layout = context.layout
        self._layer_bytes, self._remote_layer_bytes = (
            layout.layer_bytes(n) for n in (context.blocks, ticket.pool_blocks)
        )
        self._block_bytes = layout.layer_bytes(1)
        self._transfers: dict[int, Transfer] = {}
        self._in_flight: dict[int, int] = {}  # bytes by layer
        self._queue: deque[_Push] = deque()
        self._sources: set[Lease] = set()
        self._pump_is_due = False

    def aim(self, remote: RemoteRegion, signals: RemoteRegion) -> None:
        """Set the target of the layers; before the first `pump`.

        :param remote: the consumer's blocks.
        :param signals: the consumer's words, one for each block and layer.
        """
        self._remote, self._signals = remote, signals

    def add(self, layer: int, source: Lease, question: Callable[[], Any] | None) -> bool:
        """Queue a layer; the caller holds the lock.

        :return: True if the caller has to have `pump` called; False if an earlier call has already arranged it.
        :raises ClosedError: if the source blocks were given back.
        """
        if source not in self._sources:
            source.hold()
            self._sources.add(source)
        self._queue.append(_Push(layer, source.ids, question))
        was_due, self._pump_is_due = self._pump_is_due, True
        return not was_due

    def pump(self) -> None:
        """Start the layers that are ready, and have the poller check the others."""
        if not self._start_ready():
            self._context.poller.watch(self._start_ready)

    def cancel(self) -> None:
        """Drop the queued layers, and cancel those in flight."""
        self._context.poller.forget(self._start_ready)
        with self._lock:
            self._queue.clear()
        for transfer in self._transfers.values():
            transfer.cancel()

    async def drained(self) -> None:
        """Wait until all transfers are drained, then release the source blocks."""
        for layer, transfer in list(self._transfers.items()):
            await transfer.drained()
            self._state.release(layer)
        with self._lock:
            sources, self._sources = self._sources, set()
        for source in sources:
            source.unhold()

    def _start_ready(self) -> bool:
        """Start the layers that are ready, and return True if the poller has nothing to check."""
        while True:
            with self._lock:
                self._pump_is_due = False
                if not self._queue:
                    return True
                push = self._queue[0]
            if not self._has_room(push):
                return True  # the next landing calls this again
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
        assert self._remote is not None
        assert self._signals is not None
        context, ticket, layer = self._context, self._ticket, push.layer
        local_bytes, remote_bytes = self._layer_bytes, self._remote_layer_bytes
        batch = Batch(
            "write",
            context.region[layer * local_bytes : (layer + 1) * local_bytes],
            self._remote[layer * remote_bytes : (layer + 1) * remote_bytes],
            self._rows_of(push.ids),
        )
        word = WORD * (ticket.slot * ticket.layers + layer)
        transfer = context.engine.submit(batch, signal=(self._signals[word : word + WORD], ticket.generation))
        self._transfers[push.layer] = transfer
        if transfer.done():
            self._on_done(push.layer, transfer)
        else:
            self._in_flight[push.layer] = self._size(push)
            transfer.add_done_callback(partial(self._on_landing, push.layer))

    def _has_room(self, push: _Push) -> bool:
        return len(self._in_flight) < 2 or sum(self._in_flight.values()) + self._size(push) <= WINDOW

    def _size(self, push: _Push) -> int:
        return len(push.ids) * self._block_bytes

    def _rows_of(self, ids: tuple[int, ...]) -> Any:
        """Return the descriptors of a layer, counted from its start in both pools: the same for every layer."""
        if ids not in self._rows:
            ticket, context = self._ticket, self._context
            self._rows[ids] = context.layout.rows(0, ids, ticket.blocks[: len(ids)], context.blocks, ticket.pool_blocks)
        return self._rows[ids]

    def _on_landing(self, layer: int, transfer: Transfer) -> None:
        del self._in_flight[layer]
        self._on_done(layer, transfer)
        self.pump()

    def _on_done(self, layer: int, transfer: Transfer) -> None:
        if transfer.cancelled():
            self._failed(f"the transfer of layer {layer} was cancelled", None)
        elif (error := transfer.exception()) is not None:
            self._failed(f"the transfer of layer {layer} failed: {error}", error)
        else:
            with self._lock:
                self._state.land(layer)
            self._landed()
