"""Every Python block of the documentation runs; the blocks of one page share a namespace, from top to bottom."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from hixl_async import Engine

from .pages import PAGES, ROOT, Block, blocks

pytest.importorskip("numpy")

#: Blocks that need an NPU or a cluster: they are compiled, and no more.
COMPILED_ONLY = {
    "docs/ascend.md": 2,
    "docs/guides/containers.md": 1,
    "docs/guides/from-llm-datadist.md": 2,
    "docs/migration.md": 2,
}

NAMES = {str(page.relative_to(ROOT)): page for page in PAGES}
WITH_CODE = [name for name, page in NAMES.items() if any(block.runs for block in blocks(page))]


@pytest.mark.parametrize("name", WITH_CODE)
def test_blocks_run(
    name: str,
    runner: asyncio.Runner,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    try:
        for block in blocks(NAMES[name]):
            if block.title is not None:
                Path(block.title).write_text(block.code)
            elif block.runs:
                capsys.readouterr()
                run(block, runner, namespace)
                if block.output is not None:
                    assert capsys.readouterr().out.strip() == block.output, block.shown
    except BaseException:
        close_engines(runner, namespace)  # so that the report shows this failure alone
        raise
    finally:
        namespace.clear()  # views of regions keep their memory mapped


def run(block: Block, runner: asyncio.Runner, namespace: dict[str, Any]) -> None:
    """Run a program as it is, and anything else as a line typed into ``python -m asyncio``: with the loop running."""
    code = block.compile()
    if "asyncio.run(" in block.code or "asyncio.Runner(" in block.code:
        exec(code, namespace)
        return

    async def typed() -> None:
        result = eval(code, namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            await result

    runner.run(typed())


def close_engines(runner: asyncio.Runner, namespace: dict[str, Any]) -> None:
    for engine in [value for value in namespace.values() if isinstance(value, Engine)]:
        runner.run(engine.aclose())


def test_blocks_that_cannot_run_compile() -> None:
    found: dict[str, int] = {}
    for name, page in NAMES.items():
        for block in blocks(page):
            if not block.runs:
                block.compile()
                found[name] = found.get(name, 0) + 1
    assert found == COMPILED_ONLY
