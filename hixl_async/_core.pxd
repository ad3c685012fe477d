# The core of an engine.
from libc.stdint cimport uint32_t, uint64_t

from .core.batch cimport Batch
from .core.in_flight cimport InFlightTable
from .core.link cimport Driver, Link
from .core.memory cimport LocalMemory, LocalSlice, Memory, RemoteMemory
from .core.transfer cimport Transfer


cdef class Core(InFlightTable):
    cdef object address_of            # address_of(object, writable) -> (address, bytes, owner, on a device)
    cdef object begin_on_device       # begin_on_device(transfer) starts a copy that a device makes by itself

    cdef int _place(self, LocalMemory memory, Driver driver) except -1
    cdef int _own(self, LocalMemory memory, char *address, uint64_t size, uint32_t rights) except -1
    cdef int _must_be_new(self, LocalMemory memory) except -1
    cdef Transfer _single(self, uint32_t verb, object local, object remote, object notify, object signal,
                          object timeout, object priority)
    cdef Transfer _submit(self, Batch batch, object notify, object signal, object timeout, object priority)
    cdef int _pin_slice(self, Transfer transfer, LocalSlice left, uint32_t verb, Link link) except -1
    cdef uint64_t _pin_buffer(self, Transfer transfer, object local, uint32_t verb, Link link) except? <uint64_t>-1
    cdef int _find_place(self, Transfer transfer, object local, uint64_t size, Driver driver, bint device) except -1
    cdef int _attach_note(self, Transfer transfer, Driver driver, object notify) except -1
    cdef int _attach_signal(self, Transfer transfer, Driver driver, object signal) except -1
    cdef int _attach_options(self, Transfer transfer, object notify, object signal, object timeout, object priority) except -1
    cdef int _recheck(self, Transfer transfer) except -1
    cdef int _launch(self, Transfer transfer, object notify, object signal, object timeout, object priority) except -1
    cdef int _accept_on_device(self, Transfer transfer) except -1
