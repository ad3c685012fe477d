"""Blocks that peers read: offers and readers on real engines in one process."""

from __future__ import annotations

import asyncio
import contextlib
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
from hixl_async.testing import FaultPlan, PeerProcess, engine_pair, faulty, peer_process, until

from . import pull_process

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
        callbacks = [len(peer._lost_callbacks) for peer in (pair.peer, pair.back)]
        yield Scene(plan, owner, reader, pair.peer, pair.back)
        plan.clear()
        plan.release()
        await check_idle(owner, reader)
        for peer, count in zip((pair.peer, pair.back), callbacks, strict=True):
            assert not peer._heartbeats._intervals
            assert len(peer._lost_callbacks) == count


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
    groups = [Group.attention(layers, kv_heads=2, head_dim=8, dtype="float16") for layers in ([0, 1], [2, 3])]
    views = [View.ordered(group, "L/PBTH", blocks=16, block_tokens=8) for group in groups]
    async with (
        engine_pair() as pair,
        Pool(pair.right, views, name="src", access="read", shuffle=3) as src,
        Pool(pair.left, views, name="dst", access="none", shuffle=4) as dst,
    ):
        mine, blocks = [await pool.reserve(tokens=[40, 16], group=[0, 1]) for pool in (src, dst)]
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


async def test_an_owner_of_which_nothing_is_needed() -> None:
    """Ranks beyond the number of heads have copies of them; each head is read once."""
    group = Group.attention(2, kv_heads=1, head_dim=8, dtype="float16")
    views = [View.ordered(group, blocks=4, block_tokens=16, rank=rank, ranks=2) for rank in range(2)]
    async with (
        engine_pair() as pair,
        Pool(pair.right, views[0], name="a", access="read") as a,
        Pool(pair.right, views[1], name="b", access="read") as b,
        Pool(pair.left, View.ordered(group, blocks=4, block_tokens=16), name="dst", access="none") as dst,
        dst.reserve(tokens=32) as blocks,
        a.reserve(tokens=32) as left,
        b.reserve(tokens=32) as right,
    ):
        truth = fill(a, left)
        fill(b, right)
        offers = [left.offer(), right.offer()]
        stream = dst.pull([blocks], [(pair.peer, offer.ticket()) for offer in offers])
        for offer in offers:
            publish_all(offer, range(2))
        await asyncio.gather(*(offer.finish() for offer in offers), stream.finished())
        for layer in range(2):
            check(dst, blocks, layer, truth)


@pytest.mark.parametrize("failure", ["ticket", "abort"])
async def test_one_of_several_owners_fails(scene: Scene, failure: str) -> None:
    views = [View.ordered(GROUP, blocks=BLOCKS, block_tokens=16, rank=rank, ranks=2) for rank in range(2)]
    async with (
        Pool(scene.owner.engine, views[0], name="a", access="read") as a,
        Pool(scene.owner.engine, views[1], name="b", access="read") as b,
        a.reserve(tokens=32) as left,
        b.reserve(tokens=32) as right,
        scene.reader.reserve(tokens=32) as blocks,
    ):
        good, bad = left.offer(), right.offer()
        sources = [(scene.peer, offer.ticket()) for offer in (good, bad)]
        if failure == "ticket":
            await bad.abort("out of memory")
            stream = scene.reader.pull([blocks], sources)
            with pytest.raises((hx.StreamAbortedError, hx.TicketError), match="this ticket is unknown here"):
                await stream.finished()
        else:
            stream = scene.reader.pull([blocks], sources)
            good.publish(0)
            await until(lambda: stream.waiting_for(0) == (1,))
            await bad.abort("out of memory")
            with pytest.raises(hx.StreamAbortedError, match="out of memory"):
                await stream.finished()
        assert stream.landed == ()
        publish_all(good, range(0 if failure == "ticket" else 1, LAYERS))
        with pytest.raises(hx.StreamAbortedError):
            await good.finish()
        await stream.drained()


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
            with pytest.raises(hx.RangeError, match="tokens of layer 2 up to 32, not up to 33"):
                await stream.layer(2, tokens=33)
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
        offer = mine.offer(timeout=0.3)
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        with pytest.raises(hx.StreamAbortedError, match=r"not read within its timeout of 0\.3 s"):
            await stream.finished()
        with pytest.raises(hx.TransferTimeoutError, match=r"not read within its timeout of 0\.3 s"):
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


async def test_lost_blocks_end_their_read(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine:
        offer = mine.offer()
        blocks = await scene.reader.reserve(tokens=32)
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        with pytest.warns(ResourceWarning, match="never closed"):
            del blocks, stream
        publish_all(offer, range(1, LAYERS))
        with pytest.raises(hx.StreamAbortedError, match="lost its blocks"):
            await offer.finish()


async def test_only_publishing_is_legal_on_other_threads(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())

        def elsewhere() -> None:
            for call in (offer.abort, offer.aclose, lambda: offer._offering.finish(b""), mine.offer):
                with pytest.raises(hx.WrongLoopError):
                    call()
            publish_all(offer)

        await asyncio.to_thread(elsewhere)
        for payload in ("text", b"x" * (32 << 10) + b"y", None):
            with pytest.raises(hx.InvalidArgumentError, match="payload"):
                await offer.finish(payload)  # type: ignore[arg-type]
        longest = b"x" * (32 << 10)
        await offer.finish(longest)
        assert await stream.finished() == longest


async def test_a_pool_whose_pins_have_no_name(scene: Scene) -> None:
    engine = scene.owner.engine
    engine.allocate("own.pins", 8)
    regions = set(engine.regions)
    with pytest.raises(hx.InvalidArgumentError, match=r"'own\.pins' exists already"):
        Pool(engine, VIEW, name="own", access="read")
    assert set(engine.regions) == regions
    await engine.regions["own.pins"].aclose()


async def test_a_lost_offer_of_which_all_was_published_is_finished(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        publish_all(offer)
        stream = blocks.pull(scene.peer, offer.ticket())
        del offer  # without a warning, which would fail this test
        assert await stream.finished() == b""


async def test_closing_an_offer_ends_it_at_the_call(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        offer.aclose()
        assert offer.outcome is not None
        assert offer.outcome.verdict is Verdict.ABORTED
        await offer.aclose()
        offer = mine.offer()
        publish_all(offer)
        closing = asyncio.ensure_future(offer.aclose())
        await stream.drained()
        with pytest.raises(hx.ClosedError, match="finished before"):
            await offer.finish()
        await blocks.pull(scene.peer, offer.ticket()).finished()
        await closing
        assert offer.outcome == (Verdict.FINISHED, "")


# ---- tickets ----


async def refused(stream: LayerStream, error: type[hx.HixlError], message: str | None = None) -> None:
    """Check that a pull was refused before anything was written."""
    with pytest.raises(error, match=message):
        await stream.finished()
    with pytest.raises(error, match=message):
        await stream.layer(0)
    assert stream.outcome is not None
    assert stream.outcome.verdict in (Verdict.VOID, Verdict.REFUSED)
    assert stream.landed == ()
    await stream.drained()


async def test_tickets_of_the_other_kind(scene: Scene) -> None:
    async with (
        Pool(scene.owner.engine, VIEW, name="both", access="read-write") as both,
        both.reserve(tokens=32) as mine,
        scene.reader.reserve(tokens=32) as blocks,
    ):
        offer = mine.offer()
        with pytest.raises(hx.TicketError, match=r"lets blocks be read, not written; use it with blocks\.pull"):
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
        offer = mine.offer(ttl=50, readers=2)
        ticket = offer.ticket()
        stream = blocks.pull(scene.peer, ticket)
        publish_all(offer)
        await stream.layer(0)
        offer._offering._end_unopened()  # as the timer does
        await refused(others.pull(scene.peer, ticket), hx.TicketError, "has expired")
        with pytest.raises(hx.TransferTimeoutError, match="not every reader opened the ticket within 50 s"):
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
            await refused(stream, hx.LayoutMismatchError, "dtype is 'float16' at the source and 'bfloat16'")
            with pytest.raises(hx.StreamAbortedError, match="dtype is 'float16'"):
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
        offer = mine.offer(lease=0.2)
        publish_all(offer)
        message = r"could not be reached within 0\.2 s"
        await refused(blocks.pull(scene.peer, offer.ticket()), hx.WaitTimeoutError, message)
        with pytest.raises(hx.StreamAbortedError, match=message):
            await offer.finish()
        # Giving up does not wait for that.
        offer = mine.offer(lease=100)
        stream = blocks.pull(scene.peer, offer.ticket())
        await until(lambda: offer._offering.state.opened)
        await settle()
        await stream.abort("the client left")
        await until(lambda: scene.reader._context.tasks == 0, timeout=5)
        publish_all(offer)
        with pytest.raises(hx.StreamAbortedError, match="the client left"):
            await offer.finish()
        assert scene.reader.engine.stats().transfers == 0


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
        await offer.abort()
        await reading.drained()
        async with blocks.share(), offered.share():
            with pytest.raises(hx.BusyError, match="shared with other Blocks"):
                blocks.pull(scene.peer, offer._offering.ticket.body())
            await offered.offer().abort()


async def test_blocks_are_not_lent_while_a_read_may_write_them(scene: Scene) -> None:
    scene.plan.late(verb="read", count=1)
    async with scene.owner.reserve(tokens=32) as mine:
        fill(scene.owner, mine)
        async with scene.reader.reserve(tokens=32) as blocks:
            offer = mine.offer()
            stream = blocks.pull(scene.peer, offer.ticket())
            publish_all(offer)
            await until(lambda: scene.plan.counts.holding)
        await settle(200)
        assert scene.reader.statistics() == (BLOCKS - 2, 0, 2, 0)
        assert not offer._offering.state.ended, "its blocks are still read"
        scene.plan.clear().release()
        await stream.drained()
        assert scene.plan.counts.landed_late == 1
        assert scene.reader.statistics().quarantined == 0
        with pytest.raises(hx.StreamAbortedError, match="gave its blocks back"):
            await offer.finish()


# ---- lost, closed and silent peers ----


@pytest.mark.parametrize("side", ["owner", "reader"])
async def test_a_pool_that_closes_ends_its_offers_and_reads(scene: Scene, side: str) -> None:
    async with (
        Pool(scene.owner.engine, VIEW, name="closing", access="read") as src,
        Pool(scene.reader.engine, VIEW, name="leaving", access="none") as dst,
    ):
        mine, blocks, others = await src.reserve(tokens=32), await dst.reserve(tokens=32), await dst.reserve(tokens=32)
        offer, unread = mine.offer(), mine.offer()
        ticket = unread.ticket()
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        await (src if side == "owner" else dst).aclose()
        with pytest.raises(
            hx.StreamAbortedError, match=f"the {'owner' if side == 'owner' else 'consumer'} closed its pool"
        ):
            await stream.finished()
        if side == "owner":
            with pytest.raises(hx.StreamAbortedError, match="the owner closed its pool"):
                offer.publish(1)
            with pytest.raises(hx.TicketError):
                unread.ticket()
            await refused(others.pull(scene.peer, ticket), hx.TicketError, "has no pool 'closing' any more")
        else:
            publish_all(offer, range(1, LAYERS))
            with pytest.raises(hx.StreamAbortedError, match="the consumer closed its pool"):
                await offer.finish()
            await unread.abort()
        for one in (mine, blocks, others):
            await one.aclose()
        await check_idle(src, dst)


async def test_a_pool_closes_although_a_reader_does_not_end(scene: Scene) -> None:
    scene.plan.hold(verb="read", nth=1)
    async with scene.reader.reserve(tokens=32) as blocks:
        async with Pool(scene.owner.engine, VIEW, name="closing", access="read") as src, src.reserve(tokens=32) as mine:
            offer = mine.offer()
            stream = blocks.pull(scene.peer, offer.ticket())
            publish_all(offer)
            await until(lambda: scene.plan.counts.holding)
            await src.aclose(timeout=0.01)
            assert src.statistics() == (BLOCKS, 0, 0, 0)
        scene.plan.clear().release()
        with pytest.raises((hx.StreamAbortedError, hx.LeaseExpiredError)):
            await stream.finished()
        await stream.drained()


@pytest.mark.parametrize("lost", ["before", "during"])
async def test_an_owner_that_is_lost(lost: str) -> None:
    async with engine_pair() as pair, Pool(pair.left, VIEW, name="dst", access="none") as dst:
        engine = hx.Engine("127.0.0.1:0", name="owner")
        await engine.open()
        src = Pool(engine, VIEW, name="src", access="read")
        peer = await pair.left.connect(engine.address)
        mine, blocks = await src.reserve(tokens=32), await dst.reserve(tokens=32)
        offer = mine.offer()
        ticket = offer.ticket()
        if lost == "before":
            await engine.aclose()
            await until(lambda: peer.state is hx.PeerState.DOWN)
            await refused(blocks.pull(peer, ticket), hx.PeerDownError)
        else:
            stream = blocks.pull(peer, ticket)
            offer.publish(0)
            await stream.layer(0)
            await engine.aclose()
            with pytest.raises((hx.PeerLostError, hx.StreamAbortedError)) as caught:
                await stream.finished()
            assert caught.value.peer == "owner"
            await stream.layer(0)
            await stream.drained()
        await src.aclose()
        await asyncio.gather(mine.aclose(), blocks.aclose())
        await check_idle(src, dst)


@pytest.mark.parametrize("timeout", [0, 5])
async def test_the_engine_of_the_reader_closes(timeout: float) -> None:
    async with hx.Engine("127.0.0.1:0", name="owner") as engine, Pool(engine, VIEW, name="src", access="read") as src:
        reading = hx.Engine(name="reader")
        await reading.open()
        dst = Pool(reading, VIEW, name="dst", access="none")
        peer = await reading.connect(engine.address)
        mine, blocks, others = await src.reserve(tokens=32), await dst.reserve(tokens=32), await dst.reserve(tokens=32)
        offer = mine.offer(readers=2)
        stream = blocks.pull(peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        early = others.pull(peer, offer.ticket())
        if timeout:
            await reading.aclose()
        else:
            await dst.aclose(timeout=0)
        for one in (stream, early):
            with pytest.raises((hx.StreamAbortedError, hx.TicketError), match="closed its pool"):
                await one.finished()
        await until(lambda: offer._offering.state.opened == offer._offering.state.ended)
        await offer.abort()
        await dst.aclose()
        assert not dst._registry.readers
        assert not peer._heartbeats._intervals
        await reading.aclose()
        for one in (mine, blocks, others):
            await one.aclose()
        await check_idle(src, dst)


async def test_a_link_that_breaks(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        scene.plan.break_links()
        await until(lambda: scene.back.error is not None)
        with pytest.raises(hx.PeerLostError) as lost:
            await stream.finished()
        assert lost.value.peer == scene.peer.name
        await stream.drained()
        publish_all(offer, range(1, LAYERS))
        with pytest.raises(hx.PeerLostError) as caught:
            await offer.finish()
        assert caught.value.peer == scene.back.name
        await offer.drained()


async def test_a_failed_read_aborts_both_sides(scene: Scene) -> None:
    scene.plan.fail("system", native=5, nth=1, verb="read")
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        publish_all(offer)
        with pytest.raises(hx.StreamAbortedError, match="failed"):
            await stream.finished()
        with pytest.raises(hx.StreamAbortedError, match="failed"):
            await offer.finish()


def reader_of(offer: Offer) -> Any:
    """Return the only reader of an offer, as its owner knows it."""
    (reader,) = offer._offering._readers.values()
    return reader


async def test_what_is_read_after_the_pin_has_moved_on_never_lands(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        truth = fill(scene.owner, mine)
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        scene.plan.hold(verb="read")
        publish_all(offer, range(1, LAYERS))
        await until(lambda: scene.plan.counts.holding)
        scene.owner._pins._words[reader_of(offer).pin] += 1  # type: ignore[union-attr]
        fill(scene.owner, mine, 9)  # by its next user
        scene.plan.clear().release()
        with pytest.raises(hx.LeaseExpiredError, match="did not keep its blocks until they were read") as caught:
            await stream.finished()
        assert caught.value.peer == scene.peer.name
        assert stream.landed == (0,)
        check(scene.reader, blocks, 0, truth)
        with pytest.raises(hx.LeaseExpiredError):
            await stream.layer(1)
        with pytest.raises(hx.StreamAbortedError, match="did not keep"):
            await offer.finish()


async def test_a_reader_that_waits_is_told_that_its_lease_has_expired(scene: Scene) -> None:
    async with scene.owner.reserve(tokens=32) as mine, scene.reader.reserve(tokens=32) as blocks:
        offer = mine.offer()
        stream = blocks.pull(scene.peer, offer.ticket())
        offer.publish(0)
        await stream.layer(0)
        offer._offering._expire(reader_of(offer))
        with pytest.raises(hx.LeaseExpiredError, match="did not keep its blocks"):
            await stream.finished()
        publish_all(offer, range(1, LAYERS))
        with pytest.raises(hx.TransferTimeoutError, match="a reader was silent for 10 s"):
            await offer.finish()


# ---- anything at any time ----


@pytest.mark.parametrize("seed", range(3))
async def test_random_faults_aborts_and_closings_leave_nothing_behind(scene: Scene, seed: int) -> None:
    random = numpy.random.default_rng(seed)
    scene.plan.delay(0, 0.002, chance=0.4, verb="read").fail("system", chance=0.01, verb="read")
    scene.plan.pending(chance=0.3).reorder(window=3, within=0.001, chance=0.3, verb="read")
    finished = 0

    async def owner(offer: Offer, mine: Blocks, fate: str) -> None:
        with contextlib.suppress(hx.HixlError):
            for tokens in ((0, 7), (7, 32)):
                for layer in random.permutation(LAYERS).tolist():
                    offer.publish(layer, tokens=tokens)
                    await asyncio.sleep(random.uniform(0, 0.001))
                    if random.random() < 0.1 and fate in ("owner aborts", "owner closes"):
                        await (offer.abort() if fate == "owner aborts" else offer.aclose())
            await mine.aclose()
            await offer.finish(b"token")
        await offer.aclose()
        await offer.drained()

    async def reader(offer: Offer, truth: Contents, fate: str) -> None:
        nonlocal finished
        async with scene.reader.reserve(tokens=32) as blocks:
            try:
                stream = blocks.pull(scene.peer, offer.ticket())
                async for layer in stream:
                    check(scene.reader, blocks, layer, truth)
                    if random.random() < 0.2 and fate in ("reader aborts", "reader closes"):
                        await (stream.abort() if fate == "reader aborts" else blocks.aclose())
                        break
                assert await stream.finished() in (b"", b"token")
                finished += 1
            except (hx.StreamAbortedError, hx.TicketError):
                pass

    async def request(number: int) -> None:
        fates = ["", "", "owner aborts", "owner closes", "reader aborts", "reader closes"]
        fate, readers = fates[number % len(fates)], 1 + number % 3
        mine = await scene.owner.reserve(tokens=32)
        truth = fill(scene.owner, mine, number)
        offer = mine.offer(readers=readers)
        reading = [reader(offer, truth, fate if n == 0 else "") for n in range(readers)]
        await asyncio.gather(owner(offer, mine, fate), *reading)
        await mine.aclose()

    async with asyncio.timeout(30):
        await asyncio.gather(*(request(number) for number in range(24)))
        async with scene.owner.reserve(blocks=BLOCKS), scene.reader.reserve(blocks=BLOCKS):
            pass
    assert finished
    await check_idle(scene.owner, scene.reader)
    pins = scene.owner._pins
    assert pins is not None
    assert sorted(pins._free) == list(range(pins._fresh)), "every pin is free, once"


# ---- another process ----

PROCESS = "tests.kv.pull_process:"


class Remote(NamedTuple):
    """A pool here, whose offer a process reads: layer 0 has landed there."""

    process: PeerProcess
    pool: Pool
    blocks: Blocks
    offer: Offer


@contextlib.asynccontextmanager
async def read_elsewhere(lease: float | None = None) -> AsyncIterator[Remote]:
    async with (
        peer_process() as process,
        hx.Engine("127.0.0.1:0", name="owner") as engine,
        Pool(engine, pull_process.VIEW, name="src", access="read", shuffle=1) as pool,
    ):
        blocks = await pool.reserve(blocks=4)
        pull_process.set_all(pool, blocks, 7)
        offer = blocks.offer(lease=lease)
        offer.publish(0)
        assert await process.run(PROCESS + "pull", ticket=offer.ticket(), layers=1) == [7]
        yield Remote(process, pool, blocks, offer)
        await blocks.aclose()
        await check_idle(pool)


async def test_a_reader_in_another_process() -> None:
    async with read_elsewhere() as there:
        publish_all(there.offer, range(1, LAYERS))
        await there.offer.finish()
        assert await there.process.run(PROCESS + "finished") == {
            "error": "",
            "landed": {str(layer): [7] for layer in range(LAYERS)},
            "free": 8,
        }


@pytest.mark.parametrize("published", [True, False], ids=["with layers to read", "waiting for layers"])
async def test_a_reader_that_is_stopped_for_longer_than_its_lease_never_has_other_data(published: bool) -> None:
    async with read_elsewhere(lease=0.3) as there:
        there.process.stop()
        if published:
            publish_all(there.offer, range(1, LAYERS))
        await there.blocks.aclose()
        await until(lambda: there.offer._offering.state.ended)
        if published:
            with pytest.raises(hx.TransferTimeoutError, match=r"a reader was silent for 0\.3 s"):
                await there.offer.finish()
        else:
            await there.offer.abort()
        await there.offer.drained()
        async with there.pool.reserve(blocks=8) as others:
            pull_process.set_all(there.pool, others, 99)
            there.process.resume()
            end = await there.process.run(PROCESS + "finished")
        assert end == {"error": "LeaseExpiredError", "landed": {"0": [7]}, "free": 8}


async def test_a_reader_that_is_killed_keeps_no_blocks() -> None:
    async with read_elsewhere() as there:
        await there.blocks.aclose()
        there.process.kill()
        await until(lambda: there.offer._offering.state.ended)
        publish_all(there.offer, range(1, LAYERS))
        with pytest.raises(hx.PeerLostError) as caught:
            await there.offer.finish()
        assert caught.value.peer == "child"


@pytest.mark.parametrize("fate", ["stop", "kill"])
async def test_an_owner_that_is_stopped_or_killed(fate: str) -> None:
    async with (
        peer_process() as process,
        hx.Engine(name="reader") as engine,
        Pool(engine, pull_process.VIEW, name="dst", access="none") as pool,
    ):
        ticket = await process.run(PROCESS + "offer", value=5, lease=0.3)
        peer = await engine.connect(ticket["address"])
        async with pool.reserve(blocks=4) as blocks:
            stream = blocks.pull(peer, ticket)
            await stream.layer(0)
            if fate == "stop":
                process.stop()
                with pytest.raises(hx.TransferTimeoutError, match=r"the owner was silent for 0\.3 s") as timed_out:
                    await stream.finished()
                assert timed_out.value.peer == "child"
            else:
                process.kill()
                with pytest.raises(hx.PeerLostError) as lost:
                    await stream.finished()
                assert lost.value.peer == "child"
            await stream.drained()
            assert pull_process.values(pool, blocks, 0) == {5}
        assert pool.statistics().free == 8
        if fate == "stop":
            process.resume()
            assert await process.run(PROCESS + "finish") in (
                {"error": "StreamAbortedError", "free": 8},
                {"error": "TransferTimeoutError", "free": 8},  # its own lease went by before it read our end
            )
        await check_idle(pool)
