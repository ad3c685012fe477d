"""What the other process of a test does; see `peer_process`."""

from __future__ import annotations

import asyncio

from hixl_async import Engine, HixlError
from hixl_async.kv.cache import Cache, CacheManager, CacheTask

from .shapes import LEFT, RIGHT, view

#: The manager of each engine, its cache, and what it began.
_managers: dict[Engine, tuple[CacheManager, Cache]] = {}
_tasks: list[CacheTask] = []


def manage(engine: Engine, value: int) -> None:
    """Make the manager of cluster 2, whose cache is full of a value."""
    manager = CacheManager(engine, 2)
    cache = manager.allocate_cache(view(), blocks_cache_key=RIGHT)
    for layer in cache.view.shard.layers:
        cache.array(layer, "k")[:] = cache.array(layer, "v")[:] = value
    _managers[engine] = manager, cache


async def link(engine: Engine, address: str) -> None:
    """Link with cluster 1."""
    await _managers[engine][0].link_clusters({1: address})


async def push(engine: Engine, req_id: int, layers: list[int], until: int) -> int:
    """Begin to push block 3 to block 5; the layers from number `until` on never become ready."""
    manager, cache = _managers[engine]
    _tasks.append(
        task := manager.push_blocks(
            LEFT, cache, [3], [5], layers=layers, req_id=req_id, ready=lambda layer: layer < until
        )
    )
    return await task if until > max(layers) else 0


async def pull(engine: Engine, wait: bool) -> str:
    """Pull block 3 into block 5, and return the name of the error, if there is one."""
    manager, cache = _managers[engine]
    _tasks.append(task := manager.pull_blocks(LEFT, cache, [3], [5]))
    if wait:
        try:
            await task
        except HixlError as error:
            return type(error).__name__
    return ""


async def close(engine: Engine) -> None:
    """Close the manager."""
    manager, _ = _managers.pop(engine)
    await asyncio.gather(*(task.abort() for task in _tasks))
    await manager.aclose()
