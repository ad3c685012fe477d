"""Engines that end while a driver still holds the memory of a stream, in processes of their own: what is leaked stays."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

PROGRAM = """
    import asyncio, gc, sys
    import hixl_async as hx
    from hixl_async.engine import engine
    from hixl_async.testing import FaultPlan, engine_pair, faulty, until

    engine.LINGER = 0.1
    GROUP = hx.kv.Group.attention(2, kv_heads=2, head_dim=8, dtype="uint8")
    VIEW = hx.kv.View.ordered(GROUP, blocks=8, block_tokens=4)

    async def main(verb):
        heard = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context["message"]))
        plan = FaultPlan()
        access = "write" if verb == "push" else "read"
        async with (
            engine_pair(drivers=faulty("shm", plan), close_timeout=0.1) as pair,
            hx.kv.Pool(pair.left, VIEW, access="none") as here,
            hx.kv.Pool(pair.right, VIEW, access=access) as there,
        ):
            mine, other = await here.reserve(blocks=2), await there.reserve(blocks=2)
            plan.late()
            if verb == "push":
                stream = other.stream()
                out = await here.open_stream(pair.peer, stream.ticket())
                out.push(0, mine)
            else:
                offer = other.offer()
                stream = mine.pull(pair.peer, offer.ticket())
                offer.publish(0)
            await until(lambda: plan.holding)
            await pair.left.aclose()
            await mine.aclose()
            await other.aclose()
        gc.collect()
        await asyncio.sleep(0.01)
        print(*("leaked" if "it is leaked" in message else message for message in heard), sep=", ")

    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_only_the_leak_is_reported(verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", dedent(PROGRAM), verb], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "leaked"), done.stderr
