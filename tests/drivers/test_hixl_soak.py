"""A million transfers over HIXL."""

from __future__ import annotations

import ctypes as c
import os
import threading
from pathlib import Path

import pytest
import vtable as vt
from conftest import World
from hixl_rig import (
    MIB,
    Maker,
    Sim,
    backend_fixture,  # noqa: F401
    opened_fixture,  # noqa: F401
    sim_fixture,  # noqa: F401
    warm,
    world_fixture,  # noqa: F401
)
from vtable import WRITE


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_transfers(opened: Maker, sim: Sim, backend: str) -> None:
    """Random order, recycled handles, links that fail: every op ends once, nothing is left, and memory does not grow."""
    # Of requests; with each fails whatever its link has in flight, together about 1 % of all.
    # Where FAILED may mean that there are too many, another code stands for a failure of the link.
    fault = {"cs": "submit%0.003", "comm": "submit%0.0006", "fab": "submit%0.0006=507899"}[backend]
    n, block, depth = int(os.environ.get("HIXL_SOAK", "1000000")), 64, 32
    a = opened()
    worlds = [warm(World(*vt.join(a, opened()), size=depth * block)) for _ in range(2)]
    sim.set(LATENCY_US=1, JITTER_US=30, ORDER="random", SEED=7, FAULTS=fault)
    soak = Soak(a, worlds, depth, block)
    soak.run(n // 10)
    before = resident()
    soak.run(n)
    grown = resident() - before
    sim.set(FAULTS="")
    assert n // 200 < soak.failed < n // 20
    assert grown < 16 * MIB, f"grew by {grown / MIB:.1f} MiB"
    for world in worlds:
        assert world.left.down is None
        world.write(0, 0, world.size).ok(world.left)
        assert world.there.view == world.here.view


class Soak:
    """Keep `depth` ops in flight on each link; events are only counted, because a million Python objects take time."""

    def __init__(self, instance: vt.Instance, worlds: list[World], depth: int, block: int) -> None:
        self.instance, self.worlds = instance, worlds
        self.ops = [(vt.COp * depth)() for _ in worlds]
        self.keep = []
        self.slots: dict[int, tuple[World, object]] = {}
        self.state: dict[int, int] = {}
        self.free: list[int] = []
        self.lock = threading.Condition()
        self.succeeded = self.failed = 0
        for world, ops in zip(worlds, self.ops, strict=True):
            for i in range(depth):
                desc = vt.CDesc(world.here.handle, i * block, world.remote.handle, i * block, block)
                batch = vt.CBatch(verb=WRITE, n=1, desc=c.pointer(desc), bytes=block)
                self.keep.append((desc, batch))
                self.slots[c.addressof(ops[i])] = (world, batch)
        self.free = list(self.slots)

    def _post(self, _ctx: int, address: int, events: int) -> None:
        with self.lock:
            seen = self.state.get(address)
            if (
                seen is None
                or events & seen
                or not events
                or (events & vt.RELEASED and not (events | seen) & vt.COMPLETED)
            ):
                self.instance.violations.append(f"events {events} after {seen}")
                return
            self.state[address] = seen | events
            if events & vt.RELEASED:
                del self.state[address]
                status = vt.COp.from_address(address).status
                self.succeeded += status == vt.OK
                self.failed += status != vt.OK
                if status not in (vt.OK, vt.LINK):
                    self.instance.violations.append(f"status {status}")
                self.free.append(address)
                self.lock.notify()

    def run(self, n: int) -> None:
        """Run until `n` more transfers have ended; the instance's sink is ours meanwhile."""
        usual, self.instance._post = self.instance._post, self._post
        end = self.succeeded + self.failed + n
        submitted = self.succeeded + self.failed
        try:
            while True:
                with self.lock:
                    while not self.free and submitted < end:
                        assert self.lock.wait(vt.DEADLINE), "no transfer ends any more"
                    if submitted >= end:
                        assert self.lock.wait_for(lambda: not self.state, vt.DEADLINE), "a transfer does not end"
                        return
                    ready, self.free = self.free[: end - submitted], self.free[end - submitted :]
                    self.state.update(dict.fromkeys(ready, 0))
                for address in ready:
                    world, batch = self.slots[address]
                    c.memset(address, 0, c.sizeof(vt.COp))
                    answer = world.left.vt.submit(world.left.handle, c.byref(batch), vt.COp.from_address(address))
                    assert answer == vt.PENDING, answer
                submitted += len(ready)
        finally:
            self.instance._post = usual


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
