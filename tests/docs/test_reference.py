"""Every public name is in the API reference, and its docstring says what a caller has to know."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from hixl_async import HixlError, RefusedError, TransferError, errors

from .pages import ROOT

MODULES = ("hixl_async", "hixl_async.kv", "hixl_async.kv.cache", "hixl_async.testing")
REFERENCE = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))


def public() -> Iterator[tuple[str, Any]]:
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            if not inspect.ismodule(value := getattr(module, name)):
                yield f"{module.__name__}.{name}", value


PUBLIC = dict(public())


def members(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a public class defines or inherits from this package, by its public path."""
    for name in dir(value):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(value, name)
        owner = next(base for base in value.__mro__ if name in vars(base))
        if owner.__module__.startswith("hixl_async"):
            yield f"{path}.{name}", getattr(member, "__func__", member)


CALLABLES = {
    path: member
    for public_path, value in PUBLIC.items()
    for path, member in ([(public_path, value)] if not inspect.isclass(value) else members(public_path, value))
    if inspect.isroutine(member)
}


def test_the_reference_has_every_public_name_and_no_other() -> None:
    assert sorted(re.findall(r"^::: (.+)$", REFERENCE, re.MULTILINE)) == sorted(PUBLIC)


# -- what docstrings say


def docstring(value: Any) -> str:
    """Return a docstring without the signature that Cython puts before it."""
    return re.sub(r"\A[\w.]+\([^\n]*(?:\n\n|\Z)", "", inspect.getdoc(value) or "")


def parameters(value: Any) -> list[str]:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    return [name for name in signature.parameters if name not in ("self", "cls", "exc", "kind", "error", "trace")]


def unexplained(path: str, value: Any) -> list[str]:
    """Return the parameters that a docstring does not explain; those common to a class's methods stand in the class's own."""
    owner = PUBLIC.get(path.rpartition(".")[0])
    common = docstring(owner) if owner is not None else ""
    return [
        name
        for name in parameters(value)
        if not re.search(rf":param {name}:|`{name}`|``{name}", docstring(value)) and f"``{name}=" not in common
    ]


def problems() -> Iterator[tuple[str, str]]:
    for path, value in CALLABLES.items():
        if not docstring(value):
            yield path, "docstring"
        elif missing := unexplained(path, value):
            yield path, ", ".join(missing)


def test_docstrings_explain_all_parameters() -> None:
    assert dict(problems()) == {}


def test_public_classes_and_functions_have_docstrings() -> None:
    documented = {path: value for path, value in PUBLIC.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert [path for path, value in documented.items() if not docstring(value)] == []


#: Nouns that end like a verb of the third person.
NOUNS = {"Arguments", "Blocks", "Bytes", "Counters", "Descriptors", "Names", "Peers", "Seconds"}


def test_docstrings_begin_with_an_imperative_or_a_noun() -> None:
    first = {path: docstring(value).split()[0] for path, value in CALLABLES.items() if docstring(value)}
    wrong = {
        path: word
        for path, word in first.items()
        if word in ("As", "How", "What", "When", "Whether", "Who") or (word.endswith("s") and word not in NOUNS)
    }
    assert wrong == {}


def test_docstrings_refer_to_no_others_for_their_parameters() -> None:
    found = {
        path for path, value in CALLABLES.items() if re.search(r"arameters (and errors )?as for", docstring(value))
    }
    assert found == set()


# -- returns, units and errors

RETURNS_NOTHING = (None, "None", "Self", "NoReturn", inspect.Signature.empty)
#: Parameters and the word for their unit, which the docstring, or that of the class, has to state.
UNITS = {
    r"timeout|stall|seconds|interval|delay": "second",
    r"(\w+_)?(size|bytes|length)|bandwidth|bytes_per_second": "byte",
}


def functions() -> Iterator[tuple[str, Any, str]]:
    for path, value in CALLABLES.items():
        if not inspect.isclass(value):
            yield path, value, docstring(value)


def test_docstrings_tell_what_is_returned() -> None:
    """By a field, or by their first word or noun."""
    missing = []
    for path, value, text in functions():
        try:
            returned = inspect.signature(value).return_annotation
        except (TypeError, ValueError):
            continue
        first = re.match(r"(Return|Yield|Iterate|Create|Make|Open|The|An?) ", text)
        if returned not in RETURNS_NOTHING and ":return" not in text and first is None:
            missing.append(path)
    assert missing == []


def test_docstrings_state_units() -> None:
    missing = []
    for path, value, text in functions():
        owner = PUBLIC.get(path.rpartition(".")[0])
        said = text + (docstring(owner) if owner is not None else "")
        for name in parameters(value):
            missing += [
                f"{path}: {name}" for form, unit in UNITS.items() if re.fullmatch(form, name) and unit not in said
            ]
    assert missing == []


def raised(value: Any) -> set[type[HixlError]]:
    """Return the package's errors that a function raises itself, outside of a try statement that may translate them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value))))
    except (OSError, TypeError):
        return set()  # a function of a compiled module
    found: set[type[HixlError]] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        parts = (
            [*node.handlers, *node.orelse, *node.finalbody] if isinstance(node, ast.Try) else ast.iter_child_nodes(node)
        )
        waiting += parts
        if isinstance(node, ast.Raise) and node.exc is not None:
            name = ast.unparse(node.exc).partition("(")[0].rpartition(".")[2]
            kind = getattr(errors, name, None)
            if inspect.isclass(kind) and issubclass(kind, HixlError):
                found.add(kind)
    return found


def test_docstrings_name_the_errors() -> None:
    """Those that the function itself raises, or a base class of them."""
    missing = {}
    for path, value, text in functions():
        stated = set(re.findall(r"\w+", " ".join(re.findall(r":raises ([^:]+):", text))))
        if lacking := {
            kind.__name__ for kind in raised(value) if not stated & {base.__name__ for base in kind.__mro__}
        }:
            missing[path] = lacking
    assert missing == {}


# -- the table of errors


def rows() -> dict[str, tuple[str, str]]:
    """Return the root and the word for retryable of each error in the table of docs/errors.md."""
    text = (ROOT / "docs/errors.md").read_text()
    refused, failed = text.split("## Refused")[1].split("## Failed in flight")
    found: dict[str, tuple[str, str]] = {}
    for root, part in (("refused", refused), ("failed", failed.split("## Errors that")[0])):
        for line in part.splitlines():
            if match := re.match(r"\| \[`(\w+)`\].*\| (yes|no) \|$", line):
                found[match[1]] = root, match[2]
    return found


def test_the_table_of_errors_is_complete_and_right() -> None:
    expected = {
        name: ("refused" if issubclass(kind, RefusedError) else "failed", "yes" if kind.retryable else "no")
        for name in errors.__all__
        if issubclass(kind := getattr(errors, name), RefusedError | TransferError)
    }
    assert rows() == expected


def test_both_roots_are_disjoint() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert not [kind for kind in kinds if issubclass(kind, RefusedError) and issubclass(kind, TransferError)]
    assert all(issubclass(kind, HixlError) for kind in kinds)
