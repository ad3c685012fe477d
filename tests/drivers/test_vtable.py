"""The driver's table, and this suite's mirror of the header."""

from __future__ import annotations

import ctypes as c
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import vtable as vt

INCLUDE = Path(__file__).resolve().parents[2] / "hixl_async" / "include"


def test_table(driver: vt.CDriver) -> None:
    assert driver.abi == 1
    assert driver.size >= vt.CDriver.start.offset
    assert driver.name
    assert driver.caps >> len(vt.CAPS) == 0, "a capability that the header does not know"
    required = set(vt.FUNCTIONS) - {"mem_alloc", "mem_register", "cancel", "link_fence", *vt.OPTIONAL}
    required |= {"mem_alloc"} if vt.has(driver, "ALLOC") else set()
    required |= {"mem_register"} if vt.has(driver, "REGISTER") else set()
    required |= {"cancel"} if vt.has(driver, "CANCEL") else set()
    missing = [name for name in required if not c.cast(getattr(driver, name), c.c_void_p).value]
    assert not missing


def test_mirror_equals_header(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to ask about the header")
    lines = ['#include "hxa_driver.h"', "#include <stdio.h>", "int main(void) {"]
    expected = []
    for name, mirror in vt.STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {c.sizeof(mirror)}")
        for field, *_ in mirror._fields_:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
            )
            expected.append(f"{name}.{field} {getattr(mirror, field).offset} {getattr(mirror, field).size}")
    constants = {f"HXA_E_{name}": i for i, name in enumerate(vt.STATUS) if i}
    constants |= {f"HXA_CAP_{name}": 1 << i for i, name in enumerate(vt.CAPS)}
    constants |= {"HXA_DRIVER_ABI": 1, "HXA_DONE": vt.DONE, "HXA_PENDING": vt.PENDING, "HXA_COMPLETED": vt.COMPLETED}
    constants |= {
        "HXA_RELEASED": vt.RELEASED,
        "HXA_READ": vt.READ,
        "HXA_WRITE": vt.WRITE,
        "HXA_RIGHT_READ": vt.MAY_READ,
    }
    constants |= {"HXA_RIGHT_WRITE": vt.MAY_WRITE, "HXA_KIND_HOST": vt.HOST, "HXA_KIND_DEVICE": vt.DEVICE}
    constants |= {"HXA_DRIVER_MIN_SIZE": vt.CDriver.start.offset, "HXA_EVENT_MESSAGE": vt.MESSAGE}
    constants |= {"HXA_MESSAGE_BYTES": vt.MESSAGE_BYTES}
    constants |= {
        "HXA_METADATA_BYTES": vt.METADATA_BYTES,
        "HXA_METADATA_FDS": vt.METADATA_FDS,
        "HXA_EVENT_NOTE": vt.NOTE,
    }
    constants |= {"HXA_EVENT_SIGNAL": vt.SIGNAL, "HXA_EVENT_LINK_DOWN": vt.LINK_DOWN, "HXA_EVENT_LOG": vt.LOG}
    for name, value in constants.items():
        lines.append(f'printf("{name} %lld\\n", (long long){name});')
        expected.append(f"{name} {value}")
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run([compiler, f"-I{INCLUDE}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed == expected


def test_unknown_options_are_refused(driver: vt.CDriver, driver_options: dict[str, str], leakless: None) -> None:
    """By open, with the option's name; or by a library that gets them, at start, after a warning with the name."""
    made: list[vt.Instance] = []
    with pytest.raises(vt.DriverError) as caught:
        made.append(vt.Instance(driver, driver_options | {"no_such_option": "1"}))
        made[0].start()
    assert caught.value.status == vt.INVALID
    assert "no_such_option" in "\n".join([str(caught.value), *(made[0].logs if made else ())])
    for instance in made:
        instance.close()


def test_limits(open_instance) -> None:
    limits = open_instance().limits()
    assert limits.descriptors >= 1
    assert limits.alignment >= 1
    assert limits.note_bytes >= 1024 or not vt.has(open_instance.driver, "NOTIFY")


def test_error_texts(driver: vt.CDriver) -> None:
    texts = [driver.error_text(status, native) for status in range(len(vt.STATUS)) for native in (0, 1, 3, 14)]
    assert all(texts)
    assert len({driver.error_text(status, 0) for status in range(len(vt.STATUS))}) == len(vt.STATUS)
    assert driver.error_text(99, 0)
    assert driver.error_text(vt.SYSTEM, 99999)
