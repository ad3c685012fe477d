"""NIXL over UCX, with handles that were prepared before; on one host a write is process_vm_writev.

Completion is asked for in a loop: NIXL has nothing to wait on.  Under asyncio the loop gives way by ``sleep(0)``.
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from time import perf_counter_ns, sleep
from typing import Any

import numpy as np
from rig.side import BLOCK_STRIDE, Work, page_memory

__all__ = ["Initiator", "target"]

WORD = 8


class Side:
    """An agent with its memory, and its connection to the other agent."""

    def __init__(self, name: str, size: int, fill: int, options: dict[str, str]) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=options["thread"] == "yes", backends=["UCX"])
        self.agent: Any = nixl_agent(name, config)
        self.memory = page_memory(size, fill)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self._registered = self.agent.register_memory([(self.address, size, 0, "")], "DRAM")
        self.peer: Any = None
        self.remote = 0

    def card(self) -> tuple[bytes, int]:
        return self.agent.get_agent_metadata(), self.address

    def meet(self, card: tuple[bytes, int]) -> None:
        metadata, self.remote = card
        self.peer = self.agent.add_remote_agent(metadata)
        self.agent.make_connection(self.peer)

    def handle(self, spans: Any, note: bytes = b"") -> Any:
        """Return the handle of a write of `spans`, N x 2: offset on both sides, length."""
        rows = np.zeros((len(spans), 3), np.uint64)
        rows[:, :2] = spans
        there = rows.copy()
        rows[:, 0] += np.uint64(self.address)
        there[:, 0] += np.uint64(self.remote)
        left, right = (self.agent.get_xfer_descs(one, "DRAM") for one in (rows, there))
        return self.agent.initialize_xfer("WRITE", left, right, self.peer, note)

    def post(self, handle: Any, note: bytes = b"") -> None:
        agent = self.agent
        state = agent.transfer(handle, note)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")

    def see(self) -> None:
        """Wait for a notification."""
        while not self.agent.get_new_notifs():
            pass


def target(line: Connection, size: int, options: dict[str, str]) -> None:
    """Own the memory, and poll for notifications when `line` says so."""
    side = Side("target", size, 0, options)
    line.send(side.card())
    side.meet(line.recv())
    back = side.handle([(0, WORD)])
    while True:
        what, count = line.recv()
        if what == "serve":  # a connection is only made while both ask for progress
            while not line.poll(0.0005):
                side.agent.get_new_notifs()
        elif what == "look":
            line.send(bytes(side.memory[:count]))
        elif what == "notify":
            for _ in range(count):
                side.see()
                side.post(back, b"n")
        elif what == "deliver":
            for _ in range(count):
                side.see()
                side.agent.send_notif(side.peer, b"n")


class Initiator:
    """The side that posts handles which were made before, and polls for their state."""

    def __init__(self, line: Connection, size: int, options: dict[str, str]) -> None:
        self._line = line
        self._loop = asyncio.new_event_loop() if options["waiting"] == "asyncio" else None
        self._side = side = Side("initiator", size, 7, options)
        card = line.recv()
        line.send(side.card())
        side.meet(card)
        line.send(("serve", 0))
        self._handles: dict[Work, list[Any]] = {}
        self._post_all(Work("write", size), 1)
        line.send(("look", WORD))
        if line.recv() != bytes([7]) * WORD:
            raise RuntimeError("the write did not arrive")

    def run(self, work: Work, times: int) -> int | None:
        """See `rig.side.Initiator`."""
        if work.kind == "idle":
            start = perf_counter_ns()
            sleep(work.parts / 1000)
            return perf_counter_ns() - start
        if self._loop is not None and work.kind in ("notify", "deliver"):
            return None
        if work.kind in ("notify", "deliver"):
            return self._notify(work, times)
        self._line.send(("serve", 0))
        try:
            if self._loop is not None:
                run = self._await_rows if work.kind == "rows" else self._await_all
                return self._loop.run_until_complete(run(work, times))
            if work.kind == "flight":
                return self._fly(work, times)
            if work.kind == "rows":
                return self._rows(work, times)
            return self._post_all(work, times)
        finally:
            self._line.send(("rest", 0))

    def _made(self, work: Work) -> list[Any]:
        if work not in self._handles:
            make = self._side.handle
            if work.kind == "flight":
                self._handles[work] = [make([(i * work.size, work.size)]) for i in range(work.parts)]
            else:
                self._handles[work] = [make(_spans(work))]
        return self._handles[work]

    def _post_all(self, work: Work, times: int) -> int:
        (handle,) = self._made(work)
        post = self._side.post
        start = perf_counter_ns()
        for _ in range(times):
            post(handle)
        return perf_counter_ns() - start

    def _rows(self, work: Work, times: int) -> int:
        spans = _spans(work)
        start = perf_counter_ns()
        for _ in range(times):
            handle = self._side.handle(spans)
            self._side.post(handle)
            handle.release()
        return perf_counter_ns() - start

    def _fly(self, work: Work, times: int) -> int:
        handles, agent = self._made(work), self._side.agent
        start = perf_counter_ns()
        for _ in range(times):
            flying = [handle for handle in handles if agent.transfer(handle) == "PROC"]
            while flying:
                flying = [handle for handle in flying if agent.check_xfer_state(handle) == "PROC"]
        return perf_counter_ns() - start

    def _notify(self, work: Work, times: int) -> int:
        (handle,) = self._made(work)
        side = self._side
        self._line.send((work.kind, times + 1))
        side.post(handle, b"n")  # untimed: the target has to hear of it over the line first
        side.see()
        start = perf_counter_ns()
        for _ in range(times):
            side.post(handle, b"n")
            side.see()
        return perf_counter_ns() - start

    async def _await(self, handle: Any) -> None:
        agent = self._side.agent
        state = agent.transfer(handle)
        while state == "PROC":
            await asyncio.sleep(0)
            state = agent.check_xfer_state(handle)

    async def _await_rows(self, work: Work, times: int) -> int:
        spans = _spans(work)
        start = perf_counter_ns()
        for _ in range(times):
            handle = self._side.handle(spans)
            await self._await(handle)
            handle.release()
        return perf_counter_ns() - start

    async def _await_all(self, work: Work, times: int) -> int:
        agent = self._side.agent

        async def writer(handle: Any) -> None:
            for _ in range(times):
                state = agent.transfer(handle)
                while state == "PROC":
                    await asyncio.sleep(0)
                    state = agent.check_xfer_state(handle)

        handles = self._made(work)
        start = perf_counter_ns()
        if len(handles) == 1:
            await writer(handles[0])
        else:
            await asyncio.gather(*map(writer, handles))
        return perf_counter_ns() - start


def _spans(work: Work) -> Any:
    spans = np.full((work.parts, 2), work.size, np.uint64)
    spans[:, 0] = np.arange(work.parts, dtype=np.uint64) * np.uint64(work.size * BLOCK_STRIDE)
    return spans
