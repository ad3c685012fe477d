"""Two cache managers on real engines in one process, and what the tests compare."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy
import pytest

from hixl_async.kv import BlockTable
from hixl_async.kv.cache import Cache, CacheManager
from hixl_async.testing import engine_pair

from .shapes import LEFT, RIGHT, view


def fill(cache: Cache, seed: int = 0) -> None:
    """Fill a cache with random numbers."""
    random = numpy.random.default_rng(seed)
    for layer in cache.view.shard.layers:
        for part in cache.view.group.parts:
            array = cache.array(layer, part.name)
            array[:] = random.random(array.shape, dtype=numpy.float32)


def tokens_of(
    cache: Cache, blocks: Iterable[int] | BlockTable, tokens: tuple[int, int], layers: Sequence[int] | None = None
) -> numpy.ndarray[Any, Any]:
    """Return what a cache holds of some tokens: layer, part, token, head, element."""
    table = blocks if isinstance(blocks, BlockTable) else BlockTable(blocks)
    ids = list(table.ids)
    found = [
        [
            (array := cache.array(layer, part.name))[ids].reshape(-1, *array.shape[2:])[
                tokens[0] - table.start : tokens[1] - table.start
            ]
            for part in cache.view.group.parts
        ]
        for layer in (cache.view.shard.layers if layers is None else layers)
    ]
    return numpy.array(found)


class Managers(NamedTuple):
    """Two linked managers, with a cache each."""

    left: CacheManager
    right: CacheManager
    #: The cache of the left side, filled; the right one's is empty, and has blocks of the same size in another order.
    source: Cache
    target: Cache


@asynccontextmanager
async def linked(drivers: Any = None, *, lease: float = 10.0, **settings: Any) -> AsyncIterator[Managers]:
    """Open two managers on two engines, the left one with faults."""
    async with (
        engine_pair(drivers, **settings) as pair,
        CacheManager(pair.left, 1, lease=lease) as left,
        CacheManager(pair.right, 2, lease=lease) as right,
    ):
        source = left.allocate_cache(view(), blocks_cache_key=LEFT)
        target = right.allocate_cache(view("LPBTH"), blocks_cache_key=RIGHT)
        fill(source)
        await left.link_clusters({2: pair.right.address})
        yield Managers(left, right, source, target)


@pytest.fixture
async def managers() -> AsyncIterator[Managers]:
    async with linked() as pair:
        yield pair
        for manager, cache in ((pair.left, pair.source), (pair.right, pair.target)):
            await asyncio.wait_for(cache._store.holds.idle(), 5)
            assert not manager._context.running
            assert not manager._owner.served
