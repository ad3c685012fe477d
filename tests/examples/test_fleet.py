"""The demo's processes when they are stopped: a process that does not answer is named, and none is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support import fleet
from support.fleet import Failed, Fleet
from support.messages import Settings

import hixl_async as hx
from hixl_async.testing import until

#: A process that does nothing, and has no model to load.
IDLE = """
import asyncio, json, sys
import hixl_async as hx

async def main():
    async with hx.Engine("127.0.0.1:0", name="D") as engine:
        gone = asyncio.Event()
        router = await engine.connect(json.loads(sys.argv[1])["router"])
        router.add_lost_callback(lambda _: gone.set())
        await gone.wait()

asyncio.run(main())
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages to the user, with a second shortened."""
    (tmp_path / "decode.py").write_text(IDLE)
    monkeypatch.setattr(fleet, "__file__", str(tmp_path / "support" / "fleet.py"))
    monkeypatch.setattr(fleet, "LOOK", 0.02)
    monkeypatch.setenv("PYTHONPATH", str(Path(hx.__file__).parents[1]))
    return []


@asynccontextmanager
async def running(told: list[str]) -> AsyncIterator[Fleet]:
    async with hx.Engine("127.0.0.1:0", name="router") as engine:
        settings = Settings(engine.address, "shm", "asyncio", 1, True)
        async with Fleet(engine, settings, "D", tell=told.append) as processes:
            yield processes


def gone(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


async def test_a_stopped_process_is_named(told: list[str]) -> None:
    async def fail() -> dict[str, Any]:
        raise hx.TransferTimeoutError("the consumer did not acknowledge the end")

    with pytest.raises(Failed) as failed:
        async with running(told) as processes:
            assert await processes.together({"D": processes.ask("D", "hixl.ping", {"n": 1})}) == {"D": {"n": 1}}
            pid = processes.pids()["D"]
            told.clear()  # a machine under load may have been as slow as a stopped process
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: told)
            with pytest.raises(Failed, match="D: Silent: no sign of life(.|\n)*P: TransferTimeoutError: the consumer"):
                await processes.together({"P": fail()})
            await processes.together({"D": processes.ask("D", "hixl.ping", {})})
    assert str(failed.value) == "D: Silent: no sign of life for 0 s; it is stopped, or hangs"
    assert told == ["(D gives no sign of life; after 0 s of that the demo ends)"]
    assert gone(pid)


async def test_a_process_that_continues_is_accepted(told: list[str]) -> None:
    async with running(told) as processes:
        pid = processes.pids()["D"]
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: told)
        os.kill(pid, signal.SIGCONT)
        await processes.together({"D": processes.ask("D", "hixl.ping", {})})
    assert gone(pid)


async def test_a_second_interrupt_leaves_no_stopped_process(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LEAVE", 3600.0)
    started = asyncio.get_running_loop().create_future()

    async def leave() -> None:
        async with running(told) as processes:
            os.kill(processes.pids()["D"], signal.SIGSTOP)
            started.set_result(processes.pids()["D"])

    leaving = asyncio.create_task(leave())
    pid = await started
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await until(lambda: gone(pid))


async def test_a_process_that_is_never_ready(told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "START", 20)
    (tmp_path / "decode.py").write_text("import signal, os\nos.kill(os.getpid(), signal.SIGSTOP)")
    with pytest.raises(Failed, match="^D: was not ready after 0 s$"):
        async with running(told):
            pass
    assert told == ["(D not ready after 0 s; after 0 s the demo ends)"]
