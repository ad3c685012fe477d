"""Builds the core and the drivers; everything else about the package is in pyproject.toml.

Switches, all read from the environment:

``HIXL_ASYNC_DEBUG=1``       assertions, ``-O0 -g`` and Cython line tracing
``HIXL_ASYNC_SANITIZE=...``  ``address`` or ``thread``: compile and link everything with that sanitizer
``HIXL_ASYNC_ANNOTATE=1``    Cython's annotated HTML beside the generated C

Each combination builds in a folder of its own below ``build/``, so that none takes another's objects for its own.
"""

from __future__ import annotations

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

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
# What Cython generates is not written by hand, and trips over warnings meant for what is.
GENERATED = ["-Wno-unused-parameter", "-Wno-unused-function", "-Wno-missing-field-initializers", "-Wno-sign-compare"]


def driver(name: str) -> Extension:
    """The extension of one driver: ``_name.c`` or ``.cpp`` and, where it has outgrown one file, the folder ``name/``."""
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
    """The extension of one of the core's modules, which see each other's ``.pxd``."""
    return Extension(
        source.removesuffix(".pyx").replace("/", "."),
        sources=[source],
        depends=[*HEADERS, *PXD],
        include_dirs=INCLUDE,
        extra_compile_args=["-std=gnu11", *COMPILE, *GENERATED],
        extra_link_args=LINK,
    )


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
    options={"build": {"build_base": f"build/{VARIANT}"}},
)
