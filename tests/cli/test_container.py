"""The memory limit of a container, read from folders that stand for ``/``."""

from __future__ import annotations

from pathlib import Path

import pytest

from hixl_async.cli.container import memory_limit

MIB = 1 << 20
NAMES = {1: "memory.limit_in_bytes", 2: "memory.max"}
both = pytest.mark.parametrize("version", [1, 2])


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def mount(root: Path, version: int, own: str, top: str = "/") -> str:
    where = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    write(root, "proc/self/cgroup", f"0::{own}" if version == 2 else f"3:cpu:/x\n2:memory:{own}\n0::/y")
    about = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
    write(
        root,
        "proc/self/mountinfo",
        f"31 23 0:28 / / rw - ext4 /dev/a rw\n32 23 0:29 {top} /{where} rw,nosuid shared:9 - {about}",
    )
    return where


@both
def test_the_lowest_limit_of_all_levels_counts(tmp_path: Path, version: int) -> None:
    where = mount(tmp_path, version, "/pod/container")
    write(tmp_path, f"{where}/pod/container/{NAMES[version]}", 300 * MIB)
    write(tmp_path, f"{where}/pod/{NAMES[version]}", 200 * MIB)
    assert memory_limit(str(tmp_path)) == (200 * MIB, f"/{where}/pod/{NAMES[version]}")


@both
@pytest.mark.parametrize(("own", "top"), [("/", "/"), ("/docker/01", "/docker/01"), ("/elsewhere", "/docker/01")])
def test_a_container_that_sees_its_own_part(tmp_path: Path, version: int, own: str, top: str) -> None:
    where = mount(tmp_path, version, own, top)
    write(tmp_path, f"{where}/{NAMES[version]}", 200 * MIB)
    assert memory_limit(str(tmp_path)) == (200 * MIB, f"/{where}/{NAMES[version]}")


@both
@pytest.mark.parametrize("unlimited", ["max", "9223372036854771712"])
def test_without_a_limit(tmp_path: Path, version: int, unlimited: str) -> None:
    write(tmp_path, f"{mount(tmp_path, version, '/')}/{NAMES[version]}", unlimited)
    assert memory_limit(str(tmp_path)) is None


def test_without_cgroups(tmp_path: Path) -> None:
    assert memory_limit(str(tmp_path)) is None
