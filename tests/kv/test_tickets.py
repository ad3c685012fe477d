"""Tickets: their text, and that one which was changed on its way to the producer is refused."""

from __future__ import annotations

import json
import zlib
from array import array
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes import settle

from hixl_async.errors import (
    BusyError,
    HixlError,
    ProtocolError,
    StreamAbortedError,
    TicketError,
)
from hixl_async.kv import Pool, Shard, Slice, Ticket, Verdict
from hixl_async.kv.description import describe, fingerprint

from .conftest import VIEW, Pair, push_all


def packed(ids: list[int]) -> str:
    """Return block ids as a ticket has them: their differences, deflated, in base 64."""
    steps = [after - before for before, after in zip([0, *ids], ids, strict=False)]
    return b64encode(zlib.compress(array("i", steps).tobytes(), 1)).decode()


def slices(blocks: st.SearchStrategy[list[int]]) -> st.SearchStrategy[list[Any]]:
    positions = st.sets(st.integers(0, 12), min_size=2, max_size=2).map(sorted)
    return st.builds(lambda ids, start, ends: [[packed(ids), start, *ends]], blocks, st.integers(0, 4), positions)


#: Ways to change one field, by its name; each keeps the ticket well-formed where that is possible.
CHANGES: dict[str, Callable[[Any], st.SearchStrategy[Any]]] = {
    "version": lambda _: st.integers(0, 5),
    "id": lambda _: st.text(max_size=30),
    "address": lambda _: st.text(max_size=30),
    "engine": lambda _: st.text(max_size=30),
    "incarnation": lambda _: st.text(max_size=30),
    "pool": lambda _: st.text(max_size=30) | st.sampled_from(["kv", "prefill"]),
    "slices": lambda _: slices(st.lists(st.integers(0, 17), min_size=1, max_size=6, unique=True)) | st.just([]),
    "sources": lambda _: st.just([[0, 1, [0, 1, 2, 3]]]) | st.just([[0, 2, [0, 1, 2, 3]]]) | st.just([[0, 1, [0]]]),
    "rows": lambda _: st.lists(st.integers(0, 17), max_size=2),
    "generation": lambda number: st.integers(-2, 2).map(number.__add__) | st.integers(1, (1 << 40) - 1),
    "views": lambda _: st.text(max_size=16),
    "lease": lambda number: st.integers(-2, 2).map(number.__add__) | st.integers(1, 100_000),
    "verb": lambda _: st.just("read") | st.text(max_size=5),
    "unknown": lambda _: st.none() | st.integers(),
}


@pytest.mark.parametrize("field", CHANGES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_a_changed_ticket_is_refused_and_nothing_is_written(pair: Pair, field: str, data: st.DataObject) -> None:
    async with pair.target.reserve(blocks=3) as blocks, pair.source.reserve(blocks=3) as source:
        stream = blocks.stream()
        issued = stream.ticket()
        value = data.draw(CHANGES[field](issued.get(field)).filter(lambda value: value != issued.get(field, field)))
        with pytest.raises(TicketError):
            async with pair.source.open_stream(pair.to_d, {**issued, field: value}) as out:
                push_all(out, source)
        await settle()
        await stream.drained() if stream.outcome else None
    assert pair.p.transfers == []
    assert not any(pair.layer(pair.target, range(16), layer).strip(b"\0") for layer in range(4))
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_no_ticket_of_a_stream_that_has_ended(pair: Pair) -> None:
    """It could not be used: it has expired, was aborted, or its layers have landed."""
    async with pair.target.reserve(blocks=1) as blocks, pair.source.reserve(blocks=1) as source:
        expired = blocks.stream(ttl=0.01)
        with pytest.raises(BusyError, match="being written by a stream"):
            blocks.stream()
        issued = expired.ticket()
        with pytest.raises(TicketError, match=r"no producer opened the ticket within 0\.01 s"):
            await expired.finished()
        with pytest.raises(TicketError, match=r"cannot be used any more: no producer opened .*; make another stream"):
            expired.ticket()
        aborted = blocks.stream()
        await aborted.abort("enough")
        with pytest.raises(TicketError, match="cannot be used any more: enough; make another stream"):
            aborted.ticket()
        stream = blocks.stream()
        assert stream.ticket() == stream.ticket() != issued
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            push_all(out, source)
        with pytest.raises(TicketError, match="cannot be used any more: all layers have landed"):
            stream.ticket()


async def test_both_sides_are_told_of_a_changed_block_list(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.target.reserve(blocks=2) as others:
        stream = blocks.stream()
        ticket = {**stream.ticket(), "slices": [[packed(list(others.ids)), 0, 0, 8]]}
        with pytest.raises(TicketError, match="not the one that was issued"):
            await pair.source.open_stream(pair.to_d, ticket)
        with pytest.raises(TicketError, match="not the one that was issued"):
            await stream.finished()
        outcome = stream.outcome
        assert outcome is not None
        assert outcome.verdict is Verdict.INVALID_TICKET
        await stream.drained()
        with pytest.raises(TicketError, match="another stream"):
            stream.ticket()
    assert pair.p.transfers == []


async def test_a_changed_copy_of_a_used_ticket_disturbs_no_stream(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            body = {
                "say": "open",
                "id": stream.ticket()["id"],
                "digest": "0" * 32,
                "pool": "x",
                "sender": 0,
                "cache": [[0, 1, [0, 1, 2, 3]], []],
            }
            await out.opened()
            with pytest.raises(TicketError, match="used before"):
                await pair.to_d.request("kv/kv", body)
            push_all(out, source)
        await stream.finished()


async def test_a_ticket_survives_json_whatever_the_order_of_its_fields(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        ticket = json.loads(json.dumps(dict(reversed(stream.ticket().items())), indent=1))
        async with pair.source.open_stream(pair.to_d, ticket) as out:
            push_all(out, source)
        await stream.finished()


@pytest.mark.parametrize(
    ("region", "size", "error", "message"),
    [
        ("kv.words", 24, TicketError, "the ticket names row 0 of the consumer's words, which has fewer"),
        ("kv", 100, ProtocolError, "region 'kv' of peer 'd' has 100 bytes, and its pool's views 16384"),
    ],
)
async def test_a_consumer_whose_regions_are_too_small_is_not_written(
    pair: Pair, region: str, size: int, error: type[HixlError], message: str
) -> None:
    pair.d.regions[region].size = size
    await refused(pair, error, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 0}, "blocks must be a positive integer, not 0"),
        ({"blocks": True}, "number out of range"),
        ({"block_tokens": -4}, "number out of range"),
        ({"group": None}, "'group' must be of type list"),
        ({"group": [[0, 1, 2, 3], None]}, "is malformed"),
        ({"group": [[0, 1, 2, 3], None, [["k", 2, 8, "float17", False]]]}, "dtype 'float17' is not known"),
        ({"shard": [1, 1, [0, 1, 2, 3]]}, "a shard has a number out of range"),
        ({"shard": [0, 1, [0, 1, 2, 7]]}, "layer 7 of the shard is not one of the group's"),
        ({"places": [[0, 0, 0, 1024]]}, "is malformed"),
        ({"places": [[0, -1, 0, 1024]] * 4}, "has a number out of range"),
        ({"places": [[0, 1 << 70, 0, 1024]] * 4}, "has a number out of range"),
        ({"strides": [[1, 1]]}, "is malformed"),
        ({"strides": [[0, 0, 0], [0, 0, 0]]}, "let its items overlap"),
    ],
)
async def test_a_consumer_whose_views_are_malformed_is_not_written(
    pair: Pair, change: dict[str, Any], message: str
) -> None:
    describes(pair.target, [{**describe([VIEW])[0], **change}])
    await refused(pair, ProtocolError, message)


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([], "is not a list of views"),
        ([7], "is not a list of views"),
        ({}, "'views' must be"),
        (None, "'views' must be"),
    ],
)
async def test_a_consumer_that_does_not_describe_its_views_is_not_written(pair: Pair, views: Any, message: str) -> None:
    describes(pair.target, views)
    await refused(pair, ProtocolError, message)


async def test_a_consumer_whose_blocks_do_not_exist_is_not_written(pair: Pair) -> None:
    wrong = [{**describe([VIEW])[0], "blocks": 1}]
    describes(pair.target, wrong)
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        with pytest.raises(StreamAbortedError, match="layer 0 could not be pushed: RangeError: .*must be in 0..0"):
            async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
                push_all(out, source)
        with pytest.raises(StreamAbortedError, match="RangeError"):
            await stream.finished()
        await stream.drained()
    assert pair.p.transfers == []


def describes(pool: Pool, views: Any) -> None:
    """Let a pool describe itself in this way, in its tickets too."""
    pool._registry._views, pool._registry._fingerprint = views, fingerprint(views)


async def refused(pair: Pair, error: type[HixlError], message: str) -> None:
    """Check that the producer does not trust the consumer, and both sides learn of it."""
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        out = pair.source.open_stream(pair.to_d, stream.ticket())
        push_all(out, source)
        with pytest.raises(error, match=message):
            await out
        with pytest.raises(StreamAbortedError, match=f"could not open the stream: {error.__name__}"):
            await stream.finished()
        await stream.drained()
    assert pair.p.transfers == []
    assert pair.source.statistics() == pair.target.statistics() == (16, 0, 0, 0)


# ---- the text ----


def test_a_long_ticket_is_short() -> None:
    """Blocks of a long prompt fit into a request, as long as their ids have some order."""
    one = Slice(tuple(range(100, 100 + (1 << 14))), 0, 0, 1 << 18)
    ticket = Ticket("id", "a", "d", "0", "kv", "9f", (one,), (), (0,), 1, 1000)
    assert len(json.dumps(ticket.body())) < 1000
    assert Ticket.parse(ticket.body()) == ticket


async def test_a_ticket_shows_no_more_than_its_own_blocks(pair: Pair) -> None:
    async with pair.target.reserve(blocks=5) as blocks:
        (part,) = Ticket.parse(blocks.stream(tokens=(6, 13)).ticket()).slices
        assert part == (blocks.ids[1:4], 4, 6, 13)


def test_the_digest_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = Ticket(
        id="id",
        address="[::1]:5",
        engine="d\N{LATIN SMALL LETTER U WITH DIAERESIS}",
        incarnation="0f",
        pool="kv",
        views="9f",
        slices=(Slice((3, 1, 2), 0, 5, 12), Slice((7,), 8, 8, 12)),
        sources=(Shard(0, 2, (0, 1)), Shard(1, 2, (0, 1))),
        rows=(3, 0),
        generation=(1 << 40) - 1,
        lease=10_000,
    )
    assert Ticket.parse(ticket.body()) == ticket
    expected = "d0d7aa7306c252715f9887fe2f78f955"
    assert ticket.digest() == expected
    # Libraries deflate the same data to different bytes.
    deflate = zlib.compress
    monkeypatch.setattr(zlib, "compress", lambda data, _: deflate(data, 0))
    assert Ticket.parse(ticket.body()).digest() == expected
