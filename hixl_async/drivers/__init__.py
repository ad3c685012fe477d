"""The registry of drivers, which are loaded on demand; those of other packages are found by entry points."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.link import CAPABILITIES, table_capabilities, table_problem
from ..core.log import Log
from ..display import shown
from ..errors import DriverLoadError, InvalidArgumentError
from ..types import DriverInfo

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "WRAPPER", "available", "load", "names", "resolve"]

log = Log("hixl_async")

#: The entry-point group; a value names a module's capsule, e.g. ``"my_package._fabric:DRIVER"``.
GROUP = "hixl_async.drivers"

#: The option that names a driver to wrap another: ``drivers={"shm": {"wrapper": "faulty", ...}}``.  The wrapped one keeps its
#: name, by which peers find it, and the other options are passed to the wrapper.
WRAPPER = "wrapper"


class _BuiltIn(NamedTuple):
    """A driver of the package itself, with what is used of an entry point."""

    value: str

    def load(self) -> Any:
        return importlib.import_module(self.value.partition(":")[0]).DRIVER


# They need no search, which opens a file of every installed distribution, of which there may be hundreds, on the loop's thread
# while an engine is opened.
_BUILT_IN = {name: _BuiltIn(f"hixl_async.drivers._{name}:DRIVER") for name in ("shm", "faulty", "hixl")}

# A cache, for the same reason.
_known: dict[str, _BuiltIn | EntryPoint] = dict(_BUILT_IN)


def _look() -> dict[str, _BuiltIn | EntryPoint]:
    _known.update({entry.name: entry for entry in _installed() if entry.name not in _BUILT_IN})
    return _known


def _installed() -> Iterable[EntryPoint]:
    # It takes 30 ms, and a program that uses no driver of another package does without.
    from importlib.metadata import entry_points

    try:
        return entry_points(group=GROUP)
    except Exception as error:
        # A file of every distribution is read, and any of them may be broken.
        why = f"{type(error).__name__}: {error}"
        log.warning(
            "drivers of other packages are not available: the entry points of a package are unreadable: %s", why
        )
        return ()


def names() -> list[str]:
    """Return the names of all drivers that are installed, also those that cannot be loaded here."""
    return sorted(_look())


def load(name: str) -> Any:
    """Return the capsule with a driver's table.

    :raises DriverLoadError: if there is no such driver, its module cannot be imported, or its table does not fit this core.
    """
    entry = _known.get(name) or _look().get(name)
    if entry is None:
        raise DriverLoadError(f"there is no driver {name!r}; installed: {', '.join(sorted(_known))}")
    try:
        capsule = entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise DriverLoadError(
            f"driver {name!r} ({entry.value}) could not be imported: {type(error).__name__}: {error}; reinstall the package "
            "that provides it"
        ) from error
    problem = table_problem(capsule)
    if problem is not None:
        raise DriverLoadError(f"driver {name!r} ({entry.value}) cannot be used: {problem}")
    return capsule


def resolve(name: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the table to open for a driver, or that of the wrapper that `options` names, and the options for it.

    :raises DriverLoadError: if one of the two cannot be loaded.
    :raises InvalidArgumentError: if the name of the wrapper is not a string.
    """
    rest = dict(options)
    wrapper = rest.pop(WRAPPER, None)
    if wrapper is None:
        return load(name), rest
    if not isinstance(wrapper, str):
        raise InvalidArgumentError(
            f"driver {name!r}: option {WRAPPER!r} must be the name of a driver, not {shown(wrapper)}"
        )
    return load(wrapper), {**rest, "driver": load(name)}


def available() -> list[DriverInfo]:
    """Return every driver with its capabilities, or the reason why it cannot be loaded, for ``hixl-async info``."""
    rows = []
    for name in names():
        try:
            bits = table_capabilities(load(name))
        except DriverLoadError as error:
            rows.append(DriverInfo(name, (), str(error)))
        else:
            rows.append(DriverInfo(name, tuple(word for bit, word in CAPABILITIES.items() if bits & bit), None))
    return rows
