"""The random Unix socket: its names, its files, and the users that it trusts."""

from __future__ import annotations

import array
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hixl_async.control import rendezvous
from hixl_async.control.rendezvous import Rendezvous, RendezvousName, Scope, connect
from hixl_async.errors import InvalidArgumentError

from .sides import memory

not_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")


def open_and_close(path: Path) -> None:
    Rendezvous(str(path), other_users=False).close()


class TestAbstract:
    def test_leaves_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        meeting = Rendezvous(None, other_users=False)
        with connect(meeting.name, None) as mine, meeting.sock.accept()[0] as theirs:
            mine.send(b"hello")
            assert theirs.recv(10) == b"hello"
        meeting.close()
        meeting.close()
        assert not list(tmp_path.iterdir())
        with pytest.raises(ConnectionRefusedError):
            connect(meeting.name, None)

    def test_cannot_be_squatted(self) -> None:
        meeting = Rendezvous(None, other_users=False)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter, pytest.raises(OSError, match="in use"):
            squatter.bind(meeting.name.abstract)
        meeting.close()

    def test_names_are_random(self) -> None:
        meetings = [Rendezvous(None, other_users=False) for _ in range(10)]
        assert len({meeting.name for meeting in meetings}) == 10
        for meeting in meetings:
            meeting.close()


class TestDirectory:
    def test_holds_one_file_while_it_is_open(self, tmp_path: Path) -> None:
        meeting = Rendezvous(str(tmp_path), other_users=False)
        [file] = tmp_path.iterdir()
        assert file.name == meeting.name.file
        assert file.is_socket()
        with connect(meeting.name, str(tmp_path)) as mine, meeting.sock.accept()[0] as theirs:
            mine.send(b"hello")
            assert theirs.recv(10) == b"hello"
        meeting.close()
        meeting.close()
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(("other_users", "mode"), [(False, 0o600), (True, 0o666)])
    def test_admits_the_right_users_whatever_the_umask(self, tmp_path: Path, other_users: bool, mode: int) -> None:
        before = os.umask(0o077)
        try:
            meeting = Rendezvous(str(tmp_path), other_users=other_users)
        finally:
            os.umask(before)
        [file] = tmp_path.iterdir()
        assert file.stat().st_mode & 0o777 == mode
        meeting.close()

    def test_keeps_its_file_when_a_child_abandons_it(self, tmp_path: Path) -> None:
        meeting = Rendezvous(str(tmp_path), other_users=False)
        child = os.fork()
        if child == 0:
            meeting.abandon()
            os._exit(0)
        os.waitpid(child, 0)
        connect(meeting.name, str(tmp_path)).close()
        meeting.close()

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
    def test_must_not_be_open_to_others(self, tmp_path: Path, mode: int) -> None:
        tmp_path.chmod(mode)
        with pytest.raises(InvalidArgumentError, match=rf"others may replace files.*{mode:o}.*chmod \+t"):
            open_and_close(tmp_path)
        tmp_path.chmod(mode | 0o1000)
        open_and_close(tmp_path)

    @not_root
    def test_must_belong_to_us_or_to_root(self, tmp_path: Path) -> None:
        os.chown(tmp_path, 12345, 12345)
        with pytest.raises(InvalidArgumentError, match="must belong to this user or root, not to user 12345"):
            open_and_close(tmp_path)

    def test_must_be_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for path in ("missing", "file"):
            with pytest.raises(InvalidArgumentError, match="must be a directory"):
                open_and_close(tmp_path / path)
            with pytest.raises(InvalidArgumentError, match="must be a directory"):
                Scope.current(str(tmp_path / path))

    def test_is_the_one_that_was_checked(self, tmp_path: Path) -> None:
        """Renaming it meanwhile changes nothing."""
        path = tmp_path / "one"
        path.mkdir()
        meeting = Rendezvous(str(path), other_users=False)
        path.rename(tmp_path / "two")
        connect(meeting.name, str(tmp_path / "two")).close()
        meeting.close()
        assert not list((tmp_path / "two").iterdir())


class TestStaleFiles:
    def test_of_killed_processes_are_removed(self, tmp_path: Path) -> None:
        code = "import os, sys; from hixl_async.control.rendezvous import Rendezvous\n"
        code += "Rendezvous(sys.argv[1], other_users=False); os.kill(os.getpid(), 9)"
        for _ in range(2):
            subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
        # The second one removed what the first one left.
        [stale] = tmp_path.iterdir()
        meeting = Rendezvous(str(tmp_path), other_users=False)
        assert [file.name for file in tmp_path.iterdir()] == [meeting.name.file]
        assert meeting.name.file != stale.name
        meeting.close()

    def test_of_living_processes_are_kept(self, tmp_path: Path) -> None:
        living = [Rendezvous(str(tmp_path), other_users=False) for _ in range(3)]
        assert {file.name for file in tmp_path.iterdir()} == {meeting.name.file for meeting in living}
        for meeting in living:
            connect(meeting.name, str(tmp_path)).close()
            meeting.close()

    def test_of_others_are_kept(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / f"hixl-{'a' * 32}.sock.bak").write_text("")
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(tmp_path / "other.sock"))
        open_and_close(tmp_path)
        assert len(list(tmp_path.iterdir())) == 3

    def test_of_processes_about_to_listen_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between bind and listen a socket looks dead; it has another name until it listens."""
        young, old = (tmp_path / f"hixl-{digit * 32}.new" for digit in "ab")
        monkeypatch.chdir(tmp_path)  # because the whole path may be too long for a socket's name
        for path in (young, old):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
                other.bind(path.name)
        os.utime(old, (0, 0))
        open_and_close(tmp_path)
        assert list(tmp_path.iterdir()) == [young]

    def test_that_are_no_sockets_are_kept(self, tmp_path: Path) -> None:
        file = tmp_path / f"hixl-{'a' * 32}.sock"
        file.mkdir()
        open_and_close(tmp_path)
        assert file.exists()


class TestScope:
    def test_is_the_same_in_one_place(self, tmp_path: Path) -> None:
        assert Scope.current(None) == Scope.current(None)
        assert Scope.current(str(tmp_path)) == Scope.current(str(tmp_path))
        link = tmp_path / "link"
        link.symlink_to(tmp_path)
        assert Scope.current(str(link)) == Scope.current(str(tmp_path))

    def test_differs_between_directories(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        one, other = Scope.current(str(tmp_path)), Scope.current(str(tmp_path / "a"))
        assert one.network == other.network
        assert one.directory != other.directory

    @not_root
    def test_differs_between_network_namespaces(self) -> None:
        code = "from hixl_async.control.rendezvous import Scope; print(Scope.current(None).network)"
        command = ["unshare", "-n", sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode and "unshare" in result.stderr:
            pytest.skip(result.stderr)
        assert len(result.stdout.strip()) == 32
        assert result.stdout.strip() != Scope.current(None).network

    def test_is_unknown_without_a_boot_id(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*args: object, **options: object) -> None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", args[0])

        monkeypatch.setattr(rendezvous, "open", fails, raising=False)
        scope = Scope.current(None)
        assert scope[:2] == ("", "")
        assert scope.missing == "/proc/sys/kernel/random/boot_id: No such file or directory"

    def test_is_not_guessed_without_descriptors(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def fails(*args: object, **options: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(rendezvous, "open", fails, raising=False)
            with pytest.raises(OSError, match="Too many open files"):
                Scope.current(None)
        monkeypatch.setattr(rendezvous.os, "open", fails)
        with pytest.raises(OSError, match="Too many open files") as caught:
            Scope.current(str(tmp_path))
        assert caught.type is OSError


class TestDescriptorsOfStrangers:
    def test_are_refused_by_the_kernel(self) -> None:
        meeting = Rendezvous(None, other_users=True)
        try:
            meeting.sock.getsockopt(socket.SOL_SOCKET, rendezvous._SO_PASSRIGHTS)
        except OSError:
            meeting.close()
            pytest.skip("Linux before 6.16")
        descriptor = memory()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        with connect(meeting.name, None) as mine:
            with pytest.raises(PermissionError):
                mine.sendmsg([b"x"], rights)
            with meeting.sock.accept()[0] as theirs:
                with pytest.raises(PermissionError):
                    mine.sendmsg([b"x"], rights)
                rendezvous.admit_descriptors(theirs, True)
                mine.sendmsg([b"x"], rights)
        meeting.close()
        os.close(descriptor)


def test_names_have_a_fixed_form() -> None:
    name = RendezvousName("abstract", "a" * 32)
    assert name.abstract == "\0hixl_async/" + "a" * 32
    assert name.file == f"hixl-{'a' * 32}.sock"
