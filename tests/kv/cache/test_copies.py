"""Copies within and between caches of one process, in numpy and torch."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import hixl_async as hx
from hixl_async.kv import Group, View
from hixl_async.kv.cache import local

from .conftest import Managers, fill, tokens_of
from .shapes import LAYERS, RIGHT, view


async def test_copy_blocks(managers: Managers) -> None:
    before = tokens_of(managers.source, range(16), (0, 64)).reshape(LAYERS, 2, 16, 4, 2, 8)
    await managers.left.copy_blocks(managers.source, {0: [8, 9], 3: [1]})
    after = tokens_of(managers.source, range(16), (0, 64)).reshape(before.shape)
    expected = before.copy()
    expected[:, :, [8, 9]], expected[:, :, 1] = before[:, :, [0, 0]], before[:, :, 3]
    assert (after == expected).all()
    await managers.left.copy_blocks(managers.source, {})


async def test_copy_cache(managers: Managers) -> None:
    long = managers.left.allocate_cache(view("BLPTH", blocks=3, block_tokens=9))
    short = managers.left.allocate_cache(view("L/PBTH", blocks=3, block_tokens=6))
    fill(long, 1)
    with pytest.raises(hx.RangeError, match="the rows hold 9 and 6 tokens"):
        await managers.left.copy_cache(short, long)
    await managers.left.copy_cache(short, long, 2, 1, tokens=(1, 5), layers=[0, 2])
    assert (tokens_of(short, [2], (1, 5), [0, 2]) == tokens_of(long, [1], (1, 5), [0, 2])).all()
    assert not tokens_of(short, [2], (0, 1)).any()
    assert not tokens_of(short, [2], (5, 6)).any()
    assert not tokens_of(short, [2], (0, 6), [1, 3]).any()
    await managers.left.copy_cache(long, long, 0, 1)
    assert (tokens_of(long, [0], (0, 9)) == tokens_of(long, [1], (0, 9))).all()
    with pytest.raises(hx.RangeError, match="the rows hold 6 tokens, not 7"):
        await managers.left.copy_cache(short, long, tokens=7)


async def test_swap_blocks_between_orders(managers: Managers) -> None:
    host = managers.left.allocate_cache(view("BLPHT", blocks=32))
    await managers.left.swap_blocks(managers.source, host, {3: 30, 1: 2})
    await managers.left.swap_blocks(host, managers.source, {30: 9})
    assert (tokens_of(host, [30, 2], (0, 8)) == tokens_of(managers.source, [3, 1], (0, 8))).all()
    assert (tokens_of(managers.source, [9], (0, 4)) == tokens_of(managers.source, [3], (0, 4))).all()


@pytest.mark.torch
@pytest.mark.parametrize("other", ["tensors", "engine"])
async def test_swap_blocks_with_tensors_of_torch(managers: Managers, other: str) -> None:
    torch = pytest.importorskip("torch")
    shape = view("LP/BHT")
    tensors = [torch.rand(size // 4) for size in shape.tensor_bytes]
    device = managers.left.register_cache(shape, tensors)
    host_view = view("LPBTH", blocks=8)
    host = (
        managers.left.allocate_cache(host_view)
        if other == "engine"
        else managers.left.register_cache(host_view, torch.zeros(host_view.tensor_bytes[0] // 2, dtype=torch.bfloat16))
    )
    await managers.left.swap_blocks(device, host, {3: 7, 5: 1})
    assert (tokens_of(host, [7, 1], (0, 8)) == tokens_of(device, [3, 5], (0, 8))).all()
    await managers.left.swap_blocks(host, device, {1: 0})
    assert (tokens_of(device, [0], (0, 4)) == tokens_of(device, [5], (0, 4))).all()
    for cache in (device, host):
        await cache.aclose()
        await cache.released()


async def test_large_copies_leave_the_loop_alone(managers: Managers, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group.attention(4, kv_heads=4, head_dim=64, dtype="float32")
    cache = managers.left.allocate_cache(View.ordered(group, "LP/BTH", blocks=64, block_tokens=16))
    fill(cache)
    threads, go_on, real = set(), threading.Event(), local.copy

    def copy(*parts: Any) -> None:
        threads.add(threading.get_ident())
        go_on.wait(10)
        real(*parts)

    monkeypatch.setattr(local, "copy", copy)
    copying = asyncio.ensure_future(managers.left.copy_blocks(cache, {n: [n + 32] for n in range(32)}))
    await asyncio.wait([copying], timeout=0.01)
    with pytest.raises(hx.BusyError, match="being written by a copy"):
        managers.left.push_blocks(RIGHT, cache, [40], [0])
    copying.cancel()
    await asyncio.wait([copying])
    assert len(cache._store.holds) == 2, "the thread goes on"
    go_on.set()
    await cache._store.holds.idle()
    assert threads
    assert threading.get_ident() not in threads
    assert (cache.array(3, "v")[32:] == cache.array(3, "v")[:32]).all()


async def test_misuse(managers: Managers) -> None:
    left, source = managers.left, managers.source
    with pytest.raises(hx.InvalidArgumentError, match="written twice"):
        await left.copy_blocks(source, {0: [2], 1: [2]})
    with pytest.raises(hx.InvalidArgumentError, match="both read and written"):
        await left.copy_blocks(source, {0: [1], 1: [2]})
    with pytest.raises(hx.RangeError, match="block 16 does not exist"):
        await left.copy_blocks(source, {0: [16]})
    with pytest.raises(hx.InvalidArgumentError, match="whole number"):
        await left.copy_blocks(source, {0: ["a"]})  # type: ignore[list-item]
    with pytest.raises(hx.RangeError, match="do not hold layer 9"):
        await left.copy_cache(source, source, 1, 0, layers=[9])
    other = left.allocate_cache(view(rank=0, ranks=2, block_tokens=4))
    with pytest.raises(hx.LayoutMismatchError, match="the ranks or the layers"):
        await left.swap_blocks(source, other, {0: 0})
    with pytest.raises(hx.RangeError, match="hold 4 tokens, those of the target 5"):
        await left.swap_blocks(source, left.allocate_cache(view(block_tokens=5)), {0: 0})
    async with source.lock([1]):
        with pytest.raises(hx.BusyError, match="locked"):
            await left.copy_blocks(source, {0: [1]})
        with pytest.raises(hx.BusyError, match="locked"):
            await left.copy_blocks(source, {1: [0]})
    assert len(source._store.holds) == 0
