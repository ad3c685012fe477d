"""An extension of griffe, which reads the package for the site.

Griffe reads source and stubs without importing them.  That gives every signature with its types, but not the docstrings of
the compiled modules, which are in their ``.pyx`` files, and not the ``#:`` comments above attributes.  This adds both, and
turns the few forms of reST that the docstrings use into Markdown.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import griffe

#: The signature that Cython puts before a docstring (``embedsignature``).
_EMBEDDED = re.compile(r"\A[\w.]+\([^\n]*(?:\n\n|\Z)")
_LITERAL = re.compile(r"^(?P<text>[^\n]*)::\n\n(?P<code>(?:[ ]{4}[^\n]*\n?|\n)+)", re.MULTILINE)
_NAME = re.compile(r"(?<![`\w])`([A-Za-z_][\w.]*)`(?!`)")

#: Labels that say how something is written, and not how it is used.
NOISE = {"class-attribute", "instance-attribute", "module-attribute", "writable"}

#: Where public names are, in the order in which a bare name is looked for.
PUBLIC = ("hixl_async", "hixl_async.kv", "hixl_async.testing")


class Docstrings(griffe.Extension):
    """Completes every object of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        public = dict(_public_names())
        for obj in list(_walk(pkg)):
            if isinstance(obj, griffe.Class):
                _show_overloads(obj)
                _show_constructor(obj)
                _follow_assignments(obj)
        for obj in list(_walk(pkg)):
            obj.labels -= NOISE
            if isinstance(obj, griffe.Attribute) and isinstance(obj.value, griffe.ExprCall):
                obj.value = None  # how it is made, which is nothing for readers
            if isinstance(obj, griffe.Function):
                for function in (obj, *(obj.overloads or ())):
                    for parameter in function.parameters:
                        parameter.annotation = _spelled_out(parameter.annotation)
                    function.returns = _spelled_out(function.returns)
            if obj.docstring is None and (text := _comment_above(obj) or _runtime_docstring(obj)):
                obj.docstring = griffe.Docstring(text, parent=obj)
            if obj.docstring is not None:
                obj.docstring.value = markdown(obj.docstring.value, obj, public)
                obj.docstring.parser = loader.docstring_parser
                obj.docstring.parser_options = loader.docstring_options
        for obj in _documented(pkg, public):
            if obj.docstring is not None:
                _link_errors(obj.docstring, pkg, public)


def markdown(text: str, obj: griffe.Object, public: dict[str, str]) -> str:
    """Return a docstring with fenced code and with links in place of names in single backticks.

    :param obj: the documented object, whose class is searched first.
    :param public: the full path of each public name.
    """
    text = _LITERAL.sub(_fence, text)
    owner = obj if isinstance(obj, griffe.Class) else obj.parent
    parameters = (
        {parameter.name for parameter in obj.parameters} if isinstance(obj, griffe.Function | griffe.Class) else ()
    )

    def link(match: re.Match[str]) -> str:
        name = match[1]
        if name in parameters:
            return match[0]
        if name in public:
            return f"[`{name}`][{public[name]}]"
        if isinstance(owner, griffe.Class) and owner.name in public and name in owner.members and name[0] != "_":
            return f"[`{name}`][{public[owner.name]}.{name}]"
        return match[0]

    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _NAME.sub(link, part) for part in parts)


def _link_errors(docstring: griffe.Docstring, pkg: griffe.Module, public: dict[str, str]) -> None:
    """Let the errors that a docstring lists lead to their entries, whether or not its module has imported them."""
    for section in docstring.parsed:
        for item in section.value if isinstance(section, griffe.DocstringSectionRaises) else ():
            if str(item.annotation) in public:
                item.annotation = griffe.ExprName(str(item.annotation), parent=pkg)


def _fence(match: re.Match[str]) -> str:
    before = match["text"].rstrip()
    code = textwrap.dedent(match["code"]).strip("\n")
    language = "text" if re.search(r"[├└▶│]", code) else "python"
    return (f"{before}:\n\n" if before else "") + f"```{language}\n{code}\n```\n\n"


def _public_names() -> Iterator[tuple[str, str]]:
    for module in reversed(PUBLIC):
        for name in importlib.import_module(module).__all__:
            yield name, f"{module}.{name}"


def _documented(pkg: griffe.Module, public: dict[str, str]) -> Iterator[griffe.Object]:
    """Yield what is public, with its members and those that it inherits."""
    waiting, seen = [pkg[path.removeprefix("hixl_async.")] for path in public.values()], set[str]()
    while waiting:
        found = waiting.pop()
        obj = found.final_target if isinstance(found, griffe.Alias) else found
        if obj.path in seen:
            continue
        seen.add(obj.path)
        yield obj
        if isinstance(obj, griffe.Class):
            waiting += [member for name, member in obj.all_members.items() if not name.startswith("_")]


def _walk(obj: griffe.Object) -> Iterator[griffe.Object]:
    yield obj
    for member in obj.members.values():
        if isinstance(member, griffe.Object):
            yield from _walk(member)


def _follow_assignments(cls: griffe.Class) -> None:
    """Show ``read = Core.read`` in a class as the method that it is."""
    for name, member in list(cls.members.items()):
        owner, _, method = str(getattr(member, "value", "")).rpartition(".")
        if isinstance(member, griffe.Attribute) and method == name and owner.isidentifier():
            with contextlib.suppress(griffe.NameResolutionError, KeyError):
                target = cls.modules_collection[cls.module.resolve(owner)][name]
                if target.is_function:
                    cls.set_member(name, griffe.Alias(name, target, parent=cls))


def _show_overloads(cls: griffe.Class) -> None:
    """Show the first overload of what a stub only overloads, and the others with it."""
    for name, overloads in list(cls.overloads.items()):
        if overloads and name not in cls.members:
            del cls.overloads[name]
            cls.set_member(name, overloads[0])
            overloads[0].overloads = overloads[1:]


def _show_constructor(cls: griffe.Class) -> None:
    """Show what a stub says of ``__new__`` as the class's parameters, and nothing where the class is not to be called."""
    constructor = cls.members.pop("__new__", None)
    if isinstance(constructor, griffe.Function):
        cls.set_member("__init__", constructor)
        constructor.name = "__init__"
    constructor = cls.members.get("__init__")
    if isinstance(constructor, griffe.Function) and any(
        str(given.annotation) == "Never" for given in constructor.parameters
    ):
        del cls.members["__init__"]


def _comment_above(obj: griffe.Object) -> str:
    """Return the ``#:`` lines above an attribute."""
    if not isinstance(obj, griffe.Attribute) or obj.lineno is None or obj.filepath not in obj.lines_collection:
        return ""
    found: list[str] = []
    for line in reversed(obj.lines_collection[obj.filepath][: obj.lineno - 1]):
        if not line.lstrip().startswith("#:"):
            break
        found.insert(0, line.lstrip().removeprefix("#:").removeprefix(" "))
    return "\n".join(found)


def _runtime_docstring(obj: griffe.Object) -> str:
    """Return the docstring of an object that a stub describes; that of a constructor is its class's."""
    if (
        isinstance(obj, griffe.Module)
        or obj.filepath is None
        or obj.filepath.suffix != ".pyi"
        or obj.name == "__init__"
    ):
        return ""
    module, path = obj.module.path, obj.path.removeprefix(f"{obj.module.path}.")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name, None)
    found = getattr(found, "__func__", found)
    text = getattr(found, "__doc__", None)
    return inspect.cleandoc(_EMBEDDED.sub("", text)) if isinstance(text, str) else ""


def _spelled_out(annotation: Any) -> Any:
    """Return a type with the stubs' private aliases replaced by what they stand for."""
    if isinstance(annotation, griffe.ExprName) and annotation.name.startswith("_"):
        scope = annotation.parent
        while isinstance(scope, griffe.Object) and not isinstance(scope, griffe.Module):
            scope = scope.parent
        alias = scope.members.get(annotation.name) if isinstance(scope, griffe.Module) else None
        if isinstance(alias, griffe.Attribute) and alias.value is not None:
            return _spelled_out(alias.value)
    elif isinstance(annotation, griffe.Expr) and is_dataclass(annotation):
        for field in fields(annotation):
            value = getattr(annotation, field.name)
            if isinstance(value, griffe.Expr):
                setattr(annotation, field.name, _spelled_out(value))
            elif isinstance(value, list):
                setattr(annotation, field.name, [_spelled_out(item) for item in value])
    return annotation
