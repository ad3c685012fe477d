"""The memory of caches, against the sizes of public models and a count of blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hixl_async.errors import InvalidArgumentError
from hixl_async.kv import Group, Part, View, capacity

LLAMA_70B = Group.attention(80, kv_heads=8, head_dim=128, dtype="bfloat16")
DEEPSEEK = Group.latent(61, 512, 64, "bfloat16")


@pytest.mark.parametrize(
    ("group", "ranks", "mib"),
    [(LLAMA_70B, 1, 1280), (LLAMA_70B, 8, 160), (LLAMA_70B, 16, 160), (DEEPSEEK, 1, 274.5), (DEEPSEEK, 8, 274.5)],
)
def test_a_prompt_of_4096_tokens(group: Group, ranks: int, mib: float) -> None:
    assert capacity(group, tokens=4096, ranks=ranks).nbytes == mib * (1 << 20)


def test_sequences_and_their_prefix() -> None:
    token = LLAMA_70B.token_bytes * 80
    found = capacity(LLAMA_70B, tokens=1000, sequences=10, shared=500)
    # 63 blocks each, of which 31 are full of the prefix.
    assert found == ((31 + 10 * 32,), (31 + 10 * 32) * 16 * token, 32 * 16 * token, 31 * 16 * token)


def test_several_groups() -> None:
    full = Group.attention([0, 2], 8, 64, "bfloat16")
    local = Group.attention([1, 3], 8, 64, "bfloat16", window=128)
    found = capacity([full, local], tokens=1000, sequences=3, shared=160)
    assert found.blocks == (10 + 3 * 53, 3 * 9)
    assert found.nbytes == sum(found.blocks) * 16 * 2 * full.token_bytes
    assert capacity([full, local], tokens=100).blocks == (7, 7)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 60), st.integers(1, 9), st.integers(1, 60), st.booleans())
def test_windows_fit_wherever_they_begin(
    heads: int, ranks: int, tokens: int, block_tokens: int, window: int, replicated: bool
) -> None:
    group = Group(2, [Part("kv", heads, 3, "int8", replicated=replicated)], window=window)
    found = capacity(group, tokens=tokens, block_tokens=block_tokens, ranks=ranks)
    touched = max(
        (position // block_tokens) - (max(0, position - window + 1) // block_tokens) + 1 for position in range(tokens)
    )
    assert found.blocks[0] >= touched
    sizes = [
        View.ordered(group, "LPBTH", blocks=found.blocks[0], block_tokens=block_tokens, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    assert found.nbytes == max(view.tensor_bytes[0] for view in sizes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: capacity([], tokens=1), "groups must be hixl_async.kv.Group, at least one"),
        (lambda: capacity([7], tokens=1), "groups must be hixl_async.kv.Group"),  # type: ignore[list-item]
        (lambda: capacity(LLAMA_70B, tokens=0), "tokens must be a positive integer, not 0"),
        (lambda: capacity(LLAMA_70B, tokens=1, sequences=True), "sequences must be a positive integer, not True"),
        (lambda: capacity(LLAMA_70B, tokens=1, ranks=-1), "ranks must be a positive integer"),
        (lambda: capacity(LLAMA_70B, tokens=5, shared=6), "shared must be at most 5, the tokens of a sequence, not 6"),
        (lambda: capacity(LLAMA_70B, tokens=5, shared=-1), "shared must be a number of tokens"),
    ],
)
def test_malformed_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()
