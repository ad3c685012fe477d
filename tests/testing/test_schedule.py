"""The distribution of tests over workers: whole files, and the serial tests last, when one worker is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.schedule import Schedule


class Worker:
    """A worker as pytest-xdist has them: it runs a test once it knows the next one, or that there is none."""

    def __init__(self, schedule: Schedule, ids: list[str]) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.shutting_down = False
        self.queue: list[int] = []
        self.ran: list[str] = []
        self._schedule, self._ids = schedule, ids
        schedule.add_node(self)
        schedule.add_node_collection(self, ids)

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def ready(self) -> bool:
        return len(self.queue) > 1 or (self.shutting_down and bool(self.queue))

    @property
    def finished(self) -> bool:
        return self.shutting_down and not self.queue

    def run_one(self) -> None:
        index = self.queue.pop(0)
        self.ran.append(self._ids[index])
        self._schedule.mark_test_complete(self, index)


def scheduled(ids: list[str], workers: int = 2) -> tuple[Schedule, list[Worker]]:
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: [f"{workers}*popen"])
    schedule = Schedule(config, None)
    made = [Worker(schedule, ids) for _ in range(workers)]
    schedule.schedule()
    return schedule, made


def run_all(schedule: Schedule, workers: list[Worker], first: int) -> list[str]:
    """Run to the end, as often as possible with worker number `first`; the ids in the order in which they ran."""
    order: list[str] = []
    workers = [*workers[first:], *workers[:first]]
    while workers:
        for worker in workers:
            if worker.finished:
                workers.remove(worker)
                assert schedule.remove_node(worker) is None
                break
            if worker.ready:
                worker.run_one()
                order.append(worker.ran[-1])
                if order[-1].endswith("@serial"):
                    assert all(not other.queue for other in workers if other is not worker), "another test runs"
                break
        else:
            raise AssertionError("the workers wait for each other")
    return order


FILES = [f"tests/{name}.py::test_{number}" for name, count in (("a", 1), ("b", 4), ("c", 3)) for number in range(count)]
SERIAL = ["tests/a.py::test_load@serial", "tests/d.py::test_load@serial"]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("ids", [FILES, [*SERIAL, *FILES], [*FILES, *SERIAL], SERIAL, [*FILES[:1], *SERIAL], FILES[:1]])
def test_every_test_runs_once(ids: list[str], first: int) -> None:
    schedule, workers = scheduled(ids)
    order = run_all(schedule, [worker for worker in workers if worker in schedule.nodes], first)
    assert sorted(order) == sorted(ids)
    serial = [name for name in order if name.endswith("@serial")]
    assert order[len(order) - len(serial) :] == serial


@pytest.mark.parametrize("first", [0, 1])
def test_a_file_stays_on_one_worker(first: int) -> None:
    schedule, workers = scheduled([*FILES, *SERIAL])
    run_all(schedule, workers, first)
    owners: dict[str, set[int]] = {}
    for number, worker in enumerate(workers):
        for name in worker.ran:
            if not name.endswith("@serial"):
                owners.setdefault(name.partition("::")[0], set()).add(number)
    assert all(len(numbers) == 1 for numbers in owners.values())


def test_a_crashed_worker_is_replaced() -> None:
    """Its tests are run by others; the one that it ran is reported."""
    ids = [*FILES, *SERIAL]
    schedule, (left, right) = scheduled(ids)
    left.run_one()
    crashed = ids[left.queue[0]]
    assert schedule.remove_node(left) == crashed
    spare = Worker(schedule, ids)
    schedule.schedule()
    order = [*left.ran, *run_all(schedule, [right, spare], 0)]
    assert sorted(set(order)) == sorted(ids)
