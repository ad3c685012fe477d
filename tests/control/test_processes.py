"""The other side is another process, another user, or lives in other namespaces."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import hixl_async
from hixl_async.control import dial
from hixl_async.errors import AuthenticationError, ConnectError, PeerDownError

from .sides import SECRET, HostFactory, Inbox, identity, memory

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")

OTHER_UID = 54321
THERE = Path(__file__).with_name("other_side.py")


class OtherSide:
    """Another process, and what it says."""

    def __init__(self, *arguments: str) -> None:
        package = str(Path(hixl_async.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": package},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    async def line(self) -> str:
        assert self.process.stdout is not None
        return await asyncio.to_thread(self.process.stdout.readline)

    async def says(self) -> dict[str, Any]:
        line = await self.line()
        fact: dict[str, Any] = json.loads(line) if line else {"event": "end"}
        if fact["event"] == "impossible":
            pytest.skip(fact["why"])
        return fact

    async def end(self) -> int:
        self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return await asyncio.to_thread(self.process.wait)


@contextlib.asynccontextmanager
async def other_side(*, program: tuple[str, ...] = (str(THERE),), **options: Any) -> AsyncIterator[OtherSide]:
    if options.get("secret"):
        options["secret"] = base64.b64encode(options["secret"]).decode()
    other = OtherSide(*program, json.dumps(options))
    try:
        yield other
    finally:
        await other.end()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user can enter."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


class TestAnotherProcess:
    @pytest.mark.parametrize("secret", [None, SECRET])
    async def test_exchanges_messages_and_descriptors(self, listen: HostFactory, secret: bytes | None) -> None:
        host = await listen(secret=secret)
        async with other_side(port=host.address.port, secret=secret) as other:
            theirs = await host.connections.get()
            assert theirs.credentials == (other.pid, os.geteuid(), os.getegid())
            fact = await other.says()
            assert fact == {
                "event": "connected",
                "same_host": True,
                "fallback": "",
                "credentials": [os.getpid(), os.geteuid(), os.getegid()],
            }
            inbox = Inbox(theirs)
            descriptor = memory(b"from us")
            theirs.send("take", {"a": [1, None]}, [descriptor])
            os.close(descriptor)
            assert (await other.says())["contents"] == ["from us"]
            kind, body, [received] = await inbox.get()
            assert (kind, body) == ("answer", {"a": [1, None]})
            assert os.pread(received, 100, 0) == b"from the other side"
            os.close(received)
            theirs.send("bye", {})
            assert (await other.says())["why"] == "bye"
            assert isinstance(await inbox.lost, PeerDownError)

    async def test_is_killed(self, listen: HostFactory) -> None:
        host = await listen()
        async with other_side(port=host.address.port) as other:
            theirs = await host.connections.get()
            inbox = Inbox(theirs)
            died = asyncio.Event()
            assert theirs.pidfd is not None
            asyncio.get_running_loop().add_reader(theirs.pidfd, died.set)
            theirs.send("die", {})
            assert isinstance(await inbox.lost, PeerDownError)
            await died.wait()
            asyncio.get_running_loop().remove_reader(theirs.pidfd)
            assert await other.end() == -signal.SIGKILL

    async def test_is_stopped_and_does_not_read(self, listen: HostFactory) -> None:
        host = await listen()
        async with other_side(port=host.address.port) as other:
            theirs = await host.connections.get()
            inbox = Inbox(theirs)
            await other.says()
            other.process.send_signal(signal.SIGSTOP)
            while not theirs._queue:
                theirs.send("n", {"text": "y" * 10_000})
            assert not inbox.lost.done()
            other.process.send_signal(signal.SIGCONT)
            assert (await other.says())["event"] == "message"
            kind, _, [received] = await inbox.get()
            assert kind == "answer"
            os.close(received)
            other.process.kill()
            await inbox.lost
            while not inbox.messages.empty():
                os.close(inbox.messages.get_nowait().fds[0])

    async def test_that_listens_is_stopped(self, listen: HostFactory) -> None:
        code = (
            "import asyncio, sys\n"
            "from hixl_async.control import Identity, Listener\n"
            "from hixl_async.types import Address\n"
            "async def main():\n"
            "    me = Identity('stopped', '', 'a' * 32, '', ())\n"
            "    l = await Listener.open(Address('127.0.0.1', 0), lambda: me, on_connection=print)\n"
            "    print(l.address.port, flush=True)\n"
            "    await asyncio.Event().wait()\n"
            "asyncio.run(main())"
        )
        async with other_side(program=("-c", code)) as other:
            address = hixl_async.Address("127.0.0.1", int(await other.line()))
            other.process.send_signal(signal.SIGSTOP)
            with pytest.raises(ConnectError, match=r"did not answer within 0.2 s \(waiting for an answer over tcp\)"):
                await dial(address, identity(), timeout=0.2)
        with pytest.raises(ConnectError, match="refused"):
            await dial(address, identity())

    async def test_that_is_our_child_leaves_the_listener_alone(self, listen: HostFactory, shared: Path) -> None:
        for unix_dir in (None, str(shared)):
            host = await listen(unix_dir=unix_dir)
            connection, _ = await host.pair()
            child = os.fork()
            if child == 0:
                host.listener.abandon()
                connection.abandon()
                os._exit(0)
            await asyncio.to_thread(os.waitpid, child, 0)
            assert (await host.pair())[0].same_host


@as_root
class TestAnotherUser:
    async def test_is_refused_without_a_secret(self, listen: HostFactory) -> None:
        host = await listen()
        async with other_side(port=host.address.port, uid=OTHER_UID) as other:
            fact = await other.says()
            assert (fact["event"], fact["kind"]) == ("failed", "AuthenticationError")
            assert "the listener is not the same user: it runs as user 0, this side as user 54321" in fact["text"]
        assert host.connections.empty()

    async def test_is_refused_by_the_listener_too(self, listen: HostFactory) -> None:
        """The dialler does not check who listens."""
        host = await listen()
        code = THERE.read_text().replace(
            "    me = Identity(",
            "    from hixl_async.control.process import LocalUser\n"
            "    LocalUser.objection = lambda self, other: None\n    me = Identity(",
        )
        async with other_side(program=("-c", code), port=host.address.port, uid=OTHER_UID) as other:
            fact = await other.says()
        assert fact["kind"] == "AuthenticationError"
        assert "the dialler is not the same user: it runs as user 54321, this side as user 0" in fact["text"]
        assert isinstance(await host.refused.get(), AuthenticationError)

    @pytest.mark.parametrize("way", ["abstract", "directory"])
    async def test_is_welcome_with_the_secret(self, listen: HostFactory, shared: Path, way: str) -> None:
        unix_dir = str(shared) if way == "directory" else None
        host = await listen(secret=SECRET, unix_dir=unix_dir)
        async with other_side(port=host.address.port, uid=OTHER_UID, secret=SECRET, unix_dir=unix_dir) as other:
            theirs = await host.connections.get()
            assert theirs.credentials == (other.pid, OTHER_UID, OTHER_UID)
            assert theirs.pidfd is not None
            fact = await other.says()
            assert fact["same_host"]
            assert fact["credentials"][:2] == [os.getpid(), 0]
            inbox = Inbox(theirs)
            theirs.send("take", {}, [])
            _, _, [received] = await inbox.get()
            os.close(received)

    async def test_is_refused_with_another_secret(self, listen: HostFactory) -> None:
        host = await listen(secret=SECRET)
        async with other_side(port=host.address.port, uid=OTHER_UID, secret=b"guessed") as other:
            assert (await other.says())["kind"] == "AuthenticationError"
        assert host.connections.empty()

    async def test_cannot_connect_to_our_file_without_a_secret(self, listen: HostFactory, shared: Path) -> None:
        host = await listen(unix_dir=str(shared))
        async with other_side(port=host.address.port, uid=OTHER_UID, unix_dir=str(shared)) as other:
            fact = await other.says()
            assert fact["kind"] == "AuthenticationError"
            assert "Permission denied" in fact["text"]


@as_root
class TestOtherNamespaces:
    async def test_of_the_network_leave_tcp(self, listen: HostFactory) -> None:
        host = await listen(secret=SECRET)
        async with other_side(port=host.address.port, network=True, secret=SECRET) as other:
            fact = await other.says()
            assert fact["event"] == "connected", fact
            assert not fact["same_host"]
            assert "different network namespaces" in fact["fallback"]
            theirs = await host.connections.get()
            inbox = Inbox(theirs)
            theirs.send("n", {"a": 1})
            assert await inbox.get() == ("answer", {"a": 1}, [])

    async def test_of_the_network_are_refused_without_a_secret(self, listen: HostFactory) -> None:
        host = await listen()
        async with other_side(port=host.address.port, network=True) as other:
            fact = await other.says()
            assert fact["kind"] == "AuthenticationError"
            assert "different network namespaces" in fact["text"]

    @pytest.mark.parametrize("secret", [None, SECRET])
    async def test_of_the_network_share_a_directory(
        self, listen: HostFactory, shared: Path, secret: bytes | None
    ) -> None:
        host = await listen(secret=secret, unix_dir=str(shared))
        async with other_side(port=host.address.port, network=True, unix_dir=str(shared), secret=secret) as other:
            fact = await other.says()
            assert fact["event"] == "connected", fact
            assert fact["same_host"]
            assert (await host.connections.get()).credentials == (other.pid, 0, 0)

    async def test_of_users_make_all_users_look_unmapped(self, listen: HostFactory) -> None:
        host = await listen()
        async with other_side(port=host.address.port, user_namespace=True) as other:
            fact = await other.says()
            assert fact["event"] == "failed", fact
            assert fact["kind"] == "AuthenticationError"
            assert "stands for every user without a name" in fact["text"]
