"""Fault plans as data: rules, seeds, and the control block that they share with the driver."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hixl_async import InvalidArgumentError
from hixl_async.testing import FaultPlan, faulty
from hixl_async.testing import plan as module

ROOT = Path(__file__).resolve().parents[2] / "hixl_async"


def test_repr_makes_the_same_plan() -> None:
    plan = (
        FaultPlan(7)
        .delay(0.001, 0.002, part="outcome", every=3)
        .bandwidth(1e6)
        .pending(chance=0.5)
        .hold(nth=2)
        .late(verb="write")
        .stall(0.25, nth=4, count=2)
        .fail("timeout", native=5, index=2, link=True, nth=9)
        .busy(nth=1)
        .reorder(3, 0.5)
        .drop_peer(nth=100)
    )
    again = eval(repr(plan), {"FaultPlan": FaultPlan})
    assert repr(again) == repr(plan)
    assert bytes(again._block) == bytes(plan._block)
    assert repr(plan).startswith("FaultPlan(seed=7).delay(low=0.001, high=0.002, part='outcome', every=3).bandwidth(")
    parsed = FaultPlan.parse(json.loads(json.dumps(plan.spec())))
    assert bytes(parsed._block) == bytes(plan._block)


def test_a_seed_is_chosen_and_shown() -> None:
    one, two = FaultPlan(), FaultPlan()
    assert one.seed != two.seed
    assert repr(one) == f"FaultPlan(seed={one.seed})"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FaultPlan(-1), "seed"),
        (lambda: FaultPlan(1 << 64), "seed"),
        (lambda: FaultPlan(1).delay(-1), "delay"),
        (lambda: FaultPlan(1).delay(2, 1), "delay"),
        (lambda: FaultPlan(1).delay(1, part="all"), "part"),  # type: ignore[arg-type]
        (lambda: FaultPlan(1).bandwidth(0), "rate"),
        (lambda: FaultPlan(1).stall(1.0), "after"),
        (lambda: FaultPlan(1).fail("never"), "status must be one of invalid, range"),  # type: ignore[arg-type]
        (lambda: FaultPlan(1).reorder(1), "window"),
        (lambda: FaultPlan(1).reorder(2, 0), "within"),
        (lambda: FaultPlan(1).hold(nth=0), "nth counts from 1"),
        (lambda: FaultPlan(1).hold(every=-1), "every counts from 1"),
        (lambda: FaultPlan(1).hold(count=0), "count counts from 1"),
        (lambda: FaultPlan(1).hold(chance=1.5), "chance"),
        (lambda: FaultPlan(1).hold(verb="both"), "verb must be one of"),  # type: ignore[arg-type]
        (lambda: FaultPlan(1).release(0), "n counts from 1"),
        (lambda: FaultPlan.parse({"seed": 1}), "not the result of FaultPlan.spec"),
        (lambda: FaultPlan.parse({"seed": 1, "rules": [["explode", {}]]}), "no rule 'explode'"),
        (lambda: FaultPlan.parse({"seed": 1, "rules": [["hold", {"soon": 1}]]}), "not the result of FaultPlan.spec"),
    ],
)
def test_bad_rules(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        make()


def test_too_many_rules() -> None:
    plan = FaultPlan(1)
    for _ in range(64):
        plan.pending()
    with pytest.raises(InvalidArgumentError, match="at most 64"):
        plan.pending()
    assert plan.clear().pending().counts.ops == 0


def test_commands_before_any_engine_do_nothing() -> None:
    plan = FaultPlan(1).hold()
    plan.release()
    plan.break_links()
    assert plan.counts == (0,) * 14


def test_mapping_for_engines() -> None:
    plan = FaultPlan(1)
    mapping = faulty("shm", plan, threads=2)
    assert list(mapping) == ["shm"], "peers see the driver by its own name"
    assert mapping["shm"]["inner.threads"] == 2
    assert os.fspath(mapping["shm"]["control"]) == hex(ctypes.addressof(plan._block))


def test_mirror_equals_header(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to ask about the header")
    lines = ['#include "drivers/faulty/control.h"', '#include "hxa_driver.h"', "#include <stdio.h>", "int main(void) {"]
    expected = []
    for name, mirror in (("faulty_rule", module._Rule), ("faulty_block", module._Block)):
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(mirror)}")
        for field, *_ in mirror._fields_:
            where = f"offsetof({name}, {field}), sizeof((({name} *)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", {where});')
            expected.append(f"{name}.{field} {getattr(mirror, field).offset} {getattr(mirror, field).size}")
    constants = {f"FAULTY_{name.upper()}".replace("DROP_PEER", "DROP"): value for name, value in module._KINDS.items()}
    constants |= {f"FAULTY_{name.upper()}": value for name, value in module._PARTS.items()}
    constants |= {"FAULTY_READS": 1, "FAULTY_WRITES": 2, "FAULTY_BARE": 4}
    constants |= {"FAULTY_RELEASE": module._RELEASE, "FAULTY_BREAK": module._BREAK}
    constants |= {"FAULTY_BLOCK": module._LAYOUT, "FAULTY_RULES": module._RULES}
    constants |= {f"HXA_E_{name.upper()}": value for name, value in module._STATUS.items()}
    for name, value in constants.items():
        lines.append(f'printf("{name} %d\\n", (int){name});')
        expected.append(f"{name} {value}")
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join([*lines, "return 0; }"]))
    include = [f"-I{ROOT}", f"-I{ROOT / 'include'}"]
    subprocess.run([compiler, *include, str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed == expected
