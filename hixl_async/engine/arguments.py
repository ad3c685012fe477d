"""Validation of arguments that many calls take."""

from __future__ import annotations

from contextlib import suppress
from numbers import Real
from operator import index

from ..errors import InvalidArgumentError

__all__ = ["positive_seconds", "require_callable", "whole_number"]


def require_callable(name: str, value: object) -> None:
    """Return if `value` is callable.

    :raises InvalidArgumentError: if it cannot; the message says `name`.
    """
    if not callable(value):
        raise InvalidArgumentError(f"{name} must be a function, not {value!r}")


def positive_seconds(name: str, value: object) -> float:
    """Return `value` as a float if it is a positive, finite number of seconds.

    :raises InvalidArgumentError: if it is not a number, not positive, or infinite; the message contains `name`.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            # Python refuses to print the longest of them.
            raise InvalidArgumentError(f"{name} must be a number of seconds, not one beyond any float") from None
        if 0 < seconds < float("inf"):
            return seconds
    raise InvalidArgumentError(f"{name} must be a positive number of seconds, not {value!r}")


def whole_number(name: str, value: object) -> int:
    """Return `value` as an int; integers of other libraries are accepted, True and False are not.

    :raises InvalidArgumentError: if it is not a whole number; the message contains `name`.
    """
    if not isinstance(value, bool):
        with suppress(TypeError):
            return index(value)  # type: ignore[arg-type]
    raise InvalidArgumentError(f"{name} must be a whole number, not {value!r}")
