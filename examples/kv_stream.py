"""A KV cache that streams from a prefill worker to a decode worker, layer by layer.

    python examples/kv_stream.py

The prefill worker asks the decode worker for blocks, and begins to compute. It pushes each layer while the next is being
computed. The decode worker answers with a ticket, and uses each layer as it lands. The first token comes with the end.
"""

import asyncio
import sys
from typing import Any

import hixl_async as hx

GROUP = hx.kv.Group.attention(layers=8, kv_heads=2, head_dim=64, dtype="float32")
VIEW = hx.kv.View.ordered(GROUP, blocks=64, block_tokens=16)
TOKENS = 100


async def decode() -> None:
    """Lend blocks to one request, and use its layers as they land."""
    async with hx.Engine("127.0.0.1:0", name="decode") as engine, hx.kv.Pool(engine, VIEW) as pool:
        reserved: asyncio.Future[tuple[hx.kv.Blocks, hx.kv.LayerStream]] = engine.loop.create_future()

        async def reserve(peer: hx.Peer, body: dict[str, Any]) -> dict[str, Any]:
            tokens: int = body["tokens"]
            blocks = await pool.reserve(tokens=tokens)
            stream = blocks.stream(tokens=(0, tokens))
            reserved.set_result((blocks, stream))
            return stream.ticket()

        engine.serve("reserve", reserve)
        print(engine.address, flush=True)
        blocks, stream = await reserved
        async with blocks:
            async for layer in stream:
                keys = pool.array(layer, "k")[list(blocks.ids)]  # block, token, head, element
                print(f"layer {layer}: {len(blocks)} blocks of keys, the first all {keys[0].min():g}")
            print("the first token is", (await stream.finished()).decode())
        print(pool.statistics())


async def prefill(address: str) -> None:
    """Compute layers, and push each one while the next is computed."""
    async with hx.Engine(name="prefill") as engine, hx.kv.Pool(engine, VIEW, access="none") as pool:
        peer = await engine.connect(address)
        async with pool.reserve(tokens=TOKENS) as source:
            ticket = peer.request("reserve", {"tokens": TOKENS})
            async with pool.open_stream(peer, ticket) as out:  # returns at once
                for layer in GROUP.layers:
                    for part in ("k", "v"):  # a model computes here, in a thread
                        pool.array(layer, part)[list(source.ids)] = layer
                    out.push(layer, source)
                await out.finish(b"42")


async def main() -> None:
    worker = await asyncio.create_subprocess_exec(sys.executable, __file__, "decode", stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    await prefill((await worker.stdout.readline()).decode().strip())
    print((await worker.stdout.read()).decode(), end="")
    await worker.wait()


if __name__ == "__main__":
    asyncio.run(decode() if "decode" in sys.argv[1:] else main())
