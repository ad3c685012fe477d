"""The checks that many calls share."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy
import pytest

from hixl_async import InvalidArgumentError
from hixl_async.engine.arguments import positive_seconds, whole_number


@pytest.mark.parametrize("value", [1, 0.25, 1e300, Fraction(1, 3), numpy.float32(2), numpy.int64(3)])
def test_valid_times(value: Any) -> None:
    seconds = positive_seconds("stall", value)
    assert type(seconds) is float
    assert seconds == float(value)


@pytest.mark.parametrize(
    "value",
    [
        0, -1, -0.0, 0.0, float("nan"), float("inf"), float("-inf"), 10**400, -(10**400), 10**5000,
        True, False, None, "1", b"1", [1], 1j, numpy.float32("nan"), numpy.bool_(True), numpy.ones(2),
    ],
    ids=lambda value: f"{type(value).__name__}-{str(value)[:8] if not isinstance(value, int) else value.bit_length()}",
)  # fmt: skip
def test_invalid_times(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="^stall must be"):
        positive_seconds("stall", value)


def test_whole_numbers() -> None:
    for value in (3, numpy.int64(3), numpy.uint8(3)):
        assert whole_number("layer", value) == 3
        assert type(whole_number("layer", value)) is int
    for wrong in (10**5000, True, None, "3", 3.0, numpy.float64(3), numpy.bool_(True), [3]):
        with pytest.raises(InvalidArgumentError, match="^layer must be a whole number"):
            whole_number("layer", wrong)
