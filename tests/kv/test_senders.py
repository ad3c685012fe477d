"""Streams of several senders: ranks of a tensor parallelism, stages of a pipeline, and both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes import settle

import hixl_async as hx
from hixl_async.errors import (
    BusyError,
    HixlError,
    LayoutMismatchError,
    PeerLostError,
    RangeError,
    StreamAbortedError,
    TicketError,
    TransferTimeoutError,
)
from hixl_async.kv import Blocks, Group, Outcome, Part, Pool, PushStream, Shard, Verdict, View, shards

from . import fake_engine
from .conftest import GROUP, LAYERS, VIEW, close, push_all

# ---- every byte, on real engines ----

TOKENS = 29
KINDS = {
    "heads": Group.attention(4, kv_heads=6, head_dim=4, dtype="float32"),
    "few heads": Group.attention(4, kv_heads=2, head_dim=4, dtype="float32"),
    "latent": Group.latent(4, 8, 4, "float32"),
    "scales": Group(4, [Part("k", 4, 8, "uint8"), Part("v", 4, 8, "uint8"), Part("scale", 4, 1, "float32")]),
}


@dataclass(frozen=True)
class Side:
    """How one side divides and stores a cache."""

    ranks: int = 1
    stages: int = 1
    order: str = "LPBTH"
    block_tokens: int = 4

    def __str__(self) -> str:
        return f"{self.ranks}x{self.stages} {self.order} of {self.block_tokens}"

    def views(self, group: Group) -> list[View]:
        return [
            View.ordered(
                group,
                self.order,
                blocks=40,
                block_tokens=self.block_tokens,
                rank=shard.rank,
                ranks=shard.ranks,
                layers=shard.layers,
            )
            for shard in shards(group.layers, ranks=self.ranks, stages=self.stages)
        ]


def token_places(view: View, ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the blocks of the tokens, and the places in them."""
    blocks, places = numpy.divmod(numpy.arange(TOKENS), view.block_tokens)
    return numpy.array(ids)[blocks].tolist(), places.tolist()


def model(group: Group) -> dict[tuple[int, str], numpy.ndarray]:  # type: ignore[type-arg]
    """Return random contents of a cache of all heads: token, head, element."""
    random = numpy.random.default_rng(3)
    return {
        (layer, part.name): random.integers(1, 250, (TOKENS, part.heads, part.dim))
        for layer in group.layers
        for part in group.parts
    }


def check(pool: Pool, blocks: Blocks, layer: int, truth: dict[tuple[int, str], numpy.ndarray]) -> None:  # type: ignore[type-arg]
    """Check that a rank has its heads of a layer."""
    (view,) = pool.views
    for part in view.group.parts:
        heads = view.shard.heads(part)
        got = pool.array(layer, part.name)[token_places(view, blocks.ids)]
        assert (got == truth[layer, part.name][:, heads.start : heads.stop]).all()


async def transfer(group: Group, here: Side, there: Side, chunks: Sequence[tuple[int, int]]) -> None:
    """Stream a sequence from all ranks and stages of one side to each of the other's."""
    truth = model(group)
    async with AsyncExitStack() as stack:

        async def pool(name: str, view: View, access: str, seed: int) -> Pool:
            engine = await stack.enter_async_context(hx.Engine("127.0.0.1:0", name=name))
            return await stack.enter_async_context(Pool(engine, view, name=name, access=access, shuffle=seed))

        sources = [await pool(f"p{n}", view, "none", n) for n, view in enumerate(here.views(group))]
        targets = [await pool(f"d{n}", view, "write", 9 + n) for n, view in enumerate(there.views(group))]

        async def produce(source: Pool, target: Pool, ticket: dict[str, object]) -> None:
            (view,) = source.views
            peer = await source.engine.connect(target.engine.address)
            async with source.reserve(tokens=TOKENS) as mine, source.open_stream(peer, ticket) as out:
                for layer in view.shard.layers:
                    for part in group.parts:
                        heads = view.shard.heads(part)
                        array = source.array(layer, part.name)
                        array[token_places(view, mine.ids)] = truth[layer, part.name][:, heads.start : heads.stop]
                for tokens in chunks:
                    for layer in view.shard.layers:
                        out.push(layer, mine, tokens=tokens)

        async def consume(target: Pool) -> None:
            (view,) = target.views
            sizes = sum(map(len, (memoryview(region) for region in target.regions)))
            async with target.reserve(tokens=TOKENS) as blocks:
                stream = blocks.stream(tokens=(0, TOKENS), sources=[source.views[0].shard for source in sources])
                ticket = stream.ticket()
                producing = asyncio.gather(*(produce(source, target, ticket) for source in sources))
                async for layer in stream:
                    assert stream.waiting_for(layer) == ()
                    check(target, blocks, layer, truth)
                await stream.finished()
                await producing
                assert set(stream.landed) == set(view.shard.layers)
                # Nothing but the tokens was written.
                used = sum(
                    numpy.count_nonzero(target.array(layer, part.name)) * target.array(layer, part.name).itemsize
                    for layer in view.shard.layers
                    for part in group.parts
                )
                heads = {part: len(view.shard.heads(part)) for part in group.parts}
                token = sum(part.item_bytes * heads[part] for part in group.parts)
                assert used == TOKENS * len(view.shard.layers) * token < sizes

        for target in targets:
            await consume(target)
        assert all(pool.statistics() == (40, 0, 0, 0) for pool in (*sources, *targets))


WHOLE = [(0, TOKENS)]


@pytest.mark.parametrize(
    ("kind", "here", "there"),
    [
        ("heads", Side(ranks=2), Side()),
        ("heads", Side(), Side(ranks=3, order="L/PBTH")),
        ("heads", Side(ranks=3, order="BLPTH", block_tokens=7), Side(ranks=2, order="LP/BHT", block_tokens=16)),
        ("heads", Side(ranks=4), Side(ranks=6)),  # divides neither the heads nor the ranks
        ("heads", Side(ranks=2, stages=2, order="L/PBHT"), Side(ranks=3)),
        ("heads", Side(stages=4), Side(stages=2)),
        ("few heads", Side(ranks=4), Side(ranks=3)),  # several ranks have the same head
        ("few heads", Side(ranks=4, stages=2), Side(ranks=8)),
        ("latent", Side(ranks=3), Side(ranks=2, order="LBTPH")),
        ("scales", Side(ranks=2, order="LBPTH"), Side(ranks=4, order="PL/BTH", block_tokens=3)),
    ],
    ids=str,
)
async def test_every_rank_gets_its_heads(kind: str, here: Side, there: Side) -> None:
    await transfer(KINDS[kind], here, there, WHOLE)


async def test_chunks_of_several_senders() -> None:
    await transfer(KINDS["heads"], Side(ranks=2, stages=2), Side(ranks=3, block_tokens=5), [(0, 3), (3, 17), (17, 29)])


@settings(max_examples=6)
@given(
    st.sampled_from(sorted(KINDS)),
    st.builds(
        Side, st.integers(1, 3), st.integers(1, 2), st.sampled_from(["LPBTH", "L/PBHT", "BLPTH"]), st.integers(1, 9)
    ),
    st.builds(
        Side, st.integers(1, 3), st.integers(1, 2), st.sampled_from(["LPBTH", "LP/BTH", "LBTPH"]), st.integers(1, 9)
    ),
)
async def test_any_pair_of_sides(kind: str, here: Side, there: Side) -> None:
    await transfer(KINDS[kind], here, there, WHOLE)


# ---- the order of events, on fake engines ----


@dataclass
class Producer:
    engine: fake_engine.Engine
    pool: Pool
    to_d: fake_engine.Peer
    from_d: fake_engine.Peer  # D's peer
    source: Blocks


class Several:
    """Some producers, and a consumer D that holds all heads and layers."""

    def __init__(self) -> None:
        self.d = fake_engine.Engine("d")
        self.target = Pool(self.d, VIEW, name="kv", shuffle=2)
        self.producers: list[Producer] = []

    async def add(self, view: View) -> Producer:
        engine = fake_engine.Engine(f"p{len(self.producers)}")
        to_d, from_d = fake_engine.connect(engine, self.d)
        pool = Pool(engine, view, name=f"pool{len(self.producers)}", access="none")
        producer = Producer(engine, pool, to_d, from_d, await pool.reserve(blocks=2))
        self.producers.append(producer)
        return producer

    async def divided(self, ranks: int, stages: int = 1) -> tuple[list[Producer], list[Shard]]:
        """Add a producer for each shard."""
        parts = shards(LAYERS, ranks=ranks, stages=stages)
        views = [
            View.ordered(GROUP, blocks=16, block_tokens=4, rank=shard.rank, ranks=ranks, layers=shard.layers)
            for shard in parts
        ]
        return [await self.add(view) for view in views], parts


@pytest.fixture
async def several(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Several]:
    fake_engine.install(monkeypatch)
    several = Several()
    yield several
    for producer in several.producers:
        producer.to_d.resume(), producer.from_d.resume()
        for transfer in producer.engine.transfers:
            transfer.release()
        await producer.source.aclose()
    await close(several.target, *(producer.pool for producer in several.producers))
    for producer in several.producers:
        assert not producer.to_d.losses
        assert not producer.from_d.losses
        assert not producer.from_d.signals


async def test_a_layer_is_there_when_all_have_brought_it(several: Several) -> None:
    (left, right), parts = await several.divided(ranks=2)
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=parts)
        assert [stream.waiting_for(layer) for layer in range(LAYERS)] == [(0, 1)] * LAYERS
        one = left.pool.open_stream(left.to_d, stream.ticket())
        two = right.pool.open_stream(right.to_d, stream.ticket())
        push_all(one, left.source)
        await settle()
        assert stream.landed == ()
        assert stream.waiting_for(2) == (1,)
        with pytest.raises(BusyError):
            stream.check(2)
        two.push(2, right.source, tokens=(0, 5))
        await settle()
        assert stream.progress() == {0: 0, 1: 0, 2: 5, 3: 0}, "both have brought so many tokens"
        await stream.layer(2, tokens=5)
        two.push(2, right.source, tokens=(5, 8))
        await settle()
        assert stream.landed == (2,)
        assert stream.waiting_for(2) == ()
        push_all(two, right.source, [0, 1, 3])
        ending = asyncio.create_task(one.finish(b"left"))
        await settle()
        assert set(stream.landed) == set(range(LAYERS))
        assert stream.outcome is None, "the other has not ended"
        assert not ending.done()
        await two.finish()
        await ending
        assert await stream.finished() == b"left"
        for wrong in (LAYERS, -1):
            with pytest.raises(RangeError):
                stream.waiting_for(wrong)
    assert [body["say"] for body in left.to_d.sent] == ["open", "end"]
    assert [body["say"] for body in right.to_d.sent] == ["open", "end"]


async def test_stages_owe_their_layers(several: Several) -> None:
    (early, late), parts = await several.divided(ranks=1, stages=2)
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=parts)
        assert [stream.waiting_for(layer) for layer in range(LAYERS)] == [(0,), (0,), (1,), (1,)]
        one = await early.pool.open_stream(early.to_d, stream.ticket())
        with pytest.raises(RangeError, match="layer 2 does not exist: pool 'pool0' holds the layers 0 to 1"):
            one.push(2, early.source)
        two = late.pool.open_stream(late.to_d, stream.ticket())
        push_all(one, early.source, [1, 0])
        push_all(two, late.source, [2, 3])
        assert "2 of 2 layers" in repr(one)
        await asyncio.gather(one.finish(), two.finish())
        await stream.finished()


async def test_several_senders_of_one_engine(several: Several) -> None:
    """The consumer tells them apart, although they are one peer."""
    parts = shards(LAYERS, ranks=1, stages=2)
    views = [View.ordered(GROUP, blocks=16, block_tokens=4, layers=shard.layers) for shard in parts]
    producer = await several.add(views[0])
    other = Pool(producer.engine, views[1], name="other", access="none")
    async with several.target.reserve(blocks=2) as blocks, other.reserve(blocks=2) as source:
        stream = blocks.stream(sources=parts)
        one = producer.pool.open_stream(producer.to_d, stream.ticket())
        two = other.open_stream(producer.to_d, stream.ticket())
        push_all(one, producer.source, [0, 1])
        push_all(two, source, [2, 3])
        await asyncio.gather(one.finish(), two.finish())
        await stream.finished()
        assert one.outcome == two.outcome == Outcome(Verdict.FINISHED)
    await other.aclose()


async def test_a_sender_that_owes_nothing(several: Several) -> None:
    """A replica of what another sends opens and ends like the others; nothing of it travels."""
    group = Group.latent(LAYERS, 8, 4, "float16")
    view = View.ordered(group, blocks=16, block_tokens=4)
    target = Pool(several.d, view, name="latent")
    replicas = [
        await several.add(View.ordered(group, blocks=16, block_tokens=4, rank=rank, ranks=3)) for rank in range(3)
    ]
    async with target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=[replica.pool.views[0].shard for replica in replicas])
        assert stream.waiting_for(0) == (0,)
        outs = [replica.pool.open_stream(replica.to_d, stream.ticket()) for replica in replicas]
        for out, replica in zip(outs, replicas, strict=True):
            push_all(out, replica.source)
        await asyncio.gather(*(out.finish() for out in outs))
        await stream.finished()
        assert [len(replica.engine.transfers) for replica in replicas] == [LAYERS, 0, 0]

        # Once it knows, it need not push.
        stream = blocks.stream(sources=[replica.pool.views[0].shard for replica in replicas])
        outs = [await replica.pool.open_stream(replica.to_d, stream.ticket()) for replica in replicas]
        assert ["0 of 0 layers" in repr(out) for out in outs] == [False, True, True]
        idle = [asyncio.create_task(out.finish()) for out in outs[1:]]
        await settle()
        assert not any(finishing.done() for finishing in idle), "the outcome is that of all"
        push_all(outs[0], replicas[0].source)
        await asyncio.gather(outs[0].finish(), *idle)
        await stream.finished()
    await target.aclose()


def failing(producer: Producer, out: PushStream) -> None:
    producer.engine.transfers[-1].fail(RuntimeError("boom"))


WAYS = {
    "abort": (lambda _, out: out.abort("enough"), StreamAbortedError, "enough"),
    "close": (lambda _, out: out.aclose(), StreamAbortedError, "closed the stream after 2 of 4 layers"),
    "failure": (failing, StreamAbortedError, "layer 1 failed: boom"),
    "death": (lambda producer, _: producer.from_d.lose(dead=True), PeerLostError, "the peer is lost"),
    "loss": (lambda producer, _: producer.from_d.lose(dead=False), PeerLostError, "the peer is lost"),
}


@pytest.mark.parametrize("way", WAYS)
async def test_the_end_of_one_is_the_end_of_all(several: Several, way: str) -> None:
    act, error, message = WAYS[way]
    (left, right), parts = await several.divided(ranks=2)
    for producer in (left, right):
        producer.engine.hold = True
    blocks = await several.target.reserve(blocks=2)
    stream = blocks.stream(sources=parts)
    one = await left.pool.open_stream(left.to_d, stream.ticket())
    two = await right.pool.open_stream(right.to_d, stream.ticket())
    one.push(0, left.source)
    two.push(0, right.source)
    two.push(1, right.source)
    right.engine.transfers[0].land()
    act(right, two)
    if way == "failure":
        right.engine.transfers[0].release()
    await settle()
    for transfer in right.engine.transfers:
        transfer.release()
    with pytest.raises(error, match=message):
        await stream.finished()
    await settle()  # the other is told
    with pytest.raises(StreamAbortedError, match=message):
        one.push(1, left.source)
    assert left.engine.transfers[0].cancelled()
    await blocks.aclose()
    await settle()
    assert several.target.statistics() == (14, 0, 2, 0), "the other may still write"
    left.engine.transfers[0].release()
    with pytest.raises(StreamAbortedError, match=message):
        await one.finish()
    await settle()
    if way == "loss":
        assert several.target.statistics() == (14, 0, 2, 0), "the lost one may still write"
        right.from_d.harmless.set()
    await stream.drained()
    await settle()
    assert several.target.statistics() == (16, 0, 0, 0)
    right.to_d.lose(dead=False)
    await two.aclose()


async def test_one_that_never_opens_fails_all(several: Several) -> None:
    (left, _), parts = await several.divided(ranks=2)
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=parts, ttl=0.05)
        out = await left.pool.open_stream(left.to_d, stream.ticket())
        push_all(out, left.source)
        with pytest.raises(TransferTimeoutError, match="not every producer opened the ticket within 0.05 s"):
            await stream.finished()
        with pytest.raises(StreamAbortedError, match="not every producer"):
            await out.finish()
        await stream.drained()  # what has not opened never will
        assert stream.waiting_for(0) == (1,)


async def test_one_that_has_ended_hears_of_the_consumer_or_gives_up(several: Several) -> None:
    """It waits for the others without a limit of its own, but not for a consumer that is silent."""
    (left, _), parts = await several.divided(ranks=2)
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=parts, lease=0.06)
        out = left.pool.open_stream(left.to_d, stream.ticket())
        push_all(out, left.source)
        ending = asyncio.create_task(out.finish())
        while not left.from_d.heartbeats:
            await asyncio.sleep(0)
        assert left.from_d.heartbeats == [0.02]
        with pytest.raises(TransferTimeoutError, match="the consumer did not decide the end"):
            await ending  # these engines send no signs of life
        await stream.abort()
        assert left.from_d.heartbeats == []


async def test_one_that_comes_too_late_is_refused(several: Several) -> None:
    (left, right), parts = await several.divided(ranks=2)
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=parts)
        out = await left.pool.open_stream(left.to_d, stream.ticket())
        ticket = stream.ticket()
        left.to_d.running = False  # it has yet to end
        await stream.abort("enough")
        with pytest.raises(TicketError, match="this ticket is void: enough"):
            await right.pool.open_stream(right.to_d, ticket)
        left.to_d.resume()
        await out.aclose()
        with pytest.raises(TicketError, match="unknown here"):
            await right.pool.open_stream(right.to_d, ticket)


async def test_each_sender_opens_once(several: Several) -> None:
    (left, right), parts = await several.divided(ranks=2)
    twin = await several.add(left.pool.views[0])
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=parts)
        one = await left.pool.open_stream(left.to_d, stream.ticket())
        with pytest.raises(TicketError, match="in use here by another stream"):
            await left.pool.open_stream(left.to_d, stream.ticket())
        with pytest.raises(TicketError, match="used before"):
            await twin.pool.open_stream(twin.to_d, stream.ticket())
        two = right.pool.open_stream(right.to_d, stream.ticket())
        push_all(one, left.source)
        push_all(two, right.source)
        await asyncio.gather(one.finish(), two.finish())
        await stream.finished()
    assert twin.engine.transfers == []


@pytest.mark.parametrize(("rank", "ranks", "layers"), [(0, 1, None), (2, 3, None), (0, 2, [0, 1]), (1, 4, None)])
async def test_a_shard_that_the_ticket_does_not_name(
    several: Several, rank: int, ranks: int, layers: list[int] | None
) -> None:
    (left, right), parts = await several.divided(ranks=2)
    stranger = await several.add(View.ordered(GROUP, blocks=16, block_tokens=4, rank=rank, ranks=ranks, layers=layers))
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=parts)
        with pytest.raises(TicketError, match=rf"does not name this pool's shard \(rank {rank} of {ranks}"):
            stranger.pool.open_stream(stranger.to_d, stream.ticket())
        body = {
            "say": "open",
            "id": stream.ticket()["id"],
            "digest": "",
            "pool": "x",
            "sender": 0,
            "cache": [[rank, ranks, list(stranger.pool.views[0].shard.layers)], []],
        }
        with pytest.raises(TicketError, match=f"rank {rank} of {ranks} is not a sender of this ticket"):
            await stranger.to_d.request("kv/kv", body)
        # The senders are not disturbed.
        one = left.pool.open_stream(left.to_d, stream.ticket())
        two = right.pool.open_stream(right.to_d, stream.ticket())
        push_all(one, left.source)
        push_all(two, right.source)
        await asyncio.gather(one.finish(), two.finish())
        await stream.finished()


async def test_a_single_sender_must_hold_all(several: Several) -> None:
    (left, _), _ = await several.divided(ranks=2)
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream()
        message = "the senders hold 1 of the 2 heads of part 'k' of layer 0 that rank 0 of 1 needs"
        with pytest.raises(LayoutMismatchError, match=message):
            await left.pool.open_stream(left.to_d, stream.ticket())
        with pytest.raises(LayoutMismatchError, match=message):
            await stream.finished()
        with pytest.raises(LayoutMismatchError, match=message):
            blocks.stream(sources=[left.pool.views[0].shard])
        await blocks.stream().abort()  # nothing of the refused one remains


async def test_a_changed_ticket_of_one_is_the_end_of_all(several: Several) -> None:
    (left, right), parts = await several.divided(ranks=2)
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=parts)
        ticket = stream.ticket()
        out = await left.pool.open_stream(left.to_d, ticket)
        changed = {**ticket, "rows": ticket["rows"][::-1]}
        with pytest.raises(TicketError, match="not the one that was issued"):
            await right.pool.open_stream(right.to_d, changed)
        with pytest.raises(TicketError, match="not the one that was issued"):
            await stream.finished()
        with pytest.raises(StreamAbortedError, match="not the one that was issued"):
            await out.finish()
        await stream.drained()
    assert right.engine.transfers == []


async def test_the_words_of_one_sender_do_not_count_for_another(several: Several) -> None:
    """A sender that has ended, and one whose words come in the row of another's, bring nothing for it."""
    (left, right), parts = await several.divided(ranks=2)
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=parts)
        one = left.pool.open_stream(left.to_d, stream.ticket())
        push_all(one, left.source)
        ending = asyncio.create_task(one.finish())
        await settle()
        assert stream.progress() == dict.fromkeys(range(LAYERS), 0)
        assert [stream.waiting_for(layer) for layer in range(LAYERS)] == [(1,)] * LAYERS
        async with right.pool.open_stream(right.to_d, stream.ticket()) as two:
            push_all(two, right.source)
        await ending
        await stream.finished()


async def test_a_sender_that_is_lost_after_its_end_has_brought_all(several: Several) -> None:
    (left, right), parts = await several.divided(ranks=2)
    async with several.target.reserve(blocks=2) as blocks:
        stream = blocks.stream(sources=parts)
        one = left.pool.open_stream(left.to_d, stream.ticket())
        push_all(one, left.source)
        ending = asyncio.create_task(one.finish(b"token"))
        await settle()
        left.from_d.lose(dead=False)
        left.to_d.lose(dead=False)
        with pytest.raises(PeerLostError):
            await ending
        async with right.pool.open_stream(right.to_d, stream.ticket()) as two:
            push_all(two, right.source)
        assert await stream.finished() == b"token"
        await stream.drained()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["open", "push", "finish", "abort", "stop", "lose"]), max_size=24), st.integers(0, 1 << 20)
)
async def test_all_learn_the_same_outcome(several: Several, steps: list[str], seed: int) -> None:
    """Whatever the order of openings, pushes, aborts and losses: one outcome, and no block is left behind."""
    random = numpy.random.default_rng(seed)
    producers, parts = await several.divided(ranks=2, stages=2)
    blocks = await several.target.reserve(blocks=2)
    stream = blocks.stream(sources=parts)
    ticket = stream.ticket()
    outs: dict[int, PushStream] = {}
    pushed: dict[int, list[int]] = {}
    lost: set[int] = set()
    waits: list[asyncio.Task[None]] = []

    for step in steps:
        number = int(random.integers(4))
        producer, out = producers[number], outs.get(number)
        try:
            if step == "open" and out is None:
                outs[number] = producer.pool.open_stream(producer.to_d, ticket)
                pushed[number] = list(parts[number].layers)
            elif out is not None and step == "push" and pushed[number]:
                out.push(pushed[number].pop(0), producer.source)
            elif out is not None and step == "finish" and not pushed[number]:
                waits.append(asyncio.create_task(out.finish()))
            elif out is not None and step == "abort":
                out.abort("p")
            elif step == "stop":
                stream.abort("d")
            elif step == "lose" and number not in lost:
                lost.add(number)
                producer.to_d.lose(dead=True)
                producer.from_d.lose(dead=True)
        except HixlError:
            pass  # the stream has ended
        if random.random() < 0.7:
            await settle(int(random.integers(1, 12)))
    await stream.abort("the end")
    await blocks.aclose()
    await asyncio.gather(*(out.aclose() for out in outs.values()))
    await asyncio.gather(*waits, return_exceptions=True)
    await stream.drained()
    assert stream.outcome is not None
    finished = stream.outcome.verdict is Verdict.FINISHED
    for number, out in outs.items():
        assert out.outcome is not None
        if number not in lost:
            assert (out.outcome.verdict is Verdict.FINISHED) == finished
        if out.outcome.verdict is Verdict.FINISHED:
            assert finished
    assert several.target.statistics() == (16, 0, 0, 0)
