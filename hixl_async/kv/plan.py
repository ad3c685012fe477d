"""The copies that bring some tokens of a sequence from one view of a cache to another.

Pure.  It needs numpy, because a sequence may have thousands of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import InvalidArgumentError, LayoutMismatchError, RangeError
from .reshard import Share
from .shapes import Part, Place, View

__all__ = ["BlockTable", "Plan"]

#: The columns of a run, those of ``Batch.strided`` with the source as the local side.
SOURCE, SOURCE_STRIDE, TARGET, TARGET_STRIDE, LENGTH, COUNT = range(6)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise InvalidArgumentError("plans of KV caches need numpy; install it: pip install numpy") from None
    return numpy


class BlockTable:
    """The blocks that hold the tokens of a sequence, in order.

    :param ids: the block ids.
    :param start: the position in the sequence of the first token of the first block.
    :raises InvalidArgumentError: if `ids` are not different whole numbers, or `start` is not a whole number from 0.
    """

    __slots__ = ("ids", "start")

    def __init__(self, ids: Sequence[int], start: int = 0) -> None:
        numpy = _numpy()
        if type(start) is not int or start < 0:
            raise InvalidArgumentError(f"start must be a whole number from 0, not {start!r}")
        #: The block ids, an array of int64.
        self.ids = numpy.asarray(ids)
        if self.ids.ndim != 1 or self.ids.dtype.kind not in "iu" or not len(self.ids):
            raise InvalidArgumentError("ids must be a sequence of block ids, at least one")
        self.ids = self.ids.astype(numpy.int64, copy=False)
        if len(numpy.unique(self.ids)) < len(self.ids):
            raise InvalidArgumentError("ids must be different: a block holds tokens of one place of a sequence")
        self.start = start


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

    def __init__(
        self,
        source: View,
        target: View,
        here: BlockTable,
        there: BlockTable,
        tokens: tuple[int, int],
        shares: Iterable[Share] | None = None,
    ) -> None:
        if differences := source.group.differences(target.group):
            raise LayoutMismatchError(f"the caches of source and target differ: {'; '.join(differences)}")
        first, last = tokens
        if not 0 <= first < last:
            raise RangeError(f"tokens must be a range with at least one token, not {first} to {last}")
        _check("source", here, source, first, last)
        _check("target", there, target, first, last)
        numpy = _numpy()
        starts = numpy.unique(
            numpy.concatenate(([first], _borders(here, source, first, last), _borders(there, target, first, last)))
        )
        sizes = numpy.diff(starts, append=last)
        places = _locate(here, source, starts), _locate(there, target, starts)
        self._source, self._target = source, target
        #: The part of each piece of the plan, and its runs counted from where the part of a layer begins.
        self._runs = [
            (share.part, _runs(numpy, source, target, share, places, sizes))
            for share in (_common(source, target) if shares is None else shares)
        ]

    @property
    def nbytes(self) -> int:
        """The bytes that are copied of each layer."""
        return sum(int((runs[:, LENGTH] * runs[:, COUNT]).sum()) for _, runs in self._runs)

    def layer(self, layer: int) -> dict[tuple[int, int], Any]:
        """Return the copies of one layer.

        :param layer: the number of the layer in the model.
        :return: for each pair of a source's and a target's tensor an N x 6 array of uint64, the rows of ``Batch.strided``:
            source offset, source stride, target offset, target stride, length, count.
        :raises RangeError: if one of the views does not hold the layer.
        """
        numpy = _numpy()
        found: dict[tuple[int, int], list[Any]] = {}
        for part, runs in self._runs:
            here, there = _place(self._source, layer, part), _place(self._target, layer, part)
            runs = runs.copy()
            runs[:, SOURCE] += numpy.uint64(here.offset)
            runs[:, TARGET] += numpy.uint64(there.offset)
            found.setdefault((here.tensor, there.tensor), []).append(runs)
        return {pair: runs[0] if len(runs) == 1 else numpy.concatenate(runs) for pair, runs in found.items()}

    def shift(self, layer: int, other: int) -> tuple[int, int] | None:
        """Return the distance from one layer's copies to another's.

        :param layer: the number of a layer in the model.
        :param other: the number of the other layer.
        :return: the bytes by which the copies of `other` lie behind those of `layer`, at the source and at the target; None if
            the parts lie at different distances, or in other tensors.
        :raises RangeError: if one of the views does not hold a layer.
        """
        shifts = set()
        for part, _ in self._runs:
            ends = []
            for view in (self._source, self._target):
                one, two = _place(view, layer, part), _place(view, other, part)
                if one.tensor != two.tensor:
                    return None
                ends.append(two.offset - one.offset)
            shifts.add((ends[0], ends[1]))
        return shifts.pop() if len(shifts) == 1 else None


def _check(side: str, table: BlockTable, view: View, first: int, last: int) -> None:
    """Return if a table holds the tokens from `first` up to `last` in blocks of a view.

    :raises RangeError: if it does not, or a block does not exist.
    """
    end = table.start + len(table.ids) * view.block_tokens
    if first < table.start or last > end:
        raise RangeError(f"the {side}'s blocks hold the tokens {table.start} to {end}, not {first} to {last}")
    if int(table.ids.min()) < 0 or int(table.ids.max()) >= view.blocks:
        raise RangeError(f"the {side}'s blocks must be in 0..{view.blocks - 1}")


def _locate(table: BlockTable, view: View, positions: Any) -> tuple[Any, Any]:
    """Return the blocks of some positions, and the tokens within them."""
    index, token = divmod(positions - table.start, view.block_tokens)
    return table.ids[index], token


def _borders(table: BlockTable, view: View, first: int, last: int) -> Any:
    """Return the positions between `first` and `last` at which a block begins."""
    step = view.block_tokens
    return _numpy().arange(first + step - (first - table.start) % step, last, step)


def _place(view: View, layer: int, part: int) -> Place:
    try:
        return view.places[layer][part]
    except KeyError:
        raise RangeError(f"rank {view.shard.rank} of {view.shard.ranks} does not hold layer {layer}") from None


def _common(source: View, target: View) -> list[Share]:
    """Return what both hold of each part."""
    shares = []
    for index, part in enumerate(target.group.parts):
        ours, theirs = source.shard.heads(part), target.shard.heads(part)
        heads = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        if heads:
            shares.append(Share(0, index, heads))
    return shares


def _runs(numpy: Any, source: View, target: View, share: Share, places: Any, sizes: Any) -> Any:
    """Return the runs of a share: as few as contiguity on both sides allows.

    :param places: for both sides the blocks of the pieces, and the tokens within them; a piece is in one block of each side.
    :param sizes: the tokens of each piece.
    """
    part: Part = target.group.parts[share.part]
    here, there = source.strides[share.part], target.strides[share.part]
    item, heads = part.item_bytes, len(share.heads)
    (blocks, tokens), (blocks_there, tokens_there) = places
    first, first_there = (share.heads.start - view.shard.heads(part).start for view in (source, target))
    begin = blocks * here.block + tokens * here.token + first * here.head
    end = blocks_there * there.block + tokens_there * there.token + first_there * there.head
    if heads == 1 or here.head == there.head == item:  # a token is contiguous
        item *= heads
        breaks = (begin[1:] != begin[:-1] + sizes[:-1] * here.token) | (end[1:] != end[:-1] + sizes[:-1] * there.token)
        starts = numpy.concatenate(([0], numpy.flatnonzero(breaks) + 1))
        begin, end, sizes = begin[starts], end[starts], numpy.add.reduceat(sizes, starts)
        if here.token == there.token == item:
            return _table(numpy, begin, 0, end, 0, sizes * item, 1)
        return _table(numpy, begin, here.token, end, there.token, item, sizes)
    if here.token == there.token == item:  # a head of a piece is contiguous
        return _table(numpy, begin, here.head, end, there.head, sizes * item, heads)
    total = int(sizes.sum())
    if len(sizes) * heads <= total:  # a run for each head of each piece
        steps = numpy.arange(heads)
        begin, end = ((side[:, None] + steps * step).ravel() for side, step in ((begin, here.head), (end, there.head)))
        return _table(numpy, begin, here.token, end, there.token, item, numpy.repeat(sizes, heads))
    steps = numpy.arange(total) - numpy.repeat(numpy.cumsum(sizes) - sizes, sizes)  # a run for each token
    begin, end = (numpy.repeat(side, sizes) + steps * step for side, step in ((begin, here.token), (end, there.token)))
    return _table(numpy, begin, here.head, end, there.head, item, heads)


def _table(
    numpy: Any, source: Any, source_stride: int, target: Any, target_stride: int, length: Any, count: Any
) -> Any:
    table = numpy.empty((len(source), 6), dtype=numpy.uint64)
    for column, values in enumerate((source, source_stride, target, target_stride, length, count)):
        table[:, column] = values
    return table
