"""Blocks that peers read: offers and readers on real engines in one process."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import numpy
import pytest
from passes import settle

import hixl_async as hx
from hixl_async.kv import Blocks, Group, LayerStream, Offer, Pool, Verdict, View, shards
from hixl_async.testing import FaultPlan, engine_pair, faulty, until

LAYERS, BLOCKS = 4, 24
GROUP = Group.attention(LAYERS, kv_heads=4, head_dim=8, dtype="float16")
VIEW = View.ordered(GROUP, blocks=BLOCKS, block_tokens=16)
#: The contents of a layer by its parts: token, head, element.
Contents = dict[tuple[int, str], numpy.ndarray[Any, Any]]


class Scene(NamedTuple):
    """A pool that offers, and one that reads over a driver that follows `plan`."""

    plan: FaultPlan
    owner: Pool
    reader: Pool
    peer: hx.Peer  # the owner, as the reader's engine knows it
    back: hx.Peer


async def check_idle(*pools: Pool) -> None:
    """Wait until the last messages are answered, and check that nothing of the pools is in use."""
    await until(lambda: not any(pool._context.tasks for pool in pools))
    for pool in pools:
        assert pool.statistics() == (pool.blocks, 0, 0, 0)
        assert not pool._registry.offers
        assert not pool._registry.readers


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    plan = FaultPlan(7)
    async with (
        engine_pair(faulty("shm", plan)) as pair,
        Pool(pair.right, VIEW, name="src", access="read", shuffle=1) as owner,
        Pool(pair.left, VIEW, name="dst", access="none", shuffle=2) as reader,
    ):
        yield Scene(plan, owner, reader, pair.peer, pair.back)
        plan.clear()
        plan.release()
        await check_idle(owner, reader)


def places(blocks: Blocks, size: int, tokens: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Return the blocks that hold some tokens, and the places in them."""
    numbers, offsets = numpy.divmod(numpy.arange(*tokens) - blocks.start, size)
    return numpy.array(blocks.ids)[numbers].tolist(), offsets.tolist()


def fill(pool: Pool, blocks: Blocks, seed: int = 1) -> Contents:
    """Fill the blocks with random tokens, and return those of all heads of the model."""
    view, random = pool.views[blocks.group], numpy.random.default_rng(seed)
    truth: Contents = {}
    end = blocks.start + blocks.tokens
    for layer in view.group.layers:
        for part in view.group.parts:
            truth[layer, part.name] = random.integers(1, 60_000, (end, part.heads, part.dim), "uint16")
    for layer in view.shard.layers:
        for part in view.group.parts:
            heads = view.shard.heads(part)
            where = places(blocks, view.block_tokens, (blocks.start, end))
            own = truth[layer, part.name][blocks.start :, heads.start : heads.stop]
            pool.array(layer, part.name, "uint16")[where] = own
    return truth


def check(pool: Pool, blocks: Blocks, layer: int, truth: Contents, tokens: tuple[int, int] | None = None) -> None:
    """Check that a layer of the blocks has the tokens of its rank, by default all."""
    view = pool.views[blocks.group]
    first, last = tokens or (blocks.start, blocks.start + blocks.tokens)
    for part in view.group.parts:
        heads = view.shard.heads(part)
        got = pool.array(layer, part.name, "uint16")[places(blocks, view.block_tokens, (first, last))]
        assert (got == truth[layer, part.name][first:last, heads.start : heads.stop]).all()


def publish_all(offer: Offer, layers: Sequence[int] = range(LAYERS)) -> None:
    for layer in layers:
        offer.publish(layer)


async def layers_of(stream: LayerStream) -> list[int]:
    return [layer async for layer in stream]


# ---- every byte ----


@pytest.mark.parametrize(
    ("owner", "reader", "chunks"),
    [
        (("LPBTH", 16), ("LPBTH", 16), [(0, 48)]),
        (("L/PBTH", 4), ("BLPTH", 12), [(0, 5), (5, 31), (31, 48)]),
        (("LP/BHT", 16), ("L/PBHT", 6), [(0, 16), (16, 20), (20, 48)]),
        (("BLPTH", 7), ("LP/BTH", 16), [(0, 1), (1, 48)]),
    ],
    ids=str,
)
async def test_every_byte_between_different_layouts(
    owner: tuple[str, int], reader: tuple[str, int], chunks: list[tuple[int, int]]
) -> None:
    views = [View.ordered(GROUP, order, blocks=BLOCKS, block_tokens=size) for order, size in (owner, reader)]
    async with (
        engine_pair() as pair,
        Pool(pair.right, views[0], name="src", access="read", shuffle=3) as src,
        Pool(pair.left, views[1], name="dst", access="none", shuffle=4) as dst,
    ):
        for seed in range(3):
            async with dst.reserve(tokens=48) as blocks:
                async with src.reserve(tokens=48) as mine:
                    truth = fill(src, mine, seed)
                    offer = mine.offer(tokens=(0, 48))
                    stream = blocks.pull(pair.peer, offer.ticket(), tokens=(0, 48))
                    for tokens in chunks:
                        for layer in numpy.random.default_rng(seed).permutation(LAYERS).tolist():
                            offer.publish(layer, tokens=tokens)
                        await settle()
                async for layer in stream:
                    check(dst, blocks, layer, truth, (0, 48))
                await asyncio.gather(offer.finish(b"token"), stream.finished())
                assert sorted(stream.landed) == list(range(LAYERS))
                used = sum(
                    numpy.count_nonzero(dst.array(layer, part, "uint16")) for layer in range(LAYERS) for part in "kv"
                )
                assert used == LAYERS * 2 * 48 * 4 * 8, "nothing but the tokens was written"
                for region in dst.regions:
                    memoryview(region)[:] = bytes(len(memoryview(region)))
        await check_idle(src, dst)


@pytest.mark.parametrize("tokens", [(0, 1), (0, 40), (17, 33), (31, 48), (16, 48)], ids=str)
async def test_a_reader_of_some_tokens_waits_for_those_alone(scene: Scene, tokens: tuple[int, int]) -> None:
    """As after a hit of a prefix cache.  What the owner publishes beyond must not end a layer before it has landed."""
    first = tokens[0] // 16 * 16
    async with (
        scene.owner.reserve(tokens=48) as mine,
        scene.reader.reserve(tokens=48 - first, start=first) as blocks,
    ):
        truth = fill(scene.owner, mine)
        scene.plan.delay(0.001, 0.003, verb="read")
        async with mine.offer() as offer:
            stream = blocks.pull(scene.peer, offer.ticket(), tokens=tokens)
            for chunk in ((0, 16), (16, 40), (40, 48)):
                for layer in range(LAYERS):
                    offer.publish(layer, tokens=chunk)
                await settle()
            async for layer in stream:
                check(scene.reader, blocks, layer, truth, tokens)
            assert stream.progress() == dict.fromkeys(range(LAYERS), tokens[1])
        assert await stream.finished() == b""


async def test_what_is_published_after_a_readers_last_token_does_not_end_its_layer(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=48) as mine, scene.reader.reserve(tokens=16) as blocks:
        truth = fill(scene.owner, mine)
        scene.plan.hold(verb="read")
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0, tokens=(0, 16))
        await until(lambda: scene.plan.counts.holding)
        offer.publish(0)
        await until(lambda: next(iter(offer._offering._readers.values())).told[0] == (48, True))
        await settle()
        assert stream.landed == ()
        scene.plan.clear().release()
        await stream.layer(0)
        check(scene.reader, blocks, 0, truth)
        publish_all(offer, range(1, LAYERS))
        await asyncio.gather(offer.finish(), stream.finished())


async def test_chunks_of_a_layer_land_in_order(scene: Scene) -> None:
    scene.plan.reorder(window=4, within=0.002, verb="read").delay(0, 0.002, chance=0.5, verb="read")
    for seed in range(8):
        async with scene.owner.reserve(tokens=64) as mine, scene.reader.reserve(tokens=64) as blocks:
            truth = fill(scene.owner, mine, seed)
            offer = mine.offer()
            stream = blocks.pull(scene.peer, offer.ticket())
            await until(lambda offer=offer: offer._offering.state.opened)
            for after in range(8, 65, 8):
                for layer in range(LAYERS):
                    offer.publish(layer, tokens=(after - 8, after))
                await settle(3)
                for layer, position in stream.progress().items():
                    if position:
                        check(scene.reader, blocks, layer, truth, (0, position))
            async for layer in stream:
                check(scene.reader, blocks, layer, truth)
            await asyncio.gather(offer.finish(), stream.finished())


async def test_a_chunk_does_not_land_before_an_earlier_one(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        fill(scene.owner, mine)
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        await until(lambda: offer._offering.state.opened)
        scene.plan.hold(verb="read", nth=1)
        offer.publish(0, tokens=(0, 16))
        await until(lambda: scene.plan.counts.holding)
        offer.publish(0, tokens=(16, 32))
        offer.publish(1)
        await until(lambda: next(iter(offer._offering._readers.values())).told.get(1) == (32, True))
        await settle(100)
        assert stream.progress()[0] == 0
        scene.plan.clear().release()
        await stream.layer(0)
        publish_all(offer, range(2, LAYERS))
        await asyncio.gather(offer.finish(), stream.finished())


async def test_several_groups() -> None:
    views = [
        View.ordered(Group.attention(2, kv_heads=2, head_dim=8, dtype="float16"), blocks=BLOCKS, block_tokens=8),
        View.ordered(Group.attention([2, 3], kv_heads=1, head_dim=16, dtype="float16"), blocks=BLOCKS, block_tokens=16),
    ]
    async with (
        engine_pair() as pair,
        Pool(pair.right, views, name="src", access="read", shuffle=3) as src,
        Pool(pair.left, views, name="dst", access="none", shuffle=4) as dst,
    ):
        mine, blocks = await src.reserve(tokens=(40, 16)), await dst.reserve(tokens=(40, 16))
        truths = [fill(src, one, seed) for seed, one in enumerate(mine)]
        tokens = [(3, 40), (0, 16)]
        with pytest.raises(hx.InvalidArgumentError, match=r"pool\.offer and pool\.pull"):
            mine[0].offer()
        async with src.offer(mine, tokens=tokens) as offer:
            stream = dst.pull(blocks, [(pair.peer, offer.ticket())], tokens=tokens)
            publish_all(offer, [2, 0, 3, 1])
            async for layer in stream:
                check(dst, blocks[layer // 2], layer, truths[layer // 2], tokens[layer // 2])
        await stream.finished()
        for one in (*mine, *blocks):
            await one.aclose()
        await check_idle(src, dst)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (2, 2)])
async def test_the_ranks_of_a_model_are_read_by_one(ranks: int, stages: int) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(hx.Engine(name="reader"))
        dst = await stack.enter_async_context(Pool(engine, VIEW, access="none", shuffle=9))
        blocks = await stack.enter_async_context(dst.reserve(tokens=48))
        owners: list[Pool] = []
        offers: list[Offer] = []
        sources = []
        for number, shard in enumerate(shards(LAYERS, ranks=ranks, stages=stages)):
            view = View.ordered(
                GROUP, blocks=BLOCKS, block_tokens=6, rank=shard.rank, ranks=shard.ranks, layers=shard.layers
            )
            other = await stack.enter_async_context(hx.Engine("127.0.0.1:0", name=f"owner{number}"))
            owners.append(await stack.enter_async_context(Pool(other, view, access="read", shuffle=number)))
            mine = await owners[-1].reserve(tokens=48)
            truth = fill(owners[-1], mine)
            offers.append(mine.offer())
            await mine.aclose()
            sources.append((await engine.connect(other.address), offers[-1].ticket()))
        with pytest.raises(hx.LayoutMismatchError):
            dst.pull([blocks], sources[1:])
        assert not dst._registry.readers
        stream = dst.pull([blocks], sources)
        for layer in range(LAYERS):
            holders = [n for n, pool in enumerate(owners) if layer in pool.views[0].shard.layers]
            for number in holders[:-1]:
                offers[number].publish(layer)
            last = offers[holders[-1]]
            await until(lambda layer=layer, holders=holders: stream.waiting_for(layer) == (holders[-1],))
            with pytest.raises(hx.BusyError):
                stream.check(layer)
            last.publish(layer)
            await stream.layer(layer)
            check(dst, blocks, layer, truth)
        await asyncio.gather(*(offer.finish(b"%d" % number) for number, offer in enumerate(offers)))
        assert await stream.finished() == b"0"
        await stream.drained()
        await check_idle(*owners)


# ---- the course of an offer ----


@pytest.mark.parametrize("when", ["before", "after", "between"])
async def test_layers_that_are_published_before_and_after_the_pull(scene: Scene, when: str) -> None:
    early = {"before": LAYERS, "after": 0, "between": 2}[when]
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        truth = fill(scene.owner, mine)
        offer = mine.offer()
        publish_all(offer, range(early))
        stream = blocks.pull(scene.peer, offer.ticket())
        for layer in range(early):
            await stream.layer(layer)
        assert stream.landed == tuple(range(early))
        publish_all(offer, range(early, LAYERS))
        await offer.finish(b"token")
        assert await stream.finished() == b"token"
        for layer in range(LAYERS):
            check(scene.reader, blocks, layer, truth)


async def test_an_offer_that_is_finished_before_it_is_read(scene: Scene) -> None:
    async with scene.reader.reserve(tokens=32) as blocks:
        async with scene.owner.reserve(tokens=32) as mine:
            truth = fill(scene.owner, mine)
            offer = mine.offer()
            publish_all(offer)
            finishing = asyncio.ensure_future(offer.finish(b"first token"))
        del offer
        gc.collect()
        (offering,) = scene.owner._registry.offers.values()
        stream = blocks.pull(scene.peer, offering.ticket_body())
        assert await stream.finished() == b"first token"
        await finishing
        for layer in range(LAYERS):
            check(scene.reader, blocks, layer, truth)


async def test_publishing_from_threads_with_marks(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        truth: Contents = {}
        marks = [threading.Event() for _ in range(LAYERS)]

        def compute() -> None:
            for layer, mark in enumerate(marks):
                offer.publish(layer, ready=mark)
            truth.update(fill(scene.owner, mine))
            for mark in marks:
                mark.set()

        computing = asyncio.create_task(asyncio.to_thread(compute))
        async for layer in stream:
            check(scene.reader, blocks, layer, truth)
        await computing
        await asyncio.gather(offer.finish(), stream.finished())


async def test_a_layer_that_is_not_ready_keeps_later_ones_back(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        ready = threading.Event()
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        offer.publish(1, ready=ready)
        publish_all(offer, [2, 3])
        await stream.layer(0)
        finishing = asyncio.ensure_future(offer.finish())
        await settle(100)
        assert stream.landed == (0,)
        ready.set()
        await asyncio.gather(finishing, stream.finished())
        assert stream.landed == (0, 1, 2, 3)


async def test_a_mark_that_fails_aborts(scene: Scene) -> None:
    def broken() -> bool:
        raise OSError("no device")

    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        offer.publish(1, ready=broken)
        with pytest.raises(hx.StreamAbortedError, match="layer 1 could not be published: OSError: no device"):
            await stream.finished()
        with pytest.raises(hx.StreamAbortedError, match="no device"):
            offer.publish(2)
        await offer.drained()


async def test_single_layers_and_tokens(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        truth = fill(scene.owner, mine)
        async with mine.offer() as offer:
            stream = blocks.pull(scene.peer, offer.ticket())
            waiting = [asyncio.ensure_future(stream.layer(2, tokens=tokens)) for tokens in (3, 20)]
            offer.publish(2, tokens=(0, 3))
            await waiting[0]
            check(scene.reader, blocks, 2, truth, (0, 3))
            assert stream.progress() == {0: 0, 1: 0, 2: 3, 3: 0}
            assert not waiting[1].done()
            with pytest.raises(hx.BusyError):
                stream.check(2, tokens=4)
            offer.publish(2, tokens=(3, 20), last=True)
            await waiting[1]
            check(scene.reader, blocks, 2, truth, (0, 20))
            await stream.layer(2)
            assert stream.landed == (2,)
            with pytest.raises(hx.InvalidArgumentError, match="published before"):
                offer.publish(2)
            with pytest.raises(hx.RangeError, match="layer 7 does not exist"):
                offer.publish(7)
            publish_all(offer, [0, 1, 3])
        await stream.finished()
        assert "finished" in repr(offer)
        assert "finished" in repr(stream)
        with pytest.raises(hx.TicketError, match="owners"):
            stream.ticket()


async def test_blocks_are_held_until_they_are_read(scene: Scene) -> None:
    async with scene.reader.reserve(tokens=32) as blocks:
        mine = await scene.owner.reserve(tokens=32)
        truth = fill(scene.owner, mine)
        offer = mine.offer()
        await mine.aclose()
        assert scene.owner.statistics() == (BLOCKS - 2, 0, 2, 0)
        async with scene.owner.reserve(blocks=BLOCKS - 2) as others:
            fill(scene.owner, others, 9)
            stream = blocks.pull(scene.peer, offer.ticket())
            publish_all(offer)
            await layers_of(stream)
            assert scene.owner.statistics().quarantined == 2
            await asyncio.gather(offer.finish(), stream.finished())
            assert scene.owner.statistics() == (2, BLOCKS - 2, 0, 0)
        for layer in range(LAYERS):
            check(scene.reader, blocks, layer, truth)


async def test_a_reader_that_has_all_it_wants_may_leave(scene: Scene) -> None:
    """The end of the reader is no failure at the owner, whoever is first."""
    async with scene.owner.reserve(tokens=32) as mine:
        offer = mine.offer()
        async with scene.reader.reserve(tokens=32) as blocks:
            stream = blocks.pull(scene.peer, offer.ticket())
            publish_all(offer)
            await layers_of(stream)
        assert stream.outcome == (Verdict.FINISHED, "")
        await until(lambda: offer._offering.state.ended)
        await offer.finish(b"too late to be read")
        assert await stream.finished() == b""


async def test_one_offer_is_read_by_several_and_offered_again(scene: Scene) -> None:
    async with (
        scene.owner.reserve(tokens=32) as mine,
        Pool(scene.reader.engine, VIEW, name="other", access="none", shuffle=5) as other,
    ):
        truth = fill(scene.owner, mine)
        second = mine.offer()  # of the same blocks
        offer = mine.offer(readers=4)
        pools = [scene.reader, other, scene.reader, other]
        taken = [await pool.reserve(tokens=32) for pool in pools]
        streams = [blocks.pull(scene.peer, offer.ticket()) for blocks in taken]
        again = await scene.reader.reserve(tokens=32)
        publish_all(second)
        reading = again.pull(scene.peer, second.ticket())
        publish_all(offer)
        await asyncio.gather(offer.finish(b"x"), second.finish(b"y"))
        assert [await stream.finished() for stream in (*streams, reading)] == [b"x"] * 4 + [b"y"]
        for pool, blocks in zip([*pools, scene.reader], [*taken, again], strict=True):
            for layer in range(LAYERS):
                check(pool, blocks, layer, truth)
            await blocks.aclose()


# ---- failures of one side ----


async def test_a_reader_that_fails_disturbs_no_other(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine:
        truth = fill(scene.owner, mine)
        offer = mine.offer(readers=3)
        taken = [await scene.reader.reserve(tokens=32) for _ in range(3)]
        streams = [blocks.pull(scene.peer, offer.ticket()) for blocks in taken]
        offer.publish(0)
        await asyncio.gather(*(stream.layer(0) for stream in streams))
        await streams[1].abort("the client left")
        with pytest.raises(hx.StreamAbortedError, match="the client left"):
            await streams[1].finished()
        await streams[1].layer(0)
        publish_all(offer, range(1, LAYERS))
        with pytest.raises(hx.StreamAbortedError, match="the client left"):
            await offer.finish(b"token")
        for number in (0, 2):
            assert await streams[number].finished() == b"token"
            for layer in range(LAYERS):
                check(scene.reader, taken[number], layer, truth)
        for blocks in taken:
            await blocks.aclose()


async def test_the_owner_aborts(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        outcome = await offer.abort("out of memory")
        assert outcome == (Verdict.ABORTED, "out of memory")
        with pytest.raises(hx.StreamAbortedError, match="out of memory") as caught:
            await stream.finished()
        assert caught.value.peer == scene.peer.name
        await asyncio.gather(offer.drained(), stream.drained())
        for call in (lambda: offer.publish(1), offer.ticket):
            with pytest.raises((hx.StreamAbortedError, hx.TicketError), match="out of memory"):
                call()
        with pytest.raises(hx.InvalidArgumentError, match="reason"):
            offer.abort(7)  # type: ignore[arg-type]


async def test_leaving_an_offer_by_an_exception_or_too_early_aborts_it(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        with pytest.raises(ZeroDivisionError):
            async with mine.offer() as offer:
                stream = blocks.pull(scene.peer, offer.ticket())
                offer.publish(0)
                await stream.layer(0)
                raise ZeroDivisionError("by zero")
        with pytest.raises(hx.StreamAbortedError, match="the owner failed: ZeroDivisionError: by zero"):
            await stream.finished()
        await stream.drained()
        with pytest.raises(hx.StreamAbortedError, match="after 1 of 4 layers"):
            async with mine.offer() as offer:
                stream = blocks.pull(scene.peer, offer.ticket())
                offer.publish(0)
                await stream.layer(0)
        with pytest.raises(hx.StreamAbortedError, match="after 1 of 4 layers"):
            await stream.finished()


async def test_the_time_for_all_of_an_offer_and_of_a_read(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer(timeout=0.05)
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        with pytest.raises(hx.StreamAbortedError, match=r"not read within its timeout of 0\.05 s"):
            await stream.finished()
        with pytest.raises(hx.TransferTimeoutError, match=r"not read within its timeout of 0\.05 s"):
            offer.publish(1)
        await stream.drained()
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket(), timeout=0.05)
        publish_all(offer)
        with pytest.raises(hx.TransferTimeoutError, match=r"did not finish within its timeout of 0\.05 s"):
            await stream.finished()
        with pytest.raises(hx.StreamAbortedError, match="did not finish within its timeout"):
            await offer.finish()


async def test_a_lost_offer_warns_and_is_aborted(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        with pytest.warns(ResourceWarning, match="was never closed; use 'async with blocks.offer"):
            del offer
        with pytest.raises(hx.StreamAbortedError, match="the owner lost its offer"):
            await stream.finished()


# ---- tickets ----


async def refused(stream: LayerStream, error: type[hx.HixlError], message: str) -> None:
    """Check that a pull was refused before anything was written."""
    with pytest.raises(error, match=message):
        await stream.finished()
    with pytest.raises(error, match=message):
        await stream.layer(0)
    assert stream.outcome is not None
    assert stream.outcome.verdict is Verdict.VOID
    await stream.drained()


async def test_tickets_of_the_other_kind(scene: Scene) -> None:
    async with (
        Pool(scene.owner.engine, VIEW, name="both", access="read-write") as both,
        both.reserve(tokens=32) as mine,
        scene.reader.reserve(tokens=32) as blocks,
    ):
        offer = mine.offer()
        with pytest.raises(hx.TicketError, match=r"written|read"):
            async with scene.reader.open_stream(scene.peer, offer.ticket()):
                pass
        await offer.aclose()
        stream = mine.stream()
        with pytest.raises(hx.TicketError, match=r"lets blocks be written, not read; use it with pool\.open_stream"):
            blocks.pull(scene.peer, stream.ticket())
        await stream.abort()
        await stream.drained()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "slices": lambda slices: [[*slices[0][:2], 1, slices[0][3]]],
    "views": lambda text: text[::-1],
    "generation": lambda number: number ^ 1,
    "lease": lambda number: number + 1,
    "sources": lambda sources: [[0, 1, [*range(LAYERS)], *sources[0][3:]]] if sources[0][1] > 1 else [[1, 2, []]],
    "id": lambda text: text + "x",
    "pool": lambda text: text + "x",
    "engine": lambda text: text + "x",
    "address": lambda text: text + "x",
    "incarnation": lambda text: text[::-1],
    "version": lambda number: number - 1,
    "verb": lambda _: "write",
    "rows": lambda _: [0],
}


@pytest.mark.parametrize("field", CHANGES)
async def test_a_changed_ticket_is_refused_and_nothing_is_read(scene: Scene, field: str) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        ticket = offer.ticket()
        assert set(CHANGES) == set(ticket), "a field is not tried"
        publish_all(offer)
        changed = {**ticket, field: CHANGES[field](ticket[field])}
        with pytest.raises((hx.TicketError, hx.LayoutMismatchError)):
            await blocks.pull(scene.peer, changed, tokens=(1, 32)).finished()
        assert scene.reader.engine.stats().transfers == 0
        # The ticket itself is as good as before.
        await until(lambda: not scene.reader._registry.readers)
        stream = blocks.pull(scene.peer, ticket)
        await asyncio.gather(offer.finish(), stream.finished())


async def test_tickets_that_are_used_up_or_void(scene: Scene) -> None:
    async with (
        scene.owner.reserve(tokens=32) as mine,
        scene.reader.reserve(tokens=32) as blocks,
        scene.reader.reserve(tokens=32) as others,
    ):
        offer = mine.offer()
        ticket = offer.ticket()
        stream = blocks.pull(scene.peer, ticket)
        publish_all(offer)
        await stream.layer(0)
        await refused(others.pull(scene.peer, ticket), hx.TicketError, "used by all of its 1 readers")
        await asyncio.gather(offer.finish(), stream.finished())
        await refused(others.pull(scene.peer, ticket), hx.TicketError, "unknown here")
        with pytest.raises(hx.TicketError, match="all readers have ended; make another offer"):
            offer.ticket()


async def test_tickets_that_expire(scene: Scene) -> None:
    async with (
        scene.owner.reserve(tokens=32) as mine,
        scene.reader.reserve(tokens=32) as blocks,
        scene.reader.reserve(tokens=32) as others,
    ):
        offer = mine.offer(ttl=0.02)
        ticket = offer.ticket()
        publish_all(offer)
        with pytest.raises(hx.TicketError, match=r"no reader opened the ticket within 0\.02 s"):
            await offer.finish()
        await refused(blocks.pull(scene.peer, ticket), hx.TicketError, "unknown here")
        offer = mine.offer(ttl=0.05, readers=2)
        ticket = offer.ticket()
        stream = blocks.pull(scene.peer, ticket)
        publish_all(offer)
        await stream.layer(0)
        await until(lambda: not offer._offering.state.awaited)
        await refused(others.pull(scene.peer, ticket), hx.TicketError, "has expired")
        with pytest.raises(hx.TransferTimeoutError, match=r"not every reader opened the ticket within 0\.05 s"):
            await offer.finish()
        await stream.finished()


async def test_tickets_of_another_engine_or_incarnation(scene: Scene) -> None:
    async with (
        hx.Engine("127.0.0.1:0", name=scene.owner.engine.name) as engine,
        Pool(engine, VIEW, name="src", access="read") as other,
        other.reserve(tokens=32) as mine,
        scene.reader.reserve(tokens=32) as blocks,
    ):
        offer = mine.offer()
        with pytest.raises(hx.TicketError, match="is not, or no longer, peer"):
            blocks.pull(scene.peer, offer.ticket())
        with pytest.raises(hx.InvalidArgumentError, match="another engine"):
            blocks.pull(scene.back, offer.ticket())
        with pytest.raises(hx.InvalidArgumentError, match="peer must be a peer"):
            blocks.pull(None, offer.ticket())  # type: ignore[arg-type]
        await offer.abort()


async def test_tokens_that_are_not_offered(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer(tokens=(4, 20))
        publish_all(offer)
        with pytest.raises(hx.RangeError, match="the owner offers the tokens 4 to 20, not 0 to 32"):
            await blocks.pull(scene.peer, offer.ticket()).finished()
        with pytest.raises(hx.StreamAbortedError, match="the owner offers the tokens 4 to 20"):
            await offer.finish()
        with pytest.raises(hx.RangeError, match="blocks hold the tokens 0 to 32"):
            mine.offer(tokens=(4, 33))
        with pytest.raises(hx.InvalidArgumentError, match="readers"):
            mine.offer(readers=0)


async def test_caches_that_differ_are_refused_before_anything_is_read(scene: Scene) -> None:
    other = View.ordered(
        Group.attention(LAYERS, kv_heads=4, head_dim=8, dtype="bfloat16"), blocks=BLOCKS, block_tokens=16
    )
    async with (
        Pool(scene.reader.engine, other, name="other", access="none") as pool,
        scene.owner.reserve(tokens=32) as mine,
        pool.reserve(tokens=32) as blocks,
    ):
        for _ in range(2):  # the second time the views are known
            offer = mine.offer()
            publish_all(offer)
            stream = blocks.pull(scene.peer, offer.ticket())
            await refused(stream, hx.LayoutMismatchError, "dtype is float16 at the source and bfloat16 at the target")
            with pytest.raises(hx.StreamAbortedError, match="dtype is float16"):
                await offer.finish()
        assert scene.reader.engine.stats().transfers == 0


async def test_pools_with_the_wrong_access(scene: Scene) -> None:
    async with (
        Pool(scene.owner.engine, VIEW, name="w", access="write") as writable,
        writable.reserve(tokens=16) as written,
        scene.reader.reserve(tokens=16) as blocks,
        scene.owner.reserve(tokens=16) as readable,
    ):
        for one in (written, blocks):
            with pytest.raises(hx.AccessError, match="lets no peer read; use access='read'"):
                one.offer()
        with pytest.raises(hx.AccessError, match="lets no peer write"):
            readable.stream()


async def test_an_engine_that_is_granted_nothing_reads_nothing(scene: Scene) -> None:
    def grant(peer: hx.Peer) -> str:
        return "none"

    async with (
        Pool(scene.owner.engine, VIEW, name="closed", access="read", grant=grant) as closed,
        closed.reserve(tokens=16) as mine,
        scene.reader.reserve(tokens=16) as blocks,
    ):
        offer = mine.offer()
        publish_all(offer)
        await refused(blocks.pull(scene.peer, offer.ticket()), hx.AccessError, "closed")
        with pytest.raises(hx.StreamAbortedError):
            await offer.finish()


async def test_blocks_that_are_being_filled(scene: Scene) -> None:
    async with (
        Pool(scene.owner.engine, VIEW, name="both", access="read-write") as both,
        both.reserve(tokens=16) as mine,
        scene.owner.reserve(tokens=16) as offered,
        scene.reader.reserve(tokens=16) as blocks,
    ):
        stream = mine.stream()
        with pytest.raises(hx.BusyError, match="being written by a stream; they can be offered when"):
            mine.offer()
        await stream.abort()
        offer = offered.offer()
        reading = blocks.pull(scene.peer, offer.ticket())
        with pytest.raises(hx.BusyError, match="being written"):
            blocks.pull(scene.peer, offer.ticket())
        shared = offered.share()
        await offer.abort()
        await reading.drained()
        await shared.aclose()


async def test_blocks_are_not_lent_while_a_read_may_write_them(scene: Scene) -> None:
    scene.plan.hold(verb="read", nth=1)
    async with scene.owner.reserve(tokens=32) as mine:
        async with scene.reader.reserve(tokens=32) as blocks:
            offer = mine.offer()
            stream = blocks.pull(scene.peer, offer.ticket())
            publish_all(offer)
            await until(lambda: scene.plan.counts.holding)
        assert stream.outcome is not None
        assert scene.reader.statistics().quarantined == 2
        assert not offer._offering.state.ended, "its blocks are still read"
        scene.plan.clear().release()
        await stream.drained()
        assert scene.reader.statistics().quarantined == 0
        with pytest.raises(hx.StreamAbortedError, match="gave its blocks back"):
            await offer.finish()
