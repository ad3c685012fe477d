"""One connection as the parts of a peer see it: its state, the marks of its end, and the sending of messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, TypeVar

from ..control import close_descriptors
from ..errors import ClosedError, HixlError, PeerDownError
from ..types import PeerState
from .waiters import Waiters

if TYPE_CHECKING:
    from ..control import Connection

__all__ = ["Mark", "Session"]

T = TypeVar("T")


class Mark(Flag):
    """A set of known facts about the end of a peer; a mark that is set stays set."""

    #: The peer has drained its own work and said goodbye.
    GOODBYE = auto()
    #: No further message of the peer can arrive.
    CUT = auto()
    #: The peer is DOWN.
    DOWN = auto()
    #: The peer's process can no longer touch memory of ours.
    FENCED = auto()
    #: The peer's process has ended.
    DEAD = auto()
    #: Our links and the connection are closed.
    WOUND_DOWN = auto()
    #: Our engine has ended, and no longer waits for the peer.
    GIVEN_UP = auto()


class Session:
    """The state of one connection, and the operations on it that the parts of a peer share.

    :param connection: the connection; its handshake is over.
    :param loop: the engine's event loop.
    :param check: raises if the caller is in another loop or a forked child.
    :param spawn: starts a task that belongs to the engine.
    :param spawn_ending: starts one that ends something.
    :param lose: ends the peer with an error, because it has failed.
    """

    def __init__(
        self,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        check: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        spawn_ending: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        lose: Callable[[HixlError], None],
    ) -> None:
        self.connection = connection
        self.identity = connection.identity
        self.loop = loop
        self.spawn = spawn
        self.spawn_ending = spawn_ending
        self.lose = lose
        self.state = PeerState.CONNECTING
        #: The reason why the connection ends, or None; known before the peer is DOWN.
        self.cause: HixlError | None = None
        self._check = check
        self._marks = Mark(0)
        self._waiters = Waiters(loop)

    @property
    def name(self) -> str:
        """The peer's name."""
        return self.identity.name

    # -- state

    @property
    def error(self) -> HixlError | None:
        """The error that says why the peer is down, or None."""
        return self.cause if self.state is PeerState.DOWN else None

    def change(self, state: PeerState, cause: HixlError | None = None) -> None:
        """Enter a state; CLOSING and DOWN need the error that explains them."""
        self.state = state
        if cause is not None:
            self.cause = cause
        if state is PeerState.DOWN:
            self.mark(Mark.DOWN)

    def has(self, mark: Mark) -> bool:
        """Return True if any of these marks is set."""
        return bool(self._marks & mark)

    def mark(self, mark: Mark) -> None:
        """Set a mark, and wake the tasks that wait for it."""
        if not mark & ~self._marks:
            return
        self._marks |= mark
        self._waiters.wake_all()

    async def until(self, marks: Mark, timeout: float | None = None) -> None:
        """Wait until any of `marks` is set, or for `timeout` seconds."""
        late = False

        def expire() -> None:
            nonlocal late
            late = True
            self._waiters.wake(marks)

        # No asyncio.timeout, which an `EndingTask` must not use.
        timer = None if timeout is None else self.loop.call_later(timeout, expire)
        try:
            while not self.has(marks) and not late:
                await self._waiters.wait(marks)
        finally:
            if timer is not None:
                timer.cancel()

    def must_be_up(self) -> None:
        """Return if requests and transfers may be sent.

        :raises PeerDownError: if the peer is down or leaving.
        :raises ClosedError: if the connection is coming up, or was closed here.
        :raises WrongLoopError: if the caller is not in the engine's loop.
        :raises EngineForkedError: in a child of fork().
        """
        self._check()
        if self.cause is not None:
            raise self.down_error()
        if self.state is not PeerState.UP:
            raise ClosedError(f"the connection to peer {self.name!r} is {self.state.value}", peer=self.name)

    def down_error(self) -> HixlError:
        """Return a fresh exception that says why the connection ends; a shared one would collect tracebacks of all callers."""
        assert self.cause is not None
        fresh = type(self.cause)(str(self.cause), peer=self.name)
        if isinstance(fresh, PeerDownError):
            fresh.confirmed_dead = self.has(Mark.DEAD)
        return fresh

    # -- sending

    def send(self, kind: str, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue one control message; the descriptors are closed here, because the connection has its own copies.

        :raises PeerDownError: if the connection is gone.
        :raises ProtocolError: if the message cannot be sent.
        """
        try:
            self.connection.send(kind, body, fds)
        except ClosedError as error:
            raise PeerDownError(f"peer {self.name!r} is gone: {error}", peer=self.name) from None
        finally:
            close_descriptors(fds)

    def tell(self, kind: str, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue a message that matters only to a peer that is still there; drop it otherwise."""
        if self.state in (PeerState.UP, PeerState.CLOSING):
            with contextlib.suppress(PeerDownError):
                self.send(kind, body, fds)
        else:
            close_descriptors(fds)
