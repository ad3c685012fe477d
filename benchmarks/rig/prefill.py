"""A prefill worker without a device: a thread that takes as long as a device would, and hands over each finished layer."""

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
    """The history of one request; times in nanoseconds of CLOCK_MONOTONIC."""

    #: The time of its arrival.
    arrived: int
    #: The times at which the layers were computed and handed over.
    computed: list[int]
    #: The times at which they were in the decode process.
    landed: list[int]
    #: The duration until its computation could begin.
    opening: int = 0

    @property
    def first_token(self) -> int:
        """The time from the arrival until decoding can begin."""
        return max(self.landed) - self.arrived

    @property
    def exposed(self) -> int:
        """The time from the end of the computation until decoding can begin: the cost of the transfer."""
        return max(self.landed) - self.computed[-1]

    @property
    def latencies(self) -> list[int]:
        """The times of the layers' transfers."""
        return [there - here for here, there in zip(self.computed, self.landed, strict=True)]


async def run_requests(
    carrier: Carrier, count: int, layers: int, slots: int, layer_seconds: float, check: bool = False
) -> list[Course]:
    """Run `count` requests that arrive at once and are computed one after another, as long as there are blocks for them.

    :param slots: the number of requests that can have blocks at any time: one that is not transferred yet delays others.
    :raises RuntimeError: if `check` is true and other bytes arrive than were sent.
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
            # Counted from the start, so that a late end of one sleep does not delay the next one.
            time.sleep(max(0.0, start + (layer + 1) * layer_seconds - time.monotonic()))
            course.computed.append(time.monotonic_ns())
            request.push(layer)
