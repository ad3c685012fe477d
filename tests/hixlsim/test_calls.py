"""The answer of each call, in each back-end."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from .probe import (
    ALREADY_CONNECTED,
    BROKEN,
    COMPLETED,
    CONNECT_FAILED,
    CONNECTED,
    CONNECTING,
    DEVICE,
    DISCONNECT_PENDING,
    FAILED,
    HOST,
    NOT_CONNECT,
    NOT_CONNECTED,
    PARAM_INVALID,
    READ,
    RESOURCE_EXHAUSTED,
    SUCCESS,
    TIMEOUT,
    UNSUPPORTED,
    WRITE,
    Hixl,
    Library,
    Memory,
    free_port,
)

EVERY: dict[str, Callable[[Hixl], object]] = {
    "RegisterMem": lambda h: h.register(4096, 4096)[0],
    "DeregisterMem": lambda h: h.deregister(1),
    "Connect": lambda h: h.connect("127.0.0.1:1"),
    "Disconnect": lambda h: h.disconnect("127.0.0.1:1"),
    "ConnectAsync": lambda h: h.connect_async("127.0.0.1:1"),
    "DisconnectAsync": lambda h: h.disconnect_async("127.0.0.1:1"),
    "TransferSync": lambda h: h.transfer_sync("127.0.0.1:1", READ, [(1, 1, 1)]),
    "TransferAsync": lambda h: h.transfer("127.0.0.1:1", READ, [(1, 1, 1)])[0],
    "GetTransferStatus": lambda h: h.status(1)[0],
    "GetTransferStatus (batch)": lambda h: h.batch()[0],
    "SendNotify": lambda h: h.notify("127.0.0.1:1", "", ""),
}


@pytest.fixture
def linked(pair: tuple[Hixl, Hixl]) -> tuple[Hixl, Hixl, Memory, Memory]:
    """Two engines with memory, the first connected to the second."""
    here, there = pair
    ours, theirs = here.memory(), there.memory()
    assert here.connect(there) == SUCCESS
    return here, there, ours, theirs


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.0005)


@pytest.mark.parametrize("call", EVERY)
def test_before_and_after_its_life_an_object_fails(
    backend: str, library: Library, objects: list[Hixl], call: str
) -> None:
    objects.append(Hixl(library))
    assert EVERY[call](objects[0]) == FAILED
    assert objects[0].initialize() == SUCCESS
    objects[0].finalize()
    assert EVERY[call](objects[0]) == FAILED
    assert objects[0].initialize() == SUCCESS
    objects[0].finalize()
    objects[0].finalize()


def test_initialize_again_clashes_with_its_own_port(pair: tuple[Hixl, Hixl]) -> None:
    here, there = pair
    assert here.connect(there) == SUCCESS
    assert here.initialize(here.id) == FAILED
    assert here.connect(there) == ALREADY_CONNECTED, "the old engine survives"


def test_initialize_again_without_a_port_replaces_the_engine(
    backend: str, library: Library, objects: list[Hixl]
) -> None:
    objects += [Hixl(library), Hixl(library)]
    client, server = objects
    assert [client.initialize("127.0.0.1"), server.initialize()] == [SUCCESS, SUCCESS]
    assert client.connect(server) == SUCCESS
    assert client.initialize("127.0.0.1") == SUCCESS
    assert client.disconnect(server) == NOT_CONNECTED


def test_bytes_move_both_ways_over_one_link(linked: tuple[Hixl, Hixl, Memory, Memory]) -> None:
    here, there, ours, theirs = linked
    ours.fill(b"to there")
    theirs.fill(b"from there", at=4096)
    assert here.status(here.write(there, ours.addr, theirs.addr, 8)) == (SUCCESS, COMPLETED)
    assert theirs.read(8) == b"to there"
    status, req = here.transfer(there, READ, [(ours.addr + 100, theirs.addr + 4096, 10)])
    assert (status, here.status(req)) == (SUCCESS, (SUCCESS, COMPLETED))
    assert ours.read(10, at=100) == b"from there"


def test_a_link_goes_one_way(linked: tuple[Hixl, Hixl, Memory, Memory]) -> None:
    here, there, ours, theirs = linked
    assert there.transfer(here, WRITE, [(theirs.addr, ours.addr, 8)])[0] == NOT_CONNECTED
    assert there.disconnect(here) == NOT_CONNECTED
    assert there.connect(here) == SUCCESS
    assert there.status(there.write(here, theirs.addr, ours.addr, 8)) == (SUCCESS, COMPLETED)
    assert there.disconnect(here) == SUCCESS
    assert here.status(here.write(there, ours.addr, theirs.addr, 8)) == (SUCCESS, COMPLETED)


def test_not_connected(pair: tuple[Hixl, Hixl], backend: str) -> None:
    here, there = pair
    assert here.transfer(there, READ, [(1, 1, 1)])[0] == NOT_CONNECTED
    assert here.transfer_sync(there, READ, [(1, 1, 1)]) == NOT_CONNECTED
    assert here.disconnect(there) == NOT_CONNECTED
    assert here.notify(there, "a", "b") == (SUCCESS if backend == "fab" else NOT_CONNECTED)


def test_connect_connects_once(linked: tuple[Hixl, Hixl, Memory, Memory]) -> None:
    here, there, *_ = linked
    assert here.connect(there) == ALREADY_CONNECTED
    assert here.disconnect(there) == SUCCESS
    assert here.disconnect(there) == NOT_CONNECTED
    assert here.connect(there) == SUCCESS


def test_no_listener(pair: tuple[Hixl, Hixl]) -> None:
    assert pair[0].connect(f"127.0.0.1:{free_port()}", 60000) == FAILED
    assert pair[0].connect("nowhere:1") == PARAM_INVALID


def test_a_listener_that_never_answers(pair: tuple[Hixl, Hixl], backend: str, library: Library) -> None:
    import socket

    library.set("COMM_PATIENCE_MS", 300)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        assert pair[0].connect(f"127.0.0.1:{mute.getsockname()[1]}", 50) == TIMEOUT
        assert backend != "comm" or time.monotonic() - began >= 0.3, (
            "COMM does not mind the time, and would wait for ever"
        )


@pytest.mark.parametrize("ms", [0, -1])
def test_times_are_positive(linked: tuple[Hixl, Hixl, Memory, Memory], ms: int) -> None:
    here, there, ours, theirs = linked
    assert here.connect(there, ms) == PARAM_INVALID
    assert here.disconnect(there, ms) == PARAM_INVALID
    assert here.connect_async(there, ms) == PARAM_INVALID
    assert here.disconnect_async(there, ms) == PARAM_INVALID
    assert here.transfer_sync(there, READ, [(ours.addr, theirs.addr, 1)], ms) == PARAM_INVALID
    assert here.notify(there, "", "", ms) == PARAM_INVALID


def test_connect_to_self(pair: tuple[Hixl, Hixl], backend: str) -> None:
    if backend != "comm":  # there it is refused as a peer on its own device
        assert pair[0].connect(pair[0]) == (SUCCESS if backend == "fab" else PARAM_INVALID)


def test_comm_refuses_its_own_device(pair: tuple[Hixl, Hixl], backend: str, library: Library) -> None:
    library.set("REFUSE_SAME_DEVICE", 1)
    assert pair[0].connect(pair[1]) == (PARAM_INVALID if backend == "comm" else SUCCESS)
    assert pair[0].connect(pair[0]) == (SUCCESS if backend == "fab" else PARAM_INVALID)


def test_backends_are_not_compatible(library: Library, objects: list[Hixl], monkeypatch: pytest.MonkeyPatch) -> None:
    objects += [Hixl(library), Hixl(library)]
    for each, backend in zip(objects, ("comm", "cs"), strict=True):
        monkeypatch.setenv("HIXLSIM_BACKEND", backend)
        assert each.initialize() == SUCCESS
    assert objects[0].connect(objects[1]) == FAILED
    assert objects[1].connect(objects[0]) == FAILED


def test_a_client_may_connect_again(pair: tuple[Hixl, Hixl], library: Library, objects: list[Hixl]) -> None:
    here, there = pair
    assert here.connect(there) == SUCCESS
    here.finalize()
    assert here.initialize(here.id) == SUCCESS
    assert here.connect(there) == SUCCESS


# -- memory


def test_ranges(pair: tuple[Hixl, Hixl], backend: str) -> None:
    here = pair[0]
    block = Memory(1 << 16)
    assert here.register(0, 4096)[0] == PARAM_INVALID
    assert here.register(2**64 - 4096, 8192)[0] == PARAM_INVALID
    status, handle = here.register(block.addr, 8192)
    assert status == SUCCESS
    assert here.register(block.addr, 8192) == (SUCCESS, handle)
    assert here.register(block.addr + 4096, 8192)[0] == (SUCCESS if backend == "comm" else PARAM_INVALID)
    assert here.register(block.addr + 8192, 4096)[0] == SUCCESS, "neighbours"
    assert here.register(block.addr, 4096, DEVICE)[0] == SUCCESS, "the other kind"
    assert here.register(block.addr + 32768, 0)[0] == (PARAM_INVALID if backend == "fab" else SUCCESS)


def test_handles(pair: tuple[Hixl, Hixl], backend: str) -> None:
    here = pair[0]
    block = Memory(4096)
    handle = here.register(block.addr, 4096)[1]
    assert here.deregister(0) == PARAM_INVALID
    assert here.deregister(handle) == SUCCESS
    assert here.deregister(handle) == SUCCESS
    assert here.connect(pair[1]) == SUCCESS
    assert here.deregister(handle) == (FAILED if backend == "fab" else SUCCESS)
    assert here.register(block.addr, 4096)[0] == SUCCESS


def test_deregister_while_a_link_exists(pair: tuple[Hixl, Hixl], backend: str) -> None:
    here, there = pair
    block, other = Memory(4096), Memory(4096)
    handle, served = here.register(block.addr, 4096)[1], there.register(other.addr, 4096)[1]
    assert here.connect(there) == SUCCESS
    assert here.deregister(handle) == (SUCCESS if backend == "comm" else FAILED)
    assert there.deregister(served) == SUCCESS, "nothing protects the server's"
    assert here.disconnect(there) == SUCCESS
    assert here.deregister(handle) == SUCCESS


@pytest.mark.parametrize("second", [(4096, 0, HOST), (0, 4096, DEVICE)], ids=["of no length", "of the other kind"])
def test_cs_cannot_connect_with_some_memory(
    pair: tuple[Hixl, Hixl], backend: str, second: tuple[int, int, int]
) -> None:
    if backend != "cs":
        return
    here, there = pair
    block = Memory(8192)
    assert here.register(block.addr, 4096)[0] == SUCCESS
    at, size, kind = second
    status, handle = here.register(block.addr + at, size, kind)
    assert status == SUCCESS
    assert here.connect(there) == PARAM_INVALID
    assert here.deregister(handle) == SUCCESS
    assert here.connect(there) == SUCCESS


# -- asynchronous connects


def test_connect_async(pair: tuple[Hixl, Hixl]) -> None:
    here, there = pair
    assert here.async_status(there) == NOT_CONNECT
    assert here.connect_async(there) == SUCCESS
    until(lambda: here.async_status(there) == CONNECTED)
    assert here.connect(there) == ALREADY_CONNECTED
    assert here.connect_async(there) == SUCCESS
    until(lambda: here.async_status(there) == CONNECTED)
    assert here.disconnect_async(there) == SUCCESS
    until(lambda: here.async_status(there) == NOT_CONNECT)
    assert here.disconnect(there) == NOT_CONNECTED
    unused = f"127.0.0.1:{free_port()}"
    assert here.connect_async(unused) == SUCCESS
    until(lambda: here.async_status(unused) == CONNECT_FAILED)
    assert here.disconnect_async(unused) == SUCCESS
    until(lambda: here.async_status(unused) == NOT_CONNECT)


def test_connect_async_has_a_queue_with_an_end(backend: str, library: Library, objects: list[Hixl]) -> None:
    small = {"GlobalResourceConfig": '{"connect_pool.thread_num": 1, "connect_pool.task_queue_capacity": 2}'}
    objects += [Hixl(library) for _ in range(5)]
    here, *peers = objects
    assert here.initialize(options=small) == SUCCESS
    assert [peer.initialize() for peer in peers] == [SUCCESS] * 4
    library.set("FAULTS", "connect_stall@1=60")
    assert here.connect_async(peers[0]) == SUCCESS
    until(lambda: here.async_status(peers[0]) == CONNECTING)
    assert [here.connect_async(peer) for peer in peers[1:]] == [SUCCESS, SUCCESS, RESOURCE_EXHAUSTED]
    assert here.disconnect_async(peers[1]) == RESOURCE_EXHAUSTED
    assert here.async_status(peers[3]) == NOT_CONNECT
    library.set("FAULTS", "")
    until(lambda: here.async_status(peers[2]) == CONNECTED)
    assert here.disconnect_async(peers[2]) == SUCCESS
    assert here.async_status(peers[2]) in (DISCONNECT_PENDING, NOT_CONNECT, 6)


def test_different_peers_connect_side_by_side(backend: str, library: Library, objects: list[Hixl]) -> None:
    objects += [Hixl(library) for _ in range(3)]
    assert [each.initialize() for each in objects] == [SUCCESS] * 3
    here, slow, fast = objects
    if backend != "cs":
        return  # one lock for all: HCCL's, or FAB's own
    library.set("FAULTS", "connect_stall@1=60")
    assert here.connect_async(slow) == SUCCESS
    until(lambda: here.async_status(slow) == CONNECTING)
    assert here.connect_async(fast) == SUCCESS
    until(lambda: here.async_status(fast) == CONNECTED)
    assert here.async_status(slow) == CONNECTING
    library.set("FAULTS", "")


# -- transfers that are refused


def test_null_and_empty(linked: tuple[Hixl, Hixl, Memory, Memory]) -> None:
    here, there, ours, theirs = linked
    for ops in ([(0, theirs.addr, 8)], [(ours.addr, 0, 8)], [(ours.addr, theirs.addr, 8), (0, 0, 0)], []):
        assert here.transfer(there, WRITE, ops)[0] == PARAM_INVALID
        assert here.transfer_sync(there, WRITE, ops) == PARAM_INVALID


def test_a_null_request(linked: tuple[Hixl, Hixl, Memory, Memory]) -> None:
    assert linked[0].status(0)[0] == FAILED
    assert linked[0].status(12345) == (PARAM_INVALID, BROKEN)


@pytest.mark.parametrize("where", ["here", "there", "no length", "beyond the end"])
def test_ranges_are_checked_where_they_are(linked: tuple[Hixl, Hixl, Memory, Memory], backend: str, where: str) -> None:
    here, there, ours, theirs = linked
    stray = Memory(4096)
    op = {
        "here": (stray.addr, theirs.addr, 8),
        "there": (ours.addr, stray.addr, 8),
        "no length": (ours.addr, theirs.addr, 0),
        "beyond the end": (ours.addr, theirs.addr + theirs.size - 4, 8),
    }[where]
    status, req = here.transfer(there, WRITE, [op])
    assert status == (SUCCESS if backend == "comm" else PARAM_INVALID)
    if backend == "comm":  # no length is done; else the stream is dead, and says nothing
        assert here.status(req) == (SUCCESS, COMPLETED if where == "no length" else 0)


def test_later_memory_is_invisible(linked: tuple[Hixl, Hixl, Memory, Memory], backend: str) -> None:
    here, there, ours, theirs = linked
    late_here, late_there = here.memory(), there.memory()
    for op in ((late_here.addr, theirs.addr, 8), (ours.addr, late_there.addr, 8)):
        status, req = here.transfer(there, WRITE, [op])
        local = op[0] == late_here.addr
        if backend == "comm":
            assert (status, here.status(req)) == (SUCCESS, (SUCCESS, 0)), "never completes"
        else:
            assert status == (SUCCESS if backend == "fab" and local else PARAM_INVALID)
    assert here.disconnect(there) == SUCCESS
    assert here.connect(there) == SUCCESS
    req = here.write(there, late_here.addr, late_there.addr, 8)
    assert here.status(req) == (SUCCESS, COMPLETED)


def test_a_range_may_span_neighbours(pair: tuple[Hixl, Hixl]) -> None:
    here, there = pair
    block, ours = Memory(8192), here.memory(8192)
    for at in (0, 4096):
        assert there.register(block.addr + at, 4096)[0] == SUCCESS
    assert here.connect(there) == SUCCESS
    ours.fill(b"x" * 8192)
    assert here.status(here.write(there, ours.addr, block.addr, 8192)) == (SUCCESS, COMPLETED)
    assert block.read() == b"x" * 8192


def test_what_was_deregistered_there_is_not_written(pair: tuple[Hixl, Hixl], backend: str) -> None:
    here, there = pair
    ours, block = here.memory(), Memory(4096)
    handle = there.register(block.addr, 4096)[1]
    assert here.connect(there) == SUCCESS
    assert there.deregister(handle) == SUCCESS
    ours.fill(b"too late")
    req = here.write(there, ours.addr, block.addr, 8)
    assert here.status(req) == (SUCCESS, 0 if backend == "comm" else BROKEN)
    assert block.read(8) == bytes(8)


def test_batch_queries_are_of_cs_only(linked: tuple[Hixl, Hixl, Memory, Memory], backend: str) -> None:
    status, results = linked[0].batch()
    assert (status, results) == (SUCCESS if backend == "cs" else UNSUPPORTED, [])


def test_engines_may_have_ipv6_addresses(backend: str, library: Library, objects: list[Hixl]) -> None:
    import socket

    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
            port = free.getsockname()[1]
    except OSError:
        pytest.skip("no IPv6 here")
    objects += [Hixl(library), Hixl(library)]
    assert objects[0].initialize(f"[::1]:{port}") == SUCCESS
    assert objects[1].initialize() == SUCCESS
    assert objects[1].connect(objects[0]) == SUCCESS
