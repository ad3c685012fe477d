"""What a side says about itself."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Identity"]

_HEX32 = re.compile(r"[0-9a-f]{32}")


class Identity(NamedTuple):
    """What a side says about itself; other sides that know the secret, or belong to the same user, can say anything."""

    #: Name for people; not unique.
    name: str
    #: The tenant; two sides of different domains refuse each other.
    domain: str
    #: 32 random hexadecimal digits, drawn once per engine: a restarted engine has another one.
    incarnation: str
    #: Where the side listens, as ``host:port``; "" if it only dials.
    address: str
    #: Names of the drivers that it has opened.
    drivers: tuple[str, ...]

    def problem(self) -> str | None:
        """Says what is wrong with the fields, or None."""
        for field, text, least, most in (
            ("name", self.name, 1, 128),
            ("domain", self.domain, 0, 128),
            ("address", self.address, 0, 300),
        ):
            # No control characters: these strings end up in logs and messages.
            if not isinstance(text, str) or not least <= len(text) <= most or not (text.isprintable() or not text):
                return f"{field} must be {least} to {most} printable characters"
        if not isinstance(self.incarnation, str) or not _HEX32.fullmatch(self.incarnation):
            return "incarnation must be 32 hexadecimal digits"
        if len(self.drivers) > 16 or not all(
            isinstance(driver, str) and 1 <= len(driver) <= 32 and driver.isprintable() for driver in self.drivers
        ):
            return "drivers must be at most 16 names of 1 to 32 printable characters"
        return None
