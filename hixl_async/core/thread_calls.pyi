# The types of thread_calls.pyx; see link.pyi.

import asyncio
from collections.abc import Callable
from typing import final

@final
class ThreadCalls:
    def __new__(cls, loop: asyncio.AbstractEventLoop) -> ThreadCalls: ...
    def call(self, function: Callable[[], object]) -> None: ...
    def close(self) -> None: ...
