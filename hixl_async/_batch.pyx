"""Prepared lists of copies."""

cimport cython
from cpython.buffer cimport PyObject_CheckBuffer
from cpython.mem cimport PyMem_Free, PyMem_Malloc

from ._memory cimport LocalMemory, RemoteMemory, Slice, check_access, check_reach, fill, raise_gone, whole
from .driver cimport *

from array import array

from . import errors

cdef dict VERBS = {"read": HXA_READ, "write": HXA_WRITE}


cdef object _rows(object rows):
    """Any N x 3 table of 64-bit integers as a typed view, without copying where it already is one."""
    if not PyObject_CheckBuffer(rows):
        flat = array("Q")
        try:
            for triple in rows:
                loff, roff, length = triple
                flat.extend((loff, roff, length))
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.InvalidArgumentError(
                "rows must be triples (local offset, remote offset, length) of integers in 0..2**64-1"
            ) from error
        if not flat:
            raise errors.InvalidArgumentError("the batch has no descriptors; leave the call out when there is nothing to move")
        return memoryview(flat).cast("B").cast("Q", (len(flat) // 3, 3))
    view = memoryview(rows)
    if view.ndim != 2 or view.shape[1] != 3:
        raise errors.InvalidArgumentError(
            f"rows must have shape (N, 3): local offset, remote offset, length; got {tuple(view.shape)}"
        )
    if view.shape[0] == 0:
        raise errors.InvalidArgumentError("the batch has no descriptors; leave the call out when there is nothing to move")
    if view.itemsize != 8 or view.format.lstrip("@=<") not in ("Q", "L", "q", "l"):
        raise errors.InvalidArgumentError(f"rows must hold 64-bit integers (uint64), not format {view.format!r}")
    if not view.c_contiguous:
        raise errors.BufferTypeError("rows must be C-contiguous; pass numpy.ascontiguousarray(rows)")
    # A negative int64 becomes a huge offset here, and the bounds check names it.
    return view.cast("B").cast("Q", view.shape)


cdef list _parts(object parts):
    """The parts of a batch as tuples of two or three."""
    try:
        listed = [tuple(part) for part in parts]
    except TypeError:
        listed = [()]
    if any(len(part) not in (2, 3) for part in listed):
        raise errors.InvalidArgumentError(
            "parts must be a sequence whose members are (local, remote, rows) or (local_slice, remote_slice)"
        )
    return listed


@cython.final
cdef class Batch:
    """A prepared list of copies: one peer, one direction, N descriptors, one completion.  May be submitted many times.

    ``Batch(verb, local, remote, rows)`` takes an N x 3 C-contiguous buffer of 64-bit integers (numpy, array, memoryview) or
    a sequence of triples: local offset, remote offset, length, in bytes, counted from the start of `local` and `remote`
    (regions or ranges of them).  ``Batch(verb, parts)`` takes a sequence of ``(local, remote, rows)`` or ``(local_slice,
    remote_slice)``.  Everything is validated here, once.

    :param verb: ``"read"`` (remote to local) or ``"write"`` (local to remote).
    :raises InvalidArgumentError: if `verb`, a part or the shape of `rows` is malformed, or there is no descriptor.
    :raises RangeError: if a descriptor has length 0 or reaches outside; its number is in `index`.
    :raises AccessError: if the remote region does not grant `verb`.
    """

    def __cinit__(self, verb, local, remote=None, rows=None):
        cdef list parts = []
        cdef Slice left, right
        cdef size_t total = 0
        try:
            self.verb = VERBS[verb]
        except (KeyError, TypeError):
            raise errors.InvalidArgumentError(f"verb must be 'read' or 'write', not {verb!r}") from None
        self.memories = []
        for part in [(local, remote, rows)] if remote is not None else _parts(local):
            left = whole(part[0], "local", LocalMemory)
            right = whole(part[1], "remote", RemoteMemory)
            table = _rows(part[2]) if len(part) == 3 and part[2] is not None else None
            self._adopt(left.memory, right.memory)
            parts.append((left, right, table))
            total += 1 if table is None else table.shape[0]
        if total == 0:
            raise errors.InvalidArgumentError("the batch has no descriptors; leave the call out when there is nothing to move")
        if total > self.link.driver.descriptor_limit:
            raise errors.InvalidArgumentError(
                f"{total} descriptors are more than the {self.link.driver.descriptor_limit} that driver "
                f"{self.link.driver.name!r} takes at once; split the batch"
            )
        self.desc = <hxa_desc *>PyMem_Malloc(total * sizeof(hxa_desc))
        if self.desc == NULL:
            raise MemoryError()
        for left, right, table in parts:
            if table is None:
                self._add_slices(left, right)
            else:
                self._add_rows(left, right, table)

    def __dealloc__(self):
        PyMem_Free(self.desc)

    def __len__(self):
        return self.count

    def __repr__(self):
        return f"<Batch {'write' if self.verb == HXA_WRITE else 'read'}: {self.count} copies, {self.nbytes} bytes>"

    cdef int _adopt(self, LocalMemory local, RemoteMemory remote) except -1:
        """One peer per batch, the right access, and each memory pinned once."""
        if not remote.alive:
            raise_gone(remote)
        if not local.alive:
            raise_gone(local)
        if self.link is None:
            self.link = remote.link
        elif self.link is not remote.link:
            raise errors.InvalidArgumentError("all parts of a batch must belong to one peer; make one batch per peer")
        if local.core is not remote.core:
            raise errors.InvalidArgumentError(f"{local!r} belongs to another engine than {remote!r}")
        check_access(remote, self.verb)
        if local.mems[self.link.driver.index] == NULL:
            check_reach(local, self.link.driver)
        if self.verb == HXA_READ and local.readonly:
            raise errors.BufferTypeError("the local region was registered from a read-only buffer; it cannot be read into")
        if local not in self.memories:
            self.memories.append(local)
        if remote not in self.memories:
            self.memories.append(remote)
        return 0

    cdef int _add_slices(self, Slice left, Slice right) except -1:
        if left.length != right.length or left.length == 0:
            raise errors.RangeError(
                f"descriptor {self.count}: {left.length} local and {right.length} remote bytes; "
                "lengths must be equal and not 0",
                index=self.count,
            )
        fill(&self.desc[self.count], left.memory, left.offset, right.memory, right.offset, left.length, self.link.driver)
        self.count += 1
        self.nbytes += left.length
        return 0

    cdef int _add_rows(self, Slice left, Slice right, const uint64_t[:, ::1] table) except -1:
        cdef Py_ssize_t i, n = table.shape[0], bad = -1
        cdef uint64_t loff, roff, length, moved = 0
        cdef hxa_desc *desc = self.desc + self.count
        cdef hxa_desc first
        if left.length and right.length:
            fill(&first, left.memory, left.offset, right.memory, right.offset, 1, self.link.driver)
        cdef uint64_t lsize = left.length, rsize = right.length
        with nogil:
            for i in range(n):
                loff = table[i, 0]
                roff = table[i, 1]
                length = table[i, 2]
                # By subtraction, for loff + length may overflow 64 bits.
                if length == 0 or length > lsize or loff > lsize - length or length > rsize or roff > rsize - length:
                    bad = i
                    break
                desc[i] = first
                desc[i].loff += loff
                desc[i].roff += roff
                desc[i].len = length
                moved += length
        if bad >= 0:
            raise errors.RangeError(
                f"descriptor {self.count + bad} (local {table[bad, 0]}, remote {table[bad, 1]}, length {table[bad, 2]}) is "
                f"empty or reaches outside (local {lsize}, remote {rsize} bytes)",
                index=self.count + bad,
            )
        self.count += n
        self.nbytes += moved
        return 0
