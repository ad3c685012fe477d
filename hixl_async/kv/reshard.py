"""Which sender owes what to a receiver whose ranks or stages differ from its own.  Pure.

Both sides compute it from the same shards, so that they need not negotiate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..engine.arguments import positive_number
from ..errors import LayoutMismatchError
from .shapes import Group, Shard, View, numbers_of

__all__ = ["Share", "owed", "senders", "shards"]


class Share(NamedTuple):
    """What one sender owes of one layer: some heads of one part."""

    #: The index of the sender's shard.
    sender: int
    #: The index of the part in its group.
    part: int
    #: The heads, by their numbers in the model.
    heads: range


def shards(layers: int | Sequence[int], *, ranks: int = 1, stages: int = 1) -> list[Shard]:
    """Return the shards of a model that is divided evenly: all ranks of the first stage, then all of the second, and so on.

    :param layers: the numbers of the layers, or how many there are.
    :param ranks: the ranks of the tensor parallelism.
    :param stages: the stages of the pipeline; stage s of n has the layers from s*L//n up to (s+1)*L//n.
    :raises InvalidArgumentError: if a number is not positive.
    """
    ranks, stages = positive_number("ranks", ranks), positive_number("stages", stages)
    numbers = numbers_of(layers)
    cuts = [stage * len(numbers) // stages for stage in range(stages + 1)]
    return [Shard(rank, ranks, numbers[a:b]) for a, b in pairwise(cuts) for rank in range(ranks)]


def owed(sources: Sequence[Shard], targets: Sequence[View]) -> list[dict[int, tuple[Share, ...]]]:
    """Return what each source sends to a pool: its shares of each layer; an empty dict if it sends nothing.

    :param sources: the shards of the sending side, whose layers are those of all groups.
    :param targets: the receiver's views, one for each group.
    :raises LayoutMismatchError: if no source holds a layer, or some heads of it.
    """
    found: list[dict[int, tuple[Share, ...]]] = [{} for _ in sources]
    for view in targets:
        divided: dict[tuple[Share, ...], dict[int, tuple[Share, ...]]] = {}  # by sender; layers share the tuples
        for layer, shares in senders(view.group, sources, view.shard).items():
            if shares not in divided:
                numbers = {share.sender for share in shares}
                divided[shares] = {n: tuple(share for share in shares if share.sender == n) for n in numbers}
            for number, part in divided[shares].items():
                found[number][layer] = part
    return found


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
