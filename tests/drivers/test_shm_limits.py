"""The memory that the shm driver considers available: the machine's, and that of memory cgroups of both versions.

The C file is compiled by itself and reads a folder of the test in place of ``/``.
"""

from __future__ import annotations

import ctypes as c
import errno
import os
import resource
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vtable as vt

pytestmark = pytest.mark.only("shm")
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "hixl_async/drivers/shm"
MEMINFO = "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nSwapFree: 1048576 kB\n"
MACHINE = 5 << 30  # what that leaves


class Room(c.Structure):
    _fields_ = (("left", c.c_uint64), ("limit", c.c_uint64), ("source", c.c_char * 256))


@pytest.fixture(scope="module")
def memory_room(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Room]:
    library = tmp_path_factory.mktemp("limits") / "limits.so"
    compiler = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
    files = [str(SOURCES / name) for name in ("limits.c", "procfs.c")]
    flags = ["-shared", "-fPIC", "-std=gnu11", "-DSHM_INTERNAL=", f"-I{ROOT / 'hixl_async/include'}"]
    subprocess.run([compiler, *flags, *files, "-o", str(library)], check=True)
    call = c.CDLL(str(library)).shm_memory_room
    call.restype, call.argtypes = Room, [c.c_char_p]
    return lambda root: call(os.fsencode(root))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def mounted(root: Path, version: int, own: str, top: str = "/") -> str:
    """Mount a hierarchy as a process in cgroup `own` sees it, below `top`; return the folder."""
    where = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/memory"
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
    other = "31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" if version == 1 else ""
    write(root, "proc/self/cgroup", f"3:cpu:/elsewhere\n2:memory:{own}\n" if version == 1 else f"0::{own}\n")
    write(root, "proc/self/mountinfo", f"{other}32 23 0:29 {top} {where} rw,nosuid shared:9 - {kind}\n")
    return where.removeprefix("/")


def limit(
    root: Path, folder: str, version: int, most: int | str, used: int = 0, cached: int = 0, swap: int = 0
) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    write(root, f"{folder}/{names[0]}", f"{most}\n")
    write(root, f"{folder}/{names[1]}", f"{used}\n")
    prefix = "total_" if version == 1 else ""
    write(root, f"{folder}/memory.stat", f"active_anon 1\n{prefix}active_file {cached}\n{prefix}inactive_file 0\n")
    if version == 1:
        write(root, f"{folder}/memory.memsw.limit_in_bytes", f"{int(most) + swap}\n")
        write(root, f"{folder}/memory.memsw.usage_in_bytes", f"{used}\n")
    else:
        write(root, f"{folder}/memory.swap.max", f"{swap}\n")
        write(root, f"{folder}/memory.swap.current", "0\n")


both = pytest.mark.parametrize("version", [1, 2])


def test_the_machine_alone(memory_room: Callable[[Path], Room], root: Path) -> None:
    room = memory_room(root)
    assert (room.left, room.limit, room.source) == (MACHINE, (1 << 64) - 1, b"/proc/meminfo")


def test_nothing_is_known_without_proc(memory_room: Callable[[Path], Room], tmp_path: Path) -> None:
    assert memory_room(tmp_path).left == (1 << 64) - 1


@both
def test_a_container_with_a_namespace_of_its_own(memory_room: Callable[[Path], Room], root: Path, version: int) -> None:
    limit(root, mounted(root, version, "/"), version, 200 * MIB, used=50 * MIB)
    room = memory_room(root)
    assert (room.left, room.limit) == (150 * MIB, 200 * MIB)
    assert room.source.endswith(b"/memory.max" if version == 2 else b"/memory.limit_in_bytes")


@both
def test_a_container_that_sees_a_part_of_the_hierarchy(
    memory_room: Callable[[Path], Room], root: Path, version: int
) -> None:
    limit(root, mounted(root, version, "/docker/0123", top="/docker/0123"), version, 200 * MIB)
    assert memory_room(root).left == 200 * MIB


@both
def test_the_tightest_of_all_levels(memory_room: Callable[[Path], Room], root: Path, version: int) -> None:
    where = mounted(root, version, "/pod/container")
    limit(root, f"{where}/pod/container", version, 900 * MIB)
    limit(root, f"{where}/pod", version, 1000 * MIB, used=800 * MIB)
    room = memory_room(root)
    assert (room.left, room.limit) == (200 * MIB, 1000 * MIB)
    limit(root, f"{where}/pod/container", version, 100 * MIB)
    assert memory_room(root).left == 100 * MIB


@both
def test_what_the_kernel_gives_up_and_swap_count(memory_room: Callable[[Path], Room], root: Path, version: int) -> None:
    where = mounted(root, version, "/")
    limit(root, where, version, 200 * MIB, used=180 * MIB, cached=100 * MIB, swap=50 * MIB)
    assert memory_room(root).left == (200 - 80 + 50) * MIB


@both
@pytest.mark.parametrize("unlimited", ["max", "9223372036854771712"])
def test_without_a_limit(memory_room: Callable[[Path], Room], root: Path, version: int, unlimited: str) -> None:
    where = mounted(root, version, "/")
    limit(root, where, version, 1, used=4096)
    write(root, f"{where}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}", unlimited)
    assert memory_room(root).left == MACHINE


# ---- what is said ----------------------------------------------------------------------------------------------------


def said(instance: vt.Instance, error: vt.DriverError) -> str:
    return instance.vt.error_text(error.status, error.native).decode()


def test_too_much_memory_and_too_many_files_are_distinguished(open_instance) -> None:
    instance = open_instance()
    with pytest.raises(vt.DriverError) as caught:
        instance.alloc(1 << 40)
    assert (caught.value.status, caught.value.native) == (vt.NOMEM, errno.ENOMEM)
    assert "ENOMEM" in said(instance, caught.value)
    assert "MiB" in said(instance, caught.value)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        for call in (lambda: instance.alloc(4096), lambda: instance.link(99)):
            with pytest.raises(vt.DriverError) as caught:
                call()
            assert (caught.value.status, caught.value.native) == (vt.NOMEM, errno.EMFILE)
            for part in ("EMFILE", "RLIMIT_NOFILE is 3 ", "ulimit -n", str(limits[1])):
                assert part in said(instance, caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


ALLOCATE = """
import sys
sys.path.insert(0, sys.argv[1])
import vtable as vt
with open(sys.argv[2], "w") as members:
    members.write("0")
with vt.Instance(vt.load("shm")) as instance:
    instance.alloc(32 << 20)
    try:
        instance.alloc(512 << 20)
    except vt.DriverError as error:
        print(instance.vt.error_text(error.status, error.native).decode())
"""


@pytest.fixture
def real_cgroup() -> Iterator[Path]:
    """A cgroup of 200 MiB, where this process may make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            made = Path(f"/sys/fs/cgroup/memory{own}/hixl-async-test-{os.getpid()}")
            name = "memory.limit_in_bytes"
        elif not controllers:
            made = Path(f"/sys/fs/cgroup{own}/hixl-async-test-{os.getpid()}")
            name = "memory.max"
        else:
            continue
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / name).write_text(str(200 * MIB))
        except OSError:
            made.rmdir()
            continue
        yield made
        made.rmdir()
        return
    pytest.skip("makes a memory cgroup, which is not permitted here")


def test_memory_that_never_fits_is_refused_and_kills_nothing(real_cgroup: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE, os.path.dirname(__file__), str(real_cgroup / "cgroup.procs")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done
    assert "200 MiB that the container may use" in done.stdout, done
