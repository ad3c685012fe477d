"""Layouts: sizes, dtypes, validation, and rows of batches."""

from __future__ import annotations

import array
import subprocess
import sys
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hixl_async.errors import InvalidArgumentError, RangeError
from hixl_async.kv import Layout, layout

SMOL = Layout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16)

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
    model = Layout(layers=layers, kv_heads=heads, head_dim=dim, dtype="bfloat16", block_tokens=16)
    assert model.block_bytes == block_bytes
    assert model.layer_bytes(1) == token_bytes * 16
    assert model.pool_bytes(256) == layers * token_bytes * 4096


def test_shape_is_the_pool() -> None:
    assert SMOL.shape(7) == (30, 2, 7, 16, 3, 64)
    assert numpy.prod(SMOL.shape(7)) * SMOL.item_bytes == SMOL.pool_bytes(7)
    assert [SMOL.blocks_for(tokens) for tokens in (1, 16, 17, 1200)] == [1, 1, 2, 75]


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
    assert Layout(1, 1, 1, dtype, 1).block_bytes == size


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
    assert Layout(1, 1, 1, dtype, 1) == Layout(1, 1, 1, name, 1)
    assert Layout(1, 1, 1, dtype, 1).dtype == name


@pytest.mark.torch
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "half", "int8", "float8_e4m3fn"])
def test_dtypes_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    assert Layout(1, 1, 1, dtype, 1) == Layout(1, 1, 1, name, 1)
    assert Layout(1, 1, 1, dtype, 1).item_bytes == dtype.itemsize


@pytest.mark.parametrize("dtype", [float, int, bool, object(), numpy.dtype("V3"), numpy.dtype(">f4"), 1.5, True, [2]])
def test_ambiguous_dtypes_are_refused(dtype: object) -> None:
    """Python's own ``float`` is 64 bits wide in numpy and 32 in torch."""
    with pytest.raises(InvalidArgumentError, match="dtype"):
        Layout(1, 1, 1, dtype, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0},
        {"kv_heads": -1},
        {"head_dim": 1.5},
        {"block_tokens": True},
        {"dtype": "bfloat17"},
        {"dtype": 0},
        {"dtype": None},
        {"layers": "30"},
    ],
)
def test_malformed_fields_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong)) if "dtype" not in wrong else "dtype"):
        Layout.from_fields({**SMOL.fields(), **wrong})


@pytest.mark.parametrize(
    "blocks", [None, {}, "x", True, 0, -1, 2.5, [1], 10**5000, -(10**5000)], ids=lambda blocks: type(blocks).__name__
)
def test_malformed_numbers_of_blocks_are_refused(blocks: Any) -> None:
    for size in (SMOL.layer_bytes, SMOL.pool_bytes, SMOL.shape):
        with pytest.raises(InvalidArgumentError, match="^blocks must be a positive integer"):
            size(blocks)


def test_integers_of_other_libraries_are_numbers() -> None:
    layout = Layout(numpy.int64(30), numpy.uint8(3), 64, "bfloat16", 16)
    assert layout == Layout(30, 3, 64, "bfloat16", 16)
    assert layout.fingerprint() == Layout(30, 3, 64, "bfloat16", 16).fingerprint()
    assert layout.pool_bytes(numpy.int32(2)) == layout.pool_bytes(2)
    assert {type(size) for size in layout.shape(numpy.int32(2))} == {int}


def test_malformed_layers_and_blocks_are_refused() -> None:
    for arguments in ((None, [0], [0], 1, 1), (0, None, [0], 1, 1), (0, ["x"], [0], 1, 1), (0, [0], [0], None, 1)):
        with pytest.raises(InvalidArgumentError, match="whole numbers"):
            SMOL.rows(*arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="^other must be a hixl_async.kv.Layout"):
        SMOL.mismatch(None)  # type: ignore[arg-type]


def test_fields_must_be_exactly_the_known_ones() -> None:
    for fields in ({}, {**SMOL.fields(), "more": 1}, [1], None):
        with pytest.raises(InvalidArgumentError):
            Layout.from_fields(fields)  # type: ignore[arg-type]


def test_mismatch_names_the_fields_and_the_fingerprint_follows() -> None:
    other = Layout.from_fields({**SMOL.fields(), "kv_heads": 8, "dtype": "float16"})
    assert SMOL.mismatch(other) == ["kv_heads", "dtype"]
    assert SMOL.mismatch(Layout.from_fields(SMOL.fields())) == []
    assert SMOL.fingerprint() != other.fingerprint()
    assert Layout(1, 1, 1, "fp8_e4m3", 1).fingerprint() == Layout(1, 1, 1, "float8_e4m3fn", 1).fingerprint()


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    code = f"from hixl_async.kv import Layout; print(Layout.from_fields({SMOL.fields()!r}).fingerprint())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == SMOL.fingerprint()


def test_numpy_is_never_imported() -> None:
    code = (
        "import sys, hixl_async.kv as kv\n"
        "rows = kv.Layout(2, 1, 1, 4, 1).rows(1, [0, 1, 3], [5, 6, 7], 8, 8)\n"
        "assert rows.shape == (4, 3) and rows.format == 'Q' and rows.c_contiguous, rows.shape\n"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@st.composite
def _copies(draw: st.DrawFn) -> tuple[Layout, int, list[int], list[int], int, int]:
    shape = Layout(
        draw(st.integers(1, 3)), draw(st.integers(1, 2)), 1, draw(st.integers(1, 3)), draw(st.integers(1, 2))
    )
    sources, targets = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    count = draw(st.integers(1, min(sources, targets)))
    choose = [draw(st.permutations(range(size)))[:count] for size in (sources, targets)]
    if draw(st.booleans()):
        choose = [sorted(ids) for ids in choose]
    return shape, draw(st.integers(0, shape.layers - 1)), choose[0], choose[1], sources, targets


@given(_copies())
def test_rows_copy_exactly_the_blocks_of_the_layer(copy: tuple[Layout, int, list[int], list[int], int, int]) -> None:
    shape, layer, source_ids, target_ids, sources, targets = copy
    few, layout.FEW = layout.FEW, 0
    try:
        arrays = shape.rows(layer, source_ids, target_ids, sources, targets)
    finally:
        layout.FEW = few
    bases = [((2 * layer + half) * sources, (2 * layer + half) * targets) for half in (0, 1)]
    loops = layout._rows_of_loops(bases, source_ids, target_ids, shape.block_bytes)
    assert arrays.tolist() == loops.tolist()
    assert memoryview(arrays).format in ("Q", "L")
    assert memoryview(arrays).c_contiguous

    source = numpy.random.default_rng(1).integers(0, 255, shape.pool_bytes(sources), dtype=numpy.uint8)
    moved = numpy.zeros(shape.pool_bytes(targets), dtype=numpy.uint8)
    for start, to, length in arrays.tolist():
        moved[to : to + length] = source[start : start + length]
    expected = numpy.zeros((*shape.shape(targets), shape.item_bytes), dtype=numpy.uint8)
    expected[layer, :, target_ids] = source.reshape(*shape.shape(sources), shape.item_bytes)[layer, :, source_ids]
    assert (moved == expected.reshape(-1)).all()

    pairs = list(zip(arrays.tolist(), arrays.tolist()[1:], strict=False))
    assert not [1 for one, two in pairs if one[0] + one[2] == two[0] and one[1] + one[2] == two[1]], "not merged"


def test_contiguous_blocks_become_two_rows() -> None:
    assert len(SMOL.rows(3, range(10, 85), range(20, 95), 100, 200)) == 2
    assert len(SMOL.rows(3, range(100), range(100), 100, 100)) == 1  # keys and values of whole pools are neighbours


def test_large_pools_do_not_overflow() -> None:
    model = Layout(94, 64, 256, "float64", 256)
    blocks = 1 << 20
    rows = model.rows(93, [blocks - 1], [blocks - 1], blocks, blocks)
    assert rows.tolist()[-1] == [model.pool_bytes(blocks) - model.block_bytes] * 2 + [model.block_bytes]


@pytest.mark.parametrize(
    ("layer", "source", "target"),
    [(-1, [0], [0]), (30, [0], [0]), (0, [], []), (0, [0, 1], [0]), (0, [8], [0]), (0, [0], [9]), (0, [-1], [0])],
)
@pytest.mark.parametrize("with_numpy", [True, False])
def test_rows_outside_are_refused(
    monkeypatch: pytest.MonkeyPatch, layer: int, source: list[int], target: list[int], with_numpy: bool
) -> None:
    if not with_numpy:
        monkeypatch.delitem(sys.modules, "numpy")
    with pytest.raises(RangeError):
        SMOL.rows(layer, source, target, 8, 9)


def test_rows_take_any_sequence_of_ids() -> None:
    expected = SMOL.rows(0, (1, 2), (3, 5), 8, 8).tolist()
    assert SMOL.rows(0, array.array("I", (1, 2)), numpy.array((3, 5)), 8, 8).tolist() == expected  # type: ignore[arg-type]
