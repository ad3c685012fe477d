"""The pushed layers of one stream: queued until they are ready, then in flight, then released."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.batch import Batch
from ..core.transfer import all_drained
from .context import PoolContext
from .loan import Loan
from .placed import copies
from .plan import BlockTable, Plan
from .reshard import Share
from .states import ProducerState
from .target import Target
from .ticket import Slice
from .window import has_room
from .words import WORD, pack_word

if TYPE_CHECKING:
    from ..core.transfer import Transfer

__all__ = ["Aim", "Push", "Sender"]


class Push(NamedTuple):
    """Some tokens of a layer, to be sent."""

    layer: int
    source: Loan
    #: The position of the first token, and the one after the last.
    first: int
    last: int
    #: True if no more tokens of the layer follow.
    complete: bool
    #: Tells if the tokens may be read; None: they may.
    question: Callable[[], Any] | None


class Aim(NamedTuple):
    """What a stream sends, and whereto; known once the consumer has accepted the ticket."""

    target: Target
    #: The consumer's blocks of each group.
    slices: tuple[Slice, ...]
    #: What this sender sends of each layer.
    shares: dict[int, tuple[Share, ...]]
    #: The row of its words.
    row: int
    generation: int


class Sender:
    """The sender of a stream's layers: it starts them in the order of the pushes, each once it is ready.

    Of each layer one chunk is in flight at a time, because its word says how many tokens have landed, and drivers may reorder
    transfers.

    :param context: the context of the producer's pool.
    :param state: the stream's state, which records every start, landing and release.
    :param lock: the lock of `state` and of the queue, because any thread may add layers.
    :param landed: called once all has landed.
    :param failed: called with a reason and its cause when a layer cannot be sent, or has failed.
    """

    def __init__(
        self,
        context: PoolContext,
        state: ProducerState,
        lock: threading.Lock,
        landed: Callable[[], None],
        failed: Callable[[str, BaseException | None], None],
    ) -> None:
        self._context = context
        self._state = state
        self._lock = lock
        self._landed = landed
        self._failed = failed
        self._aim: Aim | None = None
        self._plans: dict[tuple[Loan, int, int, int], Plan] = {}
        self._transfers: list[Transfer] = []
        self._in_flight: dict[int, int] = {}  # bytes by layer
        self._queue: deque[Push] = deque()
        self._sources: set[Loan] = set()
        self._pump_is_due = False

    def aim(self, aim: Aim) -> None:
        """Set the target of the layers; those that are queued are sent by the next `pump`."""
        self._aim = aim

    def add(self, push: Push) -> bool:
        """Queue a layer; the caller holds the lock.

        :return: True if the caller has to have `pump` called; False if an earlier call has already arranged it.
        :raises ClosedError: if the source blocks were given back.
        """
        self.hold(push.source)
        self._queue.append(push)
        was_due, self._pump_is_due = self._pump_is_due, True
        return not was_due

    def hold(self, source: Loan) -> None:
        """Keep source blocks until the stream is drained; the caller holds the lock.

        :raises ClosedError: if they were given back.
        """
        if source not in self._sources:
            source.hold()
            self._sources.add(source)

    def pump(self) -> None:
        """Start the layers that are ready, and have the poller check the others."""
        if not self._start_ready():
            self._context.poller.watch(self._start_ready)

    def cancel(self) -> None:
        """Drop the queued layers, and cancel those in flight."""
        self._context.poller.forget(self._start_ready)
        with self._lock:
            self._queue.clear()
        for transfer in self._transfers:
            transfer.cancel()

    async def drained(self) -> None:
        """Wait until all transfers are drained, then release the source blocks."""
        if self._transfers:
            await all_drained(*self._transfers)
        self._state.release(len(self._transfers))
        self._transfers.clear()
        self.release()

    def release(self) -> None:
        """Release the source blocks, which no transfer touches."""
        with self._lock:
            sources, self._sources = self._sources, set()
        for source in sources:
            source.unhold()

    def _start_ready(self) -> bool:
        """Start the layers that are ready, and return True if the poller has nothing to check."""
        if self._aim is None:
            return True  # the opening's end calls this again
        while True:
            with self._lock:
                self._pump_is_due = False
                if not self._queue:
                    return True
                push = self._queue[0]
                if not self._state.owes(push.layer):  # another sender brings it, or the consumer does not hold it
                    self._queue.popleft()
                    continue
            try:
                plan = self._plan_of(push, self._aim)
                if not self._has_room(push, plan):
                    return True  # the next landing calls this again
                if push.question is not None and not push.question():
                    return False
                with self._lock:
                    # The question may itself have pushed, or ended the stream.
                    if not self._queue or self._queue[0] is not push or not self._state.start():
                        continue
                    self._queue.popleft()
                    more = bool(self._queue)  # what is added from here on has `pump` called again
                self._start(push, plan, self._aim)
                if not more:
                    return True
            except BaseException as error:
                # A question of the program may raise anything; only an exit goes on from here.
                self._failed(f"layer {push.layer} could not be pushed: {type(error).__name__}: {error}", error)
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                return True

    def _start(self, push: Push, plan: Plan, aim: Aim) -> None:
        target, group = aim.target, push.source.group
        place = WORD * (aim.row * len(target.layers) + target.layers[push.layer])
        word = pack_word(aim.generation, push.last - aim.slices[group].first, push.complete)
        try:
            parts = copies(plan, push.layer, self._context.placed[group], target.placed[group])
            batch = Batch.strided("write", parts)
            transfer = self._context.engine.submit(batch, signal=(target.words[place : place + WORD], word))
        except BaseException:
            self._state.release()
            raise
        self._transfers.append(transfer)
        if transfer.done():
            self._on_done(push, transfer)
        else:
            self._in_flight[push.layer] = plan.nbytes
            transfer.add_done_callback(partial(self._on_landing, push))

    def _has_room(self, push: Push, plan: Plan) -> bool:
        if not self._in_flight:
            return True
        if push.layer in self._in_flight:
            return False
        return has_room(self._in_flight.values(), plan.nbytes)

    def _plan_of(self, push: Push, aim: Aim) -> Plan:
        """Return the plan of a push: made once for all layers of the same blocks and tokens."""
        source, shares = push.source, aim.shares[push.layer]
        key = (source, push.first, push.last, id(shares))  # most layers have the same shares, which the aim keeps
        plan = self._plans.get(key)
        if plan is None:
            theirs = aim.slices[source.group]
            plan = self._plans[key] = Plan(
                self._context.views[source.group],
                aim.target.placed[source.group].view,
                BlockTable(source.ids, source.start),
                BlockTable(theirs.blocks, theirs.start),
                (push.first, push.last),
                shares,
            )
        return plan

    def _on_landing(self, push: Push, transfer: Transfer) -> None:
        del self._in_flight[push.layer]
        self._on_done(push, transfer)
        self.pump()

    def _on_done(self, push: Push, transfer: Transfer) -> None:
        if transfer.cancelled():
            self._failed(f"the transfer of layer {push.layer} was cancelled", None)
        elif (error := transfer.exception()) is not None:
            self._failed(f"the transfer of layer {push.layer} failed: {error}", error)
        elif self._state.land(push.layer, push.complete):
            self._landed()
