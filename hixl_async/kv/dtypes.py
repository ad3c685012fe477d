"""The element types of caches, by the names that all libraries share, and the bytes of one element.  Pure."""

from __future__ import annotations

import sys
from typing import Any

from ..engine.arguments import positive_number
from ..errors import InvalidArgumentError

__all__ = ["ITEM_BYTES", "element_type", "numpy_type", "require_numpy"]

#: The bytes of one element of each type.
ITEM_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}
_ALIASES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3": "float8_e4m3fn",
}


def element_type(dtype: object) -> str | int:
    """Return the name of an element type, whatever library it came from; or the size of one element in bytes.

    :raises InvalidArgumentError: if the type is not known, or has a foreign byte order.
    """
    if isinstance(dtype, int):
        return positive_number("dtype, where it is the size of an element in bytes,", dtype)
    name = _type_name(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in ITEM_BYTES or (isinstance(dtype, type) and dtype.__module__ == "builtins"):
        known = ", ".join(sorted(ITEM_BYTES))
        raise InvalidArgumentError(f"dtype {dtype!r} is not known; use its size in bytes, or one of {known}")
    if not getattr(dtype, "isnative", True):
        raise InvalidArgumentError(f"dtype {dtype!r} has a foreign byte order; use the native one")
    return name


def _type_name(dtype: object) -> str:
    """Return the name that a library gave its element type, without importing the library."""
    if isinstance(dtype, str):
        return dtype
    numpy = sys.modules.get("numpy")
    if isinstance(dtype, type):
        # Some scalar types of numpy, such as longlong, have names that differ from their dtypes'.  The class is missing while
        # another thread imports numpy.
        scalars = getattr(numpy, "generic", None)
        if numpy is not None and scalars is not None and issubclass(dtype, scalars):
            return str(numpy.dtype(dtype).name)
        return dtype.__name__
    # numpy, ml_dtypes and TensorFlow name their dtypes; torch's only print as "torch.bfloat16".
    return str(getattr(dtype, "name", dtype))


def require_numpy() -> Any:
    """Return numpy.

    :raises InvalidArgumentError: if it is not installed.
    """
    try:
        import numpy
    except ImportError:
        raise InvalidArgumentError("KV caches need numpy here; install it: pip install numpy") from None
    return numpy


def numpy_type(element: str | int) -> Any:
    """Return the numpy dtype of an element, or an unsigned integer of its size if numpy has no such type.

    :raises InvalidArgumentError: if there is none of that size either, or numpy is not installed.
    """
    numpy = require_numpy()
    if isinstance(element, str):
        try:
            return numpy.dtype(element)
        except TypeError:
            element = ITEM_BYTES[element]
    try:
        return numpy.dtype(f"u{element}")
    except TypeError:
        raise InvalidArgumentError(f"numpy has no type for elements of {element} bytes; pass dtype=") from None
