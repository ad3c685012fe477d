"""What producers hand over with the end of a stream, such as the first token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from passes import settle

from hixl_async.errors import ClosedError, InvalidArgumentError, PeerLostError, StreamAbortedError, TransferTimeoutError
from hixl_async.kv import Pool, View
from hixl_async.kv.protocol import PAYLOAD_BYTES
from hixl_async.testing import engine_pair

from .conftest import LAYERS, VIEW, Pair, push_all


@pytest.mark.parametrize("payload", [b"", b"token", bytearray(b"logits"), memoryview(b"view"), bytes(range(256))])
async def test_a_payload_arrives(pair: Pair, payload: Any) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        early = [asyncio.create_task(stream.finished()) for _ in range(2)]
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            push_all(out, source)
            await out.finish(payload)
        for finished in (*early, stream.finished()):
            found = await finished
            assert type(found) is bytes
            assert found == bytes(payload)
    assert len(pair.to_d.sent) == 2, "it is part of the end"


async def test_a_payload_is_limited(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            push_all(out, source)
            for wrong in ("token", None, 7, [1], bytes(PAYLOAD_BYTES + 1)):
                with pytest.raises(InvalidArgumentError, match=f"payload must be at most {PAYLOAD_BYTES} bytes"):
                    await out.finish(wrong)  # type: ignore[arg-type]
            await out.finish(bytes(PAYLOAD_BYTES))
        assert await stream.finished() == bytes(PAYLOAD_BYTES)


async def test_the_largest_payload_fits_into_a_frame() -> None:
    async with (
        engine_pair() as pair,
        Pool(pair.right, VIEW) as target,
        Pool(pair.left, VIEW, access="none") as source,
        target.reserve(blocks=2) as blocks,
        source.reserve(blocks=2) as mine,
    ):
        stream = blocks.stream()
        async with source.open_stream(pair.peer, stream.ticket()) as out:
            push_all(out, mine)
            await out.finish(b"\xff" * PAYLOAD_BYTES)
        assert await stream.finished() == b"\xff" * PAYLOAD_BYTES


async def test_a_stream_is_finished_once(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            finishing = asyncio.create_task(out.finish(b"first"))
            await settle()
            with pytest.raises(ClosedError, match="the stream was finished before"):
                await out.finish(b"second")
            assert not finishing.done(), "it waits for the layers"
            push_all(out, source, [3, 2, 1])
            await settle()
            assert stream.outcome is None
            push_all(out, source, [0])
            with pytest.raises(ClosedError, match="the stream was finished; no more can be pushed"):
                out.push(0, source)
            await finishing
        with pytest.raises(ClosedError):
            await out.finish()
        assert await stream.finished() == b"first"


async def test_cancelling_a_finish_cancels_only_the_wait(pair: Pair) -> None:
    async with pair.target.reserve(blocks=2) as blocks, pair.source.reserve(blocks=2) as source:
        stream = blocks.stream()
        async with pair.source.open_stream(pair.to_d, stream.ticket()) as out:
            finishing = asyncio.create_task(out.finish(b"token"))
            await settle()
            finishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await finishing
            push_all(out, source)
        assert await stream.finished() == b"token"


@pytest.mark.parametrize("way", ["producer", "consumer", "lost", "lease", "blocks"])
async def test_the_wait_for_a_payload_ends_with_the_stream(pair: Pair, way: str) -> None:
    """All layers are there, but the token is not."""
    error: type[Exception] = StreamAbortedError
    blocks, source = await pair.target.reserve(blocks=2), await pair.source.reserve(blocks=2)
    stream = blocks.stream(lease=0.05 if way == "lease" else None)
    waiting = asyncio.create_task(stream.finished())
    out = await pair.source.open_stream(pair.to_d, stream.ticket())
    push_all(out, source)
    await stream.layer(LAYERS - 1)
    assert not waiting.done()
    if way == "producer":
        await out.abort("no token")
    elif way == "consumer":
        await stream.abort("no token")
    elif way == "lost":
        pair.to_p.lose(dead=True)
        error = PeerLostError
    elif way == "lease":
        error = TransferTimeoutError
    else:
        await blocks.aclose()
    if way == "blocks":
        assert await waiting == b"", "who gives the blocks back with all layers has no use for it"
        await out.finish(b"token")
        assert await stream.finished() == b""
    else:
        with pytest.raises(error, match="silent" if way == "lease" else "no token|lost"):
            await waiting
    if way == "lost":
        pair.to_d.lose(dead=False)
    await stream.drained()
    await asyncio.gather(blocks.aclose(), source.aclose(), out.aclose())


async def test_of_several_payloads_the_first_sender_s_counts(pair: Pair) -> None:
    views = [View.ordered(VIEW.group, blocks=16, block_tokens=4, rank=rank, ranks=2) for rank in (0, 1)]
    async with (
        pair.target.reserve(blocks=2) as blocks,
        Pool(pair.p, views[0], name="left", access="none") as left,
        Pool(pair.p, views[1], name="right", access="none") as right,
        left.reserve(blocks=2) as mine,
        right.reserve(blocks=2) as theirs,
    ):
        for payloads, expected in (((b"a", b"b"), b"a"), ((b"", b"b"), b"b"), ((b"", b""), b"")):
            stream = blocks.stream(sources=[view.shard for view in views])
            outs = [pool.open_stream(pair.to_d, stream.ticket()) for pool in (left, right)]
            push_all(outs[0], mine)
            push_all(outs[1], theirs)
            ending = [asyncio.create_task(out.finish(one)) for out, one in zip(outs, payloads, strict=True)][::-1]
            await asyncio.gather(*ending)
            assert await stream.finished() == expected
