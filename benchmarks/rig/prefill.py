"""A prefill worker without a device: a thread that takes as long as one would, and hands each layer over when it is done."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from dataclasses import dataclass

from rig.carriers import Carrier, Request

__all__ = ["Course", "run_requests"]


@dataclass
class Course:
    """What became of one request; times in nanoseconds of CLOCK_MONOTONIC."""

    #: When it arrived.
    arrived: int
    #: When each layer was computed and handed over.
    computed: list[int]
    #: When each was in the decode process.
    landed: list[int]
    #: How long it took until there were blocks for it on both sides, and a way to them.
    opening: int = 0

    @property
    def first_token(self) -> int:
        """From the arrival until decoding can begin."""
        return max(self.landed) - self.arrived

    @property
    def exposed(self) -> int:
        """From the end of the computation until decoding can begin: what the transfer costs."""
        return max(self.landed) - self.computed[-1]

    @property
    def latencies(self) -> list[int]:
        """Of each layer's transfer."""
        return [there - here for here, there in zip(self.computed, self.landed, strict=True)]


async def run_requests(
    carrier: Carrier, count: int, layers: int, slots: int, layer_seconds: float, check: bool = False
) -> list[Course]:
    """`count` requests that arrive at once and are computed one after another, as long as there are blocks for them.

    :param slots: requests whose blocks are taken at any time: a request that is not yet carried away delays others.
    :raises RuntimeError: if `check` and bytes arrive that were not sent.
    """
    arrived = time.monotonic_ns()
    free = asyncio.Semaphore(slots)
    ready: queue.SimpleQueue[tuple[Request, Course] | None] = queue.SimpleQueue()
    device = threading.Thread(target=_compute, args=(ready, layers, layer_seconds))
    device.start()
    courses: list[Course] = []

    async def follow(request: Request, course: Course) -> None:
        course.landed, sums = await request.landed()
        if check and sums != carrier.checksums(request):
            raise RuntimeError(f"{carrier.name} carried other bytes than those that were sent")
        free.release()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await free.acquire()
                start = time.monotonic_ns()
                request = await carrier.begin(check)
                course = Course(arrived, [], [], time.monotonic_ns() - start)
                courses.append(course)
                ready.put((request, course))
                group.create_task(follow(request, course))
    finally:
        ready.put(None)
        device.join()
    return courses


def _compute(ready: queue.SimpleQueue[tuple[Request, Course] | None], layers: int, layer_seconds: float) -> None:
    while (job := ready.get()) is not None:
        request, course = job
        start = time.monotonic()
        for layer in range(layers):
            # From the start: that one sleep is late must not make the next one so.
            time.sleep(max(0.0, start + (layer + 1) * layer_seconds - time.monotonic()))
            course.computed.append(time.monotonic_ns())
            request.push(layer)
