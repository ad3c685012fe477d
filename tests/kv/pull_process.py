"""What the other process of a test does, as a reader or as an owner; see `peer_process`."""

from __future__ import annotations

from typing import Any

import hixl_async as hx
from hixl_async.kv import Blocks, LayerStream, Offer, Pool, View

VIEW = View.ordered(hx.kv.Group.attention(4, kv_heads=2, head_dim=128, dtype="uint8"), blocks=8, block_tokens=16)

#: The pool of each engine, its blocks, and the stream that fills them.
_reads: dict[hx.Engine, tuple[Pool, Blocks, LayerStream]] = {}
#: The pool of each engine, its blocks, and their offer.
_offers: dict[hx.Engine, tuple[Pool, Blocks, Offer]] = {}


def set_all(pool: Pool, blocks: Blocks, value: int) -> None:
    """Set all bytes of some blocks."""
    for layer in pool.views[0].shard.layers:
        for part in "kv":
            pool.array(layer, part)[list(blocks.ids)] = value


def values(pool: Pool, blocks: Blocks, layer: int) -> set[int]:
    """Return the different bytes of one layer of some blocks."""
    return {int(value) for part in "kv" for value in pool.array(layer, part)[list(blocks.ids)].reshape(-1)}


async def pull(engine: hx.Engine, ticket: dict[str, Any], layers: int) -> list[int]:
    """Begin to read an offer, and return the values of the first layers."""
    peer = await engine.connect(ticket["address"])
    pool = Pool(engine, VIEW, name="dst", access="none")
    blocks = await pool.reserve(blocks=4)
    stream = blocks.pull(peer, ticket)
    _reads[engine] = pool, blocks, stream
    for layer in range(layers):
        await stream.layer(layer)
    return [value for layer in range(layers) for value in values(pool, blocks, layer)]


async def finished(engine: hx.Engine) -> dict[str, Any]:
    """Wait for the end, and return the name of its error, and the values of the layers that have landed."""
    pool, blocks, stream = _reads.pop(engine)
    try:
        await stream.finished()
        error = ""
    except hx.HixlError as failure:
        error = type(failure).__name__
    landed = {layer: sorted(values(pool, blocks, layer)) for layer in stream.landed}
    await stream.drained()
    await blocks.aclose()
    free = pool.statistics().free
    await pool.aclose()
    return {"error": error, "landed": landed, "free": free}


async def offer(engine: hx.Engine, value: int, lease: float) -> dict[str, Any]:
    """Offer blocks full of a value, of which layer 0 may be read, and return the ticket."""
    pool = Pool(engine, VIEW, name="src", access="read")
    blocks = await pool.reserve(blocks=4)
    set_all(pool, blocks, value)
    offered = blocks.offer(lease=lease)
    offered.publish(0)
    _offers[engine] = pool, blocks, offered
    return offered.ticket()


async def finish(engine: hx.Engine) -> dict[str, Any]:
    """Publish the other layers, and return the name of the error of the offer, and the free blocks."""
    pool, blocks, offered = _offers.pop(engine)
    await blocks.aclose()
    error = ""
    try:
        for layer in range(1, 4):
            offered.publish(layer)
        await offered.finish()
    except hx.HixlError as failure:
        error = type(failure).__name__
    await offered.drained()
    free = pool.statistics().free
    await pool.aclose()
    return {"error": error, "free": free}
