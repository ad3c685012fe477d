"""Copies of nested settings that cannot be changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["FrozenMapping", "frozen"]


class FrozenMapping(Mapping[Any, Any]):
    """A copy of a mapping that cannot be changed; its values are `frozen` too."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[Any, Any]) -> None:
        self._items = {key: frozen(value) for key, value in items.items()}

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


def frozen(value: Any) -> Any:
    """Return a copy of a value in which mappings cannot be changed and lists are tuples; other values are shared.

    :raises RecursionError: if a mapping or list contains itself.
    """
    if isinstance(value, Mapping):
        return FrozenMapping(value)
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    return value
