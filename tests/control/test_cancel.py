"""Dialling and listening can be cancelled wherever they wait, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from hixl_async.control import Connection, Listener, dial
from hixl_async.errors import ConnectError
from hixl_async.types import Address

from .sides import SECRET, HostFactory, elsewhere, identity, passes


async def cancelled_after(turns: int, work: Coroutine[Any, Any, Any]) -> Any:
    """Cancel `work` after so many passes of the loop; return its result if it was done before."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await passes(1)
        if task.done():
            return await task
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


@pytest.mark.parametrize("way", ["same user", "unix", "tcp", "by name", "refused"])
async def test_a_dial_leaves_nothing(listen: HostFactory, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    host = await listen(Address("localhost", 0), secret=None if way == "same user" else SECRET)
    if way == "tcp":
        elsewhere(monkeypatch)
    where = host.address if way == "by name" else Address("127.0.0.1", host.address.port)
    secret = b"wrong" if way == "refused" else host.secret
    if host.listener._tcp is not None and host.listener._tcp.getsockname()[0] == "::1":
        where = Address("::1", host.address.port)
    before = len(os.listdir("/proc/self/fd"))
    done = 0
    for turns in range(200):
        try:
            connection = await cancelled_after(turns, dial(where, identity(), secret=secret))
        except ConnectError:
            assert way == "refused"
            connection = None
            done += 1
        if isinstance(connection, Connection):
            await connection.aclose()
            done += 1
        for limiter in host.listener._accepting:
            while limiter.silent or len(limiter):
                await passes(1)
        while not host.connections.empty():
            await host.connections.get_nowait().aclose()
        # A thread that looks up a name cannot be cancelled, and may have files open meanwhile.
        assert way == "by name" or len(os.listdir("/proc/self/fd")) == before
        assert not host.listener._replies
        if done == 3:
            return
    pytest.fail("dialling never got through")


async def test_dial_to_a_listener_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        dialling = asyncio.ensure_future(dial(Address(*deaf.getsockname()), identity(), timeout=60))
        await passes(20)
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling


async def test_listening_leaves_nothing() -> None:
    for turns in range(200):
        listener = await cancelled_after(
            turns, Listener.open(Address("localhost", 0), identity, on_connection=lambda _: None)
        )
        if listener is not None:
            await listener.aclose()
            return
    pytest.fail("listening never began")


async def test_close_a_listener(listen: HostFactory) -> None:
    for turns in range(6):
        host = await listen()
        dialling = [asyncio.ensure_future(host.dial()) for _ in range(3)]
        await passes(turns)
        await cancelled_after(turns, host.listener.aclose())
        await asyncio.gather(*dialling, return_exceptions=True)
        await host.listener.aclose()


async def test_close_a_listener_at_every_moment_of_a_handshake(listen: HostFactory) -> None:
    """A dialler is either refused or has a connection that ends."""
    for turns in range(40):
        host = await listen()
        dialling = asyncio.ensure_future(host.dial())
        await passes(turns)
        await host.listener.aclose()
        try:
            await dialling
        except ConnectError:
            continue
        await passes(5)
        assert not host.connections.empty()
