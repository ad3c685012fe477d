"""Driver tables with changes, as capsules that engines take."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hixl_async import drivers

sys.path.insert(0, str(Path(__file__).resolve().parent / "drivers"))
import vtable as vt

CAPSULE = b"hixl_async.driver.v1"

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype, _capsule_of.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

# A capsule keeps no more than an address.
_kept: list[Any] = []


def table(
    name: str,
    *,
    lacks: tuple[str, ...] = (),
    size: int | None = None,
    rest: bytes = b"",
    **members: Callable[..., Any],
) -> Any:
    """Return a copy of the table of driver `name`.

    :param lacks: capabilities that it does not have, by their names in ``vtable.CAPS``.
    :param size: the size that it claims, as an older driver would.
    :param rest: the bytes in memory behind that size.
    :param members: functions that replace its own.
    """
    made = vt.CDriver.from_buffer_copy(vt.CDriver.from_address(_pointer_of(drivers.load(name), CAPSULE)))
    for cap in lacks:
        made.caps &= ~(1 << vt.CAPS.index(cap))
    for member, function in members.items():
        setattr(made, member, type(getattr(made, member))(function))
    if size is not None:
        made.size = size
        ctypes.memmove(ctypes.addressof(made) + size, rest, min(len(rest), ctypes.sizeof(made) - size))
    _kept.append(made)
    return _capsule_of(ctypes.addressof(made), CAPSULE, None)
