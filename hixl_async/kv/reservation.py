"""Requests for blocks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ..core.sealed import Sealed
from ..core.unpicklable import unpicklable
from ..engine.arguments import whole_number
from ..errors import ClosedError, InvalidArgumentError, RangeError
from .blocks import Blocks
from .context import PoolContext

__all__ = ["Part", "Reservation", "parts_of"]


class Part(NamedTuple):
    """What is reserved for one `Blocks`."""

    blocks: int
    group: int
    #: The position in the sequence of the first token of the first block.
    start: int


def parts_of(context: PoolContext, tokens: Any, blocks: Any, group: Any, start: Any) -> tuple[list[Part], bool]:
    """Return the parts of a reservation, and whether several were asked for."""
    context.check_usable()
    asked = blocks if tokens is None else tokens
    several = isinstance(asked, Sequence) and not isinstance(asked, str | bytes)
    numbers = list(asked) if several else [asked]
    groups, starts = (
        list(each) if several and isinstance(each, Sequence) else [each] * len(numbers) for each in (group, start)
    )
    if not numbers or not len(groups) == len(starts) == len(numbers):
        raise InvalidArgumentError("reserve at least one, with a group and a start for each")
    parts = []
    for number, place, position in zip(numbers, groups, starts, strict=True):
        index = whole_number("group", place)
        if not 0 <= index < len(context.views):
            raise RangeError(f"group {index} does not exist: the pool has {len(context.views)}")
        ours = (number, blocks) if tokens is not None else (None, number)
        parts.append(Part(context.blocks_for(index, *ours), index, _position(position)))
    if (total := sum(part.blocks for part in parts)) > context.blocks:
        raise RangeError(f"pool {context.name!r} can never lend {total} blocks at once: it has {context.blocks}")
    return parts, several


def _position(start: object) -> int:
    position = whole_number("start", start)
    if position < 0:
        raise InvalidArgumentError(f"start must be a position from 0 on, not {position}")
    return position


Lent = TypeVar("Lent", bound=Blocks | list[Blocks])


class Reservation(Sealed, Generic[Lent], maker="pool.reserve()"):
    """A request for blocks, made by ``pool.reserve()``: await it for the `Blocks`, or enter it with ``async with``.

    A request for several is fulfilled by a list of `Blocks`.
    """

    __slots__ = ("_entered", "_lent", "_reserve")
    __reduce__ = unpicklable("reserve blocks there, of a pool of that process")

    def __init__(self, reserve: Callable[[], Coroutine[Any, Any, Lent]]) -> None:
        self._reserve = reserve
        self._entered = False
        self._lent: list[Blocks] = []

    def __await__(self) -> Generator[Any, None, Lent]:
        return self._reserve().__await__()

    async def __aenter__(self) -> Lent:
        if self._entered:
            raise ClosedError("a reservation is entered once; call pool.reserve() again")
        self._entered = True
        lent = await self
        self._lent = [lent] if isinstance(lent, Blocks) else list(lent)
        return lent

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for blocks in self._lent:
            await blocks.aclose()

    if not TYPE_CHECKING:  # type checkers report missing attributes by themselves

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and hasattr(Blocks, name):
                raise _not_reserved(f".{name}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __getitem__(self, part: slice) -> Any:
            raise _not_reserved("[...]")


def _not_reserved(use: str) -> ClosedError:
    return ClosedError(
        f"pool.reserve(...){use} is used before the blocks are reserved; write `blocks = await pool.reserve(...)`, or "
        "`async with pool.reserve(...) as blocks:`"
    )
