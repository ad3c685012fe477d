"""Messages, frames and seals, without sockets."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hixl_async.control import codec
from hixl_async.errors import ProtocolError

kinds = st.from_regex(codec._KIND, fullmatch=True)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5), max_leaves=20
)
bodies = st.dictionaries(text, values, max_size=5)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def nested(levels: int) -> dict[str, Any]:
    """Return a body that makes its message `levels` deep."""
    value: list[Any] = []
    for _ in range(levels - 3):
        value = [value]
    return {"": value}


@given(kinds, bodies)
def test_encoding_and_decoding_are_inverse(kind: str, body: dict[str, Any]) -> None:
    if 1 + _depth(body) <= codec.MAX_DEPTH:
        data = codec.encode(kind, body)
        assert codec.decode(data) == (kind, body)
        assert codec.encode(*codec.decode(data)) == data


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        codec.decode(data)


@given(kinds, bodies, st.data())
def test_an_altered_message_is_another_message_or_a_protocol_error(
    kind: str, body: dict[str, Any], data: st.DataObject
) -> None:
    raw = bytearray(codec.encode(kind, body))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = codec.decode(bytes(raw))
    except ProtocolError:
        return
    assert codec.decode(codec.encode(*message)) == message  # whatever was decoded can be sent on


@given(st.text(max_size=200) | st.from_regex(r'\{"(kind|body)":[-+\[\]{}0-9eE.,"a-zA-Z\\]*'))
def test_any_text_is_a_message_or_a_protocol_error(value: str) -> None:
    with contextlib.suppress(ProtocolError):
        codec.decode(value.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "Expecting value"),
        (b"[]", "object of exactly"),
        (b'"kind"', "object of exactly"),
        (b"{}", "object of exactly"),
        (b'{"kind":"x"}', "object of exactly"),
        (b'{"kind":"x","body":{},"more":1}', "object of exactly"),
        (b'{"kind":1,"body":{}}', "kind"),
        (b'{"kind":"","body":{}}', "kind"),
        (b'{"kind":"X","body":{}}', "kind"),
        (b'{"kind":"x\\n","body":{}}', "kind"),
        (b'{"kind":"' + b"x" * 33 + b'","body":{}}', "kind"),
        (b'{"kind":"x","body":[]}', "object"),
        (b'{"kind":"x","body":null}', "object"),
        (b'{"kind":"x","kind":"x","body":{}}', "twice"),
        (b'{"kind":"x","body":{"a":{"b":1,"b":1}}}', "twice"),
        (b'{"kind":"x","body":{"a":NaN}}', "NaN"),
        (b'{"kind":"x","body":{"a":-Infinity}}', "Infinity"),
        (b'{"kind":"x","body":{"a":1e999}}', "finite"),
        (b'{"kind":"x","body":{"a":' + b"9" * 400 + b".5}}", "finite"),
        (b'{"kind":"x","body":{"a":18446744073709551616}}', "64 bits"),
        (b'{"kind":"x","body":{"a":-9223372036854775809}}', "64 bits"),
        (b'{"kind":"x","body":{"a":' + b"1" * 6000 + b"}}", "integer string"),
        (b'{"kind":"x","body":{"a":"\\ud800"}}', "surrogate pair"),
        (b'{"kind":"x","body":{"\\udfff":1}}', "surrogate pair"),
        (b'{"kind":"x","body":{"a":"\xff"}}', "decode"),
        (b'{"kind":"x","body":{}}trailing', "Extra data"),
        (b'{"kind":"x","body":{}}{"kind":"x","body":{}}', "Extra data"),
        (b"\xef\xbb\xbf" + b'{"kind":"x","body":{}}', "Expecting value"),
        (b'{"kind":"x","body":{"a":"\n"}}', "control character"),
        (b'{"kind":"x","body":{"a":' + b"[" * 2000 + b"]" * 2000 + b"}}", "nested"),
        (b'{"kind":"x","body":' + b'{"a":' * 60 + b"1" + b"}" * 60 + b"}", "nested"),
        (b"[" * 60000, "more than 2048 objects"),
        (b'{"kind":"x","body":{"a":[' + b"{}," * 2046 + b"{}]}}", "more than 2048 objects"),
        (b'{"kind":"x","body":{"a":[' + b"1," * 16384 + b"1]}}", "more than 16384 values"),
        (b'{"kind":"x","body":{"a":[' + b"1.5," * 8192 + b"1.5]}}", "more than 8192 floats"),
        (b'{"kind":"x","body":{"a":[' + b"1E5," * 8192 + b"1.5]}}", "more than 8192 floats"),
    ],
)
def test_malformed_messages_are_refused(raw: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        codec.decode(raw)


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("", {}, "kind"),
        ("Region", {}, "kind"),
        ("x" * 33, {}, "kind"),
        (None, {}, "kind"),
        ("x", [], "dict"),
        ("x", {1: 2}, "keys"),
        ("x", {"a": [{None: 1}]}, "keys"),
        ("x", {"a": math.nan}, "finite"),
        ("x", {"a": [math.inf]}, "finite"),
        ("x", {"a": 1 << 64}, "64 bits"),
        ("x", {"a": {"b": -(1 << 63) - 1}}, "64 bits"),
        ("x", {"a": b"bytes"}, "bytes"),
        ("x", {"a": {1, 2}}, "set"),
        ("x", {"a": object()}, "object"),
        ("x", {"a": "\ud800"}, "surrogate"),
        ("x", nested(codec.MAX_DEPTH + 1), "nested"),
        ("x", {"a": [[]] * codec.MAX_CONTAINERS}, "more than 2048 objects"),
        ("x", {"a": [{}] * codec.MAX_CONTAINERS}, "more than 2048 objects"),
        ("x", {"a": [1] * (codec.MAX_VALUES + 1)}, "more than 16384 values"),
        ("x", {"a": [0.5] * (codec.MAX_FLOATS + 1)}, "more than 8192 floats"),
        ("x", {"a": "x" * codec.ESTABLISHED_LIMIT}, "over the limit"),
    ],
)
def test_bodies_that_cannot_be_encoded(kind: str, body: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        codec.encode(kind, body)


@pytest.mark.parametrize("text", ["{" * 20_000, "[" * 20_000, "," * 40_000, "4e" * 20_000, '\\"{' * 10_000])
def test_what_is_inside_of_strings_is_not_counted(text: str) -> None:
    body = {"a": text, "b": [text[:100], 0.5]}
    assert codec.decode(codec.encode("x", body)).body == body
    too_many = {"a": text[:20_000], "b": [{}] * codec.MAX_CONTAINERS}
    with pytest.raises(ProtocolError, match="more than 2048 objects"):
        codec.encode("x", too_many)


def test_an_open_string_hides_nothing() -> None:
    raw = b'{"body":{"a":' + b"[" * 3000 + b'"' + b"{" * 3000
    with pytest.raises(ProtocolError, match="more than 2048 objects"):
        codec.decode(raw)


def test_a_cycle_cannot_be_encoded() -> None:
    body: dict[str, Any] = {}
    body["self"] = body
    with pytest.raises(ProtocolError, match="nested"):
        codec.encode("x", body)


def test_both_directions_agree_on_depth() -> None:
    body = nested(codec.MAX_DEPTH)
    assert codec.decode(codec.encode("x", body)).body == body
    raw = json.dumps({"body": nested(codec.MAX_DEPTH + 1), "kind": "x"}).encode()
    with pytest.raises(ProtocolError, match="nested"):
        codec.decode(raw)


def test_both_directions_agree_on_length() -> None:
    room = 100 - len(codec.encode("x", {"a": ""}))
    assert len(codec.encode("x", {"a": "y" * room}, limit=100)) == 100
    with pytest.raises(ProtocolError, match="101 bytes is over the limit of 100"):
        codec.encode("x", {"a": "y" * (room + 1)}, limit=100)
    data = codec.encode("x", {"a": "y" * room})
    assert codec.decode(data, limit=100).kind == "x"
    with pytest.raises(ProtocolError, match="100 bytes is over the limit of 99"):
        codec.decode(data, limit=99)


def test_both_directions_agree_on_the_number_of_containers() -> None:
    body: dict[str, Any] = {"a": [{}] * (codec.MAX_CONTAINERS - 3)}
    assert codec.decode(codec.encode("x", body)).body == body


def test_tuples_are_lists() -> None:
    assert codec.decode(codec.encode("x", {"a": (1, (2,))})).body == {"a": [1, [2]]}


@given(st.lists(st.binary(max_size=200), max_size=10), st.lists(st.integers(1, 50), min_size=1))
def test_frames_survive_any_segmentation(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(codec.frame, messages))
    decoder = codec.FrameDecoder(200)
    found = []
    at = turn = 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        decoder.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
        while (data := decoder.next()) is not None:
            found.append(data)
    assert found == messages
    assert len(decoder) == 0


def test_a_long_frame_is_refused_before_it_arrives() -> None:
    decoder = codec.FrameDecoder(100)
    decoder.feed(codec.frame(b"the first") + (101).to_bytes(4, "big"))
    assert decoder.next() == b"the first"
    with pytest.raises(ProtocolError, match="101 bytes is over the limit of 100"):
        decoder.next()
    http = codec.FrameDecoder(codec.HANDSHAKE_LIMIT)
    http.feed(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ProtocolError, match="it is not a hixl_async engine; it began with b'GET / HTTP/1.1"):
        http.next()


def test_the_limit_of_frames_can_grow_between_frames() -> None:
    decoder = codec.FrameDecoder(10)
    decoder.feed(codec.frame(b"short") + codec.frame(b"x" * 50))
    assert decoder.next() == b"short"
    decoder.limit = 50
    assert decoder.next() == b"x" * 50


class TestSeal:
    def test_fits(self) -> None:
        sending, receiving = codec.Seal(b"key"), codec.Seal(b"key")
        for message in (b"one", b"", b"one"):
            assert receiving.open(sending.close(message)) == message

    @given(st.binary(max_size=50), st.data())
    def test_detects_every_alteration(self, message: bytes, data: st.DataObject) -> None:
        sealed = bytearray(codec.Seal(b"key").close(message))
        sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
        with pytest.raises(ProtocolError, match="seal"):
            codec.Seal(b"key").open(bytes(sealed))

    @pytest.mark.parametrize("order", [(1,), (0, 0), (0, 2)], ids=["first dropped", "repeated", "skipped"])
    def test_detects_missing_and_moved_messages(self, order: tuple[int, ...]) -> None:
        sending, receiving = codec.Seal(b"key"), codec.Seal(b"key")
        sealed = [sending.close(message) for message in (b"a", b"b", b"c")]
        for index in order[:-1]:
            receiving.open(sealed[index])
        with pytest.raises(ProtocolError, match="seal"):
            receiving.open(sealed[order[-1]])

    @pytest.mark.parametrize("data", [b"", b"short", b"x" * 15, b"x" * 16])
    def test_detects_truncation(self, data: bytes) -> None:
        with pytest.raises(ProtocolError, match="seal"):
            codec.Seal(b"key").open(data)

    def test_does_not_fit_another_key(self) -> None:
        with pytest.raises(ProtocolError, match="seal"):
            codec.Seal(b"key").open(codec.Seal(b"other").close(b"a"))


ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.text(max_size=3), st.integers(), st.integers(2**63, 2**65), st.floats(),
        st.binary(max_size=2), st.just({1}),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 3)), inner, max_size=3),
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=2), ANYTHING, max_size=4), st.integers(0, 20))
def test_the_quick_check_accepts_nothing_that_the_full_one_refuses(body: dict[str, Any], levels: int) -> None:
    for _ in range(levels):
        body = {"": body}
    if codec._is_small_and_plain(body):
        codec._check(body)


@pytest.mark.parametrize("levels", [1, codec.MAX_DEPTH - 1, codec.MAX_DEPTH, codec.MAX_DEPTH + 1])
def test_small_bodies_have_the_same_limit_of_depth(levels: int) -> None:
    body: dict[str, Any] = {}
    for _ in range(levels - 1):
        body = {"": body}
    fits = contextlib.nullcontext() if levels < codec.MAX_DEPTH else pytest.raises(ProtocolError, match="levels deep")
    with fits:
        codec.encode("x", body)
