"""Reading rows of a table that lies in another process.

    python examples/read_windows.py

The owner exports a table of 1,000 rows for reading. The reader takes a single row, and then the same 100 rows again and
again by one prepared batch. The owner runs no code for any of it.
"""

import asyncio
import random
import struct
import sys
import time

import hixl_async as hx

ROWS = 1000
ROW = struct.Struct("<Q56s")  # a number, and 56 bytes that depend on it


def row(number: int) -> bytes:
    return ROW.pack(number, f"row {number}".encode())


async def own() -> None:
    """Export the table until the reader leaves."""
    async with hx.Engine("127.0.0.1:0", name="owner") as engine:
        table = engine.allocate("table", ROWS * ROW.size, access="read")
        memoryview(table)[:] = b"".join(map(row, range(ROWS)))
        arrivals = engine.accepted()
        print(engine.address, flush=True)
        reader = await anext(arrivals)
        await reader.fenced()  # it has said goodbye


async def read(address: str) -> None:
    """Read rows, one by one and many at a time."""
    async with hx.Engine(name="reader") as engine:
        peer = await engine.connect(address)
        table = await peer.region("table")

        buffer = bytearray(ROW.size)
        await engine.read(buffer, table[17 * ROW.size : 18 * ROW.size])
        assert buffer == row(17)
        print("one row:", ROW.unpack(buffer)[1].rstrip(b"\0").decode())

        wanted = random.Random(1).sample(range(ROWS), 100)
        rows = engine.allocate("rows", len(wanted) * ROW.size)  # no access: peers do not see it
        offsets = [(i * ROW.size, number * ROW.size, ROW.size) for i, number in enumerate(wanted)]
        batch = hx.Batch("read", rows, table, offsets)  # checked here, once
        began = time.perf_counter()
        for _ in range(100):
            await engine.submit(batch)
        elapsed = time.perf_counter() - began
        assert bytes(rows[0 : rows.size]) == b"".join(map(row, wanted))
        print(f"100 rows, 100 times: {elapsed * 1e4:.1f} us for 100 rows")


async def main() -> None:
    owner = await asyncio.create_subprocess_exec(sys.executable, __file__, "own", stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    await read((await owner.stdout.readline()).decode().strip())
    await owner.wait()


if __name__ == "__main__":
    asyncio.run(own() if "own" in sys.argv[1:] else main())
