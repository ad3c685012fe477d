"""Compile the simulated libraries into a folder laid out like a CANN toolkit: python tests/hixlsim/build.py [FOLDER]."""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
DEFAULT = HERE.parents[1] / "build" / "hixlsim"

# Everything is hidden but what the version script names.
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-pthread"]
LIBRARIES = {
    "libmetadef.so": ["ascend_string"],
    "libascendcl.so": ["acl"],
    "libcann_hixl.so": [
        "settings",
        "json",
        "options",
        "wire",
        "memory",
        "stream",
        "engine",
        "comm",
        "cs",
        "fab",
        "connect_pool",
        "hixl",
    ],
}
NEEDS = {
    "libcann_hixl.so": ["libmetadef.so", "libascendcl.so"],
    "libhixlprobe.so": ["libcann_hixl.so", "libmetadef.so"],
}

# The parts that a library of before mid-2026 lacks.
PARTS = ("batch", "connect_async", "capability")


def compiler() -> list[str]:
    return os.environ.get("CXX", "g++").split()


def symbols() -> dict[str, str]:
    """Return each exported name with the part that it belongs to, or ""."""
    lines = [line.split() for line in (HERE / "symbols.txt").read_text().splitlines() if not line.startswith("#")]
    return {line[0]: line[1] if len(line) > 1 else "" for line in lines}


def digest(flags: list[str]) -> str:
    parts = [HERE / "build.py", HERE / "symbols.txt", *sorted(SOURCES.iterdir())]
    told = hashlib.sha256(" ".join(compiler() + flags).encode())
    for part in parts:
        told.update(part.name.encode() + b"\0" + part.read_bytes())
    return told.hexdigest()


def run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def compile_all(objects: Path, flags: list[str]) -> None:
    objects.mkdir(parents=True, exist_ok=True)
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.hpp")))

    def one(source: Path) -> None:
        key = hashlib.sha256(" ".join(compiler() + flags).encode() + headers + source.read_bytes()).hexdigest()
        stamp = objects / f"{source.stem}.key"
        if not stamp.exists() or stamp.read_text() != key:
            run(*compiler(), *flags, "-c", source, "-o", objects / f"{source.stem}.o")
            stamp.write_text(key)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, sorted(SOURCES.glob("*.cpp"))))


def link(folder: Path, objects: Path, flags: list[str], without: tuple[str, ...]) -> None:
    lib = folder / "lib64"
    lib.mkdir(parents=True, exist_ok=True)
    script = objects / "exported.map"
    names = [name for name, part in symbols().items() if part not in without]
    script.write_text("{ global: " + "".join(f"{name}; " for name in names) + "hixlsim_*; local: *; };\n")
    for name, units in {**LIBRARIES, "libhixlprobe.so": ["probe"]}.items():
        extra = [f"-Wl,--version-script={script}"] if name == "libcann_hixl.so" else []
        if name == "libhixlprobe.so" and without:
            continue  # it uses all
        needed = [f"-l:{other}" for other in NEEDS.get(name, [])]
        run(
            *compiler(), *flags, "-shared", f"-Wl,-soname,{name}", *extra, *(objects / f"{unit}.o" for unit in units),
            f"-L{lib}", "-Wl,-rpath,$ORIGIN", *needed, "-ldl", "-o", lib / name,
        )  # fmt: skip
    alias = lib / "libacl_rt.so"
    alias.unlink(missing_ok=True)
    alias.symlink_to("libascendcl.so")


def build(path: Path | str | None = None, without: tuple[str, ...] = (), sanitize: str = "") -> Path:
    """Return the toolkit's root, built if anything changed; `without` some PARTS it is an older library."""
    flags = [*FLAGS, *([f"-fsanitize={sanitize}"] if sanitize else [])]
    suffix = "".join(f"-no-{part}" for part in sorted(without)) + (f"-{sanitize}" if sanitize else "")
    folder = Path(path).resolve() if path is not None else DEFAULT / f"toolkit{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    # Several test processes may want it at once, and the kinds share their objects.
    with open((folder if path is not None else DEFAULT) / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        key = digest([*flags, *sorted(without)])
        stamp = folder / ".built"
        if not stamp.exists() or stamp.read_text() != key:
            shared = (
                folder / ".objects" if path is not None else DEFAULT / f"objects{f'-{sanitize}' if sanitize else ''}"
            )
            compile_all(shared, flags)
            link(folder, shared, flags, tuple(without))
            info = folder / "share" / "info" / "hixl" / "version.info"
            info.parent.mkdir(parents=True, exist_ok=True)
            # A reader must not take it for the version of the real one.
            info.write_text(f"Version={'9.0.0' if without else '9.2.0'}-simulated\n")
            stamp.write_text(key)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--without", action="append", choices=PARTS, default=[])
    parser.add_argument("--sanitize", default="", help="thread, address or undefined")
    told = parser.parse_args()
    print(build(told.folder, tuple(told.without), told.sanitize))


if __name__ == "__main__":
    sys.exit(main())
