"""Asyncio one-sided transfers: ``await engine.write(...)``, and the bytes are in another process's memory."""

from . import kv
from .control import Identity
from .core.batch import Batch
from .core.memory import LocalSlice, RemoteSlice
from .core.transfer import Transfer
from .engine.coalescer import Coalescer
from .engine.config import EngineConfig
from .engine.engine import Engine
from .engine.group import Group
from .engine.host import Handler
from .engine.notifications import Notification, Subscription
from .engine.peer import Peer
from .engine.region import Region, RemoteRegion
from .engine.registration_cache import RegistrationCache
from .engine.subscription_queue import SubscriptionQueue
from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .types import *  # noqa: F403
from .types import __all__ as _types

__version__ = "0.1.0.dev0"

__all__ = [
    "Batch",
    "Coalescer",
    "Engine",
    "EngineConfig",
    "Group",
    "Handler",
    "Identity",
    "LocalSlice",
    "Notification",
    "Peer",
    "Region",
    "RegistrationCache",
    "RemoteRegion",
    "RemoteSlice",
    "Subscription",
    "SubscriptionQueue",
    "Transfer",
    "kv",
    *_errors,
    *_types,
]


def __dir__() -> list[str]:
    """Return the public names; the modules behind them are private."""
    return sorted([*__all__, "__version__"])
