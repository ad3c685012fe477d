"""A program that forks with open engines, and whose two processes both end as programs do; see test_fork.py.

The loop stands still meanwhile, for asyncio's own loops cannot be run on, or closed, in a child: they share an epoll
instance with the parent's.
"""

import asyncio
import atexit
import gc
import os
import sys
import warnings

import hixl_async as hx

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
warnings.filterwarnings("ignore", "unclosed event loop", ResourceWarning)


async def open_engines() -> tuple[hx.Engine, hx.Engine, hx.RemoteRegion]:
    left = await hx.Engine("127.0.0.1:0", name="left").open()
    right = await hx.Engine("127.0.0.1:0", name="right").open()
    right.allocate("kv", 1 << 20, access="read-write")
    remote = await (await left.connect(right.address)).region("kv")
    await left.write(left.allocate("local", 1 << 20), remote)
    return left, right, remote


async def go_on(left: hx.Engine, right: hx.Engine, remote: hx.RemoteRegion) -> None:
    await left.write(b"goes on", remote[:7])
    back = bytearray(7)
    await left.read(back, remote[:7])
    print(f"parent: {back.decode()}", flush=True)
    await left.aclose()
    await right.aclose()
    print("parent: closed", flush=True)


loop = asyncio.new_event_loop()
engines = loop.run_until_complete(open_engines())
pid = os.fork()
if pid == 0:
    atexit.register(print, "child: ends", flush=True)
    try:
        engines[0].write(b"12345678", engines[2][:8])
    except hx.EngineForkedError as error:
        print(f"child: {type(error).__name__}", flush=True)
    del engines
    gc.collect()
    sys.exit(0)
status = os.waitpid(pid, 0)[1]
assert status == 0, status
loop.run_until_complete(go_on(*engines))
loop.close()
