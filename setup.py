"""Build the core and the drivers; everything else about the package is in pyproject.toml.

Switches, all read from the environment:

``HIXL_ASYNC_DEBUG=1``       assertions, ``-O0 -g`` and Cython line tracing
``HIXL_ASYNC_SANITIZE=...``  ``address`` or ``thread``: compile and link everything with that sanitizer
``HIXL_ASYNC_ANNOTATE=1``    Cython's annotated HTML beside the generated C

Each combination builds in a folder of its own below ``build/``, so that objects of one are never linked into another.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("HIXL_ASYNC_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("HIXL_ASYNC_SANITIZE", "")
ANNOTATE = os.environ.get("HIXL_ASYNC_ANNOTATE", "") not in ("", "0")

SANITIZERS = {"": [], "address": ["-fsanitize=address,undefined"], "thread": ["-fsanitize=thread"]}
if SANITIZE not in SANITIZERS:
    raise SystemExit(f"HIXL_ASYNC_SANITIZE={SANITIZE!r}: choose 'address' or 'thread', or unset it")

VARIANT = "-".join(["debug" if DEBUG else "release", *filter(None, [SANITIZE])])
INCLUDE = ["hixl_async/include"]
HEADERS = sorted(glob("hixl_async/include/*.h"))
PXD = ["hixl_async/_core.pxd", *sorted(glob("hixl_async/core/*.pxd"))]
OPTIMISE = ["-O0", "-g", "-DHXA_DEBUG=1"] if DEBUG else ["-O3", "-g1"]
SANITIZER = [*SANITIZERS[SANITIZE], *(["-fno-omit-frame-pointer", "-g", "-O1"] if SANITIZE else [])]
COMPILE = ["-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", *OPTIMISE, *SANITIZER]
LINK = ["-pthread", *SANITIZERS[SANITIZE]]
# Generated code trips over warnings that are meant for code written by hand.
GENERATED = ["-Wno-unused-parameter", "-Wno-unused-function", "-Wno-missing-field-initializers", "-Wno-sign-compare"]


def driver(name: str) -> Extension:
    """Return the extension of one driver: ``_name.c`` or ``.cpp``, and the sources in the folder ``name/`` if there is one."""
    folder = f"hixl_async/drivers/{name}"
    suffix, standard = (
        ("cpp", "-std=gnu++17") if os.path.exists(f"hixl_async/drivers/_{name}.cpp") else ("c", "-std=gnu11")
    )
    return Extension(
        f"hixl_async.drivers._{name}",
        sources=[f"hixl_async/drivers/_{name}.{suffix}", *sorted(glob(f"{folder}/*.{suffix}"))],
        depends=[*HEADERS, *sorted(glob(f"{folder}/*.h*"))],
        include_dirs=INCLUDE,
        extra_compile_args=[standard, *COMPILE],
        extra_link_args=[*LINK, "-ldl"],
        language="c++" if suffix == "cpp" else "c",
    )


def cython(source: str) -> Extension:
    """Return the extension of one of the core's modules, which cimport each other's ``.pxd``."""
    return Extension(
        source.removesuffix(".pyx").replace("/", "."),
        sources=[source],
        depends=[*HEADERS, *PXD],
        include_dirs=INCLUDE,
        extra_compile_args=["-std=gnu11", *COMPILE, *GENERATED],
        extra_link_args=LINK,
    )


class BuildExtensions(build_ext):
    """Compile the extensions, or say what has to be installed first."""

    def build_extensions(self) -> None:
        compilers = dict.fromkeys(words[0] for words in (self.compiler.compiler, self.compiler.compiler_cxx))
        missing = [name for name in compilers if shutil.which(name) is None]
        if missing:
            raise SystemExit(
                f"hixl_async is compiled on this machine, and there is no {' and no '.join(missing)}: install a C and a C++ "
                "compiler (apt-get install gcc g++, dnf install gcc gcc-c++), or name yours in CC and CXX"
            )
        headers = [os.path.join(sysconfig.get_path(path), "Python.h") for path in ("include", "platinclude")]
        if not any(map(os.path.exists, headers)):
            raise SystemExit(
                f"hixl_async is compiled on this machine, and there is no {headers[0]}: install the headers of this Python "
                "(apt-get install python3-dev, dnf install python3-devel)"
            )
        super().build_extensions()


core = cythonize(
    [cython(source) for source in ["hixl_async/_core.pyx", *sorted(glob("hixl_async/core/*.pyx"))]],
    annotate=ANNOTATE,
    build_dir=f"build/{VARIANT}/cython",
    compiler_directives={
        "language_level": 3,
        "boundscheck": DEBUG,
        "wraparound": False,
        "initializedcheck": False,
        "embedsignature": True,
        "auto_pickle": False,
        "linetrace": DEBUG and not SANITIZE,
    },
)

DRIVERS = ("shm", "faulty", "hixl")

setup(
    ext_modules=[*core, *(driver(name) for name in DRIVERS if glob(f"hixl_async/drivers/_{name}.c*"))],
    cmdclass={"build_ext": BuildExtensions},
    options={"build": {"build_base": f"build/{VARIANT}"}},
)
