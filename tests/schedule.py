"""A pytest plugin: distribute tests over workers by file, and run those marked ``serial`` last, when no other test runs.

Tests marked ``torch`` run late and in one worker: each worker that imports torch needs 2 s for it, and more time for each
later test, because of torch's loggers and libraries.

``make test`` loads it, with ``--numprocesses=3 --dist=loadscope --no-loadscope-reorder``.  All tests are in one run, so its
closing line counts all of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Marks of tests that one worker runs, whatever their files; a test's id ends with its mark, after an ``@``.
TORCH, SERIAL = GROUPS = ("torch", "serial")
#: Folders of tests that take long; they come first, so that at the end no worker is left with one of them.
FIRST = ("benchmarks", "property", "examples", "testing", "adversity", "servers", "kv")
#: Folders of many short files, which follow the tests of torch, so that the other worker has work meanwhile.
LAST = ("hixlsim",)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Shorten the paths of temporary folders, because tests put sockets there, whose names are limited to 107 characters."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        config.option.basetemp = str(Path(config.option.basetemp).with_name(worker))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own hook sends the ids to the scheduler
def pytest_collection_finish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        for item in session.items:
            for group in filter(item.get_closest_marker, GROUPS):
                _assign(item, group)


def _place(item: pytest.Item) -> int:
    order = (*FIRST, "others", TORCH, *LAST)
    name = TORCH if item.get_closest_marker(TORCH) else item.path.parent.name
    return order.index(name if name in order else "others")


def _assign(item: pytest.Item, group: str) -> None:
    """Append the group to the test's id, the only thing that the scheduler knows of a test."""
    if hasattr(item, "_id"):  # pytest 9.2; pytest-xdist 3.8 does not know it, and its own groups have no effect there
        item._id = type(item._id).parse(f"{item.nodeid}@{group}")
    else:
        item._nodeid = f"{item.nodeid}@{group}"
    assert item.nodeid.endswith(f"@{group}"), "this version of pytest keeps the ids of tests in another place"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report ids that can be passed to pytest again."""
    if hasattr(report, "node"):  # it came from a worker
        for group in GROUPS:
            report.nodeid = report.nodeid.removesuffix(f"@{group}")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Schedule(config, log)


class Schedule(LoadScopeScheduling):  # type: ignore[misc]
    """A scheduler whose scopes are files and groups; the serial group is assigned when a single worker is left."""

    def _split_scope(self, nodeid: str) -> str:
        group = nodeid.rpartition("@")[2]
        return group if group in GROUPS else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        if SERIAL in self.workqueue:
            self.workqueue.move_to_end(SERIAL)
        if next(iter(self.workqueue)) != SERIAL or len(self.nodes) == 1:
            super()._assign_work_unit(node)
        elif not all(other.shutting_down for other in self.nodes if other is not node):
            node.shutdown()  # it finishes what it has; another worker gets the serial tests

    def remove_node(self, node: Any) -> str | None:
        crashed: str | None = super().remove_node(node)
        for other in self.nodes:  # one of them may have waited for this worker to end
            self._reschedule(other)
        return crashed
