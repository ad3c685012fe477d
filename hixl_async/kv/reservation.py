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
    if not isinstance(asked, Sequence) or isinstance(asked, str | bytes):
        return [_part(context, tokens, blocks, group, start)], False
    numbers = list(asked)
    groups, starts = (list(each) if isinstance(each, Sequence) else [each] * len(numbers) for each in (group, start))
    if not numbers or not len(groups) == len(starts) == len(numbers):
        raise InvalidArgumentError("reserve at least one, with a group and a start for each")
    asks = [(number, blocks) for number in numbers] if tokens is not None else [(None, number) for number in numbers]
    parts = [_part(context, *ask, *place) for ask, *place in zip(asks, groups, starts, strict=True)]
    if (total := sum(part.blocks for part in parts)) > context.blocks:
        raise RangeError(f"pool {context.name!r} can never lend {total} blocks at once: it has {context.blocks}")
    return parts, True


def _part(context: PoolContext, tokens: Any, blocks: Any, group: object, start: object) -> Part:
    index, position = whole_number("group", group), whole_number("start", start)
    if not 0 <= index < len(context.views):
        raise RangeError(f"group {index} does not exist: the pool has {len(context.views)}")
    if position < 0:
        raise InvalidArgumentError(f"start must be a position from 0 on, not {position}")
    return Part(context.blocks_for(index, tokens, blocks), index, position)


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
