"""The copies of a manager between caches of its process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from ...engine.arguments import whole_number
from ...errors import InvalidArgumentError, RangeError
from . import local
from .cache import Cache, store_of
from .context import ManagerContext
from .holds import Use
from .place import check_tokens
from .store import CacheStore

__all__ = ["Copies"]

#: Copies of more bytes are made by a thread.
INLINE_BYTES = 1 << 20


class Copies:
    """The part of a `CacheManager` that copies within its process.

    Copies of more than 1 MiB are made by a thread, so that the loop goes on.
    """

    def __init__(self, context: ManagerContext) -> None:
        self._context = context

    async def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        *,
        tokens: int | tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Copy a row to another row, of the same or another contiguous cache of this manager.

        :param dst: the cache to write.
        :param src: the cache to read.
        :param dst_batch_index: the row to write.
        :param src_batch_index: the row to read.
        :param tokens: how many tokens, or the range of their positions; default: all, where both rows are equally long.
        :param layers: the layers to copy; default: all.
        :raises RangeError: if a row, a token or a layer does not exist, or the rows differ in length and `tokens` is not given.
        :raises LayoutMismatchError: if the caches hold other layers, heads or parts.
        :raises InvalidArgumentError: if both rows are the same, or an argument is malformed.
        :raises BusyError: if a row is in use by a transfer.
        :raises ClosedError: if a cache or the manager is closed.
        """
        kept, source, target = check_tokens(tokens), store_of("src", src), store_of("dst", dst)
        longest = {store.view.block_tokens for store in (source, target)}
        if kept is None and len(longest) > 1:
            raise RangeError(f"the rows hold {max(longest)} and {min(longest)} tokens; name those to copy with tokens=")
        kept = kept or (0, min(longest))
        if kept[1] > min(longest):
            raise RangeError(f"the rows hold {min(longest)} tokens, not {kept[1]}")
        await self._copy(source, target, [(src_batch_index, dst_batch_index)], layers, kept)

    async def copy_blocks(self, cache: Cache, copy_block_info: Mapping[int, Iterable[int]]) -> None:
        """Copy blocks within a paged cache, each to any number of others.

        :param cache: the cache.
        :param copy_block_info: the blocks to write for each block to read.
        :raises RangeError: if a block does not exist.
        :raises InvalidArgumentError: if a block is written twice, or both read and written.
        :raises BusyError: if a block is in use by a transfer.
        :raises ClosedError: if the cache or the manager is closed.
        """
        pairs = [(block, copied) for block, targets in copy_block_info.items() for copied in targets]
        store = store_of("cache", cache)
        await self._copy(store, store, pairs, None, (0, store.view.block_tokens))

    async def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: Mapping[int, int]) -> None:
        """Copy blocks from one paged cache to another, usually between the host and a device.

        :param src_cache: the cache to read.
        :param dst_cache: the cache to write; it may lie otherwise in memory.
        :param src_to_dst: the block to write for each block to read.
        :raises RangeError: if a block does not exist, or the caches' blocks differ in size.
        :raises LayoutMismatchError: if the caches hold other layers, heads or parts.
        :raises InvalidArgumentError: if a block is written twice, or both read and written.
        :raises BusyError: if a block is in use by a transfer.
        :raises ClosedError: if a cache or the manager is closed.
        """
        source, target = store_of("src_cache", src_cache), store_of("dst_cache", dst_cache)
        ours, theirs = source.view.block_tokens, target.view.block_tokens
        if ours != theirs:
            raise RangeError(f"the blocks of the source hold {ours} tokens, those of the target {theirs}")
        await self._copy(source, target, list(src_to_dst.items()), None, (0, ours))

    async def _copy(
        self,
        src: CacheStore,
        dst: CacheStore,
        pairs: Sequence[tuple[int, int]],
        layers: Sequence[int] | None,
        tokens: tuple[int, int],
    ) -> None:
        self._context.check_usable()
        for cache in (src, dst):
            cache.check_open()
        local.check_alike(src, dst)
        read = [_block(src, block) for block, _ in pairs]
        written = [_block(dst, block) for _, block in pairs]
        if len(set(written)) < len(written) or (src is dst and not set(read).isdisjoint(written)):
            raise InvalidArgumentError("a block cannot be written twice, nor both read and written, in one call")
        wanted = src.view.shard.layers if layers is None else tuple(layers)
        if strange := set(wanted) - set(src.places):
            raise RangeError(f"the caches do not hold layer {min(strange)}")
        if not pairs:
            return
        reading = src.holds.take(Use.READ, read, "a copy")
        try:
            writing = dst.holds.take(Use.WRITE, written, "a copy")
        except BaseException:
            src.holds.give(reading)
            raise

        def work() -> None:
            local.copy(src, dst, pairs, wanted, tokens)

        def end(_: object = None) -> None:
            src.holds.give(reading)
            dst.holds.give(writing)

        if local.copied_bytes(src.view, wanted, (tokens[1] - tokens[0]) * len(pairs)) <= INLINE_BYTES:
            try:
                work()
            finally:
                end()
        else:
            # What a thread does cannot be cancelled: the blocks are in use until it ends.
            copying = self._context.spawn(asyncio.to_thread(work))
            copying.add_done_callback(end)
            await asyncio.shield(copying)


def _block(cache: CacheStore, block: object) -> int:
    number = whole_number("blocks", block)
    if not 0 <= number < cache.view.blocks:
        raise RangeError(f"block {number} does not exist: the cache has {cache.view.blocks}")
    return number
