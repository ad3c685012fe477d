"""The simulation's own promises: faults, other processes, and an abort with a message where a caller breaks a rule."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .build import build
from .probe import (
    BROKEN,
    COMPLETED,
    FAILED,
    READ,
    SUCCESS,
    TIMEOUT,
    WAITING,
    WRITE,
    Hixl,
    Library,
)

TESTS = Path(__file__).parents[1]

# A process with one engine and one block; says where they are, and does as it is told until there is nothing more.
PEER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hixlsim.probe import Hixl, Library
library = Library(Path(sys.argv[2]))
library.set_device()
hixl = Hixl(library)
assert hixl.initialize() == 0
block = hixl.memory(1 << 20)
block.fill(b"from another process")
print(hixl.id, block.addr, flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
hixl.finalize()
"""


class Peer:
    def __init__(self) -> None:
        command = [sys.executable, "-c", PEER, str(TESTS), str(build())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.id, addr = self.process.stdout.readline().split()
        self.addr = int(addr)

    def eval(self, expression: str) -> object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return eval(self.process.stdout.readline())


@pytest.fixture
def peer(backend: str) -> Iterator[Peer]:
    made = Peer()
    with made.process:
        yield made
        made.process.kill()


@pytest.fixture
def here(backend: str, library: Library, objects: list[Hixl]) -> Hixl:
    objects.append(Hixl(library))
    assert objects[0].initialize() == SUCCESS
    return objects[0]


@pytest.mark.parametrize("relay", [0, 1], ids=["direct", "relayed"])
def test_bytes_move_between_processes(here: Hixl, peer: Peer, library: Library, relay: int) -> None:
    library.set("RELAY", relay)
    ours = here.memory(1 << 20)
    assert here.connect(peer.id) == SUCCESS
    status, req = here.transfer(peer.id, READ, [(ours.addr, peer.addr, 20)])
    assert (status, here.status(req)) == (SUCCESS, (SUCCESS, COMPLETED))
    assert ours.read(20) == b"from another process"
    ours.fill(b"pattern " * (1 << 17))
    status, req = here.transfer(peer.id, WRITE, [(ours.addr, peer.addr, 1 << 20)])
    while here.status(req) == (SUCCESS, WAITING):
        time.sleep(0.001)
    assert peer.eval("block.read() == b'pattern ' * (1 << 17)") is True
    assert here.notify(peer.id, "to", "you") == SUCCESS
    while (got := peer.eval("hixl.notifies()")) == []:
        time.sleep(0.001)
    assert got == [("to", "you")]


def test_a_stopped_process_is_written_to(here: Hixl, peer: Peer, backend: str, library: Library) -> None:
    """As by hardware, which needs no cooperation."""
    ours = here.memory()
    ours.fill(b"while you slept")
    assert here.connect(peer.id) == SUCCESS
    peer.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED | os.WNOWAIT)
    assert here.status(here.write(peer.id, ours.addr, peer.addr, 15)) == (SUCCESS, COMPLETED)
    assert here.notify(peer.id, "", "", 50) == (SUCCESS if backend == "fab" else TIMEOUT)
    library.set("COMM_PATIENCE_MS", 100)  # it tells its peer, and waits for an answer; without this for ever
    assert here.disconnect(peer.id, 50) == (FAILED if backend == "comm" else SUCCESS)
    assert here.connect(peer.id, 50) == TIMEOUT
    peer.process.send_signal(signal.SIGCONT)
    assert peer.eval("block.read(15)") == b"while you slept"


def test_a_killed_process(here: Hixl, peer: Peer, backend: str) -> None:
    ours = here.memory()
    assert here.connect(peer.id) == SUCCESS
    peer.process.kill()
    peer.process.wait()
    status, req = here.transfer(peer.id, WRITE, [(ours.addr, peer.addr, 8)])
    assert status == SUCCESS
    assert here.status(req) == (SUCCESS, WAITING if backend == "comm" else BROKEN)
    assert here.notify(peer.id, "", "", 200) == (1 if backend == "comm" else FAILED)
    assert here.disconnect(peer.id) == SUCCESS
    assert here.connect(peer.id) == FAILED


def test_what_a_peer_deregisters_is_not_touched_any_more(here: Hixl, peer: Peer) -> None:
    ours = here.memory()
    assert here.connect(peer.id) == SUCCESS
    ours.fill(b"after the end")
    assert peer.eval("hixl.finalize()") is None
    here.write(peer.id, ours.addr, peer.addr, 13)
    assert peer.eval("block.read(4)") == b"from"


# -- faults


def test_faults_by_number(here: Hixl, library: Library) -> None:
    block = here.memory()
    library.set("FAULTS", "register@2,3=207000;register@3=507018")
    handles = [here.register(block.addr + 0, block.size)[0] for _ in range(4)]
    assert handles == [SUCCESS, SUCCESS, 507018, SUCCESS], "the later of two of one kind holds"
    library.set("FAULTS", "register@3+")
    assert [here.register(block.addr, block.size)[0] for _ in range(5)] == [0, 0, FAILED, FAILED, FAILED]
    library.set("FAULTS", "register")
    assert here.register(block.addr, block.size)[0] == FAILED


def test_faults_by_rate_are_repeated_by_their_seed(here: Hixl, library: Library) -> None:
    block = here.memory()

    def run(seed: int) -> list[bool]:
        library.set("SEED", seed)
        library.set("FAULTS", "register%0.25")
        return [here.register(block.addr, block.size)[0] == FAILED for _ in range(1000)]

    first = run(1)
    assert 200 < sum(first) < 300
    assert run(1) == first
    assert run(2) != first


@pytest.mark.parametrize("text", ["unknown", "submit@", "submit@0", "submit=x", "submit%often", "submit@1=1;bad"])
def test_faults_that_cannot_be_parsed(library: Library, text: str) -> None:
    assert library.hixl.hixlsim_set(b"FAULTS", text.encode()) == -1


@pytest.mark.parametrize("name", ["init", "connect", "disconnect"])
def test_calls_that_fail(pair: tuple[Hixl, Hixl], library: Library, objects: list[Hixl], name: str) -> None:
    here, there = pair
    objects.append(Hixl(library))
    library.set("FAULTS", f"{name}@1=507899")
    call = {
        "init": objects[-1].initialize,
        "connect": lambda: here.connect(there),
        "disconnect": lambda: here.disconnect(there),
    }[name]
    if name == "disconnect":
        assert here.connect(there) == SUCCESS
    assert call() == 507899
    assert call() in ((SUCCESS,) if name != "disconnect" else (103902,)), "it did disconnect"


# -- what ends the process

RULES = """
import ctypes, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hixlsim.probe import Hixl, Library, P
library = Library(Path(sys.argv[2]))
library.set_device()
one, two = Hixl(library), Hixl(library)
assert [one.initialize(), two.initialize()] == [0, 0]
a, b = one.memory(), two.memory()
assert one.connect(two) == 0
"""


def outcome(program: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", RULES + program, TESTS, build()],
        capture_output=True, text=True, check=False, env={"PATH": "", **environment},
    )  # fmt: skip
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("probe_status(P(one.this), P(1), ctypes.byref(ctypes.c_int32()))", "GetTransferStatus"),
        ("probe_disconnect(P(one.this), b'', 1)", "Disconnect"),
        ("probe_get_notifies(P(one.this), P(library.notifies_new()))", "GetNotifies"),
        ("probe_finalize(P(one.this))", "Finalize"),
    ],
)
def test_a_call_with_the_gil_held(call: str, name: str) -> None:
    program = f"held = ctypes.PyDLL(str(Path(sys.argv[2]) / 'lib64' / 'libhixlprobe.so'))\nheld.{call}"
    assert outcome(program) == (-6, f"hixlsim: {name} is called with the GIL held")


def test_finalize_beside_another_call() -> None:
    program = """
library.set("FAULTS", "stall@1=5")
threading.Thread(target=lambda: one.transfer(two, 1, [(a.addr, b.addr, 8)])).start()
time.sleep(0.5)
one.finalize()
"""
    assert outcome(program) == (-6, "hixlsim: Finalize is called while TransferAsync runs")


def test_a_call_beside_finalize() -> None:
    program = """
library.set("FAULTS", "stall@1=0")
unused = f"127.0.0.1:{one.id.split(':')[1]}"
def slow():
    one.finalize()
for _ in range(3):  # COMM pauses for what is in flight
    one.write(two, a.addr, b.addr, 8)
thread = threading.Thread(target=slow)
thread.start()
while True:
    one.notifies()
"""
    code, words = outcome(program, HIXLSIM_LATENCY_US="1000000")
    assert code == -6
    assert words == "hixlsim: GetNotifies is called while Finalize runs" or words.startswith(
        "hixlsim: Finalize is called while GetNotifies"
    )


def test_a_strict_library_aborts_a_second_query() -> None:
    program = "req = one.write(two, a.addr, b.addr, 8)\nprint(one.status(req))\none.status(req)"
    code, words = outcome(program, HIXLSIM_STRICT="1")
    assert code == -6
    assert words.endswith("is asked about again: its first answer that was not WAITING was its last")
    assert outcome(program)[0] == 0


def test_a_strict_library_aborts_on_a_vector_that_is_not_empty() -> None:
    code, words = outcome("one.notifies(before=[('a', 'b')])", HIXLSIM_STRICT="1")
    assert code == -6
    assert "not empty" in words


def test_a_strict_library_aborts_on_a_borrowed_context() -> None:
    program = """
borrowed, over = threading.Event(), threading.Event()
def borrow():
    one.status(7)  # this thread has no context, and keeps the engine's
    borrowed.set()
    over.wait()
    two.status(7)
thread = threading.Thread(target=borrow)
thread.start()
borrowed.wait()
one.finalize()
over.set()
thread.join()
"""
    code, words = outcome(program, HIXLSIM_STRICT="1", HIXLSIM_BACKEND="comm")
    assert code == -6
    assert "context" in words


def test_a_thread_without_context_keeps_the_engines(pair: tuple[Hixl, Hixl], library: Library) -> None:
    import threading

    seen = []

    def look() -> None:
        context = ctypes.c_void_p()
        seen.append(library.acl.aclrtGetCurrentContext(ctypes.byref(context)))
        pair[0].disconnect(pair[1])
        seen.append(library.acl.aclrtGetCurrentContext(ctypes.byref(context)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [107002, 0]


# -- ACL


def test_device_memory_is_marked(library: Library) -> None:
    block = ctypes.c_void_p()
    for allocate, free, kind in (("aclrtMalloc", "aclrtFree", 2), ("aclrtMallocHost", "aclrtFreeHost", 1)):
        rest = (ctypes.c_int(0),) if kind == 2 else ()
        assert getattr(library.acl, allocate)(ctypes.byref(block), ctypes.c_size_t(5000), *rest) == 0
        assert library.acl.hixlsim_memory_kind(ctypes.c_void_p(block.value + 4999)) == kind
        ctypes.memset(block.value, 1, 5000)
        other = "aclrtFreeHost" if kind == 2 else "aclrtFree"
        assert getattr(library.acl, other)(block) == 107000
        assert getattr(library.acl, free)(block) == 0
        assert library.acl.hixlsim_memory_kind(block) == 0


def test_devices(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    count = ctypes.c_uint32()
    monkeypatch.setenv("HIXLSIM_DEVICES", "2")
    assert library.acl.aclrtGetDeviceCount(ctypes.byref(count)) == 0
    assert count.value == 2
    assert [library.set_device(device) for device in (1, 2, -1)] == [0, 107001, 107001]
    device = ctypes.c_int32()
    assert (library.acl.aclrtGetDevice(ctypes.byref(device)), device.value) == (0, 1)
    library.acl.aclrtGetSocName.restype = ctypes.c_char_p
    assert library.acl.aclrtGetSocName() == b"Ascend910B3"
