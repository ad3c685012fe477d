"""The listening socket, which accepts no more connections than can be served."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from hixl_async.control import accept_limiter
from hixl_async.control.accept_limiter import AcceptLimiter
from hixl_async.errors import BusyError, HixlError

from .sides import closed, passes


class Scene:
    """A limiter whose handshakes last until they are told to end, and the clients that connect to it."""

    def __init__(self, capacity: int = 3, patience: float = 60.0, silence: float = 60.0) -> None:
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(100)
        self.sock.setblocking(False)
        self.end = asyncio.Event()
        self.began: asyncio.Queue[socket.socket] = asyncio.Queue()
        self.most = 0
        self.refused: list[HixlError] = []
        self.limiter = AcceptLimiter(
            self.sock, self._perform, self._refuse, capacity=capacity, patience=patience, silence=silence
        )
        self.clients: list[socket.socket] = []

    async def _perform(self, sock: socket.socket) -> None:
        self.most = max(self.most, len(self.limiter))
        self.began.put_nowait(sock)
        await self.end.wait()
        sock.close()

    def _refuse(self, sock: socket.socket, error: HixlError) -> None:
        sock.send(str(error).encode())
        self.refused.append(error)

    async def connect(self, first: bytes = b"hello") -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        self.clients.append(sock)
        await asyncio.get_running_loop().sock_connect(sock, self.sock.getsockname())
        sock.send(first)
        return sock

    async def aclose(self) -> None:
        self.limiter.close()
        await self.limiter.wait_empty()
        self.sock.close()
        for sock in self.clients:
            sock.close()


@pytest_asyncio.fixture
async def scenes(loop_errors: list[dict[str, Any]]) -> AsyncIterator[list[Scene]]:
    scenes: list[Scene] = []
    yield scenes
    for scene in scenes:
        await scene.aclose()


class TestHandshakes:
    async def test_are_bounded_in_number(self, scenes: list[Scene]) -> None:
        scenes.append(scene := Scene(capacity=3))
        for _ in range(10):
            await scene.connect()
        for _ in range(3):
            await scene.began.get()
        await passes(20)
        assert scene.began.empty()
        assert len(scene.limiter) == 3
        scene.end.set()
        for _ in range(7):
            await scene.began.get()
        await passes(5)
        assert scene.most <= 3
        assert len(scene.limiter) == 0

    async def test_begin_one_after_the_other(self, scenes: list[Scene]) -> None:
        scenes.append(scene := Scene(capacity=1))
        scene.end.set()
        for _ in range(20):
            await scene.connect()
            await scene.began.get()

    async def test_the_oldest_is_cancelled_while_others_wait(self, scenes: list[Scene]) -> None:
        scenes.append(scene := Scene(capacity=2, patience=0.05))
        first, second = await scene.connect(), await scene.connect()
        await scene.began.get()
        await scene.began.get()
        await scene.connect()
        await scene.began.get()
        await closed(first)
        await scene.connect()
        await closed(second)

    async def test_none_is_cancelled_while_there_is_room(self, scenes: list[Scene]) -> None:
        scenes.append(scene := Scene(capacity=2, patience=0.0))
        await scene.connect()
        await scene.began.get()
        await passes(20)
        assert len(scene.limiter) == 1
        assert scene.limiter._patience_timer is None

    async def test_none_is_cancelled_because_the_loop_is_late(self, scenes: list[Scene]) -> None:
        scenes.append(scene := Scene(capacity=1, patience=60))
        await scene.connect()
        await scene.began.get()
        [handshake] = scene.limiter._handshakes.values()
        now = asyncio.get_running_loop().time()
        scene.limiter._cancel_oldest(handshake, due=now - 30)
        assert not handshake.task.cancelling()
        assert scene.limiter._patience_timer is not None
        assert scene.limiter._patience_timer.when() >= now + 60
        scene.limiter._patience_timer.cancel()
        scene.limiter._cancel_oldest(handshake, due=now)
        assert handshake.task.cancelling()

    async def test_a_failure_is_reported(
        self, scenes: list[Scene], loop_errors: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scenes.append(scene := Scene())

        async def fails(sock: socket.socket) -> None:
            raise RuntimeError("unexpected")

        scene.limiter._perform = fails
        await closed(await scene.connect())
        assert str(loop_errors[0]["exception"]) == "unexpected"
        loop_errors.clear()


class TestClose:
    async def test_ends_everything(self, scenes: list[Scene], monkeypatch: pytest.MonkeyPatch) -> None:
        scenes.append(scene := Scene(capacity=2))
        inside = [await scene.connect() for _ in range(2)]
        for _ in inside:
            await scene.began.get()
        waiting, silent = await scene.connect(), await scene.connect(b"")
        while not (scene.limiter.silent and scene.limiter._waiting):
            await passes(1)
        unaccepted = await scene.connect()
        scene.limiter.close()
        scene.limiter.close()
        await scene.limiter.wait_empty()
        for sock in inside:
            await closed(sock)
        for sock in (waiting, silent):
            assert b"closes" in await closed(sock)
        scene.sock.close()
        await closed(unaccepted)

    async def test_ends_handshakes_that_have_not_begun(self, scenes: list[Scene]) -> None:
        scenes.append(scene := Scene(capacity=5))
        scene.clients += [socket.create_connection(scene.sock.getsockname()) for _ in range(5)]
        scene.limiter._accept()
        for sock in list(scene.limiter._silent):
            scene.limiter._spoke(sock)
        assert len(scene.limiter) == 5
        scene.limiter.close()
        await scene.limiter.wait_empty()
        assert scene.began.empty()


async def test_a_pass_accepts_a_bounded_number(scenes: list[Scene]) -> None:
    """However many clients have connected."""
    scenes.append(scene := Scene(capacity=50))
    for _ in range(60):
        await scene.connect(b"")
    while scene.limiter.silent < 60:
        await passes(1)
    before = scene.limiter.silent
    for _ in range(30):
        client = socket.create_connection(scene.sock.getsockname())
        scene.clients.append(client)
    scene.limiter._accept()
    assert scene.limiter.silent - before == accept_limiter._ACCEPTED_PER_PASS


class TestSilence:
    async def test_makes_room(self, scenes: list[Scene], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accept_limiter, "_MOST_WAITING", 3)
        scenes.append(scene := Scene())
        silent = [await scene.connect(b"") for _ in range(40)]
        await scene.connect()
        await scene.began.get()
        assert scene.limiter.silent <= 3
        assert b"others need its place" in await closed(silent[0])
        assert all(isinstance(error, BusyError) for error in scene.refused)

    async def test_takes_no_handshake(self, scenes: list[Scene]) -> None:
        scenes.append(scene := Scene(capacity=1, patience=60))
        for _ in range(20):
            await scene.connect(b"")
        await scene.connect()
        await scene.began.get()

    async def test_is_ended(self, scenes: list[Scene]) -> None:
        scenes.append(scene := Scene(silence=0.03))
        silent = [await scene.connect(b"") for _ in range(3)]
        for sock in silent:
            assert b"took longer than 0.03 s" in await closed(sock)
        assert scene.limiter.silent == 0

    async def test_of_closed_connections_takes_no_room(self, scenes: list[Scene]) -> None:
        scenes.append(scene := Scene())
        (await scene.connect(b"")).close()
        await scene.began.get()
        assert scene.limiter.silent == 0

    async def test_does_not_displace_connections_that_wait(
        self, scenes: list[Scene], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When all places are taken by connections that have sent something, the rest waits in the kernel."""
        monkeypatch.setattr(accept_limiter, "_MOST_WAITING", 2)
        scenes.append(scene := Scene(capacity=1))
        for _ in range(6):
            client = socket.create_connection(scene.sock.getsockname())
            client.send(b"hello")
            scene.clients.append(client)
        await scene.began.get()
        async with asyncio.timeout(10):
            while scene.limiter._accepting:
                await passes(1)
        assert not scene.refused
        scene.end.set()
        for _ in range(5):
            await scene.began.get()


class Failing:
    """A listening socket whose accept() fails as often as it is told to."""

    def __init__(self, sock: socket.socket, code: int, times: int) -> None:
        self._sock = sock
        self._code = code
        self.times = times
        self.calls = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> tuple[socket.socket, Any]:
        self.calls += 1
        if self.times:
            self.times -= 1
            raise OSError(self._code, os.strerror(self._code))
        return self._sock.accept()


class TestExhaustion:
    async def test_of_memory_is_waited_for(self, scenes: list[Scene], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accept_limiter, "_RETRY", 0.05)
        scenes.append(scene := Scene())
        failing = scene.limiter._sock = Failing(scene.sock, errno.ENOMEM, 2)  # type: ignore[assignment]
        await scene.connect()
        await scene.began.get()
        assert failing.calls <= 6  # not as often as the loop came round

    async def test_of_descriptors_is_reported_to_the_client(
        self, scenes: list[Scene], caplog: pytest.LogCaptureFixture
    ) -> None:
        scenes.append(scene := Scene())
        failing = scene.limiter._sock = Failing(scene.sock, errno.EMFILE, 1)  # type: ignore[assignment]
        with caplog.at_level(logging.WARNING, "hixl_async.control"):
            assert b"no descriptor left" in await closed(await scene.connect())
            failing.times = 1
            assert b"no descriptor left" in await closed(await scene.connect())
        [record] = caplog.records  # the second time is within the interval
        assert "ulimit -n" in record.getMessage()
        assert str(accept_limiter.descriptor_limit()) in record.getMessage()
        await scene.connect()
        await scene.began.get()

    async def test_of_descriptors_makes_the_silent_give_theirs_back(self, scenes: list[Scene]) -> None:
        scenes.append(scene := Scene())
        silent = await scene.connect(b"")
        while not scene.limiter.silent:
            await passes(1)
        scene.limiter._sock = Failing(scene.sock, errno.EMFILE, 1)  # type: ignore[assignment]
        await scene.connect()
        await scene.began.get()
        assert b"no descriptor left" in await closed(silent)

    async def test_of_descriptors_without_a_spare_one_is_waited_for(
        self, scenes: list[Scene], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(accept_limiter, "_RETRY", 0.05)
        monkeypatch.setattr(accept_limiter, "_spare_descriptor", lambda: None)
        scenes.append(scene := Scene())
        failing = scene.limiter._sock = Failing(scene.sock, errno.EMFILE, 2)  # type: ignore[assignment]
        await scene.connect()
        await scene.began.get()
        assert failing.calls <= 6


async def test_a_connection_that_was_closed_before_is_forgotten(scenes: list[Scene]) -> None:
    scenes.append(scene := Scene())
    scene.limiter._sock = Failing(scene.sock, errno.ECONNABORTED, 3)  # type: ignore[assignment]
    await scene.connect()
    await scene.began.get()
