"""The machine and the versions that a figure was measured on; without them it means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hixl_async

__all__ = ["commit", "heading", "machine", "preamble", "versions"]


def preamble(benchmark: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the first entries of every report."""
    return {
        "schema": 2,
        "benchmark": benchmark,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "arguments": list(arguments),
        "commit": commit(Path(__file__).parent),
        "machine": machine(),
        "versions": versions(),
    }


def heading(report: dict[str, Any]) -> list[str]:
    """Return the same as lines of text."""
    about, found = report["machine"], report["versions"]
    others = ", ".join(f"{name} {number or 'not installed'}" for name, number in found.items() if name != "hixl_async")
    lines = [
        f"hixl_async {found['hixl_async']}, commit {report['commit'] or 'unknown'}: "
        f"{report['benchmark'].replace('_', ' ')}, {report['started']}, {report['seconds']:g} s",
        f"{about['cpu']}, {about['cpus']} CPUs, {about['memory_bytes'] >> 30} GiB, Linux {about['kernel']}, "
        f"{about['libc']}, load {about['load_1min']:.2f} at the start",
        others,
    ]
    if about["load_1min"] > about["cpus"] / 2:
        lines.append("Other programs keep this machine busy: trust only ratios, and only those with a narrow interval.")
    return lines


def machine() -> dict[str, Any]:
    """Return the processor, the memory, the kernel, and the load at this moment."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "load_1min": os.getloadavg()[0],
    }


def versions() -> dict[str, str | None]:
    """Return the versions of all packages that take part; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "hixl_async": hixl_async.__version__}
    for name in ("uvloop", "numpy", "cython"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit(folder: Path) -> str | None:
    """Return the commit that `folder` has checked out, with ``+`` if files differ from it; None outside of git."""
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
