"""Checks of arguments that many calls take."""

from __future__ import annotations

from contextlib import suppress
from numbers import Real
from operator import index

from ..errors import InvalidArgumentError

__all__ = ["positive_seconds", "require_callable", "whole_number"]


def require_callable(name: str, value: object) -> None:
    """Return if `value` can be called.

    :raises InvalidArgumentError: if it cannot; the message says `name`.
    """
    if not callable(value):
        raise InvalidArgumentError(f"{name} must be a function, not {value!r}")


def positive_seconds(name: str, value: object) -> float:
    """`value`, if it is a time that can be waited for.

    :raises InvalidArgumentError: if it is no number, not positive, or endless; the message says `name`.
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
    """`value` as an int, whatever library it is an integer of; True and False are none.

    :raises InvalidArgumentError: if it is no whole number; the message says `name`.
    """
    if not isinstance(value, bool):
        with suppress(TypeError):
            return index(value)  # type: ignore[arg-type]
    raise InvalidArgumentError(f"{name} must be a whole number, not {value!r}")
