"""Random programs against a model of plain bytes: a link must do what slices of bytearrays do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import vtable as vt
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from vtable import READ, WRITE

SIZE = 600_000  # larger than what is copied inline
WORDS = 64  # the first bytes of the target are signal words

pytestmark = pytest.mark.needs("ALLOC", "SIGNAL", "NOTIFY")


@dataclass(frozen=True)
class Step:
    kind: str
    verb: int = WRITE
    rows: tuple[tuple[int, int, int], ...] = ()  # local offset, remote offset, length
    signal: tuple[int, int] | None = None  # word, value
    note: tuple[bytes, bytes] | None = None
    side: int = 0
    priority: int = 0
    times: int = 1


@st.composite
def rows(draw: st.DrawFn) -> tuple[tuple[int, int, int], ...]:
    """Return rows that do not overlap, because within a batch there is no order."""
    out: list[tuple[int, int, int]] = []
    for _ in range(draw(st.integers(1, 8))):
        length = draw(st.one_of(st.integers(1, 200), st.integers(1, 70_000), st.just(500_000)))
        row = draw(st.integers(0, SIZE - length)), draw(st.integers(WORDS * 8, SIZE + WORDS * 8 - length)), length
        if all(abs(row[i] - other[i]) >= (length if row[i] < other[i] else other[2]) for other in out for i in (0, 1)):
            out.append(row)
    return tuple(out)


notes = st.tuples(st.binary(max_size=20), st.one_of(st.binary(max_size=40), st.integers(0, 980).map(bytes)))
signals = st.tuples(st.integers(0, WORDS - 1), st.integers(0, 2**64 - 1))
sides = st.integers(0, 1)
steps = st.one_of(
    st.builds(
        Step, kind=st.just("move"), verb=st.sampled_from([READ, WRITE]), rows=rows(), signal=st.none() | signals,
        note=st.none() | notes, side=sides, priority=st.integers(-1, 1),
    ),
    st.builds(Step, kind=st.just("note"), note=notes, side=sides, times=st.integers(1, 12)),
    st.builds(Step, kind=st.just("signal"), signal=signals, note=st.none() | notes, side=sides),
    st.builds(Step, kind=st.just("poll"), side=sides),
    st.builds(Step, kind=st.just("cancel"), rows=rows(), note=st.none() | notes, side=sides),
)  # fmt: skip


@dataclass
class Side:
    """One end: its own memory, its view of the other's, and the model of both."""

    link: vt.Link
    here: vt.Memory
    there: vt.Memory
    remote: vt.Memory
    local: bytearray = field(default_factory=lambda: bytearray(SIZE))
    target: bytearray = field(default_factory=lambda: bytearray(SIZE + WORDS * 8))
    sent: list[tuple[bytes, bytes]] = field(default_factory=list)
    waiting: list[vt.Op] = field(default_factory=list)


def run(sides: list[Side], step: Step) -> None:
    side, other = sides[step.side], sides[1 - step.side]
    links = side.link, other.link
    descs = [(side.here, loff, side.remote, roff, length) for loff, roff, length in step.rows]
    signal = (side.remote, step.signal[0] * 8, step.signal[1]) if step.signal else None
    if step.kind == "poll":
        side.link.poll(3)
        return
    # A signal with a notification is awaited, because another notification may overtake it: two batches have no order (T5).
    if step.kind == "note" or (step.kind == "signal" and step.note is None):
        for _ in range(step.times):
            send(side, step, signal)
        return
    if step.note is not None:  # it ends when there is room: make some
        side.link.instance.until(lambda: all(op.released for op in side.waiting), *links)
    op = side.link.submit(step.verb, descs, signal=signal, note=step.note, priority=step.priority)
    if step.kind == "cancel":
        early = side.link.cancel(op) if op.answer == vt.PENDING and vt.has(side.link.vt, "CANCEL") else 0
        status = op.wait(*links)
        assert (status == vt.CANCELLED) == bool(early)
        if early:
            event("cancelled")
            for _, roff, length in step.rows:  # whatever arrived; the rest of the memory is checked below
                side.target[roff : roff + length] = side.there.view[roff : roff + length]
            return
    op.ok(*links)
    apply(side, step)


def send(side: Side, step: Step, signal: tuple[vt.Memory, int, int] | None) -> None:
    op = vt.unless_busy(side.link.submit, signal=signal, note=step.note, priority=step.priority)
    if op is None:
        event("refused for lack of room")
        return
    if op.answer == vt.PENDING:
        event("a note waits for room")
        side.waiting.append(op)
    if step.signal:  # it does not wait for room, but for a thread of the driver perhaps
        word = side.there.view[step.signal[0] * 8 : step.signal[0] * 8 + 8]
        side.link.instance.until(lambda: word == step.signal[1].to_bytes(8, "little"))
        word.release()
    apply(side, step)


def apply(side: Side, step: Step) -> None:
    for loff, roff, length in step.rows:
        if step.verb == WRITE:
            side.target[roff : roff + length] = side.local[loff : loff + length]
        else:
            side.local[loff : loff + length] = side.target[roff : roff + length]
    if step.signal:
        side.target[step.signal[0] * 8 : step.signal[0] * 8 + 8] = step.signal[1].to_bytes(8, "little")
    if step.note is not None:
        side.sent.append(step.note)


programs = given(program=st.lists(steps, max_size=25), threads=st.integers(1, 3), small=st.booleans())
checks = list(HealthCheck)


@programs
@settings(max_examples=50, deadline=None, suppress_health_check=checks)
def test_random_programs(
    driver: vt.CDriver, driver_options: dict[str, str], program: list[Step], threads: int, small: bool
) -> None:
    check(driver, driver_options, program, threads, small)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@programs
@settings(max_examples=2000, deadline=None, suppress_health_check=checks)
def test_many_random_programs(
    driver: vt.CDriver, driver_options: dict[str, str], program: list[Step], threads: int, small: bool
) -> None:
    check(driver, driver_options, program, threads, small)


def check(driver: vt.CDriver, driver_options: dict[str, str], program: list[Step], threads: int, small: bool) -> None:
    options = dict(driver_options)
    if driver.name == b"shm":  # many chunks, a ring that fills
        options |= {"threads": str(threads), "ring_bytes": "4096", "pending_notes": "4"}
        options |= {"chunk_bytes": "4096", "inline_bytes": "1000", "stream_bytes": "2000"} if small else {}
    with vt.Instance(driver, options) as a, vt.Instance(driver, options) as b:
        links = vt.join(a, b)
        sides = []
        for mine, theirs in (links, links[::-1]):
            here, there = mine.instance.alloc(SIZE), theirs.instance.alloc(SIZE + WORDS * 8)
            side = Side(mine, here, there, mine.imported(there))
            vt.fill(here.view, 1 + len(sides))
            side.local[:] = here.view
            sides.append(side)
        for step in program:
            run(sides, step)
            for side in sides:
                assert side.there.view == side.target
                assert side.here.view == side.local
        for side, other in (sides, sides[::-1]):
            a.until(lambda: len(other.link.notes()) == len(side.sent), *links, what="a note is missing")
            assert other.link.notes() == side.sent
            for op in side.waiting:
                op.ok(*links)
