"""Build the C levels (native.pyx) against the installed hixl_async, once for each version of either."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

import hixl_async
import rig

__all__ = ["BuildError", "build"]

SOURCE = Path(__file__).with_name("native.pyx")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"


class BuildError(Exception):
    """The C levels cannot be built; the text says what is missing."""


def build() -> None:
    """Make ``from rig import native`` work; compile it if the cache has none that fits.

    :raises BuildError: if Cython or a C compiler is missing, or one of them fails.
    """
    package = Path(hixl_async.__file__).parent
    folder = _cache() / _fingerprint(package)
    if not (folder / f"native{SUFFIX}").exists():
        _compile(package, folder)
    rig.__path__.append(str(folder))


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hixl_async" / "benchmarks"


def _fingerprint(package: Path) -> str:
    """A digest of everything that the extension is compiled from, and of the Python that it is compiled for."""
    content = hashlib.sha256(f"{sys.version} {SUFFIX}".encode())
    for path in (SOURCE, *sorted(package.rglob("*.pxd")), *sorted(package.glob("include/*.h"))):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def _compile(package: Path, folder: Path) -> None:
    if find_spec("Cython") is None:
        raise BuildError("the C levels need Cython: pip install 'hixl-async[bench]'")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    headers = [f"-I{package / 'include'}", f"-I{sysconfig.get_path('include')}"]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source, built = Path(work, "native.c"), Path(work, f"native{SUFFIX}")
        _run(sys.executable, "-m", "cython", "--module-name=rig.native", f"-I{package.parent}", "-o", source, SOURCE)
        _run(*compiler, "-shared", "-fPIC", "-std=gnu11", "-O3", "-w", *headers, source, "-o", built)
        os.replace(built, folder / built.name)


def _run(*command: str | Path) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise BuildError(f"the C levels need a C compiler, and there is no {command[0]}") from None
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{shlex.join(map(str, command))} failed:\n{error.stderr}") from None
