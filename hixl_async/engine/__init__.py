"""The engine and its parts: peers, links, regions, requests and notifications; all public names are in ``hixl_async``."""

from .engine import Engine

__all__ = ["Engine"]
