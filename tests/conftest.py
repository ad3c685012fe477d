"""Fixtures of all tests: both loops in debug mode, a balance sheet after each test, and a record of where a run died."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib.util
import linecache
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import hypothesis
import pytest

from hixl_async import drivers
from hixl_async.testing import BalanceSheet, FaultPlan, faulty

# Background processes of a shell, and their children, ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test case of a property takes as long as the machine is busy.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# -- both loops
# The debug mode records the whole stack at which each task, future and handle was made, and checks whether its files have
# changed: a third of the CPU time of the tests.  Two frames are enough, as tuples, which `traceback.format_list` takes as well;
# and the files do not change meanwhile.


def _walk_stack(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    frame = frame or sys._getframe(1)
    back = frame.f_back
    return [(frame, frame.f_lineno)] if back is None else [(frame, frame.f_lineno), (back, back.f_lineno)]


def _extract(frames: Iterable[tuple[FrameType, int]], **_: object) -> list[tuple[str, int, str, None]]:
    return [(frame.f_code.co_filename, line, frame.f_code.co_name, None) for frame, line in frames]


traceback.walk_stack = _walk_stack  # type: ignore[assignment]
traceback.StackSummary.extract = _extract  # type: ignore[method-assign,assignment]
linecache.checkcache = lambda filename=None: None

#: The contexts that reached the exception handler of a test's loop.
_errors: list[dict[str, Any]] = []


def _new_loop(factory: Callable[[], asyncio.AbstractEventLoop]) -> Callable[[], asyncio.AbstractEventLoop]:
    def new() -> asyncio.AbstractEventLoop:
        loop = factory()
        loop.set_exception_handler(_hear)
        return loop

    return new


def _hear(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    _errors.append(context)
    if isinstance(context.get("exception"), pytest.fail.Exception):  # the test's time is up, and uvloop would go on
        loop.stop()


# Threads of numpy's BLAS start and end by themselves, and would look like leaks; one thread also makes results reproducible.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
if importlib.util.find_spec("numpy") is not None:
    import numpy  # noqa: F401  With the setting above, and for layouts, which use numpy only if it is imported already.


def _factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories = {"asyncio": _new_loop(asyncio.new_event_loop)}
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        # The first loop of a process opens a pipe for signals, which stays open.
        uvloop.new_event_loop().close()
        factories["uvloop"] = _new_loop(uvloop.new_event_loop)
    return factories


FACTORIES = _factories()


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """Run every asynchronous test on each of the loops."""
    return FACTORIES


@pytest.fixture(params=FACTORIES)
def runner(request: pytest.FixtureRequest, balance: BalanceSheet) -> Iterator[asyncio.Runner]:
    """A runner of either loop, for synchronous tests that run a loop themselves, or several one after another."""
    with asyncio.Runner(loop_factory=FACTORIES[request.param], debug=True) as runner:
        yield runner


@pytest.fixture(autouse=True)
def loop_errors(balance: BalanceSheet) -> Iterator[list[dict[str, Any]]]:
    """The contexts that reached the loop's exception handler; a test that expects one removes it."""
    _errors.clear()
    yield _errors
    assert not _errors, f"the loop's exception handler was called: {_errors}"


# -- the size of this process


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the collected tests and the imported libraries from garbage collections, because they stay until the end.

    Otherwise each full collection takes 0.2 s, during which the loop is held, as a test may notice.
    """
    gc.collect()
    gc.freeze()


# -- drivers whose own calls block


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--blocking",
        action="store_true",
        help="delay the start and end of every engine's drivers, and the registration and release of memory",
    )


@pytest.fixture(autouse=True)
def _blocking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan(1).delay(0.0002, 0.002, verb="call")
    resolve = drivers.resolve

    def wrapped(name: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        if name == "faulty" or drivers.WRAPPER in options:
            return resolve(name, options)
        return resolve(name, faulty(name, plan, **options)[name])

    if request.config.getoption("--blocking", False):
        monkeypatch.setattr(drivers, "resolve", wrapped)


# -- nothing is left behind


@pytest.fixture(autouse=True)
def balance(request: pytest.FixtureRequest) -> Iterator[BalanceSheet]:
    """Fail a test that passed but left descriptors, threads, mappings or work behind.

    It is set up before the loop, and compares after the loop was closed.
    """
    # libuv's pool of threads, which resolve names, starts with the first name and stays.
    sheet = BalanceSheet(ignore=["descriptor /dev/pts", "thread native libuv-worker"])
    yield sheet
    report = request.node.stash.get(_OUTCOME, None)
    if report is not None and report.passed:
        sheet.settle_blocking(3)


_OUTCOME = pytest.StashKey[pytest.TestReport]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call":
        item.stash[_OUTCOME] = report
    return report


# -- figures


_figures: dict[str, list[float]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the figures that tests recorded as properties, those of other workers included."""
    if report.when == "teardown":
        for name, value in report.user_properties:
            if name.endswith(", ms"):
                _figures.setdefault(name, []).append(float(str(value)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("figures")
        for name, values in sorted(_figures.items()):
            terminalreporter.write_line(
                f"{name:60} median {median(values):8.2f}   worst {max(values):8.2f}   of {len(values)}"
            )


# -- when it dies


class Sentinel:
    """A file with the name of the test that runs; the next run reports the test if the file is still there.

    Each worker has a file of its own.
    """

    def __init__(self, folder: Path, worker: str | None) -> None:
        self._path = folder / (worker or "main")
        # A worker starts while the others run already; only the process that started them reports.
        left = [] if worker else sorted(folder.iterdir())
        self._victims = [path.read_text() for path in left]
        for path in left:
            path.unlink()

    def pytest_report_header(self) -> str | None:
        return (
            f"the run before this one died, or still goes on, in {', '.join(self._victims)}" if self._victims else None
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # Not emptied first: file systems then write the new contents to the disk when the file is closed, which takes 0.5 ms.
        text = nodeid.encode()
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(file, text)
        os.ftruncate(file, len(text))
        os.close(file)

    def pytest_sessionfinish(self) -> None:
        self._path.unlink(missing_ok=True)


def pytest_configure(config: pytest.Config) -> None:
    faulthandler.enable()
    if config.getoption("asyncio_debug", None) is None:
        config.option.asyncio_debug = True
    cache = getattr(config, "cache", None)
    if cache is not None:
        folder = cache.mkdir("hixl_async-running")
        config.pluginmanager.register(Sentinel(folder, os.environ.get("PYTEST_XDIST_WORKER")))
