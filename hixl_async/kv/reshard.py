"""Which sender owes what to a receiver whose ranks or stages differ from its own.  Pure.

Both sides compute it from the same shards, so that they need not negotiate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import LayoutMismatchError
from .shapes import Group, Shard

__all__ = ["Share", "senders"]


class Share(NamedTuple):
    """What one sender owes of one layer: some heads of one part."""

    #: The index of the sender's shard.
    sender: int
    #: The index of the part in its group.
    part: int
    #: The heads, by their numbers in the model.
    heads: range


def senders(group: Group, sources: Sequence[Shard], target: Shard) -> Mapping[int, tuple[Share, ...]]:
    """Return what each source sends of each layer of the target, so that each byte is sent once.

    A part that several sources hold alike is sent by the one whose place among them is the target's rank modulo their number,
    so that many receivers share the work.

    :param group: the group that both sides hold.
    :param sources: the shards of the sending side, all ranks of all stages.
    :param target: the shard of the receiver.
    :return: the shares of each layer.
    :raises LayoutMismatchError: if no source holds a layer, or some heads of it.
    """
    holders: dict[int, list[int]] = {layer: [] for layer in target.layers}
    for number, source in enumerate(sources):
        for layer in source.layers:
            if layer in holders:
                holders[layer].append(number)
    shares: dict[tuple[int, ...], tuple[Share, ...]] = {}  # of the layers that the same sources hold
    for layer, numbers in holders.items():
        if tuple(numbers) not in shares:
            shares[tuple(numbers)] = tuple(_shares(group, sources, numbers, target, layer))
    return {layer: shares[tuple(numbers)] for layer, numbers in holders.items()}


def _shares(group: Group, sources: Sequence[Shard], holders: list[int], target: Shard, layer: int) -> list[Share]:
    shares = []
    for index, part in enumerate(group.parts):
        wanted = target.heads(part)
        alike: dict[range, list[int]] = {}
        for number in holders:
            alike.setdefault(sources[number].heads(part), []).append(number)
        found = 0
        for heads, same in alike.items():
            common = range(max(heads.start, wanted.start), min(heads.stop, wanted.stop))
            if common:
                found += len(common)
                shares.append(Share(same[target.rank % len(same)], index, common))
        if found != len(wanted):
            raise LayoutMismatchError(
                f"the senders hold {found} of the {len(wanted)} heads of part {part.name!r} of layer {layer} that rank "
                f"{target.rank} of {target.ranks} needs"
            )
    return shares
