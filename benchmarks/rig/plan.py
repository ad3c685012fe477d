"""The scope of a run of the ladder."""

from __future__ import annotations

from dataclasses import dataclass

from rig.blocks import Pace

__all__ = ["FULL", "LEVELS", "QUICK", "Plan", "Skipped"]

#: From the floor upwards; the floor is always measured.
LEVELS = ("copy", "driver", "core", "ready", "fresh")

KIB, MIB = 1 << 10, 1 << 20


class Skipped(Exception):
    """A part that cannot be measured here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The scope of one run."""

    #: Bytes of single transfers.
    sizes: tuple[int, ...]
    #: The levels of single transfers, of `LEVELS`.
    levels: tuple[str, ...] = LEVELS
    #: Blocks of copies.
    pace: Pace
    #: Blocks of wake-ups, which scatter more.
    wake_pace: Pace
    #: Blocks of work that takes long or cannot be repeated: large copies, stalls, first touches.
    slow_pace: Pace
    #: How long a coroutine writes without a pause while the loop's gaps are measured.
    busy_seconds: float
    #: The least size of the regions, in bytes.
    region: int
    #: Bytes of a transfer into untouched memory.
    touch: int
    #: Connections of an idle engine, and how long it is idle.
    connections: int
    idle_seconds: float

    @property
    def region_bytes(self) -> int:
        """The size of the regions, in bytes."""
        return max(self.region, *self.sizes)


FULL = Plan(
    sizes=(8, 64, 512, 4 * KIB, 32 * KIB, 256 * KIB, MIB, 16 * MIB, 128 * MIB),
    pace=Pace(15, 0.004),
    wake_pace=Pace(20, 0.02),
    slow_pace=Pace(21, 0.0),
    busy_seconds=0.05,
    region=128 * MIB,
    touch=16 * MIB,
    connections=200,
    idle_seconds=5.0,
)

QUICK = Plan(
    sizes=(8, 4 * KIB, 64 * KIB, MIB, 16 * MIB),
    pace=Pace(7, 0.001),
    wake_pace=Pace(7, 0.004),
    slow_pace=Pace(6, 0.0),
    busy_seconds=0.01,
    region=64 * MIB,
    touch=4 * MIB,
    connections=8,
    idle_seconds=1.0,
)
