"""The parts of a driver know each other in one direction only, by their symbols and by their headers.

A part is a noun: ``link.c`` and ``link.h``.  The symbols tell what depends on what, the headers what a reader has to know.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DRIVERS = ROOT / "hixl_async" / "drivers"
FOLDERS = sorted(path.name for path in DRIVERS.iterdir() if path.is_dir() and not path.name.startswith("__"))
SOURCES, HEADERS = {".c", ".cpp"}, {".h", ".hpp"}

Graph = Mapping[str, Iterable[str]]


def circle(graph: Graph) -> list[str]:
    """Return the nodes of some circle, in order; empty if there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        path.append(node)
        for other in sorted(graph.get(node, ())):
            if found := visit(other):
                return found
        done.add(path.pop())
        return []

    return next(filter(None, map(visit, sorted(graph))), [])


def include_graph(folder: Path) -> dict[str, set[str]]:
    """Which header includes which other.  A source may include any header: what it needs of it, its symbols tell."""
    graph: dict[str, set[str]] = {}
    names = {path.name for path in folder.iterdir() if path.suffix in HEADERS}
    for path in folder.iterdir():
        if path.suffix in HEADERS:
            lines = path.read_text(encoding="utf-8").splitlines()
            included = {line.split('"')[1] for line in lines if line.startswith('#include "')}
            graph.setdefault(path.stem, set()).update(Path(name).stem for name in included & names)
    return {noun: others - {noun} for noun, others in graph.items()}


def symbols(objects: Mapping[str, Path]) -> Iterator[tuple[str, set[str], set[str]]]:
    """Each object file's name, what it defines for others, and what it needs of others."""
    for name, path in objects.items():
        defined, needed = set(), set()
        for line in subprocess.run(["nm", str(path)], check=True, capture_output=True, text=True).stdout.splitlines():
            *_, kind, symbol = line.split()
            if kind == "U":
                needed.add(symbol)
            elif kind in "TDBRC":  # inline functions of C++ (V, W) are in every object that uses them
                defined.add(symbol)
        yield name, defined, needed


def symbol_graph(objects: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return, for each object file, the object files whose symbols it needs."""
    found = list(symbols(objects))
    owner = {symbol: name for name, defined, _ in found for symbol in defined}
    return {name: {owner[symbol] for symbol in needed if symbol in owner} - {name} for name, _, needed in found}


def built(driver: str, to: Path) -> dict[str, Path]:
    """The object files of a driver by noun: those of the last build if they are up to date, else new ones."""
    folder = DRIVERS / driver
    sources = sorted(path for path in folder.iterdir() if path.suffix in SOURCES)
    changed = max(path.stat().st_mtime for path in [*folder.iterdir(), *(ROOT / "hixl_async/include").iterdir()])
    for build in (ROOT / "build").glob(f"release/temp.*/hixl_async/drivers/{driver}"):
        objects = {path.stem: build / f"{path.stem}.o" for path in sources}
        if all(path.exists() and path.stat().st_mtime > changed for path in objects.values()):
            return objects
    return compiled(sources, to)


def compiled(sources: Iterable[Path], to: Path) -> dict[str, Path]:
    """Object files by noun, without optimisation."""
    objects = {path.stem: to / f"{path.stem}.o" for path in sources}
    running = []
    for path in sources:
        compiler, standard = ("gcc", "-std=gnu11") if path.suffix == ".c" else ("g++", "-std=gnu++17")
        command = [compiler, "-c", "-O0", "-fPIC", standard, f"-I{ROOT / 'hixl_async/include'}", str(path)]
        running.append(subprocess.Popen([*command, "-o", str(objects[path.stem])]))
    assert [process.wait() for process in running] == [0] * len(running)
    return objects


NEEDS = pytest.mark.skipif(
    not (shutil.which("nm") and shutil.which("gcc") and shutil.which("g++")), reason="compiles, and runs nm"
)


@pytest.mark.parametrize("driver", FOLDERS)
def test_headers_include_in_one_direction(driver: str) -> None:
    graph = include_graph(DRIVERS / driver)
    assert any(graph.values())
    assert circle(graph) == []


@NEEDS
@pytest.mark.parametrize("driver", FOLDERS)
def test_object_files_need_each_other_in_one_direction(driver: str, tmp_path: Path) -> None:
    graph = symbol_graph(built(driver, tmp_path))
    assert any(graph.values())
    assert circle(graph) == []


def test_a_planted_circle_of_headers_is_found(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (tmp_path / f"{name}.h").write_text(f'#include "{other}.h"\n')
    assert circle(include_graph(tmp_path)) == ["a", "b", "c", "a"]


@NEEDS
def test_a_planted_circle_of_symbols_is_found(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (tmp_path / f"{name}.c").write_text(f"void {other}(void);\nvoid {name}(void) {{ {other}(); }}\n")
    assert circle(symbol_graph(compiled(sorted(tmp_path.glob("*.c")), tmp_path))) == ["a", "b", "c", "a"]
