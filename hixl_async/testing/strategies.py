"""Hypothesis strategies; the only module of the package that imports hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from .plan import FaultPlan

__all__ = ["batches", "plans"]


@st.composite
def batches(
    draw: st.DrawFn, local_size: int, remote_size: int | None = None, *, max_rows: int = 16, disjoint: bool = True
) -> list[tuple[int, int, int]]:
    """Draw the rows of a valid batch between two regions.

    :param local_size: the size of the local region in bytes.
    :param remote_size: the size of the remote region in bytes; default: `local_size`.
    :param max_rows: the most rows.
    :param disjoint: True if no two rows may touch the same byte of either side, so that the result does not depend on their
        order.
    :return: rows ``(local offset, remote offset, length)`` in bytes.
    """
    sizes = local_size, local_size if remote_size is None else remote_size
    count = draw(st.integers(1, max(1, min(max_rows, *sizes))))
    if not disjoint:
        rows = []
        for _ in range(count):
            length = draw(st.integers(1, min(sizes)))
            rows.append((draw(st.integers(0, sizes[0] - length)), draw(st.integers(0, sizes[1] - length)), length))
        return rows
    # Each side is cut into cells of one size; each row takes one cell of each side.
    cell = min(sizes) // count
    places = [draw(st.permutations(range(size // cell)))[:count] for size in sizes]
    lengths = [draw(st.integers(1, cell)) for _ in range(count)]
    shifts = [(draw(st.integers(0, cell - length)), draw(st.integers(0, cell - length))) for length in lengths]
    return [
        (left * cell + shift[0], right * cell + shift[1], length)
        for left, right, length, shift in zip(*places, lengths, shifts, strict=True)
    ]


_RULES: dict[str, Callable[[st.DrawFn], dict[str, Any]]] = {
    "delay": lambda draw: {
        "low": draw(st.sampled_from([0.0, 0.0001])),
        "high": draw(st.sampled_from([0.0002, 0.002])),
        "part": draw(st.sampled_from(["operation", "outcome", "note"])),
    },
    "bandwidth": lambda draw: {"rate": draw(st.sampled_from([10e6, 1e9]))},
    "pending": lambda draw: {},
    "reorder": lambda draw: {"window": draw(st.integers(2, 6)), "within": 0.001},
    "hold": lambda draw: {},
    "late": lambda draw: {},
    "stall": lambda draw: {"after": draw(st.sampled_from([0.0, 0.5, 0.9]))},
    "fail": lambda draw: {"status": draw(st.sampled_from(["system", "timeout", "range"]))},
    "busy": lambda draw: {},
    "drop_peer": lambda draw: {},
}
_ALWAYS = ("bandwidth", "reorder")


@st.composite
def plans(draw: st.DrawFn, *, harmless: bool = False, max_rules: int = 4) -> FaultPlan:
    """Draw a fault plan.

    :param harmless: True for faults that change only the time and the order of operations, not their outcomes.
    :param max_rules: the most rules.
    :return: the plan.
    """
    names = [name for name in _RULES if not harmless or name in ("delay", "bandwidth", "pending", "reorder")]
    plan = FaultPlan(draw(st.integers(0, 1 << 32)))
    for name in draw(st.lists(st.sampled_from(names), max_size=max_rules)):
        words = _RULES[name](draw)
        if name not in _ALWAYS:
            words["nth"] = draw(st.integers(1, 20))
            words["count"] = draw(st.integers(1, 5))
            words["every"] = draw(st.integers(1, 5))
        getattr(plan, name)(**words)
    return plan
