"""The shared-memory driver under a harmless fault plan, as a module that the conformance suite can load as a driver:

``pytest tests/drivers --driver=tests/testing/faulty_shm.py``

The plan is FAULTY_PLAN of the environment, a JSON spec; by default half of all work is finished by another thread.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
from pathlib import Path

from hixl_async.drivers._faulty import DRIVER as FAULTY
from hixl_async.drivers._shm import DRIVER as SHM

from hixl_async.testing import FaultPlan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "drivers"))
import vtable as vt

CAPSULE = b"hixl_async.driver.v1"

spec = os.environ.get("FAULTY_PLAN")
plan = FaultPlan.parse(json.loads(spec)) if spec else FaultPlan(1).pending(chance=0.5)

get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

inner = get_pointer(SHM, CAPSULE)
faulty = vt.CDriver.from_address(get_pointer(FAULTY, CAPSULE))
table = vt.CDriver.from_buffer_copy(faulty)
table.name = b"faulty(shm)"
table.caps = vt.CDriver.from_address(inner).caps | 1 << vt.CAPS.index("CANCEL")


# Pointers pass through as they are; ctypes would turn a char * into a copy.
Open = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 3, ctypes.c_size_t)
faulty_open = ctypes.cast(faulty.open, Open)


@Open
def open_wrapped(options: int, n: int, sink: int, out: int, error: int, error_len: int) -> int:
    given = (vt.COption * n).from_address(options) if n else ()
    array = (vt.COption * (n + 2))()
    array[0].key, array[0].value = b"driver", hex(inner).encode()
    array[1].key, array[1].value = b"control", os.fspath(plan._block).encode()
    for row, option in zip(array[2:], given, strict=True):
        row.key, row.value = b"inner." + option.key, option.value
    return faulty_open(ctypes.addressof(array), n + 2, sink, out, error, error_len)


table.open = ctypes.cast(open_wrapped, type(table.open))
# The loader of this file keeps only the capsule's address; the table must outlive everything.
atexit.register(lambda: (table, open_wrapped, plan))
DRIVER = new_capsule(ctypes.addressof(table), CAPSULE, None)
