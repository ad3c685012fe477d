"""Real servers with several worker processes, spoken to by HTTP while their workers' engines move memory."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hixl_async.testing import PeerProcess, peer_process

HERE = Path(__file__).parent
REGION = 8 << 20

#: The loop that matters here is the server's.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

UVICORN = ("-m", "uvicorn", "--workers", "2", "--port", "0", "--app-dir", str(HERE))
GUNICORN = ("-m", "gunicorn", "--no-control-socket", "--workers", "2", "--bind", "127.0.0.1:0", "--chdir", str(HERE))

each_server = pytest.mark.parametrize(
    "server",
    [
        pytest.param((*UVICORN, "--loop", "asyncio"), id="uvicorn-asyncio"),
        pytest.param((*UVICORN, "--loop", "uvloop"), id="uvicorn-uvloop"),
        pytest.param((*GUNICORN, "--worker-class", "asgi"), id="gunicorn-asgi"),
        pytest.param((*GUNICORN, "--worker-class", "uvicorn_worker.UvicornWorker"), id="gunicorn-uvicorn"),
    ],
)
each_preloading_server = pytest.mark.parametrize(
    "server",
    [
        pytest.param((*GUNICORN, "--preload", "--worker-class", "asgi"), id="gunicorn-asgi"),
        pytest.param((*GUNICORN, "--preload", "--worker-class", "uvicorn_worker.UvicornWorker"), id="gunicorn-uvicorn"),
    ],
)


class Server:
    """A server process; its log is collected."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""
        self.port = 0

    async def follow(self, ready: asyncio.Event) -> None:
        """Read the log to its end."""
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            self.log += line
            # uvicorn: "running on"; gunicorn: "Listening at:"
            if found := re.search(r"(?:running on|Listening at:) http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                ready.set()
        ready.set()

    async def listening(self) -> None:
        """Wait for the first worker: only they listen at the port that uvicorn names."""
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                await writer.wait_closed()
                return
            assert self.process.returncode is None, self.log
            await asyncio.sleep(0.01)

    def get(self, path: str) -> tuple[int, Any]:
        """Return status and body of one request, on a connection of its own, so that any worker may get it."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            client.request("GET", path)
            response = client.getresponse()
            return response.status, json.loads(response.read())
        finally:
            client.close()

    async def get_many(self, paths: Sequence[str]) -> list[tuple[int, Any]]:
        return await asyncio.gather(*(asyncio.to_thread(self.get, path) for path in paths))

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self.process.wait()


@asynccontextmanager
async def serving(command: Sequence[str], application: str, peer: PeerProcess) -> AsyncIterator[Server]:
    server = Server(
        await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            application,
            env={**os.environ, "PEER": peer.address, "PYTHONWARNINGS": "default"},
            stderr=asyncio.subprocess.PIPE,
            process_group=0,  # no session of its own: the kernel shares time between sessions, and holds some up for seconds
        )
    )
    ready = asyncio.Event()
    following = asyncio.create_task(server.follow(ready))
    try:
        await ready.wait()
        assert server.port, server.log
        await server.listening()
        yield server
        await server.stop()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)  # workers too, where a test failed
        await server.process.wait()
        await following


async def two_workers(server: Server, path: str = "/0") -> dict[int, Any]:
    """Ask until both workers have answered; return the last answer of each."""
    answers: dict[int, Any] = {}
    while len(answers) < 2:
        for status, body in await server.get_many([path] * 4):
            answers[body["pid"]] = (status, body)
    return answers


def clean(server: Server) -> None:
    """Assert that the server ended in good order, without complaints."""
    assert server.process.returncode == 0, server.log
    for word in ("Traceback", "never closed", "ResourceWarning: <Engine"):
        assert word not in server.log, server.log


@each_server
async def test_an_engine_in_each_worker(server: tuple[str, ...]) -> None:
    async with peer_process(regions={"kv": REGION}) as peer:
        async with serving(server, "apps:right", peer) as running:
            workers = await two_workers(running)
            assert {status for status, _ in workers.values()} == {200}
            assert (await peer.stats())["peers"] == 2
            slots = range(1, 41)
            answers = await running.get_many([f"/{slot}" for slot in slots])
            for slot, (status, body) in zip(slots, answers, strict=True):
                assert status == 200
                written = await peer.peek("kv", slot * 4096, slot * 4096 + 8)
                assert int.from_bytes(written, "little") == body["pid"]
            # Requests were served while transfers ran, in both workers.
            later = await two_workers(running)
            while any(later[pid][1]["rounds"] <= workers[pid][1]["rounds"] for pid in workers):
                later |= await two_workers(running)
        clean(running)
        while (await peer.stats())["peers"]:
            await asyncio.sleep(0.01)


@each_server
async def test_a_killed_worker_is_replaced(server: tuple[str, ...]) -> None:
    """The peer confirms its death, and the new worker's engine is a peer like any other."""
    async with peer_process(regions={"kv": REGION}) as peer:
        async with serving(server, "apps:right", peer) as running:
            first = await two_workers(running)
            victim = min(first)
            os.kill(victim, signal.SIGKILL)
            seen: set[int] = set()
            while len(seen - {victim}) < 2:
                try:
                    _, body = await asyncio.to_thread(running.get, "/1")
                except (ConnectionError, http.client.HTTPException):
                    continue  # it was the victim's to answer
                seen.add(body["pid"])
            while (await peer.stats())["peers"] != 2:
                await asyncio.sleep(0.01)
        while (await peer.stats())["peers"]:
            await asyncio.sleep(0.01)


@each_preloading_server
async def test_an_engine_that_was_opened_before_the_fork(server: tuple[str, ...]) -> None:
    """Every worker is told what to do instead, again and again; the master's engine goes on working."""
    async with peer_process(regions={"kv": REGION}) as peer:
        async with serving((*server, "--config", str(HERE / "apps.py")), "apps:wrong", peer) as running:
            for status, body in (await two_workers(running)).values():
                assert (status, body["error"]) == (500, "EngineForkedError")
                assert "open one in each process" in body["message"]
            assert (await peer.stats())["peers"] == 1
        clean(running)
        assert await peer.peek("kv", 0, 8) == b"the end."
        while (await peer.stats())["peers"]:
            await asyncio.sleep(0.01)


@each_preloading_server
async def test_preloading_and_an_engine_in_each_worker(server: tuple[str, ...]) -> None:
    """An application that works without preloading works with it."""
    async with peer_process(regions={"kv": REGION}) as peer:
        async with serving(server, "apps:right", peer) as running:
            assert {status for status, _ in (await two_workers(running)).values()} == {200}
            assert (await peer.stats())["peers"] == 2
        clean(running)
