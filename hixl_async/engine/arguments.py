"""Validation of arguments that many calls take."""

from __future__ import annotations

from contextlib import suppress
from numbers import Real
from operator import index

from ..display import shown
from ..errors import InvalidArgumentError

__all__ = [
    "number_of",
    "positive_number",
    "positive_seconds",
    "require_callable",
    "require_service",
    "seconds_or_zero",
    "whole_number",
]

#: The most characters of the name of a service.
SERVICE_CHARACTERS = 512

#: The longest integers that messages show; Python refuses to print some that are longer.
PRINTABLE_BITS = 1024


def require_callable(name: str, value: object) -> None:
    """Return if `value` is callable.

    :raises InvalidArgumentError: if it is not; the message contains `name`.
    """
    if not callable(value):
        raise InvalidArgumentError(f"{name} must be a function, not {shown(value)}")


def require_service(value: object) -> None:
    """Return if `value` can be the name of a service.

    :raises InvalidArgumentError: if it cannot.
    """
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= SERVICE_CHARACTERS:
        raise InvalidArgumentError(
            f"service must be a printable string of 1 to {SERVICE_CHARACTERS} characters, not {shown(value)}"
        )


def positive_seconds(name: str, value: object) -> float:
    """Return `value` as a float if it is a positive, finite number of seconds.

    :raises InvalidArgumentError: if it is not a number, not positive, or infinite; the message contains `name`.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            raise InvalidArgumentError(f"{name} must be a number of seconds, not {shown(value)}") from None
        if 0 < seconds < float("inf"):
            return seconds
    raise InvalidArgumentError(f"{name} must be a positive number of seconds, not {shown(value)}")


def seconds_or_zero(name: str, value: object) -> float:
    """Return `value` as a float if it is 0, or a positive, finite number of seconds.

    :raises InvalidArgumentError: if it is neither; the message contains `name`.
    """
    if isinstance(value, Real) and not isinstance(value, bool) and value == 0:
        return 0.0
    return positive_seconds(name, value)


def whole_number(name: str, value: object) -> int:
    """Return `value` as an int; integers of other libraries are accepted, True and False are not.

    :raises InvalidArgumentError: if it is not a whole number, or too long to be printed; the message contains `name`.
    """
    number = value if type(value) is int else _integer(name, value)
    if number.bit_length() <= PRINTABLE_BITS:
        return number
    raise InvalidArgumentError(f"{name} must be a whole number of at most {PRINTABLE_BITS} bits")


def positive_number(name: str, value: object) -> int:
    """Return `value` as an int if it is a whole number of at least 1.

    :raises InvalidArgumentError: if it is not, or too long to be printed; the message contains `name`.
    """
    with suppress(InvalidArgumentError):
        if (number := whole_number(name, value)) >= 1:
            return number
    raise InvalidArgumentError(f"{name} must be a positive integer, not {shown(value)}")


def number_of(unit: str, name: str, value: object, least: int, bits: int) -> int:
    """Return `value` as an int if it is a number of `unit` of at least `least` that fits into `bits` bits.

    :raises InvalidArgumentError: if it is not a whole number, or outside of the range; the message contains `name`.
    """
    number = _integer(name, value)
    if least <= number < 1 << bits:
        return number
    raise InvalidArgumentError(f"{name} must be a number of {unit} in {least}..2**{bits}-1, not {shown(number)}")


def _integer(name: str, value: object) -> int:
    if not isinstance(value, bool):
        with suppress(TypeError):
            return index(value)  # type: ignore[arg-type]
    raise InvalidArgumentError(f"{name} must be a whole number, not {shown(value)}")
