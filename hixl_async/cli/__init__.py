"""The command ``hixl-async``."""

from .commands import main

__all__ = ["main"]
