"""A pytest plugin: distribute tests over workers by file, and run those marked ``serial`` last, when no other test runs.

``make test`` loads it, with ``--numprocesses=2 --dist=loadgroup --no-loadscope-reorder``.  All tests are in one run, so its
closing line counts all of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Folders of tests that take long; they come first, so that at the end no worker is left with one of them.
FIRST = ("benchmarks", "property", "examples", "testing", "adversity", "servers", "kv")
#: The group of the tests that share the machine with no other, as pytest-xdist appends it to their ids.
SERIAL = "serial"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Shorten the paths of temporary folders, because tests put sockets there, whose names are limited to 107 characters."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        config.option.basetemp = str(Path(config.option.basetemp).with_name(worker))


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own hook appends the groups to the ids
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.parent.name) if item.path.parent.name in FIRST else len(FIRST))
    for item in items:
        if item.get_closest_marker(SERIAL):
            item.add_marker(pytest.mark.xdist_group(SERIAL))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report ids that can be passed to pytest again."""
    if hasattr(report, "node"):  # it came from a worker
        report.nodeid = report.nodeid.removesuffix(f"@{SERIAL}")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Schedule(config, log)


class Schedule(LoadScopeScheduling):  # type: ignore[misc]
    """A scheduler whose scopes are files; the serial tests are one scope, assigned when a single worker is left."""

    def _split_scope(self, nodeid: str) -> str:
        return SERIAL if nodeid.endswith(f"@{SERIAL}") else nodeid.partition("::")[0]

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
