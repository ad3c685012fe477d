"""The refusal to pickle or copy objects that are invalid outside of their engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["unpicklable"]


def unpicklable(remedy: str) -> Callable[[Any], NoReturn]:
    """Return a ``__reduce__`` for a type whose objects can be neither pickled nor copied.

    :param remedy: a clause that says what to do instead; it ends the message of the TypeError.
    """

    def refuse(self: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} objects can be neither pickled nor copied, because they represent memory and connections "
            f"of this process: {remedy}"
        )

    return refuse
