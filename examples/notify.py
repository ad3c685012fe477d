"""Notifications, and flow control by credits: a sender never outruns its receiver.

    python examples/notify.py

The producer writes items into the slots of the consumer's window, and a notification after each. The consumer answers
with a credit for each slot that is free again, and the producer writes only while it has credits. Without them it would
overwrite items that were not read yet.
"""

import asyncio
import sys

import hixl_async as hx

SLOTS, SIZE, ITEMS = 4, 4096, 20


async def consume() -> None:
    """Take all items, and give a credit back for each."""
    async with hx.Engine("127.0.0.1:0", name="consumer") as engine:
        window = engine.allocate("slots", SLOTS * SIZE, access="write")
        work = engine.notifications("work", limit=SLOTS)  # no more can be under way
        print(engine.address, flush=True)
        for number in range(ITEMS):
            note = await work.get()
            start = number % SLOTS * SIZE
            item = bytes(window[start : start + int(note.payload)])
            engine.notify(note.peer, "credits", b"1")  # the slot is free: the item was copied
            assert item == f"item {number}".encode()
        print(f"consumed {ITEMS} items through {SLOTS} slots, {work.dropped} dropped")


async def produce(address: str) -> None:
    """Write all items, each into a slot that is free."""
    async with hx.Engine(name="producer") as engine:
        peer = await engine.connect(address)
        slots = await peer.region("slots")
        credits, available = engine.notifications("credits"), SLOTS
        waits = 0
        for number in range(ITEMS):
            if not available:
                waits += 1
                available += int((await credits.get()).payload)
            available -= 1
            item = f"item {number}".encode()
            start = number % SLOTS * SIZE
            await engine.write(
                item, slots[start : start + len(item)], notify=("work", str(len(item)).encode()), timeout=5
            )
        print(f"waited {waits} times for a credit")
        await peer.fenced()  # the consumer has read everything, and left


async def main() -> None:
    consumer = await asyncio.create_subprocess_exec(sys.executable, __file__, "consume", stdout=asyncio.subprocess.PIPE)
    assert consumer.stdout is not None
    address = (await consumer.stdout.readline()).decode().strip()
    await produce(address)
    print((await consumer.stdout.read()).decode(), end="")
    await consumer.wait()


if __name__ == "__main__":
    asyncio.run(consume() if "consume" in sys.argv[1:] else main())
