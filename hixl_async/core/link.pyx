"""What the core knows of drivers: the tables they bring, the links to peers, and the one gate for their errors."""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.string cimport memcpy, memset

from .driver cimport *

import json
import os
from collections.abc import Mapping
from numbers import Real

from .. import errors

# What a peer sent before its end is still taken, but no more than this many notifications: it may be still sending.
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


# These are not cleared by the collector before they are freed: memories, whose views may die later, rely on them.
@cython.no_gc_clear
cdef class Hub:
    """What drivers, links, memories and transfers need of the core: its loop and mailbox; `Core` is made of it."""

    cdef int _drain(self, bint direct) except -1:
        """Settles what drivers posted; `direct`: no task is current, so those that wait may be resumed at once (C4)."""
        raise NotImplementedError

    cdef int _deliver_all(self) except -1:
        """Hands over every event that drivers posted so far."""
        raise NotImplementedError

    cdef hxa_op *_control(self, Link link) except NULL:
        """The op of a link or memory call; `_answer` must follow, whatever the driver says."""
        raise NotImplementedError

    cdef object _answer(self, hxa_op *op, int answer, str what, object memory=None):
        """What the driver answered to such a call, as an awaitable; `memory` stays pinned until the driver is done with it."""
        raise NotImplementedError

    cdef int _status(self, object call) except -1:
        """The status of such a call once the driver is done with it."""
        raise NotImplementedError

    cdef int _dispose(self) except -1:
        raise NotImplementedError


# The two gates from a driver's status to an exception, one for each root of the errors.
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


cdef tuple unpack_card(hxa_card *card):
    return (
        PyBytes_FromStringAndSize(<char *>card.data, card.len),
        [card.fds[i] for i in range(card.nfds)],
    )


cdef int pack_card(hxa_card *card, bytes data, list fds) except -1:
    """What a peer sent as a card; `fds` are the driver's from here on, or closed."""
    cdef Py_ssize_t i
    memset(card, 0, sizeof(hxa_card))
    if len(data) > HXA_CARD_BYTES or len(fds) > HXA_CARD_FDS:
        for fd in fds:
            os.close(fd)
        raise errors.ProtocolError(f"a card of {len(data)} bytes and {len(fds)} descriptors is over the limit")
    memcpy(card.data, <char *>data, len(data))
    card.len = <uint32_t>len(data)
    for i in range(len(fds)):
        card.fds[i] = fds[i]
    card.nfds = <uint32_t>len(fds)
    return 0


def table_problem(capsule):
    """Why `capsule` is no driver table that this core understands, or None."""
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
    """The capability bits of a driver's table."""
    return (<const hxa_driver *>PyCapsule_GetPointer(capsule, HXA_DRIVER_CAPSULE)).caps


cdef dict OPEN_ERRORS = {HXA_E_INVALID: errors.InvalidArgumentError, HXA_E_UNSUPPORTED: errors.DriverLoadError}


def _plain(value):
    """For JSON, which knows dicts and strings only."""
    if isinstance(value, Mapping):
        return dict(value)
    return os.fspath(value)


cdef bytes option_text(str driver, key, value):
    """An option's value as drivers take it: text, 0 and 1 for truth, and JSON for what has parts."""
    # A driver that wraps another gets the other's table by its address.
    if PyCapsule_IsValid(value, HXA_DRIVER_CAPSULE):
        return hex(<size_t>PyCapsule_GetPointer(value, HXA_DRIVER_CAPSULE)).encode()
    try:
        if isinstance(value, (Mapping, list, tuple)):
            text = json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False)
        elif isinstance(value, Real):
            text = str(int(value) if isinstance(value, bool) else value)
        else:
            text = os.fspath(value)
        if "\0" not in text:
            return text.encode()
    except (TypeError, ValueError):  # fspath may also answer bytes; circles, and surrogates that are no character
        pass
    raise errors.InvalidArgumentError(
        f"driver {driver!r}: option {key!r} must be text, a number, a path, or a mapping or list of these, not {value!r}"
    )


@cython.no_gc_clear
cdef class Driver:
    """An opened driver."""

    def __cinit__(self, Hub core, capsule, str name, dict options):
        cdef hxa_option pairs[MAX_OPTIONS]
        cdef hxa_limits limits
        cdef char text[4096]
        cdef Py_ssize_t i
        problem = table_problem(capsule)
        if problem is not None:
            raise errors.DriverLoadError(f"driver {name!r}: {problem}")
        if len(core.drivers) == MAX_DRIVERS:
            raise errors.InvalidArgumentError(f"an engine takes at most {MAX_DRIVERS} drivers")
        if len(options) > MAX_OPTIONS:
            raise errors.InvalidArgumentError(f"driver {name!r}: at most {MAX_OPTIONS} options")
        self.core, self.capsule, self.options, self.name = core, capsule, options, name
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

    def stats(self):
        """The driver's own counters and gauges, by name."""
        cdef hxa_stats stats
        if self.instance == NULL:
            return {}
        self.table.stats(self.instance, &stats)
        return stats

    def about(self):
        """What the driver tells of itself and what it runs on, by name."""
        cdef const char *text = NULL
        if self.table.about != NULL and self.instance != NULL:
            text = self.table.about(self.instance)
        if text == NULL:
            return {}
        lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
        return {name.strip(): rest.strip() for name, _, rest in lines}

    def start(self):
        """Waits until links can be made.

        :return: an awaitable.
        """
        what = f"start of driver {self.name!r}"
        cdef hxa_op *op = self.core._control(self._without_peer(what))
        return self.core._answer(op, self.table.start(self.instance, op) if self.table.start != NULL else HXA_DONE, what)

    def shutdown(self):
        """Ends what would make `close` wait; there are no links any more, and `start` is over, whatever came of it.

        :return: an awaitable.
        """
        what = f"shutdown of driver {self.name!r}"
        cdef hxa_op *op = self.core._control(self._without_peer(what))
        return self.core._answer(
            op, self.table.shutdown(self.instance, op) if self.table.shutdown != NULL else HXA_DONE, what)

    cdef Link _without_peer(self, str what):
        """Stands for the link where a call of the driver concerns no peer."""
        cdef Link link = Link.__new__(Link)
        link.driver, link.fd, link.stops, link.what = self, -1, [], what
        return link

    def link_new(self, uint64_t cookie, str peer):
        """Our half of a link: ``(link, card bytes, card descriptors)``."""
        cdef hxa_card card
        cdef Link link = self._without_peer("link")
        link.cookie, link.peer = cookie, peer
        memset(&card, 0, sizeof(card))
        # Events say by their cookie which driver they are of.
        cdef int answer = self.table.link_new(self.instance, cookie * MAX_DRIVERS + self.index, &link.link, &card)
        if answer:
            link.link = NULL
            raise refusal(self, -answer, 0, "new link", link)
        data, fds = unpack_card(&card)
        return link, data, fds

    def after_fork(self):
        """In a child of fork(): closes the child's copies of descriptors."""
        if self.instance != NULL and self.table.after_fork != NULL:
            self.table.after_fork(self.instance)

    def close(self):
        """Closes the driver now, or when the last view of its memory is dropped."""
        self.closing = True
        self._close_if_unused()

    cdef int _forget(self) except -1:
        self.memories -= 1
        if self.closing:
            self._close_if_unused()
        return 0

    def _close_if_unused(self):
        cdef hxa_instance *instance = self.instance
        if self.memories == 0 and instance != NULL:
            with nogil:
                self.table.close(instance)
            self.instance = NULL
            self.core._dispose()


@cython.no_gc_clear
cdef class Link:
    """One driver's way to one peer."""

    def connect(self, bytes data, list fds):
        """Joins our half with the peer's card; the driver owns `fds` from here on.

        :return: an awaitable.
        """
        cdef hxa_card card
        pack_card(&card, data, fds)
        self._must_exist(fds)
        cdef hxa_op *op = self.driver.core._control(self)
        return self.driver.core._answer(op, self.driver.table.link_connect(self.link, &card, op), "connect")

    cdef int _must_exist(self, list fds) except -1:
        """Raises if the link was given back already; `fds` are closed then."""
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
        """From here on work may be submitted, and the loop polls the link when its descriptor is readable."""
        self.up = True
        self.fd = self.driver.table.link_fd(self.link)
        if self.fd >= 0:
            self.driver.core.loop.add_reader(self.fd, self._readable)
            self.poll()

    def explain_by(self, explain):
        """Let ``explain()`` say why the link is down, for the errors of its transfers.

        :param explain: returns the cause, and True if the peer's process is known to have ended; or None.
        """
        self.explain = explain

    def refuse(self):
        """No new work: the driver reported that the link is down."""
        self.up = False

    def poll(self):
        """Takes what the peer sent; again on the next pass of the loop while there is more."""
        self._poll(False)

    def _readable(self):
        """As `poll`, called by the loop itself, so that no task is current."""
        self._poll(True)

    cdef int _poll(self, bint direct) except -1:
        self.poll_scheduled = False
        if self.link == NULL or self.fd < 0:
            return 0
        cdef Hub core = self.driver.core
        # Events land in the mailbox; we empty it ourselves below, so no signal is needed.
        hxa_mailbox_awake(core.box)
        if self.driver.table.poll(self.link, core.burst) and not self.poll_scheduled:
            self.poll_scheduled = True
            core.call_soon(self._readable)
        core._drain(direct)
        return 0

    def pace(self, uint64_t bytes_per_second):
        """At most so many bytes per second from now on; 0: any."""
        cdef const hxa_driver *table = self.driver.table
        self._must_exist([])
        cdef int answer = -HXA_E_UNSUPPORTED
        if table.link_pace != NULL:
            answer = table.link_pace(self.link, bytes_per_second)
        if answer == -HXA_E_UNSUPPORTED:
            raise errors.DriverError(f"driver {self.driver.name!r} cannot limit its bandwidth")
        if answer:
            raise refusal(self.driver, -answer, 0, "limit of the bandwidth", self)

    def message(self, bytes data):
        """Hands over what the driver at the other end said; `connect` must have been called.

        :raises ProtocolError: if our driver takes no messages, or can make nothing of this one.
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
        """Waits until the peer can no longer touch memory of ours through this link; it may never come.

        :return: an awaitable.
        """
        self._must_exist([])
        cdef hxa_op *op = self.driver.core._control(self)
        return self.driver.core._answer(op, self.driver.table.link_fence(self.link, op), "fence")

    def drained(self):
        """Waits until no flight uses this link any more.

        :return: an awaitable; cancelling it only ends the wait.
        """
        return self.driver.core._drained_link(self)

    def stop(self, bint dead):
        """Takes what the peer sent so far, then refuses new work and ends what runs.  Idempotent.

        :param dead: the peer's process is known to be gone; may be told later, by a second call.
        :return: an awaitable, done when no thread of ours works for this link any more; cancelling it only ends the wait.
        """
        cdef Hub core = self.driver.core
        cdef hxa_op *op
        self.up = False
        if self.fd >= 0:
            for _ in range(LAST_POLLS):
                if not self.driver.table.poll(self.link, LAST_POLL_EVENTS):
                    break
            core._deliver_all()
        # The peer's last words may have led here a second time.
        if self.fd >= 0:
            core.loop.remove_reader(self.fd)
            self.fd = -1
        if self.link != NULL and (not self.stops or (dead and not self.dead)):
            op = core._control(self)
            self.stops.append(core._answer(op, self.driver.table.link_stop(self.link, dead, op), "stop of a link"))
        self.dead |= dead
        return core._drained_transfers(self.stops)

    def free(self):
        """Gives the link back; only after `stop` is done and all its flights are released."""
        cdef hxa_link *link = self.link
        self.link = NULL
        if link != NULL:
            self.driver.table.link_free(link)
