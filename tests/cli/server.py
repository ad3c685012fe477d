"""An engine to be pinged: prints its address, answers lines on standard input, and ends with it.

``python server.py REGION:SIZE:ACCESS ...``; the line ``NAME`` is answered by the bytes of that region, in hexadecimal.
The secret comes from HIXL_ASYNC_SECRET.
"""

import asyncio
import sys

import hixl_async as hx


async def main() -> None:
    async with hx.Engine("127.0.0.1:0", name="pinged") as engine:
        for argument in sys.argv[1:]:
            name, size, access = argument.split(":")
            region = engine.allocate(name, int(size), access=access)
            memoryview(region)[:] = b"\xa5" * len(region)
        print(engine.address, flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            print(bytes(engine.regions[line]).hex(), flush=True)


asyncio.run(main())
