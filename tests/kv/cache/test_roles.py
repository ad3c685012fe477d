"""Roles, and switching them while transfers run."""

from __future__ import annotations

import asyncio
import random

import pytest

import hixl_async as hx
from hixl_async.kv.cache import CacheKeyByIdAndIndex, CacheManager, Role
from hixl_async.testing import FaultPlan, faulty, until

from .conftest import Managers, fill, linked, tokens_of
from .shapes import LEFT, RIGHT, view


async def test_what_each_role_does(managers: Managers) -> None:
    left, right, source, target = managers
    await left.switch_role("prompt")
    await right.switch_role(Role.DECODER)
    assert (left.role, right.role) == (Role.PROMPT, Role.DECODER)
    await right.pull_blocks(LEFT, target, [0], [0])
    await left.push_blocks(RIGHT, source, [0], [0])
    with pytest.raises(hx.AccessError, match="cluster 1 is a prompt, which does not pull"):
        left.pull_blocks(RIGHT, source, [0], [0])
    with pytest.raises(hx.AccessError, match="cluster 1 is a prompt, which does not accept pushes"):
        source.expect(1)
    with pytest.raises(hx.AccessError, match="cluster 2 is a decoder, which does not push"):
        right.push_blocks(LEFT, target, [0], [0])
    await left.switch_role("mix")
    with pytest.raises(hx.AccessError, match="cluster 2 is a decoder, which does not serve pulls"):
        await left.pull_blocks(RIGHT, source, [0], [0])
    await left.switch_role("prompt")
    await right.switch_role("mix")
    with pytest.raises(hx.AccessError, match="cluster 1 is a prompt, which does not accept pushes"):
        await right.push_blocks(LEFT, target, [0], [0])
    with pytest.raises(hx.InvalidArgumentError, match="role must be"):
        await left.switch_role("both")


async def test_a_switch_waits_for_pushes_and_served_pulls() -> None:
    plan = FaultPlan()
    async with linked(faulty("shm", plan)) as pair:
        gate = asyncio.Event()
        push = pair.right.push_blocks(LEFT, pair.target, [0], [0], ready=lambda layer: gate.is_set())
        plan.hold(verb="read")
        pull = pair.left.pull_blocks(RIGHT, pair.source, [3], [4])
        await until(lambda: plan.counts.holding and pair.left._owner.served)
        # The right side pushes, and serves a pull.
        switching = asyncio.ensure_future(pair.right.switch_role("decoder"))
        await asyncio.wait([switching], timeout=0.01)
        for call in (
            lambda: pair.right.push_blocks(LEFT, pair.target, [0], [0]),
            lambda: pair.left.pull_blocks(RIGHT, pair.source, [5], [6]),
        ):
            with pytest.raises(hx.AccessError, match="cluster 2 is a decoder"):
                await call()
        with pytest.raises(hx.WaitTimeoutError, match="old role had not ended within 0.01 s"):
            await pair.right.switch_role("decoder", timeout=0.01)
        gate.set()
        await push
        await asyncio.wait([switching], timeout=0.01)
        assert not switching.done()
        plan.clear().release()
        await pull
        await switching
        await pair.right.pull_blocks(LEFT, pair.target, [0], [0])


async def test_a_switch_waits_for_pulls_and_expected_pushes(managers: Managers) -> None:
    gate = asyncio.Event()
    under_way, never = managers.target.expect(1), managers.target.expect(2)
    push = managers.left.push_blocks(RIGHT, managers.source, [0], [0], req_id=1, ready=lambda layer: gate.is_set())
    await until(lambda: managers.right._owner.served)
    switching = asyncio.ensure_future(managers.right.switch_role("prompt"))
    with pytest.raises(hx.StreamAbortedError, match="cluster 2 has become a prompt"):
        await never.finished()
    await asyncio.wait([switching], timeout=0.01)
    assert not switching.done()
    gate.set()
    await under_way.finished()
    await push
    await switching
    assert await managers.left.pull_blocks(RIGHT, managers.source, [0], [1])


async def test_switching_under_load(managers: Managers) -> None:
    """Whatever the role is at the moment, each transfer is either refused as a whole, or right."""
    left, right = managers.left, managers.right
    other = right.allocate_cache(view("BLPTH", blocks=40))
    mine = left.allocate_cache(view(blocks=40))
    fill(other, 3)
    key = CacheKeyByIdAndIndex(2, other.cache_id)
    moved, refused, over = {"pull": 0, "push": 0}, 0, False

    async def load(number: int) -> None:
        nonlocal refused
        choose = random.Random(number)
        while not over:
            block = choose.randrange(16)
            try:
                if number % 2:
                    await left.pull_blocks(key, mine, [block], [number])
                    assert (tokens_of(mine, [number], (0, 4)) == tokens_of(other, [block], (0, 4))).all()
                    moved["pull"] += 1
                else:
                    await left.push_blocks(key, managers.source, [block], [16 + number])
                    assert (
                        tokens_of(other, [16 + number], (0, 4)) == tokens_of(managers.source, [block], (0, 4))
                    ).all()
                    moved["push"] += 1
            except hx.AccessError:
                refused += 1

    tasks = [asyncio.ensure_future(load(number)) for number in range(8)]
    for number in range(20):
        role = (Role.DECODER, Role.PROMPT)[number % 2]
        await right.switch_role(role)
        assert not [served for served in right._owner.served if not role.allows(served.duty)]
        wanted, before = "push" if role is Role.DECODER else "pull", dict(moved)
        await until(lambda: moved[wanted] > before[wanted])
    over = True
    await asyncio.gather(*tasks)
    assert refused


async def test_closing_stops_what_runs(managers: Managers) -> None:
    third = await hx.Engine("127.0.0.1:0", name="third").open()
    manager = CacheManager(third, 3)
    cache = manager.allocate_cache(view())
    await manager.link_clusters({2: managers.right.engine.address})
    push = manager.push_blocks(RIGHT, cache, [0], [0], ready=lambda layer: False)
    await until(lambda: managers.right._owner.served)
    await manager.aclose()
    await manager.aclose()
    with pytest.raises(hx.StreamAbortedError, match="the cache manager was closed"):
        await push
    for call in (lambda: manager.allocate_cache(view()), lambda: manager.push_blocks(RIGHT, cache, [0], [0])):
        with pytest.raises(hx.ClosedError, match="the cache manager of cluster 3 is closed"):
            call()
    assert 3 not in managers.right.links
    await until(lambda: not managers.right._owner.served)
    await third.aclose()
