"""The functions of docs/protocol.md, written with the standard library alone, give what the package's own give."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest

from hixl_async import kv
from hixl_async.control import ESTABLISHED_LIMIT, MAX_DESCRIPTORS, PROTOCOL_VERSION, codec
from hixl_async.control.identity import Secret

from .pages import ROOT, blocks

PAGE = ROOT / "docs/protocol.md"
TEXT = PAGE.read_text()


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(PAGE):
        if "import hixl_async" not in block.code:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(block.compile(), namespace)
    return namespace


BODIES = [{}, {"b": [1, 2.5, None, True], "a": "größe \u2028 \"'\\"}, {"nested": {"list": [{}, []]}, "large": 2**63}]


@pytest.mark.parametrize("body", BODIES)
def test_messages_and_frames(page: dict[str, Any], body: dict[str, Any]) -> None:
    message = codec.encode("post", body)
    assert page["encode"]("post", body) == message
    assert page["frame"](message) == codec.frame(message)


def test_seals_number_their_messages(page: dict[str, Any]) -> None:
    seal = codec.Seal(b"k" * 32)
    for number in range(3):
        message = codec.encode("post", {"number": number})
        assert page["seal"](b"k" * 32, number, message) == seal.close(message)


def test_tags(page: dict[str, Any]) -> None:
    for parts in ((), (b"",), (b"one", b"two" * 1000)):
        assert page["tag"](b"a shared secret", "dialler tcp", *parts) == Secret(b"a shared secret").tag(
            "dialler tcp", *parts
        )


def test_limits() -> None:
    for number in (codec.HANDSHAKE_LIMIT, ESTABLISHED_LIMIT, codec.MAX_DEPTH, codec.MAX_CONTAINERS):
        assert re.search(rf"^\|.*\| {number:,} \|$", TEXT, re.MULTILINE)
    assert f"up to {MAX_DESCRIPTORS} descriptors" in TEXT
    assert f"version {PROTOCOL_VERSION}." in TEXT


def test_every_kind_of_message_is_listed() -> None:
    """The kinds are read from the source: every string there that looks like one of a standing connection."""
    source = "\n".join(path.read_text() for path in (ROOT / "hixl_async/engine").glob("*.py"))
    sent = set(re.findall(r'\.(?:send|tell)\(\s*"([a-z.]+)"', source)) | {"call", "post", "region.get"}
    table = TEXT.split("## After the handshake")[1].split("## KV streams")[0]
    assert sent == set(re.findall(r"^\| `([a-z.]+)` \|", table, re.MULTILINE))


def test_messages_of_streams() -> None:
    part = TEXT.split("## KV streams")[1]
    for message in (kv.protocol.Open, kv.protocol.End, kv.protocol.Abort):
        assert message.__name__.lower() in part
        for field in ("id", "reason", "complete", "generation", "layout", "pool"):
            if field in message.__dataclass_fields__:
                assert re.search(rf"{message.__name__.lower()}\s+{{[^}}]*{field}", part)
