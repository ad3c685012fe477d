"""Structured transfers: `engine.group()` corresponds to asyncio.TaskGroup, with transfers in place of tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..core.in_flight import settled
from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..errors import ClosedError

if TYPE_CHECKING:
    from .._core import Core
    from ..core.batch import Batch
    from ..core.transfer import Transfer

__all__ = ["Group"]


class Group(Sealed, maker="engine.group()"):
    """A group of transfers that end together.

    Leaving ``async with engine.group() as group:`` waits until all of them are drained.  The first failure cancels the
    rest; all failures are raised together in an ExceptionGroup, as with asyncio.TaskGroup.
    """

    __reduce__ = unpicklable("make one there, with an engine of its own")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._transfers: list[Transfer] = []
        self._entered = False
        self._failed = False
        self._closed = False
        self._task: asyncio.Task[Any] | None = None
        self._interrupting = False

    def read(self, local: Any, remote: Any, **options: Any) -> Transfer:
        """Start a read that belongs to this group.

        :param local: a range of a local region, or any contiguous buffer.
        :param remote: a range of a remote region, of the same length.
        :param options: ``notify``, ``signal``, ``timeout`` (seconds) and ``priority``, as for ``engine.read``.
        :return: the transfer, already started.
        :raises ClosedError: if the group is not entered yet or has ended, or one of its transfers has failed.
        :raises RefusedError: what ``engine.read`` raises.
        """
        return self._add(self._core.read(local, remote, **self._open(options)))

    def write(self, local: Any, remote: Any, **options: Any) -> Transfer:
        """Start a write that belongs to this group.

        :param local: a range of a local region, or any contiguous buffer.
        :param remote: a range of a remote region, of the same length.
        :param options: ``notify``, ``signal``, ``timeout`` (seconds) and ``priority``, as for ``engine.write``.
        :return: the transfer, already started.
        :raises ClosedError: if the group is not entered yet or has ended, or one of its transfers has failed.
        :raises RefusedError: what ``engine.write`` raises.
        """
        return self._add(self._core.write(local, remote, **self._open(options)))

    def submit(self, batch: Batch, **options: Any) -> Transfer:
        """Start a prepared batch that belongs to this group.

        :param batch: the copies.
        :param options: ``notify``, ``signal``, ``timeout`` (seconds) and ``priority``, as for ``engine.submit``.
        :return: the transfer, already started.
        :raises ClosedError: if the group is not entered yet or has ended, or one of its transfers has failed.
        :raises RefusedError: what ``engine.submit`` raises.
        """
        return self._add(self._core.submit(batch, **self._open(options)))

    def _open(self, options: dict[str, Any]) -> dict[str, Any]:
        if not self._entered:
            raise ClosedError(
                "the group is not entered; use 'async with engine.group() as group', whose end waits for transfers"
            )
        if self._closed or self._failed:
            raise ClosedError("the group is over; no transfer can join it")
        return options

    def _add(self, transfer: Transfer) -> Transfer:
        # Those that finished inside the call need no watching, and a failed call raised already.
        if not transfer.done():
            self._transfers.append(transfer)
            transfer.add_done_callback(self._on_done)
        return transfer

    def _on_done(self, transfer: Transfer) -> None:
        if not transfer.cancelled() and transfer.exception() is not None and not self._failed:
            self._failed = True
            self._cancel_all()
            # A body that waits for something else would never notice; the cancellation is withdrawn at the exit.
            if self._task is not None and not self._closed and not self._task.done():
                self._interrupting = True
                self._task.cancel()

    def _cancel_all(self) -> None:
        for transfer in self._transfers:
            transfer.cancel()

    async def __aenter__(self) -> Group:
        if self._entered:
            raise ClosedError("a group is entered once; make a new one with engine.group()")
        self._entered = True
        self._task = asyncio.current_task()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._closed = True
        if error is not None:
            self._cancel_all()
        if self._interrupting and self._task is not None:
            # Withdraw our cancellation; if there was no other, the failures below say why.
            others = self._task.uncancel()
            if isinstance(error, asyncio.CancelledError) and not others:
                error = None
        interruption = await settled(self._core, self._transfers)
        failures = [
            failure
            for transfer in self._transfers
            if transfer.done() and not transfer.cancelled() and (failure := transfer.exception()) is not None
        ]
        if interruption is not None:
            raise interruption
        if error is not None and not isinstance(error, Exception):
            return
        if error is not None:
            failures.insert(0, error)
        if failures:
            raise ExceptionGroup("transfers of a group failed", failures)  # type: ignore[type-var]
