"""The random Unix socket on which two processes of one machine meet, after one of them sent its name to the other over TCP.

The name is in the abstract namespace, so that a killed process leaves nothing behind, or is a file in a directory that
containers share.  Both sides compare a fingerprint of the network namespace (abstract names) or of the directory (files), so
that the name means the same socket to both.  Otherwise an attacker could bind the name where only the dialler sees it, and act
as a man in the middle.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ..errors import InvalidArgumentError, ProtocolError
from .process import why_unknown

__all__ = ["Rendezvous", "RendezvousName", "Scope", "admit_descriptors", "connect"]

_BACKLOG = 1024
_SO_PASSRIGHTS = 83  # asm-generic/socket.h; the socket module has no name for it
_TOKEN = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"hixl-[0-9a-f]{32}\.(sock|new)")
# Seconds after which a file between bind and rename is stale; a process that lives renames it within microseconds.
_ABANDONED_AFTER = 60.0


class RendezvousName(NamedTuple):
    """The name of the socket in the listener's hello."""

    kind: Literal["abstract", "directory"]
    #: 32 hexadecimal digits; the rest of the name is fixed, so that a hostile listener cannot choose another socket.
    token: str

    @classmethod
    def parse(cls, text: str) -> RendezvousName:
        """Parse the name that the listening side sent.

        :raises ProtocolError: if it is malformed.
        """
        kind, _, token = text.partition(":")
        if kind not in ("abstract", "directory") or not _TOKEN.fullmatch(token):
            raise ProtocolError("a 'hello' message lacks a valid 'socket'")
        return cls("abstract" if kind == "abstract" else "directory", token)

    @property
    def file(self) -> str:
        return f"hixl-{self.token}.sock"

    @property
    def abstract(self) -> str:
        return f"\0hixl_async/{self.token}"


class Scope(NamedTuple):
    """The fingerprints of the namespaces of a name; equal on two sides only if the namespaces are the same."""

    #: The fingerprint of the network namespace, which holds the abstract names; "" if unknown.
    network: str
    #: The fingerprint of the shared directory; "" if there is none, or it is unknown.
    directory: str
    #: The reason why they are unknown; "" if they are known.
    missing: str = ""

    @classmethod
    def current(cls, unix_dir: str | None) -> Scope:
        """Return our own scope.

        :raises InvalidArgumentError: if `unix_dir` is not a directory that we can reach.
        :raises OSError: if the system has no descriptor left.
        """
        # Namespaces and inodes are only unique on one kernel, which the boot id identifies.  It is random, so that the digest
        # reveals nothing to an outsider.
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
                boot = file.read().strip()
            network = _fingerprint(boot, "network", os.stat("/proc/self/ns/net"))
        except OSError as error:
            boot, network, missing = "", "", why_unknown(error)
        else:
            missing = ""
        if unix_dir is None:
            return cls(network, "", missing)
        with _open_directory(unix_dir) as directory:
            return cls(network, _fingerprint(boot, "directory", os.fstat(directory)) if boot else "", missing)


class Rendezvous:
    """The listening end.  `sock` is non-blocking, of type ``SOCK_SEQPACKET``, and not inherited by children."""

    __slots__ = ("_directory", "name", "sock")

    def __init__(self, unix_dir: str | None, *, other_users: bool) -> None:
        """Listen under a random name.

        :param other_users: False to keep other users from connecting, which is impossible for abstract names.
        :raises InvalidArgumentError: if `unix_dir` is not a directory, or other users could replace files in it.
        :raises OSError: if the kernel refuses.
        """
        self.sock = _socket()
        self._directory: int | None = None
        admit_descriptors(self.sock, False)  # accepted sockets inherit it
        try:
            self.name = RendezvousName("abstract" if unix_dir is None else "directory", secrets.token_hex(16))
            if unix_dir is None:
                self.sock.bind(self.name.abstract)
                self.sock.listen(_BACKLOG)
            else:
                self._listen_in(unix_dir, 0o666 if other_users else 0o600)
        except BaseException:
            self.abandon()
            raise

    def _listen_in(self, unix_dir: str, mode: int) -> None:
        with _open_directory(unix_dir) as directory:
            _check_private(unix_dir, os.fstat(directory))
            _remove_stale(directory)
            self._directory = os.dup(directory)
        # The file gets its final name only after listen(), because _remove_stale takes a refused connect for the sign of a dead
        # process.
        new = self.name.file.replace(".sock", ".new")
        self.sock.bind(_in(self._directory, new))
        try:
            os.chmod(new, mode, dir_fd=self._directory)
            self.sock.listen(_BACKLOG)
            os.rename(new, self.name.file, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except BaseException:
            os.unlink(new, dir_fd=self._directory)
            raise

    def close(self) -> None:
        """Stop listening and remove the file, if there is one; idempotent."""
        if self._directory is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.name.file, dir_fd=self._directory)
        self.abandon()

    def abandon(self) -> None:
        """Close only our descriptors, for the child of a fork: the socket belongs to the parent."""
        self.sock.close()
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None


def connect(name: RendezvousName, unix_dir: str | None) -> socket.socket:
    """Connect to a listening end.

    :raises BlockingIOError: if its queue is full; try again a little later.
    :raises OSError: if no socket listens under `name`.
    :raises InvalidArgumentError: if `unix_dir` is not a directory that we can reach.
    """
    sock = _socket()
    try:
        if name.kind == "abstract":
            sock.connect(name.abstract)
        else:
            assert unix_dir is not None, "the scopes of the two sides were compared before"
            with _open_directory(unix_dir) as directory:
                sock.connect(_in(directory, name.file))
    except BaseException:
        sock.close()
        raise
    return sock


def admit_descriptors(sock: socket.socket, admit: bool) -> None:
    """Allow or forbid others to send descriptors to `sock`, where the kernel can refuse them (Linux 6.16).

    Receiving and closing an untrusted descriptor can block: see `channel.may_block_close`.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, admit)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def _fingerprint(boot: str, what: str, inode: os.stat_result) -> str:
    return hashlib.sha256(f"hixl_async {what} {boot} {inode.st_dev} {inode.st_ino}".encode()).hexdigest()[:32]


@contextlib.contextmanager
def _open_directory(path: str) -> Iterator[int]:
    try:
        directory = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        why_unknown(error)
        raise InvalidArgumentError(f"unix_dir must be a directory, not {path!r}: {error.strerror}") from None
    try:
        yield directory
    finally:
        os.close(directory)


def _in(directory: int, file: str) -> str:
    # The path through the descriptor is short for any unix_dir (unix(7): 108 bytes at most), and names the directory that was
    # checked.
    return f"/proc/self/fd/{directory}/{file}"


def _check_private(path: str, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise InvalidArgumentError(f"unix_dir {path!r} must belong to this user or root, not to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        raise InvalidArgumentError(
            f"others may replace files in unix_dir {path!r} (mode {stat.S_IMODE(status.st_mode):04o}): "
            f"remove their write permission, or set the sticky bit (chmod +t)"
        )


def _remove_stale(directory: int) -> None:
    """Remove the sockets of processes that were killed before they could do so."""
    try:
        files = [file for file in os.listdir(f"/proc/self/fd/{directory}") if _FILE.fullmatch(file)]
    except OSError:
        return  # we may be allowed to use the directory but not to list it
    for file in files:
        with contextlib.suppress(OSError):  # another process removed it, or it belongs to another user
            if file.endswith(".new"):
                if time.time() - os.stat(file, dir_fd=directory).st_mtime < _ABANDONED_AFTER:
                    continue
            elif not _refused(_in(directory, file)):
                continue
            os.unlink(file, dir_fd=directory)


def _refused(path: str) -> bool:
    with _socket() as sock:
        return sock.connect_ex(path) == errno.ECONNREFUSED
