"""Copies that a device makes by itself, between its memory and a peer's memory that is mapped here."""

cimport cython
from cpython.mem cimport PyMem_Malloc

from .in_flight cimport InFlightTable
from .link cimport driver_error
from .memory cimport RemoteMemory
from .transfer cimport ACTIVE, FAILED, Transfer
from .driver cimport *

from .. import errors

# Seconds between two looks at the device's events: the first, and what it doubles up to while nothing happens.
cdef double SHORTEST_LOOK = 0.00005
cdef double LONGEST_LOOK = 0.001


@cython.final
cdef class DeviceCopies:
    """Those of one engine that are under way.

    The driver lends the mapped address, so that neither a fence nor a stop passes the copy by.  Devices have no descriptor to
    wait for, so their events are asked, by one timer for all and only while there are any.  What follows the data, a signal or
    a notification, goes to the driver when the copy is over (C11).

    :param pin: ``pin(tensor, address, nbytes)`` makes a mapping known to the device; answers what undoes it, or None.
    :param copy: ``copy(tensor, address, nbytes, to_device)`` begins a copy; answers its event, which has ``query()``.
    """

    cdef InFlightTable core
    cdef object pin, copy, timer
    cdef list under_way
    cdef double delay

    def __cinit__(self, InFlightTable core not None, pin, copy):
        self.core, self.pin, self.copy, self.under_way, self.delay = core, pin, copy, [], SHORTEST_LOOK

    def begin(self, Transfer transfer not None):
        """Begin the copy of a transfer whose local side is a tensor of a device."""
        if transfer.device is None or transfer.held:
            raise TypeError(f"{transfer!r} does not wait for a device")
        cdef const hxa_driver *table = transfer.link.driver.table
        cdef RemoteMemory remote = transfer.remote
        cdef void *address = NULL
        cdef int answer
        tensor = transfer.local
        if transfer.signal is not None or transfer.topic is not None:
            transfer.tail = <hxa_batch *>PyMem_Malloc(sizeof(hxa_batch))
            if transfer.tail == NULL:
                raise MemoryError()
            transfer.tail[0] = transfer.batch
            transfer.tail.n = 0
            transfer.tail.bytes = 0
        answer = table.mem_borrow(transfer.link.link, transfer.desc.rmem, &address)
        if answer == -HXA_E_UNSUPPORTED:
            raise errors.BufferTypeError(
                f"{remote!r} is memory that its owner registered, which no device can reach from here; copy the "
                f"{type(tensor).__name__} to the CPU first, or let the owner allocate the region"
            )
        if answer:
            raise driver_error(transfer.link.driver, -answer, 0, repr(transfer), transfer.link.peer)
        try:
            if remote.on_unmap is None:
                remote.on_unmap = self.pin(tensor, <size_t>address, remote.nbytes) or _nothing
            transfer.device = self.copy(
                tensor, <size_t>address + transfer.desc.roff, transfer.desc.len, transfer.batch.verb == HXA_READ)
        except Exception as error:
            table.mem_return(transfer.link.link, transfer.desc.rmem)
            raise errors.TransferError(f"the device refused {transfer!r}: {error}", peer=transfer.link.peer) from error
        self.under_way.append(transfer)
        self._look_in(SHORTEST_LOOK)

    cdef int _look_in(self, double delay) except -1:
        self.delay = delay
        if self.timer is None:
            self.timer = self.core.event_loop.call_later(delay, self._look)
        return 0

    def _look(self):
        cdef Transfer transfer
        cdef list polled = self.under_way
        cdef list waiting = []
        self.timer, self.under_way = None, []
        if self.core.finished:
            return
        for transfer in polled:
            try:
                if not transfer.device.query():
                    waiting.append(transfer)
                    continue
            except Exception as error:
                self._land(transfer, error)
            else:
                self._land(transfer, None)
        self.under_way = waiting + self.under_way
        if waiting:
            self._look_in(min(2 * self.delay, LONGEST_LOOK) if len(waiting) == len(polled) else SHORTEST_LOOK)

    cdef int _land(self, Transfer transfer, object error) except -1:
        """The copy is over; what follows it is the driver's."""
        cdef const hxa_driver *table = transfer.link.driver.table
        cdef int answer = HXA_DONE
        table.mem_return(transfer.link.link, transfer.desc.rmem)
        transfer.device = None
        if error is not None and transfer.outcome == ACTIVE:
            transfer._resolve(FAILED, errors.TransferError(
                f"the device failed {transfer!r}, the contents of its target are undefined: {error}", peer=transfer.link.peer))
        if transfer.tail != NULL and transfer.outcome == ACTIVE:
            answer = table.submit(transfer.link.link, transfer.tail, &transfer.op)
        if answer < 0:
            transfer.op.status = -answer
        if answer != HXA_PENDING:
            transfer.op.events = HXA_COMPLETED | HXA_RELEASED
            self.core._settle(&transfer.op)
        return 0


def _nothing():
    """Undoes nothing: the device did not have to be told of a mapping."""
