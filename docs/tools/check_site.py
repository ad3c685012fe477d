"""Checks a built site: every internal link leads somewhere, signatures are readable, and nothing comes from another host.

python docs/tools/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: What a browser loads by itself.
LOADED = {
    "audio": ("src",), "embed": ("src",), "iframe": ("src",), "img": ("src", "srcset"), "input": ("src",), "link": ("href",),
    "object": ("data",), "script": ("src",), "source": ("src", "srcset"), "track": ("src",), "video": ("src", "poster"),
}  # fmt: skip
#: Links of this kind tell, and load nothing.
TELLING = {"canonical", "next", "prev"}
#: The most characters of a line of a signature, which pages show without a scroll bar.
WIDTH = 100
#: What a signature shows of a class that is not to be called, and what Python says of any constructor.
HOLLOW = ("_: Never", "Initialize self.")


class Page(HTMLParser):
    """The anchors and links of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif not TELLING.intersection(values.get("rel", "").split()):
            self.loaded += [values[name] for name in LOADED.get(tag, ()) if name in values]


def problems(site: Path) -> Iterator[str]:
    """Yield a line for each dead link, and for each thing that comes from elsewhere."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    for path, page in pages.items():
        shown = path.relative_to(site)
        yield from (f"{shown}: {problem}" for problem in _hollow(path.read_text()))
        for url in page.loaded:
            if urlsplit(url).netloc:
                yield f"{shown}: loads {url}"
            elif not url.startswith("data:") and not _target(site, path, url).exists():
                yield f"{shown}: {url} does not exist"
        for url in page.links:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = _target(site, path, url)
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{shown}: dead link {url}"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{shown}: dead anchor {url}"
    for path in site.rglob("*.css"):
        for url in re.findall(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", path.read_text()):
            yield f"{path.relative_to(site)}: loads {url}"


def _hollow(text: str) -> Iterator[str]:
    """Yield what an API page should not show."""
    for signature in re.findall(r'<div class="[^"]*doc-signature[^"]*">(.*?)</div>', text, re.DOTALL):
        for line in unescape(re.sub(r"<[^>]+>", "", signature)).splitlines():
            if len(line) > WIDTH:
                yield f"a signature's line has {len(line)} characters: {line[:30]}"
    plain = unescape(re.sub(r"<[^>]+>", "", text))
    yield from (f"says {words!r}" for words in HOLLOW if words in plain)


def _target(site: Path, page: Path, url: str) -> Path:
    path = unquote(urlsplit(url).path)
    if not path:
        return page
    return site / path.lstrip("/") if path.startswith("/") else (page.parent / path).resolve()


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1]).resolve()))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
