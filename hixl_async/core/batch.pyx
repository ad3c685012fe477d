"""Prepared lists of copies."""

cimport cython
from cpython.buffer cimport PyBUF_FULL_RO, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.number cimport PyNumber_Index
from libc.string cimport memcpy

from .memory cimport (
    LocalMemory, LocalSlice, Memory, RemoteMemory, RemoteSlice, check_access, check_reach, fill, raise_gone, whole_local,
    whole_remote,
)
from .driver cimport *

import sys
from array import array

from .. import errors
from ..display import shown
from .unpicklable import unpicklable

# In place of a verb: an empty batch, to be filled here.
cdef object _EMPTY = object()
cdef str _TRIPLE = "local offset, remote offset, length"
cdef str _SIX = "local offset, local stride, remote offset, remote stride, length, count"
cdef dict VERBS = {"read": HXA_READ, "write": HXA_WRITE}


cdef bint _is_table(object rows, Py_ssize_t width) noexcept:
    """Return True if `rows` is a buffer of such rows already; most are, and this takes a fifth of the time of `_table`."""
    cdef Py_buffer view
    cdef bint fits
    try:
        PyObject_GetBuffer(rows, &view, PyBUF_FULL_RO)
    except Exception:
        return False
    fits = (view.ndim == 2 and view.shape[0] > 0 and view.shape[1] == width and view.itemsize == 8
            and view.suboffsets == NULL and view.format != NULL and view.format[0] in (b"Q", b"L") and view.format[1] == 0
            and view.strides[1] == 8 and view.strides[0] == 8 * width)
    PyBuffer_Release(&view)
    return fits


cdef object _table(object rows, Py_ssize_t width, str words):
    """Return an N x `width` table of 64-bit integers as a typed view, without a copy if it is a buffer already."""
    if PyObject_CheckBuffer(rows) and _is_table(rows, width):
        return memoryview(rows)
    if not PyObject_CheckBuffer(rows) and hasattr(rows, "__dlpack__") and "numpy" in sys.modules:
        try:
            rows = sys.modules["numpy"].from_dlpack(rows)  # a tensor; reading it row by row takes a hundred times as long
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise errors.BufferTypeError(f"rows: {type(rows).__name__} cannot be used by DLPack: {error}") from error
    if not PyObject_CheckBuffer(rows):
        flat, row = array("Q"), rows
        try:
            for row in rows:
                members = tuple(row)
                if len(members) != width or _has_flag(members):
                    raise ValueError
                flat.extend(members)
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.InvalidArgumentError(
                f"rows must be sequences ({words}) of integers in 0..2**64-1, not {shown(row)}"
            ) from error
        if not flat:
            raise _nothing_to_move()
        return memoryview(flat).cast("B").cast("Q", (len(flat) // width, width))
    try:
        view = memoryview(rows)
    except (TypeError, ValueError, BufferError) as error:  # it was released, or has a type without a format (datetime64)
        raise errors.InvalidArgumentError(f"rows must be 64-bit integers (uint64) in a buffer: {error}") from error
    if view.ndim != 2 or view.shape[1] != width:
        raise errors.InvalidArgumentError(f"rows must have shape (N, {width}): {words}; got {tuple(view.shape)}")
    if view.shape[0] == 0:
        raise _nothing_to_move()
    if view.itemsize != 8 or view.format.lstrip("@=<") not in ("Q", "L", "q", "l"):
        raise errors.InvalidArgumentError(f"rows must hold 64-bit integers (uint64), not format {view.format!r}")
    if not view.c_contiguous:
        raise errors.BufferTypeError("rows must be C-contiguous; pass numpy.ascontiguousarray(rows)")
    # A negative int64 becomes a huge offset here, and the bounds check names it.
    return view.cast("B").cast("Q", view.shape)


cdef bint _has_flag(tuple members) except -1:
    """Return True if a bool is among the numbers of a row."""
    for member in members:
        if member is True or member is False:
            return True
    return False


cdef object _nothing_to_move():
    return errors.InvalidArgumentError("the batch has no descriptors; leave the call out when there is nothing to move")


cdef list _parts(object parts):
    """Return the parts of a batch as tuples of two or three."""
    cdef list listed = []
    part = parts
    if isinstance(parts, (Memory, LocalSlice, RemoteSlice)):
        raise errors.InvalidArgumentError("remote is missing: a batch has two sides, or a sequence of parts in place of both")
    try:
        for part in parts:
            members = tuple(part)
            if len(members) not in (2, 3):
                raise TypeError
            listed.append(members)
    except TypeError:
        raise errors.InvalidArgumentError(
            "parts must be a sequence whose members are (local, remote, rows) or (local_slice, remote_slice), not "
            + shown(part)
        ) from None
    return listed


@cython.final
cdef class Batch:
    """A prepared list of copies: one peer, one direction, N descriptors, one completion; may be submitted many times.

    ``Batch(verb, local, remote, rows)`` makes one copy of each row.  ``Batch(verb, parts)`` takes a sequence of ``(local,
    remote, rows)`` or ``(local_slice, remote_slice)``.  `strided` takes copies at regular distances.  All copies are validated
    once, here, and copies that are adjacent on both sides become one descriptor.

    :param verb: ``"read"`` (remote to local) or ``"write"`` (local to remote).
    :param local: a region of this engine or a range of one, from whose start offsets count; or the sequence of parts.
    :param remote: a region of a peer or a range of one, from whose start offsets count.
    :param rows: an N x 3 C-contiguous buffer of 64-bit integers (numpy, array, memoryview), a CPU tensor or a sequence of
        triples: local offset, remote offset, length, all in bytes.  Default: one copy of the whole of both.
    :raises InvalidArgumentError: if `verb`, a part or the shape of `rows` is malformed, there is no descriptor, there are more
        than the driver takes, or the parts belong to several peers.
    :raises RangeError: if a descriptor has length 0 or reaches outside; its number is in `index`.
    :raises AccessError: if the remote region does not grant `verb`.
    :raises BufferTypeError: if `rows` is not contiguous, or the driver cannot use the local region.
    :raises ClosedError: if a local region is closed.
    :raises StaleRegionError: if a remote region was closed.
    :raises PeerDownError: if the peer is down.
    """

    __reduce__ = unpicklable("send its verb, names of regions and rows, and make it of them there")

    def __cinit__(self, verb, local, remote=None, rows=None):
        cdef list parts = []
        cdef LocalSlice left
        cdef RemoteSlice right
        cdef size_t total = 0
        if verb is _EMPTY:
            return
        self._begin(verb)
        for part in [(local, remote, rows)] if remote is not None else _parts(local):
            left = whole_local(part[0], "local")
            right = whole_remote(part[1], "remote")
            table = _table(part[2], 3, _TRIPLE) if len(part) == 3 and part[2] is not None else None
            self._adopt(left.memory, right.memory)
            parts.append((left, right, table))
            total += 1 if table is None else table.shape[0]
        if total == 0:
            raise _nothing_to_move()
        self._reserve(total, len(parts))
        for left, right, table in parts:
            if table is None:
                self._add_slices(left, right)
            else:
                self._add_rows(left, right, table)
        self._end()

    @classmethod
    def strided(cls, verb, local, remote=None, runs=None):
        """Make a batch of copies at regular distances, such as one head's keys of all tokens.

        ``Batch.strided(verb, parts)`` takes a sequence of ``(local, remote, runs)``.

        :param verb: ``"read"`` (remote to local) or ``"write"`` (local to remote).
        :param local: a region of this engine or a range of one, from whose start offsets count; or the sequence of parts.
        :param remote: a region of a peer or a range of one, from whose start offsets count.
        :param runs: an N x 6 buffer of 64-bit integers or a sequence of rows of six: local offset, local stride, remote offset,
            remote stride, length, count; all in bytes but the count.  The k-th copy of a run moves `length` bytes at offset +
            k * stride on both sides.
        :return: a `Batch`.
        :raises InvalidArgumentError: if `verb`, a part or the shape of `runs` is malformed, there is no run, there are more
            descriptors than the driver takes, or the parts belong to several peers.
        :raises RangeError: if a run has length or count 0 or reaches outside; its number is in `index`.
        :raises AccessError: if the remote region does not grant `verb`.
        :raises BufferTypeError: if `runs` is not contiguous, or the driver cannot use a local region.
        :raises ClosedError: if a local region is closed.
        :raises StaleRegionError: if a remote region was closed.
        :raises PeerDownError: if the peer is down.
        """
        cdef Batch batch = Batch.__new__(Batch, _EMPTY, None)
        cdef LocalSlice left
        cdef RemoteSlice right
        cdef const uint64_t[:, ::1] table
        cdef list parts = []
        cdef size_t total = 0
        cdef Py_ssize_t i
        batch._begin(verb)
        for part in [(local, remote, runs)] if remote is not None else _parts(local):
            if len(part) != 3 or part[2] is None:
                raise errors.InvalidArgumentError(f"each part of a strided batch is (local, remote, runs), not {shown(part)}")
            left = whole_local(part[0], "local")
            right = whole_remote(part[1], "remote")
            listed = _table(part[2], 6, _SIX)
            table = listed
            batch._adopt(left.memory, right.memory)
            for i in range(table.shape[0]):
                total += min(table[i, 5], batch.link.driver.descriptor_limit + 1)
            parts.append((left, right, listed))
        if not parts:
            raise _nothing_to_move()
        batch._reserve(total, len(parts))
        for left, right, table in parts:
            batch._add_runs(left, right, table)
        batch._end()
        return batch

    def shifted(self, local=0, remote=0):
        """Make a batch of the same copies at other offsets, at the cost of copying the descriptors.

        :param local: bytes that are added to each local offset; may be negative.
        :param remote: bytes that are added to each remote offset; may be negative.
        :return: a `Batch`.
        :raises RangeError: if a descriptor would leave the ranges that this batch was made for; for a batch of pairs of slices
            these are their regions.
        :raises InvalidArgumentError: if a shift is not an integer.
        """
        cdef Batch batch
        cdef size_t i
        cdef int64_t here, there
        try:
            if isinstance(local, bool) or isinstance(remote, bool):
                raise TypeError
            here, there = PyNumber_Index(local), PyNumber_Index(remote)
        except TypeError:
            raise errors.InvalidArgumentError(
                f"shifts are whole numbers of bytes, not {shown(local)} and {shown(remote)}") from None
        except OverflowError:
            raise errors.RangeError(
                f"{self!r} shifted by {shown(local)} local and {shown(remote)} remote bytes reaches outside") from None
        for i in range(self.n_extents):
            if not (_fits(&self.extents[i].local, here) and _fits(&self.extents[i].remote, there)):
                raise errors.RangeError(f"{self!r} shifted by {here} local and {there} remote bytes reaches outside")
        batch = Batch.__new__(Batch, _EMPTY, None)
        batch.verb, batch.link, batch.memories = self.verb, self.link, self.memories
        batch.rows, batch.total_bytes = self.rows, self.total_bytes
        batch.origin = self if self.origin is None else self.origin
        batch._reserve(self.n_descriptors, self.n_extents)
        batch.n_descriptors, batch.n_extents = self.n_descriptors, self.n_extents
        memcpy(batch.extents, self.extents, self.n_extents * sizeof(Extent))
        for i in range(self.n_extents):
            _shift(&batch.extents[i].local, here)
            _shift(&batch.extents[i].remote, there)
        # In two's complement adding a negative shift wraps around to the right place.
        for i in range(self.n_descriptors):
            batch.desc[i] = self.desc[i]
            batch.desc[i].loff += <uint64_t>here
            batch.desc[i].roff += <uint64_t>there
        return batch

    def __dealloc__(self):
        PyMem_Free(self.desc)
        PyMem_Free(self.first)
        PyMem_Free(self.extents)

    def __len__(self):
        """Return the number of copies, as the program listed them."""
        return self.rows

    @property
    def count(self):
        """The number of descriptors, after adjacent copies were merged."""
        return self.n_descriptors

    @property
    def nbytes(self):
        """The number of bytes of all copies together."""
        return self.total_bytes

    def __repr__(self):
        merged = f" in {self.n_descriptors} descriptors" if self.n_descriptors != self.rows else ""
        return f"<Batch {'write' if self.verb == HXA_WRITE else 'read'}: {self.rows} copies{merged}, {self.total_bytes} bytes>"

    cdef int _begin(self, verb) except -1:
        try:
            self.verb = VERBS[verb]
        except (KeyError, TypeError):
            raise errors.InvalidArgumentError(f"verb must be 'read' or 'write', not {shown(verb)}") from None
        self.memories = []
        return 0

    cdef int _adopt(self, LocalMemory local, RemoteMemory remote) except -1:
        """Check the peer and the access of one part, and add its memories, each once."""
        if not remote.usable:
            raise_gone(remote)
        if not local.usable:
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
        if self.verb == HXA_READ and local.is_readonly:
            raise errors.BufferTypeError("the local region was registered from a read-only buffer; it cannot be read into")
        if local not in self.memories:
            self.memories.append(local)
        if remote not in self.memories:
            self.memories.append(remote)
        return 0

    cdef int _reserve(self, size_t descriptors, size_t extents) except -1:
        """Allocate room for the descriptors, at most the driver's limit; more are not refused yet, as they may be merged."""
        self.room = min(descriptors, self.link.driver.descriptor_limit)
        self.desc = <hxa_desc *>PyMem_Malloc(self.room * sizeof(hxa_desc))
        self.extents = <Extent *>PyMem_Malloc(extents * sizeof(Extent))
        if self.desc == NULL or self.extents == NULL:
            raise MemoryError()
        return 0

    cdef int _end(self) except -1:
        if self.overflow:
            raise errors.InvalidArgumentError(
                f"{self.rows} copies make more than the {self.room} descriptors that driver {self.link.driver.name!r} takes at "
                "once; split the batch"
            )
        return 0

    cdef int _map_row(self) except -1 nogil:
        """Record that the last descriptor begins with row `rows`; the map is made once the two numbers differ."""
        cdef size_t i
        if self.first == NULL:
            if self.rows == self.n_descriptors - 1:
                return 0
            with gil:
                self.first = <size_t *>PyMem_Malloc(self.room * sizeof(size_t))
                if self.first == NULL:
                    raise MemoryError()
            for i in range(self.n_descriptors - 1):
                self.first[i] = i
        self.first[self.n_descriptors - 1] = self.rows
        return 0

    cdef int64_t _row(self, int64_t descriptor) noexcept:
        """Return the number of a descriptor's row, as the program listed it; for merged rows the number of the first."""
        cdef Batch made = self if self.origin is None else self.origin
        return descriptor if made.first == NULL or descriptor < 0 else <int64_t>made.first[descriptor]

    cdef int _add(self, const hxa_desc *piece, size_t floor) except -1 nogil:
        """Add one copy, merged with the previous descriptor if that is number `floor` or later."""
        cdef hxa_desc *last
        if self.n_descriptors > floor:
            last = &self.desc[self.n_descriptors - 1]
            if (piece.lmem == last.lmem and piece.rmem == last.rmem and piece.loff == last.loff + last.len
                    and piece.roff == last.roff + last.len):
                last.len += piece.len
                self.rows += 1
                self.total_bytes += piece.len
                return 0
        if self.n_descriptors == self.room:
            self.overflow = True
        else:
            self.desc[self.n_descriptors] = piece[0]
            self.n_descriptors += 1
            self._map_row()
        self.rows += 1
        self.total_bytes += piece.len
        return 0

    cdef int _add_slices(self, LocalSlice left, RemoteSlice right) except -1:
        cdef hxa_desc piece
        cdef Extent *extent = &self.extents[self.n_extents - 1] if self.n_extents else NULL
        cdef Memory local = left.memory, remote = right.memory
        cdef size_t floor = self.n_descriptors
        if left.nbytes != right.nbytes or left.nbytes == 0:
            raise errors.RangeError(
                f"descriptor {self.rows}: {left.nbytes} local and {right.nbytes} remote bytes; "
                "lengths must be equal and not 0",
                index=self.rows,
            )
        if extent != NULL and extent.whole_of == <void *>local and extent.whole_of_remote == <void *>remote:
            floor = extent.begin
        else:
            extent = &self.extents[self.n_extents]
            self.n_extents += 1
            extent.begin, extent.whole_of, extent.whole_of_remote = floor, <void *>local, <void *>remote
            extent.local = Span(0, local.nbytes, left.start, left.start)
            extent.remote = Span(0, remote.nbytes, right.start, right.start)
        _cover(&extent.local, left.start, left.nbytes)
        _cover(&extent.remote, right.start, right.nbytes)
        fill(&piece, local, left.start, remote, right.start, left.nbytes, self.link.driver)
        self._add(&piece, floor)
        return 0

    cdef Extent *_begin_extent(self, LocalSlice left, RemoteSlice right) noexcept:
        """Begin the extent of rows or runs, which count from the start of two ranges."""
        cdef Extent *extent = &self.extents[self.n_extents]
        self.n_extents += 1
        extent.begin, extent.whole_of, extent.whole_of_remote = self.n_descriptors, NULL, NULL
        extent.local = Span(0, left.nbytes, <uint64_t>-1, 0)
        extent.remote = Span(0, right.nbytes, <uint64_t>-1, 0)
        return extent

    cdef int _add_rows(self, LocalSlice left, RemoteSlice right, const uint64_t[:, ::1] table) except -1:
        cdef Py_ssize_t i, n = table.shape[0], bad = -1
        cdef uint64_t loff, roff, length
        cdef hxa_desc first, piece
        cdef Extent *extent = self._begin_extent(left, right)
        if left.nbytes and right.nbytes:
            fill(&first, left.memory, left.start, right.memory, right.start, 1, self.link.driver)
        cdef uint64_t lsize = left.nbytes, rsize = right.nbytes
        with nogil:
            for i in range(n):
                loff = table[i, 0]
                roff = table[i, 1]
                length = table[i, 2]
                # By subtraction, because loff + length may overflow 64 bits.
                if length == 0 or length > lsize or loff > lsize - length or length > rsize or roff > rsize - length:
                    bad = i
                    break
                piece = first
                piece.loff += loff
                piece.roff += roff
                piece.len = length
                _cover(&extent.local, loff, length)
                _cover(&extent.remote, roff, length)
                self._add(&piece, extent.begin)
        if bad >= 0:
            raise errors.RangeError(
                f"descriptor {self.rows} (local {table[bad, 0]}, remote {table[bad, 1]}, length {table[bad, 2]}) is "
                f"empty or reaches outside (local {lsize}, remote {rsize} bytes)",
                index=self.rows,
            )
        return 0

    cdef int _add_runs(self, LocalSlice left, RemoteSlice right, const uint64_t[:, ::1] table) except -1:
        cdef Py_ssize_t i, n = table.shape[0], bad = -1
        cdef uint64_t loff, lstride, roff, rstride, length, count
        cdef hxa_desc first, piece
        cdef Extent *extent = self._begin_extent(left, right)
        if left.nbytes and right.nbytes:
            fill(&first, left.memory, left.start, right.memory, right.start, 1, self.link.driver)
        with nogil:
            for i in range(n):
                loff, lstride = table[i, 0], table[i, 1]
                roff, rstride = table[i, 2], table[i, 3]
                length, count = table[i, 4], table[i, 5]
                if count == 0 or not (_reaches(left.nbytes, loff, lstride, length, count)
                                      and _reaches(right.nbytes, roff, rstride, length, count)):
                    bad = i
                    break
                _cover(&extent.local, loff, (count - 1) * lstride + length)
                _cover(&extent.remote, roff, (count - 1) * rstride + length)
                piece = first
                piece.loff += loff
                piece.roff += roff
                piece.len = length
                if lstride == length and rstride == length:
                    piece.len = length * count
                    self._add(&piece, extent.begin)
                    self.rows += count - 1
                    continue
                for _ in range(count):
                    self._add(&piece, extent.begin)
                    if self.overflow:
                        break
                    piece.loff += lstride
                    piece.roff += rstride
        if bad >= 0:
            raise errors.RangeError(
                f"run {bad} (local {table[bad, 0]} every {table[bad, 1]}, remote {table[bad, 2]} every {table[bad, 3]}, "
                f"length {table[bad, 4]}, {table[bad, 5]} times) is empty or reaches outside (local {left.nbytes}, remote "
                f"{right.nbytes} bytes)",
                index=bad,
            )
        return 0


cdef inline bint _reaches(uint64_t size, uint64_t offset, uint64_t stride, uint64_t length, uint64_t count) noexcept nogil:
    """Return True if a run lies inside; by subtraction and division, because the products may overflow 64 bits."""
    if length == 0 or length > size or offset > size - length:
        return False
    return stride == 0 or count - 1 <= (size - length - offset) // stride


cdef inline void _cover(Span *span, uint64_t offset, uint64_t length) noexcept nogil:
    span.least = min(span.least, offset)
    span.most = max(span.most, offset + length)


cdef inline bint _fits(const Span *span, int64_t by) noexcept nogil:
    if by < 0:
        return <uint64_t>(-(by + 1)) < span.least - span.floor
    return <uint64_t>by <= span.roof - span.most


cdef inline void _shift(Span *span, int64_t by) noexcept nogil:
    span.least += <uint64_t>by
    span.most += <uint64_t>by


# -- the port for the engine package

def link_of(Batch batch not None):
    """Return the link that a batch is for."""
    return batch.link
