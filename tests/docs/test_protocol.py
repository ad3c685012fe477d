"""The functions of docs/protocol.md, written with the standard library alone, give what the package's own give."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import re
from dataclasses import replace
from typing import Any

import pytest

from hixl_async import kv
from hixl_async.control import ESTABLISHED_LIMIT, MAX_DESCRIPTORS, PROTOCOL_VERSION, codec
from hixl_async.control.identity import Secret
from hixl_async.kv.description import describe, describe_groups, fingerprint
from hixl_async.testing import engine_pair

from .pages import ROOT, blocks

PAGE = ROOT / "docs/protocol.md"
TEXT = PAGE.read_text()


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(PAGE):
        code = block.compile()
        if not code.co_flags & inspect.CO_COROUTINE:  # the others need engines, and run in test_pages.py
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, namespace)
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


# ---- KV streams ------------------------------------------------------------------------------------------------------

STREAMS = TEXT.split("## KV streams")[1]
GROUP = kv.Group.attention(3, kv_heads=2, head_dim=4, dtype="float16")
VIEW = kv.View.ordered(GROUP, "L/PBTH", blocks=8, block_tokens=4)
TICKET = kv.Ticket(
    id="größe",
    address="127.0.0.1:1",
    engine="decode",
    incarnation="0" * 32,
    pool="kv",
    views="9f" * 8,
    slices=(kv.Slice((5, 0, 3, 2), 0, 3, 15), kv.Slice((7,), 8, 9, 10)),
    sources=tuple(kv.shards(3, ranks=2)),
    rows=(4, 9),
    generation=(1 << 40) - 1,
    lease=10_000,
)


def table(section: str) -> list[list[str]]:
    """Return the cells of the first table of a section."""
    lines = re.findall(r"(?:^\|.*\n)+", TEXT.split(f"{section}\n")[1], re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def fields(section: str) -> list[str]:
    """Return the names in the first column of a section's table."""
    return sorted(name for first, *_ in table(section) for name in re.findall(r"`(\w+)`", first))


def test_fields_of_messages_of_streams() -> None:
    shard, groups = kv.Shard(0, 1, [0]), describe_groups([GROUP])
    bodies = {
        "open": kv.protocol.Open("id", "digest", "pool", 0, (shard, groups)).body(),
        "end": kv.protocol.End("id", 0, True, "").body(),
        "published": kv.protocol.Published("id", 0, ((0, 16, 1),), None).body(),
        "decision": kv.protocol.Decision("id", True, "").body(),
    }
    listed: dict[str, list[str]] = {}
    message = ""
    for first, field, _ in table("## KV streams"):
        message = first.strip("`") or message
        listed.setdefault(message, []).append(field.strip("`"))
    assert {name: sorted(listed["each"] + listed[name]) for name in bodies} == {
        name: sorted(body) for name, body in bodies.items()
    }
    assert all(body["say"] == name for name, body in bodies.items())
    assert f"up to {kv.protocol.PAYLOAD_BYTES >> 10} KiB" in STREAMS


async def test_fields_of_the_answer_to_a_reader() -> None:
    """The page's own reader, in test_pages.py, reads by these fields."""
    async with (
        engine_pair() as pair,
        kv.Pool(pair.right, VIEW, access="read") as pool,
        pool.reserve(blocks=1) as blocks,
    ):
        offer = blocks.offer()
        ticket, cache = kv.Ticket.parse(offer.ticket()), (VIEW.shard, describe_groups([GROUP]))
        opening = kv.protocol.Open(ticket.id, ticket.digest(), "reader", 0, cache)
        answer = await pair.peer.request("kv/kv", opening.body())
        assert fields("### Offers") == sorted(answer)
        assert answer["published"] == kv.protocol.Published(ticket.id, 0, (), None).body()
        await pair.peer.request("kv/kv", kv.protocol.End(ticket.id, 0, False, "").body())
        await offer.abort()


def test_fields_of_tickets_and_views() -> None:
    assert fields("### Tickets") == sorted(TICKET.body())
    assert fields("### Views") == sorted(*describe([VIEW]))
    assert f"| `version` | {TICKET.body()['version']} |" in STREAMS


def test_digests_of_tickets_and_fingerprints_of_views(page: dict[str, Any]) -> None:
    assert page["digest"](TICKET.body()) == TICKET.digest()
    views = describe([VIEW])
    assert hashlib.sha256(page["canonical"](views)).hexdigest()[:16] == fingerprint(views)


@pytest.mark.parametrize("ids", [(0,), (5, 0, 3, 2), tuple(range(2000)), ((1 << 31) - 1, 0)])
def test_packed_blocks(page: dict[str, Any], ids: tuple[int, ...]) -> None:
    ticket = replace(TICKET, slices=(kv.Slice(ids, 0, 0, 1), kv.Slice((7,), 0, 0, 1)))
    body = ticket.body()
    assert tuple(page["unpack_blocks"](body["slices"][0][0])) == ids
    body["slices"][0][0] = page["pack_blocks"](ids)
    assert kv.Ticket.parse(body) == ticket


@pytest.mark.parametrize("parts", [(1, 0, False), (7, 48, True), ((1 << 40) - 1, kv.words.LAYER_TOKENS, True)])
def test_words(page: dict[str, Any], parts: tuple[int, int, bool]) -> None:
    assert page["pack_word"](*parts) == kv.words.pack_word(*parts)
    assert kv.words.parse_word(page["pack_word"](*parts)) == parts
