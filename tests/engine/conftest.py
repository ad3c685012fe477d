"""Engines in pairs, for the tests of this folder."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from hixl_async import Engine
from hixl_async.testing import EnginePair, engine_pair

if importlib.util.find_spec("uvloop") is not None:
    import uvloop

    # The first lookup of a name starts threads that stay, which is no leak of the test that comes first.
    _loop = uvloop.new_event_loop()
    _loop.run_until_complete(_loop.getaddrinfo("localhost", 0))
    _loop.close()


@pytest.fixture
async def pair() -> AsyncIterator[EnginePair]:
    """Two connected engines."""
    async with engine_pair() as pair:
        yield pair


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """One engine that listens."""
    async with Engine("127.0.0.1:0", name="engine", close_timeout=1) as engine:
        yield engine


@contextlib.contextmanager
def deaf() -> Iterator[str]:
    """The address of a listener that never answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield f"127.0.0.1:{sock.getsockname()[1]}"
