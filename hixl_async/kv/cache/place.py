"""The place of a sequence's tokens in a cache.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ...engine.arguments import whole_number
from ...errors import InvalidArgumentError, ProtocolError, RangeError
from ..plan import BlockTable
from ..shapes import View
from ..ticket import pack_ids, parse_ids

__all__ = ["Place", "check_tokens"]

#: Positions are below this.
POSITIONS = 1 << 62


def check_tokens(tokens: object) -> tuple[int, int] | None:
    """Return a range of positions; a number means that many from the first one on.

    :raises RangeError: if the range is empty, or begins before 0.
    :raises InvalidArgumentError: if it is malformed.
    """
    if tokens is None:
        return None
    first, last = tokens if isinstance(tokens, tuple | list) and len(tokens) == 2 else (0, tokens)
    first, last = whole_number("tokens", first), whole_number("tokens", last)
    if not 0 <= first < last < POSITIONS:
        raise RangeError(f"tokens must be a range with at least one token, not {first} to {last}")
    return first, last


class Place(NamedTuple):
    """Some tokens of a sequence in a cache: its blocks, or its row, which is a block of a contiguous cache."""

    blocks: BlockTable
    #: The first position and the one after the last; None: all that the blocks hold.
    tokens: tuple[int, int] | None = None

    @classmethod
    def of(cls, name: str, blocks: Iterable[int] | BlockTable, tokens: tuple[int, int] | None) -> Place:
        """Return the place that a program names.

        :param name: the argument that has the blocks.
        :raises InvalidArgumentError: if the blocks are malformed.
        """
        if isinstance(blocks, BlockTable):
            return cls(blocks, tokens)
        try:
            return cls(BlockTable([whole_number(name, block) for block in blocks]), tokens)
        except TypeError:
            raise InvalidArgumentError(
                f"{name} must be block ids or a hixl_async.kv.BlockTable, not {blocks!r}"
            ) from None

    def all_of(self, view: View) -> tuple[int, int]:
        """Return the range of the tokens that the blocks can hold."""
        return self.blocks.start, self.blocks.start + len(self.blocks) * view.block_tokens

    def touched(self, view: View) -> tuple[int, ...]:
        """Return the ids of the blocks that hold the tokens.

        :raises RangeError: if the cache has no such block, or the blocks do not hold the tokens.
        """
        if self.blocks.largest >= view.blocks:
            raise RangeError(f"block {self.blocks.largest} does not exist: the cache has {view.blocks}")
        start, end = self.all_of(view)
        first, last = self.tokens or (start, end)
        if first < start or last > end:
            raise RangeError(f"the blocks hold the tokens {start} to {end}, not {first} to {last}")
        return self.blocks.ids[(first - start) // view.block_tokens : -((start - last) // view.block_tokens)]

    def body(self) -> list[Any]:
        """Return the place as a JSON-safe list."""
        return [pack_ids(self.blocks.ids), self.blocks.start, *(self.tokens or ())]

    @classmethod
    def parse(cls, body: list[Any]) -> Place | None:
        """Return the place that a peer names, or None for an empty list.

        :raises ProtocolError: if it is malformed.
        """
        if not body:
            return None
        if len(body) not in (2, 4) or type(body[0]) is not str or any(type(number) is not int for number in body[1:]):
            raise ProtocolError("a place is a list of packed block ids, their start, and a range of tokens")
        try:
            return cls(BlockTable(parse_ids(body[0]), body[1]), check_tokens(body[2:] or None))
        except InvalidArgumentError as error:
            raise ProtocolError(f"a peer names a malformed place: {error}") from None
