"""Two-sided by torch.distributed with gloo, which stands in for HCCL: send and recv, and an answer of one byte."""

from __future__ import annotations

import os
import tempfile
from multiprocessing.connection import Connection
from time import perf_counter_ns, sleep
from typing import Any

from rig.side import BLOCK_STRIDE, Work, page_memory

__all__ = ["Initiator", "join", "target"]

WORD = 8


def join(rank: int, meeting: str) -> tuple[Any, Any]:
    """Return torch and its distributed package, in a group of two that meet at the file `meeting`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    return torch, dist


def target(line: Connection, size: int, options: dict[str, str]) -> None:
    """Receive the work that is announced over `line`."""
    torch, dist = join(1, line.recv())
    memory = page_memory(size, 0)
    tensor, answer = torch.frombuffer(memory, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    while True:
        work, times = line.recv()
        if work is None:
            line.send(bytes(memory[:times]))
            continue
        parts = _parts(tensor, work)
        for _ in range(times):
            if len(parts) == 1:
                dist.recv(parts[0], 0)
            else:
                for receipt in [dist.irecv(part, 0, tag=i + 1) for i, part in enumerate(parts)]:
                    receipt.wait()
            dist.send(answer, 0)


class Initiator:
    """The sending side, which waits for each answer."""

    def __init__(self, line: Connection, size: int, options: dict[str, str]) -> None:
        self._line = line
        with tempfile.TemporaryDirectory() as folder:
            meeting = os.path.join(folder, "meeting")
            line.send(meeting)
            torch, self._dist = join(0, meeting)
            self._tensor = torch.frombuffer(page_memory(size, 7), dtype=torch.uint8)
            self._answer = torch.zeros(1, dtype=torch.uint8)
            # The other side may still read the file when this one has joined, but not after its first answer.
            self._send(Work("write", size), 1)
        line.send((None, WORD))
        if line.recv() != bytes([7]) * WORD:
            raise RuntimeError("the message did not arrive")

    def run(self, work: Work, times: int) -> int | None:
        """See `rig.side.Initiator`."""
        if work.kind == "idle":
            start = perf_counter_ns()
            sleep(work.parts / 1000)
            return perf_counter_ns() - start
        if work.kind == "notify" or work.parts > 1024:
            return None
        return self._send(work, times)

    def _send(self, work: Work, times: int) -> int:
        dist, answer, parts = self._dist, self._answer, _parts(self._tensor, work)
        self._line.send((work, times))
        start = perf_counter_ns()
        for _ in range(times):
            if len(parts) == 1:
                dist.send(parts[0], 1)
            else:
                for receipt in [dist.isend(part, 1, tag=i + 1) for i, part in enumerate(parts)]:
                    receipt.wait()
            dist.recv(answer, 1)
        return perf_counter_ns() - start


def _parts(tensor: Any, work: Work) -> list[Any]:
    if work.parts == 1:
        return [tensor[: work.size]]
    return [tensor[i : i + work.size] for i in range(0, work.span, work.size * BLOCK_STRIDE)]
