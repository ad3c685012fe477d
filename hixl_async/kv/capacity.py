"""The memory that a KV cache needs, from the shape of the model, the lengths and the number of its sequences.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..engine.arguments import number_of, positive_number
from ..errors import InvalidArgumentError
from .shapes import Group

__all__ = ["Capacity", "capacity"]


class Capacity(NamedTuple):
    """The memory of one rank for its share of some sequences."""

    #: The blocks of each group.
    blocks: tuple[int, ...]
    #: Bytes of all blocks.
    nbytes: int
    #: Bytes that one more sequence takes.
    sequence_bytes: int
    #: Bytes of the blocks that all sequences share.
    shared_bytes: int


def capacity(
    groups: Group | Iterable[Group],
    *,
    tokens: int,
    sequences: int = 1,
    block_tokens: int = 16,
    ranks: int = 1,
    shared: int = 0,
) -> Capacity:
    """Return the memory that one rank needs for some sequences of the same length.

    A sequence of t tokens takes ceil(t / block_tokens) blocks of each layer.  Of a window of w tokens it takes at most
    ceil((w - 1) / block_tokens) + 1, because a window begins anywhere in a block.  A common prefix is held once, as far as it
    fills blocks.  The rank with the most heads counts.

    :param groups: the group or groups of the layers that the rank holds.
    :param tokens: the number of tokens of a sequence, prompt and answer together.
    :param sequences: the number of sequences that are held at a time.
    :param block_tokens: tokens per block.
    :param ranks: the number of ranks of the tensor parallelism.
    :param shared: the number of tokens of a prefix that all sequences have in common.
    :return: the memory, in blocks and in bytes.
    :raises InvalidArgumentError: if a number is malformed, or `groups` holds anything but groups.
    """
    found = (groups,) if isinstance(groups, Group) else tuple(groups)
    if not found or not all(isinstance(group, Group) for group in found):
        raise InvalidArgumentError(f"groups must be hixl_async.kv.Group, at least one, not {groups!r}")
    tokens, sequences = positive_number("tokens", tokens), positive_number("sequences", sequences)
    block_tokens, ranks = positive_number("block_tokens", block_tokens), positive_number("ranks", ranks)
    shared = number_of("tokens", "shared", shared, 0, 63)
    if shared > tokens:
        raise InvalidArgumentError(f"shared must be at most {tokens}, the tokens of a sequence, not {shared}")
    blocks, own_bytes, shared_bytes = [], 0, 0
    for group in found:
        needed = -(-tokens // block_tokens)
        common = shared // block_tokens
        if group.window is not None and group.window < tokens:
            needed = min(needed, -(-(group.window - 1) // block_tokens) + 1)
            common = 0  # it has moved out of the window, or will
        block_bytes = block_tokens * len(group.layers) * _token_bytes(group, ranks)
        blocks.append(common + sequences * (needed - common))
        own_bytes += (needed - common) * block_bytes
        shared_bytes += common * block_bytes
    return Capacity(tuple(blocks), shared_bytes + sequences * own_bytes, own_bytes, shared_bytes)


def _token_bytes(group: Group, ranks: int) -> int:
    """Return the bytes of one token of one layer on the rank with the most heads."""
    return sum(
        part.item_bytes * max(len(part.heads_of(rank, ranks)) for rank in range(min(ranks, part.heads)))
        for part in group.parts
    )
