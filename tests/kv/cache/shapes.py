"""The shapes and keys of the caches in these tests; the other process imports nothing else of them."""

from __future__ import annotations

from typing import Any

from hixl_async.kv import Group, View
from hixl_async.kv.cache import BlocksCacheKey

LAYERS = 4
GROUP = Group.attention(LAYERS, kv_heads=2, head_dim=8, dtype="float32")
#: The keys of the whole caches of both sides.
LEFT, RIGHT = BlocksCacheKey(1), BlocksCacheKey(2)


def view(order: str = "LP/BTH", blocks: int = 16, block_tokens: int = 4, **more: Any) -> View:
    return View.ordered(GROUP, order, blocks=blocks, block_tokens=block_tokens, **more)
