"""What a process reports at the end."""

from __future__ import annotations

from typing import Any

import hixl_async as hx

from .cache import Cache
from .timeline import Recorder

SPANS = 500  # that fit into an answer


def serve_report(engine: hx.Engine, cache: Cache, recorder: Recorder) -> None:
    """Let main.py ask what happened, and how the pool is at the end."""

    async def report(_router: hx.Peer, _body: dict[str, Any]) -> dict[str, Any]:
        while cache.drop():
            pass
        async with cache.pool.reserve(blocks=cache.pool.blocks):
            pass  # all are free: nothing is lost, or can be written by a peer
        pool, transfers = cache.pool.statistics(), engine.stats()
        return {
            "pool": str(pool),
            "free": pool.free,
            "pinned": transfers.pinned,  # by transfers whose end is not known
            "failed": transfers.failed,
            "reused": cache.reused,
        }

    async def spans(_router: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
        return {"spans": recorder.spans[body["first"] : body["first"] + SPANS]}

    engine.serve("report", report)
    engine.serve("spans", spans)
