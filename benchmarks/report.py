"""Runs all benchmarks and writes what they found: RESULTS.md, and the pictures of the README.

::

    python benchmarks/report.py                      # about ten minutes
    python benchmarks/report.py --quick              # about two, and rough
    python benchmarks/report.py --from FOLDER        # of reports that are there already
    python benchmarks/report.py --remarks benchmarks/REMARKS.md

What the benchmarks report as JSON goes to a folder (``--to``, default ``build/benchmarks``), RESULTS.md to this one, and
the pictures to docs/; ``--out FOLDER`` puts both elsewhere.  Peers that are not installed are left out, and RESULTS.md says
how to get them.  What people have to say about a run follows the goals where ``--remarks FILE`` gives it: REMARKS.md, here, is
about the run that the repository's RESULTS.md shows, and true of no other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ladder
import side_by_side
import streaming
import sweep
from rig.command import existing, folder
from rig.document import document, draw

HERE = Path(__file__).resolve().parent
BENCHMARKS = {"ladder": ladder, "side_by_side": side_by_side, "streaming": streaming, "sweep": sweep}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Runs all benchmarks and writes RESULTS.md and the pictures of the README."
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a rough run of each")
    add(
        "--only",
        nargs="+",
        choices=BENCHMARKS,
        default=list(BENCHMARKS),
        metavar="NAME",
        help=f"of {', '.join(BENCHMARKS)}",
    )
    add("--from", dest="source", type=existing, metavar="FOLDER", help="runs nothing and reads the JSON there")
    add("--to", type=folder, default=HERE.parent / "build" / "benchmarks", metavar="FOLDER", help="for the JSON")
    add("--out", type=folder, metavar="FOLDER", help="for RESULTS.md and the pictures")
    add("--remarks", type=existing, metavar="FILE", help="what people have to say about this run; follows the goals")
    return parser.parse_args(argv)


def run(name: str, folder: Path, quick: bool) -> None:
    """One benchmark; its report goes to `folder`.

    :raises SystemExit: if it fails.
    """
    target = folder / f"{name}.json"
    target.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"{name}.py"), *(["--quick"] if quick else []), "--json", str(target)]
    print(f"{name} ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name}.py failed with status {done.returncode}; its own words are above")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all; the exit code."""
    options = arguments(argv)
    source = options.source or options.to
    if options.source is None:
        source.mkdir(parents=True, exist_ok=True)
        for name in options.only:
            run(name, source, options.quick)
    reports = {
        name: json.loads((source / f"{name}.json").read_text())
        for name in options.only
        if (source / f"{name}.json").exists()
    }
    if not reports:
        raise SystemExit(f"there are no reports in {source}")
    pictures = (options.out or HERE.parent / "docs").resolve()
    results = (options.out or HERE).resolve() / "RESULTS.md"
    pictures.mkdir(parents=True, exist_ok=True)
    drawn = dict(draw(reports))
    for name, text in drawn.items():
        (pictures / name).write_text(text)
    renders = {name: module.render for name, module in BENCHMARKS.items()}
    remarks = options.remarks.read_text() if options.remarks else ""
    where = "" if options.out else "../docs/"
    results.write_text("\n".join(document(reports, renders, [where + name for name in drawn], remarks)) + "\n")
    print(f"{results}, {', '.join(str(pictures / name) for name in drawn)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
