"""Mooncake's transfer engine over TCP.  It has no descriptor to wait on, so a process that expects a notification polls."""

from __future__ import annotations

from multiprocessing.connection import Connection
from time import perf_counter_ns, sleep
from typing import Any

import numpy as np
from rig.side import BLOCK_STRIDE, Work, page_memory

__all__ = ["Initiator", "target"]

WORD = 8
#: Blocks of one batch; its queues overflow beyond.
MOST_BLOCKS = 4096


def _post(engine: Any, peer: str, here: int, there: int, size: int) -> None:
    """Write, with a notification."""
    from mooncake.engine import TransferNotify, TransferOpcode

    if engine.transfer_sync(peer, here, there, size, TransferOpcode.Write, TransferNotify("n", "n")) != 0:
        raise RuntimeError("Mooncake: a write failed")


def _see(engine: Any) -> None:
    """Wait for a notification."""
    while not engine.get_notifies():
        pass


def _engine(size: int, fill: int) -> tuple[Any, memoryview, int]:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    memory = page_memory(size, fill)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0 or engine.register_memory(address, size) != 0:
        raise RuntimeError("Mooncake's engine does not start")
    return engine, memory, address


def target(line: Connection, size: int, options: dict[str, str]) -> None:
    """Own the memory; the engine's threads receive.  A notification is answered by another one, with a write of a word."""
    engine, memory, address = _engine(size, 0)
    line.send((f"127.0.0.1:{engine.get_rpc_port()}", address))
    peer, remote = line.recv()
    while True:
        what, count = line.recv()
        if what == "look":
            line.send(bytes(memory[:count]))
        for _ in range(count if what == "answer" else 0):
            _see(engine)
            _post(engine, peer, address, remote, WORD)


class Initiator:
    """The side that calls; a call blocks until the write is done, and several in flight are submitted and polled."""

    def __init__(self, line: Connection, size: int, options: dict[str, str]) -> None:
        self._line = line
        self._engine, self._memory, self._address = _engine(size, 7)
        self._peer, self._remote = line.recv()
        line.send((f"127.0.0.1:{self._engine.get_rpc_port()}", self._address))
        self._write(Work("write", size), 1)
        line.send(("look", WORD))
        if line.recv() != bytes([7]) * WORD:
            raise RuntimeError("the write did not arrive")

    def run(self, work: Work, times: int) -> int | None:
        """See `rig.side.Initiator`."""
        if work.kind == "idle":
            start = perf_counter_ns()
            sleep(work.parts / 1000)
            return perf_counter_ns() - start
        if work.kind == "write":
            return self._write(work, times)
        if work.kind == "flight":
            return self._fly(work, times)
        if work.kind in ("notify", "deliver"):
            return self._notify(work, times)
        return self._list(work, times)

    def _write(self, work: Work, times: int) -> int:
        engine, peer, here, there = self._engine, self._peer, self._address, self._remote
        start = perf_counter_ns()
        for _ in range(times):
            if engine.transfer_sync_write(peer, here, there, work.size) != 0:
                raise RuntimeError("Mooncake: a write failed")
        return perf_counter_ns() - start

    def _list(self, work: Work, times: int) -> int:
        offsets = range(0, work.span, work.size * BLOCK_STRIDE)
        here, there = ([base + offset for offset in offsets] for base in (self._address, self._remote))
        lengths = [work.size] * work.parts
        cuts = [slice(begin, begin + MOST_BLOCKS) for begin in range(0, work.parts, MOST_BLOCKS)]
        batches = [(here[cut], there[cut], lengths[cut]) for cut in cuts]
        start = perf_counter_ns()
        for _ in range(times):
            for batch in batches:
                if self._engine.batch_transfer_sync_write(self._peer, *batch) != 0:
                    raise RuntimeError("Mooncake: a batch failed")
        return perf_counter_ns() - start

    def _notify(self, work: Work, times: int) -> int:
        engine, peer, here, there = self._engine, self._peer, self._address, self._remote
        self._line.send(("answer", times + 1))
        start = 0
        for turn in range(times + 1):
            if turn == 1:  # the first one is not timed: the target has to hear of it over the line before
                start = perf_counter_ns()
            _post(engine, peer, here, there, work.size)
            _see(engine)
        return perf_counter_ns() - start

    def _fly(self, work: Work, times: int) -> int:
        engine, peer = self._engine, self._peer
        pairs = [(self._address + i * work.size, self._remote + i * work.size) for i in range(work.parts)]
        start = perf_counter_ns()
        for _ in range(times):
            flying = [engine.transfer_submit_write(peer, here, there, work.size) for here, there in pairs]
            while flying:
                flying = [number for number in flying if engine.transfer_check_status(number) == 0]
        return perf_counter_ns() - start
