"""A ticket that was changed on its way to the producer is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes import settle

from hixl_async.errors import StreamAbortedError, TicketError
from hixl_async.kv import Ticket, Verdict

from .conftest import LAYOUT, Pair

#: Ways to change one field, by its name; each keeps the ticket well-formed where that is possible.
CHANGES: dict[str, Callable[[Any], st.SearchStrategy[Any]]] = {
    "version": lambda _: st.integers(0, 5),
    "id": lambda _: st.text(max_size=30),
    "address": lambda _: st.text(max_size=30),
    "engine": lambda _: st.text(max_size=30),
    "incarnation": lambda _: st.text(max_size=30),
    "pool": lambda _: st.text(max_size=30) | st.sampled_from(["kv", "prefill"]),
    "signals": lambda _: st.text(max_size=30) | st.just("kv"),
    "pool_blocks": lambda _: st.integers(1, 40),
    "layers": lambda _: st.integers(1, 8),
    "blocks": lambda blocks: (
        st.permutations(blocks) | st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True)
    ),
    "slot": lambda _: st.integers(0, 15),
    "generation": lambda number: st.integers(-2, 2).map(number.__add__) | st.integers(1, (1 << 53) - 1),
    "layout": lambda _: st.text(max_size=20),
    "unknown": lambda _: st.none() | st.integers(),
}


@pytest.mark.parametrize("field", CHANGES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_a_changed_ticket_is_refused_and_nothing_is_written(pair: Pair, field: str, data: st.DataObject) -> None:
    async with pair.target.reserve(blocks=3) as blocks, pair.source.reserve(blocks=3) as source:
        issued = blocks.ticket()
        value = data.draw(CHANGES[field](issued.get(field)).filter(lambda value: value != issued.get(field, field)))
        with pytest.raises(TicketError):
            async with pair.source.open_stream(pair.to_d, {**issued, field: value}) as out:
                for layer in range(LAYOUT.layers):
                    out.push(layer, source[layer])
        await settle()
        await blocks.fenced() if blocks.stream().outcome else None
    assert pair.p.transfers == []
    assert not any(pair.target.memory)
    assert pair.target.statistics() == (16, 0, 0, 0)


async def test_no_ticket_of_a_stream_that_has_ended(pair: Pair) -> None:
    """It could not be used: it has expired, was aborted, or its layers have landed."""
    async with pair.target.reserve(blocks=1) as blocks:
        issued = blocks.ticket(ttl=0.01)
        with pytest.raises(TicketError, match=r"no producer opened the ticket within 0\.01 s"):
            await blocks.stream().finished()
        with pytest.raises(TicketError, match=r"cannot be used any more: no producer opened .*; reserve other blocks"):
            blocks.ticket()
    async with pair.target.reserve(blocks=1) as blocks, pair.source.reserve(blocks=1) as source:
        assert blocks.ticket() == blocks.ticket() != issued
        async with pair.source.open_stream(pair.to_d, blocks.ticket()) as out:
            for layer in range(LAYOUT.layers):
                out.push(layer, source[layer])
        with pytest.raises(TicketError, match="cannot be used any more: all layers have landed"):
            blocks.ticket()


async def test_both_sides_are_told_of_a_changed_block_list(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.target.reserve(blocks=2) as others:
        ticket = {**blocks.ticket(), "blocks": list(others.ids)}
        with pytest.raises(TicketError, match="not the one that was issued"):
            await pair.source.open_stream(pair.to_d, ticket)
        with pytest.raises(TicketError, match="not the one that was issued"):
            await blocks.stream().finished()
        outcome = blocks.stream().outcome
        assert outcome is not None
        assert outcome.verdict is Verdict.INVALID_TICKET
        await blocks.fenced()
        with pytest.raises(TicketError):
            await pair.source.open_stream(pair.to_d, blocks.ticket())


async def test_a_changed_copy_of_a_used_ticket_disturbs_no_stream(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        async with pair.source.open_stream(pair.to_d, blocks.ticket()) as out:
            body = {
                "say": "open",
                "id": blocks.ticket()["id"],
                "digest": "0" * 32,
                "pool": "x",
                "layout": LAYOUT.fields(),
            }
            with pytest.raises(TicketError, match="used before"):
                await pair.to_d.request("kv/kv", body)
            for layer in range(LAYOUT.layers):
                out.push(layer, source[layer])
        await blocks.stream().finished()


async def test_a_ticket_survives_json_whatever_the_order_of_its_fields(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        ticket = json.loads(json.dumps(dict(reversed(blocks.ticket().items())), indent=1))
        async with pair.source.open_stream(pair.to_d, ticket) as out:
            for layer in range(LAYOUT.layers):
                out.push(layer, source[layer])
        await blocks.stream().finished()


@pytest.mark.parametrize(("field", "value"), [("pool_blocks", 17), ("pool_blocks", (1 << 31) - 1), ("layers", 3)])
async def test_a_consumer_whose_tickets_are_wrong_is_not_written(pair: Pair, field: str, value: int) -> None:
    async with pair.target.reserve(blocks=2) as blocks:
        blocks.ticket()
        consumer = next(iter(pair.target._registry.incoming.values()))
        consumer.ticket = replace(consumer.ticket, **{field: value})
        with pytest.raises(TicketError, match="the ticket (names|implies)"):
            await pair.source.open_stream(pair.to_d, consumer.ticket.body())
        with pytest.raises(StreamAbortedError, match="could not open the stream"):
            await blocks.stream().finished()
        await blocks.fenced()
    assert pair.p.transfers == []


def test_the_digest_is_the_same_everywhere() -> None:
    ticket = Ticket(
        id="id",
        address="[::1]:5",
        engine="d\N{LATIN SMALL LETTER U WITH DIAERESIS}",
        incarnation="0f",
        pool="kv",
        signals="kv.signals",
        pool_blocks=16,
        layers=4,
        blocks=(3, 1, 2),
        slot=3,
        generation=(1 << 53) - 1,
        layout="9f",
    )
    assert Ticket.parse(ticket.body()) == ticket
    assert ticket.digest() == "12ed02d8a9546527427b9c0a0b65b1da"
