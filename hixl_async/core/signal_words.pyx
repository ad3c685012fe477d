"""Words that peers store by signals, read so that the data that was written before them is visible."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from .. import errors
from .unpicklable import unpicklable

cdef extern from *:
    """
    static inline uint64_t hxa_word_load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
    /* After the words: what their writer stored before them is visible from here on. */
    static inline void hxa_words_acquire(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
    """
    uint64_t hxa_word_load(const uint64_t *word) nogil
    void hxa_words_acquire() nogil


@cython.final
cdef class SignalWords:
    """The 64-bit words of a region, with the value that each had when it was last looked at.

    :param memory: a buffer whose bytes are words, aligned to 8.
    :raises InvalidArgumentError: if it is not.
    """

    cdef Py_buffer view
    cdef const uint64_t *words
    cdef uint64_t *seen
    cdef readonly size_t count

    __reduce__ = unpicklable("look at the words in the process that owns them")

    def __cinit__(self, memory):
        PyObject_GetBuffer(memory, &self.view, PyBUF_SIMPLE)
        if self.view.len % 8 or <uintptr_t>self.view.buf % 8:
            raise errors.InvalidArgumentError("memory must consist of words: 8 bytes each, aligned to 8")
        self.words = <const uint64_t *>self.view.buf
        self.count = self.view.len // 8
        self.seen = <uint64_t *>calloc(self.count, 8)  # pages are taken as words change
        if self.seen == NULL:
            raise MemoryError()

    def __dealloc__(self):
        self.close()
        free(self.seen)

    def close(self):
        """Let go of the memory; no word changes any more.  Idempotent."""
        self.count = 0
        PyBuffer_Release(&self.view)

    def changes(self, size_t stop):
        """Return the words that have changed since the last call.

        :param stop: the number of words to look at, from the first.
        :return: pairs of a word's index and its value.
        """
        cdef list found = []
        cdef uint64_t value
        cdef size_t index
        for index in range(min(stop, self.count)):
            value = hxa_word_load(self.words + index)
            if value != self.seen[index]:
                self.seen[index] = value
                found.append((index, value))
        if found:
            hxa_words_acquire()
        return found
