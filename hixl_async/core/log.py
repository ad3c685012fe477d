"""The log of the package, whose handlers and filters are the program's own code."""

from __future__ import annotations

import logging
from asyncio import _get_running_loop as running_loop
from typing import Any

from .guard import report

__all__ = ["Log"]


class Log:
    """A logger that never raises, because what a handler or a filter raises must not stop the work that is logged.

    :param name: the name of the logger.
    """

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, text: str, *args: Any) -> None:
        """Log a message of no urgency; `text` is formatted with `args`."""
        self._log(logging.INFO, text, args)

    def warning(self, text: str, *args: Any) -> None:
        """Log a warning; `text` is formatted with `args`."""
        self._log(logging.WARNING, text, args)

    def _log(self, level: int, text: str, args: tuple[Any, ...]) -> None:
        try:
            self._logger.log(level, text, *args, stacklevel=3)
        except BaseException as error:
            loop = running_loop()
            if loop is None:  # the program's own call, which the engine's work does not depend on
                raise
            report(loop, f"the log {self._logger.name!r} failed", error)
