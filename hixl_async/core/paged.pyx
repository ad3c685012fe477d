"""Copies between two paged arrays: blocks of tokens, tokens of heads, heads of bytes."""

cimport cython
from cpython cimport array
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from array import array as new_array

from .. import errors
from ..display import shown

cdef array.array WORDS = new_array("Q")


@cython.final
cdef class BlockTable:
    """The blocks that hold the tokens of a sequence, in order.

    :param ids: the block ids.
    :param start: the position in the sequence of the first token of the first block.
    :raises InvalidArgumentError: if `ids` are not different whole numbers from 0, or `start` is not a whole number from 0.
    """

    cdef array.array table
    cdef readonly int64_t start
    cdef readonly int64_t largest     # of the ids

    def __cinit__(self, ids, start=0):
        cdef int64_t block
        if type(start) is not int or not 0 <= start < 1 << 62:
            raise errors.InvalidArgumentError(f"start must be a whole number from 0, not {shown(start)}")
        try:
            self.table = new_array("q", ids)
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.InvalidArgumentError(f"ids must be a sequence of block ids, at least one: {error}") from error
        if not len(self.table):
            raise errors.InvalidArgumentError("ids must be a sequence of block ids, at least one")
        self.start = start
        for block in self.table.data.as_longlongs[:len(self.table)]:
            if block < 0:
                raise errors.InvalidArgumentError(f"ids must be whole numbers from 0, not {block}")
            self.largest = max(self.largest, block)
        self._check_different()

    cdef int _check_different(self) except -1:
        """Put the ids into a hash table of twice their number, open addressing, and fail at the first that is there."""
        cdef size_t count = len(self.table), size = 4, slot
        cdef int64_t block
        while size < 2 * count:
            size *= 2
        cdef int64_t *slots = <int64_t *>calloc(size, sizeof(int64_t))  # an id plus one; 0: empty
        if slots == NULL:
            raise MemoryError()
        try:
            for block in self.table.data.as_longlongs[:count]:
                slot = (<uint64_t>block * 0x9E3779B97F4A7C15U >> 20) & (size - 1)
                while slots[slot]:
                    if slots[slot] == block + 1:
                        raise errors.InvalidArgumentError(
                            f"ids must be different, and {block} is there twice: a block holds tokens of one place of a "
                            "sequence"
                        )
                    slot = (slot + 1) & (size - 1)
                slots[slot] = block + 1
        finally:
            free(slots)
        return 0

    def __len__(self):
        """Return the number of blocks."""
        return len(self.table)

    @property
    def ids(self):
        """The block ids."""
        return tuple(self.table)


cdef struct Side:                     # of a copy; strides and offsets in bytes
    const int64_t *ids
    int64_t start, block_tokens
    int64_t block, token, head        # strides
    int64_t offset                    # of the first head that is copied
    int64_t at                        # of the next token, after `_seek`


cdef Side _side(BlockTable table, tuple geometry) except *:
    cdef Side side
    side.ids, side.start = <const int64_t *>table.table.data.as_longlongs, table.start
    side.block_tokens, side.block, side.token, side.head, side.offset = geometry
    return side


cdef inline int64_t _seek(Side *side, int64_t position) noexcept nogil:
    """Find the place of a token, and return how many from it on are in its block."""
    cdef int64_t index = (position - side.start) // side.block_tokens
    cdef int64_t token = (position - side.start) - index * side.block_tokens
    side.at = side.ids[index] * side.block + token * side.token + side.offset
    return side.block_tokens - token


@cython.final
cdef class _Runs:
    """The rows of ``Batch.strided``, which grow."""

    cdef array.array words
    cdef Py_ssize_t used

    def __cinit__(self):
        self.words = array.clone(WORDS, 6 * 64, False)

    cdef int add(
        self, int64_t here, int64_t here_stride, int64_t there, int64_t there_stride, int64_t length, int64_t count
    ) except -1:
        if self.used + 6 > len(self.words):
            array.resize(self.words, 2 * len(self.words))
        cdef uint64_t *row = <uint64_t *>self.words.data.as_ulonglongs + self.used
        row[0], row[1], row[2], row[3], row[4], row[5] = here, here_stride, there, there_stride, length, count
        self.used += 6
        return 0


def paged_runs(BlockTable here not None, tuple ours, BlockTable there not None, tuple theirs, int64_t first, int64_t last,
               int64_t item, int64_t heads):
    """Return the copies of some tokens between two paged arrays: as few as contiguity on both sides allows.

    The block tables must hold the tokens; offsets count from where the arrays begin.

    :param here: the source's blocks.
    :param ours: the source's tokens in a block; its strides of block, token and head; the offset of the first head to copy.
    :param there: the target's blocks.
    :param theirs: the same of the target.
    :param first: the position in the sequence of the first token.
    :param last: the position after the last one.
    :param item: the bytes of one head of a token.
    :param heads: the number of heads.
    :return: an N x 6 buffer of uint64, the rows of ``Batch.strided``.
    """
    cdef Side a = _side(here, ours), b = _side(there, theirs)
    cdef _Runs runs = _Runs()
    cdef int64_t step, i, begin = 0, end = 0, tokens = 0, position = first
    # A token is contiguous on both sides; then pieces that follow each other on both sides are one.
    cdef bint whole = heads == 1 or (a.head == item and b.head == item)
    if whole:
        item *= heads
    while position < last:
        step = min(_seek(&a, position), _seek(&b, position), last - position)
        position += step
        if whole:
            if tokens and a.at == begin + tokens * a.token and b.at == end + tokens * b.token:
                tokens += step
                continue
            if tokens:
                _add_tokens(runs, &a, begin, &b, end, item, tokens)
            begin, end, tokens = a.at, b.at, step
        elif a.token == item and b.token == item:  # one head of the piece is contiguous
            runs.add(a.at, a.head, b.at, b.head, step * item, heads)
        elif heads <= step:
            for i in range(heads):
                runs.add(a.at + i * a.head, a.token, b.at + i * b.head, b.token, item, step)
        else:
            for i in range(step):
                runs.add(a.at + i * a.token, a.head, b.at + i * b.token, b.head, item, heads)
    if tokens:
        _add_tokens(runs, &a, begin, &b, end, item, tokens)
    array.resize(runs.words, runs.used)
    return memoryview(runs.words).cast("B").cast("Q", (runs.used // 6, 6))


cdef int _add_tokens(
    _Runs runs, const Side *a, int64_t begin, const Side *b, int64_t end, int64_t item, int64_t tokens
) except -1:
    """Add the run of tokens that are contiguous themselves."""
    if a.token == item and b.token == item:
        return runs.add(begin, 0, end, 0, tokens * item, 1)
    return runs.add(begin, a.token, end, b.token, item, tokens)
