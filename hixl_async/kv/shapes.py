"""The shapes of KV caches: what a model keeps per token, what one rank holds of it, and where that lies in memory.

Pure: no engine, no loop.

========  ==========================================================================================================
`Part`    one tensor of a layer's cache: keys, values, a latent, scales
`Group`   layers that consist of the same parts
`Shard`   what one rank holds of a group: layers (pipeline parallelism) and heads (tensor parallelism)
`View`    how a shard lies in memory: the size of its blocks, and the distances between blocks, tokens and heads
========  ==========================================================================================================

Two sides can stream to each other if their groups are equal; blocks, orders and ranks may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.arguments import positive_number, whole_number
from ..errors import InvalidArgumentError, RangeError
from .dtypes import ITEM_BYTES, element_type, numpy_type, require_numpy

if TYPE_CHECKING:
    from numpy import ndarray

__all__ = ["Group", "Part", "Place", "Shard", "Strides", "View", "numbers_of", "overlap"]

#: The axes of a cache: layer, part, block, token, head.
AXES = "LPBTH"


def numbers_of(layers: int | Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of layers.

    :param layers: the numbers, or how many there are.
    :raises InvalidArgumentError: if it is neither.
    """
    try:
        given = iter(layers)  # type: ignore[arg-type]
    except TypeError:
        return tuple(range(positive_number("layers", layers)))
    return tuple(whole_number("layers", layer) for layer in given)


@dataclass(frozen=True, slots=True, init=False)
class Part:
    """One tensor of a layer's cache.

    :param name: the name, unique in its group, for example ``"k"``.
    :param heads: the heads of the whole model; 1 if tokens are not divided into heads.
    :param dim: elements per token and head.
    :param dtype: the element type: a dtype of torch, numpy or ml_dtypes; or its name (``"bfloat16"``, ``"float16"``,
        ``"float32"``, ``"int8"``, ``"fp8_e4m3"``, ...); or the size of one element in bytes.
    :param replicated: False if tensor parallelism divides the heads among the ranks; True if each rank holds all of them, as
        with the latent of multi-head latent attention.
    :raises InvalidArgumentError: if a number is not a positive integer, or the dtype is not known.
    """

    name: str
    heads: int
    dim: int
    #: The name of the element type, the same whatever library it came from; or the size of one element in bytes.
    dtype: str | int
    replicated: bool

    def __init__(self, name: str, heads: int, dim: int, dtype: object, *, replicated: bool = False) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"name must be a string that is not empty, not {name!r}")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "heads", positive_number("heads", heads))
        object.__setattr__(self, "dim", positive_number("dim", dim))
        object.__setattr__(self, "dtype", element_type(dtype))
        object.__setattr__(self, "replicated", bool(replicated))

    @property
    def item_bytes(self) -> int:
        """The bytes of one token of one head."""
        return self.dim * (ITEM_BYTES[self.dtype] if isinstance(self.dtype, str) else self.dtype)

    def heads_of(self, rank: int, ranks: int) -> range:
        """Return the heads that a rank holds.

        With at most as many ranks as heads, rank r of n holds the heads from r*H//n up to (r+1)*H//n.  With more ranks it
        holds the head r*H//n, as others do.

        :param rank: the rank, from 0.
        :param ranks: the number of ranks.
        """
        if self.replicated:
            return range(self.heads)
        first = rank * self.heads // ranks
        return range(first, (rank + 1) * self.heads // ranks if ranks <= self.heads else first + 1)


@dataclass(frozen=True, slots=True, init=False)
class Group:
    """Layers whose caches consist of the same parts; models with several kinds of attention have several groups.

    :param layers: the numbers of the layers in the model, or how many there are.
    :param parts: the parts of each layer.
    :param window: the number of last tokens that attention reaches, or None if it reaches all.
    :raises InvalidArgumentError: if a layer or a part's name is there twice or there is none, or `window` is not positive.
    """

    layers: tuple[int, ...]
    parts: tuple[Part, ...]
    window: int | None

    def __init__(self, layers: int | Iterable[int], parts: Iterable[Part], *, window: int | None = None) -> None:
        numbers = numbers_of(layers)
        pieces = tuple(parts)
        if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
            raise InvalidArgumentError(f"layers must be different numbers of layers, at least one, not {layers!r}")
        if not pieces or not all(isinstance(part, Part) for part in pieces):
            raise InvalidArgumentError(f"parts must be hixl_async.kv.Part, at least one, not {pieces!r}")
        if len({part.name for part in pieces}) < len(pieces):
            raise InvalidArgumentError(f"the names of parts must differ: {', '.join(part.name for part in pieces)}")
        object.__setattr__(self, "layers", numbers)
        object.__setattr__(self, "parts", pieces)
        object.__setattr__(self, "window", None if window is None else positive_number("window", window))

    @classmethod
    def attention(
        cls, layers: int | Iterable[int], kv_heads: int, head_dim: int, dtype: object, *, window: int | None = None
    ) -> Group:
        """Return the group of layers with keys and values (multi-head or grouped-query attention).

        :param layers: the numbers of the layers in the model, or how many there are.
        :param kv_heads: the key/value heads of the whole model.
        :param head_dim: elements per head.
        :param dtype: the element type, as for `Part`.
        :param window: the number of last tokens that attention reaches, or None if it reaches all.
        :return: a group with the parts ``"k"`` and ``"v"``.
        """
        return cls(layers, [Part(name, kv_heads, head_dim, dtype) for name in ("k", "v")], window=window)

    @classmethod
    def latent(cls, layers: int | Iterable[int], latent_dim: int, rope_dim: int, dtype: object) -> Group:
        """Return the group of layers with multi-head latent attention (MLA), which every rank holds whole.

        :param layers: the numbers of the layers in the model, or how many there are.
        :param latent_dim: elements of the latent per token.
        :param rope_dim: elements of the rotary part per token.
        :param dtype: the element type, as for `Part`.
        :return: a group with the parts ``"latent"`` and ``"rope"``.
        """
        return cls(
            layers,
            [Part(name, 1, dim, dtype, replicated=True) for name, dim in (("latent", latent_dim), ("rope", rope_dim))],
        )

    def differences(self, other: Group) -> list[str]:
        """Return what keeps one side from streaming to the other, in words; an empty list if nothing does.

        :param other: the group at the target; this one is at the source.
        """
        if [part.name for part in self.parts] != [part.name for part in other.parts]:
            ours, theirs = (", ".join(part.name for part in group.parts) for group in (self, other))
            return [f"the parts are {ours} at the source and {theirs} at the target"]
        found = [
            f"part {ours.name!r}: {name} is {getattr(ours, name)!r} at the source and {getattr(theirs, name)!r} at the target"
            for ours, theirs in zip(self.parts, other.parts, strict=True)
            for name in ("heads", "dim", "dtype", "replicated")
            if getattr(ours, name) != getattr(theirs, name)
        ]
        if self.layers != other.layers or self.window != other.window:
            found.append("the layers or the window of the group are not the same")
        return found

    @property
    def token_bytes(self) -> int:
        """The bytes of one token of one layer in the whole model."""
        return sum(part.heads * part.item_bytes for part in self.parts)

    def tail(self, tokens: int) -> tuple[int, int]:
        """Return the range of the tokens that attention of the next one reaches.

        :param tokens: the number of tokens so far.
        """
        return (0 if self.window is None else max(0, tokens - self.window + 1), tokens)


@dataclass(frozen=True, slots=True, init=False)
class Shard:
    """What one rank holds of a group.

    :param rank: the rank of the tensor parallelism, from 0.
    :param ranks: the number of ranks.
    :param layers: the numbers of the layers of this stage of the pipeline, in order.
    :raises InvalidArgumentError: if a number is out of range.
    """

    rank: int
    ranks: int
    layers: tuple[int, ...]

    def __init__(self, rank: int, ranks: int, layers: Iterable[int]) -> None:
        number, count = whole_number("rank", rank), positive_number("ranks", ranks)
        if not 0 <= number < count:
            raise InvalidArgumentError(f"rank must be in 0..{count - 1}, not {number}")
        object.__setattr__(self, "rank", number)
        object.__setattr__(self, "ranks", count)
        object.__setattr__(self, "layers", tuple(whole_number("layers", layer) for layer in layers))

    def heads(self, part: Part) -> range:
        """Return the heads of a part that the rank holds, by their numbers in the model.

        :param part: the part.
        """
        return part.heads_of(self.rank, self.ranks)


class Place(NamedTuple):
    """Where a part of a layer begins."""

    #: The index of the tensor.
    tensor: int
    #: Bytes from its start.
    offset: int


class Strides(NamedTuple):
    """The distances in bytes between neighbours in one part."""

    block: int
    token: int
    head: int


@dataclass(frozen=True, slots=True, init=False)
class View:
    """How a shard of a group lies in memory; `ordered` makes the usual ones.

    :param group: the group.
    :param shard: what is held of it.
    :param blocks: the number of blocks.
    :param block_tokens: tokens per block; in a contiguous cache, which has a block per sequence, its longest sequence.
    :param places: for each layer of the shard the place of each part, in the order of the group's parts.
    :param strides: the distances of each part.
    :raises InvalidArgumentError: if a number is malformed, or places or strides are missing.
    """

    group: Group
    shard: Shard
    blocks: int
    block_tokens: int
    places: Mapping[int, tuple[Place, ...]]
    strides: tuple[Strides, ...]
    #: The bytes of each tensor, from its start to the last byte that is used.
    tensor_bytes: tuple[int, ...] = field(compare=False)

    def __init__(
        self,
        group: Group,
        shard: Shard,
        blocks: int,
        block_tokens: int,
        places: Mapping[int, Sequence[Place]],
        strides: Sequence[Strides],
    ) -> None:
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "shard", shard)
        object.__setattr__(self, "blocks", positive_number("blocks", blocks))
        object.__setattr__(self, "block_tokens", positive_number("block_tokens", block_tokens))
        object.__setattr__(self, "places", MappingProxyType({layer: tuple(found) for layer, found in places.items()}))
        object.__setattr__(self, "strides", tuple(strides))
        object.__setattr__(self, "tensor_bytes", self._check())

    def _check(self) -> tuple[int, ...]:
        """Return the bytes of each tensor."""
        parts = self.group.parts
        unknown = set(self.shard.layers) - set(self.group.layers)
        if unknown:
            raise InvalidArgumentError(f"layer {min(unknown)} of the shard is not one of the group's")
        if set(self.places) != set(self.shard.layers):
            raise InvalidArgumentError("places must name exactly the layers of the shard")
        if len(self.strides) != len(parts) or {len(places) for places in self.places.values()} != {len(parts)}:
            raise InvalidArgumentError(f"places and strides must have one entry for each of {len(parts)} parts")
        ends: dict[int, int] = {}
        for places in self.places.values():
            for part, place, stride in zip(parts, places, self.strides, strict=True):
                if min(*place, *stride) < 0:
                    raise InvalidArgumentError(f"part {part.name!r}: offsets and strides must not be negative")
                ends[place.tensor] = max(ends.get(place.tensor, 0), place.offset + self._span(part, stride))
        if set(ends) != set(range(len(ends))):
            raise InvalidArgumentError(f"tensors must be numbered from 0 without gaps, not {sorted(ends)}")
        return tuple(ends[tensor] for tensor in range(len(ends)))

    def _span(self, part: Part, stride: Strides) -> int:
        """Return the bytes from the first to the last of a part of a layer, whose items must not overlap."""
        steps = (
            (stride.head, len(self.shard.heads(part))),
            (stride.token, self.block_tokens),
            (stride.block, self.blocks),
        )
        span = part.item_bytes
        for step, count in sorted(step for step in steps if step[1] > 1):
            if step < span:
                raise InvalidArgumentError(f"part {part.name!r}: strides {tuple(stride)} let its items overlap")
            span += step * (count - 1)
        return span

    @classmethod
    def ordered(
        cls,
        group: Group,
        order: str = "LPBTH",
        *,
        blocks: int,
        block_tokens: int,
        rank: int = 0,
        ranks: int = 1,
        layers: Iterable[int] | None = None,
    ) -> View:
        """Return the view of dense tensors whose axes have an order.

        :param group: the group.
        :param order: the axes from the slowest to the fastest: L layer, P part, B block, T token, H head; a head's elements
            come last.  Axes before a slash number the tensors: ``"LPBTH"`` is one tensor, ``"L/PBTH"`` one per layer,
            ``"LP/BTH"`` one per layer and part.
        :param blocks: the number of blocks.
        :param block_tokens: tokens per block.
        :param rank: the rank of the tensor parallelism, from 0.
        :param ranks: the number of ranks.
        :param layers: the layers of this stage of the pipeline; default: all of the group.
        :return: the view.
        :raises InvalidArgumentError: if an argument is malformed.
        """
        outer, _, inner = order.rpartition("/") if isinstance(order, str) else ("", "", "")
        if sorted(outer + inner) != sorted(AXES) or not set(outer) <= {"L", "P"}:
            raise InvalidArgumentError(
                f"order must have each of L, P, B, T, H once, and none but L and P before a slash, not {order!r}"
            )
        shard = Shard(rank, ranks, group.layers if layers is None else layers)
        sizes = {"L": len(shard.layers), "P": len(group.parts), "B": positive_number("blocks", blocks)}
        sizes["T"] = positive_number("block_tokens", block_tokens)
        # From the fastest axis outwards: the bytes of one step along the next axis, of each part.
        steps = [part.item_bytes for part in group.parts]
        offsets = [0] * len(steps)
        strides: dict[str, list[int]] = {"L": [0] * len(steps)}
        for axis in reversed(inner):
            if axis == "P":
                offsets = [sum(steps[:number]) for number in range(len(steps))]
                steps = [sum(steps)] * len(steps)
            else:
                strides[axis] = steps
                counts = [len(shard.heads(part)) if axis == "H" else sizes[axis] for part in group.parts]
                steps = [step * count for step, count in zip(steps, counts, strict=True)]
        places: dict[int, list[Place]] = {}
        for index, layer in enumerate(shard.layers):
            places[layer] = []
            for number, offset in enumerate(offsets):
                tensor = 0
                for axis in outer:
                    tensor = tensor * sizes[axis] + (index if axis == "L" else number)
                places[layer].append(Place(tensor, offset + index * strides["L"][number]))
        distances = zip(strides["B"], strides["T"], strides["H"], strict=True)
        return cls(group, shard, blocks, block_tokens, places, [Strides(*steps) for steps in distances])

    def array(self, tensors: Sequence[Any], layer: int, part: str, dtype: Any = None) -> ndarray[Any, Any]:
        """Return one part of a layer as a numpy array, without a copy.

        :param tensors: the buffers of the tensors.
        :param layer: the number of the layer.
        :param part: the name of the part.
        :param dtype: the numpy dtype of an element; default: that of the part, or an unsigned integer of its size if numpy has
            no such type.
        :return: an array of the shape (blocks, block_tokens, heads, dim).
        :raises RangeError: if the view does not hold the layer.
        :raises InvalidArgumentError: if there is no such part, or `dtype` has another size.
        """
        numpy = require_numpy()
        names = [one.name for one in self.group.parts]
        places = self.places_of(layer)
        if part not in names:
            raise InvalidArgumentError(f"part must be one of {', '.join(names)}, not {part!r}")
        number = names.index(part)
        ours, place, strides = self.group.parts[number], places[number], self.strides[number]
        element = numpy.dtype(numpy_type(ours.dtype) if dtype is None else dtype)
        if element.itemsize * ours.dim != ours.item_bytes:
            raise InvalidArgumentError(f"dtype {dtype!r} has {element.itemsize} bytes; the elements have another size")
        found: ndarray[Any, Any] = numpy.ndarray(
            (self.blocks, self.block_tokens, len(self.shard.heads(ours)), ours.dim),
            element,
            tensors[place.tensor],
            place.offset,
            (strides.block, strides.token, strides.head, element.itemsize),
        )
        return found

    def places_of(self, layer: int) -> tuple[Place, ...]:
        """Return the place of each part of a layer.

        :param layer: the number of the layer.
        :raises RangeError: if the view does not hold the layer.
        """
        try:
            return self.places[layer]
        except KeyError:
            raise RangeError(f"rank {self.shard.rank} of {self.shard.ranks} does not hold layer {layer}") from None

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold some tokens; the last one may be partly used.

        :param tokens: the number of tokens.
        """
        return -(-positive_number("tokens", tokens) // self.block_tokens)


def overlap(one: View, other: View) -> bool:
    """Return True if different blocks of two views may overlap in tensors that both use.

    :param one: a view.
    :param other: a view of as many blocks.
    """
    if one.blocks == 1:
        return False
    ours, theirs = _stretches(one), _stretches(other)
    return any(
        step != other_step or not step or 0 < abs(first - other_first) < one.blocks
        for tensor in ours.keys() & theirs.keys()
        for (step, first), (other_step, other_first) in product(ours[tensor], theirs[tensor])
    )


def _stretches(view: View) -> dict[int, set[tuple[int, int]]]:
    """Return where blocks lie in each tensor, if each keeps to stretches of bytes between those of its neighbours.

    :return: for each tensor the stride of a block, and the place of the first block, in strides, of each part of a layer.
        A stride of 0 says that the blocks of a part lie among each other.
    """
    found: dict[int, set[tuple[int, int]]] = {}
    for places in view.places.values():
        for part, place, stride in zip(view.group.parts, places, view.strides, strict=True):
            step = stride.block
            span = view._span(part, stride) - step * (view.blocks - 1)
            alone = step > 0 and place.offset % step + span <= step
            found.setdefault(place.tensor, set()).add((step, place.offset // step) if alone else (0, 0))
    return found
