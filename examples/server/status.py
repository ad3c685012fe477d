"""What the page shows."""

from __future__ import annotations

import time
from typing import Any

from .generation import Generation
from .processes import Processes
from .router import Router


def status(router: Router, processes: Processes, layers: int) -> dict[str, Any]:
    """Return the requests that are under way and the last ones that were, and the pools.

    :param layers: the number of layers of the model.
    """
    now = time.monotonic()
    return {
        "ready": processes.ready,
        "layers": layers,
        "pools": processes.states,
        "processes": processes.pids(),
        "starts": processes.starts,
        "requests": [_request(each, now) for each in (*router.ended, *router.current.values())],
    }


def _request(generation: Generation, now: float) -> dict[str, Any]:
    """Return a request; its times are in seconds before now."""
    times = {name: getattr(generation, name) for name in ("asked", "arriving", "first", "ended")}
    return {
        "number": generation.number,
        "state": generation.state,
        "layers": generation.layers,
        "prompt": len(generation.prompt),
        "tokens": len(generation.tokens),
        "tries": generation.tries,
        **{name: None if moment is None else round(now - moment, 4) for name, moment in times.items()},
    }
