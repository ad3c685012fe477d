"""One time budget in each pass of the loop, shared by all connections in turn.

Budgets for single connections would add up: many connections of one hostile process could occupy the loop without limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

__all__ = ["FairScheduler", "Progress", "Step"]

#: Seconds that the steps of one pass may take together; the last of them may overrun it.
BUDGET = 0.001


class Progress(Enum):
    """The result of a step."""

    #: Nothing is left to do.
    IDLE = "idle"
    #: There may be more to do.
    MORE = "more"
    #: The step needs a whole pass for itself, and has not begun.
    POSTPONED = "postponed"


#: A function that does one small piece of work.
Step: TypeAlias = Callable[[], Progress]


class FairScheduler:
    """A scheduler that runs steps round robin, as long as the budget of a pass lasts, and the others in later passes.

    A step runs inside of `submit` if there is time, so that an idle loop adds no delay.  The scheduler belongs to the loop in
    which the first step is submitted.
    """

    def __init__(self, budget: float = BUDGET, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        :param budget: seconds in each pass.
        :param clock: returns the time in seconds.  ``loop.time()`` is unsuitable, because uvloop's is constant during a pass.
        """
        self._budget = budget
        self._clock = clock
        self._spent = 0.0
        self._queue: OrderedDict[Step, None] = OrderedDict()
        self._running = False
        self._renewal: asyncio.Handle | None = None

    def __len__(self) -> int:
        """The number of steps that wait for their turn."""
        return len(self._queue)

    @property
    def fresh(self) -> bool:
        """True if none of this pass's budget is spent; only meant for steps."""
        return self._spent == 0.0

    def submit(self, step: Step) -> None:
        """Run `step` until it is idle, now or in later passes as the budget allows; no error if it is queued already."""
        if step in self._queue:
            return
        self._queue[step] = None
        # Waiting steps were submitted earlier, and the next pass begins with them.
        if len(self._queue) == 1 and not self._running:
            self._run()

    def withdraw(self, step: Step) -> None:
        """Remove `step` from the queue; no error if it is not queued."""
        self._queue.pop(step, None)

    def charge(self, seconds: float) -> None:
        """Count time that a step causes elsewhere in the same pass."""
        self._spent += seconds

    async def turn(self, seconds: float) -> None:
        """Wait until a pass has time for work of the calling task that takes about so many seconds."""
        granted = asyncio.get_running_loop().create_future()

        def grant() -> Progress:
            if not granted.done():
                granted.set_result(None)
                self.charge(seconds)
            return Progress.IDLE

        self.submit(grant)
        try:
            await granted
        finally:
            self.withdraw(grant)

    def _run(self) -> None:
        """Run steps in turn until the budget is spent or all of them are idle."""
        self._running = True
        now = self._clock()
        try:
            while self._queue and self._spent < self._budget:
                before = now
                step, _ = self._queue.popitem(last=False)
                try:
                    progress = step()
                finally:
                    now = self._clock()
                    self._spent += now - before
                if progress is Progress.MORE:
                    self._queue[step] = None
                elif progress is Progress.POSTPONED:
                    self._queue[step] = None
                    self._queue.move_to_end(step, last=False)
                    break
        finally:
            self._running = False
            # A renewal costs a pass of the loop, which is not worth it while little was spent.
            if self._renewal is None and (self._queue or self._spent > self._budget / 4):
                self._renewal = asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """Begin a pass with a new budget."""
        self._renewal = None
        self._spent = 0.0
        self._run()
