"""The balance sheet finds what is left behind, and nothing else."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from pathlib import Path

import pytest

from hixl_async import Engine
from hixl_async.testing import BalanceSheet, FaultPlan, engine_pair, faulty, until


async def test_balanced() -> None:
    async with BalanceSheet(), engine_pair() as pair:
        _, remote = await pair.region()
        await pair.left.write(b"x", remote[0:1])


async def test_descriptors() -> None:
    sheet = BalanceSheet()
    reading, writing = os.pipe()
    with pytest.raises(AssertionError, match=r"descriptor pipe: \d+ before, \d+ now"):
        sheet.check()
    os.close(reading)
    os.close(writing)
    sheet.check()


async def test_threads() -> None:
    sheet = BalanceSheet()
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="straggler-7")
    thread.start()
    assert sheet.differences() == ["thread straggler-: 0 before, 1 now"]
    assert BalanceSheet().differences() == []
    go.set()
    thread.join()
    await sheet.settle()  # the kernel's thread ends a moment after Python's


async def test_mappings_of_memfds() -> None:
    sheet = BalanceSheet()
    fd = os.memfd_create("left-behind")
    os.truncate(fd, 4096)
    view = mmap.mmap(fd, 4096)
    os.close(fd)
    rows = sheet.differences()
    assert [row for row in rows if row.startswith("mapping /memfd:left-behind")], rows
    view.close()
    sheet.check()


@pytest.mark.parametrize(
    ("name", "counted"),
    [("left.{mine}", True), ("hixl_async_left", True), ("hixl_async.{parent}", False), ("left.{mine}0", False)],
)
def test_names_in_shared_memory(name: str, counted: bool) -> None:
    """Those of this process; a worker that runs other tests may have names as well."""
    path = Path("/dev/shm", name.format(mine=os.getpid(), parent=os.getppid()))
    sheet = BalanceSheet()
    path.touch()
    try:
        assert sheet.differences() == ([f"name {path}: 0 before, 1 now"] if counted else [])
    finally:
        path.unlink()
    sheet.check()


async def test_engines_and_their_work() -> None:
    sheet = BalanceSheet()
    plan = FaultPlan(1).late()
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        _, remote = await pair.region("kv", 4096)
        transfer = pair.left.write(b"x", remote[0:1])
        found = "\n".join(sheet.differences())
        for row in (
            "in_flight: 0 before, 1",
            "pinned: 0 before, 1",
            "regions: 0",
            "remote_regions: 0",
            "peers: 0",
            "open engines: 0",
        ):
            assert row in found, found
        transfer.cancel()
        assert "pinned: 0 before, 1 now" in sheet.differences()
        assert not any(row.startswith("in_flight") for row in sheet.differences())
        plan.release()
        await transfer.drained()
    await sheet.settle()


async def test_settle_waits_for_conditions() -> None:
    sheet = BalanceSheet()
    reading, writing = os.pipe()
    loop = asyncio.get_running_loop()
    loop.call_later(0.02, os.close, reading)
    loop.call_later(0.02, os.close, writing)
    before = time.monotonic()
    await sheet.settle(5)
    assert time.monotonic() - before < 2


async def test_settle_gives_up() -> None:
    sheet = BalanceSheet()
    engine = Engine(name="open")
    await engine.open()
    with pytest.raises(AssertionError, match="open engines: 0 before, 1 now"):
        await sheet.settle(0.02)
    await engine.aclose()
    await sheet.settle()


async def test_ignore() -> None:
    sheet = BalanceSheet(ignore=["descriptor pipe"])
    reading, writing = os.pipe()
    sheet.check()
    os.close(reading)
    os.close(writing)


async def test_an_error_of_the_body_is_raised_unchanged() -> None:
    async def body() -> None:
        async with BalanceSheet():
            body.fds = os.pipe()  # type: ignore[attr-defined]
            raise LookupError

    with pytest.raises(LookupError):
        await body()
    for fd in body.fds:  # type: ignore[attr-defined]
        os.close(fd)


async def test_until_waits_and_times_out() -> None:
    flag: list[int] = []
    asyncio.get_running_loop().call_later(0.01, flag.append, 1)
    await until(lambda: flag)
    with pytest.raises(TimeoutError, match=r"the flag did not become true within 0\.01 s"):
        await until(lambda: False, timeout=0.01, what="the flag")
