"""The check of the built site, which `make docs` ends with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT

CHECK = ROOT / "docs/tools/check_site.py"


def check(site: Path, body: str, css: str = "") -> list[str]:
    (site / "index.html").write_text(
        f"<html><head><link rel='stylesheet' href='site.css'></head><body>{body}</body></html>"
    )
    (site / "other.html").write_text("<p id='here'></p>")
    (site / "site.css").write_text(css)
    done = subprocess.run([sys.executable, CHECK, site], capture_output=True, text=True, timeout=20)
    assert done.stderr == ""
    assert done.returncode == bool(done.stdout)
    return done.stdout.splitlines()


def test_a_site_without_faults(tmp_path: Path) -> None:
    links = ["other.html", "other.html#here", "#top", "https://example.org/", "mailto:a@example.org"]
    body = "<a id='top'></a>" + "".join(f"<a href='{link}'></a>" for link in links)
    assert check(tmp_path, body + "<img src='data:image/png;base64,AA=='>") == []


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("<a href='missing.html'></a>", "index.html: dead link missing.html"),
        ("<a href='other.html#there'></a>", "index.html: dead anchor other.html#there"),
        ("<img src='missing.png'>", "index.html: missing.png does not exist"),
        ("<script src='https://cdn.example.org/a.js'></script>", "index.html: loads https://cdn.example.org/a.js"),
        ("<pre>Transfer(<i>_</i>: <b>Never</b>)</pre>", "index.html: says '_: Never'"),
        ("<p>Initialize self.  See help</p>", "index.html: says 'Initialize self.'"),
        (
            f'<div class="doc doc-signature x"><pre>Engine(<b>{"a" * 100}</b>)</pre></div>',
            "index.html: a signature's line has 108 characters: Engine(aaaaaaaaaaaaaaaaaaaaaaa",
        ),
        ("<link rel='stylesheet' href='//fonts.example.org/a.css'>", "index.html: loads //fonts.example.org/a.css"),
    ],
)
def test_faults_are_found(tmp_path: Path, body: str, found: str) -> None:
    assert check(tmp_path, body) == [found]


def test_fonts_of_other_hosts_are_found(tmp_path: Path) -> None:
    css = "@font-face { src: url('https://fonts.example.org/a.woff2') }"
    assert check(tmp_path, "", css) == ["site.css: loads https://fonts.example.org/a.woff2"]
