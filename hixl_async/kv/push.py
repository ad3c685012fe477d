"""The producer's side of a stream: layers are sent as soon as they are ready, and the consumer decides the outcome."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..engine.arguments import whole_number
from ..engine.started import Started
from ..engine.waiters import Waiters
from ..errors import (
    ClosedError,
    HixlError,
    InvalidArgumentError,
    PeerDownError,
    ProtocolError,
    RangeError,
    RemoteError,
    StreamError,
    TicketError,
    WaitTimeoutError,
)
from ..types import Ready
from .blocks import Blocks, LayerBlocks, lease_of
from .context import PoolContext
from .lease import Lease
from .protocol import WORD, Abort, End, Open, Outcome, Ticket, Verdict, check_reason, service
from .ready import predicate
from .sender import Sender
from .states import Phase, ProducerState

if TYPE_CHECKING:
    from ..engine.peer import Peer
    from ..engine.region import RemoteRegion

__all__ = ["Producer", "PushStream"]

#: The key of the producer's waiters.
END = "end"


class PushStream(Sealed, maker="pool.open_stream()"):
    """A stream of one request's layers into the consumer's blocks, made by ``pool.open_stream()``.

    Enter it as an async context manager, or await it to get the opened stream.  `push` is legal from any thread; everything
    else belongs to the engine's loop.  Leaving the context waits until all transfers are drained and the consumer has
    acknowledged the outcome; leaving it by an exception, or before all layers were pushed, aborts the stream.

    A stream that lacks layers is aborted with a ResourceWarning when the last reference to it is dropped.
    """

    __reduce__ = unpicklable("open one there, with a pool of its own")

    def __init__(self, producer: Producer, pool: object) -> None:
        self._producer = producer
        self._pool = pool  # keeps the pool open as long as the program can push from it

    def __repr__(self) -> str:
        state = self._producer.state
        end = state.outcome.verdict.value if state.outcome else "stopping" if state.stopping is not None else "open"
        return f"<PushStream {state.pushed} of {state.layers} layers to {self.peer.name!r}, {end}>"

    def __del__(self) -> None:
        producer = self._producer
        if producer.state.needs_pushes and producer.context.clean_up(
            producer.stop, "the producer lost its stream without closing it"
        ):
            message = f"{self!r} was never closed; use 'async with pool.open_stream(...) as out'"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    @property
    def ticket(self) -> Ticket:
        """The consumer's ticket."""
        return self._producer.ticket

    @property
    def peer(self) -> Peer:
        """The consumer."""
        return self._producer.peer

    @property
    def outcome(self) -> Outcome | None:
        """The way in which the stream ended, or None while it has not."""
        return self._producer.state.outcome

    def push(self, layer: int, source: LayerBlocks, *, ready: Ready = None) -> None:
        """Queue a layer to be sent, and return at once; legal from any thread.

        Layers are sent in the order of the calls, each once it is ready.  The source blocks stay reserved until the stream is
        drained, even if their `Blocks` are closed meanwhile.

        :param layer: the index of the layer; each is pushed once, in any order.
        :param source: ``blocks[layer]`` of blocks of this stream's pool.  If they are fewer than the consumer's blocks, they
            fill the first of these.
        :param ready: None (ready now), an event with ``query()`` (a device event; a torch event that was never recorded is not
            ready) or ``is_set()``, or a callable that returns True once the layer may be read.  It is called often, on the
            loop's thread, and must not block.
        :raises RangeError: if the layer does not exist, or there are more source blocks than the consumer has.
        :raises InvalidArgumentError: if `layer` is not a whole number or was pushed before, `source` is not that layer of
            blocks of this pool, or `ready` is of none of these kinds.
        :raises StreamAbortedError: if the stream was aborted.
        :raises PeerLostError: if the consumer was lost.
        :raises TransferTimeoutError: if the end of the stream took longer than its timeout.
        :raises ClosedError: if the stream was never opened, or the source blocks are closed.
        """
        self._producer.push(layer, source, ready)

    def abort(self, reason: str = "the producer aborted the stream") -> Coroutine[Any, Any, Outcome]:
        """Give the stream up at the call; no effect if it has ended.

        :param reason: the text for the errors of both sides.
        :return: an awaitable of the outcome, which the consumer has acknowledged.
        :raises InvalidArgumentError: if `reason` is not a string.
        :raises ClosedError: on awaiting, if the stream was never opened.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        check_reason(reason)
        self._producer.context.check_thread()
        self._producer.stop(reason)
        return Started(self._producer.ended)

    async def finished(self) -> None:
        """Wait until the stream has ended and is drained, and raise its error unless the consumer has all layers.

        :raises StreamAbortedError: if either side aborted it.
        :raises TicketError: if it could not be opened.
        :raises PeerLostError: if the consumer was lost.
        :raises TransferTimeoutError: if draining, or the consumer's answer, took longer than the timeout.
        :raises ClosedError: if the stream was never opened.
        """
        await self._producer.ended()
        self._producer.raise_failure()

    def aclose(self) -> Coroutine[Any, Any, None]:
        """End the stream at the call: abort it unless all layers were pushed.  Idempotent.

        :return: an awaitable that waits like `finished`, but raises nothing.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._producer.context.check_thread()
        self._producer.close()
        return Started(self._closed)

    async def _closed(self) -> None:
        if self._producer.state.phase is not Phase.NEW:
            await self._producer.ended()

    def __await__(self) -> Generator[Any, None, PushStream]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> PushStream:
        await self._producer.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._producer.stop(f"the producer failed: {type(error).__name__}: {error}")
        await self.aclose()
        if error is None:
            self._producer.raise_failure()


class OutgoingStreams(Protocol):
    """The streams of a pool that its peers' messages can find."""

    def add_outgoing(self, producer: Producer) -> None: ...
    def forget_outgoing(self, producer: Producer) -> None: ...


class Producer:
    """The producer's end of one stream, from its opening until nothing of it is in flight.

    It works until then, even if the program has lost its `PushStream`.

    :param context: the context of the producer's pool.
    :param peer: the consumer.
    :param ticket: the consumer's ticket.
    :param timeout: seconds for opening, and also for the end.
    :param streams: the registry in which the stream is known while messages for it may arrive.
    """

    def __init__(
        self, context: PoolContext, peer: Peer, ticket: Ticket, timeout: float, streams: OutgoingStreams
    ) -> None:
        self.context = context
        self.peer = peer
        self.ticket = ticket
        # The number of layers in the ticket is not trusted until `_check_claims`.
        self.state = ProducerState(context.layout.layers)
        self._streams = streams
        self._loop = context.loop
        self._timeout = timeout
        self._waiters = Waiters(self._loop)
        self._cause: BaseException | None = None
        self._lock = threading.Lock()  # guards the state that is shared with pushing threads
        self._sender = Sender(context, ticket, self.state, self._lock, self._advance, self._fail)

    # ---- calls of the program ----

    def push(self, layer: int, source: LayerBlocks, ready: Ready) -> None:
        """Queue a layer to be sent; see `PushStream.push`."""
        question, layer = predicate(ready), whole_number("layer", layer)
        with self._lock:
            self.state.check(layer)
            wake = self._sender.add(layer, self._check_source(layer, source), question)
            self.state.push(layer)
        if threading.get_ident() == self.context.thread:
            self._sender.pump()
        elif wake:
            try:
                self._loop.call_soon_threadsafe(self._sender.pump)
            except RuntimeError as error:
                raise ClosedError("the engine's event loop is closed") from error

    def _check_source(self, layer: int, source: LayerBlocks) -> Lease:
        if not isinstance(source, LayerBlocks) or not isinstance(source.blocks, Blocks):
            raise InvalidArgumentError(f"source must be blocks[{layer}] of reserved blocks, not {source!r}")
        if source.layer != layer:
            raise InvalidArgumentError(f"layer {layer} was pushed from the blocks of layer {source.layer}")
        lease, ours = lease_of(source), self.context
        if lease.context is not ours:
            raise InvalidArgumentError(f"the source blocks belong to pool {lease.context}, the stream to pool {ours}")
        if len(lease.ids) > len(self.ticket.blocks):
            raise RangeError(f"{len(lease.ids)} source blocks do not fit into the consumer's {len(self.ticket.blocks)}")
        return lease

    def stop(self, reason: str) -> None:
        """Give the stream up, if it has not ended."""
        self._change(self.state.stop, reason)

    def close(self) -> None:
        """Give the stream up unless all layers were pushed."""
        if self.state.phase is not Phase.NEW:
            self._change(self.state.close)

    async def ended(self) -> Outcome:
        """Wait until the stream has ended and is drained, or until its timeout has passed.

        :raises ClosedError: if the stream was never opened.
        """
        if self.state.phase is Phase.NEW:
            raise ClosedError("the stream was never opened")
        while not self.state.settled:
            await self._waiters.wait(END)
        assert self.state.outcome is not None
        return self.state.outcome

    def raise_failure(self) -> None:
        """Raise the error of the outcome, if the stream has failed."""
        assert self.state.outcome is not None
        if (error := self.state.outcome.error(self.peer)) is not None:
            raise error from self._cause

    # ---- opening ----

    async def open(self) -> None:
        """Ask the consumer to accept the ticket; ``Pool.open_stream`` lists the errors."""
        self.context.check_usable()
        self.state.begin()
        granted = False
        try:
            # Before the consumer is asked, because its abort may arrive before its reply has been read.
            self._streams.add_outgoing(self)
            self.peer.add_lost_callback(self._on_lost)
            async with asyncio.timeout(self._timeout):
                granted = True  # possibly: once the request is sent, its outcome is unknown until the reply
                try:
                    await self._ask()
                except StreamError:
                    granted = False
                    raise
                remote = await self.peer.region(self.ticket.pool)
                signals = await self.peer.region(self.ticket.signals)
                self._check_claims(remote, signals)
                self._sender.aim(remote, signals)
        except BaseException as error:
            if granted:
                # It follows the request on the same connection, and so is correct in both cases.
                with suppress(HixlError):
                    end = End(self.ticket.id, False, f"the producer could not open the stream: {type(error).__name__}")
                    self.peer.post(service(self.ticket.pool), end.body())
            self._change(self.state.answer, Outcome(Verdict.VOID, f"the stream could not be opened: {error}"))
            self._finish()
            if isinstance(error, TimeoutError) and not isinstance(error, HixlError):
                message = f"the stream did not open within {self._timeout:g} s"
                raise WaitTimeoutError(message, peer=self.peer.name) from None
            raise
        self.state.open()
        if self.state.concluding:  # aborted meanwhile
            self._advance()
            await self.ended()
            self.raise_failure()

    async def _ask(self) -> None:
        message = Open(self.ticket.id, self.ticket.digest(), self.context.name, self.context.layout.fields())
        try:
            await self.peer.request(service(self.ticket.pool), message.body(), timeout=self._timeout)
        except InvalidArgumentError:  # the peer does not serve this name
            raise TicketError("the pool of this ticket is closed", peer=self.peer.name) from None

    def _check_claims(self, remote: RemoteRegion, signals: RemoteRegion) -> None:
        layout, ticket = self.context.layout, self.ticket
        if ticket.layers != layout.layers:
            raise TicketError(
                f"the ticket names {ticket.layers} layers, but the layout has {layout.layers}", peer=self.peer.name
            )
        pool_bytes = layout.pool_bytes(ticket.pool_blocks)
        signal_bytes = ticket.pool_blocks * ticket.layers * WORD
        if remote.size != pool_bytes or signals.size != signal_bytes:
            raise TicketError(
                f"the ticket implies {pool_bytes} and {signal_bytes} bytes, but the regions {remote.name!r} "
                f"and {signals.name!r} have {remote.size} and {signals.size}",
                peer=self.peer.name,
            )

    # ---- events ----

    def on_abort(self, peer: Peer, message: Abort) -> None:
        """Handle the consumer's message that it gave up."""
        if peer is self.peer:
            self._change(self.state.abort, message.reason)

    def _on_lost(self, error: BaseException) -> None:
        self._cause = self._cause or error
        self._change(self.state.lose, str(error))

    def _fail(self, reason: str, cause: BaseException | None) -> None:
        self._cause = self._cause or cause
        self.stop(reason)

    def _change(self, change: Callable[..., bool], *arguments: Any) -> None:
        """Change the state, and act on the change."""
        with self._lock:
            stopped = change(*arguments)
        if stopped:
            self._sender.cancel()
        self._advance()

    def _advance(self) -> None:
        if self.state.conclude():
            self.context.spawn(self._conclude())
        if self.state.settled:
            self._waiters.wake(END)

    # ---- the end ----

    async def _conclude(self) -> None:
        """Wait until all transfers are drained, then ask the consumer for the outcome."""
        patience = self._loop.call_later(self._timeout, self._give_up)
        try:
            await self._sender.drained()
            if self.state.outcome is None or self.state.outcome.verdict is not Verdict.LOST:
                await self._say_end()
        finally:
            patience.cancel()
            if self.state.outcome is None:  # the pool no longer waits
                self._give_up()
            self._finish()

    async def _say_end(self) -> None:
        name, body = service(self.ticket.pool), self.state.end(self.ticket.id).body()
        try:
            if self.state.outcome is not None:  # the consumer gave up, or this side no longer waits
                self.peer.post(name, body)
                return
            answer = Outcome.parse(await self.peer.request(name, body, timeout=self._timeout))
        except (PeerDownError, ClosedError) as error:
            self._on_lost(error)
        except (ProtocolError, RemoteError, StreamError) as error:
            reason = f"the consumer did not accept the end of the stream: {error}"
            self._change(self.state.answer, Outcome(Verdict.ABORTED, reason))
        except (TimeoutError, HixlError):
            self._give_up()
        else:
            self._change(self.state.answer, answer)

    def _give_up(self) -> None:
        drained = self.state.drained
        what = "the consumer did not acknowledge the end" if drained else "the transfers were not drained"
        self._change(self.state.give_up, f"{what} within {self._timeout:g} s")

    def _finish(self) -> None:
        self.peer.remove_lost_callback(self._on_lost)
        self._streams.forget_outgoing(self)
        self.state.finish()
        self._advance()
