"""The listening socket that lets in no more than fit."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from hixl_async.control import door as door_module
from hixl_async.control.door import Door

from .sides import passes


class House:
    """A door, and visitors who stay until they are told to leave."""

    def __init__(self, capacity: int = 3, patience: float = 60.0) -> None:
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(100)
        self.sock.setblocking(False)
        self.leave = asyncio.Event()
        self.came: asyncio.Queue[socket.socket] = asyncio.Queue()
        self.most = 0
        self.door = Door(self.sock, self._visit, capacity=capacity, patience=patience)
        self.outside: list[socket.socket] = []

    async def _visit(self, sock: socket.socket) -> None:
        self.most = max(self.most, len(self.door))
        self.came.put_nowait(sock)
        await self.leave.wait()
        sock.close()

    async def knock(self) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        self.outside.append(sock)
        await asyncio.get_running_loop().sock_connect(sock, self.sock.getsockname())
        return sock

    async def aclose(self) -> None:
        self.door.close()
        await self.door.wait_empty()
        self.sock.close()
        for sock in self.outside:
            sock.close()


@pytest_asyncio.fixture
async def houses(loop_errors: list[dict[str, Any]]) -> AsyncIterator[list[House]]:
    houses: list[House] = []
    yield houses
    for house in houses:
        await house.aclose()


async def shown_out(sock: socket.socket) -> None:
    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""


async def test_no_more_than_fit_are_inside(houses: list[House]) -> None:
    houses.append(house := House(capacity=3))
    for _ in range(10):
        await house.knock()
    for _ in range(3):
        await house.came.get()
    await passes(20)
    assert house.came.empty()
    assert len(house.door) == 3
    house.leave.set()
    for _ in range(7):
        await house.came.get()
    await passes(5)
    assert house.most <= 3
    assert len(house.door) == 0


async def test_who_comes_later_is_let_in(houses: list[House]) -> None:
    houses.append(house := House(capacity=1))
    house.leave.set()
    for _ in range(20):
        await house.knock()
        await house.came.get()


async def test_the_oldest_is_shown_out_when_others_wait(houses: list[House]) -> None:
    houses.append(house := House(capacity=2, patience=0.05))
    first, second = await house.knock(), await house.knock()
    await house.came.get()
    await house.came.get()
    loop = asyncio.get_running_loop()
    before = loop.time()
    third = await house.knock()
    await house.came.get()
    assert loop.time() - before < 1
    await shown_out(first)
    fourth = await house.knock()
    await shown_out(second)
    assert third.fileno() != fourth.fileno()


async def test_nobody_is_shown_out_while_there_is_room(houses: list[House]) -> None:
    houses.append(house := House(capacity=2, patience=0.01))
    first = await house.knock()
    await house.came.get()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await shown_out(first)


async def test_nobody_is_shown_out_because_the_loop_is_late(houses: list[House]) -> None:
    houses.append(house := House(capacity=1, patience=60))
    await house.knock()
    await house.came.get()
    [visitor] = house.door._visitors.values()
    now = asyncio.get_running_loop().time()
    house.door._show_out(visitor, due=now - 30)
    assert not visitor.task.cancelling()
    assert house.door._timer is not None
    assert house.door._timer.when() >= now + 60
    house.door._timer.cancel()
    house.door._show_out(visitor, due=now)
    assert visitor.task.cancelling()


async def test_everybody_is_shown_out_when_it_closes(houses: list[House]) -> None:
    houses.append(house := House(capacity=2))
    inside = [await house.knock() for _ in range(2)]
    for _ in inside:
        await house.came.get()
    waiting = await house.knock()
    house.door.close()
    house.door.close()
    await house.door.wait_empty()
    for sock in inside:
        await shown_out(sock)
    house.sock.close()
    with pytest.raises(ConnectionError):
        await shown_out(waiting)


async def test_also_those_who_have_not_begun(houses: list[House]) -> None:
    houses.append(house := House(capacity=5))
    for _ in range(5):
        house.outside.append(socket.create_connection(house.sock.getsockname()))
    house.door._accept()
    assert len(house.door) == 5
    house.door.close()
    await house.door.wait_empty()
    assert house.came.empty()


async def test_a_visit_that_fails_is_reported(
    houses: list[House], loop_errors: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    houses.append(house := House())

    async def fails(sock: socket.socket) -> None:
        raise RuntimeError("unexpected")

    house.door._visit = fails
    await shown_out(await house.knock())
    assert str(loop_errors[0]["exception"]) == "unexpected"
    loop_errors.clear()


class Broken:
    """A listening socket whose accept() fails as often as it is told to."""

    def __init__(self, sock: socket.socket, code: int, times: int) -> None:
        self._sock = sock
        self._code = code
        self.times = times
        self.asked = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> tuple[socket.socket, Any]:
        self.asked += 1
        if self.times:
            self.times -= 1
            raise OSError(self._code, os.strerror(self._code))
        return self._sock.accept()


async def test_out_of_descriptors_it_waits(houses: list[House], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_EXHAUSTED_RETRY", 0.05)
    houses.append(house := House())
    broken = house.door._sock = Broken(house.sock, errno.EMFILE, 2)  # type: ignore[assignment]
    await house.knock()
    await house.came.get()
    assert broken.asked <= 4  # not as often as the loop came round


async def test_who_left_before_being_let_in_is_forgotten(houses: list[House]) -> None:
    houses.append(house := House())
    house.door._sock = Broken(house.sock, errno.ECONNABORTED, 3)  # type: ignore[assignment]
    await house.knock()
    await house.came.get()
