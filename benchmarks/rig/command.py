"""The parts that the command lines of all benchmarks share: types of arguments, the choice of event loops, and the output.

Arguments that cannot be measured, or a report that cannot be written, are refused before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = [
    *(
        "add_json_choice",
        "add_loop_choice",
        "amount",
        "count",
        "cpus",
        "existing",
        "file",
        "folder",
        "loops",
        "publish",
    ),
    "size",
]

UNITS = {"b": 1, "kib": 1 << 10, "k": 1 << 10, "mib": 1 << 20, "m": 1 << 20, "gib": 1 << 30, "g": 1 << 30}


# ---- types of arguments ----------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """Read a whole number from 1 on."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return number


def amount(text: str) -> float:
    """Read a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def size(text: str) -> int:
    """Read ``"8"``, ``"4KiB"``, ``"128M"``."""
    digits = text.rstrip("BbKkMmGgIi")
    try:
        nbytes = int(digits) * UNITS[text[len(digits) :].lower() or "b"]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 4KiB or 128MiB") from None
    if nbytes < 1:
        raise argparse.ArgumentTypeError("a size is at least 1 byte")
    return nbytes


def cpus(text: str) -> tuple[int, int]:
    """Read ``"0,1"``."""
    there = os.sched_getaffinity(0)
    try:
        left, right = (int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not two CPU numbers such as 0,1") from None
    for cpu in (left, right):
        if cpu not in there:
            raise argparse.ArgumentTypeError(f"there is no CPU {cpu} here, only {', '.join(map(str, sorted(there)))}")
    return left, right


def file(text: str) -> str:
    """Read the name of a file that can be written, or ``-`` for standard output."""
    path = Path(text)
    if text != "-" and (path.is_dir() or not _writable(path if path.exists() else path.parent)):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return text


def folder(text: str) -> Path:
    """Read the name of a folder that can be written to, or be made."""
    path = Path(text).absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    if not there.is_dir() or not _writable(there):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder that can be written to")
    return path


def existing(text: str) -> Path:
    """Read the name of a file or a folder that exists."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"there is no {text!r}")
    return path


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK)


# ---- options and reports ---------------------------------------------------------------------------------------------


def add_loop_choice(parser: argparse.ArgumentParser, default: str = "both") -> None:
    """Add ``--loop``."""
    text = f"default: {default}; best: uvloop, if it is installed"
    parser.add_argument("--loop", choices=("asyncio", "uvloop", "both", "best"), default=default, help=text)


def add_json_choice(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    text = "write JSON there; - or nothing: standard output"
    parser.add_argument("--json", nargs="?", const="-", type=file, metavar="FILE", help=text)


def loops(choice: str) -> list[str]:
    """Return the event loops to measure on; the best one is uvloop, if it is installed."""
    there = find_spec("uvloop") is not None
    if choice == "uvloop" and not there:
        raise SystemExit("uvloop is not installed: pip install 'hixl-async[bench]', or choose --loop asyncio")
    if choice == "both":
        return ["asyncio", "uvloop"] if there else ["asyncio"]
    if choice == "best":
        return ["uvloop" if there else "asyncio"]
    return [choice]


def publish(report: dict[str, Any], lines: Iterable[str], where: str | None) -> None:
    """Print `lines`, and write `report` as JSON to the file `where`, or to standard output if it is ``-``."""
    # If the JSON goes to standard output, nothing else may.
    print("\n".join(lines), file=sys.stderr if where == "-" else sys.stdout)
    text = json.dumps(report, indent=1)
    if where == "-":
        print(text)
    elif where is not None:
        Path(where).write_text(text + "\n")
