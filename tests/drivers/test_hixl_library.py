"""Finding libcann_hixl.so, and its binary interface."""

from __future__ import annotations

import ctypes as c
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import vtable as vt
from conftest import hixlsim
from hixl_rig import (
    ROOT,
    SOURCES,
    Sim,
    backend_fixture,  # noqa: F401
    opened_fixture,  # noqa: F401
    sim_fixture,  # noqa: F401
    world_fixture,  # noqa: F401
)

# ---- loading ---------------------------------------------------------------------------------------------------------
MISSING = """
import ctypes as c, sys
import vtable as vt

table = vt.load("hixl")
handle = c.c_void_p()
sink = vt.CSink(None, vt.POST(lambda *_: None), vt.EVENT(lambda *_: None))
for room in (4096, 100):
    error = c.create_string_buffer(room)
    assert table.open(None, 0, c.byref(sink), c.byref(handle), error, room) == -vt.UNSUPPORTED
    print(error.value.decode(), end="===")
"""


def test_a_missing_library_names_every_place_and_the_remedy(tmp_path: Path) -> None:
    """In a process of its own, because the loader finds libraries that other tests have loaded."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND")}
    environment |= {"ASCEND_HOME_PATH": str(tmp_path / "kit"), "HOME": "/h"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", MISSING], env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    text, short, _ = done.stdout.split("===")
    for place in (
        str(tmp_path / "kit" / "lib64"),
        "/usr/local/Ascend/cann/lib64",
        "/h/Ascend/ascend-toolkit/latest/lib64",
    ):
        assert f"{place}/libcann_hixl.so" in text
    assert "libcann_hixl.so: cannot open shared object file" in text  # the loader's own path
    assert "install CANN" in text
    assert "install CANN" in short, "the remedy comes before the list"


def test_a_file_that_is_not_a_library(tmp_path: Path) -> None:
    (tmp_path / "libcann_hixl.so").write_bytes(b"nothing of the kind")
    with pytest.raises(vt.DriverError, match="Failed:.*libcann_hixl.so"):
        vt.Instance(vt.load("hixl"), {"library": str(tmp_path)})


def test_a_library_without_required_symbols(tmp_path: Path) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no C++ compiler to make a library with")
    source = tmp_path / "empty.cpp"
    source.write_text("namespace ge { struct AscendString { AscendString(const char *, unsigned long); }; }\n"
                      "ge::AscendString::AscendString(const char *, unsigned long) {}\n")  # fmt: skip
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libcann_hixl.so")], check=True)
    with pytest.raises(vt.DriverError, match="has no AscendString.*CANN 8.5.0 or later"):
        vt.Instance(vt.load("hixl"), {"library": str(tmp_path)})


@pytest.mark.parametrize("where", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "root", "folder", "file"])
def test_where_the_library_is_found(sim: Sim, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    options = {}
    if where.startswith("ASCEND"):
        monkeypatch.setenv(where, str(sim.root))
    else:
        lib = sim.root / "lib64"
        options["library"] = str({"root": sim.root, "folder": lib, "file": lib / "libcann_hixl.so"}[where])
    vt.Instance(vt.load("hixl"), options).close()


@pytest.mark.parametrize("part", ["batch", "connect_async", "capability"])
def test_a_library_from_before_2026_lacks_parts(part: str) -> None:
    """In a process of its own: two libraries of one name in one process would share what is global in them."""
    options = {"library": str(hixlsim(without=(part,))), "backend": "cs"}
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import vtable as vt, conftest\n"
        f"world = conftest.World(*vt.join(*(vt.Instance(vt.load('hixl'), {options!r}) for _ in range(2))))\n"
        "for i in range(50): world.write(i, i, 1000)\n"
        "world.write(0, 0, world.size).ok(world.left, world.right)\n"
        "world.left.instance.until(lambda: not world.left.instance.ops, world.left)\n"
        "assert world.here.view == world.there.view\n"
        "print(world.left.vt.about(world.left.instance.handle).decode())\n"
        "for link in (world.left, world.right): link.instance.close()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    missing = {"batch": "batch query: no", "connect_async": "connect: no", "capability": "no GetCapability"}
    assert missing[part] in run.stdout


# ---- the binary interface --------------------------------------------------------------------------------------------
def test_symbols_are_those_of_the_table() -> None:
    """The real library exports each name that is looked up, by the table that the simulation is made from."""
    source = (SOURCES / "library.cpp").read_text()
    wanted = set(re.findall(r'"(_Z\w+)"', re.sub(r'"\s*\n\s*"', "", source)))
    lines = (ROOT / "tests" / "hixlsim" / "symbols.txt").read_text().splitlines()
    exported = {line.split()[0] for line in lines if line and not line.startswith("#")}
    texts = {name for name in wanted if "2ge12AscendString" in name and "4hixl" not in name}
    assert len(wanted) >= 19
    assert wanted - texts <= exported
    metadef = c.CDLL(str(hixlsim() / "lib64" / "libmetadef.so"))
    assert texts == {"_ZN2ge12AscendStringC1EPKcm", "_ZNK2ge12AscendString9GetStringEv"}
    assert all(hasattr(metadef, name) for name in texts)


def test_transfer_sync_cannot_be_called() -> None:
    """It would hold the lock of its link, or, on one back-end, of all links; functions of HIXL are looked up by name only."""
    code = Path(importlib.import_module("hixl_async.drivers._hixl").__file__).read_bytes()
    assert b"13TransferAsyncERKN2ge" in code
    assert b"TransferSync" not in code


@pytest.mark.parametrize("abi", [0, 1])
def test_sizes_and_offsets_under_both_abis(tmp_path: Path, abi: int) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no C++ compiler to ask")
    source = tmp_path / "layout.cpp"
    expected = {
        "MemDesc": 144, "TransferOpDesc": 24, "TransferArgs": 128, "GetTransferStatusArgs": 128, "TransferResult": 128,
        "NotifyDesc": 32, "Hixl": 8, "Text": 16, "MemType": 4, "TransferOp": 4, "TransferStatus": 4, "AsyncConnectStatus": 4,
        "FeatureType": 4, "Status": 4,
    }  # fmt: skip
    fields = {
        "MemDesc": {"len": 8, "reserved": 16},
        "TransferOpDesc": {"remote_addr": 8, "len": 16},
        "TransferArgs": {"reserved": 8},
        "GetTransferStatusArgs": {"skip_waiting": 4, "reserved": 5},
        "TransferResult": {"user_data": 8, "status": 16, "reserved": 20},
        "NotifyDesc": {"notify_msg": 16},
    }
    lines = [f'#include "{SOURCES}/abi.hpp"', "using namespace hx::abi;"]
    lines += [f'static_assert(sizeof({name}) == {size}, "{name}");' for name, size in expected.items()]
    lines += [
        f'static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");'
        for name, offsets in fields.items()
        for field, offset in offsets.items()
    ]
    lines.append('static_assert(alignof(GetTransferStatusArgs) == 4 && alignof(TransferResult) == 8, "alignment");')
    source.write_text("\n".join(lines))
    command = [
        compiler,
        "-std=c++17",
        "-Wno-invalid-offsetof",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        "-fsyntax-only",
        str(source),
    ]
    subprocess.run(command, check=True)
