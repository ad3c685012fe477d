# The fields of memories and ranges.
from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint32_t, uint64_t

from .link cimport CoreBase, Driver, Link, MAX_DRIVERS
from .driver cimport hxa_desc, hxa_mem


cdef class Memory:
    cdef hxa_mem *mems[MAX_DRIVERS]   # one handle per driver (remote memory has exactly one)
    cdef char *address                # local memory: its first byte; NULL for remote memory
    cdef uint64_t nbytes
    cdef uint32_t rights              # HXA_RIGHT_*: the access that a peer may have
    cdef bint usable                  # new work may use it
    cdef Py_ssize_t holds             # operations, and peers that have it mapped, that pin it
    cdef Py_ssize_t retiring          # those among them that are drivers releasing it
    cdef Py_ssize_t exports           # buffer views of it
    cdef CoreBase core
    cdef list waiters                 # futures of released()
    cdef object __weakref__

    cdef int _unpin(self) except -1
    cdef int _end_use(self) except -1
    cdef int _release_when_unused(self) except -1
    cdef int _release(self) except -1


cdef class LocalMemory(Memory):
    cdef Py_buffer source             # of registered memory: the view that keeps it alive
    cdef object owner                 # of registered memory without the buffer protocol: the object itself
    cdef bint is_readonly
    cdef bint on_device
    cdef int allocator                # 1 + index of the driver that the pages belong to, or 0
    cdef list retirements             # pending calls of drivers that release it later

    cdef bint _awaits_drivers(self) except -1
    cdef int _give_back(self, int index) except -1
    cdef int _leak(self, object error) except -1


cdef class Places:
    cdef list bases                   # first addresses, ascending
    cdef list memories                # the LocalMemory that begins at each
    cdef list ends                    # the highest end of it and all before it, because memories may overlap

    cdef int add(self, LocalMemory memory) except -1
    cdef int discard(self, LocalMemory memory) except -1
    cdef int _measure(self) except -1
    cdef LocalMemory find(self, uint64_t address, uint64_t size, int index)


cdef class RemoteMemory(Memory):
    cdef Link link
    cdef object on_unmap              # called before a mapping that a device knows is removed


cdef class LocalSlice:
    cdef LocalMemory memory
    cdef uint64_t start               # bytes from the start of the memory
    cdef uint64_t nbytes


cdef class RemoteSlice:
    cdef RemoteMemory memory
    cdef uint64_t start               # bytes from the start of the memory
    cdef uint64_t nbytes


cdef LocalSlice whole_local(object side, str name)
cdef RemoteSlice whole_remote(object side, str name)
cdef int check_access(Memory remote, uint32_t verb) except -1
cdef int check_contents(object buffer, Py_buffer *view) except -1
cdef int check_reach(LocalMemory local, Driver driver) except -1
cdef int raise_gone(object memory) except -1


cdef inline void fill(hxa_desc *desc, Memory local, uint64_t loff, Memory remote, uint64_t roff, uint64_t length,
                      Driver driver) noexcept:
    """Fill one descriptor; a memory that the driver does not know is named by its address."""
    desc.lmem = local.mems[driver.index]
    desc.loff = loff if desc.lmem != NULL else <uint64_t>local.address + loff
    desc.rmem = remote.mems[driver.index]
    desc.roff = roff
    desc.len = length
