"""Pools on fake engines, where the test decides the order of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from hixl_async.kv import Layout, Pool, sender

from . import fake_engine

LAYOUT = Layout(layers=4, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4)


@dataclass
class Pair:
    """A producer P and a consumer D, connected."""

    p: fake_engine.Engine
    d: fake_engine.Engine
    to_d: fake_engine.Peer  # P's peer
    to_p: fake_engine.Peer  # D's peer
    source: Pool
    target: Pool

    def layer(self, pool: Pool, ids: tuple[int, ...], layer: int) -> bytes:
        """Return the bytes of one layer of some blocks, keys first."""
        size = pool.layout.block_bytes
        starts = [((2 * layer + half) * pool.blocks + block) * size for half in (0, 1) for block in ids]
        return b"".join(bytes(pool.memory[start : start + size]) for start in starts)

    def fill(self, ids: tuple[int, ...], layer: int, value: int) -> None:
        """Write one layer of the source blocks."""
        size = self.source.layout.block_bytes
        for half in (0, 1):
            for block in ids:
                start = ((2 * layer + half) * self.source.blocks + block) * size
                self.source.memory[start : start + size] = bytes([value + half]) * size


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(sender, "Batch", fake_engine.Batch)
    p, d = fake_engine.Engine("p"), fake_engine.Engine("d")
    to_d, to_p = fake_engine.connect(p, d)
    source = Pool(p, LAYOUT, blocks=16, name="prefill", access="none", shuffle=1)
    target = Pool(d, LAYOUT, blocks=16, name="kv", shuffle=2)
    pair = Pair(p, d, to_d, to_p, source, target)
    yield pair
    to_d.resume(), to_p.resume()
    for transfer in p.transfers:
        transfer.release()
    await asyncio.gather(source.aclose(timeout=1), target.aclose(timeout=1))
    for pool in (source, target):
        free, reserved, quarantined, waiting = pool.statistics()
        assert (free, reserved, quarantined, waiting) == (pool.blocks, 0, 0, 0)
        assert not pool._registry.incoming
        assert not pool._registry.outgoing
        assert pool._context.tasks == 0
    assert not to_d.losses
    assert not to_p.losses
    assert not to_p.signals
