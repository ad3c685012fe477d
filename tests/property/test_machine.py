"""Random programs of engines, regions, transfers, faults and ends, against a model of plain bytes.

Each program runs on real engines, on a loop of its own, and ends with an empty balance sheet.  A failure is shown as the
shortest program that hypothesis finds, with a line that repeats it; ``--hypothesis-seed=N`` repeats a whole run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ClassVar, Concatenate, ParamSpec

import pytest
import uvloop
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import hixl_async.engine.peer
from hixl_async import (
    Batch,
    BusyError,
    ClosedError,
    ConnectError,
    Engine,
    HixlError,
    Peer,
    PeerDownError,
    PeerLostError,
    PeerState,
    RangeError,
    StaleRegionError,
    Transfer,
)
from hixl_async.core.memory import link_of
from hixl_async.testing import BalanceSheet, FaultPlan, faulty, until

from .model import CELL, CELLS, Import, Memory, Operation, pattern

P = ParamSpec("P")

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
NAMES = ("a", "b", "c")
ENGINES = st.integers(0, len(NAMES) - 1)
PICK = st.integers(0, 1 << 16)
#: The errors that may refuse new work while connections end and faults occur.
REFUSED = (BusyError, PeerDownError, StaleRegionError, ClosedError)
#: Rules that a plan has room for.
PLANNED = 64
FAULTS = ("delay", "fail", "hold", "late", "stall", "busy", "pending", "reorder", "drop_peer")


def on_loop(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[Any, P], None]:
    """A step of the machine, run on its loop."""

    @functools.wraps(method)
    def step(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
        self.runner.run(method(self, *args, **kwargs))

    return step


class Machine(RuleBasedStateMachine):
    """The rules; drivers come with the subclasses."""

    #: The number of programs that have run.
    programs: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.sheet = BalanceSheet()
        self.reports: list[dict[str, Any]] = []
        self.runner: asyncio.Runner | None = None
        self.engines: list[Engine] = []
        self.locals: list[Memory] = []
        self.owned: list[dict[str, Memory]] = [{} for _ in NAMES]
        self.imports: list[Import] = []
        self.operations: list[Operation] = []
        self.expected: dict[int, str] = {}  # notifications, by number: "perhaps", "surely", "never"
        self.receivers: dict[int, Engine] = {}
        self.number = 0
        self.plan = FaultPlan(seed=0)

    def unique(self) -> int:
        self.number += CELLS
        return self.number

    # -- life

    @initialize(loop=st.sampled_from(sorted(LOOPS)), inline=st.booleans(), seed=st.integers(0, 1 << 32))
    def begin(self, loop: str, inline: bool, seed: int) -> None:
        type(self).programs += 1
        self.runner = asyncio.Runner(loop_factory=LOOPS[loop])
        self.runner.get_loop().set_exception_handler(lambda _, context: self.reports.append(context))
        self.options = {} if inline else {"inline_bytes": 0, "threads": 2}
        self.plan = FaultPlan(seed=seed)
        self.begin_engines()

    @on_loop
    async def begin_engines(self) -> None:
        for which in range(len(NAMES)):
            engine, local = await self._open(which)
            self.engines.append(engine)
            self.locals.append(local)

    def _drivers(self) -> dict[str, Any]:
        return {"shm": self.options}

    async def _open(self, which: int) -> tuple[Engine, Memory]:
        engine = Engine("127.0.0.1:0", name=NAMES[which], drivers=self._drivers(), close_timeout=2)
        await engine.open()
        return engine, Memory.of(engine.allocate("local", CELL * CELLS), self.unique())

    @rule(which=ENGINES)
    @on_loop
    async def reopen(self, which: int) -> None:
        """Close an engine with everything that it does, and open a new one."""
        await self._close(which)
        self.engines[which], self.locals[which] = await self._open(which)

    async def _close(self, which: int) -> None:
        engine = self.engines[which]
        self._take_notes()
        async with self._releasing():
            await engine.aclose()
        stats = engine.stats()
        assert (stats.in_flight, stats.pinned, stats.regions, stats.remote_regions, stats.peers) == (0, 0, 0, 0, 0)
        self.owned[which].clear()
        await self._settle()

    @rule(one=ENGINES, two=ENGINES)
    @on_loop
    async def connect(self, one: int, two: int) -> None:
        if one != two:
            await self._connect(one, two)

    async def _connect(self, one: int, two: int) -> Peer:
        dialler, listener = self.engines[one], self.engines[two]
        for _ in range(3):
            with contextlib.suppress(ConnectError):  # it met the end of an earlier connection
                peer = await dialler.connect(listener.address)
                assert peer.identity.incarnation == listener.incarnation
                if peer.state is PeerState.UP:
                    assert await dialler.connect(listener.address) is peer
                    return peer
        raise AssertionError("no connection in three attempts")

    def _peer(self, one: int, pick: int) -> Peer | None:
        peers = self.engines[one].peers
        return peers[pick % len(peers)] if peers else None

    @rule(one=ENGINES, pick=PICK)
    @on_loop
    async def close_peer(self, one: int, pick: int) -> None:
        if (peer := self._peer(one, pick)) is not None:
            for operation in self.operations:
                # A notification to a leaving peer is lost if it arrives after the last look into the queue.
                if operation.note is not None and self.receivers.get(operation.note) is self.engines[one]:
                    del self.receivers[operation.note]
            async with self._releasing():
                await peer.aclose()

    # -- regions

    @rule(owner=ENGINES)
    @on_loop
    async def allocate(self, owner: int) -> None:
        self._allocate(owner)

    def _allocate(self, owner: int) -> None:
        name = f"region {self.unique()}"
        region = self.engines[owner].allocate(name, CELL * CELLS, access="read-write")
        self.owned[owner][name] = Memory.of(region, self.unique())

    async def _import(self, pick: int) -> Import | None:
        """Return some engine's view of some region of another; connect and import what that needs.

        None if it met the end of a connection whose link was broken.
        """
        user, owner = pick % len(NAMES), (pick + 1 + pick // 7 % (len(NAMES) - 1)) % len(NAMES)
        if not self.owned[owner]:
            self._allocate(owner)
        name = sorted(self.owned[owner])[pick % len(self.owned[owner])]
        memory = self.owned[owner][name]
        for known in self.imports:
            if known.memory is memory and known.user == user and known.remote.alive and link_of(known.remote).up:
                return known
        peer = await self._connect(user, owner)
        try:
            remote = await peer.region(name, timeout=5)
        except (PeerDownError, ClosedError):
            assert self.plan.counts.broken
            return None
        self.imports.append(Import(user, owner, memory, remote))
        return self.imports[-1]

    @rule(owner=ENGINES, pick=PICK)
    @on_loop
    async def close_region(self, owner: int, pick: int) -> None:
        if not self.owned[owner]:
            return
        names = sorted(self.owned[owner])
        memory = self.owned[owner].pop(names[pick % len(names)])
        async with self._releasing():
            await memory.region.aclose()
            await until(lambda: memory.region.pins == 0 or self._a_peer_is_lost(), timeout=20)
        await self._settle()

    def _a_peer_is_lost(self) -> bool:
        """True if a peer was lost without a goodbye, because it may still hold memory."""
        return any(peer.state is PeerState.DOWN for engine in self.engines for peer in engine._peers)

    # -- work

    @rule(pick=PICK, verb=st.sampled_from(["read", "write"]), count=st.integers(1, 4), notify=st.booleans())
    @on_loop
    async def transfer(self, pick: int, verb: str, count: int, notify: bool) -> None:
        """Transfer one descriptor, or a batch of several."""
        await self._transfer(pick, verb, count, notify)

    @rule(pick=PICK, verb=st.sampled_from(["read", "write"]), timeout=st.sampled_from([0.001, 0.02]))
    @on_loop
    async def transfer_with_timeout(self, pick: int, verb: str, timeout: float) -> None:
        await self._transfer(pick, verb, 1, False, timeout=timeout, priority="high")

    async def _transfer(self, pick: int, verb: str, count: int, notify: bool, **options: Any) -> None:
        chosen = await self._import(pick)
        if chosen is None:
            return
        engine, local = self.engines[chosen.user], self.locals[chosen.user]
        here, there = local.free(), chosen.memory.free()
        moves = [(local, left, chosen.memory, right) for left, right in zip(here, there, strict=False)][:count]
        if not moves:
            return
        for _, left, _, _ in moves if verb == "write" else ():
            local.cells[left] = pattern(self.unique())
            memoryview(local.region)[cut(left)] = local.cells[left]
        data = [memory.cells[cell] for memory, cell in ((m[0:2] if verb == "write" else m[2:4]) for m in moves)]
        note = None
        if notify:
            note = self.unique()
            options["notify"] = ("operations", note.to_bytes(8, "big"))
        parts = [(local.region[cut(left)], chosen.remote[cut(right)]) for _, left, _, right in moves]
        with contextlib.suppress(*REFUSED):
            if len(parts) > 1:
                transfer = engine.submit(Batch(verb, parts), **options)  # type: ignore[call-overload]
            elif verb == "write":
                transfer = engine.write(*parts[0], **options)
            else:
                transfer = engine.read(*parts[0], **options)
            self._launched(Operation(transfer, verb, moves, data, note), self.engines[chosen.owner])

    def _launched(self, operation: Operation, receiver: Engine) -> None:
        operation.begin()
        self.operations.append(operation)
        if operation.note is not None:
            self.expected[operation.note] = "perhaps"
            self.receivers[operation.note] = receiver

    @rule(pick=PICK, verb=st.sampled_from(["read", "write"]))
    @on_loop
    async def many_transfers(self, pick: int, verb: str) -> None:
        """Transfer to all engines before any outcome is looked at."""
        for further in range(4):
            await self._transfer(pick + further, verb, 2, bool(further % 2))

    @rule(one=ENGINES, pick=PICK)
    @on_loop
    async def notify(self, one: int, pick: int) -> None:
        if (peer := self._peer(one, pick)) is not None:
            note = self.unique()
            with contextlib.suppress(*REFUSED):
                transfer = self.engines[one].notify(peer, "operations", note.to_bytes(8, "big"))
                receiver = next(e for e in self.engines if e.incarnation == peer.identity.incarnation)
                self._launched(Operation(transfer, "note", [], [], note), receiver)

    @rule(one=ENGINES, pick=PICK)
    @on_loop
    async def ask(self, one: int, pick: int) -> None:
        if (peer := self._peer(one, pick)) is not None:
            with contextlib.suppress(PeerDownError, ClosedError):
                assert await peer.request("hixl.ping", {"n": pick}) == {"n": pick}

    @rule(pick=PICK, count=st.integers(1, 3))
    @on_loop
    async def group(self, pick: int, count: int) -> None:
        """Write several times in a group; when it is left, all have ended and their memory is free."""
        chosen = await self._import(pick)
        if chosen is None:
            return
        local = self.locals[chosen.user]
        cells = [cell for cell in local.free() if cell in chosen.memory.free()][:count]
        try:
            async with self._releasing(), self.engines[chosen.user].group() as group:
                for cell in cells:
                    group.write(local.region[cut(cell)], chosen.remote[cut(cell)])
        except* HixlError:
            chosen.memory.forget(cells)
        else:
            for cell in cells:
                chosen.memory.cells[cell] = local.cells[cell]
        finally:
            event("a group")

    @contextlib.asynccontextmanager
    async def _releasing(self) -> AsyncIterator[None]:
        """Release, meanwhile, whatever is held, because it would delay the end."""

        async def release() -> None:
            while True:
                self.plan.release()
                await asyncio.sleep(0.001)

        releasing = asyncio.ensure_future(release())
        try:
            yield
        finally:
            releasing.cancel()

    @rule(pick=PICK)
    @on_loop
    async def cancel(self, pick: int) -> None:
        running = [operation.transfer for operation in self.operations if not operation.transfer.done()]
        if running:
            chosen: Transfer = running[pick % len(running)]
            assert chosen.cancel()
            assert not chosen.cancel()

    @rule(pick=PICK, wrong=st.sampled_from(["range", "length", "stale"]))
    @on_loop
    async def mistake(self, pick: int, wrong: str) -> None:
        """Make a mistake, which is refused and changes nothing."""
        if not self.imports:
            return
        chosen = self.imports[pick % len(self.imports)]
        engine = self.engines[chosen.user]
        before = engine.stats().transfers
        usable = chosen.remote.alive and link_of(chosen.remote).up
        with pytest.raises(RangeError if usable or wrong == "range" else HixlError):
            if wrong == "range":
                engine.write(b"x", chosen.remote[CELL * CELLS : CELL * CELLS + 1])
            elif wrong == "length" or usable:
                engine.write(b"x" * CELL, chosen.remote[0 : CELL - 1])
            else:
                engine.write(b"x" * CELL, chosen.remote[0:CELL])
        assert engine.stats().transfers == before

    @rule()
    @on_loop
    async def wait(self) -> None:
        """Let things happen."""
        await self._settle()

    async def _settle(self) -> None:
        running = [operation.transfer for operation in self.operations if not operation.transfer.done()]
        if running:
            await asyncio.wait(running, timeout=0.01)
        await asyncio.sleep(0)

    @rule()
    @on_loop
    async def wait_for_all(self) -> None:
        """Release everything that is held, wait until everything ends, and compare every byte."""
        async with self._releasing():
            for operation in self.operations:
                with contextlib.suppress(asyncio.CancelledError, HixlError):
                    await operation.transfer
                await operation.transfer.drained()
        self._update()
        assert not self.operations
        await until(lambda: not self._missing(), timeout=20)

    def _missing(self) -> list[int]:
        """Return notifications that were sent, and lost neither with their receiver nor by a broken link."""
        self._take_notes()
        if self.plan.counts.broken:
            return []
        sure = [number for number, state in self.expected.items() if state == "surely"]
        return [number for number in sure if number in self.receivers and not self.receivers[number].closed]

    # -- after every step

    @invariant()
    def consistent(self) -> None:
        if self.runner is not None:
            self._check_all()

    @on_loop
    async def _check_all(self) -> None:
        await asyncio.sleep(0)
        self._update()
        self._take_notes()
        for memory in [*self.locals, *(memory for owned in self.owned for memory in owned.values())]:
            memory.check()
        for engine in self.engines:
            if not engine.closed:
                stats = engine.stats()
                assert stats.in_flight <= stats.pinned
                assert stats.notifications_dropped == 0
        assert not self.reports, self.reports

    def _update(self) -> None:
        for operation in list(self.operations):
            transfer = operation.transfer
            if transfer.done() and not operation.resolved:
                operation.resolve()
                event(f"{operation.verb}: {outcome(transfer)}")
                if operation.note in self.expected and not transfer.cancelled():
                    error = transfer.exception()
                    # Work that a broken link gave up may still land late, and with it what follows it.
                    if not isinstance(error, PeerLostError):
                        self.expected[operation.note] = "never" if error else "surely"
            if operation.resolved and transfer.drained().done():
                operation.end()
                self.operations.remove(operation)

    def _take_notes(self) -> None:
        for engine in self.engines:
            if engine.closed:
                continue
            with contextlib.closing(engine.notifications("operations")) as notes:
                while (note := notes.get_nowait()) is not None:
                    number = int.from_bytes(note.payload, "big")
                    assert number in self.expected, f"note {number} was never sent, or came twice"
                    assert self.expected.pop(number) != "never", f"note {number} of a transfer that failed"

    # -- the end

    def teardown(self) -> None:
        if self.runner is None:
            return
        try:
            self.wait_for_all()
            self.consistent()
            self._close_all()
        finally:
            with contextlib.suppress(Exception):
                self._abandon()
            self.runner.close()
        assert not self.reports, self.reports
        for kept in (self.operations, self.imports, self.locals, self.owned, self.engines):
            kept.clear()  # type: ignore[attr-defined]
        self.sheet.settle_blocking(5)

    @on_loop
    async def _close_all(self) -> None:
        for which in range(len(self.engines)):
            await self._close(which)

    @on_loop
    async def _abandon(self) -> None:
        """Clean up after a failure, so that the next program starts afresh."""
        self.plan.release()
        for engine in self.engines:
            await engine.aclose()


def outcome(transfer: Transfer) -> str:
    """Return the outcome in a word."""
    if transfer.cancelled():
        return "cancelled"
    return type(transfer.exception()).__name__ if transfer.exception() else "done"


def cut(cell: int) -> slice:
    """Return the bytes of a cell."""
    return slice(cell * CELL, (cell + 1) * CELL)


class Shm(Machine):
    """Engines on shared memory as it is."""


class FaultyShm(Machine):
    """Engines on shared memory with faults of all kinds."""

    def _drivers(self) -> dict[str, Any]:
        return dict(faulty("shm", self.plan, **self.options))

    @precondition(lambda self: self.plan._block.rules < PLANNED - 4)
    @rule(
        faults=st.lists(
            st.tuples(st.sampled_from(FAULTS), st.sampled_from(["any", "read", "write", "note"]), st.integers(1, 3)),
            min_size=1,
            max_size=4,
        )
    )
    def fault(self, faults: list[tuple[str, Any, int]]) -> None:
        """Make some of the next operations fail."""
        for fault, verb, nth in faults:
            event(f"fault: {fault}")
            if fault == "reorder":
                self.plan.reorder(1 + nth, 0.002, verb=verb)
            elif fault == "delay":
                self.plan.delay(0.0001, 0.003, verb=verb, nth=nth, every=2, count=3)
            else:
                getattr(self.plan, fault)(verb=verb, nth=nth, every=2, count=1 if fault == "drop_peer" else 3)

    @rule()
    def release(self) -> None:
        self.plan.release()


def run_programs(machine: type[Machine], count: int) -> None:
    """Run that many, and shrink the first that fails."""
    machine.programs = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=30,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
    assert machine.programs >= count


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hixl_async.engine.peer, "GOODBYE_GRACE", 0.01)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("machine", [Shm, FaultyShm])
def test_random_programs(machine: type[Machine]) -> None:
    run_programs(machine, 100)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", [Shm, FaultyShm])
def test_many_random_programs(machine: type[Machine]) -> None:
    run_programs(machine, 2000)
