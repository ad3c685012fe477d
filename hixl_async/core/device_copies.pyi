# The types of device_copies.pyx; see link.pyi.

from collections.abc import Callable
from typing import Any, final

from .in_flight import InFlightTable
from .transfer import Transfer

@final
class DeviceCopies:
    def __new__(
        cls,
        core: InFlightTable,
        pin: Callable[[Any, int, int], Callable[[], object] | None],
        copy: Callable[[Any, int, int, bool], Any],
    ) -> DeviceCopies: ...
    def begin(self, transfer: Transfer) -> None: ...
