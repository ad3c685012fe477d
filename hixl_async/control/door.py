"""A listening socket that lets in no more visitors at a time than it can look after."""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Door", "Visit"]

#: Looks after one visitor. If it raises or is cancelled the door closes the socket; what it raises reaches the loop's
#: exception handler.
Visit: TypeAlias = Callable[[socket.socket], Coroutine[Any, Any, None]]

# Visitors let in before the loop serves others.
_ACCEPTED_PER_PASS = 16
# Out of descriptors or memory, the socket stays readable: trying again at once would keep the loop busy with failing.
_EXHAUSTED_RETRY = 0.1
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class _Visitor(NamedTuple):
    task: asyncio.Task[None]
    since: float


class Door:
    """Accepts from `sock` and starts a task for each visitor; at most `capacity` of them are inside at a time.

    The others wait in the kernel's queue.  Then the visitor that has been inside longest is shown out, by cancelling
    its task, after `patience` seconds, so that those who say nothing cannot keep the others waiting for the whole of
    their time.
    """

    def __init__(self, sock: socket.socket, visit: Visit, *, capacity: int, patience: float) -> None:
        self._sock = sock
        self._visit = visit
        self._capacity = capacity
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._visitors: dict[socket.socket, _Visitor] = {}  # oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock.fileno(), self._accept)

    def __len__(self) -> int:
        """Visitors inside."""
        return len(self._visitors)

    def close(self) -> None:
        """Lets nobody in any more and shows everybody out; the socket stays open; idempotent."""
        if not self._capacity:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._capacity = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for visitor in self._visitors.values():
            visitor.task.cancel()

    async def wait_empty(self) -> None:
        """Waits until everybody has left."""
        if self._visitors:
            await asyncio.wait([visitor.task for visitor in self._visitors.values()])

    def abandon(self) -> None:
        """Closes the visitors' descriptors and nothing else, for the child of a fork."""
        for sock in self._visitors:
            sock.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_PER_PASS):
            if len(self._visitors) >= self._capacity:
                self._loop.remove_reader(self._sock.fileno())
                self._wait_for_room()
                return
            try:
                visitor, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._loop.remove_reader(self._sock.fileno())
                    self._timer = self._loop.call_later(_EXHAUSTED_RETRY, self._open)
                    return
                continue  # that visitor left before it was let in (accept(2), "error handling")
            visitor.setblocking(False)
            task = self._loop.create_task(self._visit(visitor))
            self._visitors[visitor] = _Visitor(task, self._loop.time())
            task.add_done_callback(functools.partial(self._left, visitor))

    def _open(self) -> None:
        self._timer = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _wait_for_room(self) -> None:
        oldest = next(iter(self._visitors.values()))
        due = oldest.since + self._patience
        self._timer = self._loop.call_at(due, self._show_out, oldest, due)

    def _show_out(self, oldest: _Visitor, due: float) -> None:
        now = self._loop.time()
        if now - due > self._patience / 4:
            # The loop itself is late: the visitor may have spoken long ago, and nobody listened.
            due = now + self._patience
            self._timer = self._loop.call_at(due, self._show_out, oldest, due)
        else:
            self._timer = None
            oldest.task.cancel()

    def _left(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            sock.close()  # the task may not even have begun
        elif error := task.exception():
            sock.close()
            self._loop.call_exception_handler(
                {"message": "hixl_async: a handshake failed in an unexpected way", "exception": error, "task": task}
            )
        full = len(self._visitors) >= self._capacity
        del self._visitors[sock]
        if full and self._capacity:
            if self._timer is not None:
                self._timer.cancel()
            self._open()
