"""The two kinds of sockets that carry whole messages: non-blocking, without a loop."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from ..errors import PeerDownError, ProtocolError
from . import codec

__all__ = ["MAX_DESCRIPTORS", "Channel", "Packet", "TcpChannel", "UnixChannel", "close_descriptors"]

#: The most descriptors that one message carries.
MAX_DESCRIPTORS = 4
_LEAST_BUFFER = 2 * codec.ESTABLISHED_LIMIT
_DESCRIPTORS_SPACE = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
# Plain integers, because an operation on two members of an enumeration takes as long as the system call.
_CLOSE_ON_EXEC, _NO_SIGNAL = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_NOSIGNAL)
_CUT_DATA, _CUT_DESCRIPTORS = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)
_CUT = _CUT_DATA | _CUT_DESCRIPTORS


class Packet(NamedTuple):
    """A message as it arrived."""

    data: bytes
    #: Open descriptors, which belong to the receiver of the packet.
    descriptors: list[int]


class Channel(Protocol):
    """A connected socket that carries messages in order."""

    #: The longest message that is accepted, in bytes.
    limit: int

    def fileno(self) -> int: ...

    def receive(self) -> Packet | None:
        """Return the next message, or None if it has not arrived yet.

        :raises PeerDownError: if the other side closed the socket, or it broke.
        :raises ProtocolError: if the received bytes are not a message.
        """

    def send(self, data: bytes, descriptors: Sequence[int]) -> bool:
        """Send a message, or return False if the caller has to try again when the socket is writable.

        :raises ProtocolError: if one of `descriptors` is not open.
        :raises PeerDownError: if the socket broke.
        """

    def flush(self) -> bool:
        """Send the rest of a message that `send` accepted; return False if some of it is still left.

        :raises PeerDownError: if the socket broke.
        """

    def establish(self, receiving: codec.Seal, sending: codec.Seal) -> None:
        """Allow longer messages from now on, and seal them where needed, because the handshake has succeeded."""

    def close(self) -> None:
        """Close the socket; idempotent; safe in the child of a fork, where the parent's connection stays open."""


class UnixChannel:
    """A Unix socket on which a ``SOCK_SEQPACKET`` packet is a message with its descriptors; memory and pipes only."""

    def __init__(self, sock: socket.socket) -> None:
        self.limit = codec.HANDSHAKE_LIMIT
        self.sock = sock
        # A packet is sent whole or not at all, so that the longest must fit; most systems allow three times as much.
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < _LEAST_BUFFER:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LEAST_BUFFER)

    def fileno(self) -> int:
        return self.sock.fileno()

    def receive(self) -> Packet | None:
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(self.limit, _DESCRIPTORS_SPACE, _CLOSE_ON_EXEC)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:
            # The other side closed with messages of ours unread.  The kernel reports it once, before earlier messages.
            return self.receive()
        except OSError as error:
            raise PeerDownError(f"the Unix socket broke: {error.strerror}", native=error.errno) from None
        descriptors: list[int] = []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                descriptors += numbers
        foreign = [descriptor for descriptor in descriptors if may_block_close(descriptor)]
        if foreign or flags & _CUT or not data:
            close_descriptors(set(descriptors).difference(foreign))
            if foreign:
                threading.Thread(target=close_descriptors, args=(foreign,), daemon=True).start()
                raise ProtocolError("a descriptor is neither memory nor a pipe")
            if flags & _CUT_DESCRIPTORS:
                # Too many were sent, or this process may not open more: some are lost, so the message is invalid.
                raise ProtocolError("a message came with more descriptors than could be received")
            if flags & _CUT_DATA:
                raise ProtocolError(f"a message is over the limit of {self.limit} bytes")
            raise PeerDownError("the other side closed the connection")
        return Packet(data, descriptors)

    def send(self, data: bytes, descriptors: Sequence[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self.sock.sendmsg([data], rights, _NO_SIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno == errno.EBADF and self.sock.fileno() >= 0:
                raise ProtocolError("a descriptor cannot be sent: it is not open", native=error.errno) from None
            raise PeerDownError(f"the Unix socket broke: {error.strerror}", native=error.errno) from None
        return True

    def flush(self) -> bool:
        return True

    def establish(self, receiving: codec.Seal, sending: codec.Seal) -> None:
        self.limit = codec.ESTABLISHED_LIMIT  # no seals, because a Unix socket cannot be intercepted

    def close(self) -> None:
        self.sock.close()


class TcpChannel:
    """A TCP socket that carries a stream of frames, without descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self.limit = codec.HANDSHAKE_LIMIT
        self.sock = sock
        self._decoder = codec.FrameDecoder(self.limit)
        self._rest = b""  # of the frame that is being sent
        self._receiving: codec.Seal | None = None
        self._sending: codec.Seal | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self.sock.fileno()

    def receive(self) -> Packet | None:
        # Read all that has arrived, because uvloop reports a broken connection once, perhaps after half a message.
        while (data := self._decoder.next()) is None:
            try:
                chunk = self.sock.recv(self._decoder.limit)
            except (BlockingIOError, InterruptedError):
                return None
            except OSError as error:
                raise PeerDownError(f"the TCP connection broke: {error.strerror}", native=error.errno) from None
            if not chunk:
                raise PeerDownError("the other side closed the connection")
            self._decoder.feed(chunk)
        return Packet(self._receiving.open(data) if self._receiving else data, [])

    def send(self, data: bytes, descriptors: Sequence[int]) -> bool:
        assert not descriptors, "the caller knows that this is not a Unix socket"
        if not self.flush():
            return False
        self._rest = codec.frame(self._sending.close(data) if self._sending else data)
        self.flush()
        return True

    def flush(self) -> bool:
        while self._rest:
            try:
                sent = self.sock.send(self._rest, _NO_SIGNAL)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise PeerDownError(f"the TCP connection broke: {error.strerror}", native=error.errno) from None
            self._rest = self._rest[sent:]
        return True

    def establish(self, receiving: codec.Seal, sending: codec.Seal) -> None:
        self.limit = codec.ESTABLISHED_LIMIT
        self._decoder.limit = self.limit + codec.Seal.SIZE
        self._receiving, self._sending = receiving, sending

    def close(self) -> None:
        self.sock.close()


def may_block_close(descriptor: int) -> bool:
    """Return True unless the descriptor is memory or a pipe.

    Closing another kind may take as long as the sender likes, because FUSE asks the file system's process on each close, and a
    lingering socket waits for its own peer.
    """
    for question in (fcntl.F_GET_SEALS, fcntl.F_GETPIPE_SZ):
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, question)
            return False
    return True


def close_descriptors(descriptors: Iterable[int]) -> None:
    """Close all descriptors.

    :raises OSError: afterwards, if one of them was not open: it was closed twice, and its number may belong to another file
        by now.  Other errors of close() concern the file, and the descriptor is closed all the same.
    """
    twice: OSError | None = None
    for descriptor in descriptors:
        try:
            os.close(descriptor)
        except OSError as error:
            if error.errno == errno.EBADF:
                twice = error
    if twice is not None:
        raise twice
