"""What the command lines of all benchmarks share: the choice of event loops, and where a report goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["add_json_choice", "add_loop_choice", "loops", "publish"]


def add_loop_choice(parser: argparse.ArgumentParser, default: str = "both") -> None:
    """Adds ``--loop``."""
    text = f"default: {default}; best: uvloop, if it is installed"
    parser.add_argument("--loop", choices=("asyncio", "uvloop", "both", "best"), default=default, help=text)


def add_json_choice(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    text = "write JSON there; - or nothing: standard output"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)


def loops(choice: str) -> list[str]:
    """The event loops to measure on; the best one is uvloop, if it is installed."""
    there = find_spec("uvloop") is not None
    if choice == "uvloop" and not there:
        raise SystemExit("uvloop is not installed: pip install 'hixl-async[bench]', or choose --loop asyncio")
    if choice == "both":
        return ["asyncio", "uvloop"] if there else ["asyncio"]
    if choice == "best":
        return ["uvloop" if there else "asyncio"]
    return [choice]


def publish(report: dict[str, Any], lines: Iterable[str], where: str | None) -> None:
    """Shows `lines` to people, and writes `report` as JSON to the file `where`, or to standard output if it is ``-``."""
    # Where the JSON goes to standard output nothing else may.
    print("\n".join(lines), file=sys.stderr if where == "-" else sys.stdout)
    text = json.dumps(report, indent=1)
    if where == "-":
        print(text)
    elif where is not None:
        Path(where).write_text(text + "\n")
