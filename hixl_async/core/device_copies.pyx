"""The copies that a device makes by itself, between its memory and a peer's memory that is mapped here."""

cimport cython
from cpython.mem cimport PyMem_Malloc

from .in_flight cimport InFlightTable
from .link cimport refusal
from .memory cimport RemoteMemory
from .transfer cimport ACTIVE, FAILED, Transfer
from .driver cimport *

from functools import partial

from .. import errors
from .event_poller import EventPoller
from .guard import report


@cython.final
cdef class DeviceCopies:
    """The device copies of one engine that are in flight.

    The driver lends the mapped address, so that a fence or a stop also waits for the copy.  Devices have no descriptor to wait
    for, so their events are polled.  A signal or notification is submitted to the driver when the copy has ended (C11).

    ``pin(tensor, address, nbytes)`` registers a mapping with the device, and returns a function that undoes it, or None.
    ``copy(tensor, address, nbytes, to_device)`` begins a copy, and returns its event, which has ``query()``.
    """

    cdef InFlightTable core
    cdef object pin, copy, poller

    def __cinit__(self, InFlightTable core not None, pin, copy):
        self.core, self.pin, self.copy = core, pin, copy

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
            raise refusal(transfer.link.driver, -answer, 0, f"{transfer._describe()} was refused", transfer.link)
        try:
            if remote.on_unmap is None:
                remote.on_unmap = self.pin(tensor, <size_t>address, remote.nbytes) or _nothing
            transfer.device = self.copy(
                tensor, <size_t>address + transfer.desc.roff, transfer.desc.len, transfer.batch.verb == HXA_READ)
        except BaseException as error:
            table.mem_return(transfer.link.link, transfer.desc.rmem)
            if not isinstance(error, Exception):
                raise
            raise errors.DriverError(
                f"the device refused a {transfer._describe()}: {error}", peer=transfer.link.peer) from error
        if self.poller is None:  # the engine has its loop from its opening on
            self.poller = EventPoller(self.core.event_loop)
        self.poller.watch(partial(self._look, transfer))

    def _look(self, Transfer transfer not None):
        """Return True if the wait has ended, because the copy or the engine has ended."""
        if self.core.finished:
            return True
        try:
            if not transfer.device.query():
                return False
        except BaseException as error:
            if not isinstance(error, Exception):
                report(self.core.event_loop, f"the event of {transfer!r} failed", error)
            self._land(transfer, error)
        else:
            self._land(transfer, None)
        return True

    cdef int _land(self, Transfer transfer, object error) except -1:
        """Settle a copy that has ended, and submit the signal and the notification that follow it."""
        cdef const hxa_driver *table = transfer.link.driver.table
        cdef int answer = HXA_DONE
        table.mem_return(transfer.link.link, transfer.desc.rmem)
        transfer.device = None
        if error is not None and transfer.outcome == ACTIVE:
            transfer._resolve(FAILED, errors.TransferError(
                f"{transfer._describe()} failed on the device, and the contents of its target are undefined: {error}",
                peer=transfer.link.peer))
        if transfer.tail != NULL and transfer.outcome == ACTIVE:
            answer = table.submit(transfer.link.link, transfer.tail, &transfer.op)
        if answer < 0:
            transfer.op.status = -answer
        if answer != HXA_PENDING:
            transfer.op.events = HXA_COMPLETED | HXA_RELEASED
            self.core._settle(&transfer.op)
        return 0


def _nothing():
    """Do nothing, in place of undoing the registration of a mapping that the device did not need."""
