"""The blocks of a pool, lent together with those of earlier prompts that begin alike."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from hixl_async.kv import Blocks, Pool


class Cache:
    """Lends the blocks of a pool, and keeps those of prompts for later prompts that begin alike."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self._size = pool, pool.views[0].block_tokens
        self.reused = 0  # tokens that were there already
        self._kept: dict[tuple[int, ...], Blocks] = {}  # by their tokens; the least recently used first
        self._door = asyncio.Lock()  # in order; and only one waits while it holds a beginning

    @property
    def tokens(self) -> int:
        """The number of tokens that the pool can hold."""
        return self.pool.blocks * self._size

    async def reserve(self, tokens: list[int], held: AsyncExitStack) -> tuple[Blocks | None, Blocks]:
        """Return blocks in which the beginning is already, if there are any, and blocks for the rest."""
        async with self._door:
            if beginning := self._find(tokens):
                held.push_async_callback(beginning.aclose)
            first = beginning.tokens if beginning else 0
            self.reused += first
            while self.pool.statistics().free * self._size < len(tokens) - first and self.drop():
                pass
            rest = await held.enter_async_context(self.pool.reserve(tokens=len(tokens) - first, start=first))
            return beginning, rest

    def _find(self, tokens: list[int]) -> Blocks | None:
        for count in range((len(tokens) - 1) // self._size, 0, -1):  # a token remains, whose logits are needed
            if blocks := self._kept.pop(key := tuple(tokens[: count * self._size]), None):
                self._kept[key] = blocks
                return blocks.share()
        return None

    def keep(self, tokens: list[int], blocks: Blocks) -> None:
        """Keep the full blocks of a prompt."""
        for count in range(1, len(tokens) // self._size + 1):
            if (key := tuple(tokens[: count * self._size])) not in self._kept:
                self._kept[key] = blocks[:count]

    def drop(self) -> bool:
        """Drop what was not used for the longest time; return False if there is nothing."""
        if self._kept:
            _ = self._kept.pop(next(iter(self._kept))).aclose()
            return True
        return False

    def make_way(self) -> None:
        """Keep nothing for which someone has to wait."""
        while self.pool.statistics().waiting and self.drop():
            pass
