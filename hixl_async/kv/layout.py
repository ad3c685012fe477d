"""The shape of a paged KV cache, and its size in bytes.

Pure: no engine, no loop, and numpy only where the process has imported it already.

A pool of `blocks` blocks is one contiguous array of shape ``(layers, 2, blocks, block_tokens, kv_heads, head_dim)``:
keys and values of a layer are separate (index 0 and 1 of the second axis), and one block of one layer's keys is contiguous.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.arguments import positive_number
from ..errors import InvalidArgumentError, RangeError
from .dtypes import ITEM_BYTES, element_type

__all__ = ["Layout"]

#: The most blocks for which a Python loop is faster than a dozen calls of numpy.
FEW = 16


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """The shape of a paged KV cache; two sides can stream to each other if all fields are equal.

    :param layers: the number of attention layers held here.
    :param kv_heads: the key/value heads per layer held here (under tensor parallelism, those of this rank).
    :param head_dim: elements per head.
    :param dtype: the element type: a dtype of torch, numpy or ml_dtypes; or its name (``"bfloat16"``, ``"float16"``,
        ``"float32"``, ``"int8"``, ``"fp8_e4m3"``, ...); or the size of one element in bytes.
    :param block_tokens: tokens per block.
    :raises InvalidArgumentError: if a number is not a positive integer, or the dtype is not known.
    """

    layers: int
    kv_heads: int
    head_dim: int
    #: The name of the element type, the same whatever library it came from; or the size of one element in bytes.
    dtype: str | int
    block_tokens: int

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: object, block_tokens: int) -> None:
        numbers = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
        for name, value in numbers.items():
            object.__setattr__(self, name, positive_number(name, value))
        object.__setattr__(self, "dtype", element_type(dtype))

    @property
    def item_bytes(self) -> int:
        """The bytes of one element."""
        return ITEM_BYTES[self.dtype] if isinstance(self.dtype, str) else self.dtype

    @property
    def block_bytes(self) -> int:
        """The bytes of one block of one layer's keys (or of its values)."""
        return self.block_tokens * self.kv_heads * self.head_dim * self.item_bytes

    def layer_bytes(self, blocks: int) -> int:
        """Return the bytes of one layer, keys and values together.

        :param blocks: the size of the pool in blocks.
        :raises InvalidArgumentError: if `blocks` is not a positive integer.
        """
        return 2 * positive_number("blocks", blocks) * self.block_bytes

    def pool_bytes(self, blocks: int) -> int:
        """Return the bytes of a pool.

        :param blocks: the size of the pool in blocks.
        :raises InvalidArgumentError: if `blocks` is not a positive integer.
        """
        return self.layers * self.layer_bytes(blocks)

    def shape(self, blocks: int) -> tuple[int, int, int, int, int, int]:
        """Return the shape of a pool as an array.

        :param blocks: the size of the pool in blocks.
        :return: ``(layers, 2, blocks, block_tokens, kv_heads, head_dim)``.
        :raises InvalidArgumentError: if `blocks` is not a positive integer.
        """
        return (self.layers, 2, positive_number("blocks", blocks), self.block_tokens, self.kv_heads, self.head_dim)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold some tokens; the last one may be partly used.

        :param tokens: the number of tokens.
        :raises InvalidArgumentError: if `tokens` is not a positive integer.
        """
        return -(-positive_number("tokens", tokens) // self.block_tokens)

    def fields(self) -> dict[str, str | int]:
        """Return the fields as a JSON-safe dict, which `from_fields` accepts."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Layout:
        """Return the layout that a dict describes.

        :param fields: the fields, as returned by `fields`.
        :raises InvalidArgumentError: if a field is missing, unknown or malformed.
        """
        if not isinstance(fields, Mapping) or set(fields) != set(_FIELDS):
            raise InvalidArgumentError(f"a layout has exactly the fields {', '.join(_FIELDS)}")
        return cls(**fields)

    def fingerprint(self) -> str:
        """Return a hash of 16 hexadecimal digits, equal for equal layouts in every process and on every host."""
        text = ";".join(f"{name}={value}" for name, value in self.fields().items())
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def mismatch(self, other: Layout) -> list[str]:
        """Return the names of the fields that differ; an empty list if the two sides can stream to each other.

        :param other: the layout of the other side.
        :raises InvalidArgumentError: if `other` is not a layout.
        """
        if not isinstance(other, Layout):
            raise InvalidArgumentError(f"other must be a hixl_async.kv.Layout, not {other!r}")
        return [name for name in _FIELDS if getattr(self, name) != getattr(other, name)]

    def rows(
        self,
        layer: int,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        source_pool_blocks: int,
        target_pool_blocks: int,
    ) -> Any:
        """Return descriptors that copy one layer's blocks between two pools: source block *i* to target block *i*.

        Blocks that are adjacent in both pools become one descriptor.  Where the process has imported numpy there is no Python
        loop over the blocks, unless they are so few that it is faster.

        :param layer: the index of the layer, the same on both sides.
        :param source_blocks: the block ids in the source pool.
        :param target_blocks: the block ids in the target pool, as many as `source_blocks`.
        :param source_pool_blocks: the size of the source pool in blocks.
        :param target_pool_blocks: the size of the target pool in blocks.
        :return: a C-contiguous buffer of N x 3 uint64: source offset, target offset, length, in bytes.
        :raises RangeError: if the layer or a block id does not exist, or the two lists are empty or differ in length.
        :raises InvalidArgumentError: if an argument is not made of whole numbers.
        """
        try:
            if not 0 <= layer < self.layers:
                raise RangeError(f"layer {layer} does not exist: the layout has {self.layers} layers")
            if len(source_blocks) != len(target_blocks) or not len(source_blocks):
                raise RangeError(
                    f"there must be as many source as target blocks, and at least one, not {len(source_blocks)} and "
                    f"{len(target_blocks)}"
                )
            _check_ids("source", source_blocks, source_pool_blocks)
            _check_ids("target", target_blocks, target_pool_blocks)
        except TypeError as error:
            raise InvalidArgumentError(
                f"layer, block ids and the sizes of pools must be whole numbers, the ids in sequences: {error}"
            ) from error
        # Block numbers that count through the whole pool: a layer's keys, then its values, then the next layer.
        bases = [((2 * layer + half) * source_pool_blocks, (2 * layer + half) * target_pool_blocks) for half in (0, 1)]
        numpy = sys.modules.get("numpy")
        # Without flatnonzero, another thread is still importing numpy.
        if len(source_blocks) > FEW and numpy is not None and hasattr(numpy, "flatnonzero"):
            return _rows_of_arrays(numpy, bases, source_blocks, target_blocks, self.block_bytes)
        return _rows_of_loops(bases, source_blocks, target_blocks, self.block_bytes)


_FIELDS = tuple(Layout.__dataclass_fields__)


def _check_ids(side: str, ids: Iterable[int], pool_blocks: int) -> None:
    if min(ids) < 0 or max(ids) >= pool_blocks:
        outside = [block for block in ids if not 0 <= block < pool_blocks]
        raise RangeError(f"{side} blocks {outside[:5]} do not exist: that pool has {pool_blocks} blocks")


def _rows_of_arrays(
    numpy: Any, bases: list[tuple[int, int]], sources: Sequence[int], targets: Sequence[int], block_bytes: int
) -> Any:
    source_ids = numpy.asarray(sources, dtype=numpy.int64)
    target_ids = numpy.asarray(targets, dtype=numpy.int64)
    source = numpy.concatenate([source_ids + base for base, _ in bases])
    target = numpy.concatenate([target_ids + base for _, base in bases])
    breaks = numpy.flatnonzero((numpy.diff(source) != 1) | (numpy.diff(target) != 1)) + 1
    starts = numpy.concatenate(([0], breaks))
    rows = numpy.empty((len(starts), 3), dtype=numpy.uint64)
    rows[:, 0] = source[starts]
    rows[:, 1] = target[starts]
    rows[:, 2] = numpy.diff(starts, append=len(source))
    rows *= numpy.uint64(block_bytes)
    return rows


def _rows_of_loops(
    bases: list[tuple[int, int]], sources: Sequence[int], targets: Sequence[int], block_bytes: int
) -> memoryview:
    rows = array("Q")
    next_source = next_target = -1
    for source_base, target_base in bases:
        for source, target in zip(sources, targets, strict=True):
            if source_base + source == next_source and target_base + target == next_target:
                rows[-1] += block_bytes
            else:
                rows.extend(((source_base + source) * block_bytes, (target_base + target) * block_bytes, block_bytes))
            next_source, next_target = source_base + source + 1, target_base + target + 1
    return memoryview(rows).cast("B").cast("Q", shape=[len(rows) // 3, 3])
