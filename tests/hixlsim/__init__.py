"""The simulated HIXL: `build()` compiles it, `probe` calls it from Python."""

from .build import PARTS, build, symbols

__all__ = ["PARTS", "build", "symbols"]
