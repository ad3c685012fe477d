"""Who takes part side by side: hixl_async and its peers, one adapter per file.

An adapter has a function ``target(line, size, options)``, which runs in the process that owns the target memory until
`line` ends, and a class ``Initiator(line, size, options)`` for the process that starts the transfers; see `rig.side`.
Before anything is timed, the initiator shows that a write of its own arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

__all__ = ["CONTESTANTS", "Contestant"]


@dataclass(frozen=True)
class Contestant:
    """One program that moves bytes, in a pair of processes."""

    name: str
    #: The module here.
    adapter: str
    #: For the adapter.
    options: dict[str, str] = field(default_factory=dict)
    #: Modules that it imports.
    modules: tuple[str, ...] = ()
    #: The distribution whose version is shown.
    package: str = ""
    #: How to get it.
    install: str = ""
    #: Burns CPU when there is nothing to do; stopped while others are measured.
    spins: bool = False

    @property
    def missing(self) -> bool:
        """Whether it is not installed."""
        return not all(find_spec(module) for module in self.modules)

    @property
    def version(self) -> str:
        """Of its package; empty where it has none of its own."""
        try:
            return version(self.package) if self.package else ""
        except PackageNotFoundError:
            return ""


def _hixl(name: str, loop: str, slices: str) -> Contestant:
    modules = ("uvloop",) if loop == "uvloop" else ()
    options = {"loop": loop, "slices": slices}
    return Contestant(name, "hixl", options, modules, "hixl_async", "pip install uvloop")


def _nixl(name: str, waiting: str, thread: str = "no") -> Contestant:
    # The package nixl picks a build by the CUDA that it finds; this one works without.
    return Contestant(
        name,
        "nixl",
        {"waiting": waiting, "thread": thread},
        ("nixl_cu12", "torch"),
        "nixl-cu12",
        "pip install --no-deps nixl-cu12, beside numpy and torch (a build for CPUs will do)",
        spins=thread == "yes",
    )


#: noPT: without its progress thread, which keeps one core busy in each process.
CONTESTANTS = (
    _hixl("hixl_async, asyncio", "asyncio", "fresh"),
    _hixl("hixl_async, uvloop", "uvloop", "fresh"),
    _hixl("hixl_async, asyncio, ready slices", "asyncio", "ready"),
    _hixl("hixl_async, uvloop, ready slices", "uvloop", "ready"),
    _nixl("NIXL noPT, spinning", "spin"),
    _nixl("NIXL noPT, asyncio", "asyncio"),
    _nixl("NIXL, spinning", "spin", thread="yes"),
    Contestant(
        "Mooncake, tcp",
        "mooncake",
        {},
        ("mooncake",),
        "mooncake-transfer-engine-non-cuda",
        "pip install mooncake-transfer-engine-non-cuda; it needs libibverbs",
    ),
    Contestant("ucxx, tcp", "ucxx", {}, ("ucxx",), "ucxx-cu12", "pip install ucxx-cu12", spins=True),
    Contestant("asyncio streams", "streams", {"loop": "asyncio"}),
    Contestant("uvloop streams", "streams", {"loop": "uvloop"}, ("uvloop",), "uvloop", "pip install uvloop"),
    Contestant("sock_recv_into, asyncio", "sockets", {"loop": "asyncio"}),
    Contestant("sock_recv_into, uvloop", "sockets", {"loop": "uvloop"}, ("uvloop",), "uvloop", "pip install uvloop"),
    Contestant("gloo", "gloo", {}, ("torch",), "torch", "pip install torch (a build for CPUs will do)"),
)
