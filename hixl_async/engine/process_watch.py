"""The watch over a peer's process, as far as the kernel of this host knows it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from ..control import has_ended, is_ending

__all__ = ["ProcessWatch"]


class ProcessWatch:
    """Report the end of a process once.

    :param loop: the event loop.
    :param pidfd: the descriptor of the process, owned from here on; None for example on another host.
    :param pid: its id; 0 if it is in a PID namespace that ours cannot see.
    :param ended: called when the process has ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pidfd: int | None, pid: int, ended: Callable[[], None]) -> None:
        self._loop = loop
        self._pidfd = pidfd
        self._pid = pid
        self._ended = ended
        if pidfd is not None:
            loop.add_reader(pidfd, self._report)

    @property
    def has_ended(self) -> bool:
        """True if the process has ended and that was not reported yet; the loop may see it later than the kernel."""
        return self._pidfd is not None and has_ended(self._pidfd)

    @property
    def is_ending(self) -> bool | None:
        """True if the kernel is ending the process, so that its end will be reported; None if it cannot tell."""
        return False if self._pidfd is None else is_ending(self._pid)

    @property
    def may_be_reported(self) -> bool:
        """True if the kernel will report the end of the process, and it is not our own."""
        return self._pidfd is not None and self._pid != os.getpid()

    def check(self) -> None:
        """Report the end now if the loop has not seen it yet."""
        if self.has_ended:
            self._report()

    def _report(self) -> None:
        self.stop()
        self._ended()

    def stop(self) -> None:
        """Watch no longer.  Idempotent."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptor, nothing more: in a child of fork() the loop is the parent's."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
