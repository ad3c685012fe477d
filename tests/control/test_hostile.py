"""Strangers that try to be accepted, to keep others out, or to exhaust this process."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import resource
import secrets
import select
import socket
import time
from collections.abc import Iterator

import pytest

from hixl_async.control import accept_limiter, codec, rendezvous
from hixl_async.control import listener as listener_module
from hixl_async.control.handshake import LocalView
from hixl_async.control.process import LocalUser, start_time
from hixl_async.control.rendezvous import RendezvousName
from hixl_async.errors import ConnectError, PeerDownError, ProtocolError

from .conftest import Stalls
from .machines import PATH, dialler
from .sides import SECRET, Host, HostFactory, Inbox, Stranger, closed, elsewhere, memory, passes


def name_of(host: Host) -> RendezvousName:
    assert host.listener._rendezvous is not None
    return host.listener._rendezvous.name


def real_view() -> LocalView:
    return LocalView(rendezvous.Scope.current(None), LocalUser.current(), start_time(), PATH)


def hello() -> bytes:
    one = dialler()
    one._view = real_view()
    return one.start()[0].message  # type: ignore[union-attr]


async def unix_stranger(host: Host) -> socket.socket:
    return rendezvous.connect(name_of(host), host.unix_dir)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Allow this process many descriptors, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096 if hard == resource.RLIM_INFINITY else min(4096, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def measured(data: bytes) -> float:
    """The cost of reading a message."""
    before = time.thread_time()
    codec.decode(data)
    return time.thread_time() - before


NONSENSE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": b"\0" * 5000,
    "ones": b"\xff" * 5000,
    "empty frame": b"\0\0\0\0",
    "empty object": codec.frame(b"{}"),
    "one byte over": (codec.HANDSHAKE_LIMIT + 1).to_bytes(4, "big"),
    "gigabytes": b"\xff\xff\xff\xff",
    "deep": codec.frame(b"[" * codec.HANDSHAKE_LIMIT),
    "not utf-8": codec.frame(b"\xff" * 100),
    "nan": codec.frame(b'{"body":{"a":NaN},"kind":"hello"}'),
    "twice": codec.frame(b'{"body":{},"body":{},"kind":"hello"}'),
    "proof first": codec.frame(codec.encode("prove", {})),
    "refusal": codec.frame(codec.encode("refuse", {"code": "connect", "text": "no"})),
    "pickle": codec.frame(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00."),
    "tls": bytes.fromhex("16030100f8010000f40303") + b"\0" * 300,
}


class TestNonsense:
    @pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE)
    async def test_over_tcp(self, listen: HostFactory, data: bytes) -> None:
        host = await listen()
        stranger = await Stranger.connect(host.address)
        await stranger.send(data)
        assert isinstance(await host.refused.get(), ProtocolError)
        await stranger.closed()
        stranger.close()
        assert (await host.pair())[0].same_host

    @pytest.mark.parametrize("data", [value[4:] for value in NONSENSE.values()], ids=NONSENSE)
    async def test_over_unix(self, listen: HostFactory, data: bytes) -> None:
        host = await listen()
        sock = await unix_stranger(host)
        sock.send(data)
        assert isinstance(await host.refused.get(), ProtocolError | PeerDownError)
        await closed(sock)
        assert (await host.pair())[0].same_host

    async def test_byte_by_byte(self, listen: HostFactory) -> None:
        host = await listen()
        stranger = await Stranger.connect(host.address)
        for byte in codec.frame(hello()):
            await stranger.send(bytes([byte]))
        assert (await stranger.receive()).kind == "hello"
        stranger.close()

    async def test_after_the_hello(self, listen: HostFactory) -> None:
        host = await listen(secret=SECRET)
        for data in NONSENSE.values():
            stranger = await Stranger.connect(host.address)
            one = dialler(SECRET)
            await stranger.send(codec.frame(one.start()[0].message))  # type: ignore[union-attr]
            assert (await stranger.receive()).kind == "hello"
            await stranger.send(data)
            assert isinstance(await host.refused.get(), ConnectError | ProtocolError)
            await stranger.closed()
            stranger.close()
        assert host.connections.empty()

    async def test_half_a_frame_and_then_nothing(self, listen: HostFactory) -> None:
        host = await listen()
        for data in (b"\0", b"\0\0\0\x10abc", codec.frame(hello())[:-1]):
            stranger = await Stranger.connect(host.address)
            await stranger.send(data)
            stranger.sock.shutdown(socket.SHUT_WR)
            assert isinstance(await host.refused.get(), PeerDownError)
            await stranger.closed()
            stranger.close()


class TestUnixTransport:
    async def test_for_a_handshake_that_is_unknown(self, listen: HostFactory) -> None:
        host = await listen()
        sock = await unix_stranger(host)
        sock.send(codec.encode("prove", {"connection": secrets.token_hex(16)}))
        assert b"no handshake waits" in await closed(sock)

    async def test_of_a_stranger_that_knows_the_name_of_the_handshake(self, listen: HostFactory) -> None:
        """It can spoil that handshake, and nothing else."""
        host = await listen(secret=SECRET)
        stranger = await Stranger.connect(host.address)
        one = dialler(SECRET)
        one._view = real_view()
        await stranger.send(codec.frame(one.start()[0].message))  # type: ignore[union-attr]
        answer = await stranger.receive()
        sock = await unix_stranger(host)
        claims = {"connection": answer.body["connection"], "tcp_path": "", "started": "", "proof": "0" * 64}
        sock.send(codec.encode("prove", {**claims, "identity": host.identity._replace(name="spy")._asdict()}))
        assert b"does not know the secret" in await closed(sock)
        await stranger.closed()
        stranger.close()
        assert host.connections.empty()
        assert (await host.pair())[0].same_host

    async def test_twice_for_one_handshake(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        host = await listen()
        stranger = await Stranger.connect(host.address)
        await stranger.send(codec.frame(hello()))
        answer = await stranger.receive()
        message = codec.encode("prove", {"connection": answer.body["connection"]})
        socks = [await unix_stranger(host) for _ in range(2)]
        for sock in socks:
            sock.send(message)
        said = [await closed(sock) for sock in socks]
        # The first one is refused for what it says, the second one because it is the second one or too late.
        assert b"refuse" in said[0]
        assert b"Unix socket" in said[1]
        await stranger.closed()
        stranger.close()

    async def test_with_descriptors(self, listen: HostFactory) -> None:
        host = await listen()
        sock = await unix_stranger(host)
        descriptor = memory()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            sock.sendmsg([b"x"], rights)
        except PermissionError:
            sock.close()  # Linux 6.16
        else:
            assert b"descriptors came before" in await closed(sock)
        os.close(descriptor)
        assert isinstance(await host.refused.get(), ProtocolError | PeerDownError)

    async def test_with_descriptors_where_the_kernel_lets_them_through(
        self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rendezvous, "admit_descriptors", lambda sock, admit: None)
        host = await listen()
        for descriptor in (memory(), os.open("/", os.O_PATH)):
            sock = await unix_stranger(host)
            sock.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor] * 5))])
            await closed(sock)
            sock = await unix_stranger(host)
            sock.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
            await closed(sock)
            os.close(descriptor)
        for _ in range(4):
            assert isinstance(await host.refused.get(), ProtocolError)

    async def test_that_says_nothing(self, listen: HostFactory) -> None:
        host = await listen(handshake_timeout=0.05)
        sock = await unix_stranger(host)
        assert b"took longer than 0.05 s" in await closed(sock)
        assert isinstance(await host.refused.get(), ConnectError)

    async def test_whose_tcp_transport_is_gone(self, listen: HostFactory) -> None:
        host = await listen()
        stranger = await Stranger.connect(host.address)
        await stranger.send(codec.frame(hello()))
        answer = await stranger.receive()
        stranger.close()
        await host.refused.get()
        sock = await unix_stranger(host)
        sock.send(codec.encode("prove", {"connection": answer.body["connection"]}))
        assert b"no handshake waits" in await closed(sock)


class TestExhaustion:
    async def test_silent_connections_are_closed(self, listen: HostFactory) -> None:
        host = await listen(handshake_timeout=0.05)
        silent = [await Stranger.connect(host.address) for _ in range(3)]
        await silent[1].send(b"\0\0")
        await silent[2].send(codec.frame(hello()))
        for stranger in silent:
            await stranger.closed()
            stranger.close()
        for _ in silent:
            assert "took longer than 0.05 s" in str(await host.refused.get())

    async def test_silent_connections_keep_none_out(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their places are taken at once by later connections; waiting out the timeout of a minute would show."""
        monkeypatch.setattr(accept_limiter, "_MOST_WAITING", 4)
        monkeypatch.setattr(listener_module, "_MAX_HANDSHAKES", 2)
        monkeypatch.setattr(listener_module, "_PATIENCE", 60.0)
        host = await listen(handshake_timeout=60)
        silent = [await Stranger.connect(host.address) for _ in range(50)]
        assert (await host.dial(timeout=20)).same_host
        assert host.listener._accepting[0].silent <= 4
        for stranger in silent:
            stranger.close()

    async def test_silent_connections_on_the_unix_socket_keep_none_out(
        self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(accept_limiter, "_MOST_WAITING", 4)
        monkeypatch.setattr(listener_module, "_PATIENCE", 60.0)
        host = await listen(handshake_timeout=60)
        silent = [await unix_stranger(host) for _ in range(12)]
        assert (await host.dial(timeout=20)).same_host
        for sock in silent:
            sock.close()

    async def test_handshakes_that_stop_midway_keep_none_out(
        self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listener_module, "_MAX_HANDSHAKES", 4)
        monkeypatch.setattr(listener_module, "_PATIENCE", 0.02)
        host = await listen(handshake_timeout=60)
        strangers = [await Stranger.connect(host.address) for _ in range(12)]
        for stranger in strangers:
            await stranger.send(b"\0\0")
        assert (await host.dial(timeout=20)).same_host
        for stranger in strangers:
            stranger.close()

    async def test_a_thousand_connections_at_once(
        self, listen: HostFactory, stalls: Stalls, many_descriptors: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(accept_limiter, "_MOST_WAITING", 16)
        host = await listen(handshake_timeout=60)
        before = len(os.listdir("/proc/self/fd"))

        def connect() -> list[socket.socket]:
            return [socket.create_connection((host.address.host, host.address.port)) for _ in range(1000)]

        def leave() -> None:
            for sock in sockets:
                sock.close()

        sockets = await asyncio.to_thread(connect)
        await passes(50)
        # Sixteen of them have a descriptor on our side; the others wait in the kernel or were refused.
        assert len(os.listdir("/proc/self/fd")) - before <= 1000 + 2 * 16
        await asyncio.to_thread(leave)
        stalls.reset()
        assert (await host.dial(timeout=30)).same_host
        assert stalls.longest < 0.05
        assert host.listener._accepting[0].silent <= 16

    async def test_a_flood_before_authentication(self, listen: HostFactory, stalls: Stalls) -> None:
        host = await listen()
        frame = codec.frame(hello())

        def flood() -> None:
            for _ in range(50):
                with (
                    contextlib.suppress(ConnectionError),
                    socket.create_connection((host.address.host, host.address.port)) as sock,
                ):
                    sock.sendall(frame * 200)

        await asyncio.gather(*(asyncio.to_thread(flood) for _ in range(4)))
        assert (await host.pair())[0].same_host
        assert stalls.longest < 0.05

    @pytest.mark.parametrize("transport", ["unix", "tcp"])
    async def test_a_flood_of_the_worst_messages(
        self, listen: HostFactory, stalls: Stalls, monkeypatch: pytest.MonkeyPatch, transport: str
    ) -> None:
        """An authenticated peer can make this side read, but little at a time."""
        host = await listen(secret=SECRET)
        if transport == "tcp":
            elsewhere(monkeypatch)
        mine, theirs = await host.pair()
        inbox = Inbox(theirs)
        data = codec.encode("x", {"a": [{str(number): 0} for number in range(2000)] + [1] * 12_000})

        def flood() -> None:
            channel = mine._channel
            for _ in range(50):
                while not channel.send(data, ()) or not channel.flush():
                    select.select([], [channel.fileno()], [])

        cost = min(measured(data) for _ in range(5))
        stalls.reset()
        flooding = asyncio.ensure_future(asyncio.to_thread(flood))
        for _ in range(50):
            assert (await inbox.get()).kind == "x"
        await flooding
        # A pass reads two of them at most, and the watch looks at every second one; the rest is for busy machines.
        assert stalls.longest < 0.02 + 10 * cost

    async def test_descriptors_do_not_accumulate(self, listen: HostFactory) -> None:
        host = await listen()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(300):
            stranger = await Stranger.connect(host.address)
            stranger.close()
        for _ in range(300):
            assert isinstance(await host.refused.get(), PeerDownError)
        await host.listener._accepting[0].wait_empty()
        assert len(os.listdir("/proc/self/fd")) == before

    async def test_handshakes_are_forgotten(self, listen: HostFactory) -> None:
        host = await listen()
        for _ in range(20):
            await host.pair()
            stranger = await Stranger.connect(host.address)
            await stranger.send(codec.frame(hello()))
            await stranger.receive()
            stranger.close()
            await host.refused.get()
        for limiter in host.listener._accepting:
            await limiter.wait_empty()
            assert len(limiter) == 0
        assert not host.listener._replies
