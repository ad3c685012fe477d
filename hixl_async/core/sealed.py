"""Types that only this package can instantiate."""

from __future__ import annotations

from typing import Any, ClassVar, Self

__all__ = ["Sealed"]


class Sealed:
    """The base of public types that only this package makes, so that no object of them exists without its parts.

    :param maker: the calls that make one, for the message of the TypeError.
    """

    __slots__ = ()

    _maker: ClassVar[str]

    def __init_subclass__(cls, *, maker: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if maker:
            cls._maker = maker

    def __new__(cls, *parts: Any, **named: Any) -> Self:
        if not parts:
            raise TypeError(f"{cls.__name__} objects are made by {cls._maker}")
        return super().__new__(cls)
