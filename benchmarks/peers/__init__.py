"""The competitors of the side-by-side benchmark: hixl_async and its peers, one adapter per file.

An adapter has a function ``target(line, size, options)``, which runs in the process that owns the target memory until
`line` ends, and a class ``Initiator(line, size, options)`` for the process that starts the transfers; see `rig.side`.
Before the first timed block, the initiator checks that a write arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from rig.side import Kind

__all__ = ["COMPETITORS", "Competitor"]


@dataclass(frozen=True)
class Competitor:
    """One way to move bytes, in a pair of processes."""

    name: str
    #: The module in this folder.
    adapter: str
    #: Options of the adapter.
    options: dict[str, str] = field(default_factory=dict)
    #: Modules that the adapter imports.
    modules: tuple[str, ...] = ()
    #: The distribution whose version is shown.
    package: str = ""
    #: The command that installs it.
    install: str = ""
    #: True if it uses CPU time while it is idle; then it is stopped while others are measured.
    spins: bool = False
    #: Kinds of work that it cannot do, wholly or in part, and the reasons.
    lacks: dict[Kind, str] = field(default_factory=dict)

    @property
    def missing(self) -> bool:
        """True if it is not installed."""
        return not all(find_spec(module) for module in self.modules)

    @property
    def version(self) -> str:
        """The version of its package; empty if it has none."""
        try:
            return version(self.package) if self.package else ""
        except PackageNotFoundError:
            return ""


TOLD = "a message is its own notification: see deliver"
SINGLE = "its adapter here sends one range after another"


def _hixl(name: str, loop: str, slices: str) -> Competitor:
    modules = ("uvloop",) if loop == "uvloop" else ()
    options = {"loop": loop, "slices": slices}
    lacks: dict[Kind, str] = {}
    if slices == "ready":
        kinds: tuple[Kind, ...] = ("list", "rows", "flight", "notify", "deliver", "idle")
        lacks = dict.fromkeys(kinds, "slices that were made before matter to single writes only")
    return Competitor(name, "hixl", options, modules, "hixl_async", "pip install uvloop", lacks=lacks)


def _nixl(name: str, waiting: str, thread: str = "no") -> Competitor:
    kinds: tuple[Kind, ...] = ("notify", "deliver") if waiting == "asyncio" else ()
    # The package nixl picks a build by the CUDA that it finds; this one works without.
    return Competitor(
        name,
        "nixl",
        {"waiting": waiting, "thread": thread},
        ("nixl_cu12", "torch"),
        "nixl-cu12",
        "pip install --no-deps nixl-cu12, beside numpy and torch (a build for CPUs will do)",
        spins=thread == "yes",
        lacks=dict.fromkeys(kinds, "NIXL has no descriptor that a loop could wait on: see NIXL noPT, spinning"),
    )


def _ucxx(name: str, transports: str) -> Competitor:
    kinds: tuple[Kind, ...] = ("list", "rows", "flight")
    lacks: dict[Kind, str] = {**dict.fromkeys(kinds, SINGLE), "notify": TOLD}
    options = {"transports": transports}
    return Competitor(name, "ucxx", options, ("ucxx",), "ucxx-cu12", "pip install ucxx-cu12", spins=True, lacks=lacks)


def _two_sided(name: str, adapter: str, loop: str) -> Competitor:
    modules = ("uvloop",) if loop == "uvloop" else ()
    kinds: tuple[Kind, ...] = ("list", "rows", "flight") if adapter == "sockets" else ()
    lacks: dict[Kind, str] = {**dict.fromkeys(kinds, SINGLE), "notify": TOLD}
    return Competitor(name, adapter, {"loop": loop}, modules, "".join(modules), "pip install uvloop", lacks=lacks)


#: noPT: without its progress thread, which keeps one core busy in each process.
COMPETITORS = (
    _hixl("hixl_async, asyncio", "asyncio", "fresh"),
    _hixl("hixl_async, uvloop", "uvloop", "fresh"),
    _hixl("hixl_async, asyncio, ready slices", "asyncio", "ready"),
    _hixl("hixl_async, uvloop, ready slices", "uvloop", "ready"),
    _nixl("NIXL noPT, spinning", "spin"),
    _nixl("NIXL noPT, asyncio", "asyncio"),
    _nixl("NIXL, spinning", "spin", thread="yes"),
    Competitor(
        "Mooncake, tcp",
        "mooncake",
        {},
        ("mooncake",),
        "mooncake-transfer-engine-non-cuda",
        "pip install mooncake-transfer-engine-non-cuda; it needs libibverbs",
    ),
    # Only the transports that UCX chooses by itself.
    _ucxx("ucxx, shared memory", "sysv,posix,cma,self"),
    _ucxx("ucxx, tcp", "tcp"),
    _two_sided("asyncio streams", "streams", "asyncio"),
    _two_sided("uvloop streams", "streams", "uvloop"),
    _two_sided("sock_recv_into, asyncio", "sockets", "asyncio"),
    _two_sided("sock_recv_into, uvloop", "sockets", "uvloop"),
    Competitor(
        "gloo",
        "gloo",
        {},
        ("torch",),
        "torch",
        "pip install torch (a build for CPUs will do)",
        lacks={"rows": "10,000 messages take it more than a second", "notify": TOLD},
    ),
)
