"""The strategies: what they draw is valid, and transfers under harmless plans move exactly what they should."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("hypothesis")

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hixl_async import Batch, HixlError
from hixl_async.testing import FaultPlan, engine_pair, faulty
from hixl_async.testing.strategies import batches, plans

SIZE = 512


def test_hypothesis_is_imported_only_when_asked_for() -> None:
    code = "import sys, hixl_async, hixl_async.testing; assert 'hypothesis' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_testing_is_imported_only_when_asked_for() -> None:
    code = "import sys, hixl_async; assert not any(name.startswith('hixl_async.testing') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_batches_are_valid(data: st.DataObject) -> None:
    sizes = data.draw(st.tuples(st.integers(1, 200), st.integers(1, 200)))
    disjoint = data.draw(st.booleans())
    rows = data.draw(batches(*sizes, disjoint=disjoint))
    assert rows
    for side, size in enumerate(sizes):
        spans = sorted((row[side], row[side] + row[2]) for row in rows)
        assert all(0 <= start < stop <= size for start, stop in spans)
        if disjoint:
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


@given(plans())
@settings(deadline=None, max_examples=100)
def test_drawn_plans_are_valid(plan: FaultPlan) -> None:
    assert bytes(FaultPlan.parse(plan.spec())._block) == bytes(plan._block)
    assert repr(eval(repr(plan), {"FaultPlan": FaultPlan})) == repr(plan)


Work = list[tuple[str, list[tuple[int, int, int]]]]
works: st.SearchStrategy[Work] = st.lists(
    st.tuples(st.sampled_from(["read", "write"]), batches(SIZE)), min_size=1, max_size=8
)
relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def play(plan: FaultPlan, work: Work, *, one_by_one: bool) -> tuple[list[Any], bool]:
    """Do the work; return the outcomes, and whether the bytes are those of plain copies."""
    async with engine_pair(drivers=faulty("shm", plan), stall=0.3, close_timeout=1.0) as pair:
        there, remote = await pair.region("there", SIZE)
        here = pair.left.allocate("here", SIZE)
        left, right = here.numpy(), there.numpy()
        left[:] = np.arange(SIZE) % 251
        right[:] = np.arange(SIZE) % 241
        model = left.copy(), right.copy()
        outcomes: list[Any] = []
        for verb, rows in work:
            try:
                transfer = pair.left.submit(Batch(verb, here, remote, rows))
                if one_by_one:
                    outcomes.append(await transfer)
                else:
                    outcomes.append(transfer)
            except HixlError as error:
                outcomes.append(error)
            for loff, roff, length in rows:
                source, target = (model[0], model[1]) if verb == "write" else (model[1], model[0])
                start, end = (loff, roff) if verb == "write" else (roff, loff)
                target[end : end + length] = source[start : start + length]
        if not one_by_one:
            waited = await asyncio.gather(
                *(o for o in outcomes if not isinstance(o, HixlError)), return_exceptions=True
            )
            outcomes = [o for o in outcomes if isinstance(o, HixlError)] + waited
        plan.release()
        await pair.left.drained(here)
        same = bool((left == model[0]).all() and (right == model[1]).all())
        del left, right
        return outcomes, same


def test_harmless_plans_change_no_outcome(runner: asyncio.Runner) -> None:
    @given(plans(harmless=True), works)
    @relaxed
    def check(plan: FaultPlan, work: Work) -> None:
        outcomes, same = runner.run(play(plan, work, one_by_one=True))
        assert outcomes == [sum(length for _, _, length in rows) for _, rows in work]
        assert same

    check()


def test_any_plan_ends_in_a_typed_outcome(runner: asyncio.Runner) -> None:
    @given(plans(), works)
    @relaxed
    def check(plan: FaultPlan, work: Work) -> None:
        outcomes, _ = runner.run(play(plan, work, one_by_one=False))
        assert len(outcomes) == len(work)
        for outcome in outcomes:
            assert isinstance(outcome, (int, HixlError, asyncio.CancelledError)), outcome

    check()
