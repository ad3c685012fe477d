"""Uses of private names in sources, and what the code tells of the objects that they are used of.

An object counts as one of the package's own if an annotation, an ``isinstance``, a cast or the call that makes it says so, or
else if its name is the last word of an own class: ``peer`` and ``lost_peer`` of a `Peer`, ``queue`` of a `BoundedQueue`.  In
any case the class, or a base of it in the package, must have the name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Classes", "Use", "cython_uses", "private", "uses"]

#: Functions that take an object and the name of an attribute, and those that take names alone.
BY_NAME, NAMES_ALONE = {"getattr", "setattr", "hasattr", "delattr"}, {"attrgetter", "methodcaller"}


def private(name: str) -> bool:
    public = {"_asdict", "_fields", "_make", "_replace"}  # of every NamedTuple
    return len(name) > 1 and name.startswith("_") and not name.startswith("__") and name not in public


class Classes:
    """The classes of one package, with their private names."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}
        self._bases: dict[str, set[str]] = {}

    def add(self, tree: ast.Module) -> None:
        """Add those of a Python module."""
        for kind in ast.walk(tree):
            if isinstance(kind, ast.ClassDef):
                words = {word for node in ast.walk(kind) for word in _words_of(node)}
                self._add(
                    kind.name, words, {word for base in kind.bases for word in re.findall(r"\w+", ast.unparse(base))}
                )

    def add_cython(self, text: str) -> None:
        """Add those of a Cython file."""
        for found in re.finditer(r"^cdef class (\w+)(?:\((.*?)\))?:\n((?:(?: .*)?\n)*)", text, re.MULTILINE):
            lines = re.findall(r"^ +(?:cdef|cpdef|def|async def)\b.*", found[3], re.MULTILINE)
            self._add(found[1], {word for line in lines for word in re.findall(r"\b_\w+", line)}, {found[2] or ""})

    def _add(self, kind: str, words: set[str], bases: set[str]) -> None:
        self._names.setdefault(kind, set()).update(word for word in words if private(word))
        self._bases.setdefault(kind, set()).update(bases)

    def names_of(self, kind: str) -> set[str]:
        """Return the private names of a class and of its bases; none if it is of another package."""
        if kind not in self._names:
            return set()
        return self._names[kind].union(*(self.names_of(base) for base in self._bases[kind] - {kind}))

    def of_all(self, kinds: set[str]) -> set[str]:
        """Return those of several classes."""
        return set().union(*(self.names_of(kind) for kind in kinds))

    def called(self, name: str) -> set[str]:
        """Return those of the classes that a variable's name is the last word of."""
        word = name.strip("_").rpartition("_")[2]
        return self.of_all({kind for kind in self._names if re.sub(r"^.*(?=[A-Z])", "", kind).lower() == word})

    @property
    def kinds(self) -> set[str]:
        return set(self._names)


def _words_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node of a class's body may give to its objects."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr


class Use(NamedTuple):
    """A private name that is used of an object."""

    text: str
    name: str
    line: int
    #: True if the object is ``self``, or of an own class that has the name.
    own: bool


# ---- Python ----------------------------------------------------------------------------------------------------------


def uses(tree: ast.Module, classes: Classes) -> Iterator[Use]:
    """Yield private names as attributes, and as constants of `getattr`, ``__dict__`` and the like."""
    stack: list[tuple[ast.AST, _Scope]] = [(tree, _Scope(tree, None, classes))]
    while stack:
        node, scope = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            scope = _Scope(node, scope, classes)
        for thing, name in _named_by(node):
            if private(name):
                yield Use(f"{ast.unparse(thing)}.{name}", name, node.lineno, scope.owns(thing, name))  # type: ignore[attr-defined]
        stack.extend((child, scope) for child in ast.iter_child_nodes(node))


def _named_by(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield the objects and the names of their attributes that a node names."""
    if isinstance(node, ast.Attribute):
        yield node.value, node.attr
    elif isinstance(node, ast.Call):
        function = ast.unparse(node.func).rpartition(".")[2]
        words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        if function in BY_NAME:
            yield from ((node.args[0], word) for word in words)
        elif function in NAMES_ALONE:
            yield from ((node.func, part) for word in words for part in word.split("."))
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        holder = node.value
        if isinstance(holder, ast.Attribute) and holder.attr == "__dict__":
            yield holder.value, str(node.slice.value)
        elif isinstance(holder, ast.Call) and ast.unparse(holder.func) == "vars" and holder.args:
            yield holder.args[0], str(node.slice.value)


class _Scope:
    """A function, or the module, and what it tells of its names."""

    def __init__(self, scope: ast.AST, outer: _Scope | None, classes: Classes) -> None:
        self._outer = outer
        self._classes = classes
        self._kinds: dict[str, set[str]] = {}  # the words of the annotations of each name
        self._values: dict[str, list[ast.expr]] = {}
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]:
                self._note(argument.arg, argument.annotation)
            for node in ast.walk(scope):
                self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._note(node.target.id, node.annotation)
        elif (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and isinstance(node.args[0], ast.Name)
        ):
            self._note(node.args[0].id, node.args[1])
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self._values.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.NamedExpr):
            self._values.setdefault(node.target.id, []).append(node.value)

    def _note(self, name: str, kind: ast.expr | None) -> None:
        if kind is not None:
            self._kinds.setdefault(name, set()).update(re.findall(r"\w+", ast.unparse(kind)))

    def owns(self, thing: ast.expr, name: str) -> bool:
        """Return True if an object is ``self``, or of an own class that has a private name."""
        text = ast.unparse(thing)
        return text in ("self", "cls", "super()", "type(self)") or name in self._names_of(thing)

    def _names_of(self, thing: ast.expr) -> set[str]:
        """Return the private names that the object of an expression has, if it is of an own class."""
        if isinstance(thing, ast.Name):
            return self._classes.names_of(thing.id) or self._names_called(thing.id)
        if isinstance(thing, ast.Attribute):
            return self._classes.called(thing.attr)
        if isinstance(thing, ast.Call):
            maker = thing.func
            made_by_class = isinstance(maker, ast.Attribute) and isinstance(maker.value, ast.Name)
            return (self._classes.names_of(maker.value.id) if made_by_class else set()) or self._names_of(maker)
        if isinstance(thing, ast.Await):
            return self._names_of(thing.value)
        return set()

    def _names_called(self, name: str) -> set[str]:
        if name in self._kinds:
            return self._classes.of_all(self._kinds[name])
        known = [self._names_of(value) for value in self._values.get(name, ())]
        return (self._outer._names_called(name) if self._outer is not None else self._classes.called(name)).union(
            *known
        )


# ---- Cython ----------------------------------------------------------------------------------------------------------


def cython_uses(text: str, classes: Classes) -> Iterator[Use]:
    """Yield private names as attributes, and as constants of `getattr` and the like."""
    text = re.sub(r'"""(.*?)"""', lambda found: re.sub(".", " ", found[0]), text, flags=re.DOTALL)
    declared: dict[str, set[str]] = {}
    for kind, names in re.findall(rf"\b({'|'.join(classes.kinds)})\s+(\w+(?:\s*,\s*\w+)*)", text):
        for name in re.findall(r"\w+", names):
            declared.setdefault(name, set()).add(kind)
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"#(?![^\"]*\").*", "", line)
        found = [(before[1], before[2]) for before in re.finditer(r"([\w.\])>]+(?:\(<\w+\??>[^.]*\))?)\.(_\w+)", code)]
        found += re.findall(rf"(?:{'|'.join(BY_NAME)})\(([\w.]+), \"(_\w+)\"", code)
        for thing, name in found:
            if private(name):
                last = thing.rpartition(".")[2]
                cast = re.search(rf"\(<(\w+)\??>[^<>]*\)\.{name}\b", code)
                kinds = {cast[1]} if cast is not None else declared.get(last, set())
                own = last == "self" or name in (classes.of_all(kinds) if kinds else classes.called(last))
                yield Use(f"{thing}.{name}", name, number, own)
