"""Tensors on a GPU as the local side of transfers over shared memory; on machines that have one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import AsyncIterator

import pytest


def _driver() -> bool:
    """True if a GPU's driver is there, of CUDA or ROCm; without, torch sees no GPU, and need not be imported to say so."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return os.path.exists("/dev/kfd")
    return True


if not _driver() or not pytest.importorskip("torch").cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

import torch  # noqa: E402

from hixl_async import RangeError  # noqa: E402
from hixl_async.testing import EnginePair, engine_pair  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
async def pair() -> AsyncIterator[EnginePair]:
    async with engine_pair() as pair:
        yield pair


@pytest.mark.parametrize("size", [1, 4096, 5_000_003])
async def test_both_ways(pair: EnginePair, size: int) -> None:
    region, remote = await pair.region("kv", size)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(source)
    assert await pair.left.write(source, remote) == size
    assert region.torch().equal(source.cpu())
    assert await pair.left.read(back, remote) == size
    assert back.equal(source)


async def test_the_copy_waits_for_the_stream(pair: EnginePair) -> None:
    region, remote = await pair.region("kv", 4 << 20)
    ones = torch.ones(1 << 20, dtype=torch.float32, device="cuda")
    for _ in range(100):
        ones = ones * 1.0
    notes = pair.right.notifications("t")
    transfer = pair.left.write(ones, remote, notify=("t", b""))
    await notes.get()
    assert region.torch(torch.float32).eq(1).all()
    await transfer


async def test_a_part_of_a_tensor(pair: EnginePair) -> None:
    region, remote = await pair.region("kv", 1024)
    tensor = torch.arange(4096, dtype=torch.int16, device="cuda").reshape(64, 64)
    await pair.left.write(tensor[8:16], remote)
    assert region.torch(torch.int16, (8, 64)).equal(tensor[8:16].cpu())
    with pytest.raises(RangeError):
        pair.left.write(tensor[:7], remote)
