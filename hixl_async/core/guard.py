"""Calls of the program's own functions, whose failures must not stop the work of this package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["FATAL", "guarded", "report"]

T = TypeVar("T")

#: The exceptions that end a program.
FATAL = (KeyboardInterrupt, SystemExit)


def guarded(
    loop: asyncio.AbstractEventLoop, message: str | Callable[[], str], function: Callable[..., T], *args: Any
) -> T | None:
    """Call a function of the program, and report what it raises; see `report`.

    :param message: what has failed then, for people; or a function that returns it, where calls are frequent.
    :return: the function's result, or None if it raised.
    """
    try:
        return function(*args)
    except BaseException as error:
        report(loop, message if isinstance(message, str) else message(), error)
        return None


def report(loop: asyncio.AbstractEventLoop, message: str, error: BaseException) -> None:
    """Pass an exception of the program's code to the loop's exception handler; never raise.

    KeyboardInterrupt and SystemExit end the program all the same: the loop raises them in its next pass, as it does those of
    callbacks and tasks, so that the work at hand is done before.
    """
    if isinstance(error, FATAL):
        _raise_soon(loop, error)
    try:
        loop.call_exception_handler({"message": message, "exception": error})
    except BaseException as further:  # the handler is the program's too, and so are the handlers of its log
        if isinstance(further, FATAL):
            _raise_soon(loop, further)


def _raise_soon(loop: asyncio.AbstractEventLoop, error: BaseException) -> None:
    if not loop.is_closed():
        loop.call_soon(_raise, error)


def _raise(error: BaseException) -> None:
    raise error
