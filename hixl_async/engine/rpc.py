"""Requests between two engines: ours that wait for an answer, and the peer's that our handlers process.

::

    call     a request to the handler of a service    post     the same without an answer
    answer   the handler's answer                     failure  the reason why there is none
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from .. import errors
from ..control import Incoming
from ..core.guard import guarded, report
from ..core.log import Log
from ..errors import (
    AccessError,
    BusyError,
    DriverError,
    HixlError,
    InvalidArgumentError,
    LayoutMismatchError,
    NoRouteError,
    PeerDownError,
    ProtocolError,
    RangeError,
    RemoteError,
    RequestLostError,
    RequestTimeoutError,
    StaleRegionError,
    TicketError,
)
from .arguments import require_service
from .session import Session

__all__ = ["MAX_HANDLERS", "Rpc"]

log = Log("hixl_async")

#: The most requests of one peer in our handlers at the same time, and the most of ours that wait for answers; further ones
#: wait for their turn.  Answers cannot wait for room as requests do, so all that may be sent together must fit into the
#: connection's queue.
MAX_HANDLERS = 256
#: The most bytes of a failure that one side sends to the other.
FAILURE_BYTES = 2000

#: The bodies that a request and its answer may have; the end of a message for people.
BODY = "a JSON object of less than 64 KiB (write larger data into a region, and send its place)"

#: The kind of message that answers a request to a handler.
ANSWER = "answer"

#: The errors of the peer that keep their class here, because they are about the request itself, by the kind of its answer.
#: Any other is about the peer's own work: here its class would say something that is not true of the request.
CROSSING: dict[str, tuple[type[HixlError], ...]] = {
    ANSWER: (InvalidArgumentError, RangeError, AccessError, BusyError, TicketError, LayoutMismatchError),
    "region.metadata": (AccessError, BusyError, DriverError, NoRouteError, StaleRegionError),
}


class _Waiting(NamedTuple):
    kind: str
    reply: asyncio.Future[Incoming]


class Rpc:
    """The requests of one connection, in both directions.

    :param handler: returns the handler of a service, a function of the request's body, or None.
    """

    def __init__(self, session: Session, handler: Callable[[str], Callable[[dict[str, Any]], Any] | None]) -> None:
        self._session = session
        self._handler = handler
        self._loop = session.loop
        self._waiting: dict[int, _Waiting] = {}
        self._next = 1
        self._handlers: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(MAX_HANDLERS)

    # -- ours

    async def request(self, service: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and wait for its answer; see `Peer.request`."""
        _check(service, body)
        try:
            async with asyncio.timeout(timeout), self._turns:
                reply = await self.ask("call", {"service": service, "body": body}, answer=ANSWER)
        except TimeoutError as error:
            if isinstance(error, HixlError):
                raise
            raise RequestTimeoutError(
                f"peer {self._session.name!r} did not answer {service!r} within {timeout:g} s", peer=self._session.name
            ) from None
        return reply.object("body")

    def post(self, service: str, body: dict[str, Any]) -> None:
        """Send a message without an answer; see `Peer.post`."""
        _check(service, body)
        if self._session.connection.crowded:
            raise BusyError(
                f"too many messages wait to be sent to {self._session.name!r}; await a request now and then",
                peer=self._session.name,
            )
        self._send_ours("post", {"service": service, "body": body})

    async def ask(self, kind: str, body: dict[str, Any], *, answer: str) -> Incoming:
        """Send a message with a number, and wait for the message of kind `answer` with the same number.

        :return: the answer; its descriptors belong to the caller.
        :raises HixlError: if the peer answers with a failure.
        :raises PeerDownError: if the peer is down, or goes down before it answers.
        :raises InvalidArgumentError: if `body` cannot be sent.
        """
        await self._session.connection.room()
        self._session.must_be_up()
        number, self._next = self._next, self._next + 1
        waiting = self._waiting[number] = _Waiting(answer, self._loop.create_future())
        try:
            self._send_ours(kind, {"call": number, **body})
            return await waiting.reply
        except BaseException:
            if waiting.reply.done() and not waiting.reply.cancelled() and waiting.reply.exception() is None:
                waiting.reply.result().drop()  # it has arrived, but the caller will not take it
            raise
        finally:
            del self._waiting[number]

    def _send_ours(self, kind: str, body: dict[str, Any]) -> None:
        try:
            self._session.send(kind, body)
        except ProtocolError as error:
            raise InvalidArgumentError(f"body must be {BODY}: {error}") from None

    def on_answer(self, message: Incoming) -> None:
        """Hand an answer to its caller."""
        waiting = self._waiting.get(message.number("call"))
        if waiting is None or waiting.reply.done():
            return  # too late
        if waiting.kind != message.kind:
            raise ProtocolError(
                f"peer {self._session.name!r} answered with a {message.kind!r} where a {waiting.kind!r} was asked for"
            )
        waiting.reply.set_result(message.kept())

    def on_failure(self, message: Incoming) -> None:
        """Hand a failure to the caller that waits for an answer."""
        waiting = self._waiting.get(message.number("call"))
        if waiting is not None and not waiting.reply.done():
            name, text = message.text("error"), message.words("message", FAILURE_BYTES)
            waiting.reply.set_exception(_failure(name, text, waiting.kind, self._session.name))

    def lose(self, error: Callable[[], HixlError]) -> None:
        """Fail all waits for an answer, and cancel all handlers, because the peer is down."""
        for waiting in self._waiting.values():
            if not waiting.reply.done():
                waiting.reply.set_exception(_lost(error(), waiting))
        for task in self._handlers:
            task.cancel()

    # -- theirs

    def on_call(self, message: Incoming) -> None:
        """Handle a request of the peer."""
        self._serve(message.number("call"), message)

    def on_post(self, message: Incoming) -> None:
        """Handle a message that needs no answer."""
        self._serve(None, message)

    def _serve(self, call: int | None, message: Incoming) -> None:
        service, request = message.text("service"), message.object("body")
        handler = self._handler(service)
        if handler is None:
            self.fail(call, InvalidArgumentError(f"no handler serves {service!r}"))
            return
        try:
            answer = handler(request)
        except HixlError as error:
            self.fail(call, error)
        except BaseException as error:
            self._broken_handler(call, service, error)
        else:
            if inspect.isawaitable(answer):
                self._serve_later(call, service, answer)
            else:
                self._reply(call, service, answer)

    def _serve_later(self, call: int | None, service: str, answer: Awaitable[dict[str, Any] | None]) -> None:
        if len(self._handlers) >= MAX_HANDLERS:
            self._discard(service, answer)
            error = BusyError(f"{MAX_HANDLERS} requests of this peer are being handled already")
            log.warning("peer %r: a request to %r is dropped: %s", self._session.name, service, error)
            self.fail(call, error)
            return
        task = self._session.spawn(self._finish(call, service, answer))
        self._handlers.add(task)
        task.add_done_callback(partial(self._ended, call, service, answer))

    async def _finish(self, call: int | None, service: str, answer: Awaitable[dict[str, Any] | None]) -> None:
        try:
            body = await answer
        except asyncio.CancelledError:
            raise
        except HixlError as error:
            self.fail(call, error)
        except BaseException as error:
            self._broken_handler(call, service, error)
        else:
            self._reply(call, service, body)

    def _ended(
        self, call: int | None, service: str, answer: Awaitable[dict[str, Any] | None], task: asyncio.Task[None]
    ) -> None:
        self._handlers.discard(task)
        if task.cancelled():
            self._discard(service, answer)  # the task may not even have begun
            self.fail(call, RemoteError(f"the handler of {service!r} was cancelled at the peer"))

    def _discard(self, service: str, answer: Awaitable[dict[str, Any] | None]) -> None:
        """End the work that a handler has begun, if it has not ended."""
        end = answer.close if inspect.iscoroutine(answer) else getattr(answer, "cancel", None)
        if end is not None:
            guarded(self._loop, f"the handler of {service!r} could not be ended", end)

    def _reply(self, call: int | None, service: str, body: dict[str, Any] | None) -> None:
        if call is None:
            return
        try:
            if not isinstance(body, dict | None):
                raise TypeError(f"it is of type {type(body).__name__}")
            self._session.tell("answer", {"call": call, "body": body or {}})
        except (ProtocolError, TypeError) as error:
            self._broken_handler(call, service, error, f": its answer must be None or {BODY}: {error}")
        except BaseException as error:  # of the items of a dict whose class is the program's
            self._broken_handler(call, service, error)

    def fail(self, call: int | None, error: HixlError) -> None:
        """Tell the peer why its request has no answer."""
        if call is not None:
            text = self._text(error).encode(errors="replace")[:FAILURE_BYTES].decode(errors="ignore")
            self._session.tell("failure", {"call": call, "error": _class_name(error), "message": text})

    def _text(self, error: HixlError) -> str:
        """Return the text of an error, whose class may be the program's."""
        try:
            return str(error)
        except BaseException as failure:
            report(self._loop, f"a {type(error).__name__} has no text", failure)
            return f"its text is unknown, because {type(failure).__name__} was raised"

    def _broken_handler(self, call: int | None, service: str, error: BaseException, reason: str = "") -> None:
        """Report the error of our own handler, of which the peer learns no more than `reason`."""
        self.fail(call, RemoteError(f"the handler of {service!r} failed at the peer{reason}"))
        report(self._loop, f"the handler of {service!r} failed", error)


def _class_name(error: HixlError) -> str:
    """Return the name of an error's class; of a class of the program, that of its nearest base in this package."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def _failure(name: str, text: str, kind: str, peer: str) -> HixlError:
    """Return the error for a failure that the peer reports.

    :param name: the name of the error's class at the peer, which is not trusted.
    :param text: the error's message.
    :param kind: the kind of the answer that the failure takes the place of.
    """
    for crossing in CROSSING[kind]:
        if crossing.__name__ == name:
            return crossing(text, peer=peer)
    error = RemoteError(text if name == RemoteError.__name__ else f"{name}: {text}", peer=peer)
    error.remote_class = name
    return error


def _lost(error: HixlError, waiting: _Waiting) -> HixlError:
    """Return the error of a wait that ended with the connection; a handler may have run all the same."""
    if waiting.kind != ANSWER or not isinstance(error, PeerDownError):
        return error
    lost = RequestLostError(str(error), peer=error.peer)
    lost.confirmed_dead = error.confirmed_dead
    return lost


def _check(service: object, body: object) -> None:
    require_service(service)
    if not isinstance(body, dict):
        raise InvalidArgumentError(f"body must be {BODY}, not {type(body).__name__}")
