# The types of _device.pyx; see _link.pyi.

from collections.abc import Callable
from typing import Any, final

from .in_flight import InFlightTable
from .transfer import Transfer

@final
class DeviceCopies:
    def __init__(
        self,
        core: InFlightTable,
        pin: Callable[[Any, int, int], Callable[[], object] | None],
        copy: Callable[[Any, int, int, bool], Any],
    ) -> None: ...
    def begin(self, transfer: Transfer) -> None: ...
