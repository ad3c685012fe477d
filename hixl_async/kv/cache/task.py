"""A pull or a push that is under way, as the program sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Generator
from typing import Any

from ...core.sealed import Sealed
from ...core.unpicklable import unpicklable
from ...engine.started import Started
from ..protocol import check_reason
from .operation import Operation

__all__ = ["CacheTask"]


class CacheTask(Sealed, maker="manager.pull_cache() and the like"):
    """A pull or a push, made by the manager's ``pull_cache()``, ``pull_blocks()``, ``push_cache()`` and ``push_blocks()``.

    It begins with the call.  Await it for the bytes that it moved; iterate it for the layers as they land, at the peer in a
    push.  Cancelling the task that awaits it cancels it.
    """

    __reduce__ = unpicklable("await it here")

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def __repr__(self) -> str:
        landings, task = self._operation.landings, self._operation.task
        verb = "pull from" if self._operation.verb == "read" else "push to"
        state = "under way" if not task.done() else "finished" if landings.error is None else "failed"
        total = "?" if landings.layers is None else len(landings.layers)
        return (
            f"<CacheTask {verb} peer {self._operation.peer.name!r}: {len(landings.landed)} of {total} layers, {state}>"
        )

    def __await__(self) -> Generator[Any, None, int]:
        return self._operation.task.__await__()

    @property
    def landed(self) -> tuple[int, ...]:
        """The layers that have landed, in the order of landing."""
        return tuple(self._operation.landings.landed)

    def done(self) -> bool:
        """Return True once the transfer has finished, failed or been cancelled."""
        return self._operation.task.done()

    async def layer(self, layer: int) -> None:
        """Wait until the layer has landed; return at once if it has.

        :param layer: the number of the layer.
        :raises RangeError: if the layer is not transferred.
        :raises InvalidArgumentError: if `layer` is not a whole number.
        :raises HixlError: the error of the transfer, if it has failed without the layer.
        """
        try:
            await self._operation.landings.layer(layer)
        finally:
            self._notice()

    def __aiter__(self) -> AsyncIterator[int]:
        """Return an iterator over the layers in the order of landing, which raises like `layer`."""
        return _Layers(self)

    def abort(self, reason: str = "the program gave the transfer up") -> Coroutine[Any, Any, None]:
        """Give the transfer up at the call; no effect if it has ended.

        :param reason: the text for the errors of both sides.
        :return: an awaitable that waits like `drained`.
        :raises InvalidArgumentError: if `reason` is not a string.
        """
        check_reason(reason)
        self._operation.stop(reason)
        return Started(self.drained)

    async def drained(self) -> None:
        """Wait until the transfer touches no memory, whatever its outcome, so that both sides have their blocks back."""
        await asyncio.shield(self._operation.released)

    def _notice(self) -> None:
        """Let the loop not report an error that the program has seen."""
        task = self._operation.task
        if task.done() and not task.cancelled():
            task.exception()


class _Layers(AsyncIterator[int]):
    """An iterator over the layers of a transfer."""

    __slots__ = ("_landings", "_task")

    def __init__(self, task: CacheTask) -> None:
        self._task = task
        self._landings = aiter(task._operation.landings)

    async def __anext__(self) -> int:
        try:
            return await anext(self._landings)
        finally:
            self._task._notice()
