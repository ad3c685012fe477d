"""A second process for the conformance suite: an instance of the driver that does what the test tells it.

The test's side is ``Peer``; run as a script, this file is the other side.  Messages are pickles on a Unix socket (both
ends are this suite), metadata bring their descriptors along.  While it has no request, the process polls its link as
a loop would.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import vtable as vt

MESSAGE = 1 << 20


def send(sock: socket.socket, value: Any, metadata: vt.CMetadata | None = None) -> None:
    fds = list(metadata.fds[: metadata.nfds]) if metadata is not None else []
    body = pickle.dumps((value, bytes(metadata.data[: metadata.len]) if metadata is not None else None))
    socket.send_fds(sock, [body], fds)
    if metadata is not None:
        vt.drop(metadata)


def receive(sock: socket.socket) -> tuple[Any, vt.CMetadata | None]:
    body, fds, flags, _ = socket.recv_fds(sock, MESSAGE, vt.METADATA_FDS)
    if not body:
        raise EOFError
    assert not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
    for fd in fds:
        os.set_inheritable(fd, False)
    value, data = pickle.loads(body)
    if data is None:
        return value, None
    metadata = vt.CMetadata(len=len(data), nfds=len(fds))
    metadata.data[: len(data)] = data
    metadata.fds[: len(fds)] = fds
    return value, metadata


class Peer:
    """The test's side: ``peer.call("alloc", size=4096)`` runs ``Server.alloc`` over there."""

    def __init__(self, driver: str, options: dict[str, object] | None = None) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(vt.DEADLINE)
        ours, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.wire = vt.Wire(ours)
        self.links: list[vt.Link] = []
        with theirs, far:
            fds = [theirs.fileno(), far.fileno()]
            arguments = [
                f"--driver={driver}",
                f"--fd={fds[0]}",
                f"--wire={fds[1]}",
                *(f"{k}={v}" for k, v in (options or {}).items()),
            ]
            self.process = subprocess.Popen([sys.executable, __file__, *arguments], pass_fds=fds)
        self.pid = self.process.pid
        try:
            self.call("ready")
        except BaseException:
            self.kill()
            self.sock.close()
            ours.close()
            raise

    def ask(self, what: str, metadata: vt.CMetadata | None = None, **arguments: Any) -> None:
        send(self.sock, (what, arguments), metadata)

    def answer(self) -> Any:
        end = time.monotonic() + vt.DEADLINE
        while not select.select([self.sock], [], [], 0.002)[0] and time.monotonic() < end:
            for link in self.links:
                link.take()
        (ok, value), metadata = receive(self.sock)
        if not ok:
            raise AssertionError(f"in the peer: {value}")
        return metadata if metadata is not None else value

    def call(self, what: str, metadata: vt.CMetadata | None = None, **arguments: Any) -> Any:
        self.ask(what, metadata, **arguments)
        return self.answer()

    def join(self, instance: vt.Instance) -> vt.Link:
        """Make a link from here to there, up at both ends."""
        link = instance.link(1 + len(instance.links))
        self.attach(link)
        link.connect(self.call("link"))
        self.call("connect", link.metadata)
        return link

    def attach(self, link: vt.Link) -> None:
        """Carry what the drivers at both ends say to each other over this suite's connection."""
        link.other = self.wire
        self.links.append(link)

    def region(self, link: vt.Link, size: int, rights: int = 3, seed: int = 0) -> tuple[int, vt.Memory]:
        """Return memory of the peer: its number there, and the import here."""
        number = self.call("alloc", size=size, rights=rights, seed=seed)
        memory = link.load(self.call("export", memory=number, rights=rights), size, rights)
        memory.op.ok(link)
        return number, memory

    def give(self, memory: vt.Memory, rights: int = 3) -> int:
        """Give the peer memory of this side; return its number there."""
        return self.call("load", memory.export(rights), size=memory.size, rights=rights)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()
            self.wire.sock.close()
        try:
            self.process.wait(vt.DEADLINE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("the peer did not end") from None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:
            self.kill()
        self.close()


class Server:
    """The other side.  Each public method is a call; there is one link."""

    def __init__(self, driver: str, options: dict[str, str], wire: socket.socket) -> None:
        self.wire = vt.Wire(wire)
        self.instance = vt.Instance(vt.load(driver), options)
        self.made: vt.Link | None = None
        self.memories: list[vt.Memory] = []
        self.ops: list[vt.Op] = []
        self.quiet = False

    def ready(self) -> bool:
        return True

    def link(self) -> vt.CMetadata:
        self.made = self.instance.link()
        self.made.other = self.wire
        return self.made.metadata

    def connect(self, metadata: vt.CMetadata) -> None:
        self.made.connect(metadata)

    def polling(self, on: bool) -> None:
        self.quiet = not on

    def alloc(self, size: int, rights: int, seed: int) -> int:
        memory = self.instance.alloc(size, rights)
        if seed:
            vt.fill(memory.view, seed)
        return self.remember(memory)

    def register(self, size: int, rights: int, seed: int) -> int:
        import mmap

        self.buffer = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = (vt.c.c_uint8 * size).from_buffer(self.buffer)
        vt.fill(memoryview(buffer).cast("B"), seed)
        return self.remember(self.instance.register(buffer, rights))

    def forbid(self, memory: int, offset: int, length: int) -> None:
        """Unmap a part of what was registered, as a program may."""
        libc = vt.c.CDLL(None, use_errno=True)
        address = self.memories[memory].address + offset
        assert libc.mprotect(vt.c.c_void_p(address), vt.c.c_size_t(length), 0) == 0

    def remember(self, memory: vt.Memory) -> int:
        self.memories.append(memory)
        return len(self.memories) - 1

    def export(self, memory: int, rights: int) -> vt.CMetadata:
        return self.memories[memory].export(rights)

    def load(self, metadata: vt.CMetadata, size: int, rights: int) -> int:
        memory = self.made.load(metadata, size, rights)
        memory.op.ok(self.made)
        return self.remember(memory)

    def peek(self, memory: int, offset: int, length: int) -> bytes:
        return bytes(self.memories[memory].view[offset : offset + length])

    def submit(
        self,
        verb: int,
        rows: list[tuple[int, int, int, int, int]],
        wait: bool = True,
        note: Any = None,
        signal: Any = None,
    ) -> int:
        descs = [
            (self.memories[local], loff, self.memories[remote], roff, length)
            for local, loff, remote, roff, length in rows
        ]
        where = (self.memories[signal[0]], *signal[1:]) if signal is not None else None
        op = self.made.submit(verb, descs, note=note, signal=where)
        self.ops.append(op)
        return op.ok(self.made).bytes if wait else len(self.ops) - 1

    def progress(self, op: int) -> int:
        return self.made.progress(self.ops[op])

    def wait(self, op: int) -> int:
        return self.ops[op].wait(self.made)

    def notes(self, n: int) -> list[tuple[bytes, bytes]]:
        self.instance.until(lambda: len(self.made.notes()) >= n, self.made)
        return self.made.notes()

    def echo(self, n: int) -> None:
        """Send n notifications back, each as soon as it comes."""
        answered = 0
        while answered < n:
            self.instance.until(lambda: len(self.made.notes()) > answered, self.made)
            for topic, text in self.made.notes()[answered:]:
                self.made.note(topic, text)
                answered += 1

    def down(self) -> bytes:
        self.instance.until(lambda: self.made.down, self.made)
        return self.made.down.data

    def stop(self) -> None:
        self.made.stop().wait(self.made)

    def fork(self) -> int:
        """Fork a child that does what the core does in children, and lives on."""
        pid = os.fork()
        if pid == 0:
            self.instance.vt.after_fork(self.instance.handle)
            for fd, target in vt.descriptors().items():
                if fd > 2 and "socket" in target:
                    os.close(fd)
            while True:
                signal.pause()
        return pid

    def run(self, sock: socket.socket) -> None:
        while True:
            fds = [sock.fileno()]
            link = self.made
            if link is not None and not self.quiet and link.down is None and link.fd >= 0:
                if link.more:
                    link.poll()
                    continue
                fds.append(link.fd)
            carried = link is not None and not self.quiet and not self.wire.ended
            # A message without room is sent with the next poll.
            patience = 0.01 if self.wire.waiting else None
            readable = select.select([*fds, *([self.wire.sock.fileno()] if carried else [])], [], [], patience)[0]
            if carried:
                link.take()
            if fds[-1] != sock.fileno() and fds[-1] in readable:
                link.poll()
            if sock.fileno() not in readable:
                continue
            try:
                (what, arguments), metadata = receive(sock)
            except EOFError:
                return
            try:
                answer = getattr(self, what)(*([metadata] if metadata is not None else []), **arguments)
                metadata = answer if isinstance(answer, vt.CMetadata) else None
                send(sock, (True, None if metadata is not None else answer), metadata)
            except (vt.DriverError, AssertionError) as error:
                send(sock, (False, repr(error)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver")
    parser.add_argument("--fd", type=int)
    parser.add_argument("--wire", type=int)
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    with socket.socket(fileno=arguments.fd) as sock, socket.socket(fileno=arguments.wire) as wire:
        server = Server(arguments.driver, dict(option.split("=", 1) for option in arguments.options), wire)
        server.run(sock)
        server.instance.close()


if __name__ == "__main__":
    main()
