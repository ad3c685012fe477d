"""Make and the build state the remedy in one sentence if something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this repository's Makefile in another folder."""
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "hixl_async").mkdir()
    settings = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(
        command, cwd=folder, env=settings | environment, capture_output=True, text=True, timeout=60, check=False
    )


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("prompt", ['it\'s "quoted", 5 $(dollars), a # and a \\\nand lines', "word " * 24_000, ""])
def test_a_prompt_may_hold_any_character_and_be_long(tmp_path: Path, prompt: str) -> None:
    python = program(tmp_path / "python", 'echo "$@"; cat "$3"')
    (tmp_path / ".venv").mkdir()
    stamps = [f".venv/{name}" for name in ("built", "extra-demo", "model")]
    done = make(
        tmp_path, *(f"--old-file={stamp}" for stamp in stamps), "--silent", "demo", f"PROMPT={prompt}", f"PY={python}"
    )
    assert done.returncode == 0 or not prompt, done.stderr[-1000:]
    first, _, rest = done.stdout.partition("\n")
    if prompt:
        assert first.split()[:3] == ["examples/disaggregated/main.py", "--prompt-file", ".venv/prompt.txt"]
        assert rest == f"{prompt}\n"
    else:
        assert "--prompt" not in first


def test_without_a_package_index(tmp_path: Path) -> None:
    """pip fails; the remedy follows its own message."""
    interpreter = tmp_path / ".venv" / "bin" / "python"
    make_environment = f'[ "$2" != venv ] || {{ mkdir -p "{interpreter.parent}"; cp "$0" "{interpreter}"; }}'
    fail = '[ "$2" != pip ] || { echo "no index" >&2; exit 1; }'
    python = program(tmp_path / "python", f"{make_environment}\n{fail}")
    done = make(tmp_path, ".venv/base", f"PYTHON={python}")
    assert done.returncode == 2
    said = done.stderr.splitlines()
    assert said[0] == "no index"
    assert "if it reaches no package index, set PIP_INDEX_URL to a mirror" in said[1]
    assert not (tmp_path / ".venv" / "base").exists()


@pytest.mark.parametrize(("names", "missing"), [((), "gcc"), (("c",), "no-such-compiler")])
def test_without_a_compiler(tmp_path: Path, names: tuple[str, ...], missing: str) -> None:
    (tmp_path / "bin").mkdir()
    chosen = {"CC": "gcc", "CXX": "no-such-compiler" if names else "gcc"}
    for name in names:
        program(tmp_path / "bin" / ("gcc" if name == "c" else name), "exit 1")
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=ROOT,
        env={**os.environ, **chosen, "PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"hixl_async is compiled on this machine, and there is no {missing}: install a C and a C++ compiler "
        "(apt-get install gcc g++, dnf install gcc gcc-c++), or name yours in CC and CXX"
    )
