"""Uses that checkers must accept, and, marked, those that they must refuse; `make lint-types` reads this file, nothing runs it.

A marked line that a checker would accept is an error, because mypy --strict reports marks without a use.
"""

from __future__ import annotations

import asyncio
from typing import assert_type

import numpy as np

import hixl_async as hx


async def accepted(engine: hx.Engine, region: hx.Region, remote: hx.RemoteRegion, peer: hx.Peer) -> None:
    rows = np.array([[0, 0, 8]], np.uint64)
    assert_type(region[0:8], hx.LocalSlice)
    assert_type(remote[0:8][0:4], hx.RemoteSlice)
    for batch in (
        hx.Batch("write", region, remote, rows),
        hx.Batch("read", region[0:8], remote[0:8], [(0, 0, 8)]),
        hx.Batch("write", [(region[0:8], remote[0:8]), (region, remote, rows)]),
        hx.Batch.strided("write", region, remote, np.zeros((1, 6), np.int64)),
        hx.Batch("write", region, remote, rows.data).shifted(8, -8),
    ):
        assert_type(await engine.submit(batch, notify=("topic", b"payload")), int)
    local: list[bytes | bytearray | memoryview | hx.Region | hx.LocalSlice] = [
        b"x",
        region,
        region[0:1],
        memoryview(region),
    ]
    for side in local:
        assert_type(engine.write(side, remote[0:1]), hx.Transfer)
    engine.write(np.zeros(8), remote, signal=(remote[0:8], 1), priority="high")
    engine.read(bytearray(8), remote[0:8])
    transfer = engine.write(b"x", remote[0:1])
    assert_type(await transfer, int)
    assert_type(await asyncio.wait_for(transfer, 1), int)
    assert_type(await asyncio.shield(transfer), int)
    assert_type(await asyncio.gather(transfer, transfer), tuple[int, int])
    done, _ = await asyncio.wait([transfer])
    assert_type(done, set[hx.Transfer])
    transfer.add_done_callback(lambda transfer: transfer.nbytes)
    await transfer.drained()
    await engine.drained(remote[0:1])
    assert_type(region.name, str)
    assert_type(region.access, hx.Access)
    assert_type((region.size, region.alive, region.pins, region.address), tuple[int, bool, int, int])
    assert_type(remote.access, hx.Access)
    assert_type(region[0:8].offset, int)
    memoryview(region)
    memoryview(region[0:8])
    np.frombuffer(memoryview(region), "float32")
    region.numpy("float32")
    if isinstance(local[0], hx.LocalSlice):
        assert_type(local[0], hx.LocalSlice)


async def refused(engine: hx.Engine, region: hx.Region, remote: hx.RemoteRegion) -> None:
    engine.write(remote[0:8], region[0:8])  # type: ignore[arg-type]
    engine.write(region[0:8], region[8:16])  # type: ignore[arg-type]
    engine.write(remote[0:8], remote[8:16])  # type: ignore[arg-type]
    engine.read([1, 2], remote[0:8])  # type: ignore[arg-type]
    engine.write(b"x", remote, signal=(region[0:8], 1))  # type: ignore[arg-type]
    engine.write(b"x", remote, priority="urgent")  # type: ignore[arg-type]
    engine.write(b"x", remote, notify=(b"topic", b"payload"))  # type: ignore[arg-type]
    hx.Batch("write", [(remote[0:8], region[0:8])])  # type: ignore[call-overload]
    hx.Batch("copy", region, remote)  # type: ignore[call-overload]
    memoryview(remote)  # type: ignore[arg-type]
    memoryview(remote[0:8])  # type: ignore[arg-type]
    hx.Transfer()  # type: ignore[call-arg]
    hx.LocalSlice()  # type: ignore[call-arg]
    region.unpin()  # type: ignore[attr-defined]
    remote.link  # type: ignore[attr-defined]  # noqa: B018
    region[0]  # type: ignore[index]
