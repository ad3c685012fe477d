# Prepared lists of copies; every field explained.
from libc.stdint cimport uint32_t, uint64_t

from ._link cimport Link
from ._memory cimport LocalMemory, RemoteMemory, Slice
from .driver cimport hxa_desc


cdef class Batch:
    cdef hxa_desc *desc
    cdef readonly size_t count        # descriptors
    cdef readonly uint64_t nbytes
    cdef uint32_t verb
    cdef readonly Link link
    cdef list memories                # every Memory that the descriptors name, each once

    cdef int _adopt(self, LocalMemory local, RemoteMemory remote) except -1
    cdef int _add_slices(self, Slice left, Slice right) except -1
    cdef int _add_rows(self, Slice left, Slice right, const uint64_t[:, ::1] table) except -1
