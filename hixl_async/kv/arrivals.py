"""The layers that arrive in a pool's blocks, whoever moves them, and the program's questions about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..engine.arguments import whole_number
from ..engine.waiters import Waiters
from ..errors import ClosedError, RangeError
from .context import PoolContext
from .outcome import Outcome, Verdict
from .states import FINISHED, ConsumerState
from .ticket import Slice

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = ["ANY_LAYER", "END", "FENCE", "OUTCOME", "Arrivals"]

#: Keys of the waiters, beside the numbers of layers.
ANY_LAYER, OUTCOME, FENCE, END = "any layer", "outcome", "fence", "end"


class Arrivals(ABC):
    """The end of one stream at the blocks that it fills, until nobody can write them any more.

    It works until then, even if the program has lost the blocks and their `LayerStream`.

    :param context: the context of the pool.
    :param state: what has landed.
    :param slices: the blocks to be filled, of each group.
    """

    def __init__(self, context: PoolContext, state: ConsumerState, slices: Sequence[Slice]) -> None:
        self.layers = tuple(context.groups)
        self.state = state
        self.waiters = Waiters(context.loop)
        self._context = context
        self._slices = tuple(slices)

    # ---- what the program asks ----

    @abstractmethod
    def ticket_body(self) -> dict[str, Any]:
        """Return the ticket as a dict; see `LayerStream.ticket`."""

    def check_layer(self, layer: object) -> int:
        """Return the number of a layer that the stream brings.

        :raises RangeError: if it brings no such layer.
        :raises InvalidArgumentError: if it is not a whole number.
        """
        number = whole_number("layer", layer)
        if not self.state.has(number):
            raise RangeError(f"layer {number} does not exist: the stream brings {self._context.described_layers}")
        return number

    def position(self, layer: int) -> int:
        """Return the position in the sequence before which all tokens of a layer have landed."""
        return self._slices[self._context.groups[layer]].first + self.state.tokens(layer)

    def has(self, layer: object, tokens: object) -> bool:
        """Return True if the layer has landed, so far as it is needed; see `LayerStream.check`."""
        number = self.check_layer(layer)
        complete = self.state.is_complete(number)
        if tokens is None:
            return complete
        wanted, last = whole_number("tokens", tokens), self._slices[self._context.groups[number]].last
        if wanted > last:
            raise RangeError(f"the stream brings the tokens of layer {number} up to {last}, not up to {wanted}")
        return complete or self.position(number) >= wanted

    def raise_failure(self) -> None:
        """Raise the error of the outcome, if the stream has failed."""
        outcome = self.state.outcome
        if outcome is not None and (error := outcome.error(self._lost_peer())) is not None:
            raise error

    @abstractmethod
    def _lost_peer(self) -> Peer | None:
        """Return the peer that an error names: one that was lost, or any."""

    def check_thread(self) -> None:
        """Return if the caller is on the thread of the engine's event loop; see `PoolContext.check_thread`."""
        self._context.check_thread()

    def abort(self, reason: str) -> None:
        """Abort the stream, if it has not ended."""
        self._end_by(Outcome(Verdict.ABORTED, reason))

    def leave(self, reason: str) -> None:
        """End the stream, if it has not ended: abort it unless all layers have landed."""
        self._look()
        self._end_by(FINISHED if self.state.landed else Outcome(Verdict.ABORTED, reason))

    async def drained(self) -> None:
        """Wait until nothing can write the blocks.

        :raises ClosedError: if the pool is closed first.
        """
        while not self.state.fenced:
            if self.state.ended and self._context.closed:
                raise ClosedError("the pool was closed before the producer could no longer write the blocks")
            await self.waiters.wait(FENCE)

    @abstractmethod
    async def ended(self) -> None:
        """Wait until no more messages of the other side can arrive."""

    def cut(self) -> None:
        """End the wait for messages of the other side, because the pool closes."""
        self.state.cut()
        self._settle()
        self.waiters.wake(FENCE)

    # ---- events ----

    @abstractmethod
    def _look(self) -> None:
        """Take note of what has landed, where no event says so."""

    def _end_by(self, outcome: Outcome) -> None:
        """End the stream from this side, if it has not ended."""
        self._look()
        self.state.stop(outcome)
        self._settle()

    @abstractmethod
    def _settle(self) -> None:
        """Act on the state; idempotent."""
