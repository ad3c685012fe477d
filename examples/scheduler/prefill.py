"""Process P: prefills prompts in chunks, and pushes their layers into D's memory."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from support.worker import Worker, start

import hixl_async as hx

from .cache import Cache
from .compute import Compute
from .model import BatchedLlama
from .policy import Prefill
from .report import serve_report
from .timeline import Recorder


async def program(worker: Worker) -> None:
    """Serve D's requests until main.py leaves."""
    recorder = Recorder()
    # Blocks are lent in a random order, so that nothing succeeds because both sides' block tables happen to be equal.
    async with hx.kv.Pool(worker.engine, worker.view(), access="none", shuffle=1) as pool:
        with Compute(recorder.recorded("prefill", BatchedLlama(worker.model, worker.memory(pool)).step)) as compute:
            policy = Prefill(Cache(pool), compute)

            async def prefill(decode: hx.Peer, body: dict[str, Any]) -> None:
                # D has cancelled it, or is gone, or a transfer has failed; D's stream then ends, too.
                with suppress(hx.StreamError, hx.TransferError, hx.PeerDownError):
                    await policy.prefill(body["number"], body["tokens"], body["first"], decode, body["ticket"])

            worker.engine.serve("prefill", prefill)
            serve_report(worker.engine, policy.cache, recorder)
            await worker.serve_until_router_leaves()


if __name__ == "__main__":
    start("P", program)
