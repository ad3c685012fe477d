"""The pages of the documentation as programs: their Python blocks, in order."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCKS = re.compile(
    r"""
    ^<!--\ run\n (?P<hidden>.*?) ^-->$
    | ^(?P<only>[ ]*<!--\ compile\ only\ -->\n+)?
      (?P<indent>[ ]*)```(?P<language>\w*)(?:\ title="(?P<title>[^"\n]*)")?[^\n]*\n
      (?P<code>.*?)
      ^(?P=indent)```$
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


class Block(NamedTuple):
    """A Python block of a page."""

    page: Path
    #: The number of lines above it.
    above: int
    code: str
    #: False for code that needs hardware: it is compiled, and no more.
    runs: bool
    #: The file name of a program: the block is written there, and run by a later block.
    title: str | None
    #: The text block that follows it at once: what it prints.
    output: str | None

    def compile(self) -> Any:
        text = "\n" * self.above + self.code
        return compile(text, str(self.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    @property
    def shown(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.above + 1}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield the Python blocks of a page, in order; those in ``<!-- run ... -->`` comments are not shown to readers.

    A block under ``<!-- compile only -->`` is not to be run.
    """
    text = page.read_text()
    found = list(_BLOCKS.finditer(text))
    for match, following in zip_longest(found, found[1:]):
        hidden = match["hidden"] is not None
        if not hidden and match["language"] != "python":
            continue
        code = match["hidden"] if hidden else inspect.cleandoc("\n" + match["code"]) + "\n"
        output = None
        if (
            following is not None
            and following["language"] == "text"
            and not text[match.end() : following.start()].strip()
        ):
            output = inspect.cleandoc("\n" + following["code"])
        above = text.count("\n", 0, match.start("hidden" if hidden else "code"))
        yield Block(page, above, code, match["only"] is None, match["title"], output)
