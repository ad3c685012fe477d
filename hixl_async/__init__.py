"""Asyncio one-sided transfers: ``await engine.write(...)``, and the bytes are in another process's memory."""

from . import kv
from ._batch import Batch
from ._memory import Slice as RegionSlice
from ._transfer import Transfer
from .coalescer import Coalescer
from .config import EngineConfig
from .engine import Engine
from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .group import Group
from .memory import Region, RemoteRegion
from .notify import Notification, Subscription
from .peer import Peer
from .types import *  # noqa: F403
from .types import __all__ as _types

__version__ = "0.1.0.dev0"

__all__ = [
    "Batch",
    "Coalescer",
    "Engine",
    "EngineConfig",
    "Group",
    "Notification",
    "Peer",
    "Region",
    "RegionSlice",
    "RemoteRegion",
    "Subscription",
    "Transfer",
    "kv",
    *_errors,
    *_types,
]


def __dir__() -> list[str]:
    """What is public; the modules behind it are not."""
    return sorted([*__all__, "__version__"])
