"""Transfers whose local side is a GPU's memory, where torch sees a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from importlib.util import find_spec
from time import perf_counter_ns
from typing import Any, Literal

from rig.blocks import Level, interleave
from rig.figure import Figure, compare
from rig.pair import Pair
from rig.plan import Plan, Skipped

__all__ = ["measure_device"]

SIZES = (4 << 10, 1 << 20, 16 << 20)


async def measure_device(pair: Pair, loop: str, plan: Plan) -> AsyncIterator[Figure]:
    """Measure tensors of a GPU to and from the peer's region, beside torch's own copy over the same mapped pages.

    :raises Skipped: without torch, or without a GPU that it sees.
    """
    if find_spec("torch") is None:
        raise Skipped("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")
    pages = (ctypes.c_uint8 * len(pair.remote)).from_address(pair.mapped)
    mapped = torch.frombuffer(pages, dtype=torch.uint8)
    for verb in ("write", "read"):
        for size in SIZES:
            tensor = torch.ones(size, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            levels = [_torch_copy(torch, tensor, mapped[:size], verb), _transfer(pair, tensor, size, verb)]
            series = await interleave(levels, plan.pace)
            for figure in compare(series, part="device", loop=loop, case="GPU", verb=verb, nbytes=size):
                yield figure


def _torch_copy(torch: Any, tensor: Any, mapped: Any, verb: Literal["write", "read"]) -> Level:
    """The floor: torch copies, and the host waits until it has."""
    to, source = (mapped, tensor) if verb == "write" else (tensor, mapped)

    async def copy(times: int) -> int:
        start = perf_counter_ns()
        for _ in range(times):
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        return perf_counter_ns() - start

    return Level("torch copy", copy)


def _transfer(pair: Pair, tensor: Any, size: int, verb: Literal["write", "read"]) -> Level:
    transfer = pair.engine.write if verb == "write" else pair.engine.read

    async def run(times: int) -> int:
        start = perf_counter_ns()
        for _ in range(times):
            await transfer(tensor, pair.remote[:size])
        return perf_counter_ns() - start

    return Level(verb, run)
