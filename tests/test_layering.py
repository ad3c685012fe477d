"""The architecture, held by tests: who may import whom, what no file may contain, and what `import hixl_async` costs.

CONTRIBUTING.md has the picture.  Everything here reads sources; only the last part imports the package.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeAlias

import hixl_async

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hixl_async"

#: From the bottom up.  A module imports from lower rows, and from the folder it is in.
LAYERS = (
    {"errors", "types"},
    {"core"},
    {"_core"},
    {"drivers"},
    {"control"},
    {"engine"},
    {"kv"},
    {"cli", "testing"},
    {"__main__"},
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
#: From here up only names that users have too, which they may also import from the package itself.
PUBLIC_FROM = LEVEL["kv"]
#: Names that no line of code may decide by: a driver's capabilities do that.
DRIVERS = {"shm", "faulty", "ucx", "hixl"}

PYTHON = sorted(PACKAGE.rglob("*.py"))
CYTHON = sorted([*PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxd")])
NATIVE = sorted(path for suffix in ("c", "h", "cpp") for path in (PACKAGE / "drivers").rglob(f"*.{suffix}"))


def unit_of(path: Path) -> str:
    """The first part of a module's name below the package: a file, or a folder with all that is in it."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "hixl_async" if parts == ("__init__",) else parts[0]


class Import(NamedTuple):
    unit: str  # what is imported, as `unit_of` names it
    names: tuple[str, ...]
    line: int
    typing_only: bool  # below `if TYPE_CHECKING`
    top: bool  # runs when the module is imported


class Source:
    """A Python module, parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.package = ["hixl_async", *path.relative_to(PACKAGE).parts[:-1]]
        self.unit = unit_of(path)

    def nodes(self) -> Iterator[tuple[ast.AST, bool, bool]]:
        """Every node, with whether it is for the type checker only, and whether it runs at import."""
        stack: list[tuple[ast.AST, bool, bool]] = [(self.tree, False, True)]
        while stack:
            node, typing_only, top = stack.pop()
            yield node, typing_only, top
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            stack.extend((child, typing_only or guarded, inner) for child in ast.iter_child_nodes(node))

    def imports(self) -> Iterator[Import]:
        """Imports from within the package."""
        for node, typing_only, top in self.nodes():
            if isinstance(node, ast.ImportFrom):
                base = self.package[: len(self.package) - node.level + 1] if node.level else []
                yield from _within(
                    ".".join([*base, *(node.module or "").split(".")]).strip("."), node, typing_only, top
                )
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield from _within(alias.name, node, typing_only, top)

    def modules(self) -> Iterator[tuple[str, int, bool]]:
        """The first part of everything imported from elsewhere, and whether it happens when the module is."""
        for node, typing_only, top in self.nodes():
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module.split(".")[0], node.lineno, top and not typing_only
            elif isinstance(node, ast.Import):
                yield from ((alias.name.split(".")[0], node.lineno, top and not typing_only) for alias in node.names)


def _within(module: str, node: ast.Import | ast.ImportFrom, typing_only: bool, top: bool) -> Iterator[Import]:
    first, *rest = module.split(".")
    if first != "hixl_async":
        return
    names = tuple(alias.name for alias in node.names) if isinstance(node, ast.ImportFrom) else ()
    if rest:
        yield Import(rest[0], names, node.lineno, typing_only, top)
    elif not names:
        yield Import("hixl_async", (), node.lineno, typing_only, top)
    for name in names if not rest else ():
        # `from . import x`: a module of that name, or else a name of the package itself.
        is_module = any((PACKAGE / f"{name}{suffix}").exists() for suffix in ("", ".py", ".pyx"))
        yield Import(name if is_module else "hixl_async", (name,), node.lineno, typing_only, top)


SOURCES = [Source(path) for path in PYTHON]


def cimports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of the package that a Cython file imports or cimports."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if found := re.match(r"\s*from\s+\.(\w*)\s+c?import\s+\(?(.*)", line):
            yield from ((unit.strip(" ),"), number) for unit in ([found[1]] if found[1] else found[2].split(",")))


#: A file, a line in it, and what is wrong there.
Violation: TypeAlias = tuple[Path, int, object]


def rule(violations: Callable[[], Iterator[Violation]]) -> Callable[[], None]:
    """Makes a test of a generator of violations; it fails with all of them at once."""

    def test() -> None:
        found = [f"{path.relative_to(ROOT)}:{line}: {what}" for path, line, what in violations()]
        assert not found, "\n".join(["", *found])

    test.__name__, test.__doc__ = violations.__name__, violations.__doc__
    return test


def test_there_is_something_to_hold() -> None:
    """The rules below would all hold of nothing."""
    assert len(PYTHON) > 20
    assert len(CYTHON) > 4
    assert len(NATIVE) > 4
    assert sum(1 for source in SOURCES for _ in source.imports()) > 100
    assert sum(1 for path in CYTHON for _ in cimports(path)) > 10
    assert sum(1 for path in NATIVE for _ in includes(path.read_text())) > 20


# ---- imports point up the list only ----------------------------------------------------------------------------------


def test_every_module_has_its_layer() -> None:
    units = {unit_of(path) for path in [*PYTHON, *CYTHON]} - {"hixl_async", "driver"}
    assert units <= LEVEL.keys(), "give new modules a row in LAYERS, and in CONTRIBUTING.md"


@rule
def test_imports_point_down() -> Iterator[Violation]:
    for source in SOURCES:
        for found in source.imports():
            if source.unit == "hixl_async":
                allowed = LEVEL.get(found.unit, -1) <= PUBLIC_FROM
            elif found.unit == "hixl_async":
                allowed = LEVEL.get(source.unit, 99) >= PUBLIC_FROM
            else:
                allowed = LEVEL.get(found.unit, -1) < LEVEL.get(source.unit, 99)
            if not (allowed or found.unit == source.unit or found.typing_only):
                yield source.path, found.line, f"{source.unit} may not import {found.unit}"
    for path in CYTHON:
        unit = unit_of(path)
        for other, line in cimports(path):
            if other not in (unit, "driver") and LEVEL.get(other, -1) >= LEVEL.get(unit, 99):
                yield path, line, f"{unit} may not import {other}"


@rule
def test_only_public_names_are_used_above_the_engine() -> Iterator[Violation]:
    for source in SOURCES:
        if LEVEL.get(source.unit, -1) < PUBLIC_FROM:
            continue
        own = private_names(source.unit) | EXCUSED.get(source.unit, set())
        for found in source.imports():
            if found.unit != source.unit and not found.typing_only:
                for name in filter(private, (found.unit, *found.names)):
                    yield source.path, found.line, f"imports {name}"
        for node, _, _ in source.nodes():
            if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
                yield source.path, node.lineno, ast.unparse(node)


#: The balance sheet counts the engines that nobody handed to it.
EXCUSED = {"testing": {"_engines"}}


def private(name: str) -> bool:
    public = {"_asdict", "_fields", "_make", "_replace"}  # of every NamedTuple
    return name.startswith("_") and not name.startswith("__") and name not in public


def private_names(unit: str) -> set[str]:
    """Private names that a part of the package defines itself."""
    names: set[str] = set()
    for source in SOURCES:
        if source.unit != unit:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
    return {name for name in names if private(name)}


# ---- drivers ---------------------------------------------------------------------------------------------------------


def driver_of(path: Path) -> str:
    """Whose source it is: ``drivers/_shm.c`` and everything in ``drivers/shm/`` belong together."""
    return path.stem.removeprefix("_") if path.parent.name == "drivers" else path.parent.name


def includes(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"""\s*#\s*include\s*([<"][^>"]+)[>"]""", line):
            yield number, found[1]


@rule
def test_a_driver_sees_the_interface_and_its_own_headers_only() -> Iterator[Violation]:
    """Python is the business of hxa_module.h alone."""
    for path in NATIVE:
        text = path.read_text(encoding="utf-8")
        folder = PACKAGE / "drivers" / driver_of(path)
        for line, header in includes(text):
            name = header[1:]
            own = (path.parent / name).resolve()
            if header[0] == "<":
                allowed = name != "Python.h"
            elif name.startswith("hxa_"):
                allowed = (PACKAGE / "include" / name).exists()
            else:
                allowed = own.exists() and own.is_relative_to(folder)
            if not allowed:
                yield path, line, f"includes {name}"
        for found in re.finditer(r"\bPy(_|Object\b|Mem_|Err_)", text):
            yield path, text.count("\n", 0, found.start()) + 1, "calls Python"


@rule
def test_the_interface_stands_alone() -> Iterator[Violation]:
    for path in sorted((PACKAGE / "include").glob("*.h")):
        for line, header in includes(path.read_text(encoding="utf-8")):
            allowed = (
                header[1:].startswith("hxa_")
                if header[0] == '"'
                else header[1:] != "Python.h" or path.name == "hxa_module.h"
            )
            if not allowed:
                yield path, line, f"includes {header[1:]}"


@rule
def test_nothing_is_decided_by_the_name_of_a_driver() -> Iterator[Violation]:
    for source in SOURCES:
        if source.unit == "testing":  # which does not decide for users
            continue
        for node, _, _ in source.nodes():
            if isinstance(node, ast.Compare | ast.MatchValue):
                words = {constant.value for constant in ast.walk(node) if isinstance(constant, ast.Constant)}
                if words & DRIVERS:
                    yield source.path, node.lineno, ast.unparse(node)
    for path in [*CYTHON, *NATIVE]:
        names = "|".join(DRIVERS - {driver_of(path)})
        for line, code in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            decides = re.search(rf"""(strn?cmp\s*\(.*|[=!]=\s*|\bin\b.*)b?["']({names})["']""", code)
            if decides:
                yield path, line, code.strip()


# ---- what no file may contain ----------------------------------------------------------------------------------------


@rule
def test_nothing_waits_by_sleeping() -> Iterator[Violation]:
    for source in SOURCES:
        for node, _, _ in source.nodes():
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "asyncio"):
                names = {alias.name for alias in node.names}
                if "sleep" in names:
                    yield source.path, node.lineno, "call it by its full name"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep":
                yield source.path, node.lineno, "time.sleep blocks the loop"
            # A virtual clock has nothing else than passes of the loop to let things happen.
            if isinstance(node, ast.Call) and ast.unparse(node) == "asyncio.sleep(0)" and source.unit != "testing":
                yield source.path, node.lineno, "asyncio.sleep(0) is polling"
    for path in CYTHON:
        for line, code in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            sleeps = re.search(r"\btime\.sleep\b|\basyncio\.sleep\b|\bc?import\b.*\b(u|nano)?sleep\b", code)
            if sleeps:
                yield path, line, code.strip()


@rule
def test_cython_includes_nothing() -> Iterator[Violation]:
    for path in CYTHON:
        for line, code in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"""\s*include\s+["']""", code):
                yield path, line, "cimport instead"


@rule
def test_nothing_is_unpickled() -> Iterator[Violation]:
    for source in SOURCES:
        for module, line, _ in source.modules():
            unsafe = module in {"pickle", "cPickle", "_pickle", "marshal", "shelve", "cloudpickle", "dill"}
            if unsafe:
                yield source.path, line, module


@rule
def test_libraries_of_users_are_never_imported_for_them() -> Iterator[Violation]:
    """numpy and torch come with the caller's objects, or inside the one function that is asked for an array."""
    heavy = {"numpy", "torch", "torch_npu", "vllm", "transformers"}
    for source in SOURCES:
        for module, line, top in source.modules():
            if top and module in heavy:
                yield source.path, line, module
    for path in CYTHON:
        for line, code in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            taken = re.match(rf"\s*(from|import|cimport)\s+({'|'.join(heavy)})\b", code)
            if taken:
                yield path, line, code.strip()


@rule
def test_only_the_configuration_reads_the_environment() -> Iterator[Violation]:
    for source in SOURCES:
        if (
            source.path.name == "config.py" or source.unit == "testing"
        ):  # testing hands it on to the processes that it starts
            continue
        for node, _, _ in source.nodes():
            reads = isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
            if reads:
                yield source.path, getattr(node, "lineno", 0), "reads the environment"


@rule
def test_no_error_is_swallowed_whole() -> Iterator[Violation]:
    for source in SOURCES:
        for node, _, _ in source.nodes():
            if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body):
                caught = "everything" if node.type is None else ast.unparse(node.type)
                swallowed = caught in ("everything", "Exception", "BaseException")
                if swallowed:
                    yield source.path, node.lineno, f"swallows {caught}"


def test_every_compiled_module_has_a_stub() -> None:
    """That the stubs are true is the business of mypy's stubtest, in `make lint`."""
    assert [path for path in CYTHON if path.suffix == ".pyx" and not path.with_suffix(".pyi").exists()] == []


# ---- the package as it is imported -----------------------------------------------------------------------------------


def test_what_is_exported_is_what_is_listed() -> None:
    listed = hixl_async.__all__
    assert len(listed) == len(set(listed))
    public = {
        name
        for name, value in vars(hixl_async).items()
        if not name.startswith("_") and not (isinstance(value, ModuleType) and name != "kv")
    }
    assert set(listed) == public


@rule
def test_every_module_says_what_it_exports() -> Iterator[Violation]:
    for source in SOURCES:
        if source.path.name == "__main__.py" or source.unit == "testing":  # parts of testing need hypothesis
            continue
        name = ".".join(source.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", None)
        if listed is None:
            yield source.path, 1, "has no __all__"
        for word in listed or ():
            if not (hasattr(module, word) and not private(word)):
                yield source.path, 1, f"__all__ lists {word}"


IMPORT = """
import asyncio, json, os, sys, threading
files, before = set(os.listdir("/proc/self/fd")), set(sys.modules)
import hixl_async
print(json.dumps({
    "new": sorted(set(sys.modules) - before),
    "modules": sorted(sys.modules),
    "threads": threading.active_count(),
    "files": len(set(os.listdir("/proc/self/fd")) - files),
    "loop": asyncio._get_running_loop() is not None,
}))
"""


def test_import_is_light() -> None:
    """No library of the user's, nothing that only some need, no thread, no descriptor."""
    result = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=50, check=True)
    assert result.stderr == ""
    seen = json.loads(result.stdout)
    heavy = {
        "numpy",
        "torch",
        "torch_npu",
        "ctypes",
        "uvloop",
        "cython",
        "Cython",
        "multiprocessing",
        "pickle",
        "unittest",
    }
    assert heavy.isdisjoint(seen["modules"])
    for module in ("hixl_async.cli", "hixl_async.probes", "hixl_async.testing", "hixl_async.drivers._shm", "argparse"):
        assert module not in seen["new"]
    assert (seen["threads"], seen["files"], seen["loop"]) == (1, 0, False)
