"""Pools on fake engines, where the test decides the order of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import pytest

from hixl_async.kv import Blocks, Group, Pool, PushStream, View
from hixl_async.kv.lease import Lease

from . import fake_engine

LAYERS = 4
GROUP = Group.attention(LAYERS, kv_heads=2, head_dim=8, dtype="float16")
VIEW = View.ordered(GROUP, blocks=16, block_tokens=4)


def push_all(out: PushStream, source: Blocks, layers: Sequence[int] = range(LAYERS)) -> None:
    """Push whole layers, in this order."""
    for layer in layers:
        out.push(layer, source)


@dataclass
class Pair:
    """A producer P and a consumer D, connected."""

    p: fake_engine.Engine
    d: fake_engine.Engine
    to_d: fake_engine.Peer  # P's peer
    to_p: fake_engine.Peer  # D's peer
    source: Pool
    target: Pool

    def layer(self, pool: Pool, ids: Sequence[int], layer: int) -> bytes:
        """Return the bytes of one layer of some blocks, keys first."""
        return b"".join(pool.array(layer, part)[list(ids)].tobytes() for part in ("k", "v"))

    def fill(self, ids: Sequence[int], layer: int, value: int) -> None:
        """Set all bytes of one layer of the source blocks: the keys to `value`, the values to the next one."""
        for number, part in enumerate(("k", "v")):
            self.source.array(layer, part, "uint16")[list(ids)] = (value + number) * 257


async def close(*pools: Pool) -> None:
    """Close pools, and check that nothing of them is left."""
    await asyncio.gather(*(pool.aclose(timeout=1) for pool in pools))
    for pool in pools:
        assert pool.statistics() == (pool.blocks, 0, 0, 0)
        assert not pool._registry.incoming
        assert not pool._registry.outgoing
        assert not pool._registry.producers
        assert pool._context.tasks == 0


@pytest.fixture(autouse=True)
def _no_lease_counts_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that whatever began to count a lease has ended that."""
    leases: list[Lease] = []
    begin = Lease.begin

    def begin_and_remember(lease: Lease) -> None:
        leases.append(lease)
        begin(lease)

    monkeypatch.setattr(Lease, "begin", begin_and_remember)
    yield
    assert not [lease for lease in leases if isinstance(lease._loop, asyncio.AbstractEventLoop) and lease._timer]


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    fake_engine.install(monkeypatch)
    p, d = fake_engine.Engine("p"), fake_engine.Engine("d")
    to_d, to_p = fake_engine.connect(p, d)
    source = Pool(p, VIEW, name="prefill", access="none", shuffle=1)
    target = Pool(d, VIEW, name="kv", shuffle=2)
    pair = Pair(p, d, to_d, to_p, source, target)
    yield pair
    to_d.resume(), to_p.resume()
    for transfer in p.transfers:
        transfer.release()
    await close(source, target)
    assert not to_d.losses
    assert not to_p.losses
    assert not to_p.signals
    assert not to_d.heartbeats
    assert not to_p.heartbeats
