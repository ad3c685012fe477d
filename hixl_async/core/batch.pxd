# The fields of prepared lists of copies.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from .link cimport Link
from .memory cimport LocalMemory, LocalSlice, RemoteMemory, RemoteSlice
from .driver cimport hxa_desc


cdef struct Span:                     # of one side, in bytes
    uint64_t floor, roof              # the range in which descriptors may lie
    uint64_t least, most              # the range in which they lie


cdef struct Extent:                   # descriptors that were added together
    size_t begin                      # the first of them
    void *whole_of                    # Memory: offsets count from its start, and may reach all of it; NULL: from a range's
    void *whole_of_remote
    Span local, remote


cdef class Batch:
    cdef hxa_desc *desc
    cdef size_t n_descriptors         # after merging adjacent copies
    cdef size_t room                  # the most descriptors
    cdef bint overflow                # there were more descriptors
    cdef size_t rows                  # copies as the program listed them
    cdef size_t *first                # number of the first row of each descriptor; NULL: its own
    cdef Extent *extents
    cdef size_t n_extents
    cdef uint64_t total_bytes
    cdef uint32_t verb
    cdef Link link
    cdef list memories                # every Memory that the descriptors name, each once
    cdef Batch origin                 # the batch that this one is a shifted copy of; it has the numbers of rows

    cdef int _begin(self, verb) except -1
    cdef int _adopt(self, LocalMemory local, RemoteMemory remote) except -1
    cdef int _reserve(self, size_t descriptors, size_t extents) except -1
    cdef int _end(self) except -1
    cdef int _map_row(self) except -1 nogil
    cdef int64_t _row(self, int64_t descriptor) noexcept
    cdef int _add(self, const hxa_desc *piece, size_t floor) except -1 nogil
    cdef int _add_slices(self, LocalSlice left, RemoteSlice right) except -1
    cdef Extent *_begin_extent(self, LocalSlice left, RemoteSlice right) noexcept
    cdef int _add_rows(self, LocalSlice left, RemoteSlice right, const uint64_t[:, ::1] table) except -1
    cdef int _add_runs(self, LocalSlice left, RemoteSlice right, const uint64_t[:, ::1] table) except -1
