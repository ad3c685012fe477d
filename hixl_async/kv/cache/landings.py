"""The layers of one transfer of a cache, as they land, for any number of waiting tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from ...engine.arguments import whole_number
from ...engine.waiters import Waiters
from ...errors import RangeError

__all__ = ["Landings"]

#: Keys of the waiters, beside the numbers of layers.
ANY_LAYER, END = "any layer", "end"


class Landings:
    """The layers that have landed, and the end.

    :param loop: the loop of the engine.
    :param layers: the layers that are to land; None: they are not known before `begin`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, layers: Sequence[int] | None) -> None:
        self.layers = None if layers is None else tuple(layers)
        #: In the order of landing.
        self.landed: dict[int, None] = {}
        self.ended = False
        self.error: BaseException | None = None
        self._waiters = Waiters(loop)

    @property
    def complete(self) -> bool:
        """True once all layers have landed."""
        return self.layers is not None and len(self.landed) == len(self.layers)

    def begin(self, layers: Sequence[int]) -> None:
        """Note which layers are to land."""
        self.layers = tuple(layers)
        self._waiters.wake_all()

    def land(self, layer: int) -> None:
        """Note that a layer has landed."""
        self.landed[layer] = None
        self._waiters.wake(layer, ANY_LAYER)

    def end(self, error: BaseException | None = None) -> None:
        """Note the end, with the error if there is one; no effect if it is known."""
        if not self.ended:
            self.ended, self.error = True, error
            self._waiters.wake_all()

    async def layer(self, layer: int) -> None:
        """Wait until a layer has landed.

        :raises RangeError: if it is not one of those that are to land.
        :raises BaseException: the error, if the transfer has failed without the layer.
        """
        number = whole_number("layer", layer)
        while number not in self.landed:
            if self.layers is not None and number not in self.layers:
                raise RangeError(
                    f"layer {number} is not one of those that land here: {', '.join(map(str, self.layers))}"
                )
            self.raise_error()
            await self._waiters.wait(number)

    async def finished(self) -> None:
        """Wait for the end, and raise its error if there is one."""
        while not self.ended:
            await self._waiters.wait(END)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    async def next(self, seen: int) -> int:
        """Wait for the layer that lands after so many others.

        :raises StopAsyncIteration: if there are no more.
        """
        while seen >= len(self.landed):
            if self.complete:
                raise StopAsyncIteration
            self.raise_error()
            await self._waiters.wait(ANY_LAYER)
        return list(self.landed)[seen]

    def __aiter__(self) -> AsyncIterator[int]:
        return _Iterator(self)


class _Iterator(AsyncIterator[int]):
    """An iterator over the layers in the order of landing; not a generator, because a cancelled ``anext`` would end it."""

    __slots__ = ("_landings", "_seen")

    def __init__(self, landings: Landings) -> None:
        self._landings = landings
        self._seen = 0

    async def __anext__(self) -> int:
        layer = await self._landings.next(self._seen)
        self._seen += 1
        return layer
