"""The process at the other end of a Unix socket."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hixl_async.control import process
from hixl_async.control.process import Credentials, LocalUser, is_ending, open_pidfd, peer_credentials, start_time

ME = Credentials(os.getpid(), os.geteuid(), os.getegid())


class Child:
    """A process that holds the other end of a socket, until it is ended."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A pair is made by one process; only what is connected has the credentials of two.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind("")
            listening.listen(1)
            name = listening.getsockname()
            code = (
                "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
                "s.connect(bytes.fromhex(sys.argv[1])); s.recv(1)"
            )
            self.process = subprocess.Popen([sys.executable, "-c", code, name.hex()])
            self.sock.close()
            theirs.close()
            self.sock, _ = listening.accept()
        self.credentials = peer_credentials(self.sock)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.sock.close()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.end()


def died(pidfd: int, timeout: float = 0) -> bool:
    return bool(select.select([pidfd], [], [], timeout)[0])


class TestCredentials:
    def test_are_those_of_the_process(self, child: Child) -> None:
        assert child.credentials == (child.process.pid, os.geteuid(), os.getegid())

    def test_are_ours_at_the_other_end_of_a_pair(self) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one, other:
            assert peer_credentials(one) == ME


@pytest.fixture(params=["SO_PEERPIDFD", "pidfd_open"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pidfd_open":
        monkeypatch.setattr(process, "_SO_PEERPIDFD", 30_000)
    return str(request.param)


class TestPidfd:
    def test_tells_when_the_process_has_died(self, child: Child, way: str) -> None:
        pidfd = open_pidfd(child.sock, child.credentials, start_time(child.process.pid))
        assert pidfd is not None
        assert not os.get_inheritable(pidfd)
        assert not died(pidfd)
        child.process.send_signal(signal.SIGSTOP)
        assert not died(pidfd)
        child.process.kill()
        assert died(pidfd, timeout=10)
        os.close(pidfd)

    def test_is_not_opened_for_another_process_with_the_same_id(
        self, child: Child, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process, "_SO_PEERPIDFD", 30_000)
        for started in ("", "1", start_time()):
            assert open_pidfd(child.sock, child.credentials, started) is None

    def test_is_not_opened_for_the_dead(self, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "_SO_PEERPIDFD", 30_000)
        started = start_time(child.process.pid)
        child.process.kill()
        os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)  # a zombie still has its id and its start time
        assert start_time(child.process.pid) == started
        assert open_pidfd(child.sock, child.credentials, started) is None
        child.process.wait()
        assert open_pidfd(child.sock, child.credentials, started) is None

    def test_is_ending(self, child: Child) -> None:
        assert is_ending(os.getpid()) is False
        assert is_ending(child.process.pid) is False
        child.process.kill()
        os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
        assert is_ending(child.process.pid) is True  # a zombie
        child.process.wait()
        assert is_ending(child.process.pid) is None
        assert is_ending(-1) is None

    @pytest.mark.parametrize("pid", [0, -1])
    def test_is_not_opened_for_a_process_of_another_namespace(self, monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
        monkeypatch.setattr(process, "_SO_PEERPIDFD", 30_000)
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one, other:
            assert open_pidfd(one, ME._replace(pid=pid), start_time()) is None

    def test_is_not_opened_where_it_is_forbidden(self, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(pid: int) -> int:
            raise PermissionError

        monkeypatch.setattr(process, "_SO_PEERPIDFD", 30_000)
        monkeypatch.setattr(os, "pidfd_open", fails)
        assert open_pidfd(child.sock, child.credentials, start_time(child.process.pid)) is None


class TestStartTime:
    def test_tells_processes_apart(self, child: Child) -> None:
        assert start_time() == start_time(os.getpid())
        assert start_time().isdigit()
        assert int(start_time(child.process.pid)) > int(start_time())

    def test_is_unknown_for_a_pid_without_a_process(self) -> None:
        assert start_time(1 << 22) == ""

    def test_is_found_whatever_the_process_is_called(self) -> None:
        comm = Path("/proc/self/comm")
        before, name = start_time(), comm.read_text()
        try:
            comm.write_text(") R 1 (")
            assert start_time() == before
        finally:
            comm.write_text(name)


class TestLocalUser:
    def test_is_the_user_of_this_process(self) -> None:
        user = LocalUser.current()
        assert user.uid == os.geteuid()
        assert user.overflow_uid == int(Path("/proc/sys/kernel/overflowuid").read_text())
        assert user.objection(ME) is None

    @pytest.mark.parametrize(
        ("content", "everybody"),
        [
            ("         0          0 4294967295\n", True),
            ("0 0 1000\n1000 1000 4294966295\n", True),
            ("0 1000 1\n", False),
            ("0 100000 65536\n", False),
            ("", False),
            ("nonsense\n", False),
        ],
    )
    def test_knows_whether_all_users_are_mapped(
        self, monkeypatch: pytest.MonkeyPatch, content: str, everybody: bool
    ) -> None:
        files = {"/proc/self/uid_map": content, "/proc/sys/kernel/overflowuid": "65534\n"}
        monkeypatch.setattr(process, "_read", files.__getitem__)
        assert LocalUser.current().all_mapped is everybody

    def test_manages_without_proc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(path: str) -> Any:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

        monkeypatch.setattr(process, "_read", fails)
        user = LocalUser.current()
        assert user[:3] == (os.geteuid(), 65534, False)
        assert user.missing == "/proc/self/uid_map: No such file or directory"
        overflow_user = user._replace(uid=65534)
        assert "could not find out: /proc/self/uid_map" in str(overflow_user.objection(Credentials(1, 65534, 1)))

    @pytest.mark.parametrize("ask", [LocalUser.current, process.start_time])
    def test_is_not_guessed_without_descriptors(
        self, monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]
    ) -> None:
        def fails(path: str) -> Any:
            raise OSError(errno.EMFILE, "Too many open files", path)

        monkeypatch.setattr(process, "_read", fails)
        with pytest.raises(OSError, match="Too many open files"):
            ask()

    @pytest.mark.parametrize(
        ("user", "uid", "words"),
        [
            (LocalUser(7, 65534, False), 7, None),
            (LocalUser(7, 65534, True), 8, "user 8, this side as user 7"),
            (LocalUser(7, 65534, False), 65534, "user 65534, this side as user 7"),
            (LocalUser(7, 65534, True), 0, "user 0, this side as user 7"),
            (LocalUser(65534, 65534, True), 65534, None),
            (LocalUser(65534, 65534, False), 65534, "every user without a name"),
            (LocalUser(99, 99, False), 99, "every user without a name"),
        ],
    )
    def test_objects(self, user: LocalUser, uid: int, words: str | None) -> None:
        objection = user.objection(Credentials(1, uid, 1))
        assert (objection is None) == (words is None)
        assert (words or "") in (objection or "")
