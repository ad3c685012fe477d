"""The notice that a driver's accelerators are simulated."""

from __future__ import annotations

import hixl_async as hx


def notice(engine: hx.Engine, driver: str) -> str | None:
    """Return the notice for the user; None if the driver moves bytes as it would anywhere."""
    facts = engine.driver_facts()[driver]
    if "simulated" not in facts.get("version", ""):
        return None
    where = f"{facts['library']}, version {facts['version']}"
    return f"THE ACCELERATORS ARE SIMULATED: times mean nothing, bytes do ({where})."
