"""Signals that the program handles interrupt system calls: no call of a driver fails, or restarts forever, because of them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

import pytest
import vtable as vt
from conftest import World
from peer import Peer
from vtable import MAY_READ, MAY_WRITE, READ, WRITE

MIB = 1 << 20
SIGNALS = 100


class Timer:
    """A timer that interrupts this thread a thousand times a second, and a count of how often it did."""

    def __init__(self) -> None:
        self.fired = 0

    def __call__(self, *_: object) -> None:
        self.fired += 1

    def during(self, step: Callable[[], object]) -> None:
        """Repeat a step until so many signals have arrived meanwhile."""
        before = self.fired
        while self.fired - before < SIGNALS:
            step()


@contextlib.contextmanager
def ticking() -> Iterator[Timer]:
    timer = Timer()
    before = signal.signal(signal.SIGALRM, timer)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield timer
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def link(
    leakless: None, driver_name: str, driver_options: dict[str, str], open_instance
) -> Iterator[tuple[Peer, vt.Link]]:
    with Peer(driver_name, driver_options) as peer:
        yield peer, peer.join(open_instance())


@pytest.fixture(params=["allocated", pytest.param("registered", marks=pytest.mark.needs("REGISTER"))])
def remote(request: pytest.FixtureRequest, link: tuple[Peer, vt.Link]) -> vt.Memory:
    peer, end = link
    if request.param == "allocated":
        return peer.region(end, 4 * MIB, seed=3)[1]
    number = peer.call("register", size=4 * MIB, rights=3, seed=3)
    try:
        memory = end.load(peer.call("export", memory=number, rights=3), 4 * MIB, MAY_READ | MAY_WRITE)
    except vt.DriverError as error:
        pytest.skip(f"registered memory of another process: {error}")
    memory.op.ok(end)
    return memory


@pytest.mark.needs("ALLOC")
@pytest.mark.parametrize("verb", [READ, WRITE], ids=["read", "write"])
@pytest.mark.parametrize("size", [64, 3 * MIB], ids=["inline", "on threads"])
def test_transfers(link: tuple[Peer, vt.Link], remote: vt.Memory, verb: int, size: int) -> None:
    _, end = link
    here = end.instance.alloc(4 * MIB)
    with ticking() as timer:
        timer.during(lambda: end.submit(verb, [(here, 0, remote, 0, size)]).ok(end))


@pytest.mark.needs("ALLOC", "SIGNAL")
def test_signal_words(link: tuple[Peer, vt.Link], remote: vt.Memory) -> None:
    _, end = link
    with ticking() as timer:
        timer.during(lambda: end.submit(signal=(remote, 0, 7)).ok(end))


@pytest.mark.needs("NOTIFY")
def test_notifications(link: tuple[Peer, vt.Link]) -> None:
    peer, end = link
    sent = 0

    def send() -> None:
        nonlocal sent
        end.note(b"t", b"%d" % sent).ok(end)
        sent += 1
        if sent % 50 == 0:
            assert len(peer.call("notes", n=sent)) == sent

    with ticking() as timer:
        timer.during(send)
    assert [int(text) for _, text in peer.call("notes", n=sent)] == list(range(sent))


@pytest.mark.needs("ALLOC")
def test_links_and_memory(driver: vt.CDriver, open_instance) -> None:
    """All that is done once: links, regions, imports, and their ends."""
    instances = open_instance(), open_instance()

    def once() -> None:
        left, right = vt.join(*instances)
        world = World(left, right, MIB)
        world.write(0, 0, MIB).ok(left, right)
        world.remote.release()
        world.there.release()
        world.here.release()
        for end in (left, right):
            end.stop().wait(left, right)
            end.free()

    with ticking() as timer:
        timer.during(once)


@pytest.mark.needs("ALLOC")
def test_memory_that_takes_longer_than_the_time_between_two_signals(open_instance) -> None:
    """The kernel undoes an allocation that a signal interrupts, so that one which is only retried would never end."""
    instance = open_instance()
    with ticking():
        memory = instance.alloc(256 * MIB)
        assert memory.view[-1] == 0
