"""The scheduler's cache, with what a server has to tell of it."""

from __future__ import annotations

from typing import Any

from scheduler import cache

import hixl_async as hx


class Cache(cache.Cache):
    """Lends the blocks of a pool, and tells the router how many are in each state."""

    def serve(self, engine: hx.Engine) -> None:
        """Answer the router's questions about the blocks."""
        engine.serve("state", self._state)
        engine.serve("clear", self._clear)

    def _state(self, _router: hx.Peer, _body: dict[str, Any]) -> dict[str, Any]:
        pool = self.pool.statistics()
        kept = len({block for blocks in self._kept.values() for block in blocks.ids})
        return {"free": pool.free, "kept": kept, "used": pool.reserved - kept, "quarantined": pool.quarantined}

    def _clear(self, _router: hx.Peer, _body: dict[str, Any]) -> None:
        """Keep nothing of earlier prompts."""
        while self.drop():
            pass
