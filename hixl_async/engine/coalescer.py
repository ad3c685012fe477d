"""Coalescing of many small copies into few batches."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..core.batch import Batch, link_of
from ..core.in_flight import must_be_on_thread, must_be_open, settled
from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..errors import ClosedError, HixlError

if TYPE_CHECKING:
    from .._core import Core
    from ..core.link import Link
    from ..core.transfer import Transfer

__all__ = ["Coalescer"]

#: The most copies of one batch; a full batch is submitted at once.
MOST = 4096


class _Copy(NamedTuple):
    local: Any
    remote: Any
    landed: asyncio.Future[int]


class Coalescer(Sealed, maker="engine.coalesce()"):
    """A collector of small reads and writes, which are submitted as one batch per peer and pass of the loop.

    Use it where a transfer of any size costs more than a few microseconds: over a network, or between devices.  Over shared
    memory a small copy is faster than collecting it.  The copies are not ordered among each other.  Both sides of a copy are
    ranges of regions, because collected memory must stay where it is until its batch is submitted.

    Leaving ``async with engine.coalesce() as few:`` submits the remaining copies, waits until all of them are drained, and
    raises the failures in an ExceptionGroup.
    """

    __reduce__ = unpicklable("make one there, with an engine of its own")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._collected: dict[tuple[str, Link], list[_Copy]] = {}
        self._flying: set[Transfer] = set()  # not drained
        self._landing: set[asyncio.Future[None]] = set()  # for each batch until its copies have an outcome
        self._failures: list[Exception] = []
        self._structured = False
        self._closed = False

    def read(self, local: Any, remote: Any) -> asyncio.Future[int]:
        """Collect a read from a remote range into a local one; it starts in this pass of the loop.

        :param local: a local region or a range of one.
        :param remote: a range of a remote region, of the same length in bytes.
        :return: a future of the number of bytes; it fails with the error of the batch.
        :raises ClosedError: if the coalescer or the engine is closed.
        :raises RangeError: if the lengths differ.
        :raises AccessError: if the peer does not grant the access.
        :raises RefusedError: if the copy is refused for another reason, at the call and not at the end.
        """
        return self._add("read", local, remote)

    def write(self, local: Any, remote: Any) -> asyncio.Future[int]:
        """Collect a write from a local range into a remote one; it starts in this pass of the loop.

        :param local: a local region or a range of one.
        :param remote: a range of a remote region, of the same length in bytes.
        :return: a future of the number of bytes; it fails with the error of the batch.
        :raises ClosedError: if the coalescer or the engine is closed.
        :raises RangeError: if the lengths differ.
        :raises AccessError: if the peer does not grant the access.
        :raises RefusedError: if the copy is refused for another reason, at the call and not at the end.
        """
        return self._add("write", local, remote)

    def _add(self, verb: Literal["read", "write"], local: Any, remote: Any) -> asyncio.Future[int]:
        must_be_open(self._core)
        if self._closed:
            raise ClosedError("this coalescer is closed; nothing can be added to it")
        link = link_of(Batch(verb, [(local, remote)]))
        if not self._collected:
            self._core.loop.call_soon(self.flush)
        copies = self._collected.setdefault((verb, link), [])
        copies.append(_Copy(local, remote, self._core.loop.create_future()))
        if len(copies) == min(MOST, link.driver.descriptor_limit):
            self._send(verb, self._collected.pop((verb, link)))
        return copies[-1].landed

    def flush(self) -> None:
        """Submit the collected copies now instead of at the end of the loop's pass.

        :raises WrongLoopError: if called outside of the engine's event loop.
        """
        must_be_on_thread(self._core)
        while self._collected:
            (verb, _), copies = self._collected.popitem()
            self._send(verb, copies)

    def _send(self, verb: Any, copies: list[_Copy]) -> None:
        wanted = [copy for copy in copies if not copy.landed.cancelled()]
        if not wanted:
            return
        try:
            transfer = self._core.submit(Batch(verb, [(copy.local, copy.remote) for copy in wanted]))
        except HixlError as error:
            if len(wanted) == 1 or error.retryable:
                self._fail(wanted, error)
            else:  # one copy has become invalid since it was added; the others may still succeed
                for copy in wanted:
                    self._send(verb, [copy])
            return
        if transfer.done():
            self._settle(wanted, transfer)
            return
        self._flying.add(transfer)
        landing = self._core.loop.create_future()
        self._landing.add(landing)
        transfer.add_done_callback(lambda transfer: self._landed(wanted, transfer, landing))
        transfer.drained().add_done_callback(lambda _: self._flying.discard(transfer))

    def _landed(self, copies: list[_Copy], transfer: Transfer, landing: asyncio.Future[None]) -> None:
        self._settle(copies, transfer)
        self._landing.discard(landing)
        landing.set_result(None)

    def _settle(self, copies: list[_Copy], transfer: Transfer) -> None:
        error = None if transfer.cancelled() else transfer.exception()
        if isinstance(error, Exception):
            self._fail(copies, error)
            return
        for copy in copies:
            if copy.landed.done():
                continue
            if transfer.cancelled():
                copy.landed.cancel()
            else:
                copy.landed.set_result(len(copy.remote))

    def _fail(self, copies: list[_Copy], error: Exception) -> None:
        self._failures.append(error)
        for copy in copies:
            if not copy.landed.done():
                copy.landed.set_exception(error)
                if self._structured:
                    copy.landed.exception()  # the exit raises it

    async def __aenter__(self) -> Coalescer:
        self._structured = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.flush()
        self._closed = True
        for copies in self._collected.values():
            for copy in copies:
                copy.landed.cancel()
        self._collected.clear()
        if error is not None:
            for transfer in list(self._flying):
                transfer.cancel()
        interruption = await settled(self._core, list(self._flying))
        if self._landing:
            await asyncio.wait(self._landing)
        if interruption is not None:
            raise interruption
        if self._failures and (error is None or isinstance(error, Exception)):
            failures = [error, *self._failures] if error is not None else self._failures
            raise ExceptionGroup("copies of a coalescer failed", failures)
