"""The server's page in a real browser; `make test-server` runs it."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if BROWSER is None:
    pytest.skip("the page's test needs a browser: apt-get install chromium", allow_module_level=True)

from test_server import BLOCKS, Asked, AsyncOpenAI, Server, answer, server  # noqa: E402, F401


def dom(url: str, profile: Path) -> str:
    """Return what a browser has made of a page after some seconds, in which it has not complained."""
    done = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", url),
        ],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def test_the_page_shows_pools_and_requests(server: Server, tmp_path: Path) -> None:  # noqa: F811
    async def ask_again_and_again(client: AsyncOpenAI) -> None:
        while True:
            await answer(client, Asked([1], 400))

    async def look(client: AsyncOpenAI) -> str:
        await answer(client, Asked([5] * 20, 3))
        tasks = [asyncio.create_task(ask_again_and_again(client)) for _ in range(2)]
        try:
            return await asyncio.to_thread(dom, server.url, tmp_path)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    text = server.run(look)
    assert not re.search(r'(?:src|href)="', text)  # nothing is loaded
    rows = re.findall(r'<tr data-state="(\w+)"><td>(\d+)</td><td>(\w+)</td><td>(\d+)</td><td>(\d+) / 6</td>', text)
    assert rows[0] == ("finished", "1", "finished", "20", "6")
    running = [row for row in rows if row[0] == row[2] == "running"]
    assert running
    assert {row[3:] for row in running} == {("1", "6")}
    pools = re.findall(r"<tr><td>([PD])</td><td>(\d+)</td><td>1</td>((?:<td>\d+</td>){4})", text)
    assert {name: int(pid) for name, pid, _ in pools} == server.pids
    for _, _, counts in pools:
        assert sum(map(int, re.findall(r"\d+", counts))) == BLOCKS
    assert len(re.findall(r'<i class="running" style="left: [\d.]+%; width: [\d.]+%;">', text)) == len(rows)
