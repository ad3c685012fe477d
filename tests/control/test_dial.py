"""Dialling and listening: connections that succeed, and every way in which they fail."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import resource
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hixl_async.control import (
    PROTOCOL_VERSION,
    Connection,
    Identity,
    Listener,
    codec,
    dial,
    process,
    rendezvous,
    socket_io,
)
from hixl_async.control import dialler as dialler_module
from hixl_async.control import listener as listener_module
from hixl_async.engine.config import EngineConfig, parse_address
from hixl_async.errors import (
    AddressInUseError,
    AuthenticationError,
    ConnectError,
    HandshakeError,
    HixlError,
    InvalidArgumentError,
    PeerDownError,
    ProtocolError,
    UnknownHostError,
)
from hixl_async.types import Address

from .sides import ANYWHERE, SECRET, Host, HostFactory, Inbox, Stranger, elsewhere, identity


async def refused(host: Host, kind: type[HixlError], words: str, **options: Any) -> None:
    """Dial in vain, and check that both sides know why."""
    with pytest.raises(kind, match=words) as caught:
        await host.dial(**options)
    assert type(caught.value) is kind
    assert str(host.address) in str(caught.value)
    theirs = await host.refused.get()
    assert type(theirs) is kind
    assert str(theirs) in str(caught.value)


class TestSucceeds:
    @pytest.mark.parametrize("secret", [None, SECRET])
    async def test_on_one_host(self, listen: HostFactory, secret: bytes | None) -> None:
        host = await listen(secret=secret)
        me = identity("me")
        mine, theirs = await host.pair(me=me)
        assert mine.identity == host.identity
        assert theirs.identity == me
        for connection in (mine, theirs):
            assert connection.same_host
            assert connection.fallback == ""
            assert connection.version == PROTOCOL_VERSION
            assert connection.credentials == (os.getpid(), os.geteuid(), os.getegid())
            assert connection.pidfd is not None
            assert process_of(connection.pidfd) == os.getpid()

    async def test_on_another_host(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        host = await listen(secret=SECRET)
        elsewhere(monkeypatch)
        mine, theirs = await host.pair()
        for connection in (mine, theirs):
            assert not connection.same_host
            assert "different hosts" in connection.fallback
            assert connection.credentials is None
            assert connection.pidfd is None
            assert "over tcp" in repr(connection)

    async def test_with_a_shared_directory(self, listen: HostFactory, tmp_path: Path) -> None:
        host = await listen(unix_dir=str(tmp_path))
        mine, theirs = await host.pair()
        assert mine.same_host
        assert theirs.same_host

    async def test_with_a_directory_of_a_long_name(self, listen: HostFactory, tmp_path: Path) -> None:
        path = tmp_path / ("x" * 120) / ("y" * 120)
        path.mkdir(parents=True)
        mine, _ = await (await listen(unix_dir=str(path))).pair()
        assert mine.same_host

    async def test_with_a_directory_on_one_side_only(self, listen: HostFactory, tmp_path: Path) -> None:
        host = await listen(secret=SECRET, unix_dir=str(tmp_path))
        mine, theirs = await host.pair(unix_dir=None)
        assert "unix_dir" in mine.fallback
        assert "unix_dir" in theirs.fallback
        abstract = await listen(secret=SECRET)
        mine, _ = await abstract.pair(unix_dir=str(tmp_path))
        assert mine.same_host

    async def test_by_name_and_over_both_versions_of_ip(self, listen: HostFactory) -> None:
        host = await listen(Address("localhost", 0))
        assert host.address.host == "localhost"
        assert (await host.pair())[0].same_host
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind(("::1", 0))
            except OSError:
                return
        six = await listen(Address("::1", 0))
        assert str(six.address).startswith("[::1]:")
        assert (await six.pair())[0].same_host
        mapped = await listen(Address("::ffff:127.0.0.1", 0))
        mine = await dial(Address("127.0.0.1", mapped.address.port), identity())
        mapped.mine.append(mine)
        assert mine.same_host

    async def test_everywhere_with_a_secret(self, listen: HostFactory) -> None:
        host = await listen(Address("0.0.0.0", 0), secret=SECRET)
        assert (await host.pair())[0].same_host

    async def test_many_at_once(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(listener_module, "_MAX_HANDSHAKES", 8)
        host = await listen()
        before = len(os.listdir("/proc/self/fd"))
        mine = await asyncio.gather(*(host.dial(timeout=20) for _ in range(60)))
        theirs = [await host.connections.get() for _ in mine]
        assert all(connection.same_host for connection in (*mine, *theirs))
        assert {connection.identity.incarnation for connection in mine} == {host.identity.incarnation}
        # Each end has its Unix socket and its pidfd, and no TCP connection any more.
        assert len(os.listdir("/proc/self/fd")) - before <= 4 * len(mine)

    async def test_the_socket_that_is_not_used_is_closed(self, listen: HostFactory) -> None:
        host = await listen()
        await host.pair()
        assert not established_on(host.address.port)

    async def test_descriptors_are_not_inherited(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        before = set(os.listdir("/proc/self/fd"))
        host = await listen(secret=SECRET)
        await host.pair()
        elsewhere(monkeypatch)
        await host.pair()
        for descriptor in set(os.listdir("/proc/self/fd")) - before:
            with contextlib.suppress(OSError):  # the one that listdir used
                assert not os.get_inheritable(int(descriptor))

    async def test_small_tcp_messages_are_not_held_back(
        self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host = await listen(secret=SECRET)
        elsewhere(monkeypatch)
        for connection in await host.pair():
            assert connection._channel.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # type: ignore[attr-defined]

    async def test_a_full_unix_queue_is_waited_for(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        host = await listen()
        connects = 0
        real = rendezvous.connect

        def connect(*args: Any) -> socket.socket:
            nonlocal connects
            connects += 1
            if connects < 4:
                raise BlockingIOError
            return real(*args)

        monkeypatch.setattr(socket_io, "connect_rendezvous", connect)
        assert (await host.pair())[0].same_host
        assert connects == 4

    async def test_at_the_second_attempt_if_the_listener_was_busy(self, listen: HostFactory) -> None:
        attempts = 0
        me = identity("busy")

        def ask() -> Identity:
            nonlocal attempts
            attempts += 1
            if attempts < 3:
                task = asyncio.current_task()  # the handshake: it is cancelled, as it is while others wait
                assert task is not None
                task.cancel()
            return me

        host = await listen()
        host.listener._identity_factory = ask
        assert (await host.pair())[0].same_host
        assert attempts == 3
        attempts = -1_000_000
        with pytest.raises(ConnectError, match=r"did not answer within 0.4 s \(it is busy: refused: .*\)"):
            await host.dial(timeout=0.4)

    async def test_the_identity_is_asked_for_each_time(self, listen: HostFactory) -> None:
        host = await listen()
        await host.pair()
        host.identity = host.identity._replace(drivers=("shm", "ucx"))
        mine, _ = await host.pair()
        assert mine.identity.drivers == ("shm", "ucx")


class TestRefuses:
    async def test_another_secret(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        host = await listen(secret=SECRET)
        await refused(host, AuthenticationError, "does not know the secret", secret=b"wrong")
        elsewhere(monkeypatch)
        await refused(host, AuthenticationError, "does not know the secret", secret=b"wrong")

    async def test_a_secret_on_one_side_only(self, listen: HostFactory) -> None:
        await refused(await listen(secret=SECRET), AuthenticationError, "the dialler has none.*secret=", secret=None)
        await refused(await listen(), AuthenticationError, "the listener has none.*secret=", secret=SECRET)

    async def test_another_domain(self, listen: HostFactory) -> None:
        host = await listen(me=identity(domain="blue"))
        await refused(host, AuthenticationError, "'blue'.*'red'", me=identity(domain="red"))

    async def test_itself(self, listen: HostFactory) -> None:
        host = await listen()
        await refused(host, InvalidArgumentError, "transfer to self", me=host.identity)

    async def test_another_host_without_a_secret(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        host = await listen()
        elsewhere(monkeypatch)
        await refused(host, AuthenticationError, "different hosts.*secret=")

    async def test_another_protocol_version(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        host = await listen()
        stranger = await Stranger.connect(host.address)
        await stranger.say("hello", {"magic": "hixl-async", "versions": [5, 7]})
        kind, body = await stranger.receive()
        assert (kind, body["code"]) == ("refuse", "protocol")
        assert "listener speaks version 1, the dialler versions 5 to 7" in body["text"]
        await stranger.closed()
        stranger.close()
        assert isinstance(await host.refused.get(), ProtocolError)

    async def test_an_overflow_uid(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        unmapped = process.LocalUser(os.geteuid(), overflow_uid=os.geteuid(), all_mapped=False)
        with monkeypatch.context() as patch:
            patch.setattr(process.LocalUser, "current", classmethod(lambda cls: unmapped))
            host = await listen()
        await refused(host, AuthenticationError, "the dialler is not the same user.*every user without a name")

    @pytest.mark.parametrize("secret", ["text", b"", 5])
    async def test_a_malformed_secret(self, listen: HostFactory, secret: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="secret"):
            await listen(secret=secret)
        with pytest.raises(InvalidArgumentError, match="secret"):
            await dial(Address("127.0.0.1", 1), identity(), secret=secret)

    async def test_a_malformed_identity(self) -> None:
        for me in (identity(""), identity("a\tb"), identity()._replace(incarnation="no")):
            with pytest.raises(InvalidArgumentError, match="must be"):
                await dial(Address("127.0.0.1", 1), me)


class TestNoAnswer:
    async def test_no_listener(self) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            address = Address(*held.getsockname())
            with pytest.raises(ConnectError, match=f"cannot connect to {address}: Connection refused") as caught:
                await dial(address, identity())
            assert caught.value.retryable

    @pytest.mark.parametrize(
        ("address", "kind"),
        [
            (Address("127.0.0.1", 0), InvalidArgumentError),
            (Address("a..b", 1), InvalidArgumentError),
            (Address("no such host.invalid", 1), UnknownHostError),
        ],
    )
    async def test_an_impossible_address(self, address: Address, kind: type[HixlError]) -> None:
        with pytest.raises(kind, match=str(address)) as caught:
            await dial(address, identity())
        assert not caught.value.retryable

    @pytest.mark.parametrize(
        ("codes", "kind"),
        [
            ([socket.EAI_NONAME], UnknownHostError),
            ([socket.EAI_NODATA], UnknownHostError),
            ([socket.EAI_FAIL], ConnectError),
            ([socket.EAI_AGAIN, socket.EAI_AGAIN, socket.EAI_NONAME], UnknownHostError),
        ],
    )
    async def test_a_name_service_that_fails(
        self, monkeypatch: pytest.MonkeyPatch, codes: list[int], kind: type[ConnectError]
    ) -> None:
        """It is asked again where it may answer later; only where there is no such host is another call in vain."""
        answers = iter(codes)

        async def fail(address: Address) -> Any:
            raise socket.gaierror(next(answers), "no answer")

        monkeypatch.setattr(socket_io, "_look_up", fail)
        monkeypatch.setattr(dialler_module, "_RETRY", (0, 0))
        with pytest.raises(ConnectError, match="the host of address somewhere:1 cannot be found: no answer") as caught:
            await dial(Address("somewhere", 1), identity())
        assert type(caught.value) is kind
        assert (caught.value.retryable, caught.value.native) == (kind is ConnectError, codes[-1])
        assert next(answers, None) is None

    async def test_a_name_service_that_fails_for_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def fail(address: Address) -> Any:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")

        monkeypatch.setattr(socket_io, "_look_up", fail)
        with pytest.raises(
            ConnectError, match=r"not answer within 0.01 s \(the host .* cannot be found: try again\)"
        ) as caught:
            await dial(Address("somewhere", 1), identity(), timeout=0.01)
        assert type(caught.value) is ConnectError

    async def test_a_listener_that_does_not_accept(self) -> None:
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(1)
            with pytest.raises(ConnectError, match=r"did not answer within 0.05 s \(waiting for an answer over tcp\)"):
                await dial(Address(*deaf.getsockname()), identity(), timeout=0.05)

    async def test_a_queue_that_is_full(self) -> None:
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            fillers = [socket.socket() for _ in range(4)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(deaf.getsockname())
            with pytest.raises(ConnectError, match=r"did not answer within 0.05 s \(connecting\)"):
                await dial(Address(*deaf.getsockname()), identity(), timeout=0.05)
            for filler in fillers:
                filler.close()

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (b"", "broke off the handshake"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it is not a hixl_async engine; it began with b'HTTP/1.1 400"),
            (b"220 mail ESMTP\r\n", "not a hixl_async engine; it began with b'220 mail"),
            (codec.frame(b"{}") + b"\xff" * 8, "not a valid message"),
            (b"\0\0", "broke off the handshake"),
            (b"\0\0\0\x02hi", "not a valid message"),
            (codec.frame(codec.encode("goodbye", {})), "expected a 'hello'"),
            (codec.frame(codec.encode("hello", {"magic": "other"})), "magic"),
            (codec.frame(codec.encode("hello", {"magic": "hixl-async", "versions": [3, 4]})), "versions 3 to 4"),
        ],
        ids=[
            "nothing",
            "http",
            "smtp",
            "an object",
            "half a frame",
            "garbage",
            "another message",
            "another protocol",
            "another version",
        ],
    )
    async def test_something_else_answers(self, answer: bytes, words: str) -> None:
        kind = ConnectError if words == "broke off the handshake" else HandshakeError

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            writer.write(answer)
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            with pytest.raises(kind, match=words) as caught:
                await dial(Address(*server.sockets[0].getsockname()), identity())
        assert type(caught.value) is kind

    async def test_a_unix_socket_that_is_gone(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        """A peer that restarts: worth another attempt, and no failure of authentication."""

        def connect(*args: object) -> socket.socket:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

        monkeypatch.setattr(socket_io, "connect_rendezvous", connect)
        host = await listen()
        with pytest.raises(ConnectError, match="Unix socket could not be connected: Connection refused") as caught:
            await host.dial()
        assert type(caught.value) is ConnectError
        assert caught.value.retryable

    @pytest.mark.parametrize("at", range(4))
    async def test_no_descriptor_left(self, listen: HostFactory, at: int) -> None:
        """At whichever step the dialler runs out of them."""
        host = await listen()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        dialling = asyncio.ensure_future(host.dial())
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + at, hard))
        try:
            await asyncio.wait([dialling], timeout=0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        [result] = await asyncio.gather(dialling, return_exceptions=True)
        if isinstance(result, Connection):
            assert at
            await result.aclose()
        else:
            assert type(result) is ConnectError, result
            assert result.retryable
        while not host.connections.empty():
            await host.connections.get_nowait().aclose()

    async def test_a_listener_without_descriptors_reports_it(
        self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host = await listen()
        [limiter, _] = host.listener._accepting
        real = limiter._sock

        class Exhausted:
            """A socket that accepts only with the reserve descriptor."""

            def accept(self) -> object:
                if limiter._spare is not None:
                    raise OSError(errno.EMFILE, "Too many open files")
                return real.accept()

            def fileno(self) -> int:
                return real.fileno()

        limiter._sock = Exhausted()  # type: ignore[assignment]
        with pytest.raises(
            ConnectError, match=r"within 0.4 s \(it is busy: refused: the listener has no descriptor left\)"
        ):
            await host.dial(timeout=0.4)
        limiter._sock = real
        assert (await host.pair())[0].same_host

    async def test_a_refusal_that_came_before_the_connection_broke(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A reason that arrived before the hello was sent is not lost to a broken pipe."""
        refused = codec.frame(codec.encode("refuse", {"code": "connect", "text": "no room"}))

        async def send(channel: Any, data: bytes) -> None:
            while (packet := channel.receive()) is None:
                await asyncio.sleep(0)
            monkeypatch.setattr(channel, "receive", lambda: packet)
            raise PeerDownError("the TCP connection broke: Broken pipe")

        monkeypatch.setattr(socket_io, "send", send)

        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            dialling = asyncio.ensure_future(dial(Address(*server.getsockname()), identity()))
            theirs, _ = await asyncio.get_running_loop().sock_accept(server)
            theirs.send(refused)
            with pytest.raises(ConnectError, match="refused: no room"):
                await dialling
            theirs.close()

    async def test_the_listener_closes_meanwhile(self, listen: HostFactory) -> None:
        host = await listen()
        stranger = await Stranger.connect(host.address)
        asked = asyncio.Event()

        def ask() -> Identity:
            asked.set()
            return host.identity

        host.listener._identity_factory = ask
        dialling = asyncio.ensure_future(host.dial())
        await asked.wait()
        await host.listener.aclose()
        await host.listener.aclose()
        with pytest.raises(ConnectError):
            await dialling
        await stranger.closed()
        stranger.close()


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "address"),
        [
            ("localhost:1", ("localhost", 1)),
            (":5000", ("127.0.0.1", 5000)),
            ("[::1]:5000", ("::1", 5000)),
            ("[2001:db8::102]:80", ("2001:db8::102", 80)),
        ],
    )
    def test_is_read(self, text: str, address: tuple[str, int]) -> None:
        assert Address.parse(text) == address
        assert parse_address(text) == address

    @pytest.mark.parametrize("text", ["2001:db8::102", "::1:5000", "::1", "2001:db8::beef", "fe80::1%eth0:99"])
    def test_of_version_6_needs_brackets(self, text: str) -> None:
        with pytest.raises(InvalidArgumentError, match=rf"write \[{re.escape(text)}\]:PORT"):
            parse_address(text)

    def test_of_version_6_with_a_port_needs_brackets(self) -> None:
        with pytest.raises(InvalidArgumentError, match=r"or \[::1\]:5000 if 5000 is the port$"):
            parse_address("::1:5000")

    @pytest.mark.parametrize(
        "value",
        [
            *(
                "[::1]",
                "[::1:5000",
                "::1]:5000",
                "host",
                "host:",
                "host:65536",
                "host:-1",
                "",
                "\0:5",
                "\ud800:5",
                "h:1" * 9,
            ),
            *("host:" + "9" * 5000, None, 7, b"host:1", ("host", 1)),
            *(Address("h", -1), Address("h", 70000), Address("h", True), Address("h", 5.5), Address("h", "5")),  # type: ignore[arg-type]
            *(Address("", 5), Address(None, 5), Address(5, 5), Address("\0", 5), Address("\ud800", 5)),  # type: ignore[arg-type]
        ],
        ids=lambda value: ascii(value)[:20],
    )
    def test_of_other_forms_is_refused(self, value: Any) -> None:
        message = "must look like 'host:port' with a port in 0..65535, not|needs brackets"
        with pytest.raises(ValueError, match=message):
            Address.parse(value)
        with pytest.raises(InvalidArgumentError, match=message):
            parse_address(value)
        if isinstance(value, Address):
            with pytest.raises(InvalidArgumentError, match=message):
                EngineConfig(address=value, name="engine")


class TestListen:
    async def test_on_a_privileged_port(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        def bind(self: object, address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(listener_module.socket, "socket", type("Socket", (socket.socket,), {"bind": bind}))
        with pytest.raises(ConnectError, match="Permission denied; a port below 1024 needs CAP_NET_BIND_SERVICE"):
            await listen(Address("127.0.0.1", 80))

    async def test_without_an_address(self, listen: HostFactory) -> None:
        before = len(os.listdir("/proc/self/fd"))
        host = await listen(None)
        assert host.listener.address is None
        assert len(os.listdir("/proc/self/fd")) == before

    async def test_on_a_port_that_is_taken(self, listen: HostFactory) -> None:
        host = await listen()
        with pytest.raises(AddressInUseError, match=str(host.address)) as caught:
            await listen(host.address)
        assert caught.value.retryable

    async def test_on_the_same_port_again(self, listen: HostFactory) -> None:
        host = await listen()
        await host.pair()
        await host.listener.aclose()
        again = await listen(host.address)
        assert again.address == host.address
        await again.pair()

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:10.0.0.1", "10.1.2.3", "8.8.8.8"])
    async def test_on_all_interfaces_without_a_secret(self, listen: HostFactory, host: str) -> None:
        with pytest.raises(InvalidArgumentError, match=r"other machines.*secret="):
            await listen(Address(host, 0))

    async def test_on_an_address_of_another_machine(self, listen: HostFactory) -> None:
        with pytest.raises(InvalidArgumentError, match="not an address of this machine"):
            await listen(Address("192.0.2.1", 0), secret=SECRET)

    @pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE])
    async def test_where_the_system_forbids_it(
        self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def fails(*args: object) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr("hixl_async.control.listener.socket.socket", fails)
            with pytest.raises(ConnectError, match=f"cannot listen on 127.0.0.1:0: {os.strerror(code)}"):
                await listen()
        monkeypatch.setattr(listener_module, "Rendezvous", lambda *args, **options: fails())
        with pytest.raises(ConnectError, match=f"cannot create a Unix socket: {os.strerror(code)}"):
            await listen()

    async def test_on_a_name_that_is_unknown(self, listen: HostFactory) -> None:
        with pytest.raises(UnknownHostError, match="cannot be found"):
            await listen(Address("no such host.invalid", 0), secret=SECRET)

    async def test_in_a_directory_that_does_not_exist(self, listen: HostFactory, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("")
        for path in (tmp_path / "missing", file):
            with pytest.raises(InvalidArgumentError, match="unix_dir must be a directory"):
                await listen(unix_dir=str(path))

    async def test_until_it_is_closed(self, listen: HostFactory) -> None:
        host = await listen()
        mine, theirs = await host.pair()
        inbox = Inbox(theirs)
        mine.start(print, print)
        await host.listener.aclose()
        with pytest.raises(ConnectError):
            await host.dial()
        mine.send("still", {"there": True})
        assert (await inbox.get()).kind == "still"

    async def test_an_owner_that_fails(self, listen: HostFactory, loop_errors: list[dict[str, Any]]) -> None:
        taken = []

        def fails(connection: Connection) -> None:
            taken.append(connection)
            raise RuntimeError("no room")

        host = await listen(on_connection=fails)
        mine = await host.dial()
        assert "closed" in str(await Inbox(mine).lost)
        assert isinstance(loop_errors[0]["exception"], RuntimeError)
        loop_errors.clear()
        await taken[0].aclose()

    async def test_an_identity_factory_that_fails(self, loop_errors: list[dict[str, Any]]) -> None:
        def fails() -> Any:
            raise RuntimeError("unknown")

        listener = await Listener.open(ANYWHERE, fails, on_connection=print)
        assert listener.address is not None
        with pytest.raises(ConnectError, match="broke off"):
            await dial(listener.address, identity())
        await listener.aclose()
        assert isinstance(loop_errors[0]["exception"], RuntimeError)
        loop_errors.clear()

    async def test_refusals_are_logged_without_secrets(
        self, listen: HostFactory, caplog: pytest.LogCaptureFixture
    ) -> None:
        host = await listen(secret=SECRET)
        with caplog.at_level("DEBUG"), pytest.raises(AuthenticationError):
            await host.dial(secret=b"another secret")
        assert "does not know the secret" in caplog.text
        assert SECRET.decode() not in caplog.text
        assert "another secret" not in caplog.text


class TestInTheMiddle:
    async def test_a_relay_of_tcp_without_a_secret(self, listen: HostFactory) -> None:
        host = await listen()
        async with relay(host.address) as address:
            with pytest.raises(AuthenticationError, match="the TCP connection is relayed"):
                await dial(address, identity())
        assert isinstance(await host.refused.get(), AuthenticationError)

    async def test_a_relay_of_tcp_with_a_secret_is_cut_out(self, listen: HostFactory) -> None:
        host = await listen(secret=SECRET)
        async with relay(host.address) as address:
            mine = await dial(address, identity(), secret=SECRET)
            host.mine.append(mine)
        inbox = Inbox(await host.connections.get())
        mine.start(print, print)
        mine.send("direct", {})
        assert (await inbox.get()).kind == "direct"

    async def test_a_relay_that_names_its_own_socket(self, listen: HostFactory) -> None:
        """It controls both transports and knows no secret: it is another user, or one that was refused."""
        host = await listen(secret=SECRET)
        with foreign_rendezvous() as (theirs, name):

            def alter(data: bytes) -> bytes:
                message = codec.decode(data[4:])
                return codec.frame(codec.encode(message.kind, {**message.body, "socket": f"abstract:{name.token}"}))

            async with relay(host.address, alter) as address:
                dialling = asyncio.ensure_future(dial(address, identity(), secret=SECRET))
                loop = asyncio.get_running_loop()
                relayed, _ = await loop.sock_accept(theirs)
                prove = await loop.sock_recv(relayed, 65536)
                # The proof does not fit what the listener said, so that passing it on does not help.
                sock = rendezvous.connect(host.listener._rendezvous.name, None)  # type: ignore[union-attr]
                await loop.sock_sendall(sock, prove)
                await loop.sock_sendall(relayed, await loop.sock_recv(sock, 65536))
                with pytest.raises(AuthenticationError, match="does not know the secret"):
                    await dialling
                relayed.close()
                sock.close()
        assert isinstance(await host.refused.get(), AuthenticationError)

    async def test_altered_messages_after_the_handshake(
        self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host = await listen(secret=SECRET)
        elsewhere(monkeypatch)

        def alter(data: bytes) -> bytes:
            return data.replace(b"friend", b"foe---")

        async with relay(host.address, alter) as address:
            mine = await dial(address, identity(), secret=SECRET)
            host.mine.append(mine)
            theirs = await host.connections.get()
            inbox = Inbox(mine)
            theirs.start(print, print)
            theirs.send("first", {})
            assert (await inbox.get()).kind == "first"
            theirs.send("from", {"a": "friend"})
            assert "seal" in str(await inbox.lost)
            assert inbox.messages.empty()

    async def test_a_squatter_without_a_secret(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another user has the name; in this test it only seems to be another user."""
        host = await listen()
        monkeypatch.setattr(
            dialler_module, "peer_credentials", lambda sock: process.Credentials(os.getpid(), os.geteuid() + 1, 0)
        )
        with pytest.raises(AuthenticationError, match="the listener is not the same user"):
            await host.dial()
        await host.refused.get()


def process_of(pidfd: int) -> int:
    """Return the process that a pidfd refers to."""
    return int(Path(f"/proc/self/fdinfo/{pidfd}").read_text().partition("Pid:")[2].split()[0])


def established_on(port: int) -> int:
    """Return established TCP connections of this machine to or from `port`."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(f":{port:04X}" in row[1] + row[2] and row[3] == "01" for row in rows)


@contextlib.asynccontextmanager
async def relay(address: Address, alter: Callable[[bytes], bytes] = lambda data: data) -> AsyncIterator[Address]:
    """Relay TCP to `address`; `alter` sees what the listener sends."""
    ends: list[asyncio.StreamWriter] = []
    served: list[asyncio.Future[None]] = []

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, alter: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                target.write(alter(data))
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        done = asyncio.get_running_loop().create_future()
        served.append(done)
        there, back = await asyncio.open_connection(*address)
        ends.extend((writer, back))
        await asyncio.gather(pump(reader, back, lambda data: data), pump(there, writer, alter))
        for end in (writer, back):
            with contextlib.suppress(ConnectionError):
                await end.wait_closed()
        done.set_result(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield Address(*server.sockets[0].getsockname())
    server.close()
    for end in ends:
        end.close()
    await asyncio.gather(*served)
    await server.wait_closed()


class foreign_rendezvous:
    def __enter__(self) -> tuple[socket.socket, rendezvous.RendezvousName]:
        self._rendezvous = rendezvous.Rendezvous(None, other_users=True)
        return self._rendezvous.sock, self._rendezvous.name

    def __exit__(self, *_: object) -> None:
        self._rendezvous.close()
