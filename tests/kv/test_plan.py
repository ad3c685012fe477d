"""Plans against an oracle that copies element by element: every byte of the target is written once, and right."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hixl_async.errors import InvalidArgumentError, LayoutMismatchError, RangeError
from hixl_async.kv import Group, Part, Place, Shard, Strides, View
from hixl_async.kv.plan import BlockTable, Plan
from hixl_async.kv.reshard import senders

#: The physical orders of vLLM and others, and some that nobody uses.
ORDERS = [
    *("LPBTH", "LPBHT", "LBPTH", "BLPTH", "BPLHT", "PLBTH", "LBTPH", "LBTHP", "LHBTP", "THLPB"),
    *("L/PBTH", "L/BPTH", "L/BTPH", "L/PHBT", "L/PBHT", "LP/BTH", "LP/BHT", "P/LBTH", "PL/BTH"),
]
KINDS = {
    "keys and values": lambda heads: (Part("k", heads, 2, "int16"), Part("v", heads, 2, "int8")),
    "latent": lambda heads: (
        Part("latent", 1, 5, "int16", replicated=True),
        Part("rope", 1, 3, "int8", replicated=True),
    ),
    "scales": lambda heads: (
        Part("k", heads, 4, "int8"),
        Part("v", heads, 4, "int8"),
        Part("scale", heads, 1, "int16"),
    ),
    "one part": lambda heads: (Part("kv", heads, 3, "int8"),),
}


class Case(NamedTuple):
    sources: list[View]
    target: View
    here: BlockTable
    there: BlockTable
    tokens: tuple[int, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    whole = st.integers
    group = Group(
        draw(whole(1, 3)), KINDS[draw(st.sampled_from(sorted(KINDS)))](draw(st.sampled_from([1, 2, 3, 4, 6, 8])))
    )
    tokens = draw(whole(1, 24))
    chance = random.Random(draw(whole(0, 1 << 30)))

    def table(block_tokens: int, start: int) -> tuple[BlockTable, int]:
        needed = -(-(tokens - start) // block_tokens)
        ids = list(range(needed + draw(whole(0, 3))))
        if draw(st.booleans()):
            chance.shuffle(ids)
        return BlockTable(ids[:needed], start), len(ids)

    sizes = draw(whole(1, 7)), draw(whole(1, 7))
    starts = [draw(st.just(0) | whole(0, tokens - 1)) for _ in sizes]
    (here, blocks), (there, blocks_there) = (table(*side) for side in zip(sizes, starts, strict=True))
    first = draw(whole(max(starts), tokens - 1))
    ranks, ranks_there = draw(whole(1, 9)), draw(whole(1, 9))
    cuts = sorted(draw(st.sets(st.sampled_from(range(1, len(group.layers))))) if len(group.layers) > 1 else ())
    order = draw(st.sampled_from(ORDERS))
    sources = [
        View.ordered(
            group, order, blocks=blocks, block_tokens=sizes[0], rank=rank, ranks=ranks, layers=range(low, high)
        )
        for low, high in pairwise([0, *cuts, len(group.layers)])
        for rank in range(ranks)
    ]
    target = View.ordered(
        group,
        draw(st.sampled_from(ORDERS)),
        blocks=blocks_there,
        block_tokens=sizes[1],
        rank=draw(whole(0, ranks_there - 1)),
        ranks=ranks_there,
    )
    return Case(sources, target, here, there, (first, draw(whole(first + 1, tokens))))


def items(
    view: View, table: BlockTable, layer: int, first: int, last: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield the tensor, the offset and a name of each byte of some tokens of a layer, from the definition of a view."""
    for number, part in enumerate(view.group.parts):
        heads, stride, place = view.shard.heads(part), view.strides[number], view.places[layer][number]
        for position in range(first, last):
            block, token = divmod(position - table.start, view.block_tokens)
            for head in heads:
                offset = place.offset + (head - heads.start) * stride.head
                offset += int(table.ids[block]) * stride.block + token * stride.token
                for byte in range(part.item_bytes):
                    yield place.tensor, offset + byte, (layer, number, position, head, byte)


@settings(max_examples=300)
@given(cases())
def test_every_byte_is_written_once(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=10_000)
@given(cases())
def test_every_byte_is_written_once_in_ten_thousand_pairs_of_views(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    """Execute the plans of all senders, and compare the target's memory with what the definition of views demands."""
    sources, target, here, there, (first, last) = case
    names: dict[tuple[int, ...], int] = {}
    wanted = [numpy.zeros(size, dtype=numpy.int64) for size in target.tensor_bytes]
    for layer in target.shard.layers:
        for tensor, offset, name in items(target, there, layer, first, last):
            wanted[tensor][offset] = names.setdefault(name, len(names) + 1)
    written = [numpy.zeros_like(tensor) for tensor in wanted]
    times = [numpy.zeros_like(tensor) for tensor in wanted]
    owed = senders(target.group, [source.shard for source in sources], target.shard)
    for number, source in enumerate(sources):
        memory = [numpy.zeros(size, dtype=numpy.int64) for size in source.tensor_bytes]
        for layer in source.shard.layers:
            for tensor, offset, name in items(source, here, layer, first, last):
                memory[tensor][offset] = names.get(name, -1)
            shares = [share for share in owed[layer] if share.sender == number]
            plan = Plan(source, target, here, there, (first, last), shares)
            copies = plan.layer(layer)
            assert plan.nbytes == sum(row[4] * row[5] for *_, runs in copies for row in runs.tolist())
            for (tensor, begin), (tensor_there, end), runs in copies:
                for start, stride, start_there, stride_there, length, count in runs.tolist():
                    for step in range(count):
                        here_at, there_at = begin + start + step * stride, end + start_there + step * stride_there
                        written[tensor_there][there_at : there_at + length] = memory[tensor][here_at : here_at + length]
                        times[tensor_there][there_at : there_at + length] += 1
    for there_wanted, there_written, there_times in zip(wanted, written, times, strict=True):
        assert (there_written == there_wanted).all()
        assert (there_times == (there_wanted > 0)).all()


# -- shapes of real models


def llama_70b() -> Group:
    return Group.attention(80, kv_heads=8, head_dim=128, dtype="bfloat16")


def table(tokens: int, block_tokens: int, blocks: int) -> BlockTable:
    return BlockTable(random.Random(tokens).sample(range(blocks), -(-tokens // block_tokens)))


def runs_of(source: View, target: View, tokens: int, layer: int = 0) -> int:
    here, there = (table(tokens, view.block_tokens, view.blocks) for view in (source, target))
    return sum(len(runs) for *_, runs in Plan(source, target, here, there, (0, tokens)).layer(layer))


def ordered(group: Group, order: str = "LPBTH", block_tokens: int = 16, rank: int = 0, ranks: int = 1) -> View:
    return View.ordered(group, order, blocks=8192 // block_tokens, block_tokens=block_tokens, rank=rank, ranks=ranks)


@pytest.mark.parametrize(
    ("source", "target", "runs"),
    [
        # A run for each block of keys and each of values: whole blocks are contiguous on both sides.
        (ordered(llama_70b()), ordered(llama_70b()), 512),
        (ordered(llama_70b(), "L/PBTH"), ordered(llama_70b(), "BLPTH"), 512),
        # Blocks of 64 tokens are filled from four blocks of 16.
        (ordered(llama_70b()), ordered(llama_70b(), block_tokens=64), 512),
        # Half of the heads of each token: one strided run for each block, not one for each token.
        (ordered(llama_70b(), ranks=4), ordered(llama_70b(), ranks=8), 512),
        # One head's tokens are contiguous at one side only: a run for each head of each block.
        (ordered(llama_70b(), "L/PBHT"), ordered(llama_70b()), 4096),
    ],
)
def test_runs_are_few(source: View, target: View, runs: int) -> None:
    assert runs_of(source, target, 4096) == runs


def test_neighbours_are_one_run() -> None:
    view = ordered(llama_70b())
    ids = BlockTable(range(256))
    assert [len(runs) for *_, runs in Plan(view, view, ids, ids, (0, 4096)).layer(3)] == [1, 1]


def test_large_pools_do_not_overflow() -> None:
    blocks = 1 << 20
    view = View.ordered(Group.attention(94, 64, 256, "float64"), blocks=blocks, block_tokens=256)
    last = BlockTable([blocks - 1])
    piece = Plan(view, view, last, last, (0, 256)).layer(93)[-1]
    ((source, _, target, _, length, count),) = piece.runs.tolist()
    assert piece.source.offset + source + length == piece.target.offset + target + length == view.tensor_bytes[0]
    assert (length, count) == (view.strides[1].block, 1)


def test_tables_take_any_sequence_of_ids() -> None:
    tables = [BlockTable(ids, 8) for ids in ((3, 5), array("I", (3, 5)), numpy.array((3, 5)), iter([3, 5]))]
    assert {(table.ids, table.start, len(table), table.largest) for table in tables} == {((3, 5), 8, 2, 5)}


def test_layers_and_parts_that_lie_alike_share_their_runs() -> None:
    group = llama_70b()
    plan = Plan(ordered(group), ordered(group, "BLPTH", 64), table(4096, 16, 512), table(4096, 64, 128), (0, 4096))
    assert {id(piece.runs) for layer in (0, 7) for piece in plan.layer(layer)} == {id(plan.layer(0)[0].runs)}
    assert plan.nbytes == 4096 * group.token_bytes


def test_a_window_needs_the_tail_only() -> None:
    group = Group.attention(12, 8, 64, "bfloat16", window=128)
    assert group.tail(100) == (0, 100)
    assert group.tail(1000) == (873, 1000)  # and the next token itself
    assert llama_70b().tail(1000) == (0, 1000)


def test_part_of_the_layers_and_heads() -> None:
    group = llama_70b()
    stages = [Shard(rank, 3, range(low, low + 40)) for low in (0, 40) for rank in range(3)]
    owed = senders(group, stages, Shard(1, 2, group.layers))
    assert [(share.sender, share.heads) for share in owed[0] if share.part == 0] == [(1, range(4, 5)), (2, range(5, 8))]
    assert {share.sender for share in owed[79]} == {4, 5}


def test_replicas_share_the_work() -> None:
    latent = Group.latent(61, 512, 64, "bfloat16")
    ranks = [Shard(rank, 4, latent.layers) for rank in range(4)]
    by = [{share.sender for share in senders(latent, ranks, Shard(rank, 8, latent.layers))[0]} for rank in range(8)]
    assert by == [{0}, {1}, {2}, {3}] * 2


# -- refusals

SMALL = View.ordered(Group.attention(2, 2, 4, "int8"), "LPBTH", blocks=4, block_tokens=4)


@pytest.mark.parametrize(
    ("ids", "start", "tokens", "message"),
    [
        ([0, 1], 0, (0, 9), r"source's blocks hold the tokens 0 to 8, not 0 to 9"),
        ([0, 1], 4, (0, 4), r"source's blocks hold the tokens 4 to 12, not 0 to 4"),
        ([0, 4], 0, (0, 8), r"source's blocks must be in 0\.\.3, not 4"),
        ([0, 1], 0, (4, 4), "tokens must be a range with at least one token, not 4 to 4"),
        ([0, 1], 0, (-1, 4), "tokens must be a range"),
    ],
)
def test_tokens_and_blocks_that_do_not_exist(ids: list[int], start: int, tokens: tuple[int, int], message: str) -> None:
    with pytest.raises(RangeError, match=message):
        Plan(SMALL, SMALL, BlockTable(ids, start), BlockTable([0, 1, 2, 3]), tokens)


@pytest.mark.parametrize("ids", [[], [0, 0], ["a"], [1.5], 7, [[1]], [0, -1], [1 << 63], "12", [*range(100), 50]])
def test_ids_that_are_none(ids: object) -> None:
    with pytest.raises(InvalidArgumentError, match="ids must be"):
        BlockTable(ids)  # type: ignore[arg-type]


def test_groups_that_differ() -> None:
    other = View.ordered(Group.attention(2, 2, 4, "uint8"), "LPBTH", blocks=4, block_tokens=4)
    with pytest.raises(LayoutMismatchError, match="part 'k': dtype is 'int8' at the source and 'uint8' at the target"):
        Plan(SMALL, other, BlockTable([0]), BlockTable([0]), (0, 1))


def test_layers_that_are_not_held() -> None:
    stage = View.ordered(SMALL.group, "LPBTH", blocks=4, block_tokens=4, layers=[1])
    plan = Plan(SMALL, stage, BlockTable([0]), BlockTable([0]), (0, 1))
    assert plan.layer(1)
    with pytest.raises(RangeError, match="rank 0 of 1 does not hold layer 0"):
        plan.layer(0)
    with pytest.raises(LayoutMismatchError, match="hold 0 of the 2 heads of part 'k' of layer 0"):
        senders(SMALL.group, [stage.shard], SMALL.shard)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Part("", 1, 1, "int8"), "name must be a string that is not empty"),
        (lambda: Part("k", 0, 1, "int8"), "heads must be a positive integer, not 0"),
        (lambda: Part("k", 1, True, "int8"), "dim must be a positive integer, not True"),
        (lambda: Part("k", 1, 1, "int9"), "dtype 'int9' is not known"),
        (lambda: Group([], [Part("k", 1, 1, 1)]), "layers must be different numbers"),
        (lambda: Group([1, 1], [Part("k", 1, 1, 1)]), "layers must be different numbers"),
        (lambda: Group(2, []), "parts must be hixl_async.kv.Part, at least one"),
        (lambda: Group(2, [Part("k", 1, 1, 1)] * 2), "the names of parts must differ: k, k"),
        (lambda: Group(2, [Part("k", 1, 1, 1)], window=0), "window must be a positive integer"),
        (lambda: Shard(3, 3, [0]), r"rank must be in 0\.\.2, not 3"),
        (
            lambda: View.ordered(SMALL.group, "LPBT", blocks=1, block_tokens=1),
            "order must have each of L, P, B, T, H once",
        ),
        (lambda: View.ordered(SMALL.group, "B/LPTH", blocks=1, block_tokens=1), "none but L and P before a slash"),
        (lambda: View.ordered(SMALL.group, "LPBTH", blocks=0, block_tokens=1), "blocks must be a positive integer"),
        (lambda: View.ordered(SMALL.group, "LPBTH", blocks=1, block_tokens=1, layers=[9]), "layer 9 .* is not one of"),
        (lambda: explicit(places={0: [Place(0, 0)]}), "places must name exactly the layers"),
        (lambda: explicit(strides=[Strides(8, 4, 4)]), "one entry for each of 2 parts"),
        (lambda: explicit(strides=[Strides(8, 4, 4)] * 2), "part 'k': strides .* let its items overlap"),
        (lambda: explicit(strides=[Strides(-8, 4, 4)] * 2), "part 'k': offsets and strides must not be negative"),
        (lambda: explicit(places={n: [Place(0, 0), Place(2, 0)] for n in (0, 1)}), r"numbered from 0 .* not \[0, 2\]"),
    ],
)
def test_malformed_shapes(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def explicit(places: object = None, strides: object = None) -> View:
    """Return a view of two layers, two parts, four blocks of four tokens and two heads of four bytes."""
    return View(
        SMALL.group,
        SMALL.shard,
        4,
        4,
        places or {layer: [Place(0, 256 * layer), Place(0, 256 * layer + 128)] for layer in (0, 1)},  # type: ignore[arg-type]
        strides or [Strides(32, 8, 4)] * 2,  # type: ignore[arg-type]
    )


def test_views_by_strides_equal_ordered_ones() -> None:
    assert explicit() == SMALL
    assert SMALL.tensor_bytes == (512,)
    assert View.ordered(SMALL.group, "LP/BTH", blocks=4, block_tokens=4).tensor_bytes == (128,) * 4
