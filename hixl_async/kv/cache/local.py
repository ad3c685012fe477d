"""Copies between caches of this process, on the host and on devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import LayoutMismatchError
from ..shapes import View
from .store import CacheStore

__all__ = ["check_alike", "copied_bytes", "copy"]


def check_alike(source: CacheStore, target: CacheStore) -> None:
    """Return if tokens can be copied from one cache to the other.

    :raises LayoutMismatchError: if they hold other layers, heads or parts.
    """
    found = source.view.group.differences(target.view.group)
    if source.view.shard != target.view.shard:
        found.append("the ranks or the layers that they hold are not the same")
    if found:
        raise LayoutMismatchError(f"the caches of source and target differ: {'; '.join(found)}")


def copied_bytes(view: View, layers: Sequence[int], tokens: int) -> int:
    """Return the bytes of so many tokens in some layers of a view."""
    held = sum(part.item_bytes * len(view.shard.heads(part)) for part in view.group.parts)
    return held * tokens * len(layers)


def copy(
    source: CacheStore,
    target: CacheStore,
    pairs: Sequence[tuple[int, int]],
    layers: Sequence[int],
    tokens: tuple[int, int],
) -> None:
    """Copy tokens of blocks; all is read of a part of a layer before any of it is written.

    :param pairs: the source's block and the target's, of each copy.
    :param layers: the layers to copy.
    :param tokens: the range of the tokens within each block.
    """
    here, there = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    kept = slice(*tokens)
    torch = sys.modules.get("torch")
    on_torch = torch is not None and any(map(torch.is_tensor, (*source.memory, *target.memory)))
    arrays = _tensors if on_torch else _arrays
    for ours, theirs in zip(arrays(source, layers), arrays(target, layers), strict=True):
        rows = ours[here, kept]
        theirs[there, kept] = rows.to(theirs.device) if on_torch else rows


def _arrays(cache: CacheStore, layers: Sequence[int]) -> Iterator[Any]:
    """Yield each part of each layer as a numpy array of bytes: block, token, head, byte."""
    view, buffers = cache.view, cache.buffers()
    for layer in layers:
        for part in view.group.parts:
            yield view.array(buffers, layer, part.name, f"V{part.item_bytes // part.dim}").view("uint8")


def _tensors(cache: CacheStore, layers: Sequence[int]) -> Iterator[Any]:
    """Yield the same as tensors of torch, on the device where the memory is."""
    torch: Any = sys.modules["torch"]
    view = cache.view
    flat = [
        (memory if torch.is_tensor(memory) else torch.frombuffer(memoryview(region), dtype=torch.uint8))
        .reshape(-1)
        .view(torch.uint8)
        for memory, region in zip(cache.memory, cache.regions, strict=True)
    ]
    for layer in layers:
        for part, place, strides in zip(view.group.parts, view.places[layer], view.strides, strict=True):
            shape = (view.blocks, view.block_tokens, len(view.shard.heads(part)), part.item_bytes)
            yield flat[place.tensor].as_strided(shape, (strides.block, strides.token, strides.head, 1), place.offset)
