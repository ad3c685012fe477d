"""The grant of blocks to peers, and their use for reads: streams and offers are made of what the program asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..engine.arguments import positive_number, positive_seconds
from ..errors import InvalidArgumentError, LayoutMismatchError, RangeError, TicketError
from .blocks import Blocks, adopt, loan_of
from .consumer import Times
from .context import PoolContext
from .offering import Offering
from .positions import check_positions
from .reader import Source
from .registry import StreamRegistry
from .reshard import owed
from .shapes import Shard
from .stream import LayerStream
from .ticket import Slice, Ticket
from .words import LAYER_TOKENS

if TYPE_CHECKING:
    from ..engine.peer import Peer

__all__ = ["grant", "offer", "pull"]

#: The ttl, the lease and the timeout of a stream in seconds; None: the default.
Limits: TypeAlias = tuple[float | None, float | None, float | None]

#: The default seconds until a ticket must be opened, and for which a producer that has opened it may be silent.
TTL, LEASE = 60.0, 10.0


def grant(
    context: PoolContext,
    registry: StreamRegistry,
    blocks: Sequence[Blocks],
    tokens: Sequence[tuple[int, int]] | None,
    sources: Sequence[Shard] | None,
    limits: Limits,
) -> LayerStream:
    """Let producers fill blocks once, and return the stream of the layers that land; see ``Pool.stream``."""
    slices = _slices(context, blocks, tokens)
    senders = tuple(sources or ())
    if not all(isinstance(shard, Shard) for shard in senders) or len(set(senders)) < len(senders):
        raise InvalidArgumentError("sources must be different hixl_async.kv.Shard")
    consumer = registry.grant([loan_of(one) for one in blocks], slices, senders, _times(limits))
    for one in blocks:
        adopt(one, consumer)
    return LayerStream(consumer, blocks)


def offer(
    context: PoolContext,
    registry: StreamRegistry,
    blocks: Sequence[Blocks],
    tokens: Sequence[tuple[int, int]] | None,
    readers: int,
    limits: Limits,
) -> Offering:
    """Let peers read blocks; see ``Pool.offer``."""
    slices = _slices(context, blocks, tokens)
    return registry.offer([loan_of(one) for one in blocks], slices, positive_number("readers", readers), _times(limits))


def pull(
    context: PoolContext,
    registry: StreamRegistry,
    blocks: Sequence[Blocks],
    sources: Sequence[tuple[Peer, dict[str, Any]]],
    tokens: Sequence[tuple[int, int]] | None,
    timeout: float | None,
) -> LayerStream:
    """Fill blocks from those that peers offer; see ``Pool.pull``."""
    slices = _slices(context, blocks, tokens)
    seconds = None if timeout is None else positive_seconds("timeout", timeout)
    peers, tickets = [peer for peer, _ in sources], [Ticket.parse(ticket) for _, ticket in sources]
    if not tickets:
        raise InvalidArgumentError("sources must have at least one peer and ticket")
    for peer, ticket in zip(peers, tickets, strict=True):
        if ticket.verb != "read":
            raise TicketError("this ticket lets blocks be written, not read; use it with pool.open_stream(...)")
        if ticket.incarnation != peer.identity.incarnation:
            raise TicketError(
                f"the ticket was issued by engine {ticket.engine!r}, which is not, or no longer, peer {peer.name!r}",
                peer=peer.name,
            )
        if len(ticket.slices) != len(context.views):
            raise LayoutMismatchError(
                f"the owner's cache has {len(ticket.slices)} groups of layers and this pool {len(context.views)}",
                peer=peer.name,
            )
    shares = owed([ticket.sources[0] for ticket in tickets], context.views)
    reader = registry.pull(
        [loan_of(one) for one in blocks],
        slices,
        [Source(*source) for source in zip(peers, tickets, shares, strict=True)],
        seconds,
    )
    for one in blocks:
        adopt(one, reader)
    return LayerStream(reader, blocks)


def _times(limits: Limits) -> Times:
    ttl, lease, timeout = limits
    return Times(
        TTL if ttl is None else positive_seconds("ttl", ttl),
        LEASE if lease is None else positive_seconds("lease", lease),
        None if timeout is None else positive_seconds("timeout", timeout),
    )


def _slices(context: PoolContext, blocks: Sequence[Blocks], tokens: Sequence[tuple[int, int]] | None) -> list[Slice]:
    """Return the blocks of each group that hold some tokens; default: all that they can hold."""
    blocks = list(blocks)
    if not all(isinstance(one, Blocks) and loan_of(one).context is context for one in blocks):
        raise InvalidArgumentError("blocks must be Blocks of this pool")
    if [one.group for one in blocks] != list(range(len(context.views))):
        raise InvalidArgumentError(
            f"a stream fills blocks of each of the pool's {len(context.views)} groups, in order; use pool.stream([...]), or "
            "likewise pool.offer and pool.pull"
        )
    if tokens is not None and len(tokens) != len(blocks):
        raise InvalidArgumentError("tokens must have a pair of positions for each group")
    return [
        _slice(context, one, (one.start, one.start + one.tokens) if tokens is None else check_positions(tokens[group]))
        for group, one in enumerate(blocks)
    ]


def _slice(context: PoolContext, blocks: Blocks, tokens: tuple[int, int]) -> Slice:
    """Return the blocks that hold some tokens."""
    loan_of(blocks).check_open()
    (first, last), size = tokens, context.views[blocks.group].block_tokens
    if first < blocks.start or last > blocks.start + blocks.tokens:
        raise RangeError(
            f"the blocks hold the tokens {blocks.start} to {blocks.start + blocks.tokens}, not {first} to {last}"
        )
    if last - first > LAYER_TOKENS:
        raise RangeError(f"a stream brings at most {LAYER_TOKENS} tokens, not {last - first}")
    begin, end = (first - blocks.start) // size, -((blocks.start - last) // size)
    return Slice(blocks.ids[begin:end], blocks.start + begin * size, first, last)
