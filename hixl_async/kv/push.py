"""The producer's side of a stream: layers leave as soon as they are ready, and the consumer says how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..engine.arguments import whole_number
from ..errors import (
    ClosedError,
    HixlError,
    InvalidArgumentError,
    PeerDownError,
    ProtocolError,
    RangeError,
    StreamError,
    TicketError,
    WaitTimeoutError,
)
from ..types import Ready
from .blocks import Blocks, LayerBlocks
from .flights import Flights
from .protocol import WORD, Abort, End, Open, Outcome, Ticket, Verdict, check_reason, service
from .ready import predicate
from .states import ProducerState
from .waiting import Waiters

if TYPE_CHECKING:
    from .. import Peer, RemoteRegion
    from .pool import Pool

__all__ = ["PushStream"]


class PushStream:
    """The way of one request's layers into the consumer's blocks; an async context manager, or awaitable for itself.

    Made by ``pool.open_stream()``.  `push` is legal from any thread; everything else belongs to the engine's loop.
    Leaving the context waits until all flights are drained and the consumer has acknowledged the outcome; leaving it by
    an exception, or before all layers were pushed, aborts the stream.
    """

    def __init__(self, pool: Pool, peer: Peer, ticket: Ticket, timeout: float) -> None:
        self.ticket = ticket
        self.peer = peer
        self._pool = pool
        self._loop = pool.engine.loop
        self._loop_thread = threading.get_ident()
        self._timeout = timeout
        self._waiters = Waiters(self._loop)
        self._cause: BaseException | None = None
        self._conclusion: asyncio.Task[None] | None = None
        self._begun = self._opened = False
        self._stopped = self._drained = self._gave_up = False
        # Shared with the threads that push.
        self._lock = threading.Lock()
        # Not as many layers as the ticket says: that is somebody's word until `_check_claims`.
        self._state = ProducerState(pool.layout.layers)
        self._flights = Flights(pool, ticket, self._state, self._lock, self._advance, self._fail)

    def __repr__(self) -> str:
        state = self._state
        end = state.outcome.verdict.value if state.outcome else "stopping" if state.stopping is not None else "open"
        return f"<PushStream {state.pushed} of {state.layers} layers to {self.peer.name!r}, {end}>"

    @property
    def outcome(self) -> Outcome | None:
        """How the stream ended, or None while it has not."""
        return self._state.outcome

    # ---- the user's calls ----

    def push(self, layer: int, source: LayerBlocks, *, ready: Ready = None) -> None:
        """Hands a layer over; returns at once, from any thread.

        Layers leave in the order of the calls, each when its mark says so.  The source blocks stay reserved until the
        stream is drained, even if their `Blocks` are closed meanwhile.

        :param layer: index of the layer; each is pushed once, in any order.
        :param source: ``blocks[layer]`` of blocks of this stream's pool.  They may be fewer than the consumer's blocks,
            of which they fill the first ones.
        :param ready: None (now), an event with ``query()`` (a device event; one of torch's that was never recorded is not
            ready) or ``is_set()``, or a callable that answers whether the layer may be read.  It is called on the loop,
            often, and must not block.
        :raises RangeError: if the layer does not exist, or there are more source blocks than the consumer has.
        :raises InvalidArgumentError: if the layer is no whole number or was pushed before, or `source` is not that layer
            of blocks of this pool.
        :raises StreamAbortedError: if the stream was aborted; likewise `PeerLostError` and `TransferTimeoutError`.
        :raises ClosedError: if the stream, or the source blocks, are closed.
        """
        question, layer = predicate(ready), whole_number("layer", layer)
        with self._lock:
            if not self._opened:
                raise ClosedError("the stream is not open: enter it with `async with`, or await it, before pushing")
            self._state.check(layer)
            wake = self._flights.add(layer, self._check_source(layer, source), question)
            self._state.push(layer)
        if threading.get_ident() == self._loop_thread:
            self._flights.pump()
        elif wake:
            try:
                self._loop.call_soon_threadsafe(self._flights.pump)
            except RuntimeError as error:
                raise ClosedError("the engine's event loop is closed") from error

    async def abort(self, reason: str = "the producer aborted the stream") -> Outcome:
        """Gives the stream up; no effect if it has ended.  Answers the outcome, which the consumer has acknowledged.

        :raises InvalidArgumentError: if `reason` is no string.
        """
        check_reason(reason)
        self._stop(reason)
        await self._ended()
        assert self._state.outcome is not None
        return self._state.outcome

    async def finished(self) -> None:
        """Waits until the stream has ended and is drained; returns if the consumer has all layers.

        :raises StreamAbortedError: if either side aborted it.
        :raises TicketError: if it could not be opened.
        :raises PeerLostError: if the consumer was lost.
        :raises TransferTimeoutError: if draining, or the consumer's answer, took longer than the timeout.
        """
        await self._ended()
        self._raise_failure()

    async def aclose(self) -> None:
        """Ends the stream: aborts it unless all layers were pushed, and waits like `finished`, but raises nothing."""
        if self._begun:
            self._close()
            await self._ended()

    def __await__(self) -> Generator[Any, None, PushStream]:
        return self._open().__await__()

    async def __aenter__(self) -> PushStream:
        return await self._open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stop(f"the producer failed: {type(error).__name__}: {error}")
        self._close()
        await self._ended()
        if error is None:
            self._raise_failure()

    # ---- opening ----

    async def _open(self) -> PushStream:
        if self._begun:
            raise ClosedError("a stream is opened once")
        self._begun = True
        # Known here before the consumer knows: its abort may be on the way before our request has returned.
        self._pool._check_usable()
        self._pool._exchange.add_outgoing(self)
        self.peer.add_lost_callback(self._on_lost)
        granted = False
        try:
            async with asyncio.timeout(self._timeout):
                granted = True  # perhaps: once the request has left, its fate is unknown until it is answered
                try:
                    await self._ask()
                except StreamError:
                    granted = False
                    raise
                remote = await self.peer.region(self.ticket.pool)
                signals = await self.peer.region(self.ticket.signals)
                self._check_claims(remote, signals)
                self._flights.remote, self._flights.signals = remote, signals
        except BaseException as error:
            if granted:
                # Follows the request on the same connection, so that it is right in either case.
                with suppress(HixlError):
                    end = End(self.ticket.id, False, f"the producer could not open the stream: {type(error).__name__}")
                    self.peer.post(service(self.ticket.pool), end.body())
            with self._lock:
                self._state.answer(Outcome(Verdict.VOID, f"the stream could not be opened: {error}"))
            self._drained = True
            self._forget()
            self._advance()
            if isinstance(error, TimeoutError) and not isinstance(error, HixlError):
                message = f"the stream did not open within {self._timeout:g} s"
                raise WaitTimeoutError(message, peer=self.peer.name) from None
            raise
        self._opened = True
        if self._state.concluding:  # aborted meanwhile
            self._advance()
            await self._ended()
            self._raise_failure()
        return self

    async def _ask(self) -> None:
        message = Open(self.ticket.id, self.ticket.generation, self._pool.name, self._pool.layout.fields())
        try:
            await self.peer.request(service(self.ticket.pool), message.body(), timeout=self._timeout)
        except InvalidArgumentError:  # nobody serves that name
            raise TicketError("the pool of this ticket is closed", peer=self.peer.name) from None

    def _check_claims(self, remote: RemoteRegion, signals: RemoteRegion) -> None:
        if self.ticket.layers != self._pool.layout.layers:
            raise TicketError(
                f"the ticket speaks of {self.ticket.layers} layers, but the layout has {self._pool.layout.layers}",
                peer=self.peer.name,
            )
        pool_bytes = self._pool.layout.pool_bytes(self.ticket.pool_blocks)
        signal_bytes = self.ticket.pool_blocks * self.ticket.layers * WORD
        if remote.size != pool_bytes or signals.size != signal_bytes:
            raise TicketError(
                f"the ticket speaks of {pool_bytes} and {signal_bytes} bytes, but the regions {remote.name!r} "
                f"and {signals.name!r} have {remote.size} and {signals.size}",
                peer=self.peer.name,
            )

    def _check_source(self, layer: int, source: LayerBlocks) -> Blocks:
        if not isinstance(source, LayerBlocks):
            raise InvalidArgumentError(
                f"source must be blocks[{layer}] of reserved blocks, not {type(source).__name__}"
            )
        if source.layer != layer:
            raise InvalidArgumentError(f"layer {layer} was pushed from the blocks of layer {source.layer}")
        if source.blocks.pool is not self._pool:
            raise InvalidArgumentError(
                f"the source blocks belong to pool {source.blocks.pool.name!r}, the stream to pool {self._pool.name!r}"
            )
        if len(source.blocks.ids) > len(self.ticket.blocks):
            raise RangeError(
                f"{len(source.blocks.ids)} source blocks do not fit into the consumer's {len(self.ticket.blocks)}"
            )
        return source.blocks

    # ---- events ----

    def _on_abort(self, peer: Peer, message: Abort) -> None:
        if peer is self.peer:
            with self._lock:
                self._state.abort(message.reason)
            self._advance()

    def _on_lost(self, error: BaseException) -> None:
        with self._lock:
            self._state.lose(str(error))
        self._cause = self._cause or error
        self._advance()

    def _fail(self, reason: str, cause: BaseException | None) -> None:
        self._cause = self._cause or cause
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        with self._lock:
            self._state.stop(reason)
        self._advance()

    def _close(self) -> None:
        pushed, layers = self._state.pushed, self._state.layers
        if pushed < layers:
            self._stop(f"the producer closed the stream after {pushed} of {layers} layers")
        with self._lock:
            self._state.closed = True

    # ---- the end ----

    def _advance(self) -> None:
        """Draws the consequences of the state; idempotent."""
        state = self._state
        if state.stopping is not None and not self._stopped:
            self._stopped = True
            self._flights.cancel()
        # While opening, `_open` itself comes here once the consumer has answered.
        if state.concluding and self._conclusion is None and self._opened:
            self._conclusion = self._pool._spawn(self._conclude())
        if state.outcome is not None:
            self._waiters.wake_all()

    async def _conclude(self) -> None:
        """Waits until nothing flies, then tells the consumer, which says how the stream ended."""
        patience = self._loop.call_later(self._timeout, self._give_up)
        try:
            await self._flights.drained()
            if self._state.outcome is None or self._state.outcome.verdict is not Verdict.LOST:
                await self._say_end()
        finally:
            patience.cancel()
            if self._state.outcome is None:  # the pool waits no longer
                self._give_up()
            self._drained = True
            self._forget()
            self._advance()

    async def _say_end(self) -> None:
        name, body = service(self.ticket.pool), self._state.end(self.ticket.id).body()
        try:
            if self._state.outcome is not None:  # the consumer's decision, or ours not to wait for it
                self.peer.post(name, body)
                return
            answer = Outcome.parse(await self.peer.request(name, body, timeout=self._timeout))
        except (PeerDownError, ClosedError) as error:
            self._on_lost(error)
        except (ProtocolError, StreamError) as error:
            self._conclude_by(Outcome(Verdict.ABORTED, f"the consumer did not accept the end of the stream: {error}"))
        except (TimeoutError, HixlError):
            self._give_up()
        else:
            self._conclude_by(answer)

    def _conclude_by(self, outcome: Outcome) -> None:
        with self._lock:
            self._state.answer(outcome)

    def _give_up(self) -> None:
        self._gave_up = True
        what = "the flights were not drained" if not self._state.drained else "the consumer did not acknowledge the end"
        with self._lock:
            self._state.give_up(f"{what} within {self._timeout:g} s")
        self._advance()

    async def _ended(self) -> None:
        if not self._begun:
            raise ClosedError("the stream was never opened")
        while self._state.outcome is None or not (self._drained or self._gave_up):
            await self._waiters.wait("end")

    def _raise_failure(self) -> None:
        assert self._state.outcome is not None
        if (error := self._state.outcome.error(self.peer)) is not None:
            raise error from self._cause

    def _forget(self) -> None:
        self.peer.remove_lost_callback(self._on_lost)
        self._pool._exchange.forget_outgoing(self)
