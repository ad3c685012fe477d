"""The thread that computes one step after the other, while the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import hixl_async as hx

from .records import OnLayer, Part, Sample, Step


class Compute:
    """A thread for the steps of a model, in the order of the calls; a context manager.

    :param step: the model's step.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._thread = ThreadPoolExecutor(1, "compute")

    def __enter__(self) -> Compute:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    async def __call__(
        self, parts: Sequence[Part], blocks: Sequence[hx.kv.Blocks], on_layer: OnLayer | None = None
    ) -> list[Sample]:
        """Compute a step, whose blocks stay reserved until it is over, even if this call is cancelled."""
        shared = [each.share() for each in blocks]
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._step, parts, on_layer)

        def over(work: asyncio.Future[list[Sample]]) -> None:
            work.exception()  # looked at, because after a cancellation no one else does
            for each in shared:
                _ = each.aclose()

        work.add_done_callback(over)
        return await asyncio.shield(work)
