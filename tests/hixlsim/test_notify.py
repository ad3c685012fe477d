"""Notifications."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .build import build
from .probe import COMPLETED, FAILED, NOT_CONNECTED, PARAM_INVALID, RESOURCE_EXHAUSTED, SUCCESS, TIMEOUT, Hixl, Library


@pytest.fixture
def linked(pair: tuple[Hixl, Hixl]) -> tuple[Hixl, Hixl]:
    assert pair[0].connect(pair[1]) == SUCCESS
    return pair


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.0005)


def received(library: Library, hixl: Hixl, count: int) -> list[tuple[str, str]]:
    """FAB sends without waiting for an answer."""
    got: list[tuple[str, str]] = []
    while len(got) < count:
        got += hixl.notifies()
    return got


def test_notifications_come_in_order_and_once(linked: tuple[Hixl, Hixl], backend: str, library: Library) -> None:
    here, there = linked
    sent = [(f"name {i}", f"text {i}") for i in range(20)]
    assert [here.notify(there, *each) for each in sent] == [SUCCESS] * 20
    assert sorted(received(library, there, 20)) == sorted(sent)
    if backend != "fab":
        assert [here.notify(there, *each) for each in sent] == [SUCCESS] * 20
        assert there.notifies() == sent, "it was delivered before the answer"
    assert there.notifies() == []
    assert here.notifies() == []


@pytest.mark.parametrize("field", [0, 1])
def test_a_field_holds_1024_bytes(linked: tuple[Hixl, Hixl], library: Library, field: int) -> None:
    here, there = linked
    whole = ["", ""]
    whole[field] = "é" * 512
    assert here.notify(there, *whole) == SUCCESS
    assert received(library, there, 1) == [tuple(whole)]
    whole[field] += "x"
    assert here.notify(there, *whole) == PARAM_INVALID


def test_a_nul_ends_the_text(linked: tuple[Hixl, Hixl], library: Library) -> None:
    assert linked[0].notify(linked[1], b"name\0more", b"\0") == SUCCESS
    assert received(library, linked[1], 1) == [("name", "")]


@pytest.mark.parametrize("bad", [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"caf\xc3"])
def test_text_is_utf8(linked: tuple[Hixl, Hixl], backend: str, bad: bytes) -> None:
    if backend == "fab":
        return
    here, there = linked
    assert here.notify(there, bad, b"") == PARAM_INVALID
    assert here.notify(there, b"", bad) == PARAM_INVALID
    assert here.notify(there, "é€😀", "") == SUCCESS


def test_fab_aborts_on_text_that_is_not_utf8(backend: str) -> None:
    if backend != "fab":
        return
    program = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hixlsim.probe import Hixl, Library
library = Library(Path(sys.argv[2]))
library.set_device()
one, two = Hixl(library), Hixl(library)
assert [one.initialize(), two.initialize()] == [0, 0]
print("alive", flush=True)
one.notify(two, b"\\xff", b"")
print("still alive")
"""
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program, tests, build()], capture_output=True, text=True, check=False)
    assert done.returncode == -6
    assert done.stdout == "alive\n"


def test_a_queue_holds_4096(linked: tuple[Hixl, Hixl], backend: str, library: Library) -> None:
    here, there = linked
    counted = library.count("notifies")
    assert {here.notify(there, "", str(i)) for i in range(4096)} == {SUCCESS}
    until(lambda: library.count("notifies") == counted + 4096)
    assert (
        here.notify(there, "", "one more", 50) == {"comm": TIMEOUT, "cs": RESOURCE_EXHAUSTED, "fab": SUCCESS}[backend]
    )
    time.sleep(0.02)
    got = there.notifies()
    assert len(got) == 4096
    assert "one more" not in [text for _, text in got]
    # CS and FAB go on. COMM's receiver reads this link no longer.
    assert here.notify(there, "", "later", 50) == (TIMEOUT if backend == "comm" else SUCCESS)
    if backend != "comm":
        assert received(library, there, 1) == [("", "later")]
    else:
        assert here.disconnect(there) == SUCCESS
        assert here.connect(there) == SUCCESS
        assert here.notify(there, "", "anew") == SUCCESS
        assert there.notifies() == [("", "anew")]


def test_the_queue_is_of_the_link_on_comm_and_of_the_engine_elsewhere(
    backend: str, library: Library, objects: list[Hixl]
) -> None:
    objects += [Hixl(library) for _ in range(3)]
    assert [each.initialize() for each in objects] == [SUCCESS] * 3
    there, *clients = objects
    assert [client.connect(there) for client in clients] == [SUCCESS] * 2
    for i in range(4096):
        assert clients[i % 2].notify(there, str(i % 2), str(i // 2)) == SUCCESS
    time.sleep(0.02)
    more = clients[0].notify(there, "", "more", 500)
    assert more == (RESOURCE_EXHAUSTED if backend == "cs" else SUCCESS)
    got = there.notifies()
    for name in "01":
        order = [text for sender, text in got if sender == name]
        if backend != "fab":
            assert order == [str(i) for i in range(2048)]
    names = [name for name, _ in got if name]
    if backend == "comm":
        assert names in (["0"] * 2048 + ["1"] * 2048, ["1"] * 2048 + ["0"] * 2048), "one client after the other"
    elif backend == "cs":
        assert names == ["0", "1"] * 2048, "as they came"


def test_what_is_in_the_vector_before(linked: tuple[Hixl, Hixl], backend: str, library: Library) -> None:
    here, there = linked
    counted = library.count("notifies")
    assert here.notify(there, "new", "") == SUCCESS
    until(lambda: library.count("notifies") == counted + 1)
    got = there.notifies(before=[("old", "")])
    assert got == ([("old", ""), ("new", "")] if backend == "comm" else [("new", "")])
    assert there.notifies() == ([("old", "")] if backend == "fab" else [])


def test_what_a_client_left_behind(linked: tuple[Hixl, Hixl], backend: str, library: Library) -> None:
    here, there = linked
    counted = library.count("notifies")
    assert here.notify(there, "left", "behind") == SUCCESS
    until(lambda: library.count("notifies") == counted + 1)
    assert here.disconnect(there) == SUCCESS
    assert there.notifies() == ([] if backend == "comm" else [("left", "behind")])


def test_no_answer_in_time(linked: tuple[Hixl, Hixl], backend: str, library: Library) -> None:
    here, there = linked
    library.set("FAULTS", "ack_lost@1")
    assert here.notify(there, "", "lost?", 30) == (SUCCESS if backend == "fab" else TIMEOUT)
    assert received(library, there, 1) == [("", "lost?")], "it was delivered all the same"
    assert here.notify(there, "", "next", 2000) == SUCCESS


def test_a_late_answer(linked: tuple[Hixl, Hixl], backend: str, library: Library) -> None:
    """CS takes it for the answer to the next one, so that SUCCESS comes before that one can have arrived."""
    here, there = linked
    if backend == "fab":
        return
    library.set("FAULTS", "ack_delay@1=0.2;ack_lost@2")
    assert here.notify(there, "", "slow", 20) == TIMEOUT
    time.sleep(0.4)
    assert here.notify(there, "", "next", 100) == (SUCCESS if backend == "cs" else TIMEOUT)


def test_comm_times_out_without_reason_and_is_broken_then(
    linked: tuple[Hixl, Hixl], backend: str, library: Library
) -> None:
    here, there = linked
    library.set("FAULTS", "notify@1")
    assert here.notify(there, "", "x", 60000) == (TIMEOUT if backend == "comm" else FAILED)
    assert there.notifies() == []
    if backend == "comm":
        assert here.notify(there, "", "y", 30) == TIMEOUT
        assert here.disconnect(there) == SUCCESS
        assert here.connect(there) == SUCCESS
    assert here.notify(there, "", "z") == SUCCESS
    assert received(library, there, 1) == [("", "z")]


def test_a_wait_for_an_answer_holds_the_link_on_cs(linked: tuple[Hixl, Hixl], backend: str, library: Library) -> None:
    here, there = linked
    ours, theirs = here.memory(), there.memory()
    assert here.disconnect(there) == SUCCESS
    assert here.connect(there) == SUCCESS
    req = here.write(there, ours.addr, theirs.addr, 8)
    library.set("FAULTS", "ack_delay@1=0.5")
    began = time.monotonic()
    waits = threading.Thread(target=lambda: here.notify(there, "", ""))
    waits.start()
    time.sleep(0.1)
    assert here.status(req) == (SUCCESS, COMPLETED)
    if backend == "cs":
        assert time.monotonic() - began >= 0.5
    else:
        assert waits.is_alive() == (backend == "comm")
    waits.join()


def test_the_receiver_is_gone(linked: tuple[Hixl, Hixl], backend: str) -> None:
    here, there = linked
    there.finalize()
    assert here.notify(there, "a", "b", 200) == {"comm": 1, "cs": TIMEOUT, "fab": FAILED}[backend]
    assert here.disconnect(there) == SUCCESS
    assert here.notify(there, "a", "b") == (FAILED if backend == "fab" else NOT_CONNECTED)


def test_a_silent_client_is_dropped_by_comm(backend: str, library: Library, objects: list[Hixl]) -> None:
    library.set("HEARTBEAT_MS", 20)
    library.set("SILENCE_MS", 60000)
    objects += [Hixl(library), Hixl(library)]
    here, there = objects
    assert [here.initialize(), there.initialize()] == [SUCCESS] * 2
    assert here.connect(there) == SUCCESS
    time.sleep(0.1)
    assert here.notify(there, "a", "b") == SUCCESS, "it sends heartbeats"
    library.set("SILENCE_MS", 0)
    if backend == "comm":
        until(lambda: here.notify(there, "a", "b", 100) in (1, FAILED, TIMEOUT))
    else:
        time.sleep(0.1)
        assert here.notify(there, "a", "b") == SUCCESS


@pytest.mark.parametrize("auto", ["0", "1"])
def test_a_dead_peer_is_detected_with_auto_connect_only(
    backend: str, library: Library, objects: list[Hixl], auto: str
) -> None:
    library.set("HEARTBEAT_MS", 20)
    objects += [Hixl(library), Hixl(library)]
    here, there = objects
    assert [each.initialize(options={"AutoConnect": auto}) for each in objects] == [SUCCESS] * 2
    assert here.connect(there) == SUCCESS
    there.finalize()
    noticed = auto == "1" and backend != "cs"  # which leaves its end open: only a process that is gone is noticed
    if noticed:
        until(lambda: library.count("links") == 0)
    else:
        time.sleep(0.1)
    assert here.disconnect(there) == (NOT_CONNECTED if noticed else SUCCESS)
