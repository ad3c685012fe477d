"""Types that only this package can instantiate."""

from __future__ import annotations

from sys import _getframe
from typing import TYPE_CHECKING, Any, ClassVar

__all__ = ["Sealed"]

PACKAGE = __name__.partition(".")[0] + "."


class _Sealing(type):
    """The type of sealed types: a call from within the package makes a whole object, and nothing else makes a part of one."""

    if not TYPE_CHECKING:  # type checkers take the signature of __init__

        def __call__(cls, *parts: Any, **named: Any) -> Any:
            if not _getframe(1).f_globals.get("__name__", "").startswith(PACKAGE):
                cls.__new__(cls)  # raises
            made = cls._make(cls)
            made.__init__(*parts, **named)
            return made


class Sealed(metaclass=_Sealing):
    """The base of public types that only this package makes, so that no object of them exists without its parts.

    :param maker: the calls that make one, for the message of the TypeError.
    """

    __slots__ = ()

    _maker: ClassVar[str]
    #: The `__new__` of the other bases.
    _make: ClassVar[Any]

    def __init_subclass__(cls, *, maker: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._make = staticmethod(super().__new__)
        if maker:
            cls._maker = maker

    if not TYPE_CHECKING:

        def __new__(cls, *parts: Any, **named: Any) -> Any:
            raise TypeError(f"{cls.__name__} objects are made by {cls._maker}")
