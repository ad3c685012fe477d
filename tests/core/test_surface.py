"""The closed surface: users' objects show no more than is listed here, and no call crashes.

Code that may crash runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

import hixl_async
from hixl_async import Batch, InvalidArgumentError, _core
from hixl_async.core import in_flight, link, memory, transfer
from hixl_async.testing import EnginePair, engine_pair

from .conftest import World


@pytest.fixture
async def pair() -> AsyncIterator[EnginePair]:
    async with engine_pair() as pair:
        yield pair


FUTURE = {
    "add_done_callback", "cancel", "cancelled", "done", "exception", "get_loop", "remove_done_callback", "result",
}  # fmt: skip
MEMORY = {"alive", "drained", "pins", "released", "size"}
SLICE = {"drained", "length", "offset", "region"}
#: Every public attribute of the types whose objects users hold; an addition is a decision, and belongs in the API reference.
PUBLIC = {
    hixl_async.Engine: {
        "accepted", "aclose", "add_close_callback", "address", "allocate", "bytes_in_flight", "closed", "coalesce", "config",
        "connect", "drained", "driver_facts", "driver_limits", "driver_stats", "forked", "group", "in_flight", "incarnation",
        "loop", "name", "notifications", "notify", "open", "peers", "read", "register", "regions",
        "registration_cache", "remove_close_callback", "room", "serve", "stats", "submit", "unserve", "write",
    },
    hixl_async.Region: {
        *MEMORY, "access", "access_for", "aclose", "address", "device", "name", "numpy", "readonly", "ready", "revoke", "torch",
    },
    hixl_async.RemoteRegion: {*MEMORY, "access", "name"},
    hixl_async.LocalSlice: SLICE,
    hixl_async.RemoteSlice: SLICE,
    hixl_async.Transfer: {*FUTURE, "at_least", "drained", "nbytes", "progress", "state"},
    hixl_async.Batch: {"count", "nbytes", "shifted", "strided"},
    hixl_async.Peer: {
        "aclose", "add_lost_callback", "add_signal_callback", "address", "begin_heartbeats", "confirmed_dead", "drivers",
        "end_heartbeats", "error", "fenced", "heard_at", "identity", "limit_bandwidth", "name", "post", "region", "regions",
        "remove_lost_callback", "remove_signal_callback", "request", "route", "same_host", "state",
    },
    hixl_async.Group: {"read", "submit", "write"},
    hixl_async.Coalescer: {"flush", "read", "write"},
    hixl_async.Subscription: {"aclose", "close", "dropped", "get", "get_nowait", "topic"},
}  # fmt: skip
#: Private names of the core's types: the parts of asyncio's future protocol that have no public name.
PROTOCOL = {"_asyncio_future_blocking", "_cancel_message", "_loop", "_make_cancelled_error"}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_public_attributes_are_those_listed(kind: type) -> None:
    assert public(kind) == PUBLIC[kind]


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_the_core_adds_no_private_names(kind: type) -> None:
    """A leading underscore does not prevent a call that could free the memory of a transfer."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith(("hixl_async._core", "hixl_async.core"))]
    private = {name for base in ours for name in vars(base) if name.startswith("_") and not name.startswith("__")}
    assert private - PROTOCOL == set()


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_every_public_attribute_is_documented(kind: type) -> None:
    undocumented = {name for name in PUBLIC[kind] if not getattr(getattr(kind, name), "__doc__", None)}
    assert undocumented == set()


def test_the_engine_names_its_main_methods() -> None:
    """By the engine itself, and without a wrapper around what the core compiled."""
    for name in ("read", "write", "submit", "drained"):
        assert vars(hixl_async.Engine)[name] is vars(_core.Core)[name]


async def test_attributes_are_read_only(pair: EnginePair) -> None:
    """Among them are those on which it depends whether memory is freed."""
    region, remote = await pair.region("kv", 64, access="read-write")
    local = pair.left.allocate("local", 64)
    transfer = pair.left.write(local, remote)
    batch = Batch("write", local, remote)
    await transfer
    writable = []
    for thing in (
        pair.left,
        pair.peer,
        region,
        remote,
        local[:8],
        remote[:8],
        transfer,
        batch,
        pair.left.notifications(),
    ):
        for name in public(type(thing)):
            value = getattr(thing, name)
            if not callable(value):
                with contextlib.suppress(AttributeError):
                    setattr(thing, name, value)
                    writable.append(f"{type(thing).__name__}.{name}")
    assert writable == []


async def test_an_engine_is_initialised_once(pair: EnginePair) -> None:
    _, remote = await pair.region("kv", 64)
    with pytest.raises(InvalidArgumentError, match="make another engine"):
        pair.left.__init__()  # type: ignore[misc]
    await pair.left.write(bytes(64), remote)


async def test_memory_of_a_transfer_in_flight_cannot_be_freed(world: World) -> None:
    world.plan.hold(nth=1)
    held = world.left.write(world.here[:5], world.remote[:5])
    for name in ("unpin", "pin", "retire", "export", "known_to", "registration", "map", "link", "rights"):
        assert not hasattr(world.here, name)
        assert not hasattr(world.remote, name)
    for name in ("link", "_wake", "_time_out", "_expire"):
        assert not hasattr(held, name)
    closing = asyncio.ensure_future(world.here.aclose())
    await asyncio.sleep(0)
    assert world.here.pins == 1
    assert world.here.address != 0, "the pages are still there"
    world.plan.release()
    assert await held == 5
    await closing
    assert (world.here.pins, world.here.address) == (0, 0)


async def test_only_waiters_can_be_woken(world: World) -> None:
    world.plan.hold(nth=1)
    held = world.write()
    with pytest.raises(TypeError, match="not a waiter"):
        transfer.wake(held)
    assert not held.done()
    waiter = in_flight.new_waiter(world.left)
    transfer.wake(waiter)
    assert waiter.done()
    world.plan.release()
    await held


async def test_pins_are_taken_back_once(world: World) -> None:
    memory.pin(world.here)
    memory.unpin(world.here)
    with pytest.raises(RuntimeError, match="not pinned"):
        memory.unpin(world.here)
    assert world.here.pins == 0


def test_types_that_only_the_core_creates() -> None:
    for kind in (hixl_async.Transfer, hixl_async.LocalSlice, hixl_async.RemoteSlice, link.Link):
        for make in (kind, lambda kind=kind: kind.__new__(kind)):
            with pytest.raises(TypeError, match="made by"):
                make()
        with pytest.raises(TypeError):
            object.__new__(kind)


# -- in a process of its own

ALONE = """
import asyncio, faulthandler, gc, sys, warnings
faulthandler.enable()
warnings.simplefilter("ignore")
import hixl_async as hx
from hixl_async import _core, kv
from hixl_async.core import batch, device_copies, in_flight, link, memory, signal_words, transfer
from hixl_async.testing import engine_pair, faulty, FaultPlan

NOTHING = [(), (None,), (None, None), (None,) * 3, (None,) * 6, (7, 7), (object(),) * 3, ("x",), (b"", [])]

def call(function, *arguments):
    "Called with nonsense; only an exception of Python may come of it."
    try:
        answer = function(*arguments)
    except (Exception, asyncio.CancelledError) as error:
        return error
    if asyncio.iscoroutine(answer):
        try:
            answer.send(None)
        except BaseException:
            pass
        answer.close()
    return None

def calls(thing):
    for name in sorted(dir(thing)):
        if name in LEFT_OUT or (name.startswith("_") and not name.startswith("__")):
            continue
        try:
            attribute = getattr(thing, name)
        except Exception:
            continue
        if callable(attribute):
            for arguments in NOTHING:
                yield name, call(attribute, *arguments)

# They make the object anew, or import a library whose errors are its own.
LEFT_OUT = {"__class__", "__del__", "__init__", "__setattr__", "__delattr__", "numpy", "torch"}
"""


def alone(script: str) -> str:
    """Return what a script writes; a crash is a failure, and shows where it was."""
    result = subprocess.run([sys.executable, "-c", ALONE + script], capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, f"{result.returncode}: {result.stderr[-3000:]}"
    return result.stdout


def test_empty_objects_crash_nothing() -> None:
    """Whatever `__new__` makes can be used, awaited, sliced and dropped."""
    assert "survived" in alone("""
for module in (_core, batch, device_copies, in_flight, link, memory, signal_words, transfer):
    for kind in [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]:
        for kind in [kind] + kind.__subclasses__():
            for arguments in NOTHING:
                try:
                    empty = kind.__new__(kind, *arguments)
                except Exception:
                    continue
                for _ in calls(empty): pass
                for use in (len, iter, next, memoryview, repr, hash, bool, lambda x: x[0:1], lambda x: x[:], lambda x: x[0]):
                    call(use, empty)
                call(asyncio.run, empty)
                del empty
gc.collect()
print("survived")
""")


def test_ports_crash_nothing() -> None:
    """Every function of the core, called with nonsense and with empty objects."""
    assert "survived" in alone("""
def empty(kind): return kind.__new__(kind)
empties = [empty(hx.Engine), empty(memory.LocalMemory), empty(memory.RemoteMemory), empty(_core.Core), hx.Engine()]
ports = [
    function
    for module in (_core, batch, device_copies, in_flight, link, memory, signal_words, transfer)
    for function in vars(module).values()
    if type(function).__name__ == "cython_function_or_method" and function.__module__ == module.__name__
]
assert len(ports) > 20, ports
for port in ports:
    for arguments in NOTHING:
        call(port, *arguments)
    for thing in empties:
        for count in range(7):
            call(port, thing, *([None] * count))
            call(port, *([thing] * count))
        call(port, thing, 1), call(port, thing, thing, 1, 1), call(port, thing, thing, thing, 1, 1)
print("survived")
""")


def test_public_objects_crash_nothing() -> None:
    """Every attribute of every object that users hold, called with nonsense, raises a clear error and never crashes."""
    assert "survived" in alone("""
TOLD = (hx.HixlError, TypeError, ValueError, OSError, asyncio.InvalidStateError, asyncio.CancelledError)

async def main():
    plan = FaultPlan(1)
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.2) as pair:
        there, remote = await pair.region("there", 4096)
        here = pair.left.allocate("here", 4096)
        plan.hold(nth=1)
        held = pair.left.write(here[:8], remote[:8])
        done = pair.left.write(b"12345678", remote[:8])
        things = [
            pair.left, here, remote, here[:8], remote[:8], held, done, hx.Batch("write", here, remote, [(0, 0, 8)]),
            pair.peer, pair.left.group(), pair.left.coalesce(), pair.left.notifications(), pair.left.accepted(),
        ]
        for thing in things:
            for name, error in calls(thing):
                if error is not None and not name.startswith("_"):
                    assert isinstance(error, TOLD), (thing, name, error)
        plan.release()
    gc.collect()
    print("survived")

asyncio.run(main())
""")


@pytest.mark.parametrize(
    "kind", [hixl_async.Engine, hixl_async.Region, hixl_async.Batch], ids=lambda kind: kind.__name__
)
def test_pickling_is_refused_by_python_itself(kind: type) -> None:
    assert not hasattr(kind, "__reduce_cython__")
