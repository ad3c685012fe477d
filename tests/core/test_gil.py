"""C12: the GIL is held for copies estimated below ~100 us, and released above."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hixl_async.testing import engine_pair

from .conftest import gil_kept


class Counter:
    """A thread that counts whenever it gets the GIL, and never keeps it."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop:
            self.count += 1
            time.sleep(0.00005)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            with gil_kept():
                while self.count == 0:
                    os.sched_yield()
                yield
        finally:
            self._stop = True
            self._thread.join()


async def test_c12_held_for_small_copies() -> None:
    size = 4096
    async with engine_pair() as pair:
        here = pair.left.allocate("here", size)
        there, remote = await pair.region("there", size)
        counter = Counter()
        with counter.running():
            before = counter.count
            for _ in range(5000):
                pair.left.write(here, remote)
            during = counter.count - before
        assert during == 0, "a small copy let go of the GIL"
        assert there


async def test_c12_released_for_large_copies() -> None:
    size = 64 << 20
    async with engine_pair(drivers={"shm": {"inline_bytes": 2 * size}}) as pair:
        here = pair.left.allocate("here", size)
        there, remote = await pair.region("there", size)
        counter = Counter()
        with counter.running():
            before = counter.count
            for _ in range(3):
                assert pair.left.write(here, remote).done()
            during = counter.count - before
        assert during > 3, "large copies kept the GIL"
        assert there
