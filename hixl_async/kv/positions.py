"""Ranges of positions in a sequence."""

from __future__ import annotations

from ..engine.arguments import whole_number
from ..errors import InvalidArgumentError

__all__ = ["check_positions"]


def check_positions(tokens: object) -> tuple[int, int]:
    """Return a range of positions in a sequence.

    :raises InvalidArgumentError: if it is not a pair of whole numbers from 0, of which the second is larger.
    """
    if not isinstance(tokens, tuple) or len(tokens) != 2:
        raise InvalidArgumentError(f"tokens must be a pair of positions (first, after the last), not {tokens!r}")
    first, last = (whole_number("tokens", position) for position in tokens)
    if not 0 <= first < last:
        raise InvalidArgumentError(f"tokens must name at least one position from 0 on, not {first} to {last}")
    return first, last
