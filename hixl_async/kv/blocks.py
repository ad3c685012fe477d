"""Reserved blocks of a pool, and when they may return to it."""

from __future__ import annotations

import warnings
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..engine.arguments import whole_number
from ..engine.started import Started, already_over
from ..errors import InvalidArgumentError, RangeError
from .loan import Loan

if TYPE_CHECKING:
    from ..engine.peer import Peer
    from .arrivals import Arrivals
    from .offer import Offer
    from .shapes import Shard
    from .stream import LayerStream

__all__ = ["Blocks", "adopt", "loan_of"]


class BlockLender(Protocol):
    """The pool that lent some blocks."""

    async def take(self, count: int, priority: int) -> tuple[int, ...]: ...
    def take_now(self, count: int, priority: int) -> tuple[int, ...]: ...
    def loan(self, ids: tuple[int, ...], group: int, start: int) -> Loan: ...
    def share(self, ids: tuple[int, ...], group: int, start: int) -> Loan: ...
    def instead(self, loan: Loan, ids: tuple[int, ...]) -> Loan: ...
    def give(self, ids: tuple[int, ...]) -> None: ...


class BlockStreams(Protocol):
    """The pool by which its blocks make streams."""

    def stream(
        self,
        blocks: Sequence[Blocks],
        *,
        tokens: Sequence[tuple[int, int]] | None,
        sources: Sequence[Shard] | None,
        ttl: float | None,
        lease: float | None,
        timeout: float | None,
    ) -> LayerStream: ...
    def pull(
        self,
        blocks: Sequence[Blocks],
        sources: Sequence[tuple[Peer, dict[str, Any]]],
        *,
        tokens: Sequence[tuple[int, int]] | None,
        timeout: float | None,
    ) -> LayerStream: ...
    def offer(
        self,
        blocks: Sequence[Blocks],
        *,
        tokens: Sequence[tuple[int, int]] | None,
        readers: int,
        ttl: float | None,
        lease: float | None,
        timeout: float | None,
    ) -> Offer: ...


class Blocks(Sealed, maker="pool.reserve()"):
    """References to blocks of a pool, made by ``pool.reserve()``; an async context manager.

    As a target, `stream` makes the ticket that producers need, and reports the layers that have landed.  As a source, they are
    what ``push`` takes.  ``blocks[2:5]``, ``blocks + others`` and `share` make further references to the same blocks; a block
    returns to the pool when all references were closed.

    Closing never waits for a peer: blocks that a peer could still write, or that a push still reads, are quarantined and
    return to the pool when that is over.  Blocks are closed with a ResourceWarning when the last reference to them and to their
    streams is dropped.
    """

    __reduce__ = unpicklable("send stream.ticket(), with which the other process fills them")

    def __init__(self, loan: Loan, lender: BlockLender, streams: BlockStreams) -> None:
        self._loan = loan
        self._lender = lender
        self._streams = streams
        self._arrivals: list[Arrivals] = []  # of streams that may not have ended

    def __repr__(self) -> str:
        state = "closed" if self._loan.closed else "reserved"
        return f"<Blocks {len(self.ids)} of pool {self._loan.context.name!r}, {state}>"

    def __del__(self) -> None:
        loan = self._loan
        if loan.closed or not loan.context.clean_up(
            _give_back, loan, self._arrivals, "the consumer lost its blocks without closing them"
        ):
            return
        ids = ", ".join(map(str, self.ids[:8])) + (", ..." if len(self.ids) > 8 else "")
        message = f"{self!r} (ids {ids}) was never closed; use 'async with pool.reserve(...) as blocks'"
        warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    @property
    def ids(self) -> tuple[int, ...]:
        """The block ids, in the order of the tokens."""
        return self._loan.ids

    @property
    def group(self) -> int:
        """The index of the pool's view that they belong to."""
        return self._loan.group

    @property
    def start(self) -> int:
        """The position in the sequence of the first token of the first block."""
        return self._loan.start

    @property
    def tokens(self) -> int:
        """The number of tokens that they can hold."""
        return len(self.ids) * self._block_tokens

    @property
    def _block_tokens(self) -> int:
        return self._loan.context.views[self.group].block_tokens

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.ids)

    # ---- further references ----

    def __getitem__(self, part: slice) -> Blocks:
        """Return references to some of these blocks, to be closed by the caller.

        :param part: a slice that counts blocks.
        :raises InvalidArgumentError: if `part` is not a slice of whole numbers with step 1.
        :raises RangeError: if it names no block.
        :raises BusyError: if a peer may be writing one of the blocks.
        :raises ClosedError: if the blocks were given back.
        """
        self._check_usable()
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise InvalidArgumentError(f"part must be a slice of blocks, such as blocks[2:5], not {part!r}")
        try:
            first, last, _ = part.indices(len(self.ids))
        except TypeError as error:
            raise InvalidArgumentError(f"part must be a slice of whole numbers, not {part!r}") from error
        if first >= last:
            raise RangeError(f"{part!r} names none of {len(self.ids)} blocks")
        start = self.start + first * self._block_tokens
        return self._with(self._lender.share(self.ids[first:last], self.group, start))

    def __add__(self, other: Blocks) -> Blocks:
        """Return references to these blocks and then to those of `other`, to be closed by the caller.

        :param other: other blocks of the pool and the group.
        :raises InvalidArgumentError: if `other` is not of the same pool and group, or has a block that is here already.
        :raises BusyError: if a peer may be writing one of the blocks.
        :raises ClosedError: if blocks were given back.
        """
        if not isinstance(other, Blocks):
            return NotImplemented
        self._check_usable()
        other._check_usable()
        if (other._loan.context, other.group) != (self._loan.context, self.group):
            raise InvalidArgumentError("other must be blocks of the same pool and the same group")
        if common := set(self.ids) & set(other.ids):
            raise InvalidArgumentError(
                f"block {min(common)} is in both; a block holds tokens of one place of a sequence"
            )
        return self._with(self._lender.share(self.ids + other.ids, self.group, self.start))

    def share(self) -> Blocks:
        """Return further references to the same blocks, to be closed by the caller.

        :raises BusyError: if a peer may be writing one of the blocks.
        :raises ClosedError: if the blocks were given back.
        """
        return self[:]

    def _with(self, loan: Loan) -> Blocks:
        return Blocks(loan, self._lender, self._streams)

    # ---- growing and shrinking ----

    async def extend(self, *, tokens: int | None = None, blocks: int | None = None, priority: int = 0) -> None:
        """Reserve further blocks behind these, until they hold so many tokens in all; no effect if they do.

        Tasks that extend blocks while they hold others can wait for each other without end; where that is possible, use
        `extend_nowait`, and give up blocks if it raises.

        :param tokens: the number of tokens in all.
        :param blocks: the number of blocks in all.
        :param priority: as for ``pool.reserve()``.
        :raises InvalidArgumentError: if not exactly one of `tokens` and `blocks` is given, or a number is malformed.
        :raises RangeError: if the pool is smaller than that.
        :raises ClosedError: if the blocks or the pool are closed, at the call or while waiting.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        count, priority = self._count(tokens, blocks), whole_number("priority", priority)
        while (more := count - len(self.ids)) > 0:
            ids = await self._lender.take(more, priority)
            # Other tasks may have closed, extended or trimmed them meanwhile.
            needed = 0 if self._loan.closed else max(0, count - len(self.ids))
            self._lender.give(ids[needed:])
            self._loan.check_open()
            self._loan = self._lender.instead(self._loan, self.ids + ids[:needed])

    def extend_nowait(self, *, tokens: int | None = None, blocks: int | None = None, priority: int = 0) -> None:
        """Reserve further blocks like `extend`, but raise where that would have to wait.

        :param tokens: the number of tokens in all.
        :param blocks: the number of blocks in all.
        :param priority: as for ``pool.reserve()``.
        :raises BusyError: if too few blocks are free, or other requests go first.
        :raises InvalidArgumentError: like `extend`; likewise RangeError, ClosedError and WrongLoopError.
        """
        more = self._count(tokens, blocks) - len(self.ids)
        priority = whole_number("priority", priority)
        if more > 0:
            self._loan = self._lender.instead(self._loan, self.ids + self._lender.take_now(more, priority))

    def trim(self, *, tokens: int | None = None, blocks: int | None = None) -> None:
        """Give the last blocks back, so that just enough for so many tokens remain; no effect if there are no more.

        :param tokens: the number of tokens that remain.
        :param blocks: the number of blocks that remain.
        :raises InvalidArgumentError: if not exactly one of `tokens` and `blocks` is given, or it is not a positive integer.
        :raises ClosedError: if the blocks or the pool are closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        count = self._count(tokens, blocks)
        if count < len(self.ids):
            self._loan = self._lender.instead(self._loan, self.ids[:count])

    def _count(self, tokens: int | None, blocks: int | None) -> int:
        self._check_usable()
        return self._loan.context.blocks_for(self.group, tokens, blocks)

    def _check_usable(self) -> None:
        self._loan.context.check_usable()
        self._loan.check_open()

    # ---- as a target ----

    def stream(
        self,
        *,
        tokens: tuple[int, int] | None = None,
        sources: Sequence[Shard] | None = None,
        ttl: float | None = None,
        lease: float | None = None,
        timeout: float | None = None,
    ) -> LayerStream:
        """Let producers fill these blocks once, and return the stream of the layers that land.

        :param tokens: the position in the sequence of the first token to be brought, and the one after the last; default: all
            that the blocks can hold.
        :param sources: what each producer holds, if there are several; `shards` computes it.  Default: there is one, which may
            be anyone that holds all that this pool needs.
        :param ttl: seconds within which a producer has to open the ticket; default 60.
        :param lease: seconds without hearing of a producer after which the open stream fails; default 10.
        :param timeout: seconds from now after which the stream fails, whatever its progress; default: no limit.
        :return: the stream; its ``ticket()`` is what the producers need.
        :raises InvalidArgumentError: if an argument is malformed.
        :raises RangeError: if the blocks do not hold the tokens.
        :raises LayoutMismatchError: if the sources do not hold all that this pool needs.
        :raises BusyError: if a peer may be writing one of the blocks already, one is shared with other Blocks, or too many
            streams of the pool are not drained.
        :raises AccessError: if the pool's ``access`` does not let peers write.
        :raises ClosedError: if the blocks or the pool are closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        only = None if tokens is None else [tokens]
        return self._streams.stream([self], tokens=only, sources=sources, ttl=ttl, lease=lease, timeout=timeout)

    def pull(
        self,
        peer: Peer,
        ticket: dict[str, Any],
        *,
        tokens: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> LayerStream:
        """Fill these blocks with those that a peer offers, and return the stream of the layers that land.

        The layers are read as the owner publishes them; its processor has no part in that.

        :param peer: the owner, a connected peer of the pool's engine.
        :param ticket: the dict that the owner's ``offer.ticket()`` returned.
        :param tokens: the position in the sequence of the first token to be read, and the one after the last; default: all that
            the blocks can hold.
        :param timeout: seconds from now after which the stream fails, whatever its progress; default: no limit.
        :return: the stream; its errors are those of a stream that producers fill, and `LeaseExpiredError` if the owner did not
            keep its blocks until they were read.
        :raises TicketError: if the ticket is malformed, is not one of an offer, or was issued by another engine or an earlier
            incarnation of it.
        :raises LayoutMismatchError: if the owner does not hold all that this pool needs.
        :raises InvalidArgumentError: if an argument is malformed.
        :raises RangeError: if the blocks do not hold the tokens.
        :raises BusyError: if something may be writing one of the blocks already, or one is shared with other Blocks.
        :raises ClosedError: if the blocks or the pool are closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        return self._streams.pull(
            [self], [(peer, ticket)], tokens=None if tokens is None else [tokens], timeout=timeout
        )

    # ---- as a source ----

    def offer(
        self,
        *,
        tokens: tuple[int, int] | None = None,
        readers: int = 1,
        ttl: float | None = None,
        lease: float | None = None,
        timeout: float | None = None,
    ) -> Offer:
        """Let other pools read these blocks, each once.

        The offer keeps the blocks until no reader needs them, even if they are closed meanwhile.

        :param tokens: the position in the sequence of the first token that is offered, and the one after the last; default: all
            that the blocks can hold.
        :param readers: the number of pools that will read them.
        :param ttl: seconds within which all readers have to use the ticket; default 60.
        :param lease: seconds without hearing of a reader after which it loses its claim to the blocks; default 10.
        :param timeout: seconds from now after which the offer fails, whatever its progress; default: no limit.
        :return: the offer; its ``ticket()`` is what the readers need.
        :raises InvalidArgumentError: if an argument is malformed.
        :raises RangeError: if the blocks do not hold the tokens.
        :raises BusyError: if a stream may be writing one of the blocks.
        :raises AccessError: if the pool's ``access`` does not let peers read.
        :raises ClosedError: if the blocks or the pool are closed.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        only = None if tokens is None else [tokens]
        return self._streams.offer([self], tokens=only, readers=readers, ttl=ttl, lease=lease, timeout=timeout)

    # ---- life ----

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Give the blocks back at the call, and abort streams that lack layers.  Idempotent.

        :return: an awaitable, for uniformity with other resources; it is done at once, because closing never waits for a peer.
        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        self._loan.context.check_thread()
        _give_back(self._loan, self._arrivals, "the consumer gave its blocks back")
        return Started(already_over)

    async def __aenter__(self) -> Blocks:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _give_back(loan: Loan, arrivals: list[Arrivals], reason: str) -> None:
    if not loan.closed:
        for stream in arrivals:
            stream.leave(reason)
    loan.close()


def loan_of(blocks: Blocks) -> Loan:
    """Return the loan behind blocks; for the streams."""
    return blocks._loan


def adopt(blocks: Blocks, arrivals: Arrivals) -> None:
    """Remember a stream into blocks, which ends with them; for the pool."""
    blocks._arrivals = [other for other in blocks._arrivals if other.state.outcome is None]
    blocks._arrivals.append(arrivals)
