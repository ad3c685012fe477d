"""The state that a pool's parts share: its engine, its memory, and its tasks."""

from __future__ import annotations

import asyncio
import threading
from asyncio import _get_running_loop as running_loop
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..core.event_poller import EventPoller
from ..core.memory import LocalSlice
from ..core.thread_calls import ThreadCalls
from ..engine.arguments import positive_number
from ..errors import ClosedError, EngineForkedError, InvalidArgumentError, RangeError, WrongLoopError
from .description import describe_groups
from .placed import Placed
from .shapes import Shard, View
from .target import groups_of_layers

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.region import Region

__all__ = ["PoolContext"]


class PoolContext:
    """The part of a pool that its streams and reservations refer to, instead of the `Pool` itself.

    The engine, which serves the streams' messages, therefore does not keep a `Pool` alive that the program has lost.
    """

    def __init__(self, engine: Engine, name: str, views: Sequence[View], tensors: Sequence[Region]) -> None:
        self.engine = engine
        self.loop: asyncio.AbstractEventLoop = engine.loop
        #: The thread of the loop.
        self.thread = threading.get_ident()
        self.name = name
        #: What the pool holds, a view for each group.
        self.views = tuple(views)
        #: The same with the regions of their tensors.
        self.placed = tuple(Placed[LocalSlice](view, tensors) for view in views)
        #: The size of the pool in blocks.
        self.blocks = views[0].blocks
        #: The index of the group of each layer that the pool holds.
        self.groups = groups_of_layers(views)
        #: What the pool holds of the model, as a sender of several.
        self.shard = Shard(views[0].shard.rank, views[0].shard.ranks, self.groups)
        #: The description of the groups, for consumers.
        self.described_groups = describe_groups(view.group for view in views)
        self.poller = EventPoller(self.loop)
        #: The calls of pushing and publishing threads.
        self.thread_calls = ThreadCalls(self.loop)
        #: The lock of the holds on reserved blocks, which pushing threads share with the loop.
        self.lock = threading.Lock()
        #: True once the pool refuses new work.
        self.closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def group_of(self, layer: int) -> int:
        """Return the index of a layer's group.

        :raises RangeError: if the pool does not hold the layer.
        """
        if layer not in self.groups:
            raise RangeError(f"layer {layer} does not exist: pool {self.name!r} holds {self.described_layers}")
        return self.groups[layer]

    @property
    def described_layers(self) -> str:
        """The layers that the pool holds, in words."""
        layers = list(self.groups)
        if layers == list(range(layers[0], layers[-1] + 1)):
            return f"the layers {layers[0]} to {layers[-1]}"
        return f"the layers {', '.join(map(str, layers))}"

    def blocks_for(self, group: int, tokens: int | None, blocks: int | None) -> int:
        """Return the number of blocks that a program asks for.

        :raises InvalidArgumentError: if not exactly one of `tokens` and `blocks` is given, or it is not a positive integer.
        :raises RangeError: if the pool is smaller than that.
        """
        if (tokens is None) == (blocks is None):
            raise InvalidArgumentError("pass either tokens=... or blocks=...")
        count = positive_number("blocks", blocks) if tokens is None else self.views[group].blocks_for(tokens)
        if count > self.blocks:
            asked = f"{count} blocks" if tokens is None else f"{count} blocks for {tokens} tokens"
            raise RangeError(f"pool {self.name!r} can never lend {asked}: it has {self.blocks}")
        return count

    def check_usable(self) -> None:
        """Return if the caller may use the pool.

        :raises EngineForkedError: if the pool was made before fork().
        :raises WrongLoopError: if another event loop runs here, or none.
        :raises ClosedError: if the pool is closed.
        """
        self.check_thread()
        if running_loop() is not self.loop:
            raise self._wrong_loop()
        if self.closed:
            raise ClosedError(f"pool {self.name!r} is closed")

    def check_thread(self) -> None:
        """Return if the caller is on the thread of the engine's event loop, which need not run.

        :raises EngineForkedError: if the pool was made before fork().
        :raises WrongLoopError: on another thread.
        """
        if self.engine.forked:
            raise EngineForkedError(
                f"pool {self.name!r} was made before fork(); open one in each process, with an engine of its own"
            )
        if threading.get_ident() != self.thread:
            raise self._wrong_loop()

    def _wrong_loop(self) -> WrongLoopError:
        return WrongLoopError(f"pool {self.name!r} belongs to its engine's event loop; only push() is legal elsewhere")

    def __str__(self) -> str:
        return f"{self.name!r} of engine {self.engine.name!r}"

    @property
    def tasks(self) -> int:
        """The number of tasks that work for the pool."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that works for the pool until it is closed."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel_tasks(self) -> None:
        """Cancel all tasks of the pool, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def clean_up(self, work: Callable[..., object], *args: object) -> bool:
        """Have the loop close a resource that the program has lost; for finalizers.

        A finalizer runs in any thread and in the middle of any call, and so cannot close the resource itself.

        :return: False if there is nothing to do, because the pool is closed, or belongs to another process.
        """
        if self.closed or self.engine.forked:
            return False
        with suppress(RuntimeError):  # the loop is closed, and nothing of the engine works any more
            self.loop.call_soon_threadsafe(work, *args)
        return True
