"""Process P: prefills prompts in chunks, and pushes their layers into D's memory."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from scheduler.compute import Compute
from scheduler.model import BatchedLlama
from scheduler.policy import Prefill
from support.worker import Worker, start

import hixl_async as hx

from .cache import Cache


async def program(worker: Worker) -> None:
    """Serve D's requests until the router leaves."""
    async with hx.kv.Pool(worker.engine, worker.view(), access="none", shuffle=1) as pool:
        with Compute(BatchedLlama(worker.model, worker.memory(pool)).step) as compute:
            cache = Cache(pool)
            policy = Prefill(cache, compute)

            async def prefill(decode: hx.Peer, body: dict[str, Any]) -> None:
                # D has cancelled it, or has died: another D will ask again.
                with suppress(hx.StreamAbortedError, hx.TicketError, hx.PeerLostError, hx.PeerDownError):
                    await policy.prefill(body["number"], body["tokens"], body["first"], decode, body["ticket"])

            worker.engine.serve("prefill", prefill)
            cache.serve(worker.engine)
            await worker.serve_until_router_leaves()


if __name__ == "__main__":
    start("P", program)
