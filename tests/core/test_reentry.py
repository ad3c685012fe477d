"""Code of the caller's objects, which runs inside a call between its checks and the submit, may close anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hixl_async import Batch, ClosedError, HixlError, InvalidArgumentError
from hixl_async.core.in_flight import refuse_work
from hixl_async.core.memory import link_of, retire

from .conftest import World


class Trap(bytearray):
    """A buffer that acts when its contents are checked."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(b"12345678")
        self.act = act

    @property
    def dtype(self) -> None:
        self.act()


class Number(int):
    """A number that acts when it is converted."""

    act: Callable[[], None]

    def __float__(self) -> float:
        self.act()
        return 1.0


class Index:
    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def __index__(self) -> int:
        self.act()
        return 7


class Word(str):
    """A priority that acts when it is looked up."""

    act: Callable[[], None]

    def __hash__(self) -> int:
        self.act()
        return hash("low")


def _made(kind: Any, value: Any, act: Callable[[], None]) -> Any:
    made = kind(value)
    made.act = act
    return made


#: Each way in which a call runs the caller's code.
CALLS: dict[str, Callable[[World, Callable[[], None]], Any]] = {
    "the local buffer": lambda world, act: world.left.write(Trap(act), world.remote[:8]),
    "a payload": lambda world, act: world.write(notify=("topic", Trap(act))),
    "a payload, from a region": lambda world, act: world.left.write(
        world.here[:8], world.remote[:8], notify=("topic", Trap(act))
    ),
    "a payload, with a batch": lambda world, act: world.left.submit(
        Batch("write", world.here, world.remote, [(0, 0, 8)]), notify=("topic", Trap(act))
    ),
    "a signal's value": lambda world, act: world.write(signal=(world.remote[64:72], Index(act))),
    "a priority": lambda world, act: world.write(priority=_made(Word, "low", act)),
    "a timeout": lambda world, act: world.write(timeout=_made(Number, 1, act)),
}  # fmt: skip


def _lose(world: World) -> None:
    link_of(world.remote).refuse()


def _close(world: World) -> None:
    world.left._closing = asyncio.ensure_future(world.left._close())
    refuse_work(world.left)  # the first step of it, now


#: The actions of that code.
ACTS: dict[str, Callable[[World], None]] = {
    "closes the remote region": lambda world: retire(world.remote),
    "loses the peer": _lose,
    "closes the engine": _close,
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_closed_inside_a_call(
    world: World, call: Callable[[World, Callable[[], None]], Any], act: Callable[[World], None]
) -> None:
    before = world.left.stats()
    acted = 0

    def once() -> None:
        nonlocal acted
        acted += 1
        if acted == 1:
            act(world)

    with pytest.raises(HixlError):
        call(world, once)
    assert acted
    after = world.left.stats()
    assert (after.transfers, after.pinned, after.in_flight) == (before.transfers, 0, 0)
    assert world.here.pins == world.remote.pins == 0
    assert world.landed[:8] == bytes(8)


async def test_a_local_region_closed_inside_a_call(world: World) -> None:
    with pytest.raises(ClosedError, match="'here'"):
        world.left.write(world.here[:8], world.remote[:8], notify=("topic", Trap(world.here.revoke)))
    assert world.here.pins == world.remote.pins == 0
    assert world.landed[:8] == bytes(8)


async def test_closed_inside_a_notification(world: World) -> None:
    with pytest.raises(HixlError):
        world.left.notify(world.peer, "topic", Trap(lambda: _lose(world)))  # type: ignore[arg-type]
    assert world.left.stats().pinned == 0


class Liar(str):
    def encode(self, *_: Any) -> Any:
        return 7


async def test_topics_are_encoded_by_python_itself(world: World) -> None:
    """An object's own `encode` may return something else than bytes."""
    async with world.right.notifications("topic") as notes:
        await world.write(notify=(Liar("topic"), b"payload"))
        async with asyncio.timeout(5):
            assert (await notes.get()).payload == b"payload"

    class Topic:
        def encode(self) -> int:
            return 7

    with pytest.raises(InvalidArgumentError, match="notify must be"):
        world.write(notify=(Topic(), b""))
    assert world.left.stats().pinned == 0
