"""Calls from other threads to the loop, which leave the calling thread the interpreter lock."""

cimport cython
from libc.stdint cimport uint64_t

from collections import deque

from .. import errors
from .guard import guarded
from .unpicklable import unpicklable

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int value, int flags)
    int EFD_CLOEXEC, EFD_NONBLOCK

cdef extern from "<unistd.h>" nogil:
    ssize_t write(int fd, const void *data, size_t count)
    ssize_t read(int fd, void *data, size_t count)
    int close(int fd)


@cython.final
cdef class ThreadCalls:
    """A queue of functions that the loop calls, and that any thread may fill.

    Like ``loop.call_soon_threadsafe``, but a call does not release the interpreter lock, as that does for its write to a
    socket: the loop's thread, which it wakes, would take the lock, and the calling thread would have to wait for it.

    :param loop: the loop, which must be open.
    """

    cdef object loop, calls
    cdef int fd
    cdef bint signalled

    __reduce__ = unpicklable("make one there, for a loop of that process")

    def __cinit__(self, loop):
        self.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.fd < 0:
            raise OSError("eventfd: no more descriptors")
        self.loop = loop
        self.calls = deque()
        loop.add_reader(self.fd, self._run)

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)

    def call(self, function):
        """Have the loop call `function` soon; legal from any thread.

        :raises ClosedError: if the queue or the loop is closed.
        """
        cdef uint64_t one = 1
        if self.fd < 0 or self.loop.is_closed():
            raise errors.ClosedError("the engine's event loop is closed")
        self.calls.append(function)
        if not self.signalled:
            self.signalled = True
            write(self.fd, &one, 8)  # with the lock held: it does not block

    def close(self):
        """Call what waits, and take no more calls; on the loop's thread.  Idempotent."""
        if self.fd >= 0:
            if not self.loop.is_closed():
                self.loop.remove_reader(self.fd)
            self._run()
            close(self.fd)
            self.fd = -1

    def _run(self):
        cdef uint64_t count
        self.signalled = False
        read(self.fd, &count, 8)
        for _ in range(len(self.calls)):
            guarded(self.loop, "a call of another thread failed", self.calls.popleft())
