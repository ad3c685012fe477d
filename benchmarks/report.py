"""Run all benchmarks and write the results: RESULTS.md, the full report, and the pictures of the README.

::

    python benchmarks/report.py                      # about ten minutes
    python benchmarks/report.py --quick              # about two, and rough
    python benchmarks/report.py --from FOLDER        # from reports that exist already
    python benchmarks/report.py --remarks benchmarks/REMARKS.md

The JSON of the benchmarks goes to a folder (``--to``, default ``build/benchmarks``), RESULTS.md, a summary of one page, and
DETAILS.md, which has every figure and is not kept in git, to this one, and the pictures to docs/; ``--out FOLDER`` puts these
elsewhere.  Peers that are not installed are left out, and RESULTS.md says how to get them.  ``--remarks FILE`` adds comments on
the run: REMARKS.md is about the run that the repository's RESULTS.md shows, and about no other.
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
from rig.document import details, draw, summary

HERE = Path(__file__).resolve().parent
BENCHMARKS = {"ladder": ladder, "side_by_side": side_by_side, "streaming": streaming, "sweep": sweep}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Run all benchmarks and write RESULTS.md, DETAILS.md and the pictures of the README."
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
    add("--from", dest="source", type=existing, metavar="FOLDER", help="run nothing, and read the JSON there")
    add("--to", type=folder, default=HERE.parent / "build" / "benchmarks", metavar="FOLDER", help="for the JSON")
    add("--out", type=folder, metavar="FOLDER", help="for RESULTS.md, DETAILS.md and the pictures")
    add("--remarks", type=existing, metavar="FILE", help="comments on this run, for DETAILS.md")
    return parser.parse_args(argv)


def run(name: str, folder: Path, quick: bool) -> None:
    """Run one benchmark; its report goes to `folder`.

    :raises SystemExit: if it fails.
    """
    target = folder / f"{name}.json"
    target.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"{name}.py"), *(["--quick"] if quick else []), "--json", str(target)]
    print(f"{name} ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name}.py failed with status {done.returncode}; its own message is above")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; the exit code."""
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
    results = (options.out or HERE).resolve()
    pictures.mkdir(parents=True, exist_ok=True)
    drawn = dict(draw(reports))
    for name, text in drawn.items():
        (pictures / name).write_text(text)
    renders = {name: module.render for name, module in BENCHMARKS.items()}
    remarks = options.remarks.read_text() if options.remarks else ""
    where = "" if options.out else "../docs/"
    links = ["DETAILS.md beside this file has every figure; it is written with it, and not kept in git."]
    if options.remarks:
        links.append(f"[{options.remarks.name}]({options.remarks.name}) explains what stands out.")
    lines = {
        "RESULTS.md": summary(reports, links),
        "DETAILS.md": details(reports, renders, [where + name for name in drawn], remarks),
    }
    for name, found in lines.items():
        (results / name).write_text("\n".join(found).rstrip() + "\n")
    print(", ".join(map(str, [*(results / name for name in lines), *(pictures / name for name in drawn)])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
