"""A listening socket that limits the accepted connections, in each pass of the loop and in total.

::

    accepted ──▶ silent ──first byte──▶ waiting ──▶ handshake ──▶ its owner
                   │ others need its place,             │ others wait, and its time is over
                   │ or its time is over                │
                   ▼                                    ▼
                refused                              cancelled
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias

from ..core.guard import report
from ..core.log import Log
from ..errors import BusyError, ConnectError, HixlError
from .limits import descriptor_limit

__all__ = ["AcceptLimiter", "PerformHandshake", "Refuse"]

_log = Log("hixl_async.control")

#: A function that performs the handshake of one connection.  If it raises or is cancelled the limiter closes the socket; its
#: exception is passed to the loop's exception handler.
PerformHandshake: TypeAlias = Callable[[socket.socket], Coroutine[Any, Any, None]]
#: A function that tells the other side why it is refused, if it can without waiting; the limiter closes the socket.
Refuse: TypeAlias = Callable[[socket.socket, HixlError], None]

# Connections accepted before the loop serves other callbacks; each takes about 50 us.
_ACCEPTED_PER_PASS = 8
# Accepted connections that have sent nothing yet, or wait for a handshake; no more than an eighth of all descriptors.
_MOST_WAITING = 256
# Seconds before the next try.  Without memory the socket stays readable, so that immediate tries would keep the loop busy.
_RETRY = 0.1
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_OUT_OF_MEMORY = {errno.ENOBUFS, errno.ENOMEM}
# Seconds between two warnings that the descriptors are exhausted.
_WARNING_INTERVAL = 60.0


class _Handshake(NamedTuple):
    task: asyncio.Task[None]
    since: float


class AcceptLimiter:
    """The acceptor of a listening socket, which performs at most `capacity` handshakes at a time.

    A connection costs little until it sends its first byte: then its handshake begins, or waits until another has ended.
    Connections that send nothing are refused in favour of new ones, oldest first.  While others wait, the handshake that has
    run longest is cancelled after `patience` seconds, so that a stalled handshake does not block the others for its whole
    timeout.

    One descriptor is kept in reserve: when all others are in use, connections are still accepted, and told why they are
    refused.
    """

    def __init__(
        self,
        sock: socket.socket,
        perform: PerformHandshake,
        refuse: Refuse,
        *,
        capacity: int,
        patience: float,
        silence: float,
    ) -> None:
        """
        :param sock: a non-blocking socket that listens already.
        :param capacity: the most handshakes at a time.
        :param patience: seconds that a handshake may take while others wait.
        :param silence: seconds after which a connection that sends nothing is refused in any case.
        """
        self._sock = sock
        self._perform = perform
        self._refuse = refuse
        self._capacity = capacity
        self._patience = patience
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._most_waiting = min(_MOST_WAITING, max(8, descriptor_limit() // 8))
        self._silent: dict[socket.socket, float] = {}  # the time of accepting, oldest first
        self._waiting: deque[socket.socket] = deque()  # for a handshake
        self._handshakes: dict[socket.socket, _Handshake] = {}  # oldest first
        self._accepting = False
        self._closed = False
        self._retry: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._patience_timer: asyncio.TimerHandle | None = None
        self._next_warning = 0.0
        self._spare: int | None = _spare_descriptor()
        self._resume()

    def __len__(self) -> int:
        """The number of handshakes under way."""
        return len(self._handshakes)

    @property
    def silent(self) -> int:
        """The number of connections that have sent nothing yet."""
        return len(self._silent)

    def close(self) -> None:
        """Stop accepting, and end all handshakes; the listening socket stays open.  Idempotent."""
        if self._closed:
            return
        self._pause()
        self._closed = True
        for timer in (self._retry, self._silence_timer, self._patience_timer):
            if timer is not None:
                timer.cancel()
        for sock in self._silent:
            self._loop.remove_reader(sock.fileno())
        for sock in (*self._silent, *self._waiting):
            self._turn_away(sock, BusyError("the listener closes"))
        self._silent.clear()
        self._waiting.clear()
        for handshake in self._handshakes.values():
            handshake.task.cancel()
        self._close_spare()

    async def wait_empty(self) -> None:
        """Wait until no handshake is under way."""
        if self._handshakes:
            await asyncio.wait([handshake.task for handshake in self._handshakes.values()])

    def abandon(self) -> None:
        """Close only the descriptors, for the child of a fork."""
        for sock in (*self._silent, *self._waiting, *self._handshakes):
            sock.close()
        self._close_spare()

    # -- accepting

    def _resume(self) -> None:
        self._retry = None
        if not self._accepting and not self._closed:
            self._accepting = True
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _pause(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._sock.fileno())

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_PER_PASS):
            if not self._make_room():
                self._pause()
                return
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF_MEMORY or (
                    error.errno in _OUT_OF_DESCRIPTORS and not self._refuse_with_spare(error)
                ):
                    self._pause()
                    self._retry = self._loop.call_later(_RETRY, self._resume)
                    return
                continue  # that connection was closed before it was accepted (accept(2), "error handling")
            sock.setblocking(False)
            self._silent[sock] = self._loop.time()
            self._loop.add_reader(sock.fileno(), self._spoke, sock)
            self._watch_silence()

    def _make_room(self) -> bool:
        """Refuse a silent connection if there are too many, and return True if one more may be accepted."""
        if len(self._silent) + len(self._waiting) < self._most_waiting:
            return True
        return self._refuse_oldest_silent(BusyError("it sent nothing, and others need its place"))

    def _refuse_with_spare(self, error: OSError) -> bool:
        """Free a descriptor for the connection that could not be accepted, or refuse it; return False if that fails."""
        self._warn(error)
        reason = BusyError("the listener has no descriptor left", native=error.errno)
        if self._refuse_oldest_silent(reason):
            return True
        if self._spare is None:
            self._spare = _spare_descriptor()
            return self._spare is not None
        self._close_spare()
        try:
            sock, _address = self._sock.accept()
        except OSError:
            return False
        else:
            sock.setblocking(False)
            self._turn_away(sock, reason)
            return True
        finally:
            self._spare = _spare_descriptor()

    def _warn(self, error: OSError) -> None:
        now = self._loop.time()
        if now >= self._next_warning:
            self._next_warning = now + _WARNING_INTERVAL
            _log.warning(
                "the listener refuses connections, because %s (%s): this process may have %d; raise the limit with "
                "'ulimit -n', LimitNOFILE= of systemd or --ulimit nofile= of a container",
                "it is out of descriptors" if error.errno == errno.EMFILE else "the system is out of descriptors",
                errno.errorcode[error.errno or 0],
                descriptor_limit(),
            )

    def _turn_away(self, sock: socket.socket, error: HixlError) -> None:
        self._refuse(sock, error)
        sock.close()

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    # -- silence

    def _refuse_oldest_silent(self, error: HixlError) -> bool:
        """Refuse the connection that has been silent for longest, or return False if none is silent."""
        while self._silent:
            sock = next(iter(self._silent))
            if _readable(sock):
                self._spoke(sock)  # the loop has not reported it yet
            else:
                del self._silent[sock]
                self._loop.remove_reader(sock.fileno())
                self._turn_away(sock, error)
                return True
        return False

    def _watch_silence(self) -> None:
        if self._silence_timer is None and self._silent:
            oldest = next(iter(self._silent.values()))
            self._silence_timer = self._loop.call_at(oldest + self._silence, self._end_silence)

    def _end_silence(self) -> None:
        self._silence_timer = None
        now = self._loop.time()
        while self._silent and next(iter(self._silent.values())) + self._silence <= now:
            self._refuse_oldest_silent(ConnectError(f"the handshake took longer than {self._silence:g} s"))
        self._watch_silence()
        self._resume_with_room()

    def _spoke(self, sock: socket.socket) -> None:
        """Handle the first bytes of a connection, or its end."""
        self._loop.remove_reader(sock.fileno())
        del self._silent[sock]
        self._waiting.append(sock)
        self._begin_next()

    # -- handshakes

    def _begin_next(self) -> None:
        while self._waiting and len(self._handshakes) < self._capacity:
            sock = self._waiting.popleft()
            task = self._loop.create_task(self._perform(sock))
            self._handshakes[sock] = _Handshake(task, self._loop.time())
            task.add_done_callback(functools.partial(self._ended, sock))
        if self._waiting and self._patience_timer is None:
            oldest = next(iter(self._handshakes.values()))
            due = oldest.since + self._patience
            self._patience_timer = self._loop.call_at(due, self._cancel_oldest, oldest, due)

    def _cancel_oldest(self, oldest: _Handshake, due: float) -> None:
        now = self._loop.time()
        if now - due > self._patience / 4:
            # The loop itself is late, so that an answer of the other side may wait to be read.
            due = now + self._patience
            self._patience_timer = self._loop.call_at(due, self._cancel_oldest, oldest, due)
        else:
            self._patience_timer = None
            oldest.task.cancel()

    def _ended(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            sock.close()  # the task may not even have begun
        elif error := task.exception():
            sock.close()
            report(self._loop, "hixl_async: a handshake failed in an unexpected way", error)
        del self._handshakes[sock]
        if self._closed:
            return
        if self._patience_timer is not None:
            self._patience_timer.cancel()
            self._patience_timer = None
        self._begin_next()
        self._resume_with_room()

    def _resume_with_room(self) -> None:
        if self._retry is None and len(self._silent) + len(self._waiting) < self._most_waiting:
            self._resume()


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _spare_descriptor() -> int | None:
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
