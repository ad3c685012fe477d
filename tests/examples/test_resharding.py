"""A model's keys and values between sides that divide and store them differently: the next tokens are the same, bit by bit.

One process computes the prompt.  Its cache is divided over ranks and stages, pushed to or pulled by ranks that divide it in
another way, and put together again; decoding from there must give the tokens and logits of decoding from the first cache.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest

np = pytest.importorskip("numpy", reason="the demo's model needs numpy")

from support.model import Llama, PagedCache, decode  # noqa: E402 - after importorskip
from support.weights import Config, ModelUnavailable, Weights, load  # noqa: E402
from test_model import random_tensors  # noqa: E402

from hixl_async import Engine  # noqa: E402
from hixl_async.kv import Blocks, Group, Pool, Shard, View, shards  # noqa: E402

#: Divided as SmolLM2-135M, in small: three heads of keys and values for nine of queries.
SMALL = Config(
    layers=4,
    hidden_size=36,
    mlp_size=48,
    heads=9,
    kv_heads=3,
    head_dim=4,
    vocabulary_size=50,
    context_length=200,
    rope_base=10_000.0,
    norm_epsilon=1e-5,
    end_token=2,
)


class Side(NamedTuple):
    """How one side divides and stores a cache."""

    ranks: int
    stages: int
    block_tokens: int
    order: str = "LPBTH"


#: From the prefill side to the decode side; ranks that do not divide the three heads hold copies of some.
CASES = {
    "blocks of 16 to 64": (Side(1, 1, 16), Side(1, 1, 64)),
    "1 to 3 ranks": (Side(1, 1, 16), Side(3, 1, 16)),
    "3 to 1 ranks": (Side(3, 1, 16), Side(1, 1, 64, "L/PBTH")),
    "2 to 3 ranks": (Side(2, 1, 16), Side(3, 1, 8)),
    "4 to 3 ranks": (Side(4, 1, 16), Side(3, 1, 16, "BLPHT")),
    "2 stages to 2 ranks": (Side(1, 2, 16), Side(2, 1, 32)),
    "2 ranks of 2 stages to 1": (Side(2, 2, 8, "LP/BTH"), Side(1, 1, 16)),
}
#: The same with one latent per token, of which every rank holds a copy.
LATENTS = {
    "2 to 3 ranks": (Side(2, 1, 16), Side(3, 1, 64)),
    "2 stages to 2 ranks": (Side(1, 2, 8), Side(2, 1, 16, "L/PBTH")),
}


class Prefill(NamedTuple):
    """A prompt whose cache is there, and what decoding from it gives."""

    model: Llama
    tokens: int
    first: int
    #: The cache's contents: layer, keys and values, token, head, element.
    contents: Any
    #: The tokens that follow, and their logits.
    answer: list[tuple[int, Any]]


def prefill(model: Llama, prompt: list[int], steps: int) -> Prefill:
    config = model.config
    blocks = -(-(len(prompt) + steps) // 16)
    memory = np.zeros(config.kv_shape(blocks, 16), np.float32)
    cache = PagedCache(memory, range(blocks))
    first = int(model.forward(prompt, cache).argmax())
    contents = memory.reshape(config.layers, 2, blocks * 16, config.kv_heads, config.head_dim)[
        :, :, : len(prompt)
    ].copy()
    return Prefill(
        model, len(prompt), first, contents, list(decode(model, first, cache, start=len(prompt), max_tokens=steps))
    )


def views(group: Group, side: Side, blocks: int) -> list[View]:
    return [
        View.ordered(
            group,
            side.order,
            blocks=blocks,
            block_tokens=side.block_tokens,
            rank=shard.rank,
            ranks=shard.ranks,
            layers=shard.layers,
        )
        for shard in shards(group.layers, ranks=side.ranks, stages=side.stages)
    ]


def places(view: View, blocks: Blocks, tokens: int) -> tuple[Any, Any]:
    """Return the block of each token, and the place in it."""
    numbers, within = np.divmod(np.arange(tokens), view.block_tokens)
    return np.array(blocks.ids)[numbers], within


def group_of(config: Config, *, latent: bool) -> Group:
    """Return the model's group; or one with multi-head latent attention, whose latents are the model's keys and values."""
    if latent:
        size = config.kv_heads * config.head_dim
        return Group.latent(config.layers, latent_dim=size, rope_dim=size, dtype="float32")
    return Group.attention(config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype="float32")


def by_heads(contents: Any, group: Group) -> Any:
    """Return the contents by layer, part, token, head of the group, and element; not a copy."""
    return contents.reshape(*contents.shape[:3], group.parts[0].heads, group.parts[0].dim)


def fill(pool: Pool, blocks: Blocks, contents: Any) -> None:
    """Store a rank's part of the contents."""
    (view,) = pool.views
    contents = by_heads(contents, view.group)
    for layer in view.shard.layers:
        for number, part in enumerate(view.group.parts):
            heads = view.shard.heads(part)
            array = pool.array(layer, part.name, "float32")
            array[places(view, blocks, contents.shape[2])] = contents[layer, number, :, heads.start : heads.stop]


def collect(pool: Pool, blocks: Blocks, contents: Any) -> None:
    """Add a rank's part to the contents."""
    (view,) = pool.views
    contents = by_heads(contents, view.group)
    for layer in view.shard.layers:
        for number, part in enumerate(view.group.parts):
            heads = view.shard.heads(part)
            found = pool.array(layer, part.name, "float32")[places(view, blocks, contents.shape[2])]
            place = contents[layer, number, :, heads.start : heads.stop]
            assert (np.isnan(place) | (place == found)).all(), "ranks that hold copies have different ones"
            place[:] = found


async def carry(prompt: Prefill, here: Side, there: Side, verb: str, *, latent: bool = False) -> Any:
    """Return the contents as they arrive at the other side."""
    group = group_of(prompt.model.config, latent=latent)
    arrived = np.full_like(prompt.contents, np.nan)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        p, d = [await enter(Engine("127.0.0.1:0", name=name)) for name in "pd"]
        access = ("none", "write") if verb == "push" else ("read", "none")
        sources = [
            await enter(Pool(p, view, name=f"p{n}", access=access[0], shuffle=n))
            for n, view in enumerate(views(group, here, 20))
        ]
        targets = [
            await enter(Pool(d, view, name=f"d{n}", access=access[1], shuffle=99 - n))
            for n, view in enumerate(views(group, there, 20))
        ]
        held = [await enter(pool.reserve(tokens=prompt.tokens)) for pool in sources]
        for pool, blocks in zip(sources, held, strict=True):
            fill(pool, blocks, prompt.contents)
        move = push if verb == "push" else pull
        for target in targets:
            async with target.reserve(tokens=prompt.tokens) as blocks:
                await move(sources, held, target, blocks, prompt.tokens)
                collect(target, blocks, arrived)
        assert all(pool.statistics().quarantined == 0 for pool in (*sources, *targets))
    return arrived


async def push(sources: list[Pool], held: list[Blocks], target: Pool, blocks: Blocks, tokens: int) -> None:
    """Push from all sources into one target, in two chunks."""
    peer = await sources[0].engine.connect(target.engine.address)
    stream = blocks.stream(tokens=(0, tokens), sources=[shard_of(pool) for pool in sources])
    outs = [pool.open_stream(peer, stream.ticket()) for pool in sources]
    for out, pool, mine in zip(outs, sources, held, strict=True):
        for chunk in ((0, tokens // 2), (tokens // 2, tokens)):
            for layer in shard_of(pool).layers:
                out.push(layer, mine, tokens=chunk)
    await asyncio.gather(stream.finished(), *(out.finish() for out in outs))


async def pull(sources: list[Pool], held: list[Blocks], target: Pool, blocks: Blocks, tokens: int) -> None:
    """Offer by all sources, and pull all into one target."""
    peer = await target.engine.connect(sources[0].engine.address)
    offers = [mine.offer(tokens=(0, tokens)) for mine in held]
    stream = target.pull([blocks], [(peer, offer.ticket()) for offer in offers], tokens=[(0, tokens)])
    for offer, pool in zip(offers, sources, strict=True):
        for layer in shard_of(pool).layers:
            offer.publish(layer, tokens=(0, tokens // 2))
            offer.publish(layer)
    await asyncio.gather(stream.finished(), *(offer.finish() for offer in offers))


def shard_of(pool: Pool) -> Shard:
    return pool.views[0].shard


def check(prompt: Prefill, arrived: Any) -> None:
    """Check that the contents are the same, and that decoding from them is."""
    assert arrived.tobytes() == prompt.contents.tobytes()
    config, steps = prompt.model.config, len(prompt.answer)
    blocks = -(-(prompt.tokens + steps) // 16)
    memory = np.zeros(config.kv_shape(blocks, 16), np.float32)
    flat = memory.reshape(config.layers, 2, blocks * 16, config.kv_heads, config.head_dim)
    flat[:, :, : prompt.tokens] = arrived
    again = list(
        decode(prompt.model, prompt.first, PagedCache(memory, range(blocks)), start=prompt.tokens, max_tokens=steps)
    )
    assert [token for token, _ in again] == [token for token, _ in prompt.answer]
    assert all((one == other).all() for (_, one), (_, other) in zip(again, prompt.answer, strict=True))


@pytest.fixture(scope="module")
def small() -> Prefill:
    model = Llama(SMALL, Weights.from_tensors(random_tensors(1, SMALL)))
    prompt = np.random.default_rng(2).integers(3, SMALL.vocabulary_size, 75).tolist()
    return prefill(model, prompt, 8)


@pytest.fixture(scope="module")
def real() -> Prefill:
    try:
        checkpoint = load()
    except ModelUnavailable as error:
        pytest.skip(f"the real model is not there ({error}); make optional installs it")
    return prefill(Llama(checkpoint.config, checkpoint.weights), list(range(1000, 1075)), 4)


@pytest.mark.parametrize("verb", ["push", "pull"])
@pytest.mark.parametrize("case", CASES)
async def test_the_same_tokens_follow(small: Prefill, case: str, verb: str) -> None:
    check(small, await carry(small, *CASES[case], verb))


@pytest.mark.parametrize("verb", ["push", "pull"])
@pytest.mark.parametrize("case", LATENTS)
async def test_the_same_tokens_follow_from_latents(small: Prefill, case: str, verb: str) -> None:
    check(small, await carry(small, *LATENTS[case], verb, latent=True))


@pytest.mark.parametrize(("verb", "latent"), [("push", False), ("pull", False), ("push", True)])
async def test_the_same_tokens_of_the_real_model_follow(real: Prefill, verb: str, latent: bool) -> None:
    check(real, await carry(real, Side(4, 1, 16), Side(3, 1, 64), verb, latent=latent))
