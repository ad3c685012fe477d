"""The grant of blocks to producers: a stream is made of what the program asked for."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.arguments import positive_seconds
from ..errors import InvalidArgumentError, RangeError
from .blocks import Blocks, Limits, adopt, check_positions, loan_of
from .consumer import Times
from .context import PoolContext
from .protocol import LAYER_TOKENS, Slice
from .registry import StreamRegistry
from .shapes import Shard
from .stream import LayerStream

__all__ = ["grant"]

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
    blocks = list(blocks)
    if not all(isinstance(one, Blocks) and loan_of(one).context is context for one in blocks):
        raise InvalidArgumentError("blocks must be Blocks of this pool")
    if [one.group for one in blocks] != list(range(len(context.views))):
        raise InvalidArgumentError(
            f"a stream fills blocks of each of the pool's {len(context.views)} groups, in order; use pool.stream([...])"
        )
    if tokens is not None and len(tokens) != len(blocks):
        raise InvalidArgumentError("tokens must have a pair of positions for each group")
    senders = tuple(sources or ())
    if not all(isinstance(shard, Shard) for shard in senders) or len(set(senders)) < len(senders):
        raise InvalidArgumentError("sources must be different hixl_async.kv.Shard")
    ttl, lease, timeout = limits
    times = Times(
        TTL if ttl is None else positive_seconds("ttl", ttl),
        LEASE if lease is None else positive_seconds("lease", lease),
        None if timeout is None else positive_seconds("timeout", timeout),
    )
    slices = [
        _slice(context, one, (one.start, one.start + one.tokens) if tokens is None else check_positions(tokens[group]))
        for group, one in enumerate(blocks)
    ]
    consumer = registry.grant([loan_of(one) for one in blocks], slices, senders, times)
    for one in blocks:
        adopt(one, consumer)
    return LayerStream(consumer, blocks)


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
