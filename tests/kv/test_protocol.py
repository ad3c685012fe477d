"""The encoding of words, tickets and messages: it comes back as it was, and nothing malformed gets through."""

from __future__ import annotations

import json
import random
import zlib
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hixl_async.errors import InvalidArgumentError, ProtocolError, TicketError
from hixl_async.kv.fields import REGION_BYTES, ROWS
from hixl_async.kv.outcome import Outcome, Verdict
from hixl_async.kv.protocol import (
    PAYLOAD_BYTES,
    REASON_CHARACTERS,
    Decision,
    End,
    Open,
    Published,
    check_reason,
    parse,
    parse_reply,
)
from hixl_async.kv.shapes import Shard
from hixl_async.kv.ticket import (
    GROUPS,
    LEASES,
    POOL_BLOCKS,
    SENDERS,
    SLICE_BLOCKS,
    VERSION,
    Slice,
    Ticket,
    pack_ids,
    parse_ids,
)
from hixl_async.kv.words import GENERATION_BITS, LAYER_TOKENS, pack_word, parse_word

from .damage import JSON, damaged

SHARDS = st.builds(
    lambda rank, more, layers: Shard(rank, rank + more, layers),
    st.integers(0, 100),
    st.integers(1, 100),
    st.lists(st.integers(0, REGION_BYTES - 1), max_size=5),
)


CACHES = st.tuples(SHARDS, st.lists(JSON, max_size=2))


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    blocks = draw(st.lists(st.integers(0, POOL_BLOCKS - 1), min_size=1, max_size=8, unique=True))
    tokens = draw(st.integers(1, LAYER_TOKENS))
    first = draw(st.integers(0, REGION_BYTES - 1 - tokens))
    return Slice(tuple(blocks), draw(st.integers(0, first)), first, first + tokens)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    verb = draw(st.sampled_from(["read", "write"]))
    sources = draw(st.lists(SHARDS, min_size=1, max_size=1) if verb == "read" else st.lists(SHARDS, max_size=4))
    count = 0 if verb == "read" else max(1, len(sources))
    name = st.text(max_size=12)
    return Ticket(
        id=draw(name),
        address=draw(name),
        engine=draw(name),
        incarnation=draw(name),
        pool=draw(name),
        views=draw(name),
        slices=tuple(draw(st.lists(slices(), min_size=1, max_size=3))),
        sources=tuple(sources),
        rows=tuple(draw(st.lists(st.integers(0, ROWS - 1), min_size=count, max_size=count, unique=True))),
        generation=draw(st.integers(1, (1 << GENERATION_BITS) - 1)),
        lease=draw(st.integers(1, LEASES - 1)),
        verb=verb,
    )


def sent(body: Any) -> Any:
    """Return a body as the other side reads it."""
    return json.loads(json.dumps(body))


def deflated(data: bytes) -> str:
    return b64encode(zlib.compress(data)).decode()


TICKET = Ticket(
    id="id",
    address="host:5",
    engine="d",
    incarnation="0f",
    pool="kv",
    views="9f",
    slices=(Slice((3, 1, 2), 8, 9, 20), Slice((5,), 0, 0, 4)),
    sources=(Shard(0, 2, [0, 1]), Shard(1, 2, [0, 1])),
    rows=(7, 2),
    generation=3,
    lease=10_000,
)


# -- words


@given(
    generation=st.integers(0, (1 << GENERATION_BITS) - 1),
    tokens=st.integers(0, LAYER_TOKENS),
    complete=st.booleans(),
)
@example(generation=(1 << GENERATION_BITS) - 1, tokens=LAYER_TOKENS, complete=True)
def test_a_word_says_what_was_pack_ids(generation: int, tokens: int, complete: bool) -> None:
    word = pack_word(generation, tokens, complete)
    assert 0 <= word < 1 << 64
    assert parse_word(word) == (generation, tokens, complete)


@given(word=st.integers(0, (1 << 64) - 1))
def test_every_word_can_be_parsed(word: int) -> None:
    assert pack_word(*parse_word(word)) == word


# -- block ids


@given(ids=st.lists(st.integers(0, POOL_BLOCKS - 1), min_size=1, max_size=50))
@example(ids=[0, POOL_BLOCKS - 1, 0])
def test_block_ids_come_back(ids: list[int]) -> None:
    assert parse_ids(pack_ids(ids)) == tuple(ids)


@pytest.mark.parametrize("blocks", [1 << 14, 1 << 16])
def test_a_long_ticket_fits_into_a_request(blocks: int) -> None:
    ids = random.Random(1).sample(range(blocks), 16384)
    body = Ticket(**{**_fields(TICKET), "slices": (Slice(tuple(ids), 0, 0, 16384),)}).body()
    assert len(json.dumps(body)) < 64 << 10
    assert Ticket.parse(sent(body)).slices[0].blocks == tuple(ids)


@pytest.mark.parametrize("more", [0, 1])
def test_the_most_block_ids(more: int) -> None:
    ids = range(SLICE_BLOCKS + more)
    if more:
        with pytest.raises(ProtocolError, match=f"at most {SLICE_BLOCKS} block ids"):
            parse_ids(pack_ids(list(ids)))
    else:
        assert parse_ids(pack_ids(list(ids))) == tuple(ids)


def test_block_ids_are_not_inflated_without_limit() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        parse_ids(deflated(bytes(SLICE_BLOCKS * 40)))


BAD_IDS = [
    "",
    "=",
    "a",
    "AAAA",
    "no base 64",
    "\N{GREEK SMALL LETTER ALPHA}",
    "\ud800",
    deflated(bytes(3)),  # not a whole number of ids
    pack_ids([1, 2])[:-8],
    pack_ids([1, 2])[:4] + "\n" + pack_ids([1, 2])[4:],
    b64encode(zlib.compress(bytes(8)) + b"more").decode(),
    b64encode(zlib.compress(bytes(8))[:-1]).decode(),
]


@pytest.mark.parametrize("text", BAD_IDS)
def test_malformed_block_ids(text: str) -> None:
    with pytest.raises(ProtocolError, match="'blocks' is not a packed list"):
        parse_ids(text)


# -- tickets


def _fields(ticket: Ticket) -> dict[str, Any]:
    return {name: getattr(ticket, name) for name in Ticket.__dataclass_fields__}


@given(ticket=tickets())
def test_a_ticket_comes_back(ticket: Ticket) -> None:
    parsed = Ticket.parse(sent(ticket.body()))
    assert parsed == ticket
    assert parsed.digest() == ticket.digest()
    assert ticket.body()["version"] == VERSION


@given(one=tickets(), data=st.data())
def test_the_digest_changes_with_any_field(one: Ticket, data: st.DataObject) -> None:
    other = data.draw(tickets())
    name = data.draw(st.sampled_from(sorted(Ticket.__dataclass_fields__)))
    changed = Ticket(**{**_fields(one), name: getattr(other, name)})
    assert (changed.digest() == one.digest()) == (changed == one)


def test_the_digest_does_not_depend_on_the_library_that_deflates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries, and releases of one, deflate the same data to different bytes."""
    body, digest = TICKET.body(), TICKET.digest()
    compress = zlib.compress
    monkeypatch.setattr(zlib, "compress", lambda data, level: compress(data, 0))
    assert TICKET.body() != body
    for packed in (body, TICKET.body()):
        assert Ticket.parse(packed) == TICKET
        assert Ticket.parse(packed).digest() == digest


def _slice(**changes: Any) -> list[Any]:
    fields = {"blocks": pack_ids([3, 1]), "start": 0, "first": 0, "last": 5, **changes}
    return list(fields.values())


NUMBERS: list[Any] = [None, True, "1", 1.0, [], {}]
TEXTS: list[Any] = [None, True, 1, 1.5, ["text"], {}]
#: Malformed values of each field.
BAD: dict[str, list[Any]] = {
    "version": [*NUMBERS, VERSION - 1, VERSION + 1],
    **dict.fromkeys(("id", "address", "engine", "incarnation", "pool", "views"), TEXTS),
    "slices": [
        *([wrong] for wrong in [*NUMBERS, 1, _slice()[:3], [*_slice(), 1]]),
        *([_slice(blocks=wrong)] for wrong in [*TEXTS, *BAD_IDS, pack_ids([1, 1]), pack_ids([-1]), pack_ids([3, -4])]),
        *([_slice(**{name: wrong})] for name in ("start", "first", "last") for wrong in [*NUMBERS, -1, REGION_BYTES]),
        [_slice(start=1)],
        [_slice(first=5)],
        [_slice(last=0)],
        [_slice(last=LAYER_TOKENS + 1)],
        [_slice()] * (GROUPS + 1),
        [],
        None,
        {},
        "text",
    ],
    "sources": [
        *([wrong, wrong] for wrong in [*NUMBERS, 1, [0, 1], [0, 1, [], 1]]),
        *([[wrong, 2, []], [1, 2, []]] for wrong in [*NUMBERS, -1, 2]),
        *([[0, wrong, []], [1, 2, []]] for wrong in [*NUMBERS, -1, 0, ROWS]),
        *([[0, 2, [wrong]], [1, 2, []]] for wrong in [*NUMBERS, -1, REGION_BYTES]),
        *([[0, 2, wrong], [1, 2, []]] for wrong in [None, 1, "text", {}]),
        [[0, 2, []]],  # there are two rows
        [],
        [[0, 1, []]] * (SENDERS + 1),
        None,
        {},
        "text",
    ],
    "rows": [
        *([1, wrong] for wrong in [*NUMBERS, -1, ROWS, 1]),
        [1],
        [1, 2, 3],
        list(range(SENDERS + 1)),
        [],
        None,
        {},
        "12",
    ],
    "generation": [*NUMBERS, -1, 0, 1 << GENERATION_BITS],
    "lease": [*NUMBERS, -1, 0, LEASES],
    "verb": [*TEXTS, "", "READ", "read"],  # an offer has one source, and no rows
}
#: The fields that a ticket of an offer has otherwise, and malformed values of them.
OFFER = {"verb": "read", "sources": [[0, 2, [0, 1]]], "rows": []}
BAD_OFFERS: dict[str, list[Any]] = {
    "sources": [[], [[0, 2, []], [1, 2, []]], None],
    "rows": [[0], [0, 1], None],
    "verb": ["write", "read-write", None],
}


def test_every_field_is_tried() -> None:
    assert set(BAD) == set(TICKET.body())
    assert Ticket.parse({**TICKET.body(), "slices": [_slice()]}).slices == (Slice((3, 1), 0, 0, 5),)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_malformed_field_of_a_ticket(name: str, value: Any) -> None:
    with pytest.raises(TicketError, match="this is not a valid ticket"):
        Ticket.parse({**TICKET.body(), name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_OFFERS.items() for value in values])
def test_a_malformed_field_of_the_ticket_of_an_offer(name: str, value: Any) -> None:
    body = {**TICKET.body(), **OFFER}
    assert Ticket.parse(body).body() == body
    with pytest.raises(TicketError, match="this is not a valid ticket"):
        Ticket.parse({**body, name: value})


@pytest.mark.parametrize("name", TICKET.body())
def test_a_missing_field_of_a_ticket(name: str) -> None:
    body = TICKET.body()
    del body[name]
    with pytest.raises(TicketError, match=f"'{name}' must be of type"):
        Ticket.parse(body)


@given(body=JSON)
@example(body={})
@example(body={"version": VERSION})
def test_what_is_not_a_ticket(body: Any) -> None:
    with pytest.raises(TicketError):
        Ticket.parse(body)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(ticket=tickets(), name=st.sampled_from([*TICKET.body(), "more"]), value=JSON)
def test_a_changed_ticket_is_refused_or_another(ticket: Ticket, name: str, value: Any) -> None:
    body = {**ticket.body(), name: value}
    try:
        parsed = Ticket.parse(body)
    except TicketError:
        return
    assert parsed.body() == body or parsed == ticket
    assert (parsed == ticket) == (parsed.digest() == ticket.digest())


@given(ticket=tickets(), data=st.data())
def test_no_damage_deep_in_a_ticket_gets_through(ticket: Ticket, data: st.DataObject) -> None:
    """Whatever is accepted means the same after it was packed again."""
    body = data.draw(damaged(sent(ticket.body())))
    try:
        parsed = Ticket.parse(body)
    except TicketError:
        return
    assert Ticket.parse(parsed.body()) == parsed


# -- messages

OPEN = Open("id", "0" * 32, "prefill", 1, (Shard(1, 2, [0, 3]), [[[0, 3], None, []]]))
END = End("id", 2, True, "", b"token")
DECISION = Decision("id", True, "")
PUBLISHED = Published("id", 3, ((0, 16, 0), (2, 8, 1)), b"token")


@given(
    message=st.builds(Open, st.text(), st.text(), st.text(), st.integers(), st.none() | CACHES)
    | st.builds(End, st.text(), st.integers(), st.booleans(), st.just("why"), st.binary(max_size=50))
    | st.builds(Decision, st.text(), st.booleans(), st.just("why"))
    | st.builds(
        Published,
        st.text(),
        st.integers(),
        st.lists(st.tuples(st.integers(), st.integers(), st.integers()), max_size=3).map(tuple),
        st.none() | st.binary(max_size=50),
    )
)
def test_a_message_comes_back(message: Open | End | Decision | Published) -> None:
    assert parse(sent(message.body())) == message


def test_the_longest_end_fits_into_a_frame() -> None:
    message = End("i" * 40, SENDERS, False, "\N{PILE OF POO}" * 10_000, bytes(PAYLOAD_BYTES))
    assert len(json.dumps(message.body())) < 64 << 10
    parsed = parse(message.body())
    assert isinstance(parsed, End)
    assert (len(parsed.reason), parsed.payload) == (REASON_CHARACTERS, message.payload)


def test_the_longest_news_of_a_reader_fit_into_a_frame() -> None:
    layers = tuple((layer, REGION_BYTES, 1) for layer in range(500))
    message = Published("i" * 40, 1 << 40, layers, bytes(PAYLOAD_BYTES))
    assert len(json.dumps(message.body())) < 64 << 10
    assert parse(sent(message.body())) == message


BAD_SHARDS: list[Any] = [
    None,
    1,
    "text",
    [],
    {},
    [0, 1],
    [1, 1, []],
    [0, 1, [-1]],
    [0, 1, [True]],
    [0.0, 1, []],
    [0, ROWS, []],
]
BAD_PAYLOADS = ["a", "=", "no base 64", "\ud800", "\N{GREEK SMALL LETTER ALPHA}", "dG9r\nZW4="]
#: Malformed values of each field of each message.
BAD_MESSAGES: dict[str, tuple[Open | End | Decision | Published, dict[str, list[Any]]]] = {
    "open": (
        OPEN,
        {
            **dict.fromkeys(("say", "id", "digest", "pool"), TEXTS),
            "sender": NUMBERS,
            "cache": [
                *(1, "text", {}, [], [[0, 1, []]], [[0, 1, []], [], []]),
                *([shard, []] for shard in BAD_SHARDS),
                *([[0, 1, []], groups] for groups in (None, 1, "text", {})),
            ],
        },
    ),
    "end": (
        END,
        {
            **dict.fromkeys(("say", "id", "reason"), TEXTS),
            "sender": NUMBERS,
            "complete": [None, 1, "true", []],
            "payload": [*TEXTS, *BAD_PAYLOADS],
        },
    ),
    "published": (
        PUBLISHED,
        {
            **dict.fromkeys(("say", "id"), TEXTS),
            "sender": NUMBERS,
            "layers": [
                *(None, 1, "text", {}, [1], [None], ["abc"], [[]], [[0, 16]], [[0, 16, 0, 0]]),
                *([[wrong, 16, 0]] for wrong in NUMBERS),
                *([[0, wrong, 0]] for wrong in NUMBERS),
                *([[0, 16, wrong]] for wrong in NUMBERS),
            ],
            "payload": [*TEXTS[1:], *BAD_PAYLOADS],
        },
    ),
    "decision": (
        DECISION,
        {**dict.fromkeys(("say", "id", "reason"), TEXTS), "finished": [None, 1, "true", []]},
    ),
}


@pytest.mark.parametrize("say", BAD_MESSAGES)
def test_malformed_fields_of_a_message(say: str) -> None:
    message, bad = BAD_MESSAGES[say]
    assert set(bad) == set(message.body()), "a field is not tried"
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ProtocolError):
                parse({**message.body(), name: value})
        body = message.body()
        del body[name]
        with pytest.raises(ProtocolError, match=f"'{name}' must be of type"):
            parse(body)


@pytest.mark.parametrize("say", ["", "abort", "OPEN", "x" * 1000])
def test_an_unknown_message(say: str) -> None:
    with pytest.raises(ProtocolError, match="does not understand") as caught:
        parse({**END.body(), "say": say})
    assert len(str(caught.value)) < 100


@given(message=st.sampled_from([OPEN, END, DECISION, PUBLISHED]), data=st.data())
def test_damaged_messages(message: Open | End | Decision | Published, data: st.DataObject) -> None:
    body = data.draw(damaged(sent(message.body())))
    for read in (parse, parse_reply):
        try:
            parsed = read(body)
        except ProtocolError:
            continue
        assert parsed is not None
        assert parse(parsed.body()) == parsed


@given(body=st.dictionaries(st.text(max_size=8), JSON, max_size=4))
@example(body={})
def test_what_is_no_message(body: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        parse(body)
    if body:
        with pytest.raises(ProtocolError):
            parse_reply(body)
    else:
        assert parse_reply(body) is None


def test_a_reply_is_a_decision_or_nothing() -> None:
    assert parse_reply(DECISION.body()) == DECISION
    for other in (OPEN, END, PUBLISHED):
        with pytest.raises(ProtocolError, match="must be a decision"):
            parse_reply(other.body())


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        (Decision("id", True, "ignored"), Outcome(Verdict.FINISHED)),
        (Decision("id", False, "why"), Outcome(Verdict.ABORTED, "why")),
    ],
)
def test_a_decision_is_one_of_two_outcomes(message: Decision, outcome: Outcome) -> None:
    assert message.outcome == outcome


REASON = "bad\nWARNING forged\x1b[2J\r\u202e" + 500 * "x"


@pytest.mark.parametrize("body", [End("1", 0, False, REASON).body(), Decision("1", False, REASON).body()])
@pytest.mark.parametrize("cut", [False, True], ids=["long", "cut by its sender"])
def test_reasons_of_the_other_side_can_neither_forge_a_line_nor_control_a_terminal(
    body: dict[str, Any], cut: bool
) -> None:
    message = parse(body if cut else {**body, "reason": REASON})
    assert isinstance(message, End | Decision)
    assert message.reason.startswith("bad?WARNING forged?[2J??xxx")
    assert len(message.reason) == REASON_CHARACTERS


@pytest.mark.parametrize("reason", [None, 1, b"bytes", ["text"]])
def test_a_reason_that_is_no_text(reason: object) -> None:
    with pytest.raises(InvalidArgumentError, match="reason must be a string"):
        check_reason(reason)


@pytest.mark.parametrize("verdict", Verdict)
def test_every_failure_has_an_error(verdict: Verdict) -> None:
    error = Outcome(verdict, "why").error()
    assert (error is None) == (verdict is Verdict.FINISHED)
    if error is not None:
        assert "why" in str(error)
        assert Outcome(verdict, "why").error() is not error
