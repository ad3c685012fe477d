"""The memory limit of a container, from the memory cgroups of this process, of either version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["memory_limit"]

#: The name of the file with the limit, by the type of file system of a version of cgroups.
_LIMITS = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}
#: The least number by which version 1 says that there is no limit.
_NO_LIMIT = 1 << 62


def memory_limit(root: str = "/") -> tuple[int, str] | None:
    """Return the least limit, in bytes, and the file that has it; None if there is none.

    The driver for shared memory reads the same files when it allocates (``drivers/shm/limits.c``).

    :param root: the folder that takes the place of ``/``, for tests.
    """
    found = []
    for file in _limit_files(Path(root)):
        with contextlib.suppress(OSError, ValueError):  # "max"
            found.append((int(file.read_text()), f"/{file.relative_to(root)}"))
    least = min(found, default=None)
    return least if least is not None and least[0] < _NO_LIMIT else None


def _limit_files(root: Path) -> Iterator[Path]:
    """Yield the limit files of our cgroup and of all above it, as far as they are mounted here."""
    paths = dict(_own_paths(root))
    for kind, top, mounted in _mounts(root):
        if kind in paths:
            path = paths[kind]
            # The mount may show only a part of the hierarchy, such as the container's own.
            inside = path.relative_to(top) if path.is_relative_to(top) else Path()
            for folder in (inside, *inside.parents):
                yield root / mounted.relative_to("/") / folder / _LIMITS[kind]


def _own_paths(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield our cgroup in each hierarchy that can limit memory."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "cgroup2", Path(path)
        elif "memory" in controllers.split(","):
            yield "cgroup", Path(path)


def _mounts(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield the type of each mounted hierarchy, the part of it that is mounted, and the mount point."""
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, about = line.partition(" - ")
        kind, *_, options = about.split()
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            _, _, _, top, mounted, *_ = place.split()
            yield kind, Path(top), Path(mounted)


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
