"""Checks a built site: every internal link leads somewhere, and nothing is loaded from another host.

python docs/tools/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
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


def _target(site: Path, page: Path, url: str) -> Path:
    path = unquote(urlsplit(url).path)
    if not path:
        return page
    return site / path.lstrip("/") if path.startswith("/") else (page.parent / path).resolve()


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1]).resolve()))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
