"""Tools for the tests of your own programs: fault injection, engines in pairs and processes, and leak checks.

The package itself does not import them.

::

    plan = FaultPlan(seed=7).delay(0.001, 0.005).fail(nth=3)
    async with engine_pair(drivers=faulty("shm", plan)) as pair:
        region, remote = await pair.region("kv", 4096, access="write")
        ...
"""

from .balance import BalanceSheet, until
from .clock import VirtualClockLoop
from .pair import EnginePair, engine_pair
from .plan import FaultCounts, FaultPlan, faulty
from .process import PeerProcess, PeerProcessError, peer_process

__all__ = [
    "BalanceSheet",
    "EnginePair",
    "FaultCounts",
    "FaultPlan",
    "PeerProcess",
    "PeerProcessError",
    "VirtualClockLoop",
    "engine_pair",
    "faulty",
    "peer_process",
    "until",
]
