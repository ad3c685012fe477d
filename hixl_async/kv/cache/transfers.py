"""The pulls and pushes of a manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...engine.arguments import positive_seconds, whole_number
from ...errors import InvalidArgumentError
from ..plan import BlockTable
from .cache import Cache, store_of
from .context import ManagerContext
from .keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, Identifier, Key, identifier
from .links import Links
from .operation import Operation
from .place import Place, check_tokens
from .pull import PullOperation
from .push import PushOperation
from .remote import Remotes
from .synchronizer import LayersReady, Synchronizer
from .task import CacheTask

if TYPE_CHECKING:
    from ...engine.peer import Peer

__all__ = ["Transfers"]


class Transfers:
    """The part of a `CacheManager` that pulls and pushes.

    The caches of the two sides may differ in block sizes, orders and ranks, as long as their groups are equal.  Where
    ``tokens=`` is not given, a key's tokens are transferred, or all that the blocks hold if that is the same on both sides.

    :param context: the context of the manager.
    :param links: its links.
    """

    def __init__(self, context: ManagerContext, links: Links) -> None:
        self._context = context
        self._links = links
        self._remotes = Remotes(context.name)

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        *,
        tokens: int | tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> CacheTask:
        """Pull what a key names into a row of a contiguous cache.

        :param cache_key: the key of the peer's row or blocks.
        :param cache: the cache to write.
        :param batch_index: the row to write.
        :param tokens: how many tokens, or the range of their positions.
        :param layers: the layers; default: all that both caches hold.
        :param timeout: seconds for all of it; default: no limit beside the engine's ``stall`` for each transfer.
        :return: the transfer: await it, or iterate its layers.
        :raises AccessError: if the manager's role does not pull, or, when awaited, the peer's serves no pulls or grants no
            right.
        :raises TicketError: when awaited, if the peer does not know the key.
        :raises BusyError: if the blocks are in use, here or, when awaited, at the peer.
        :raises LayoutMismatchError: when awaited, if the caches do not fit.
        :raises RangeError: if a row, a token or a layer does not exist, or the sides differ in length and no tokens are named.
        :raises InvalidArgumentError: if an argument is malformed, or the cluster is not linked.
        :raises PeerDownError: if the peer is down.
        :raises ClosedError: if the cache or the manager is closed.
        :raises TransferError: when awaited, if it fails after it has begun.
        """
        return self._pull(cache_key, cache, [batch_index], None, tokens, layers, timeout)

    def pull_blocks(
        self,
        src_cache_key: Key,
        dst_cache: Cache,
        src_blocks: Iterable[int] | BlockTable | None = None,
        dst_blocks: Iterable[int] | BlockTable = (),
        *,
        tokens: int | tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> CacheTask:
        """Pull blocks of a peer's cache into blocks of this side's.

        :param src_cache_key: the key of the peer's cache.
        :param dst_cache: the cache to write.
        :param src_blocks: the peer's blocks, in the order of the tokens; None where the key names them.
        :param dst_blocks: the blocks to write, in the order of the tokens.
        :param tokens: how many tokens, or the range of their positions.
        :param layers: the layers; default: all that both caches hold.
        :param timeout: seconds for all of it; default: no limit beside the engine's ``stall`` for each transfer.
        :return: the transfer: await it, or iterate its layers.
        :raises HixlError: like `pull_cache`.
        """
        return self._pull(src_cache_key, dst_cache, dst_blocks, src_blocks, tokens, layers, timeout)

    def push_cache(
        self,
        dst_cache_key: CacheKey | CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        *,
        tokens: int | tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
        ready: LayersReady = None,
        req_id: Identifier | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> CacheTask:
        """Push a row of a contiguous cache to what a key names.

        :param dst_cache_key: the key of the peer's row or blocks.
        :param src_cache: the cache to read.
        :param src_batch_index: the row to read.
        :param tokens: how many tokens, or the range of their positions.
        :param layers: the layers, in the order in which they become ready; default: all that both caches hold.
        :param ready: when each layer may be read: a mapping of layers to device events, events or functions; or a function of a
            layer, which returns True when it may be read, or an awaitable that ends then.
        :param req_id: the request that the peer expects by ``cache.expect(req_id)``.
        :param last: False if more tokens of these layers follow by another push of the request.
        :param timeout: seconds for all of it; default: no limit beside the engine's ``stall`` for each transfer.
        :return: the transfer: await it, or iterate its layers.
        :raises AccessError: if the manager's role does not push, or, when awaited, the peer's accepts no pushes or grants no
            right.
        :raises TicketError: when awaited, if the peer does not know the key, or does not expect the request.
        :raises BusyError: if the blocks are in use, here or, when awaited, at the peer.
        :raises LayoutMismatchError: when awaited, if the caches do not fit.
        :raises RangeError: if a row, a token or a layer does not exist, or the sides differ in length and no tokens are named.
        :raises InvalidArgumentError: if an argument is malformed, or the cluster is not linked.
        :raises PeerDownError: if the peer is down.
        :raises ClosedError: if the cache or the manager is closed.
        :raises TransferError: when awaited, if it fails after it has begun.
        """
        return self._push(
            dst_cache_key, src_cache, [src_batch_index], None, tokens, layers, ready, req_id, last, timeout
        )

    def push_blocks(
        self,
        dst_cache_key: Key,
        src_cache: Cache,
        src_blocks: Iterable[int] | BlockTable = (),
        dst_blocks: Iterable[int] | BlockTable | None = None,
        *,
        tokens: int | tuple[int, int] | None = None,
        layers: Sequence[int] | None = None,
        ready: LayersReady = None,
        req_id: Identifier | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> CacheTask:
        """Push blocks of this side's cache into blocks of a peer's.

        :param dst_cache_key: the key of the peer's cache.
        :param src_cache: the cache to read.
        :param src_blocks: the blocks to read, in the order of the tokens.
        :param dst_blocks: the peer's blocks, in the order of the tokens; None where the key names them.
        :param tokens: how many tokens, or the range of their positions.
        :param layers: the layers, in the order in which they become ready; default: all that both caches hold.
        :param ready: when each layer may be read, as for `push_cache`.
        :param req_id: the request that the peer expects by ``cache.expect(req_id)``.
        :param last: False if more tokens of these layers follow by another push of the request.
        :param timeout: seconds for all of it; default: no limit beside the engine's ``stall`` for each transfer.
        :return: the transfer: await it, or iterate its layers.
        :raises HixlError: like `push_cache`.
        """
        return self._push(
            dst_cache_key, src_cache, src_blocks, dst_blocks, tokens, layers, ready, req_id, last, timeout
        )

    def _pull(
        self,
        key: Key,
        cache: Cache,
        here: Iterable[int] | BlockTable,
        there: Iterable[int] | BlockTable | None,
        tokens: int | tuple[int, int] | None,
        layers: Sequence[int] | None,
        timeout: float | None,
    ) -> CacheTask:
        ours, theirs = self._places(here, there, tokens)
        seconds = None if timeout is None else positive_seconds("timeout", timeout)
        operation = PullOperation(
            self._context,
            self._remotes,
            self._peer(key),
            store_of("cache", cache),
            ours,
            _layers(layers),
            key=key,
            there=theirs,
        )
        return _begin(operation, seconds)

    def _push(
        self,
        key: Key,
        cache: Cache,
        here: Iterable[int] | BlockTable,
        there: Iterable[int] | BlockTable | None,
        tokens: int | tuple[int, int] | None,
        layers: Sequence[int] | None,
        ready: LayersReady,
        req_id: Identifier | None,
        last: bool,
        timeout: float | None,
    ) -> CacheTask:
        ours, theirs = self._places(here, there, tokens)
        seconds = None if timeout is None else positive_seconds("timeout", timeout)
        operation = PushOperation(
            self._context,
            self._remotes,
            self._peer(key),
            store_of("cache", cache),
            ours,
            _layers(layers),
            key=key,
            there=theirs,
            req_id=None if req_id is None else identifier("req_id", req_id),
            last=bool(last),
            synchronizer=Synchronizer(self._context.poller, ready),
        )
        return _begin(operation, seconds)

    def _places(
        self,
        here: Iterable[int] | BlockTable,
        there: Iterable[int] | BlockTable | None,
        tokens: int | tuple[int, int] | None,
    ) -> tuple[Place, Place | None]:
        self._context.check_usable()
        kept = check_tokens(tokens)
        return Place.of("blocks", here, kept), None if there is None else Place.of("blocks", there, kept)

    def _peer(self, key: Key) -> Peer:
        if not isinstance(key, CacheKey | BlocksCacheKey | CacheKeyByIdAndIndex):
            raise InvalidArgumentError(
                f"the key must be a CacheKey, BlocksCacheKey or CacheKeyByIdAndIndex, not {key!r}"
            )
        return self._links.peer(key.cluster_id)


def _layers(layers: Sequence[int] | None) -> tuple[int, ...] | None:
    if layers is None:
        return None
    found = tuple(whole_number("layers", layer) for layer in layers)
    if not found or len(set(found)) < len(found):
        raise InvalidArgumentError(f"layers must be different numbers of layers, at least one, not {layers!r}")
    return found


def _begin(operation: Operation, timeout: float | None) -> CacheTask:
    operation.start(timeout)
    return CacheTask(operation)
