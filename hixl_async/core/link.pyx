"""Drivers and links: the drivers' tables, the links to peers, and the conversion of status codes to exceptions."""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.string cimport memcpy, memset

from .driver cimport *
from .seal cimport PyObject, PyTypeObject, hxa_seal

import json
import os
from collections.abc import Mapping
from numbers import Real

from .. import errors
from ..display import shown
from .guard import report
from .unpicklable import unpicklable

# Notifications that a peer sent before its end are still taken, but only up to a limit, because it may still be sending.
cdef enum: LAST_POLLS = 64, LAST_POLL_EVENTS = 256
cdef enum: MAX_OPTIONS = 64

EVENT_NOTE = HXA_EVENT_NOTE
EVENT_SIGNAL = HXA_EVENT_SIGNAL
EVENT_LINK_DOWN = HXA_EVENT_LINK_DOWN
EVENT_LOG = HXA_EVENT_LOG
EVENT_MESSAGE = HXA_EVENT_MESSAGE

MESSAGE_LIMIT = HXA_MESSAGE_BYTES

CAP_ALLOC = HXA_CAP_ALLOC
CAP_REGISTER = HXA_CAP_REGISTER
CAP_SAME_HOST = HXA_CAP_SAME_HOST
CAP_NOTIFY = HXA_CAP_NOTIFY

CAPABILITIES = {
    HXA_CAP_LOCAL_ANY: "any local buffer",
    HXA_CAP_ALLOC: "allocate",
    HXA_CAP_REGISTER: "register",
    HXA_CAP_SAME_HOST: "same host only",
    HXA_CAP_SIGNAL: "signal",
    HXA_CAP_NOTIFY: "notify",
    HXA_CAP_CANCEL: "cancel",
    HXA_CAP_FDS: "descriptor passing",
}


# The collector does not clear these before they are freed, because memories, whose views may die later, rely on them.
@cython.no_gc_clear
cdef class CoreBase:
    """The part of a core that drivers, links, memories and transfers use: its loop and mailbox.

    The methods are declared here and defined by `InFlightTable`.
    """

    __reduce__ = unpicklable("open one in each process, and give it the other's address")

    @property
    def loop(self):
        """The event loop that the engine was opened in, or None before that."""
        return self.event_loop

    @property
    def in_flight(self):
        """The number of transfers without an outcome."""
        return self.n_in_flight

    cdef int _drain(self, bint direct) except -1:
        """Settle what drivers posted; with `direct` no task is current, so that a waiting one may be resumed at once (C4)."""
        raise NotImplementedError

    cdef int _deliver_all(self) except -1:
        """Deliver every event that drivers posted so far."""
        raise NotImplementedError

    cdef int _settle_withheld(self, Link link) except -1:
        """Settle the transfers that failed while the cause was awaited."""
        raise NotImplementedError

    cdef hxa_op *_begin_call(self, Link link) except NULL:
        """Return the op of a link or memory call; `_end_call` must follow, whatever the driver returns."""
        raise NotImplementedError

    cdef object _end_call(self, hxa_op *op, int answer, str what, object memory=None):
        """Return the result of such a call as an awaitable; `memory` stays pinned until the op is released."""
        raise NotImplementedError

    cdef int _call_status(self, object call) except -1:
        """Return the status of such a call once its op is released."""
        raise NotImplementedError

    cdef object _drained_link(self, Link link):
        """Return an awaitable for the release of every operation over a link."""
        raise NotImplementedError

    cdef object _drained_range(self, object memory, uint64_t offset, uint64_t length):
        """Return an awaitable for the release of every operation that touches a range of a memory."""
        raise NotImplementedError

    cdef object _drained_transfers(self, list transfers):
        """Return an awaitable for the release of transfers."""
        raise NotImplementedError

    cdef bint _all_released(self, list transfers) except -1:
        """Return True if all of these transfers are released."""
        raise NotImplementedError

    cdef object _new_waiter(self):
        """Return an awaitable that `wake` ends."""
        raise NotImplementedError

    cdef int _must_be_on_thread(self) except -1:
        """Raise on another thread than the loop's, and in a child of fork()."""
        raise NotImplementedError

    cdef bint _forked(self) noexcept:
        return False

    cdef int _dispose(self) except -1:
        raise NotImplementedError


# The two conversions of a driver's status to an exception, one for each root of the errors.
cdef dict REFUSALS = {
    HXA_E_INVALID: errors.InvalidArgumentError,
    HXA_E_RANGE: errors.RangeError,
    HXA_E_RIGHTS: errors.AccessError,
    HXA_E_BUSY: errors.BusyError,
    HXA_E_LINK: errors.PeerDownError,
    HXA_E_TIMEOUT: errors.WaitTimeoutError,
    HXA_E_PROTOCOL: errors.ProtocolError,
}
cdef dict FAILURES = {HXA_E_LINK: errors.PeerLostError, HXA_E_TIMEOUT: errors.TransferTimeoutError}


cdef object refusal(Driver driver, int status, int native, str what, Link link=None, object index=None):
    """Return the error of a call that the driver refused, or of one that moves no transfer memory.

    :param status: the status of the op, or the negated refusal of the call.
    :param link: the link concerned, if there is one.
    """
    native = native or hxa_refusal_native(-status)
    status = hxa_refusal_status(-status)
    return _error(REFUSALS.get(status, errors.DriverError), driver, status, native, what, link, index)


cdef object failure(Link link, int status, int native, str what, object index=None):
    """Return the error of accepted work that failed in flight."""
    return _error(FAILURES.get(status, errors.TransferError), link.driver, status, native, what, link, index)


cdef object _error(object kind, Driver driver, int status, int native, str what, Link link, object index):
    peer = link.peer if link is not None else None
    why, dead = link._why_down() if peer and status == HXA_E_LINK else (None, False)
    if why is None:
        why = _status_text(driver, status, native) + (f" (peer {peer!r})" if peer else "")
    error = kind(f"{what}: {why}", peer=peer, index=index, native=native or None)
    if dead:
        error.confirmed_dead = True
    return error


cdef str _status_text(Driver driver, int status, int native):
    cdef const char *text = NULL
    if driver.table.error_text != NULL:
        text = driver.table.error_text(status, native)
    return text.decode("utf-8", "replace") if text != NULL else f"status {status}"


cdef tuple unpack_metadata(hxa_metadata *metadata):
    """Return ``(bytes, descriptors)``."""
    return (
        PyBytes_FromStringAndSize(<char *>metadata.data, metadata.len),
        [metadata.fds[i] for i in range(metadata.nfds)],
    )


cdef int pack_metadata(hxa_metadata *metadata, bytes data, list fds) except -1:
    """Fill `metadata` with bytes and descriptors of a peer; `fds` belong to the driver from here on, or are closed."""
    cdef Py_ssize_t i
    memset(metadata, 0, sizeof(hxa_metadata))
    if len(data) > HXA_METADATA_BYTES or len(fds) > HXA_METADATA_FDS:
        for fd in fds:
            os.close(fd)
        raise errors.ProtocolError(f"metadata of {len(data)} bytes and {len(fds)} descriptors are over the limit")
    memcpy(metadata.data, <char *>data, len(data))
    metadata.len = <uint32_t>len(data)
    for i in range(len(fds)):
        metadata.fds[i] = fds[i]
    metadata.nfds = <uint32_t>len(fds)
    return 0


def table_problem(capsule):
    """Return why `capsule` is not a driver table that this core supports, or None."""
    cdef const hxa_driver *table
    if not PyCapsule_IsValid(capsule, HXA_DRIVER_CAPSULE):
        return f"{capsule!r} is not a capsule named {HXA_DRIVER_CAPSULE.decode()!r}"
    table = <const hxa_driver *>PyCapsule_GetPointer(capsule, HXA_DRIVER_CAPSULE)
    if table.abi != HXA_DRIVER_ABI:
        return f"it was built for driver interface {table.abi}, this core has {HXA_DRIVER_ABI}; rebuild it"
    if table.size < HXA_DRIVER_MIN_SIZE:
        return f"its table has {table.size} bytes, this core needs {HXA_DRIVER_MIN_SIZE}; rebuild it"
    return None


def table_capabilities(capsule):
    """Return the capability bits of a driver's table."""
    return (<const hxa_driver *>PyCapsule_GetPointer(capsule, HXA_DRIVER_CAPSULE)).caps


cdef dict OPEN_ERRORS = {HXA_E_INVALID: errors.InvalidArgumentError, HXA_E_UNSUPPORTED: errors.DriverLoadError}


def _plain(value):
    """Convert a value to a type of JSON: dict or string."""
    if isinstance(value, Mapping):
        return dict(value)
    return os.fspath(value)


cdef bytes option_text(str driver, key, value):
    """Convert an option's value to text for the driver: true or false for a bool, JSON for mappings and lists."""
    # A driver that wraps another receives the address of the other's table.
    if PyCapsule_IsValid(value, HXA_DRIVER_CAPSULE):
        return hex(<size_t>PyCapsule_GetPointer(value, HXA_DRIVER_CAPSULE)).encode()
    try:
        if isinstance(value, (Mapping, list, tuple)):
            text = json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False)
        elif isinstance(value, Real):
            text = str(value).lower() if isinstance(value, bool) else str(value)
        else:
            text = os.fspath(value)
        if "\0" not in text:
            return text.encode()
    except (TypeError, ValueError):  # fspath may return bytes; cycles; lone surrogates
        pass
    raise errors.InvalidArgumentError(
        f"driver {driver!r}: option {shown(key)} must be text, a number, a path, or a mapping or list of these, not "
        + shown(value)
    )


@cython.no_gc_clear
cdef class Driver:
    """An opened driver.

    Public methods are for the engine package; users cannot reach a driver by public names.

    ``Driver(core, capsule, name, options)`` opens it: for a core that `in_flight.start` has bound to a loop, with the table in
    `capsule`, under the name by which the engine and its peers know it, and with its own options by name.

    :raises DriverLoadError: if `capsule` holds no table that this core supports.
    :raises InvalidArgumentError: if an option is malformed, or there are too many options or drivers.
    :raises DriverError: if the driver refuses to open.
    """

    def __cinit__(self, CoreBase core not None, capsule, str name not None, dict options not None):
        cdef hxa_option pairs[MAX_OPTIONS]
        cdef hxa_limits limits
        cdef char text[4096]
        cdef Py_ssize_t i
        problem = table_problem(capsule)
        if problem is not None:
            raise errors.DriverLoadError(f"driver {name!r}: {problem}")
        if core.box == NULL or core.finished:
            raise errors.ClosedError(f"driver {name!r} needs an engine that is open")
        if len(core.drivers) == MAX_DRIVERS:
            raise errors.InvalidArgumentError(f"an engine takes at most {MAX_DRIVERS} drivers")
        if len(options) > MAX_OPTIONS:
            raise errors.InvalidArgumentError(f"driver {name!r}: at most {MAX_OPTIONS} options")
        self.core, self.capsule, self.options, self.name, self.links = core, capsule, options, name, []
        # The table may be that of an older interface, which is shorter.
        cdef const hxa_driver *table = <const hxa_driver *>PyCapsule_GetPointer(capsule, HXA_DRIVER_CAPSULE)
        memset(&self.own, 0, sizeof(self.own))
        memcpy(&self.own, table, min(<size_t>table.size, sizeof(self.own)))
        self.table = &self.own
        encoded = [(option_text(name, "name", key), option_text(name, key, value)) for key, value in options.items()]
        for i in range(len(encoded)):
            pairs[i].key = <bytes>encoded[i][0]
            pairs[i].value = <bytes>encoded[i][1]
        text[0] = 0
        cdef size_t count = len(encoded)
        cdef int answer
        with nogil:
            answer = self.table.open(pairs, count, &core.sink, &self.instance, text, sizeof(text))
        if answer:
            self.instance = NULL
            reason = text.decode("utf-8", "replace") or str(refusal(self, -answer, 0, "open"))
            kind = OPEN_ERRORS.get(-answer, errors.DriverError)
            raise kind(f"driver {name!r} could not be opened: {reason}")
        memset(&limits, 0, sizeof(limits))
        self.table.limits(self.instance, &limits)
        self.capabilities = limits.caps if limits.caps else self.table.caps
        self.note_limit = limits.note_bytes
        self.descriptor_limit = limits.descriptors
        self.inline_limit = limits.inline_bytes
        self.alignment = limits.alignment
        self.index = len(core.drivers)
        core.drivers += (self,)

    def __repr__(self):
        return f"<Driver {self.name!r}>"

    cdef int _must_be_open(self) except -1:
        if self.instance == NULL:
            raise errors.ClosedError(f"driver {self.name!r} is closed")
        return 0

    def stats(self):
        """Return the driver's own counters and gauges by name; none once it is closed."""
        cdef hxa_stats stats
        if self.instance == NULL:
            return {}
        self.table.stats(self.instance, &stats)
        return stats

    def about(self):
        """Return facts about the driver and the transport below it, by name, for people; none once it is closed."""
        cdef const char *text = NULL
        if self.table.about != NULL and self.instance != NULL:
            text = self.table.about(self.instance)
        if text == NULL:
            return {}
        lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
        return {name.strip(): rest.strip() for name, _, rest in lines}

    def start(self):
        """Wait until links can be made.

        :return: an awaitable.
        """
        self._must_be_open()
        what = f"start of driver {self.name!r}"
        cdef hxa_op *op = self.core._begin_call(self._without_peer(what))
        return self.core._end_call(op, self.table.start(self.instance, op) if self.table.start != NULL else HXA_DONE, what)

    def shutdown(self):
        """End the background work that `close` would wait for; only without links, and after `start` has ended.

        :return: an awaitable.
        """
        self._must_be_open()
        what = f"shutdown of driver {self.name!r}"
        cdef hxa_op *op = self.core._begin_call(self._without_peer(what))
        return self.core._end_call(
            op, self.table.shutdown(self.instance, op) if self.table.shutdown != NULL else HXA_DONE, what)

    cdef Link _without_peer(self, str what):
        """Return a stand-in for the link of a call that concerns no peer."""
        cdef Link link = Link.__new__(Link)
        link.driver, link.fd, link.stops, link.withheld, link.what = self, -1, [], [], what
        return link

    def link_new(self, uint64_t cookie, str peer not None):
        """Make our half of a link.

        :param cookie: the number that the events of this link will carry.
        :param peer: the peer's name, for errors.
        :return: ``(link, metadata, descriptors)``; the latter two are for the driver at the other end, and the caller closes
            the descriptors.
        """
        cdef hxa_metadata metadata
        self._must_be_open()
        cdef Link link = self._without_peer("link")
        link.cookie, link.peer = cookie, peer
        memset(&metadata, 0, sizeof(metadata))
        # The cookie of an event also says which driver it comes from.
        cdef int answer = self.table.link_new(self.instance, cookie * MAX_DRIVERS + self.index, &link.link, &metadata)
        if answer:
            link.link = NULL
            raise refusal(self, -answer, 0, "new link", link)
        self.links.append(link)
        data, fds = unpack_metadata(&metadata)
        return link, data, fds

    def after_fork(self):
        """Close the child's copies of descriptors, in a child of fork()."""
        if self.instance != NULL and self.table.after_fork != NULL:
            self.table.after_fork(self.instance)

    def stop_links(self):
        """Stop the links that are not freed yet, and of which no peer takes care any more; see `Link.stop`."""
        cdef Link link
        for link in tuple(self.links):
            try:
                link._begin_to_stop(False)
            except errors.HixlError as error:
                report(self.core.event_loop, f"the link of {self!r} to peer {link.peer!r} cannot be stopped", error)

    def close(self):
        """Close the driver, now or when the last view of its memory is dropped and the last of its links is freed.

        Links that have been stopped are freed.
        """
        cdef Link link
        self.closing = True
        self._end_watch()
        for link in tuple(self.links):
            if link._has_stopped():
                link.free()
        self._close_if_unused()

    cdef int _end_watch(self) except -1:
        """Poll no link any more."""
        cdef Link link
        for link in self.links:
            link._end_watch()
        return 0

    cdef int _forget(self) except -1:
        self.memories -= 1
        if self.closing:
            self._close_if_unused()
        return 0

    cdef int _forget_link(self, Link link) except -1:
        self.links.remove(link)
        if self.closing:
            self._close_if_unused()
        return 0

    cdef int _close_if_unused(self) except -1:
        cdef hxa_instance *instance = self.instance
        if self.memories == 0 and not self.links and instance != NULL:
            with nogil:
                self.table.close(instance)
            self.instance = NULL
            self.core._dispose()
        return 0


@cython.final
@cython.no_gc_clear
cdef class Link:
    """One driver's connection to one peer; `Driver.link_new` makes it.

    Public methods are for the engine package; users cannot reach a link by public names.
    """

    def connect(self, bytes data not None, list fds not None):
        """Join our half with the peer's.

        :param data: the metadata that the peer's driver made.
        :param fds: the descriptors that came with it, which the driver owns from here on.
        :return: an awaitable.
        """
        cdef hxa_metadata metadata
        pack_metadata(&metadata, data, fds)
        self._must_exist(fds)
        cdef hxa_op *op = self.driver.core._begin_call(self)
        return self.driver.core._end_call(op, self.driver.table.link_connect(self.link, &metadata, op), "connect")

    cdef int _must_exist(self, list fds) except -1:
        """Raise if the link was freed already; `fds` are closed then."""
        if self.link == NULL:
            for fd in fds:
                os.close(fd)
            raise self._down()
        return 0

    cdef object _down(self):
        """Return the error of new work over a link that is down."""
        why, dead = self._why_down()
        text = f"peer {self.peer!r} is down; connect again" + (f" ({why})" if why else "")
        error = errors.PeerDownError(text, peer=self.peer)
        error.confirmed_dead = dead
        return error

    cdef tuple _why_down(self):
        """Return why the link is down, or None where that is not known, and True if the peer's process has ended."""
        return (self.explain() if self.explain is not None else None) or (None, False)

    def watch(self):
        """Accept submits from here on, and let the loop poll the link when its descriptor is readable."""
        self._must_exist([])
        self.up = True
        self.fd = self.driver.table.link_fd(self.link)
        if self.fd >= 0:
            self.driver.core.event_loop.add_reader(self.fd, _readable, self)
            self.poll()

    def explain_by(self, explain, cause_awaited):
        """Set the functions that know why the link is down, for the errors of its transfers.

        :param explain: returns the cause, and True if the peer's process is known to have ended; or None.
        :param cause_awaited: returns True if the cause will be known soon, and `cause_known` called then; until that call,
            transfers that failed with the link stay in flight.
        """
        self.explain, self.cause_awaited = explain, cause_awaited

    def cause_known(self):
        """Report the transfers that failed with the link while the cause was awaited."""
        self.driver.core._settle_withheld(self)

    def refuse(self):
        """Refuse new work from here on."""
        self.up = False

    def unwatch(self):
        """Stop watching the link's descriptor, which stays readable at the end of the peer; `stop` still polls it."""
        if self.fd >= 0:
            self.driver.core.event_loop.remove_reader(self.fd)

    def poll(self):
        """Receive what the peer sent; the next pass of the loop continues while there is more."""
        self._poll(False)

    cdef int _poll(self, bint direct) except -1:
        self.poll_scheduled = False
        if self.link == NULL or self.fd < 0:
            return 0
        cdef CoreBase core = self.driver.core
        # Events land in the mailbox, which is emptied below, so no signal is needed.
        hxa_mailbox_awake(core.box)
        if self.driver.table.poll(self.link, core.burst) and not self.poll_scheduled:
            self.poll_scheduled = True
            core.call_soon(_readable, self)
        core._drain(direct)
        return 0

    def pace(self, uint64_t bytes_per_second):
        """Limit the bandwidth.

        :param bytes_per_second: the most from now on, for reads and writes together; 0 for no limit.
        :raises DriverError: if the driver cannot limit its bandwidth.
        """
        cdef const hxa_driver *table = self.driver.table
        self._must_exist([])
        cdef int answer = -HXA_E_UNSUPPORTED
        if table.link_pace != NULL:
            answer = table.link_pace(self.link, bytes_per_second)
        if answer == -HXA_E_UNSUPPORTED:
            raise errors.DriverError(f"driver {self.driver.name!r} cannot limit its bandwidth")
        if answer:
            raise refusal(self.driver, -answer, 0, "limit of the bandwidth", self)

    def message(self, bytes data not None):
        """Pass a message of the driver at the other end to ours; `connect` must have been called.

        :raises ProtocolError: if our driver takes no messages, or this one is malformed.
        """
        cdef int answer
        if self.driver.table.message == NULL:
            raise errors.ProtocolError(f"driver {self.driver.name!r} takes no messages", peer=self.peer)
        if self.link != NULL:
            answer = self.driver.table.message(self.link, <const char *>data, len(data))
            if answer < 0:
                error = refusal(self.driver, -answer, 0, "message of its driver", self)
                raise errors.ProtocolError(str(error), peer=self.peer)

    def fence(self):
        """Wait until the peer can no longer touch memory of ours through this link, which may never happen.

        :return: an awaitable.
        """
        self._must_exist([])
        cdef hxa_op *op = self.driver.core._begin_call(self)
        return self.driver.core._end_call(op, self.driver.table.link_fence(self.link, op), "fence")

    def drained(self):
        """Wait until no operation in flight uses this link.

        :return: an awaitable; cancelling it only ends the wait.
        """
        return self.driver.core._drained_link(self)

    def stop(self, bint dead):
        """Receive what the peer sent so far, then refuse new work and end the work in flight.  Idempotent.

        :param dead: True if the peer's process is known to have ended; a second call may say so later.
        :return: an awaitable that is done when no thread of ours works for this link; cancelling it only ends the wait.
        """
        self._begin_to_stop(dead)
        return self.driver.core._drained_transfers(self.stops)

    cdef int _begin_to_stop(self, bint dead) except -1:
        cdef CoreBase core = self.driver.core
        cdef hxa_op *op
        self.up = False
        if self.fd >= 0:
            for _ in range(LAST_POLLS):
                if not self.driver.table.poll(self.link, LAST_POLL_EVENTS):
                    break
            core._deliver_all()
        # Delivering the peer's last events may have stopped the link already.
        self._end_watch()
        if self.link != NULL and (not self.stops or (dead and not self.dead)):
            op = core._begin_call(self)
            self.stops.append(core._end_call(op, self.driver.table.link_stop(self.link, dead, op), "stop of a link"))
        self.dead |= dead
        return 0

    cdef int _end_watch(self) except -1:
        """Poll the link no more.  Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0 and not self.driver.core.event_loop.is_closed():
            self.driver.core.event_loop.remove_reader(fd)
        return 0

    cdef bint _has_stopped(self) except -1:
        """Return True if `stop` was called and is done."""
        return bool(self.stops) and self.driver.core._all_released(self.stops)

    def free(self):
        """Free the link; only after `stop` is done and all its operations are released."""
        cdef hxa_link *link = self.link
        self._end_watch()
        self.link = NULL
        if link != NULL:
            self.driver.table.link_free(link)
            self.driver._forget_link(self)


def _readable(Link link not None):
    """Poll the link; the loop itself calls this, so no task is current."""
    link._poll(True)


cdef object _refuse_link(PyTypeObject *kind, PyObject *args, PyObject *kwargs):
    raise TypeError("links are made by Driver.link_new")


hxa_seal(Link, _refuse_link)
