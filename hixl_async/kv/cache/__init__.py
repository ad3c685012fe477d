"""Caches under keys, with the verbs of LLM-DataDist, awaitable: the flat public surface of ``hixl_async.kv.cache``.

=========================================  ==============================================================================
`CacheManager`                             the caches of one engine: pull, push, copy, link, switch roles
`Cache`                                    one contiguous or paged cache
`CacheKey`, `BlocksCacheKey`,
`CacheKeyByIdAndIndex`                     the names of caches and of places in them, at a peer
`CacheTask`                                a pull or a push under way: await it, or iterate its layers
`Arrival`                                  the pushes of a request, at the side that receives them
`Role`                                     prompt, decoder or both
=========================================  ==============================================================================
"""

from .arrival import Arrival
from .cache import Cache
from .keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from .manager import CacheManager
from .roles import Role
from .task import CacheTask

__all__ = [
    "Arrival",
    "BlocksCacheKey",
    "Cache",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheTask",
    "Role",
]
