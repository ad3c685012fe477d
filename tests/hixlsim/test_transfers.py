"""The life of a request, and how a link breaks: in each back-end, and for CS also over a host NIC."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from .probe import (
    BROKEN,
    COMPLETED,
    DEVICE,
    FAILED,
    NOT_CONNECTED,
    PARAM_INVALID,
    READ,
    RESOURCE_EXHAUSTED,
    SUCCESS,
    TIMEOUT,
    WAITING,
    WRITE,
    Hixl,
    Library,
    Memory,
)

AUTO = {"AutoConnect": "1"}
NOT_UNFOLDED = {"GlobalResourceConfig": '{"fabric_memory.enable_aicpu_unfold": false}'}
MODES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "comm": ("comm", {}, {}),
    "cs": ("cs", {}, {}),
    "cs-host": ("cs", {}, {"HIXLSIM_CS": "host"}),
    "fab": ("fab", {}, {}),
    "fab-host": ("fab", NOT_UNFOLDED, {}),
}


class Linked:
    """One engine, connected to another, with memory on both sides."""

    def __init__(self, library: Library, mode: str, options: dict[str, str]) -> None:
        self.library, self.mode = library, mode
        self.here, self.there = Hixl(library), Hixl(library)
        for each in (self.here, self.there):
            assert each.initialize(options=options) == SUCCESS
        self.ours, self.theirs = self.here.memory(), self.there.memory()
        assert self.here.connect(self.there) == SUCCESS

    def write(self, size: int = 8, at: int = 0, user_data: int = 0) -> tuple[int, int]:
        return self.here.transfer(self.there, WRITE, [(self.ours.addr + at, self.theirs.addr + at, size)], user_data)

    def ask(self, req: int) -> tuple[int, int]:
        return self.here.status(req)

    def again(self) -> None:
        assert self.here.disconnect(self.there) == SUCCESS
        assert self.here.connect(self.there) == SUCCESS


Link = Callable[..., Linked]


@pytest.fixture(params=MODES)
def link(
    request: pytest.FixtureRequest, library: Library, objects: list[Hixl], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Link]:
    backend, options, environment = MODES[request.param]
    for name, value in {"HIXLSIM_BACKEND": backend, **environment}.items():
        monkeypatch.setenv(name, value)

    def make(**more: str) -> Linked:
        linked = Linked(library, request.param, {**options, **more})
        objects.extend([linked.here, linked.there])
        return linked

    yield make
    library.set("FAULTS", "")


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.0005)


def test_the_first_last_answer_frees_the_request(link: Link) -> None:
    linked = link()
    status, req = linked.write()
    assert status == SUCCESS
    assert linked.ask(req) == (SUCCESS, COMPLETED)
    assert linked.ask(req) == (PARAM_INVALID, BROKEN)
    assert linked.library.count("live_requests") == 0


def test_requests_are_numbers_or_addresses_used_again(link: Link) -> None:
    linked = link()
    seen = []
    for _ in range(4):
        seen.append(linked.write()[1])
        assert linked.ask(seen[-1]) == (SUCCESS, COMPLETED)
    if linked.mode.startswith("cs"):
        assert len(set(seen)) == 1
    else:
        assert seen == [1, 2, 3, 4]


def test_a_query_for_an_old_request_takes_the_answer_of_another(link: Link) -> None:
    linked = link()
    first = linked.write()[1]
    assert linked.ask(first) == (SUCCESS, COMPLETED)
    second = linked.write()[1]
    assert linked.ask(first) == ((SUCCESS, COMPLETED) if linked.mode.startswith("cs") else (PARAM_INVALID, BROKEN))
    assert linked.ask(second) == ((PARAM_INVALID, BROKEN) if linked.mode.startswith("cs") else (SUCCESS, COMPLETED))


def test_latency_is_kept(link: Link) -> None:
    linked = link()
    linked.library.set("LATENCY_US", 200000)
    linked.ours.fill(b"slow")
    began = time.monotonic()
    req = linked.write()[1]
    assert linked.ask(req) == (SUCCESS, WAITING)
    assert linked.theirs.read(4) == bytes(4)
    until(lambda: linked.ask(req) == (SUCCESS, COMPLETED))
    assert time.monotonic() - began >= 0.2
    assert linked.theirs.read(4) == b"slow"


def test_bandwidth_is_limited(link: Link) -> None:
    linked = link()
    linked.library.set("GBPS", 0.001)  # a megabyte per second
    began = time.monotonic()
    requests = [linked.write(size=15000)[1] for _ in range(2)]
    for req in requests:
        until(lambda req=req: linked.ask(req) == (SUCCESS, COMPLETED))
    assert time.monotonic() - began >= 0.03


def test_requests_of_a_link_complete_in_order_if_not_told_otherwise(link: Link) -> None:
    linked = link()
    linked.library.set("JITTER_US", 3000)
    for order in ("fifo", "random"):
        linked.library.set("ORDER", order)
        overtaken = False
        for _ in range(20):
            waiting = [linked.write()[1] for _ in range(20)]
            while waiting:
                # From the youngest: when that one has finished, so have all before it, if they keep their order.
                answers = [linked.ask(req) == (SUCCESS, COMPLETED) for req in reversed(waiting)][::-1]
                overtaken |= answers != sorted(answers, reverse=True)
                waiting = [req for req, through in zip(waiting, answers, strict=True) if not through]
            if overtaken:
                break
        assert overtaken == (order == "random")


def test_user_data_and_order_of_the_batch_query(link: Link) -> None:
    linked = link()
    if not linked.mode.startswith("cs"):
        return
    linked.library.set("LATENCY_US", 500000)
    executed = linked.library.count("executed")
    slow = linked.write(user_data=7)[1]
    assert linked.here.batch(skip_waiting=False) == (SUCCESS, [(slow, 7, WAITING)])
    assert linked.here.batch(skip_waiting=True) == (SUCCESS, [])
    assert linked.here.batch(most=0) == (SUCCESS, [])
    more = [linked.write(user_data=data)[1] for data in (8, 9)]
    assert linked.here.batch(most=1, skip_waiting=False) == (SUCCESS, [(slow, 7, WAITING)]), (
        "an old one starves the young"
    )
    until(lambda: linked.library.count("executed") == executed + 3)
    linked.library.set("LATENCY_US", 0)
    assert linked.here.batch(most=2) == (SUCCESS, [(slow, 7, COMPLETED), (more[0], 8, COMPLETED)])
    assert linked.here.batch() == (SUCCESS, [(more[1], 9, COMPLETED)])
    assert linked.here.batch() == (SUCCESS, [])


def test_a_list_of_many(link: Link) -> None:
    linked = link()
    linked.ours.fill(bytes(range(256)) * 256)
    ops = [(linked.ours.addr + at, linked.theirs.addr + 65528 - at, 8) for at in range(0, 65536, 8)]
    status, req = linked.here.transfer(linked.there, WRITE, ops)
    assert (status, linked.ask(req)) == (SUCCESS, (SUCCESS, COMPLETED))
    mirrored = b"".join(linked.ours.read(8, at) for at in range(65528, -8, -8))
    assert linked.theirs.read() == mirrored


# -- what breaks


def finally_(linked: Linked, req: int, status: int) -> int:
    """The answer with which a request has this status, at last; WAITING: it still has."""
    while (answer := linked.ask(req))[1] == WAITING != status:
        time.sleep(0.0005)
    assert answer[1] == status
    return answer[0]


def broken_forms(mode: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """What the broken request answers at last, and one that came after it."""
    return {
        "comm": ((SUCCESS, WAITING), (SUCCESS, WAITING)),
        "cs": ((SUCCESS, BROKEN), (SUCCESS, BROKEN)),
        "cs-host": ((SUCCESS, WAITING), (SUCCESS, WAITING)),
        "fab": ((SUCCESS, BROKEN), (PARAM_INVALID, BROKEN)),
        "fab-host": ((SUCCESS, BROKEN), (SUCCESS, COMPLETED)),
    }[mode]


def test_a_hardware_failure_breaks_the_link(link: Link) -> None:
    linked = link()
    linked.library.set("LATENCY_US", 2000)
    executed = linked.library.count("executed")
    linked.library.set("FAULTS", "transfer@2")
    before, broken, after = (linked.write()[1] for _ in range(3))
    until(lambda: linked.library.count("executed") >= executed + 1)
    time.sleep(0.01)
    first, later = broken_forms(linked.mode)
    assert linked.ask(before) == (SUCCESS, COMPLETED), "a finished request stays finished"
    assert finally_(linked, broken, first[1]) == first[0]
    assert finally_(linked, after, later[1]) == later[0]
    status, req = linked.write()
    if linked.mode == "cs":
        assert status == FAILED
    elif linked.mode in ("comm", "cs-host"):
        time.sleep(0.01)
        assert linked.ask(req) == (SUCCESS, WAITING)
    else:
        until(lambda: linked.ask(req) == (SUCCESS, COMPLETED))
    linked.again()
    req = linked.write()[1]
    until(lambda: linked.ask(req) == (SUCCESS, COMPLETED))


def test_unfolded_requests_fail_with_the_broken_one_even_finished_ones(link: Link) -> None:
    linked = link()
    if linked.mode != "fab":
        return
    linked.library.set("FAULTS", "transfer@2")
    through, broken = linked.write()[1], linked.write()[1]
    assert linked.ask(broken) == (SUCCESS, BROKEN)
    assert linked.ask(through) == (PARAM_INVALID, BROKEN)


def test_a_stream_that_hangs_answers_waiting_for_ever(link: Link) -> None:
    linked = link()
    linked.library.set("FAULTS", "hang@1")
    stuck, behind = linked.write()[1], linked.write()[1]
    for _ in range(100):
        assert linked.ask(stuck) == (SUCCESS, WAITING)
        assert linked.ask(behind) == (SUCCESS, WAITING)
    linked.again()
    assert linked.ask(linked.write()[1]) == (SUCCESS, COMPLETED)


def test_a_link_may_break_between_transfers(link: Link) -> None:
    linked = link()
    linked.library.break_links()
    status, req = linked.write()
    assert status == SUCCESS
    expected = {"comm": WAITING, "cs-host": WAITING, "cs": BROKEN}.get(linked.mode, COMPLETED)
    assert linked.ask(req) == (SUCCESS, expected)


@pytest.mark.parametrize("code", [FAILED, 507899, 207001, RESOURCE_EXHAUSTED, PARAM_INVALID])
def test_a_submit_that_fails(link: Link, code: int) -> None:
    linked = link()
    linked.library.set("LATENCY_US", 1000000)
    sibling = linked.write()[1]
    linked.library.set("FAULTS", f"submit@1={code}")
    assert linked.write()[0] == code
    status = linked.write()[0]
    if linked.mode == "comm":  # all of the link are purged, and a fatal code stays
        fatal = code not in (RESOURCE_EXHAUSTED, PARAM_INVALID)
        assert status == (FAILED if fatal else SUCCESS)
        assert linked.ask(sibling) == (FAILED, BROKEN)
    elif linked.mode.startswith("cs"):  # FAILED and TIMEOUT latch
        assert status == (FAILED if code == FAILED else SUCCESS)
        assert linked.ask(sibling) == (SUCCESS, BROKEN if (linked.mode, code) == ("cs", FAILED) else WAITING)
    else:
        assert status == SUCCESS
        assert linked.ask(sibling) == ((PARAM_INVALID, BROKEN) if linked.mode == "fab" else (SUCCESS, WAITING))


def test_a_query_that_fails_is_the_last(link: Link) -> None:
    linked = link()
    linked.library.set("FAULTS", "query@1=507018")
    req = linked.write()[1]
    assert linked.ask(req) == (507018, BROKEN)
    assert linked.ask(req) == (PARAM_INVALID, BROKEN)


def test_disconnect_ends_what_is_in_flight(link: Link) -> None:
    linked = link()
    linked.library.set("LATENCY_US", 1000000)
    linked.ours.fill(b"never")
    aborted = linked.library.count("aborted")
    reqs = [linked.write()[1] for _ in range(3)]
    began = time.monotonic()
    assert linked.here.disconnect(linked.there) == SUCCESS
    assert linked.mode != "comm" or time.monotonic() - began >= 0.1
    assert linked.library.count("aborted") == aborted + 3
    assert linked.library.count("live_requests") == 0
    for req in reqs:
        assert linked.ask(req) == (NOT_CONNECTED if linked.mode == "comm" else PARAM_INVALID, BROKEN)
        assert linked.ask(req) == (PARAM_INVALID, BROKEN)
    assert linked.write()[0] == NOT_CONNECTED
    if linked.mode.startswith("cs"):
        assert linked.here.batch() == (SUCCESS, [])
    assert linked.theirs.read(5) == bytes(5)


def test_a_comm_request_of_an_earlier_link_has_failed(link: Link) -> None:
    linked = link()
    linked.library.set("LATENCY_US", 1000000)
    req = linked.write()[1]
    linked.again()
    assert linked.ask(req) == (FAILED if linked.mode == "comm" else PARAM_INVALID, BROKEN)


# -- limits


def test_exhausted_is_about_links_not_requests(link: Link) -> None:
    linked = link()
    linked.library.set("LATENCY_US", 1000000)
    most = {"cs-host": 4096, "fab-host": 512}.get(linked.mode)
    count = 0
    while count < 5000 and linked.write()[0] == SUCCESS:
        count += 1
    assert count == (most or 5000)
    assert most is None or linked.write()[0] == (FAILED if linked.mode == "fab-host" else RESOURCE_EXHAUSTED)


def test_cs_on_the_host_is_exhausted_after_the_bytes_moved(link: Link) -> None:
    linked = link()
    linked.library.set("FAULTS", "exhausted@1")
    linked.ours.fill(b"moved")
    assert linked.write()[0] == (FAILED if linked.mode.startswith("fab") else RESOURCE_EXHAUSTED)
    assert linked.theirs.read(5) == (b"moved" if linked.mode == "cs-host" else bytes(5))
    assert linked.ask(linked.write()[1]) == (SUCCESS, COMPLETED)


def test_the_channels_of_a_device_are_limited(
    library: Library, objects: list[Hixl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIXLSIM_BACKEND", "cs")
    options = {"GlobalResourceConfig": '{"comm_resource_config.max_active_channels": 1}'}
    one, two = (Linked(library, "cs", options) for _ in range(2))
    objects += [one.here, one.there, two.here, two.there]
    busy = one.write()[1]
    assert two.write()[0] == RESOURCE_EXHAUSTED
    assert one.write()[0] == SUCCESS, "the link that has it may go on"
    assert one.ask(busy) == (SUCCESS, COMPLETED)
    assert two.write()[0] == RESOURCE_EXHAUSTED
    assert one.here.disconnect(one.there) == SUCCESS
    assert two.ask(two.write()[1]) == (SUCCESS, COMPLETED)


# -- AutoConnect


def test_auto_connect_connects_at_the_first_transfer(link: Link) -> None:
    linked = link(**AUTO)
    assert linked.here.disconnect(linked.there) == SUCCESS
    assert linked.ask(linked.write()[1]) == (SUCCESS, COMPLETED)
    assert linked.here.disconnect(linked.there) == SUCCESS
    op = (linked.ours.addr, linked.theirs.addr, 8)
    assert linked.here.transfer_sync(linked.there, READ, [op]) == SUCCESS
    assert linked.here.disconnect(linked.there) == SUCCESS


def test_with_auto_connect_a_bad_address_fails_the_other_requests(link: Link) -> None:
    linked = link(**AUTO)
    linked.library.set("LATENCY_US", 1000000)
    sibling = linked.write()[1]
    status = linked.here.transfer(linked.there, WRITE, [(linked.ours.addr, 4096, 8)])[0]
    if linked.mode == "comm":
        assert status == SUCCESS, "it is not checked"
        return
    assert status == PARAM_INVALID
    assert linked.ask(sibling) == (PARAM_INVALID, BROKEN)
    assert linked.here.disconnect(linked.there) == NOT_CONNECTED


def test_with_auto_connect_a_failed_query_ends_the_link(link: Link) -> None:
    linked = link(**AUTO)
    req, sibling = linked.write()[1], linked.write()[1]
    linked.library.set("FAULTS", "query@1=507018")
    assert linked.ask(req) == (507018, BROKEN)
    if linked.mode.startswith("fab"):  # only a status of FAILED does that there
        assert linked.ask(sibling) == (SUCCESS, COMPLETED)
    else:
        assert linked.here.disconnect(linked.there) == NOT_CONNECTED


def test_with_auto_connect_the_batch_query_reports_all_of_a_broken_link(link: Link) -> None:
    linked = link(**AUTO)
    if not linked.mode.startswith("cs"):
        return
    reqs = [linked.write(user_data=data)[1] for data in (1, 2, 3)]
    linked.library.set("FAULTS", "query@2=507018")
    assert linked.here.batch() == (SUCCESS, [(reqs[0], 1, COMPLETED), (reqs[1], 2, BROKEN), (reqs[2], 3, BROKEN)])
    assert linked.here.batch() == (SUCCESS, [])


# -- synchronous


def test_transfer_sync(link: Link) -> None:
    linked = link()
    linked.ours.fill(b"at once")
    op = (linked.ours.addr, linked.theirs.addr, 7)
    assert linked.here.transfer_sync(linked.there, WRITE, [op]) == SUCCESS
    assert linked.theirs.read(7) == b"at once"
    linked.library.set("LATENCY_US", 1000000)
    assert linked.here.transfer_sync(linked.there, WRITE, [op], 20) == TIMEOUT
    linked.library.set("LATENCY_US", 0)
    assert linked.write()[0] == (FAILED if linked.mode in ("comm", "cs", "cs-host") else SUCCESS)


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_blocked_submit_keeps_its_locks(library: Library, objects: list[Hixl], backend: str) -> None:
    """COMM: a stuck link stalls a query of it, and that one all queries; CS and FAB: other links go on."""
    here = Hixl(library)
    peers = [Hixl(library), Hixl(library)]
    objects += [here, *peers]
    assert [each.initialize() for each in objects] == [SUCCESS] * 3
    ours, theirs = here.memory(), [peer.memory() for peer in peers]
    assert [here.connect(peer) for peer in peers] == [SUCCESS] * 2
    reqs = [here.write(peer, ours.addr, memory.addr, 8) for peer, memory in zip(peers, theirs, strict=True)]
    library.set("FAULTS", "stall@1=60")
    answered: set[str] = set()

    def ask(name: str, req: int) -> None:
        assert here.status(req) == (SUCCESS, COMPLETED)
        answered.add(name)

    stuck = in_thread(lambda: here.transfer(peers[0], WRITE, [(ours.addr, theirs[0].addr, 8)]))
    time.sleep(0.1)
    same = in_thread(lambda: ask("same", reqs[0]))
    time.sleep(0.1)
    other = in_thread(lambda: ask("other", reqs[1]))
    if backend == "comm":
        time.sleep(0.1)
    else:
        other.join()
    assert answered == (set() if backend == "comm" else {"other"})
    library.set("FAULTS", "")
    for thread in (stuck, same, other):
        thread.join()
    assert answered == {"same", "other"}


def test_memory_stays_alive_until_the_bytes_moved(link: Link) -> None:
    linked = link()
    linked.library.set("LATENCY_US", 200000)
    fleeting = Memory(4096)
    linked.again()
    handle = linked.here.register(fleeting.addr, 4096)[1]
    linked.again()
    req = linked.here.write(linked.there, fleeting.addr, linked.theirs.addr, 8)
    del fleeting.view
    fleeting.block.close()  # unmapped: as if the program had freed it
    time.sleep(0.25)
    assert finally_(linked, req, {"comm": WAITING, "cs-host": WAITING}.get(linked.mode, BROKEN)) == SUCCESS
    assert linked.here.disconnect(linked.there) == SUCCESS
    assert linked.here.deregister(handle) == SUCCESS


def test_over_ub_a_list_of_several_kinds_is_queried_once_too_often(library: Library, objects: list[Hixl]) -> None:
    linked = Linked(library, "cs", {"GlobalResourceConfig": '{"comm_resource_config.protocol_desc": "ub_ctp:device"}'})
    objects += [linked.here, linked.there]
    other = Memory(4096)
    assert linked.here.register(other.addr, 4096, DEVICE)[0] == SUCCESS
    linked.again()
    whole = [(linked.ours.addr, linked.theirs.addr, 8), (other.addr, linked.theirs.addr + 8, 8)]
    for ops in (whole[:1], whole[1:]):
        status, req = linked.here.transfer(linked.there, WRITE, ops)
        assert (status, linked.ask(req)) == (SUCCESS, (SUCCESS, COMPLETED))
    status, req = linked.here.transfer(linked.there, WRITE, whole)
    assert status == SUCCESS
    assert linked.ask(req) == (SUCCESS, WAITING)
    assert linked.ask(req) == (PARAM_INVALID, BROKEN)


def test_a_channel_pool_evicts_idle_links(library: Library, objects: list[Hixl]) -> None:
    pool = '{"channel_pool.max_channel": 4, "channel_pool.high_waterline": 0.75, "channel_pool.low_waterline": 0.5}'
    objects += [Hixl(library) for _ in range(5)]
    here, *peers = objects
    assert here.initialize(options={"GlobalResourceConfig": pool}) == SUCCESS
    assert [peer.initialize() for peer in peers] == [SUCCESS] * 4
    ours, theirs = here.memory(), [peer.memory() for peer in peers]
    library.set("LATENCY_US", 1000000)
    for peer, memory in zip(peers, theirs, strict=True):
        here.write(peer, ours.addr, memory.addr, 8)  # it connects by itself
    assert library.count("links") == 4, "none is idle"
    library.set("LATENCY_US", 0)
    assert here.disconnect(peers[0]) == SUCCESS
    assert here.disconnect(peers[1]) == SUCCESS
    assert here.connect(peers[0]) == SUCCESS
    assert here.connect(peers[1]) == SUCCESS
    assert library.count("links") == 3, "one was"


def test_fab_looks_at_the_first_local_address(
    library: Library, objects: list[Hixl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where host memory was registered, and the list begins with host memory, all of it has to be registered."""
    monkeypatch.setenv("HIXLSIM_BACKEND", "fab")
    linked = Linked(library, "fab", {})
    objects += [linked.here, linked.there]
    device = ctypes.c_void_p()
    assert library.acl.aclrtMalloc(ctypes.byref(device), ctypes.c_size_t(4096), 0) == 0
    host, remote = linked.ours.addr, linked.theirs.addr
    for ops, status in (
        ([(device.value, remote, 8)], SUCCESS),
        ([(host, remote, 8), (device.value, remote, 8)], PARAM_INVALID),
        ([(device.value, remote, 8), (host, remote, 8)], SUCCESS),
    ):
        assert linked.here.transfer(linked.there, WRITE, ops)[0] == status
    assert library.acl.aclrtFree(device) == 0
