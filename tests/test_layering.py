"""Tests of the architecture: permitted imports, forbidden content of files, and the cost of `import hixl_async`.

docs/architecture.md has the picture.  Everything here reads sources; only the last part imports the package.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeAlias

import pytest
from private_names import Classes, cython_uses, private, uses

import hixl_async

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hixl_async"

#: From the bottom up.  A module imports from lower rows, and from the package that it is in.
LAYERS = (
    {"display"},
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
#: Names that no line of code may decide by: a driver's capabilities do that.
DRIVERS = {"shm", "faulty", "ucx", "hixl"}

#: Private names that a package may use although another defines them, each with its reason.
PRIVATE_USES = {
    # Engine is a Core: what it calls on itself is inherited.
    ("engine", "_core"): "the name of the module that the user asked for",
    ("testing", "_engines"): "the balance sheet counts the engines that no test handed to it",
    ("engine", "_C"): "torch has no public name for the name of its private device",
    ("core", "_thread_id"): "loop.is_running() of asyncio, a Python function, does no more than look at it",
    ("engine", "_get_privateuse1_backend_name"): "torch has no public name for the name of its private device",
}


def unit_of(name: str) -> str:
    """The layer's name of a module: the first part below the package."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "hixl_async"


class Import(NamedTuple):
    module: str  # the module that is imported, by its full name
    name: str  # the name that is taken from it; empty for the module itself
    line: int
    typing_only: bool  # below `if TYPE_CHECKING`
    top: bool  # runs when the module is imported


class Source:
    """A Python module, parsed at its first use; every worker collects these tests, and one runs them.

    :param path: below the package's folder, where it need not exist.
    :param text: the source; default: the file's.
    """

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        self._text = text
        parts = ["hixl_async", *path.relative_to(PACKAGE).with_suffix("").parts]
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.package = self.name if self.is_package else self.name.rpartition(".")[0]
        self.unit = unit_of(self.name)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8") if self._text is None else self._text)

    @cached_property
    def nodes(self) -> list[tuple[ast.AST, bool, bool]]:
        """Every node, with whether it is for the type checker only, and whether it runs at import."""
        found: list[tuple[ast.AST, bool, bool]] = []
        stack: list[tuple[ast.AST, bool, bool]] = [(self.tree, False, True)]
        while stack:
            node, typing_only, top = stack.pop()
            found.append((node, typing_only, top))
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            stack.extend((child, typing_only or guarded, inner) for child in ast.iter_child_nodes(node))
        return found

    def imports(self) -> Iterator[Import]:
        """Yield imports from within the package, one for each name."""
        for node, typing_only, top in self.nodes:
            if isinstance(node, ast.ImportFrom):
                module = self._absolute(node)
                names = [alias.name for alias in node.names] if module.split(".")[0] == "hixl_async" else []
                yield from (Import(*located(module, name), node.lineno, typing_only, top) for name in names)
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.split(".")[0] == "hixl_async"]
                yield from (Import(name, "", node.lineno, typing_only, top) for name in names)

    def _absolute(self, node: ast.ImportFrom) -> str:
        base = self.package.split(".")
        base = base[: len(base) - node.level + 1] if node.level else []
        return ".".join([*base, *filter(None, [node.module])])

    def modules(self) -> Iterator[tuple[str, int, bool]]:
        """Yield the first part of everything imported from elsewhere, and whether it is imported with the module."""
        for node, typing_only, top in self.nodes:
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module.split(".")[0], node.lineno, top and not typing_only
            elif isinstance(node, ast.Import):
                yield from ((alias.name.split(".")[0], node.lineno, top and not typing_only) for alias in node.names)


def located(module: str, name: str) -> tuple[str, str]:
    """Return the module and the name that ``from module import name`` refers to; `name` may be a module itself."""
    folder = ROOT.joinpath(*module.split("."))
    if any((folder / f"{name}{suffix}").exists() for suffix in ("/__init__.py", ".py", ".pyx")):
        return f"{module}.{name}", ""
    return module, name


PYTHON = sorted(PACKAGE.rglob("*.py"))
CYTHON = sorted([*PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxd")])
NATIVE = sorted(path for suffix in ("c", "h", "cpp", "hpp") for path in (PACKAGE / "drivers").rglob(f"*.{suffix}"))
SOURCES = [Source(path) for path in PYTHON]


def cython_name(path: Path) -> str:
    """The full name of the module that a ``.pyx`` or ``.pxd`` belongs to."""
    return ".".join(["hixl_async", *path.relative_to(PACKAGE).with_suffix("").parts])


def cimports(path: Path, text: str | None = None) -> Iterator[tuple[str, int]]:
    """Modules of the package that a Cython file imports or cimports, by their full names."""
    package = cython_name(path).split(".")[:-1]
    lines = (path.read_text(encoding="utf-8") if text is None else text).splitlines()
    for number, line in enumerate(lines, 1):
        if found := re.match(r"\s*from\s+(\.*)([\w.]*)\s+c?import\s+\(?(.*)", line):
            base = package[: len(package) - len(found[1]) + 1] if found[1] else []
            module = [*base, *filter(None, found[2].split("."))]
            if module == ["hixl_async"]:
                yield from ((".".join([*module, name.split()[0]]), number) for name in found[3].strip(" )").split(","))
            elif module[:1] == ["hixl_async"]:
                yield ".".join(module), number
        elif found := re.match(r"\s*c?import\s+(.*)", line):
            names = [name.split()[0] for name in found[1].split(",")]
            yield from ((name, number) for name in names if name.split(".")[0] == "hixl_async")


#: A file, a line in it, and what is wrong there.
Violation: TypeAlias = tuple[Path, int, object]


def rule(violations: Callable[[], Iterator[Violation]]) -> Callable[[], None]:
    """Make a test of a generator of violations; it fails with all of them at once."""

    def test() -> None:
        found = [f"{path.relative_to(ROOT)}:{line}: {what}" for path, line, what in violations()]
        assert not found, "\n".join(["", *found])

    test.__name__, test.__doc__ = violations.__name__, violations.__doc__
    return test


# ---- imports point down, and in no circle ----------------------------------------------------------------------------


def upward(sources: Iterable[Source]) -> Iterator[Violation]:
    """Yield imports of Python modules that point up, or sideways into another package.

    From kv on, modules may import the package itself, as users do.
    """
    for source in sources:
        for found in source.imports():
            unit = unit_of(found.module)
            if source.name == "hixl_async":
                allowed = LEVEL.get(unit, 99) <= LEVEL["kv"]
            elif unit == "hixl_async":
                allowed = LEVEL.get(source.unit, -1) >= LEVEL["kv"]
            else:
                allowed = unit == source.unit or LEVEL.get(unit, 99) < LEVEL.get(source.unit, -1)
            if not allowed:
                yield source.path, found.line, f"{source.name} may not import {found.module}"


@cache
def exports() -> dict[tuple[str, str], str]:
    """Return, for each name that a package re-exports, the module that it comes from."""
    found = {}
    for source in SOURCES:
        if source.is_package:
            for taken in source.imports():
                found[source.name, taken.name or taken.module.rpartition(".")[2]] = taken.module
    return found


def origin(found: Import) -> str:
    """Return the module that defines what is imported; a package that only re-exports it is no link of a circle."""
    module = found.module
    while (module, found.name) in exports():
        module = exports()[module, found.name]
    return module


def circles(edges: dict[str, dict[str, Violation]]) -> Iterator[Violation]:
    """Yield the imports that close a circle, each once."""
    done: set[str] = set()
    for start in sorted(edges):
        path: list[str] = []

        def visit(module: str, path: list[str] = path) -> Iterator[Violation]:
            path.append(module)
            for target, place in sorted(edges.get(module, {}).items()):
                if target in path:
                    circle = [*path[path.index(target) :], target]
                    yield (
                        place[0],
                        place[1],
                        "a circle: " + " -> ".join(name.removeprefix("hixl_async.") for name in circle),
                    )
                elif target not in done:
                    yield from visit(target)
            done.add(path.pop())

        if start not in done:
            yield from visit(start)


def edges(sources: Iterable[Source]) -> dict[str, dict[str, Violation]]:
    """Return, for each Python module, the modules that it needs, for its types too, each with the place of one import."""
    found: dict[str, dict[str, Violation]] = {}
    for source in sources:
        if not source.is_package:
            needed = ((origin(taken), taken.line) for taken in source.imports())
            found[source.name] = {module: (source.path, line, "") for module, line in needed if module != source.name}
    return found


def cython_edges() -> dict[str, dict[str, Violation]]:
    """Return the same for Cython's modules, each of which has a ``.pyx``, a ``.pxd``, or both."""
    found: dict[str, dict[str, Violation]] = {}
    for path in CYTHON:
        needed = {module: (path, line, "") for module, line in cimports(path) if module != cython_name(path)}
        found.setdefault(cython_name(path), {}).update(needed)
    return found


def family_of(unit: str) -> str:
    """Return the package that shares private names with a unit: ``_core`` stands beside ``core`` for its own name only."""
    return "core" if unit == "_core" else unit


@cache
def classes_of(family: str) -> Classes:
    """Return the classes of a part of the package."""
    classes = Classes()
    for source in SOURCES:
        if source.unit == family:
            classes.add(source.tree)
    for path in CYTHON:
        if family_of(unit_of(cython_name(path))) == family:
            classes.add_cython(path.read_text(encoding="utf-8"))
    return classes


#: A part of the package, a private name that it uses, and where.
PrivateUse: TypeAlias = tuple[tuple[str, str], Violation]


def private_uses(sources: Iterable[Source]) -> Iterator[PrivateUse]:
    """Private names that a package takes from another: imported, or of an object that is not known to be its own."""
    for source in sources:
        for found in source.imports():
            for name in {found.name, *found.module.split(".")[1:]}:
                foreign = unit_of(found.module) != source.unit and source.name != "hixl_async"
                if private(name) and foreign:
                    yield (source.unit, name), (source.path, found.line, f"imports {name}")
        for use in uses(source.tree, classes_of(source.unit)):
            if not use.own:
                yield (source.unit, use.name), (source.path, use.line, use.text)


def cython_private_uses(path: Path, text: str | None = None) -> Iterator[PrivateUse]:
    """The same of a Cython file, but for imports."""
    unit = unit_of(cython_name(path))
    for use in cython_uses(path.read_text(encoding="utf-8") if text is None else text, classes_of(family_of(unit))):
        if not use.own:
            yield (unit, use.name), (path, use.line, use.text)


def all_private_uses() -> Iterator[PrivateUse]:
    yield from private_uses(SOURCES)
    for path in CYTHON:
        yield from cython_private_uses(path)


def test_there_is_something_to_check() -> None:
    """The rules below would all hold of nothing."""
    assert len(PYTHON) > 20
    assert len(CYTHON) > 4
    assert len(NATIVE) > 4
    assert sum(1 for source in SOURCES for _ in source.imports()) > 200
    assert sum(1 for path in CYTHON for _ in cimports(path)) > 20
    assert sum(1 for path in NATIVE for _ in includes(path.read_text())) > 20


def test_every_module_has_its_layer() -> None:
    units = {unit_of(name) for name in [*(source.name for source in SOURCES), *map(cython_name, CYTHON)]}
    assert units - {"hixl_async"} == LEVEL.keys(), "give new modules a row in LAYERS, and in docs/architecture.md"


@rule
def test_imports_point_down() -> Iterator[Violation]:
    yield from upward(SOURCES)
    for path in CYTHON:
        yield from cython_upward(path)


@rule
def test_no_circle_of_imports() -> Iterator[Violation]:
    yield from circles(edges(SOURCES))
    yield from circles(cython_edges())


@rule
def test_no_private_name_of_another_package() -> Iterator[Violation]:
    yield from (violation for use, violation in all_private_uses() if use not in PRIVATE_USES)


def test_every_exception_is_needed() -> None:
    assert PRIVATE_USES.keys() <= {use for use, _ in all_private_uses()}


def cython_upward(path: Path, text: str | None = None) -> Iterator[Violation]:
    """Yield imports of a Cython file that point up, or sideways into another package."""
    unit = unit_of(cython_name(path))
    for other, line in cimports(path, text):
        if unit_of(other) != unit and LEVEL.get(unit_of(other), 99) >= LEVEL.get(unit, -1):
            yield path, line, f"{cython_name(path)} may not import {other}"


def violations(path: str, text: str) -> list[str]:
    """Return what is found in a planted file; ``OWN`` stands for a private name of the class Blocks of kv."""
    where = PACKAGE / path
    if path.endswith(".pyx"):
        found = [*cython_upward(where, text), *(violation for _, violation in cython_private_uses(where, text))]
    else:
        planted = [Source(where, text.replace("OWN", OWN))]
        found = [*upward(planted), *(violation for _, violation in private_uses(planted))]
    return [str(what).replace(OWN, "OWN") for _, _, what in found]


OWN = min(classes_of("kv").names_of("Blocks"))


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("engine/planted.py", "from ..kv.pool import Pool", "engine.planted may not import hixl_async.kv.pool"),
        ("engine/planted.py", "from .. import kv", "engine.planted may not import hixl_async.kv"),
        ("engine/planted.py", "import hixl_async.kv.pool", "engine.planted may not import hixl_async.kv.pool"),
        (
            "errors.py",
            "if TYPE_CHECKING:\n    from .engine.engine import Engine",
            "errors may not import hixl_async.engine.engine",
        ),
        ("core/planted.pyx", "from ..engine.engine import Engine", "may not import hixl_async.engine.engine"),
        ("core/planted.pyx", "from .. import engine", "may not import hixl_async.engine"),
        ("core/planted.pyx", "from hixl_async.engine.engine import Engine", "may not import hixl_async.engine.engine"),
        ("core/planted.pyx", "    from hixl_async import errors, kv as x", "may not import hixl_async.kv"),
        ("core/planted.pyx", "import hixl_async.engine.engine", "may not import hixl_async.engine.engine"),
        ("core/planted.pyx", "import os, hixl_async.engine.engine as e", "may not import hixl_async.engine.engine"),
        ("core/planted.pyx", "cimport hixl_async._core", "may not import hixl_async._core"),
        ("_core.pyx", "from hixl_async.kv cimport x", "may not import hixl_async.kv"),
        ("core/planted.pyx", "def f(peer):\n    return peer._exports", "peer._exports"),
        ("_core.pyx", "def f(peer): return f'{peer._exports}'", "peer._exports"),
        ("_core.pyx", 'def f(peer): return getattr(peer, "_exports")', "peer._exports"),
        ("_core.pyx", "def f(Peer transfer): return transfer.peer._unpin()", "transfer.peer._unpin"),
        ("_core.pyx", "def f(x): return (<Peer>x)._unpin()", "._unpin"),
        ("kv/planted.py", "def f(peer): peer._exports", "peer._exports"),
        # OWN is a name that a class of kv has, but no peer and no engine is of it.
        ("kv/planted.py", "def f(peer): peer.OWN", "peer.OWN"),
        ("kv/planted.py", "def f(blocks: Peer): blocks.OWN", "blocks.OWN"),
        ("kv/planted.py", "class A:\n    def f(self): return self._pool.engine.OWN", "self._pool.engine.OWN"),
        ("kv/planted.py", 'def f(peer): return getattr(peer, "_links")', "peer._links"),
        ("kv/planted.py", 'def f(peer): return hasattr(peer, "_links")', "peer._links"),
        ("kv/planted.py", 'f = operator.attrgetter("_links.ready")', "attrgetter._links"),
        ("kv/planted.py", 'def f(peer): return peer.__dict__["_links"]', "peer._links"),
        ("kv/planted.py", 'def f(peer): return vars(peer)["_links"]', "peer._links"),
        ("testing/planted.py", "from ..engine.peer import _has_ended", "imports _has_ended"),
        ("testing/planted.py", "from ..engine.engine import _engines", "imports _engines"),
    ],
)
def test_planted_violations_are_found(path: str, text: str, message: str) -> None:
    found = violations(path, text)
    assert any(message in what for what in found), found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/planted.pyx", "from hixl_async.errors import HixlError\nfrom . import batch\nfrom .. import errors"),
        ("core/planted.pyx", "def f(core, Transfer waiter): core._drain(); waiter._unpin(); self._anything"),
        ("_core.pyx", "def f(x): return (<Transfer?>x)._unpin() # of peer._exports"),
        ("kv/planted.py", "def f(blocks): blocks.OWN"),
        ("kv/planted.py", "def f(other: Blocks | None): other.OWN"),
        ("kv/planted.py", "def f(other):\n    if isinstance(other, Blocks): return other.OWN"),
        ("kv/planted.py", "def f():\n    new = Blocks.__new__(Blocks)\n    new.OWN = 1"),
        ("kv/planted.py", "class A:\n    def f(self): return self._whatever, super()._whatever, type(self)._whatever"),
        ("engine/planted.py", "def f(row): return [lost_peer._links for lost_peer in row], row._replace(x=1)"),
    ],
)
def test_what_is_permitted_is_not_found(path: str, text: str) -> None:
    assert violations(path, text) == []


def test_a_planted_circle_is_found() -> None:
    """Through a name that the package re-exports, and for types only."""
    planted = [
        Source(PACKAGE / "engine/one.py", "from .two import x"),
        Source(PACKAGE / "engine/two.py", "if TYPE_CHECKING:\n    from .one import y"),
    ]
    assert [what for _, _, what in circles(edges(planted))] == ["a circle: engine.one -> engine.two -> engine.one"]
    through = [*SOURCES, Source(PACKAGE / "engine/waiters.py", "if TYPE_CHECKING:\n    from hixl_async import Engine")]
    assert any("engine.waiters" in str(what) for _, _, what in circles(edges(through)))


# ---- drivers ---------------------------------------------------------------------------------------------------------


def driver_of(path: Path) -> str:
    """Return whose source a file is: ``drivers/_shm.c`` and everything in ``drivers/shm/`` belong together."""
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
        for node, _, _ in source.nodes:
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
        for node, _, _ in source.nodes:
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
        for node, _, _ in source.nodes:
            reads = isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
            if reads:
                yield source.path, getattr(node, "lineno", 0), "reads the environment"


@rule
def test_no_error_is_swallowed_whole() -> Iterator[Violation]:
    for source in SOURCES:
        for node, _, _ in source.nodes:
            if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body):
                caught = "everything" if node.type is None else ast.unparse(node.type)
                swallowed = caught in ("everything", "Exception", "BaseException")
                if swallowed:
                    yield source.path, node.lineno, f"swallows {caught}"


def test_every_compiled_module_has_a_stub() -> None:
    """That the stubs are true is the business of mypy's stubtest, in `make lint`."""
    assert [path for path in CYTHON if path.suffix == ".pyx" and not path.with_suffix(".pyi").exists()] == []


# ---- the package as it is imported -----------------------------------------------------------------------------------


def test_exported_and_listed_names_are_equal() -> None:
    listed = hixl_async.__all__
    assert len(listed) == len(set(listed))
    public = {
        name
        for name, value in vars(hixl_async).items()
        if not name.startswith("_") and not (isinstance(value, ModuleType) and name != "kv")
    }
    assert set(listed) == public


@rule
def test_every_module_lists_its_exports() -> Iterator[Violation]:
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
