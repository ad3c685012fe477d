"""The copies that bring some tokens of a sequence from one view of a cache to another.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..core.paged import BlockTable, paged_runs
from ..errors import LayoutMismatchError, RangeError
from .reshard import Share
from .shapes import Place, View

__all__ = ["BlockTable", "Piece", "Plan"]


class Piece(NamedTuple):
    """The copies of one part of a layer."""

    #: Where the part of the layer begins at the source, and at the target; from there the offsets of the runs count.
    source: Place
    target: Place
    #: An N x 6 buffer of uint64, the rows of ``Batch.strided``: source offset, source stride, target offset, target stride,
    #: length, count.
    runs: memoryview


class Plan:
    """The copies of some tokens between two views, the same for all layers but for where a layer lies.

    :param source: the view to read.
    :param target: the view to write; its group must equal the source's.
    :param here: the source's blocks of the sequence.
    :param there: the target's.
    :param tokens: the first position to copy, and the one after the last.
    :param shares: what the source owes of a layer; default: all that both hold.
    :raises LayoutMismatchError: if the groups differ.
    :raises RangeError: if a block table does not hold the tokens, or there is none.
    """

    __slots__ = ("_source", "_target", "nbytes", "runs")

    def __init__(
        self,
        source: View,
        target: View,
        here: BlockTable,
        there: BlockTable,
        tokens: tuple[int, int],
        shares: Iterable[Share] | None = None,
    ) -> None:
        if source.group != target.group and (differences := source.group.differences(target.group)):
            raise LayoutMismatchError(f"the caches of source and target differ: {'; '.join(differences)}")
        first, last = tokens
        if not 0 <= first < last:
            raise RangeError(f"tokens must be a range with at least one token, not {first} to {last}")
        _check("source", here, source, first, last)
        _check("target", there, target, first, last)
        self._source, self._target = source, target
        # The runs of parts that lie alike are the same.
        made: dict[tuple[object, ...], memoryview] = {}
        #: For each share the index of its part in the group, and the rows of ``Batch.strided``.
        self.runs: list[tuple[int, memoryview]] = []
        #: The bytes that are copied of each layer.
        self.nbytes = 0
        for share in _common(source, target) if shares is None else shares:
            part = target.group.parts[share.part]
            ours, theirs = _geometry(source, share), _geometry(target, share)
            key = (ours, theirs, part.item_bytes, len(share.heads))
            if key not in made:
                made[key] = paged_runs(here, ours, there, theirs, first, last, part.item_bytes, len(share.heads))
            self.runs.append((share.part, made[key]))
            self.nbytes += (last - first) * len(share.heads) * part.item_bytes

    def layer(self, layer: int) -> list[Piece]:
        """Return the copies of one layer.

        :param layer: the number of the layer in the model.
        :return: the copies of each part.
        :raises RangeError: if one of the views does not hold the layer.
        """
        here, there = self._source.places_of(layer), self._target.places_of(layer)
        return [Piece(here[part], there[part], runs) for part, runs in self.runs]


def _check(side: str, table: BlockTable, view: View, first: int, last: int) -> None:
    """Return if a table holds the tokens from `first` up to `last` in blocks of a view.

    :raises RangeError: if it does not, or a block does not exist.
    """
    end = table.start + len(table) * view.block_tokens
    if first < table.start or last > end:
        raise RangeError(f"the {side}'s blocks hold the tokens {table.start} to {end}, not {first} to {last}")
    if table.largest >= view.blocks:
        raise RangeError(f"the {side}'s blocks must be in 0..{view.blocks - 1}, not {table.largest}")


def _geometry(view: View, share: Share) -> tuple[int, int, int, int, int]:
    """Return the geometry of a part, as `paged_runs` takes it."""
    strides = view.strides[share.part]
    first = share.heads.start - view.shard.heads(view.group.parts[share.part]).start
    return (view.block_tokens, *strides, first * strides.head)


def _common(source: View, target: View) -> list[Share]:
    """Return what both hold of each part."""
    shares = []
    for index, part in enumerate(target.group.parts):
        ours, theirs = source.shard.heads(part), target.shard.heads(part)
        heads = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        if heads:
            shares.append(Share(0, index, heads))
    return shares
