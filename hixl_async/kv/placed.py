"""A view whose tensors are registered: the ranges of memory in which the parts of its layers lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from .plan import Plan
from .shapes import View

if TYPE_CHECKING:
    from ..core.memory import LocalSlice, RemoteSlice

__all__ = ["Placed", "copies"]

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class _Tensor(Protocol[T_co]):
    """A region, ours or a peer's."""

    def __getitem__(self, index: Any) -> T_co: ...


class Placed(Generic[T]):
    """A view and the regions of its tensors.

    :param view: the view.
    :param tensors: the regions to which it refers.
    """

    __slots__ = ("_parts", "_tensors", "view")

    def __init__(self, view: View, tensors: Sequence[_Tensor[T]]) -> None:
        self.view = view
        self._tensors = tensors
        self._parts: dict[int, tuple[T, ...]] = {}

    def parts(self, layer: int) -> tuple[T, ...]:
        """Return the ranges of a layer's parts, each from its first byte to the end of its tensor; made once.

        :raises RangeError: if the view does not hold the layer.
        """
        if layer not in self._parts:
            self._parts[layer] = tuple(self._tensors[tensor][offset:] for tensor, offset in self.view.places_of(layer))
        return self._parts[layer]


def copies(
    plan: Plan, layer: int, here: Placed[LocalSlice], there: Placed[RemoteSlice]
) -> list[tuple[LocalSlice, RemoteSlice, memoryview]]:
    """Return the copies of one layer as the parts of ``Batch.strided``.

    :raises RangeError: if one of the views does not hold the layer.
    """
    ours, theirs = here.parts(layer), there.parts(layer)
    return [(ours[part], theirs[part], runs) for part, runs in plan.runs]
