"""The number of connections that one process, one user and one host may have at a time."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Hashable

from ..errors import ConnectError
from .process import Credentials

__all__ = ["ConnectionLimits"]

#: Descriptors that a connection with a link of the shm driver takes: socket, pidfd, two of each half of the link.
_DESCRIPTORS = 6
_UNLIMITED = 1 << 20


class ConnectionLimits:
    """Counts the connections that are open, so that one process cannot take all descriptors from the others.

    By default one process may have connections for half of this process's descriptors, 512 at most; one user, or one
    host over TCP, for seven eighths of them, 4096 at most.  With the usual 1,024 descriptors that is 85 and 149.  An engine
    needs one connection to each other engine, so that a program only meets the limits if it runs that many engines.
    """

    def __init__(self, per_process: int | None = None, per_user: int | None = None) -> None:
        """
        :param per_process: connections of one process on this host; None: by the number of descriptors.
        :param per_user: connections of one user on this host, or of one other host; None: by the number of descriptors.
        """
        fit = descriptor_limit() / _DESCRIPTORS
        self.per_process = min(512, max(1, int(fit / 2))) if per_process is None else per_process
        self.per_user = min(4096, max(1, int(fit * 7 / 8))) if per_user is None else per_user
        self._open: Counter[Hashable] = Counter()

    def admit(self, origin: Credentials | str) -> Callable[[], None]:
        """Count one more connection.

        :param origin: the process at the other end, or its host where the kernel does not know the process.
        :return: takes the connection out of the count; to be called once it is closed, idempotent.
        :raises ConnectError: if there are too many already; the message says of whom and how many.
        """
        bounds: list[tuple[Hashable, str, int]] = []
        if isinstance(origin, Credentials):
            if origin.pid > 0:  # otherwise it lives in a PID namespace that this process cannot see
                bounds.append((("process", origin.pid), f"process {origin.pid}", self.per_process))
            bounds.append((("user", origin.uid), f"user {origin.uid}", self.per_user))
        else:
            bounds.append((("host", origin), f"host {origin}", self.per_user))
        for key, who, most in bounds:
            if self._open[key] >= most:
                raise ConnectError(
                    f"{who} has {self._open[key]} connections to this engine already, and it may have {most}: close "
                    f"some, or raise the engine's limit of descriptors, from which this one follows (ulimit -n)"
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
    """The number of descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft
