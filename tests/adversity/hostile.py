"""Malicious peers, which run in processes of their own (`hixl_async.testing.PeerProcess.run`).

Each attack is a coroutine function of a `Puppet` that is up, and has what it was granted mapped: region "granted" for
writing, region "readable" for reading.  It may take any time; what it returns is shown if the test fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

from puppet import (
    ARMED,
    CAPACITY,
    FENCE,
    FENCED,
    GONE,
    HEAD,
    MAGIC,
    PAGE,
    REGISTERED,
    SIGNALS,
    TAIL,
    WANT_SPACE,
    Puppet,
    ShmEnd,
    link_metadata,
    mem_metadata,
    segment,
    stage,
    text,
)

from hixl_async import Engine
from hixl_async.control import codec
from hixl_async.errors import HixlError

SECONDS = 0.5
_kept: list[Any] = []
_libc = ctypes.CDLL(None, use_errno=True)

Attack = Callable[["Intruder"], Awaitable[Any]]


class Intruder:
    """A puppet with its grants."""

    def __init__(self, actor: Puppet) -> None:
        self.actor = actor
        assert actor.link is not None
        self.link = actor.link
        self.granted_fd = self.readable_fd = -1
        self.until = 0.0

    async def enter(self) -> None:
        for name in ("granted", "readable"):
            metadata = await self.actor.get(name)
            setattr(self, f"{name}_fd", metadata.fds[0])
        self.granted = mmap.mmap(self.granted_fd, 0)
        self.until = time.monotonic() + SECONDS

    @property
    def going(self) -> bool:
        """True until the attack has lasted long enough, or the engine has closed the connection."""
        return time.monotonic() < self.until and not self.actor.lost.done()

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)

    def notify(self, size: int = 1) -> bool:
        """A well-formed notification, if there is room."""
        half = self.link.theirs
        capacity, head = half[CAPACITY], half[HEAD]
        if capacity - (head - half[TAIL]) < 2 * size + 4096:
            return False
        rest = capacity - head % capacity
        if rest < size + 64:
            struct.pack_into("<IIII", half.memory, PAGE + head % capacity, rest, 0xFFFFFFFF, 0, 0)
            half[HEAD] += rest
        half.record(b"hostile", bytes(size))
        self.link.ring()
        return True

    def try_(self, what: Callable[[], Any]) -> str:
        """Return the result of an operation that should fail."""
        try:
            return f"worked: {what()!r}"
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"


# -- descriptors


async def clear_flags(self: Intruder) -> list[str]:
    """Clear O_NONBLOCK and every other flag that can be cleared, on all descriptors that both sides hold."""
    tried = []
    for fd in (self.link.their_bell, self.link.read_end, self.link.bell, self.link.their_segment, self.granted_fd):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        tried.append(self.try_(lambda fd=fd, flags=flags: fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)))
        for odd in (os.O_ASYNC, os.O_DIRECT, os.O_APPEND):
            tried.append(self.try_(lambda fd=fd, odd=odd, flags=flags: fcntl.fcntl(fd, fcntl.F_SETFL, flags | odd)))
        tried.append(self.try_(lambda fd=fd: fcntl.fcntl(fd, 1031, 1 << 20)))  # F_SETPIPE_SZ
    while self.going:
        self.notify()
        await self.checkpoint()
    return tried


async def fill_their_doorbell(self: Intruder) -> str:
    """Reopen the victim's doorbell for writing and fill it; the victim must not block on it."""
    path = f"/proc/self/fd/{self.link.their_bell}"
    with contextlib.suppress(OSError):
        os.chmod(path, 0o666)
    try:
        end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        return f"could not reopen: {error}"
    stuffed = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            stuffed += os.write(end, bytes(4096))
    while self.going:
        self.link.ours[ARMED] = 1
        self.notify()
        await asyncio.sleep(0.001)
    os.close(end)
    return f"stuffed {stuffed}"


async def steal_wakeups(self: Intruder) -> int:
    """Ring the doorbell, and drain it before the victim sees it."""
    stolen = 0
    while self.going:
        self.link.ring(3)
        with contextlib.suppress(BlockingIOError):
            stolen += len(os.read(self.link.read_end, 4096))
        self.link.theirs[ARMED] = stolen % 2
        await self.checkpoint()
    return stolen


async def ring_continuously(self: Intruder) -> int:
    """Wake the victim as often as possible, without a reason."""
    rings = 0
    while self.going:
        self.link.theirs[ARMED] = 1
        self.link.theirs[SIGNALS] += 1
        self.link.ring(4096)
        rings += 1
        if rings % 50 == 0:
            await self.checkpoint()
    return rings


async def close_our_doorbell(self: Intruder) -> None:
    """Close half of the link, and keep the rest."""
    os.dup2(os.open("/dev/null", os.O_RDWR), self.link.bell)
    os.dup2(self.link.bell, self.link.read_end)
    while self.going:
        await self.checkpoint()


# -- rings


async def scribble(self: Intruder) -> int:
    """Write random values into all words of both halves, and into the ring."""
    chance, writes = random.Random(7), 0
    while self.going:
        half = chance.choice([self.link.theirs, self.link.ours])
        at = chance.choice([FENCE, HEAD, SIGNALS, WANT_SPACE, FENCED, TAIL, ARMED, MAGIC, CAPACITY])
        half[at] = chance.choice([0, 1, 16, 4096, 1 << 20, (1 << 64) - 16, chance.getrandbits(64)])
        at = PAGE + 16 * chance.randrange(4000)
        struct.pack_into("<IIII", self.link.theirs.memory, at, *(chance.getrandbits(32) for _ in range(4)))
        self.link.ring()
        writes += 1
        if writes % 100 == 0:
            await self.checkpoint()
    return writes


async def flood_notes(self: Intruder) -> int:
    """Send well-formed notifications without a subscriber, as fast as they fit."""
    sent = 0
    while self.going:
        for _ in range(64):
            sent += self.notify(900)
        await self.checkpoint()
    return sent


async def lie_about_lengths(self: Intruder) -> None:
    """Publish one record after another with impossible lengths."""
    for total, topic, note in [
        (0, 0, 0),
        (16, 0xFFFFFFF0, 0x20),
        (0xFFFFFFF0, 1, 1),
        (32, 1 << 30, 1 << 30),
        (1 << 20, 5, 5),
    ]:
        at = self.link.theirs[HEAD] % 65536
        struct.pack_into("<IIII", self.link.theirs.memory, PAGE + at, total, topic, note, 0)
        self.link.theirs[HEAD] += 32
        self.link.ring()
        await asyncio.sleep(0.01)
    while self.going:
        await self.checkpoint()


async def answer_fences_wrongly(self: Intruder) -> None:
    """Claim in turn to be fenced, to be gone, to want room, and to be back."""
    while self.going:
        for word in (FENCED, GONE, WANT_SPACE, FENCE):
            self.link.theirs[word] ^= 1
            self.link.ours[word] ^= 1
            self.link.ring()
        await self.checkpoint()


# -- segments


async def punch_and_truncate(self: Intruder) -> list[str]:
    """Change sizes, punch holes and ask for other seals, on grants and on both halves."""
    results = []
    libc = _libc
    while self.going:
        for fd in (self.granted_fd, self.readable_fd, self.link.their_segment, self.link.segment):
            results = [
                self.try_(lambda fd=fd: os.ftruncate(fd, 0)),
                self.try_(lambda fd=fd: os.ftruncate(fd, 1 << 30)),
                self.try_(lambda fd=fd: fcntl.fcntl(fd, 1033, 15)),
                self.try_(lambda fd=fd: os.posix_fallocate(fd, 0, 1 << 30)),
                self.try_(lambda fd=fd: libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(1 << 20))),
                self.try_(lambda fd=fd: os.lockf(fd, os.F_TLOCK, 0)),
            ]
        await self.checkpoint()
    return results


async def write_what_is_readable(self: Intruder) -> list[str]:
    """Write what is granted for reading: by /proc the same user may succeed, as documented; by the grant never."""
    return [
        self.try_(lambda: os.pwrite(self.readable_fd, b"evil", 0)),
        self.try_(lambda: mmap.mmap(self.readable_fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)),
        self.try_(lambda: fcntl.fcntl(self.readable_fd, fcntl.F_SETFL, os.O_RDWR)),
    ]


async def change_while_it_reads(self: Intruder) -> int:
    """Change the granted memory all the time: the victim must cope with data that changes while it reads."""
    chance, rounds = random.Random(3), 0
    size = len(self.granted)
    while self.going:
        at = chance.randrange(size - 64)
        self.granted[at : at + 64] = chance.randbytes(64)
        rounds += 1
        if rounds % 100 == 0:
            await self.checkpoint()
    return rounds


async def forward(self: Intruder) -> int:
    """Pass everything it was given to another process, which goes on after this one has died."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            _, fds, _, _ = socket.recv_fds(theirs, 1, 4)
            memory = mmap.mmap(fds[0], 0)
            end = time.monotonic() + 2
            while time.monotonic() < end:
                memory[:64] = os.urandom(64)
                os.kill(os.getppid(), 0)
        os._exit(0)
    socket.send_fds(ours, [b"x"], [self.granted_fd, self.link.their_segment, self.link.their_bell, self.link.bell])
    return pid


# -- control messages


async def flood_control(self: Intruder) -> int:
    """Send valid messages as fast as the socket takes them."""
    sent = 0
    messages: list[tuple[str, dict[str, Any]]] = [
        ("region.up", {"id": 1, "name": "x", "size": 1, "access": 1}),
        ("region.down", {"id": 1, "name": "x"}),
        ("region.gone", {"id": 1}),
        ("call", {"call": 1, "service": "no such service", "body": {}}),
        ("call", {"call": 2, "service": "hixl.ping", "body": {"deep": [[[[[[1]]]]]]}}),
        ("post", {"service": "hixl.ping", "body": {"text": "x" * 1000}}),
        ("answer", {"call": 7, "body": {}}),
    ]
    while self.going:
        try:
            for kind, body in messages:
                self.actor.say(kind, **body)
                sent += 1
        except HixlError:
            break
        while self.going and self.actor.connection._queue:
            await asyncio.sleep(0)
    return sent


async def flood_region_get(self: Intruder) -> int:
    """Request regions: each request costs the victim a descriptor, a message, and a look at /proc."""
    sent = 0
    while self.going:
        with contextlib.suppress(HixlError):
            for number in range(20):
                self.actor.say("region.get", call=number, id=number)
                sent += 1
        for message in self.actor._heard:
            for fd in message.fds:
                os.close(fd)
                self.actor._fds.remove(fd)
        self.actor._heard.clear()
        await self.checkpoint()
    return sent


async def flood_without_reading(self: Intruder) -> int:
    """Send request after request, and never read an answer."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(self.actor.connection._channel.fileno())
    sent = 0
    while self.going:
        try:
            self.actor.say("call", call=sent, service="hixl.ping", body={"text": "x" * 10_000})
        except HixlError:
            break
        sent += 1
        while self.going and self.actor.connection._queue:
            await asyncio.sleep(0)
    return sent


def _raw(self: Intruder, data: bytes) -> None:
    with contextlib.suppress(OSError):
        self.actor.connection._channel.sock.send(data)  # type: ignore[attr-defined]


async def oversized_message(self: Intruder) -> None:
    """Send a packet that is longer than any message may be."""
    self.actor.connection._channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # type: ignore[attr-defined]
    _raw(self, b'{"body":{"x":"' + b"x" * 100_000 + b'"},"kind":"post"}')
    while self.going:
        await self.checkpoint()


async def garbage(self: Intruder) -> None:
    """Send packets that are not messages."""
    chance = random.Random(5)
    _raw(self, chance.randbytes(1000))
    _raw(self, b'{"body":{},"kind":"post"}' + b"\0")
    _raw(self, b"[" * 10_000)
    while self.going:
        await self.checkpoint()


async def expensive_messages(self: Intruder) -> None:
    """Send well-formed messages that are expensive to parse; the last one is over the limit."""
    for value in (
        "{" + ",".join(f'"{i}":{i}' for i in range(4000)) + "}",
        '"' + "\\u0041" * 9000 + '"',
        "[" + ",".join(["1e5"] * 8_000) + "]",
        "[" + ",".join(["[]"] * 15_000) + "]",
    ):
        for _ in range(20):
            _raw(self, b'{"body":{"body":{"x":' + value.encode() + b'},"service":"hixl.ping"},"kind":"post"}')
            await self.checkpoint()
    while self.going:
        await self.checkpoint()


async def stray_descriptors(self: Intruder) -> None:
    """Send descriptors of all kinds where none belong, a lingering socket among them."""
    lingering = socket.socket()
    lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    fds = [lingering.fileno(), os.open("/dev/null", os.O_RDONLY), os.open("/", os.O_RDONLY), os.eventfd(0)]
    self.actor.say("post", fds=fds, service="hixl.ping", body={})
    while self.going:
        await self.checkpoint()


async def never_answer(self: Intruder) -> None:
    """Stay connected, and answer nothing."""
    while self.going:
        await asyncio.sleep(0.01)


async def offer_bogus_regions(self: Intruder) -> int:
    """Offer every region that is asked for, with impossible addresses, sizes and rights."""
    chance, answered = random.Random(11), 0
    self.actor.say("region.up", id=1, name="bogus", size=4096, access=3)
    while self.going:
        try:
            request = await self.actor.hear("region.get", timeout=0.2)
        except TimeoutError:
            continue
        except AssertionError:
            break
        size = chance.choice([1, 4096, 1 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
        kind = chance.choice([1, 2, 2, 2, 77])
        address = chance.choice([0, 8, 4096, id(chance), 1 << 47, 0xFFFF800000000000, (1 << 64) - 4096])
        fds = [segment(chance.choice([4096, 1 << 20]))] if kind != REGISTERED else []
        with contextlib.suppress(HixlError):
            self.actor.say(
                "region.metadata",
                fds=fds,
                call=request.body["call"],
                driver="shm",
                metadata=text(mem_metadata(size, kind=kind, address=address)),
                size=size,
                access=3,
            )
        for fd in fds:
            os.close(fd)
        answered += 1
    return answered


ATTACKS: dict[str, Attack] = {
    function.__name__: function
    for function in (
        clear_flags, fill_their_doorbell, steal_wakeups, ring_continuously, close_our_doorbell, scribble, flood_notes,
        lie_about_lengths, answer_fences_wrongly, punch_and_truncate, write_what_is_readable, change_while_it_reads,
        flood_control, flood_region_get, flood_without_reading, oversized_message, garbage, expensive_messages,
        stray_descriptors, never_answer, offer_bogus_regions,
    )
}  # fmt: skip


async def attack(engine: Engine, address: str, what: str, seconds: float) -> Any:
    """Run one attack; return its result."""
    global SECONDS
    SECONDS = seconds
    actor = await Puppet.dial(address, name=f"hostile: {what}")
    await actor.up()
    intruder = Intruder(actor)
    await intruder.enter()
    try:
        return await ATTACKS[what](intruder)
    finally:
        _kept.append((actor, intruder))  # until the process ends: nothing is closed politely


async def attack_and_forward(engine: Engine, address: str) -> int:
    """Connect, and let a child go on with the descriptors."""
    actor = await Puppet.dial(address, name="hostile: forward")
    await actor.up()
    intruder = Intruder(actor)
    await intruder.enter()
    _kept.append((actor, intruder))
    return await forward(intruder)


async def claim_a_pid(engine: Engine, address: str, pid: int, target: int) -> str:
    """Link in the name of another process, then offer a "region" in the memory of that process."""
    actor = await Puppet.dial(address, name="hostile: pid")
    _kept.append(actor)
    actor.start()
    offer = await actor.hear("link")
    link = actor.link = ShmEnd(offer.fds)
    actor._fds.clear()
    actor.say("link", driver="shm", metadata=text(link_metadata(65536, own_pid=pid)), fds=link.fds)
    await actor.hear("ready")
    actor.say("ready")
    actor.say("region.up", id=1, name="stolen", size=64, access=3)
    request = await actor.hear("region.get")
    metadata = text(mem_metadata(64, kind=REGISTERED, address=target))
    actor.say("region.metadata", call=request.body["call"], driver="shm", metadata=metadata, size=64, access=3)
    return (await actor.hear("region.gone", "goodbye")).kind


async def impersonate(engine: Engine, address: str, other: str, incarnation: str) -> None:
    """Claim to be another engine, with its name, address and incarnation."""
    actor = await Puppet.dial(address, name="friend", address=other, incarnation=incarnation)
    await actor.up()
    _kept.append(actor)


# -- half a connection


async def stage_that_stops(engine: Engine, step: str) -> str:
    """Listen like an engine that stops working at a step; `reached` waits until a dialler is there."""
    theatre = stage()
    made = await theatre.__aenter__()
    _kept.append(theatre)
    _kept.append(asyncio.ensure_future(_stop_at(made.puppets.get(), step)))
    return made.address


async def reached(engine: Engine) -> None:
    """Wait until `stage_that_stops` is where it stops."""
    await next(one for one in _kept if isinstance(one, asyncio.Task))


async def dial_and_stop(engine: Engine, address: str, step: str) -> None:
    """Dial, and stop working at a step."""
    await _stop_at(Puppet.dial(address), step)


async def _stop_at(coming: Any, step: str) -> None:
    actor = await coming
    _kept.append(actor)
    if step == "established":
        return
    actor.start()
    if step == "listening":
        await actor.hear("link")
    elif step == "linked":
        await actor.join()
        await actor.hear("ready")


def leave_a_child(engine: Engine) -> int:
    """Start a child that holds all descriptors of this process, and sleeps."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


async def half_handshakes(engine: Engine, address: str, seconds: float) -> int:
    """Break off after every byte of the handshake, or stay connected and say nothing."""
    host, _, port = address.rpartition(":")
    hello = codec.frame(codec.encode("hello", {"magic": "hixl-async", "versions": [1, 1], "secret": False}))
    pieces = [b"", hello[:1], hello[:5], hello, hello * 3, b"\xff\xff\xff\xff", b"\0\0\0\0", os.urandom(64)]
    silent, count, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end:
        sock = socket.create_connection((host, int(port)))
        with contextlib.suppress(OSError):
            sock.send(pieces[count % len(pieces)])
        if count % 3 == 0 and len(silent) < 200:
            silent.append(sock)
        else:
            if count % 3 == 1:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            sock.close()
        count += 1
        if count % 20 == 0:
            await asyncio.sleep(0.01)
    _kept.append(silent)
    return count
