"""The kinds of marks by which a program says that a layer may be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InvalidArgumentError
from ..types import Ready

__all__ = ["predicate"]

#: Attributes of torch's events (of NPUs, of CUDA, of any accelerator) that hold the device's own event: 0 until they are
#: first recorded.
HANDLES = ("npu_event", "cuda_event", "event_id")


def predicate(ready: Ready) -> Callable[[], Any] | None:
    """Return the function that tells if a ready mark is set; None if the layer is ready now.

    :raises InvalidArgumentError: if `ready` is neither None, nor has ``query()`` or ``is_set()``, nor can be called.
    """
    if ready is None:
        return None
    query = getattr(ready, "query", None)
    if callable(query):
        handle = next((name for name in HANDLES if hasattr(ready, name)), None)
        # An event that was never recorded reports that it is done, although nothing has been computed yet.
        return query if handle is None else lambda: getattr(ready, handle) and query()
    is_set = getattr(ready, "is_set", None)
    if callable(is_set):
        return is_set  # type: ignore[no-any-return]
    if callable(ready):
        return ready
    raise InvalidArgumentError(
        f"ready must be None, an event with query() or is_set(), or a callable, not {type(ready).__name__}"
    )
