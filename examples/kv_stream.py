"""A KV cache that streams from a prefill worker to a decode worker, layer by layer.

    python examples/kv_stream.py

The decode worker reserves blocks and answers with a ticket. The prefill worker computes layer after layer and pushes
each one, while the next is being computed. The decode worker uses each layer as it lands.
"""

import asyncio
import sys
from typing import Any

import numpy as np

import hixl_async as hx

LAYOUT = hx.kv.Layout(layers=8, kv_heads=2, head_dim=64, dtype="float32", block_tokens=16)
BLOCKS, TOKENS = 64, 100


def view(pool: hx.kv.Pool) -> Any:
    """Return a pool as an array: layer, keys or values, block, token, head, element."""
    return np.frombuffer(pool.memory, np.float32).reshape(LAYOUT.shape(pool.blocks))


async def decode() -> None:
    """Lend blocks to one request, and use its layers as they land."""
    async with hx.Engine("127.0.0.1:0", name="decode") as engine, hx.kv.Pool(engine, LAYOUT, blocks=BLOCKS) as pool:
        reserved: asyncio.Future[hx.kv.Blocks] = asyncio.get_running_loop().create_future()

        async def reserve(peer: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
            blocks = await pool.reserve(tokens=body["tokens"])
            reserved.set_result(blocks)
            return blocks.ticket()

        engine.serve("reserve", reserve)
        print(engine.address, flush=True)
        async with await reserved as blocks:
            async for layer in blocks.stream():
                keys = view(pool)[layer, 0, list(blocks.ids)]
                print(f"layer {layer}: {len(blocks.ids)} blocks of keys, all {keys.min():g}")
        print(pool.statistics())


async def prefill(address: str) -> None:
    """Compute layers, and push each one while the next is computed."""
    async with hx.Engine(name="prefill") as engine, hx.kv.Pool(engine, LAYOUT, blocks=BLOCKS, access="none") as pool:
        peer = await engine.connect(address)
        ticket = await peer.request("reserve", {"tokens": TOKENS})
        async with pool.reserve(tokens=TOKENS) as source, pool.open_stream(peer, ticket) as stream:
            for layer in range(LAYOUT.layers):
                view(pool)[layer, :, list(source.ids)] = layer  # a model computes here, in a thread
                stream.push(layer, source[layer])


async def main() -> None:
    worker = await asyncio.create_subprocess_exec(sys.executable, __file__, "decode", stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    await prefill((await worker.stdout.readline()).decode().strip())
    print((await worker.stdout.read()).decode(), end="")
    await worker.wait()


if __name__ == "__main__":
    asyncio.run(decode() if "decode" in sys.argv[1:] else main())
