"""Shapes of caches: element types, sizes, arrays of memory, and what their descriptions keep."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hixl_async.errors import InvalidArgumentError, ProtocolError, RangeError
from hixl_async.kv import Group, Part, Place, Shard, Strides, View, shards
from hixl_async.kv.description import describe, describe_groups, fingerprint, parse_groups, parse_views

SMOL = Group.attention(30, kv_heads=3, head_dim=64, dtype="bfloat16")

#: Name, layers, kv heads, head dim, bytes per token and layer (K and V), bytes of one K block of 16 tokens.
MODELS = [
    ("SmolLM2-135M", 30, 3, 64, 768, 6 << 10),
    ("Llama-3-8B", 32, 8, 128, 4096, 32 << 10),
    ("Llama-3-70B", 80, 8, 128, 4096, 32 << 10),
    ("Qwen2.5-7B", 28, 4, 128, 2048, 16 << 10),
    ("Qwen3-235B-A22B", 94, 4, 128, 2048, 16 << 10),
    ("gpt-oss-20b", 24, 8, 64, 2048, 16 << 10),
]


@pytest.mark.parametrize(("name", "layers", "heads", "dim", "token_bytes", "block_bytes"), MODELS)
def test_sizes_of_public_models(
    name: str, layers: int, heads: int, dim: int, token_bytes: int, block_bytes: int
) -> None:
    group = Group.attention(layers, kv_heads=heads, head_dim=dim, dtype="bfloat16")
    view = View.ordered(group, blocks=256, block_tokens=16)
    assert [strides.block for strides in view.strides] == [block_bytes] * 2
    assert group.token_bytes == token_bytes
    assert view.tensor_bytes == (layers * token_bytes * 4096,)
    assert View.ordered(group, "L/PBTH", blocks=256, block_tokens=16).tensor_bytes == (token_bytes * 4096,) * layers


def test_the_blocks_of_tokens() -> None:
    view = View.ordered(SMOL, blocks=7, block_tokens=16)
    assert [view.blocks_for(tokens) for tokens in (1, 16, 17, 1200)] == [1, 1, 2, 75]
    for tokens in (0, -1, 1.5, None, True):
        with pytest.raises(InvalidArgumentError, match="tokens must be a positive integer"):
            view.blocks_for(tokens)  # type: ignore[arg-type]


# ---- element types ----


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("bf16", 2),
        ("torch.float16", 2),
        ("float32", 4),
        ("int8", 1),
        ("fp8_e4m3", 1),
        ("float8_e5m2", 1),
        (4, 4),
        (3, 3),
    ],
)
def test_dtypes(dtype: str | int, size: int) -> None:
    assert Part("k", 1, 1, dtype).item_bytes == size


class NamedType:
    """Like the types of ml_dtypes or TensorFlow, as far as a layout needs them."""

    def __init__(self, name: str) -> None:
        self.name = name


class TorchType:
    """Like ``torch.bfloat16``, which has no name but prints one."""

    def __repr__(self) -> str:
        return "torch.bfloat16"


class ScalarType:
    """Like ``numpy.float16``: a class."""


ScalarType.__name__ = "float16"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (NamedType("float8_e5m2"), "float8_e5m2"),
        (NamedType("half"), "float16"),
        (TorchType(), "bfloat16"),
        (ScalarType, "float16"),
        (numpy.float16, "float16"),
        (numpy.double, "float64"),
        (numpy.longlong, "int64"),
        (numpy.bool_, "bool"),
        (numpy.dtype("float32"), "float32"),
        (numpy.dtype("<i2"), "int16"),
    ],
)
def test_dtypes_of_array_libraries(dtype: object, name: str) -> None:
    assert Part("k", 1, 1, dtype) == Part("k", 1, 1, name)
    assert Part("k", 1, 1, dtype).dtype == name


@pytest.mark.torch
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "half", "int8", "float8_e4m3fn"])
def test_dtypes_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    assert Part("k", 1, 1, dtype) == Part("k", 1, 1, name)
    assert Part("k", 1, 1, dtype).item_bytes == dtype.itemsize


@pytest.mark.parametrize(
    "dtype",
    [float, int, bool, object(), numpy.dtype("V3"), numpy.dtype(">f4"), 1.5, True, [2], "bfloat17", 0, -2, None],
)
def test_ambiguous_dtypes_are_refused(dtype: object) -> None:
    """Python's own ``float`` is 64 bits wide in numpy and 32 in torch."""
    with pytest.raises(InvalidArgumentError, match="dtype"):
        Part("k", 1, 1, dtype)


# ---- numbers ----


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("layers", lambda number: Group.attention(number, 1, 1, 1)),
        ("heads", lambda number: Group.attention(1, number, 1, 1)),
        ("dim", lambda number: Group.attention(1, 1, number, 1)),
        ("blocks", lambda number: View.ordered(SMOL, blocks=number, block_tokens=1)),
        ("block_tokens", lambda number: View.ordered(SMOL, blocks=1, block_tokens=number)),
        ("ranks", lambda number: Shard(0, number, [0])),
        ("ranks", lambda number: shards(4, ranks=number)),
        ("stages", lambda number: shards(4, stages=number)),
    ],
)
@pytest.mark.parametrize(
    "number", [None, {}, "30", True, 0, -1, 2.5, 10**5000, -(10**5000)], ids=lambda number: type(number).__name__
)
def test_malformed_numbers_are_refused(name: str, make: Callable[[Any], object], number: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name} must be"):
        make(number)


def test_integers_of_other_libraries_are_numbers() -> None:
    group = Group.attention(numpy.int64(30), numpy.uint8(3), numpy.int32(64), "bfloat16")  # type: ignore[arg-type]
    assert group == SMOL
    assert Group(numpy.arange(30), SMOL.parts) == SMOL  # type: ignore[arg-type]
    plain = View.ordered(SMOL, blocks=2, block_tokens=16, rank=1, ranks=3, layers=[4, 7])
    other = View.ordered(
        group,
        blocks=numpy.int32(2),  # type: ignore[arg-type]
        block_tokens=numpy.int8(16),  # type: ignore[arg-type]
        rank=numpy.int64(1),  # type: ignore[arg-type]
        ranks=numpy.int64(3),  # type: ignore[arg-type]
        layers=numpy.array([4, 7]),  # type: ignore[arg-type]
    )
    assert other == plain
    assert fingerprint(describe([other])) == fingerprint(describe([plain]))
    assert {type(size) for size in other.tensor_bytes} == {int}
    assert shards(numpy.int64(4), ranks=2) == shards(4, ranks=2)  # type: ignore[arg-type]


def test_large_pools_do_not_overflow() -> None:
    group = Group.attention(94, 64, 256, "float64")
    view = View.ordered(group, blocks=1 << 20, block_tokens=256)
    last = view.places[93][1].offset + ((1 << 20) - 1) * view.strides[1].block
    assert view.tensor_bytes == (last + 64 * 256 * 8 * 256,) == (94 * group.token_bytes << 28,)


# ---- arrays ----

ORDERS = ["LPBTH", "LPBHT", "BLPTH", "LBTPH", "LBTHP", "L/PBTH", "LP/BTH", "P/LBHT", "PL/BTH"]


@given(
    st.sampled_from(ORDERS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["int16", "bfloat16", 4]),
)
def test_arrays_are_all_of_the_memory(
    order: str, blocks: int, block_tokens: int, heads: int, ranks: int, dtype: str | int
) -> None:
    """Each element of a dense cache is in exactly one array, where the strides say."""
    group = Group([3, 5], [Part("k", heads, 2, dtype), Part("v", heads, 1, dtype)])
    for rank in range(ranks):
        view = View.ordered(group, order, blocks=blocks, block_tokens=block_tokens, rank=rank, ranks=ranks)
        memory = [bytearray(size) for size in view.tensor_bytes]
        number = 0
        for layer in group.layers:
            for part in group.parts:
                array = view.array(memory, layer, part.name)
                assert array.shape == (blocks, block_tokens, len(view.shard.heads(part)), part.dim)
                assert not array.any()
                array[...] = numpy.arange(number + 1, number + 1 + array.size).reshape(array.shape)
                number += array.size
        items = numpy.concatenate([numpy.frombuffer(tensor, array.dtype) for tensor in memory])
        assert sorted(items.tolist()) == list(range(1, number + 1))


def test_the_place_of_an_element() -> None:
    view = View.ordered(SMOL, blocks=7, block_tokens=16)
    memory = bytearray(view.tensor_bytes[0])
    view.array([memory], 4, "v")[5, 9, 2, 63] = 0x1234
    whole = numpy.frombuffer(memory, "uint16").reshape(30, 2, 7, 16, 3, 64)
    assert whole[4, 1, 5, 9, 2, 63] == 0x1234
    assert numpy.count_nonzero(whole) == 1


def test_the_type_of_an_array() -> None:
    view = View.ordered(Group(1, [Part("k", 1, 4, "bfloat16"), Part("v", 1, 4, 3)]), blocks=1, block_tokens=2)
    memory = [bytearray(view.tensor_bytes[0])]
    assert view.array(memory, 0, "k").dtype == numpy.uint16
    assert view.array(memory, 0, "k", "float16").dtype == numpy.float16
    for dtype in ("float32", "V3"):
        with pytest.raises(InvalidArgumentError, match=f"dtype '{dtype}' has . bytes; the elements have another size"):
            view.array(memory, 0, "k", dtype)
    with pytest.raises(InvalidArgumentError, match="numpy has no type for elements of 3 bytes; pass dtype="):
        view.array(memory, 0, "v")
    assert view.array(memory, 0, "v", "V3").shape == (1, 2, 1, 4)


def test_arrays_that_do_not_exist() -> None:
    view = View.ordered(SMOL, blocks=2, block_tokens=16, rank=1, ranks=3, layers=range(10, 20))
    memory = [bytearray(view.tensor_bytes[0])]
    for layer in (9, 20, -1):
        with pytest.raises(RangeError, match=f"rank 1 of 3 does not hold layer {layer}"):
            view.array(memory, layer, "k")
    with pytest.raises(InvalidArgumentError, match="part must be one of k, v, not 'latent'"):
        view.array(memory, 10, "latent")


# ---- groups and shards ----


def test_differences_name_the_fields() -> None:
    other = Group.attention(30, kv_heads=8, head_dim=64, dtype="float16")
    assert SMOL.differences(Group.attention(30, 3, 64, "bf16")) == []
    assert SMOL.differences(other) == [
        f"part {part!r}: {field} at the source and {there} at the target"
        for part in ("k", "v")
        for field, there in (("heads is 3", 8), ("dtype is 'bfloat16'", "'float16'"))
    ]
    assert SMOL.differences(Group.latent(30, 512, 64, "bfloat16")) == [
        "the parts are k, v at the source and latent, rope at the target"
    ]
    for same in (Group.attention(31, 3, 64, "bf16"), Group.attention(30, 3, 64, "bf16", window=8)):
        assert SMOL.differences(same) == ["the layers or the window of the group are not the same"]


@given(st.integers(1, 20), st.integers(1, 20))
def test_every_head_has_a_rank(heads: int, ranks: int) -> None:
    part = Part("k", heads, 1, 1)
    held = [part.heads_of(rank, ranks) for rank in range(ranks)]
    assert {head for one in held for head in one} == set(range(heads))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    if ranks <= heads:
        assert [head for one in held for head in one] == list(range(heads))


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_shards_divide_the_layers(layers: int, ranks: int, stages: int) -> None:
    found = shards(layers, ranks=ranks, stages=stages)
    assert [shard.rank for shard in found] == list(range(ranks)) * stages
    for rank in range(ranks):
        assert [layer for shard in found[rank::ranks] for layer in shard.layers] == list(range(layers))


# ---- descriptions ----

LATENT = Group.latent([1, 3], 512, 64, "bfloat16")
WINDOW = Group.attention([0, 2], 4, 16, 3, window=128)
VIEWS = [
    View.ordered(WINDOW, "L/PBTH", blocks=4, block_tokens=16, rank=1, ranks=2, layers=[2]),
    View.ordered(LATENT, "BLPTH", blocks=4, block_tokens=8, rank=1, ranks=2),
]


def test_views_survive_their_description() -> None:
    described = json.loads(json.dumps(describe(VIEWS)))
    assert list(parse_views(described)) == VIEWS
    assert parse_groups(json.loads(json.dumps(describe_groups([WINDOW, LATENT])))) == [WINDOW, LATENT]
    assert fingerprint(described) == fingerprint(describe(VIEWS)) != fingerprint(describe(VIEWS[:1]))


@pytest.mark.parametrize(
    "body", [7, None, [7], [[]], [[[0], None, [["k", 1, 1, 1]]]], [[[0], 0, []]], [["x", None, []]]]
)
def test_malformed_groups_are_refused(body: Any) -> None:
    with pytest.raises(ProtocolError, match="a peer's description of its KV cache"):
        parse_groups(body)


def test_names_of_types_are_equal_in_descriptions() -> None:
    one, other = (Group(1, [Part("k", 1, 1, name)]) for name in ("fp8_e4m3", "float8_e4m3fn"))
    assert describe_groups([one]) == describe_groups([other])


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    code = (
        "from hixl_async.kv import Group, View\n"
        "from hixl_async.kv.description import describe, fingerprint\n"
        "group = Group.attention(30, 3, 64, 'bfloat16')\n"
        "print(fingerprint(describe([View.ordered(group, blocks=2, block_tokens=16)])))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == fingerprint(describe([View.ordered(SMOL, blocks=2, block_tokens=16)]))


def test_numpy_is_never_imported() -> None:
    code = (
        "import sys, hixl_async.kv as kv\n"
        "group = kv.Group.attention(2, 1, 1, 4)\n"
        "view = kv.View.ordered(group, blocks=8, block_tokens=1)\n"
        "plan = kv.Plan(view, view, kv.BlockTable([0, 1, 3]), kv.BlockTable([5, 6, 7]), (0, 3))\n"
        "assert [len(piece.runs) for piece in plan.layer(1)] == [2, 2]\n"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_view_keeps_no_more_than_it_names() -> None:
    """Sides may hold more blocks, parts and layers than the other."""
    view = View(SMOL, Shard(0, 3, [4]), 2, 16, {4: [Place(0, 0), Place(1, 64)]}, [Strides(2048, 128, 128)] * 2)
    assert view.tensor_bytes == (4096, 4096 + 64)
