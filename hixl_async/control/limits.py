"""The number of connections that one process, one user and one host may have at a time."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Hashable

from ..errors import ConnectError
from .process import Credentials

__all__ = ["ConnectionLimits"]

#: The descriptors of a connection with a link of the shm driver: socket, pidfd, two of each half of the link.
_DESCRIPTORS = 6
_UNLIMITED = 1 << 20


class ConnectionLimits:
    """The counts of open connections, which keep one process from taking all descriptors from the others.

    By default one process may have connections for half of this process's descriptors, at most 512; one user, or one host over
    TCP, for seven eighths of them, at most 4096.  With the usual 1,024 descriptors these are 85 and 149 connections.  An engine
    needs one connection to each other engine, so that a program only reaches the limits if it runs that many engines.
    """

    def __init__(self, per_process: int | None = None, per_user: int | None = None) -> None:
        """
        :param per_process: the most connections of one process on this host; by default from the number of descriptors.
        :param per_user: the most connections of one user on this host, or of one other host; by default likewise.
        """
        fit = descriptor_limit() / _DESCRIPTORS
        self.per_process = min(512, max(1, int(fit / 2))) if per_process is None else per_process
        self.per_user = min(4096, max(1, int(fit * 7 / 8))) if per_user is None else per_user
        self._open: Counter[Hashable] = Counter()

    def admit(self, origin: Credentials | str) -> Callable[[], None]:
        """Count one more connection.

        :param origin: the process at the other end, or its host where the kernel does not know the process.
        :return: a function that removes the connection from the count, to be called once it is closed; idempotent.
        :raises ConnectError: if there are too many already; the message says whose and how many.
        """
        bounds: list[tuple[Hashable, str, int]] = []
        if isinstance(origin, Credentials):
            if origin.pid > 0:  # otherwise it is in a PID namespace that this process cannot see
                bounds.append((("process", origin.pid), f"process {origin.pid}", self.per_process))
            bounds.append((("user", origin.uid), f"user {origin.uid}", self.per_user))
        else:
            bounds.append((("host", origin), f"host {origin}", self.per_user))
        for key, who, most in bounds:
            if self._open[key] >= most:
                raise ConnectError(
                    f"{who} has {self._open[key]} connections to this engine already, and it may have {most}: close "
                    f"some, or raise the engine's limit of descriptors, on which this limit depends (ulimit -n)"
                )
        keys = [key for key, _, _ in bounds]
        self._open.update(keys)

        def release() -> None:
            for key in keys:
                self._open[key] -= 1
                if not self._open[key]:
                    del self._open[key]
            keys.clear()

        return release


def descriptor_limit() -> int:
    """Return the number of descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft
