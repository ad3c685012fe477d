"""The waits for layers that are being computed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from ...core.event_poller import EventPoller
from ...errors import InvalidArgumentError
from ...types import Ready
from ..ready import predicate

__all__ = ["LayersReady", "Synchronizer"]

#: The type of ``ready=``: a mark for each layer; or a function of a layer, which tells if it is ready, or returns an awaitable
#: that ends when it is; or None: all are ready.
LayersReady: TypeAlias = Mapping[int, Ready] | Callable[[int], bool | Awaitable[Any]] | None


class Synchronizer:
    """Tells when each layer may be read.

    :param poller: asks marks that cannot wake the loop.
    :param ready: what the program gave as ``ready=``.
    :raises InvalidArgumentError: if that is malformed.
    """

    def __init__(self, poller: EventPoller, ready: LayersReady) -> None:
        self._poller = poller
        self._function: Callable[[int], Any] | None = None
        self._marks: dict[int, Callable[[], Any] | None] | None = None
        if isinstance(ready, Mapping):
            self._marks = {layer: predicate(mark) for layer, mark in ready.items()}
        elif ready is None or callable(ready):
            self._function = ready
        else:
            raise InvalidArgumentError(
                f"ready must be None, a mapping of layers to marks, or a function of a layer, not {type(ready).__name__}"
            )

    def wait(self, layer: int) -> asyncio.Future[None] | None:
        """Return a future that is done when a layer may be read; None if it may be read now.

        :raises InvalidArgumentError: if the layer has no mark.
        """
        question = self._question(layer)
        if question is None:
            return None
        answer = question()
        if inspect.isawaitable(answer):
            return asyncio.ensure_future(answer)
        if answer:
            return None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        look = partial(_look, future, question)
        self._poller.watch(look)
        future.add_done_callback(lambda _: self._poller.forget(look))
        return future

    def _question(self, layer: int) -> Callable[[], Any] | None:
        if self._marks is None:
            return None if self._function is None else partial(self._function, layer)
        if layer not in self._marks:
            raise InvalidArgumentError(f"ready has no mark of layer {layer}; None says that it may be read now")
        return self._marks[layer]


def _look(future: asyncio.Future[None], question: Callable[[], Any]) -> bool:
    """Ask once, and return True if there is nothing more to ask."""
    try:
        if not future.done() and question():
            future.set_result(None)
    except Exception as error:
        future.set_exception(error)
    return future.done()
