"""The descriptions of views: they come back as they were, and nothing malformed gets through."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hixl_async.errors import ProtocolError
from hixl_async.kv.description import describe, describe_groups, differences, fingerprint, parse_groups, parse_views
from hixl_async.kv.dtypes import ITEM_BYTES
from hixl_async.kv.shapes import Group, Part, View

from .damage import JSON, damaged


@st.composite
def groups(draw: st.DrawFn) -> Group:
    names = draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3, unique=True))
    dtypes = st.sampled_from([*ITEM_BYTES, 3, 8])
    parts = [
        Part(name, draw(st.integers(1, 5)), draw(st.integers(1, 8)), draw(dtypes), replicated=draw(st.booleans()))
        for name in names
    ]
    layers = draw(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=4, unique=True))
    return Group(layers, parts, window=draw(st.none() | st.integers(1, 1 << 20)))


@st.composite
def views(draw: st.DrawFn) -> View:
    group = draw(groups())
    axes = draw(st.permutations("LPBTH"))
    outer = "".join(axis for axis in axes if axis in "LP")[: draw(st.integers(0, 2))]
    inner = "".join(axis for axis in axes if axis not in outer)
    ranks = draw(st.integers(1, 4))
    return View.ordered(
        group,
        f"{outer}/{inner}" if outer else inner,
        blocks=draw(st.integers(1, 9)),
        block_tokens=draw(st.integers(1, 9)),
        rank=draw(st.integers(0, ranks - 1)),
        ranks=ranks,
        layers=draw(st.lists(st.sampled_from(group.layers), min_size=1, unique=True)),
    )


def sent(body: Any) -> Any:
    """Return a description as the other side reads it."""
    return json.loads(json.dumps(body))


VIEW = View.ordered(
    Group([0, 2], [Part("k", 4, 8, "float16"), Part("scale", 1, 1, 4, replicated=True)], window=64),
    "L/PBTH",
    blocks=3,
    block_tokens=2,
    rank=1,
    ranks=2,
)


@given(found=st.lists(views(), min_size=1, max_size=3))
def test_views_come_back(found: list[View]) -> None:
    parsed = parse_views(sent(describe(found)))
    assert parsed == tuple(found)
    assert [view.tensor_bytes for view in parsed] == [view.tensor_bytes for view in found]


@given(found=st.lists(groups(), max_size=3))
def test_groups_come_back(found: list[Group]) -> None:
    assert parse_groups(sent(describe_groups(found))) == found


@given(one=views(), other=views())
def test_the_fingerprints_of_different_views_differ(one: View, other: View) -> None:
    assert (fingerprint(describe([one])) == fingerprint(describe([other]))) == (one == other)
    assert fingerprint(sent(describe([one]))) == fingerprint(describe([one]))


def test_the_fingerprint_is_the_same_everywhere() -> None:
    assert fingerprint(describe([VIEW])) == "f44fc0d4b48fb0f8"


@given(body=JSON)
def test_what_is_no_description(body: Any) -> None:
    with pytest.raises(ProtocolError):
        parse_views(body)
    if body != [] and body != {} and body != "":
        with pytest.raises(ProtocolError):
            parse_groups(body)


@given(view=views(), data=st.data())
def test_a_damaged_description_is_refused_or_another(view: View, data: st.DataObject) -> None:
    body = data.draw(damaged(sent(describe([view]))))
    try:
        parsed = parse_views(body)
    except ProtocolError:
        return
    assert parse_views(describe(parsed)) == parsed


@given(group=groups(), data=st.data())
def test_damaged_groups_are_refused_or_others(group: Group, data: st.DataObject) -> None:
    body = data.draw(damaged(sent(describe_groups([group]))))
    try:
        parsed = parse_groups(body)
    except ProtocolError:
        return
    assert parse_groups(describe_groups(parsed)) == parsed


HUGE = 1 << 80
WRONG: list[Any] = [None, True, "1", 1.5, -1, HUGE, [], {}, [None], {"a": 1}]
BAD: dict[str, list[Any]] = {
    "group": [
        *WRONG,
        [[0, 2], 64],
        [[0, 2], 64, []],
        [[0, 0], 64, [["k", 4, 8, "float16", False]]],
        *([wrong, None, [["k", 4, 8, "float16", False]]] for wrong in WRONG),
        *([[0, 2], wrong, [["k", 4, 8, "float16", False]]] for wrong in WRONG[1:] if wrong != HUGE),
        *([[0, 2], None, [["k", wrong, 8, "float16", False]] * 2] for wrong in WRONG),
        *([[0, 2], None, [["k", 4, wrong, "float16", False]] * 2] for wrong in WRONG),
        *([[0, 2], None, [["k", 4, 8, wrong, False]] * 2] for wrong in [*WRONG, "float17"]),
        *([[0, 2], None, [[wrong, 4, 8, "float16", False]]] for wrong in [*WRONG, ""] if wrong != "1"),
    ],
    "shard": [*WRONG, [0, 2], [2, 2, [0, 2]], [1, 2, [0]], [1, 2, [0, 1]], [1, 2, [0, 2, 4]]],
    "blocks": [*WRONG, 0],
    "block_tokens": [*WRONG, 0],
    "places": [
        *WRONG,
        *([wrong, wrong] for wrong in WRONG),
        [[0, 0, 0, 8]],
        [[0, 0, 0], [1, 0, 1]],
        [[0, 0], [1, 0]],
        [[0, 0, 0, 8], [2, 0, 2, 8]],  # there is no tensor 1
        *([[0, 0, 0, wrong], [1, 0, 1, 8]] for wrong in WRONG),
    ],
    "strides": [*WRONG, *([wrong, wrong] for wrong in WRONG), [[8, 4, 2]], [[1, 2], [3, 4]], [[0, 0, 0], [0, 0, 0]]],
}


def test_every_field_is_tried() -> None:
    (body,) = describe([VIEW])
    assert set(BAD) == set(body)
    assert parse_views([body]) == (VIEW,)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_malformed_field_of_a_view(name: str, value: Any) -> None:
    (body,) = describe([VIEW])
    with pytest.raises(ProtocolError):
        parse_views([{**body, name: value}])


@pytest.mark.parametrize("name", describe([VIEW])[0])
def test_a_missing_field_of_a_view(name: str) -> None:
    (body,) = describe([VIEW])
    del body[name]
    with pytest.raises(ProtocolError):
        parse_views([body])


@pytest.mark.parametrize("name", ["heads", "dim"])
@pytest.mark.parametrize("bits", [62, 63, 80, 500])
def test_a_part_of_more_heads_than_python_can_count(name: str, bits: int) -> None:
    (body,) = sent(describe([VIEW]))
    body["group"][2][0][["heads", "dim"].index(name) + 1] = 1 << bits
    with pytest.raises(ProtocolError):
        parse_views([body])


def test_caches_that_differ() -> None:
    one = Group(2, [Part("k", 4, 8, "float16")])
    assert differences([one], [one]) == []
    assert differences([one], [one, one]) == ["the source has 1 groups of layers and the target 2"]
    other = Group(2, [Part("k", 2, 8, "float16")])
    assert differences([one, one], [one, other]) == ["part 'k': heads is 4 at the source and 2 at the target"]
