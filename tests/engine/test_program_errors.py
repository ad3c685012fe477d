"""Code of the program that the package calls, and what it may raise: the work of the package goes on in any case."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from passes import settle

from hixl_async import Access, PeerDownError, PeerState, WaitTimeoutError
from hixl_async.core.event_poller import EventPoller
from hixl_async.core.guard import FATAL, guarded, report
from hixl_async.core.log import Log
from hixl_async.testing import EnginePair, engine_pair, until


class Base(BaseException):
    """No Exception."""


ORDINARY = [ValueError, asyncio.CancelledError, GeneratorExit, Base]


def thrower(error: type[BaseException]) -> Callable[..., Any]:
    def throw(*_: object) -> Any:
        raise error

    return throw


async def lost(pair: EnginePair, throw: Callable[..., Any]) -> None:
    """The peer leaves; later callbacks are called, and everything is torn down."""
    heard: list[object] = []
    pair.peer.add_lost_callback(throw)
    pair.peer.add_lost_callback(heard.append)
    await pair.right.aclose()
    await until(lambda: pair.left.stats().peers == 0)
    assert len(heard) == 1
    assert pair.left.driver_stats()["shm"]["links"] == 0


async def lost_before(pair: EnginePair, throw: Callable[..., Any]) -> None:
    """The peer is down when the callback is added."""
    await pair.peer.aclose()
    pair.peer.add_lost_callback(throw)
    await settle(2)


async def signal(pair: EnginePair, throw: Callable[..., Any]) -> None:
    _, remote = await pair.region("words", 64)
    heard: list[int] = []
    pair.back.add_signal_callback(throw)
    pair.back.add_signal_callback(lambda: heard.append(1))
    await pair.left.write(bytes(8), remote[8:16], signal=(remote[:8], 1))
    await until(lambda: heard)
    assert await pair.peer.request("hixl.ping", {"n": 1}) == {"n": 1}


async def closing(pair: EnginePair, throw: Callable[..., Any]) -> None:
    heard: list[int] = []
    pair.left.add_close_callback(throw)
    pair.left.add_close_callback(lambda: heard.append(1))
    await pair.left.aclose()
    assert heard == [1]
    assert (pair.left.driver_stats(), pair.left.stats().peers) == ({"shm": {}}, 0)


async def grant(pair: EnginePair, throw: Callable[..., Any]) -> None:
    region = pair.right.allocate("granted", 64, access="read", grant=throw)
    assert region.access_for(pair.back) is Access.NONE
    with pytest.raises(WaitTimeoutError):
        await pair.peer.region("granted", timeout=0.01)
    assert pair.peer.state is PeerState.UP


PLACES = [lost, lost_before, signal, closing, grant]


@pytest.mark.parametrize("error", ORDINARY)
@pytest.mark.parametrize("place", PLACES)
async def test_what_callbacks_raise_is_reported(
    pair: EnginePair,
    loop_errors: list[dict[str, Any]],
    place: Callable[[EnginePair, Callable[..., Any]], Coroutine[Any, Any, None]],
    error: type[BaseException],
) -> None:
    await place(pair, thrower(error))
    assert {type(context["exception"]) for context in loop_errors} == {error}
    loop_errors.clear()


@pytest.mark.parametrize("error", FATAL)
@pytest.mark.parametrize("place", [lost, signal, closing])
def test_what_ends_the_program_ends_it_after_the_work(
    runner: asyncio.Runner,
    loop_errors: list[dict[str, Any]],
    place: Callable[[EnginePair, Callable[..., Any]], Coroutine[Any, Any, None]],
    error: type[BaseException],
) -> None:
    pairs: list[EnginePair] = []

    async def main() -> None:
        async with engine_pair(close_timeout=5) as pair:
            pairs.append(pair)
            # The loop stops in between, and what ran in it is cancelled.
            with contextlib.suppress(asyncio.CancelledError):
                await place(pair, thrower(error))

    with pytest.raises(error):
        runner.run(main())
    runner.close()
    (pair,) = pairs
    for engine in (pair.left, pair.right):
        assert engine.closed
        assert (engine.driver_stats(), engine.stats().peers) == ({"shm": {}}, 0)
    assert {type(context["exception"]) for context in loop_errors} == {error}
    loop_errors.clear()


# -- the parts


async def test_guarded(loop_errors: list[dict[str, Any]]) -> None:
    loop = asyncio.get_running_loop()
    assert guarded(loop, "it failed", lambda a, b: a + b, 3, 4) == 7
    assert loop_errors == []
    assert guarded(loop, "it failed", thrower(Base)) is None
    (context,) = loop_errors
    assert context["message"] == "it failed"
    assert isinstance(context["exception"], Base)
    loop_errors.clear()


@pytest.mark.parametrize("error", [*ORDINARY, *FATAL])
def test_report_never_raises(runner: asyncio.Runner, error: type[BaseException]) -> None:
    """Not even where the loop's exception handler raises; what ends the program does so in the next pass."""

    async def main() -> str:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(thrower(error))
        logging.getLogger("asyncio").addFilter(thrower(error))
        report(loop, "x", ValueError())
        await settle(3)
        return "went on"

    logger = logging.getLogger("asyncio")
    filters = list(logger.filters)
    try:
        if error in FATAL:
            with pytest.raises(error):
                runner.run(main())
        else:
            assert runner.run(main()) == "went on"
    finally:
        logger.filters[:] = filters


@contextlib.contextmanager
def broken_log(name: str, error: type[BaseException]) -> Iterator[None]:
    """A logger whose handler raises, as the program's own may."""
    handler = logging.Handler()
    handler.emit = thrower(error)  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("error", ORDINARY)
async def test_a_broken_log_stops_nothing(loop_errors: list[dict[str, Any]], error: type[BaseException]) -> None:
    """The end of a peer is logged by the task that ends it, if a driver holds memory for too long."""
    with broken_log("hixl_async", error):
        async with engine_pair(close_timeout=0.05) as pair:
            region, _ = await pair.region("kv", 64)
            await region.aclose()
            pair.right.loop.call_soon(pair.back._connection.abort, PeerDownError("cut"))
            await pair.peer.aclose()
            assert pair.left.stats().peers == 0
        Log("hixl_async").warning("%s", "x")
    assert {type(context["exception"]) for context in loop_errors} == {error}
    loop_errors.clear()


def test_a_log_outside_of_a_loop_raises_to_its_caller() -> None:
    with broken_log("hixl_async", Base), pytest.raises(Base):
        Log("hixl_async").info("x")


def test_a_log_names_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hixl_async"):
        Log("hixl_async").warning("%d of %d", 1, 2)
        Log("hixl_async").info("three")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "1 of 2"),
        ("INFO", "three"),
    ]
    assert {record.funcName for record in caplog.records} == {"test_a_log_names_its_caller"}


@pytest.mark.parametrize("error", ORDINARY)
async def test_an_event_that_cannot_be_polled(loop_errors: list[dict[str, Any]], error: type[BaseException]) -> None:
    """Others are polled all the same, and it is not polled again."""
    poller = EventPoller(asyncio.get_running_loop())
    polled: list[int] = []

    def second() -> bool:
        polled.append(1)
        return len(polled) == 3

    poller.watch(thrower(error))
    poller.watch(second)
    await until(lambda: poller.idle)
    assert len(polled) == 3
    assert [type(context["exception"]) for context in loop_errors] == [error]
    loop_errors.clear()
