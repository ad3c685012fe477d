"""Registrations that are kept for buffers that come back."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import AsyncIterator

import pytest

from hixl_async import Engine, RegistrationCache
from hixl_async.errors import BufferTypeError, ClosedError, InvalidArgumentError, RangeError
from hixl_async.testing import EnginePair

PAGE = 4096


@pytest.fixture
async def cache(pair: EnginePair) -> AsyncIterator[RegistrationCache]:
    async with pair.left.registration_cache(nbytes=8 * PAGE, count=4) as cache:
        yield cache
    assert len(cache) == cache.nbytes == 0


async def test_a_buffer_is_registered_once(pair: EnginePair, cache: RegistrationCache) -> None:
    there = await pair.peer.region(pair.right.allocate("there", PAGE, access="write").name)
    buffer = bytearray(b"x" * PAGE)
    before = pair.left.stats().regions
    for _ in range(3):
        assert await pair.left.write(cache.local(buffer), there) == PAGE
        assert await pair.left.write(cache.local(memoryview(buffer)[8:16]), there[8:16]) == 8
    assert pair.left.stats().regions == before + 1
    assert (len(cache), cache.nbytes) == (1, PAGE)
    assert bytes(memoryview(pair.right.regions["there"])) == buffer


async def test_a_part_of_registered_memory_is_a_range(pair: EnginePair, cache: RegistrationCache) -> None:
    """Some drivers refuse registrations that overlap."""
    there = await pair.peer.region(pair.right.allocate("there", 64, access="write").name)
    numbers = array("Q", range(100))
    cache.local(numbers)
    await pair.left.write(cache.local(memoryview(numbers)[92:]), there)
    assert bytes(memoryview(pair.right.regions["there"])) == numbers[92:].tobytes()
    assert len(cache) == 1


async def test_memory_that_reaches_beyond_is_registered_by_itself(cache: RegistrationCache) -> None:
    with mmap.mmap(-1, 2 * PAGE) as memory:
        view = memoryview(memory)
        cache.local(view[:PAGE])
        cache.local(view[8 : PAGE + 8])
        assert (len(cache), cache.nbytes) == (2, 2 * PAGE)
        await cache.aclose()
        view.release()


async def test_what_was_not_used_for_longest_goes_first(pair: EnginePair, cache: RegistrationCache) -> None:
    buffers = [bytearray(PAGE) for _ in range(6)]
    for buffer in buffers[:4]:
        cache.local(buffer)
    cache.local(buffers[0])  # so that the second is the one that was not used for longest
    names = set(pair.left.regions)
    cache.local(buffers[4])
    assert len(cache) == 4
    cache.local(buffers[0])
    assert len(set(pair.left.regions) - names) == 1, "the first was kept"
    cache.local(buffers[1])
    assert len(set(pair.left.regions) - names) == 2, "the second was not"


async def test_the_bytes_are_limited(cache: RegistrationCache) -> None:
    cache.local(bytearray(5 * PAGE))
    cache.local(bytearray(3 * PAGE))
    assert (len(cache), cache.nbytes) == (2, 8 * PAGE)
    cache.local(bytearray(1))
    assert (len(cache), cache.nbytes) == (2, 3 * PAGE + 1)
    with pytest.raises(
        RangeError, match=f"the buffer has {8 * PAGE + 1} bytes, and the cache keeps {8 * PAGE} at most"
    ):
        cache.local(bytearray(8 * PAGE + 1))
    assert len(cache) == 2, "nothing was given up for it"


async def test_a_transfer_keeps_its_memory_beyond_the_cache(pair: EnginePair, cache: RegistrationCache) -> None:
    there = await pair.peer.region(pair.right.allocate("there", PAGE, access="write").name)
    buffer = bytearray(b"y" * PAGE)
    transfer = pair.left.write(cache.local(buffer), there)
    cache.discard(buffer)
    assert len(cache) == 0
    assert await transfer == PAGE
    assert bytes(memoryview(pair.right.regions["there"])) == buffer
    await transfer.drained()
    buffer += b"z"  # it is not exported any more


async def test_discarding(cache: RegistrationCache) -> None:
    one, other = bytearray(PAGE), bytearray(PAGE)
    cache.local(one)
    cache.local(other)
    cache.discard(memoryview(one)[100:101])
    assert cache.nbytes == PAGE
    cache.discard(one)
    assert cache.nbytes == PAGE
    one += b"it can be resized again"


async def test_a_view_that_may_be_written_replaces_one_that_may_not(pair: EnginePair, cache: RegistrationCache) -> None:
    pair.right.allocate("there", 8, access="read")
    there = await pair.peer.region("there")
    memoryview(pair.right.regions["there"])[:] = b"12345678"
    buffer = bytearray(8)
    cache.local(memoryview(buffer).toreadonly())
    await pair.left.read(cache.local(buffer), there)
    assert buffer == b"12345678"
    cache.local(memoryview(buffer).toreadonly())
    assert len(cache) == 1


async def test_a_region_that_the_program_closed_is_made_again(pair: EnginePair, cache: RegistrationCache) -> None:
    buffer = bytearray(8)
    names = set(pair.left.regions)
    cache.local(buffer)
    (name,) = set(pair.left.regions) - names
    await pair.left.regions[name].aclose()
    cache.local(memoryview(buffer)[2:4])
    assert (len(cache), cache.nbytes) == (1, 2)


async def test_wrong_buffers(pair: EnginePair, cache: RegistrationCache) -> None:
    region = pair.left.allocate("mine", 8)
    for wrong in (region, region[2:4]):
        with pytest.raises(InvalidArgumentError, match="is, or lies in, a region already; use it as it is"):
            cache.local(wrong)
    for buffer in (b"", bytearray()):
        with pytest.raises(RangeError, match="the buffer is empty"):
            cache.local(buffer)
    for nothing in (None, 7, "text", object()):
        for call in (cache.local, cache.discard):
            with pytest.raises(BufferTypeError):
                call(nothing)
    with pytest.raises(BufferTypeError, match="no contiguous memory"):
        cache.local(memoryview(bytearray(8))[::2])
    assert len(cache) == 0


@pytest.mark.parametrize("limits", [{"nbytes": 0}, {"nbytes": True}, {"count": -1}, {"count": 1.5}])
async def test_wrong_limits(engine: Engine, limits: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(limits))):
        engine.registration_cache(**limits)


async def test_closed(engine: Engine) -> None:
    cache = engine.registration_cache()
    cache.local(bytearray(8))
    assert "1 regions, 8 bytes" in repr(cache)
    closing = cache.aclose()
    assert len(engine.regions) == 0, "closing begins with the call"
    await closing
    await cache.aclose()
    with pytest.raises(ClosedError, match="the registration cache is closed"):
        cache.local(bytearray(8))
    cache = engine.registration_cache()
    await engine.aclose()
    with pytest.raises(ClosedError):
        cache.local(bytearray(8))
