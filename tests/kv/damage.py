"""JSON of a hostile peer: anything at all, and messages with something else inside."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["JSON", "damaged"]

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from([-1, 0, 1, 1 << 31, 1 << 62, 1 << 64])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def damaged(body: Any) -> st.SearchStrategy[Any]:
    """Return bodies of which one value somewhere inside was replaced."""
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(inner, dict | list):
                visit(inner)

    visit(body)

    def replace(number: int, value: Any) -> Any:
        place, key = places[number]
        place[key] = value
        return body

    return st.builds(replace, st.integers(0, len(places) - 1), JSON)
