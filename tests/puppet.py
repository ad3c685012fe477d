"""The other end of a connection, controlled by the test.

A `Puppet` takes part in the real handshake and then says only what a test makes it say.  It knows the formats of the shm
driver's links and regions (``drivers/shm/*.h``), so it can be a peer like any other up to the point where it begins to
misbehave.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from hixl_async.control import Connection, Identity, Listener, dial
from hixl_async.errors import HixlError
from hixl_async.types import Address

PAGE = 4096
F_ADD_SEALS, SHRINK, GROW, SEAL = 1033, 2, 4, 1
LINK_MAGIC, MEM_MAGIC, HALF_MAGIC, VERSION = 0x4B4E4C53, 0x4D454D53, 0x464C4853, 2
OWNED, REGISTERED = 1, 2
# Offsets of shm_half.
MAGIC, CAPACITY, FENCE, HEAD, SIGNALS, WANT_SPACE, FENCED, GONE, TAIL, ARMED = (
    0,
    4,
    8,
    128,
    136,
    144,
    148,
    152,
    256,
    384,
)
WIDE = {HEAD, SIGNALS, TAIL}
MASK = (1 << 64) - 1


def segment(size: int, *, seals: int | None = SHRINK | GROW | SEAL) -> int:
    """A memfd as the shm driver wants it."""
    fd = os.memfd_create("puppet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.posix_fallocate(fd, 0, size)
    if seals is not None:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def link_metadata(capacity: int, *, own_pid: int = 0) -> bytes:
    """A ``shm_link_metadata``; by default it names no process, so that process_vm_* is not used."""
    return struct.pack("<IIIIII", os.getpid(), LINK_MAGIC, VERSION, capacity, own_pid, 0)


def mem_metadata(size: int, *, kind: int = OWNED, rights: int = 3, address: int = 0, magic: int = MEM_MAGIC) -> bytes:
    """A ``shm_mem_metadata``."""
    return struct.pack("<IIIIQQ", magic, VERSION, kind, rights, size, address)


class Heard(NamedTuple):
    """A message of the engine."""

    kind: str
    body: dict[str, Any]
    fds: list[int]


class Half:
    """Header and ring of one half of a link, mapped."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)

    def __getitem__(self, at: int) -> int:
        return struct.unpack_from("<Q" if at in WIDE else "<I", self.memory, at)[0]

    def __setitem__(self, at: int, value: int) -> None:
        struct.pack_into("<Q" if at in WIDE else "<I", self.memory, at, value & (MASK if at in WIDE else MASK >> 32))

    def record(self, topic: bytes, note: bytes) -> None:
        """Publish a well-formed notification, if it fits before the end of the ring."""
        at = self[HEAD] % self[CAPACITY]
        total = (16 + len(topic) + len(note) + 15) & ~15
        assert at + total <= self[CAPACITY]
        struct.pack_into("<IIII", self.memory, PAGE + at, total, len(topic), len(note), 0)
        self.memory[PAGE + at + 16 : PAGE + at + 16 + len(topic) + len(note)] = topic + note
        self[HEAD] += total


class ShmEnd:
    """The test's end of a shm link: `theirs` is the half that the test writes, `ours` the one that the engine writes."""

    def __init__(self, fds: Sequence[int], capacity: int = 65536) -> None:
        self.theirs, self.their_segment, self.their_bell = Half(fds[0]), fds[0], fds[1]
        self.segment = segment(PAGE + capacity)
        self.ours = Half(self.segment)
        self.ours[MAGIC], self.ours[CAPACITY], self.ours[ARMED] = HALF_MAGIC, capacity, 1
        self.read_end, self.bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.metadata = link_metadata(capacity)

    @property
    def fds(self) -> list[int]:
        """The descriptors that travel with the metadata."""
        return [self.segment, self.read_end]

    def ring(self, count: int = 1) -> None:
        """Wake the engine."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.bell, bytes(count))

    def notify(self, topic: bytes, note: bytes) -> None:
        """Send a notification as a driver does."""
        self.theirs.record(topic, note)
        self.ring()

    def close(self) -> None:
        """Close everything; the engine sees the end of the link."""
        for fd in (self.their_segment, self.their_bell, self.segment, self.read_end, self.bell):
            os.close(fd)
        self.theirs.memory.close()
        self.ours.memory.close()


class Puppet:
    """One connection to an engine."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.link: ShmEnd | None = None
        #: Why the engine is gone, once it is.
        self.lost: asyncio.Future[HixlError] = asyncio.get_running_loop().create_future()
        self._heard: list[Heard] = []
        self._news = asyncio.Event()
        self._fds: list[int] = []

    @classmethod
    async def dial(cls, at: str, /, *, secret: bytes | None = None, **identity: Any) -> Puppet:
        """Connect to an engine, as `who` says."""
        return cls(await dial(Address.parse(at), who(**identity), secret=secret))

    def start(self) -> None:
        """Begin to listen; what came before waits in the kernel."""
        self.connection.start(self._on_message, self._on_lost)

    def _on_message(self, kind: str, body: dict[str, Any], fds: list[int]) -> None:
        self._heard.append(Heard(kind, body, list(fds)))
        self._fds += fds
        self._news.set()

    def _on_lost(self, error: HixlError) -> None:
        self.lost.set_result(error)
        self._news.set()

    async def hear(self, *kinds: str, timeout: float = 10) -> Heard:
        """Return the next message of one of these kinds; others stay queued."""
        async with asyncio.timeout(timeout):
            while True:
                for message in self._heard:
                    if message.kind in kinds:
                        self._heard.remove(message)
                        return message
                assert not self.lost.done(), f"lost while waiting for {kinds}: {self.lost.result()}"
                self._news.clear()
                await self._news.wait()

    def heard(self, kind: str) -> bool:
        """True if such a message has come and was not taken yet."""
        return any(message.kind == kind for message in self._heard)

    def say(self, kind: str, *, fds: Iterable[int] = (), **body: Any) -> None:
        """Send a message."""
        self.connection.send(kind, body, list(fds))

    # -- a well-behaved peer, as far as a test wants it

    async def join(self, capacity: int = 65536, bell: Callable[[int], int] | None = None) -> ShmEnd:
        """Link shm, but do not say that it is ready.

        :param bell: makes, of the read end of the doorbell, the descriptor that is passed in its place.
        """
        offer = await self.hear("link")
        self._fds = [fd for fd in self._fds if fd not in offer.fds]
        self.link = ShmEnd(offer.fds, capacity)
        segment, read_end = self.link.fds
        if bell is not None:
            read_end = bell(read_end)
            self._fds.append(read_end)
        self.say("link", driver="shm", metadata=text(self.link.metadata), fds=[segment, read_end])
        return self.link

    async def up(self) -> ShmEnd:
        """Become a peer like any other."""
        self.start()
        link = await self.join()
        await self.hear("ready")
        self.say("ready")
        return link

    async def get(self, name: str) -> Heard:
        """Wait for the offer of a region, ask for it, and answer with its metadata."""
        offer = await self.hear("region.up")
        while offer.body["name"] != name:
            offer = await self.hear("region.up")
        self.say("region.get", call=1, id=offer.body["id"])
        return await self.hear("region.metadata", "failure")

    async def leave(self) -> None:
        """Say goodbye and close."""
        self.say("goodbye")
        await self.hear("goodbye")
        await self.aclose()

    async def aclose(self) -> None:
        """Close everything without a word."""
        await self.connection.aclose()
        if self.link is not None:
            self.link.close()
            self.link = None
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def text(metadata: bytes) -> str:
    """Metadata as it travels."""
    return base64.b64encode(metadata).decode()


def who(
    *,
    name: str = "puppet",
    domain: str = "default",
    incarnation: str | None = None,
    address: str = "",
    drivers: Sequence[str] = ("shm",),
) -> Identity:
    """The identity that a puppet claims."""
    return Identity(name, domain, incarnation or secrets.token_hex(16), address, tuple(drivers))


@asynccontextmanager
async def puppet(at: str, /, **identity: Any) -> AsyncIterator[Puppet]:
    """A puppet that has dialled an engine and is up."""
    made = await Puppet.dial(at, **identity)
    try:
        await made.up()
        yield made
    finally:
        await made.aclose()


class Stage:
    """A listener like an engine; each engine that dials becomes a puppet that does nothing yet."""

    def __init__(self) -> None:
        self.puppets: asyncio.Queue[Puppet] = asyncio.Queue()
        self._all: list[Puppet] = []
        self._identity: Identity
        self._listener: Listener

    @property
    def address(self) -> str:
        """The address that it listens on."""
        return str(self._listener.address)

    def _take(self, connection: Connection) -> None:
        made = Puppet(connection)
        self._all.append(made)
        self.puppets.put_nowait(made)


@asynccontextmanager
async def stage(*, secret: bytes | None = None, **identity: Any) -> AsyncIterator[Stage]:
    """A listener whose diallers become puppets."""
    made = Stage()
    made._identity = who(**identity)
    made._listener = await Listener.open(
        Address("127.0.0.1", 0),
        lambda: made._identity._replace(address=made.address),
        secret=secret,
        on_connection=made._take,
    )
    try:
        yield made
    finally:
        await made._listener.aclose()
        for one in made._all:
            await one.aclose()
