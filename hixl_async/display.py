"""Values in the messages of errors."""

from __future__ import annotations

__all__ = ["shown"]

#: The longest integers that are shown; Python refuses to print those of more than 4300 digits.
BITS = 1024


def shown(value: object) -> str:
    """Return the repr of a wrong value, or a description of one that cannot or should not be printed."""
    if isinstance(value, int) and value.bit_length() > BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        return repr(value)
    except Exception:  # it holds such an integer, or its class is the program's
        return f"a {type(value).__name__} that cannot be printed"
