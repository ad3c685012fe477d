"""Starts the processes of the demo, finds out when one is in trouble, and ends them all."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from messages import Settings

import hixl_async as hx

PROGRAMS = {"P": "prefill.py", "D": "decode.py", "reference": "reference.py"}

#: Seconds that a process has for leaving, and that others have for saying how a failure looks from their side.
GRACE = 5.0
SECOND_OPINION = 1.0


class ProcessEnded(Exception):
    """A process ended before it was ready. Its traceback is on stderr already."""


class Failed(Exception):
    """A run failed; says what each process reported."""

    def __init__(self, failures: dict[str, BaseException]) -> None:
        super().__init__("; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failures.items()))
        self.failures = failures
