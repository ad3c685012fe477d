"""A write into another process's memory.

    python examples/write.py

The receiver starts, lends a window of its memory, and waits. The sender writes 8 MiB into it. The receiver runs no code
for that, and learns of it by the notification that follows the data.
"""

import asyncio
import hashlib
import os
import sys

import hixl_async as hx

SIZE = 8 << 20


async def receive() -> None:
    """Lend a window, and print what has arrived."""
    async with hx.Engine("127.0.0.1:0", name="receiver") as engine:
        window = engine.allocate("window", SIZE, access="write")
        print(engine.address, flush=True)  # for the sender
        note = await engine.notifications("written").get()
        digest = hashlib.sha256(window).hexdigest()
        print(f"{note.peer.name} wrote {SIZE >> 20} MiB: {'as sent' if digest == note.payload.decode() else 'CHANGED'}")


async def send(address: str) -> None:
    """Write random bytes, then their digest."""
    async with hx.Engine(name="sender") as engine:
        peer = await engine.connect(address)
        remote = await peer.region("window")
        data = os.urandom(SIZE)
        digest = hashlib.sha256(data).hexdigest().encode()
        try:
            await engine.write(data, remote[0:SIZE], notify=("written", digest), timeout=10)
        except hx.RefusedError as error:
            sys.exit(f"nothing was written: {error}")
        except hx.TransferError as error:
            sys.exit(f"the window's contents are undefined: {error}")


async def main() -> None:
    receiver = await asyncio.create_subprocess_exec(sys.executable, __file__, "receive", stdout=asyncio.subprocess.PIPE)
    assert receiver.stdout is not None
    address = (await receiver.stdout.readline()).decode().strip()
    await send(address)
    print((await receiver.stdout.read()).decode(), end="")
    await receiver.wait()


if __name__ == "__main__":
    asyncio.run(receive() if "receive" in sys.argv[1:] else main())
