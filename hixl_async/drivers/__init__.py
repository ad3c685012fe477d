"""The registry of drivers: found by entry point, loaded on demand, never chosen by name in code."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..core.link import CAPABILITIES, table_capabilities, table_problem
from ..errors import DriverLoadError, InvalidArgumentError
from ..types import DriverInfo

__all__ = ["GROUP", "WRAPPER", "available", "load", "names", "resolve"]

logger = logging.getLogger("hixl_async")

#: The entry-point group; a value names a module's capsule, e.g. ``"my_package._fabric:DRIVER"``.
GROUP = "hixl_async.drivers"

#: The option that names a driver to put around another: ``drivers={"shm": {"wrapper": "faulty", ...}}``.  The wrapped one keeps
#: its name, by which peers find it, and the other options go to the wrapper.
WRAPPER = "wrapper"

# Used where the package runs from a source tree and so has no installed entry points.
_BUILT_IN = {name: EntryPoint(name, f"hixl_async.drivers._{name}:DRIVER", GROUP) for name in ("shm", "faulty", "hixl")}


# Those that were found so far.  To look for them opens a file of every distribution that is installed, hundreds of them where
# models are served, and that while an engine is opened, on the loop's thread.
_known: dict[str, EntryPoint] = {}


def _look() -> dict[str, EntryPoint]:
    _known.update(_BUILT_IN)
    _known.update({entry.name: entry for entry in _installed()})
    return _known


def _installed() -> Iterable[EntryPoint]:
    try:
        return entry_points(group=GROUP)
    except Exception as error:
        # A file of every distribution is read, and whatever is wrong with one of them comes out here.
        why = f"{type(error).__name__}: {error}"
        logger.warning(
            "no drivers of other packages were looked for: entry points of some package are unreadable: %s", why
        )
        return ()


def names() -> list[str]:
    """Names of all drivers that are installed, whether or not they can be loaded here."""
    return sorted(_look())


def load(name: str) -> Any:
    """The capsule with the driver's table.

    :raises DriverLoadError: if there is no such driver, or its module cannot be imported, whatever it raises, or does not fit
        this core.
    """
    entry = _known.get(name) or _look().get(name)
    if entry is None:
        raise DriverLoadError(f"there is no driver {name!r}; installed: {', '.join(sorted(_known))}")
    try:
        capsule = entry.load()
    except (Exception, SystemExit) as error:
        raise DriverLoadError(
            f"driver {name!r} ({entry.value}) could not be imported: {type(error).__name__}: {error}; reinstall the package "
            "that provides it"
        ) from error
    problem = table_problem(capsule)
    if problem is not None:
        raise DriverLoadError(f"driver {name!r} ({entry.value}) cannot be used: {problem}")
    return capsule


def resolve(name: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The table to open for driver `name`, its wrapper's where `options` names one, and the options for it.

    :raises DriverLoadError: as `load`.
    :raises InvalidArgumentError: if what the options name is no string.
    """
    rest = dict(options)
    wrapper = rest.pop(WRAPPER, None)
    if wrapper is None:
        return load(name), rest
    if not isinstance(wrapper, str):
        raise InvalidArgumentError(f"driver {name!r}: option {WRAPPER!r} must be the name of a driver, not {wrapper!r}")
    return load(wrapper), {**rest, "driver": load(name)}


def available() -> list[DriverInfo]:
    """What ``hixl-async info`` shows: every driver with its capabilities, or the reason why it is missing."""
    rows = []
    for name in names():
        try:
            bits = table_capabilities(load(name))
        except DriverLoadError as error:
            rows.append(DriverInfo(name, (), str(error)))
        else:
            rows.append(DriverInfo(name, tuple(word for bit, word in CAPABILITIES.items() if bits & bit), None))
    return rows
