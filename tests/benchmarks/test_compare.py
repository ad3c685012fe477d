"""The comparison of two trees fails where the later one is slower twice, and nowhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

import compare

from .program import BENCHMARKS, run

TREE = BENCHMARKS.parent


class Trees:
    """Workloads whose blocks take what a test says; `ratios` are of after to before, one for each start."""

    def __init__(self, *ratios: float | Exception) -> None:
        self.ratios = list(ratios)
        self.turns: list[str] = []

    def __call__(self, tree: Path, loop: str) -> Any:
        outer, ratio = self, self.ratios[0]
        if tree.name == "after" and len(self.ratios) > 1:
            self.ratios.pop(0)

        class Fake:
            cells = ("a cell", "another")

            def run(self, cell: str, times: int) -> float:
                outer.turns.append(tree.name)
                if isinstance(ratio, Exception) and cell == "a cell":
                    raise ratio
                slower = tree.name == "after" and cell == "a cell" and not isinstance(ratio, Exception)
                return times * 1000 * (ratio if slower else 1)

            def __enter__(self) -> Fake:
                return self

            def __exit__(self, *_: object) -> None: ...

        return Fake()


def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trees: Trees) -> tuple[int, dict[str, Any]]:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(compare, "Workload", trees)
    target = tmp_path / "out.json"
    words = [str(tmp_path / "before"), str(tmp_path / "after"), "--loop", "asyncio", "--pairs", "20", "--starts", "1"]
    code = compare.main([*words, "--json", str(target)])
    return code, {cell["cell"]: cell for cell in json.loads(target.read_text())["cells"]}


# The first value is used when the cells are asked for.
@pytest.mark.parametrize(
    ("ratios", "runs", "code"),
    [((1, 1.0), 1, 0), ((1, 1.029), 1, 0), ((1, 1.1, 1.0), 2, 0), ((1, 1.1, 1.04), 2, 1), ((1, 0.9), 1, 0)],
)
def test_slower_twice_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratios: tuple[float, ...], runs: int, code: int
) -> None:
    got, cells = compared(monkeypatch, tmp_path, Trees(*ratios))
    assert got == code
    assert [len(cells[name]["runs"]) for name in ("a cell", "another")] == [runs, 1]
    assert cells["a cell"]["failed"] is bool(code)
    assert cells["another"]["failed"] is False
    for one in cells["a cell"]["runs"]:
        assert len(one["before"]) == len(one["after"]) == 20
    assert cells["a cell"]["runs"][-1]["ratio"]["median"] == pytest.approx(ratios[-1])


def test_the_trees_take_turns_and_each_begins_half_of_the_pairs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trees = Trees(1.0)
    compared(monkeypatch, tmp_path, trees)
    pairs = [trees.turns[-40:][i : i + 2] for i in range(0, 40, 2)]
    assert all(sorted(pair) == ["after", "before"] for pair in pairs)
    assert sum(pair[0] == "before" for pair in pairs) == 10


def test_a_cell_without_figures_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, cells = compared(monkeypatch, tmp_path, Trees(1, RuntimeError("no such call")))
    assert code == 1
    assert (cells["a cell"]["error"], cells["a cell"]["runs"]) == ("no such call", [])
    assert len(cells["another"]["runs"]) == 1


def checkout(folder: Path, package: Path) -> str:
    """A tree that is built in place: `package`, and an interpreter that imports the one under test."""
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{BENCHMARKS.parent}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / "hixl_async").symlink_to(package)
    return str(folder)


@pytest.mark.timeout(120)
def test_a_tree_against_itself(tmp_path: Path) -> None:
    """The whole way; with a limit that everything exceeds, it fails."""
    tree = checkout(tmp_path, BENCHMARKS.parent / "hixl_async")
    few = ("--loop", "asyncio", "--pairs", "6", "--starts", "1", "--block", "1e-4", "--cells", "ready slices, 8 B")
    done = run("compare.py", tree, tree, *few, "--limit", "0.001", "--json")
    assert done.returncode == 1, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert cell["failed"]
    assert [len(one["after"]) for one in cell["runs"]] == [6, 6]
    assert "1 of 1 cells failed" in done.stderr


def test_a_tree_that_cannot_be_measured(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    astray = checkout(tmp_path / "tree", other)
    for tree, words in ((astray, "imports hixl_async from"), (str(other), "build it first: make build")):
        done = run("compare.py", tree, tree, "--loop", "asyncio")
        assert done.returncode == 2
        assert words in done.stderr
