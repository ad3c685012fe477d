"""The class of every error tells what happened to the memory of transfers, whatever goes wrong and when.

A program is a list of calls over a link with faults; each has cells of its own on both sides.  At the end of it, when
everything has drained, the memory is compared with what the class of each error says.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import hixl_async as hx
import hixl_async.engine.peer
from hixl_async import errors
from hixl_async.testing import EnginePair, FaultPlan, engine_pair, faulty
from hixl_async.testing.plan import Status

from .test_machine import LOOPS

CELL, PER_CALL, CALLS = 64, 3, 12
ROOTS = (errors.RefusedError, errors.TransferError)
LAYERS = 2
GROUP = hx.kv.Group.attention(LAYERS, kv_heads=1, head_dim=8, dtype="float16")
VIEW = hx.kv.View.ordered(GROUP, blocks=CALLS, block_tokens=2)
FAULTS: dict[str, Callable[[FaultPlan, dict[str, Any]], FaultPlan]] = {
    "fail": lambda plan, words: plan.fail(**words),
    "busy": lambda plan, words: plan.busy(**words),
    "drop": lambda plan, words: plan.drop_peer(**words),
    "hold": lambda plan, words: plan.hold(**words),
    "late": lambda plan, words: plan.late(**words),
    "stall": lambda plan, words: plan.stall(0.5, **words),
    "pending": lambda plan, words: plan.pending(**words),
    "delay": lambda plan, words: plan.delay(0.001, **words),
}
WORKS = ("write", "read", "batch", "notify", "signal", "group", "coalescer", "stream", "region", "request", "connect")
ENDS = ("close peer", "close region", "close engine", "break link")


def kinds() -> list[type[errors.HixlError]]:
    return [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", kinds())
def test_every_error_has_one_root(kind: type[errors.HixlError]) -> None:
    abstract = kind in (errors.HixlError, errors.StreamError)
    assert sum(issubclass(kind, root) for root in ROOTS) == (0 if abstract else 1)
    assert [other for other in kinds() if other.code == kind.code] == [kind]
    assert isinstance(kind.retryable, bool)
    assert inspect.getdoc(kind)


def test_no_error_is_private() -> None:
    found = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    assert found == set(kinds())


@dataclass
class Call:
    """A call, the memory that it would change, and the error that it raised."""

    number: int
    what: str
    #: Ranges that success changes, with what they held before.
    targets: list[tuple[memoryview, bytes]] = field(default_factory=list)
    raised: list[BaseException] = field(default_factory=list)
    #: The number that a notification of it bears.
    notifies: bool = False
    #: False: it moves no transfer memory, so that nothing of it may fail in flight.
    transfers: bool = True

    @contextlib.contextmanager
    def catching(self) -> Any:
        """Record what is raised."""
        try:
            yield
        except BaseExceptionGroup as group:
            self.raised += group.exceptions
        except (errors.HixlError, asyncio.CancelledError) as error:
            self.raised.append(error)

    def check(self, heard: set[int]) -> None:
        """Compare what it raised with what happened to the memory."""
        changed = any(bytes(view) != before for view, before in self.targets)
        for error in self.raised:
            if isinstance(error, asyncio.CancelledError):  # of a member of a group; what failed is among the errors
                continue
            assert isinstance(error, errors.HixlError), (self, error)
            assert sum(isinstance(error, root) for root in ROOTS) == 1, error
            event(f"{self.what}: {type(error).__name__}")
            assert self.transfers or isinstance(error, errors.RefusedError), (self.what, error)
        if self.raised and all(isinstance(error, errors.RefusedError) for error in self.raised):
            assert not changed, (self.what, self.raised)
            assert self.number not in heard, (self.what, self.raised)


class Program:
    """The two sides of a program, and its calls so far."""

    def __init__(self, pair: EnginePair, plan: FaultPlan, here: hx.Region, there: hx.Region, kv: Any) -> None:
        self.pair, self.plan, self.here, self.there, self.kv = pair, plan, here, there, kv
        self.remote: hx.RemoteRegion
        self.peer = pair.peer
        self.views = memoryview(here), memoryview(there)
        self.made = 0
        self.calls: list[Call] = []
        self.blocks: list[Any] = []  # given back at the end, so that no two streams fill the same
        self.tasks: list[asyncio.Task[None]] = []
        self.heard: set[int] = set()

    def cells(self, number: int) -> list[slice]:
        first = number * PER_CALL * CELL
        return [slice(first + n * CELL, first + (n + 1) * CELL) for n in range(PER_CALL)]

    def targets(self, side: int, cells: list[slice]) -> list[tuple[memoryview, bytes]]:
        return [(self.views[side][cell], bytes(self.views[side][cell])) for cell in cells]

    def begin(self, what: str, timeout: float | None) -> None:
        """Start one call; it goes on while others are made."""
        call = Call(self.made, what)
        self.made += 1
        self.calls.append(call)
        work: Callable[[Call, dict[str, Any]], Awaitable[None] | None]
        work = getattr(self, what.replace(" ", "_"))
        options = {} if timeout is None else {"timeout": timeout}
        with call.catching():
            going = work(call, options)
            if going is not None:
                self.tasks.append(asyncio.ensure_future(self._finish(call, going)))

    async def _finish(self, call: Call, going: Awaitable[Any]) -> None:
        with call.catching():
            await going

    # -- transfers

    def write(self, call: Call, options: dict[str, Any]) -> Any:
        (cell, *_) = self.cells(call.number)
        call.targets, call.notifies = self.targets(1, [cell]), True
        note = ("n", call.number.to_bytes(2, "big"))
        return self.pair.left.write(self.here[cell], self.remote[cell], notify=note, **options)

    def read(self, call: Call, options: dict[str, Any]) -> Any:
        (cell, *_) = self.cells(call.number)
        call.targets = self.targets(0, [cell])
        return self.pair.left.read(self.here[cell], self.remote[cell], **options)

    def batch(self, call: Call, options: dict[str, Any]) -> Any:
        cells = self.cells(call.number)
        call.targets, call.notifies = self.targets(1, cells), True
        batch = hx.Batch("write", [(self.here[cell], self.remote[cell]) for cell in cells])
        return self.pair.left.submit(batch, notify=("n", call.number.to_bytes(2, "big")), **options)

    def notify(self, call: Call, options: dict[str, Any]) -> Any:
        call.notifies = True
        return self.pair.left.notify(self.peer, "n", call.number.to_bytes(2, "big"))

    def signal(self, call: Call, options: dict[str, Any]) -> Any:
        cell, word, _ = self.cells(call.number)
        call.targets = self.targets(1, [cell, word])
        signal = (self.remote[word.start : word.start + 8], 7)
        return self.pair.left.write(self.here[cell], self.remote[cell], signal=signal, **options)

    async def group(self, call: Call, options: dict[str, Any]) -> None:
        cells = self.cells(call.number)
        call.targets = self.targets(1, cells)
        singles = [Call(call.number, "a member of a group", [target]) for target in call.targets]
        self.calls += singles
        members: list[tuple[Call, Any]] = []
        with call.catching():
            async with self.pair.left.group() as group:
                for single, cell in zip(singles, cells, strict=True):
                    with single.catching():
                        members.append((single, group.write(self.here[cell], self.remote[cell], **options)))
        for single, member in members:
            with single.catching():
                member.result()

    async def coalescer(self, call: Call, options: dict[str, Any]) -> None:
        cells = self.cells(call.number)
        call.targets = self.targets(1, cells)
        async with self.pair.left.coalesce() as few:
            for cell in cells:
                few.write(self.here[cell], self.remote[cell])

    async def stream(self, call: Call, options: dict[str, Any]) -> None:
        source, target = self.kv
        blocks = await target.reserve(blocks=1)
        mine = await source.reserve(blocks=1)
        view = target.regions[0].numpy("uint8", (LAYERS, 2, target.blocks, -1))
        pieces = [memoryview(view[layer, part, blocks.ids[0]]) for layer in range(LAYERS) for part in range(2)]
        consumer = Call(call.number, "the consumer of a stream", [(piece, bytes(piece)) for piece in pieces])
        call.targets = consumer.targets
        self.calls.append(consumer)
        stream = blocks.stream()
        ticket = stream.ticket()
        if options and call.number % 2:  # before a producer has used the ticket
            await stream.abort()
        with call.catching():
            async with source.open_stream(self.peer, ticket, timeout=1) as out:
                if call.number % 3:  # else the layers wait for the consumer's answer
                    await out
                for layer in range(1 if options else LAYERS):
                    out.push(layer, mine)
        await stream.abort()
        with consumer.catching():
            await stream.finished()
        await mine.aclose()
        self.blocks.append(blocks)

    # -- waits and questions

    def region(self, call: Call, options: dict[str, Any]) -> Any:
        call.transfers = False
        return self.peer.region("none such" if options else "there", timeout=options.get("timeout", 0.05))

    def request(self, call: Call, options: dict[str, Any]) -> Any:
        call.transfers = False
        return self.peer.request("wait" if options else "answer", {}, timeout=options.get("timeout", 1))

    def connect(self, call: Call, options: dict[str, Any]) -> Any:
        call.transfers = False
        return self.pair.left.connect(self.pair.right.address if options else "127.0.0.1:1", timeout=1)

    # -- ends

    def close_peer(self, call: Call, options: dict[str, Any]) -> Any:
        return (self.pair.back if options else self.peer).aclose()

    def close_region(self, call: Call, options: dict[str, Any]) -> Any:
        return self.there.aclose()

    def close_engine(self, call: Call, options: dict[str, Any]) -> Any:
        return (self.pair.right if options else self.pair.left).aclose()

    def break_link(self, call: Call, options: dict[str, Any]) -> None:
        self.plan.break_links()

    # -- the end of the program

    async def listen(self) -> None:
        async for note in self.pair.right.notifications("n"):
            self.heard.add(int.from_bytes(note.payload, "big"))

    async def drained(self) -> None:
        """Wait until all calls have ended, and nothing of them is in flight any more; what is held has to be released."""
        await asyncio.gather(*self.tasks)
        with contextlib.suppress(hx.ClosedError):
            await self.pair.left.drained(self.here)

    async def finish(self) -> None:
        """Let everything end, and check every call."""
        ending = asyncio.ensure_future(self.drained())
        while not ending.done():
            self.plan.release()
            await asyncio.wait([ending], timeout=0.002)
        ending.result()
        await self.pair.left.aclose()
        for call in self.calls:
            call.check(self.heard)
        for blocks in self.blocks:
            await blocks.aclose()
        for view in (*self.views, *(view for call in self.calls for view, _ in call.targets)):
            view.release()


@contextlib.asynccontextmanager
async def program(plan: FaultPlan) -> AsyncIterator[Program]:
    size = CELL * PER_CALL * CALLS
    async with engine_pair(drivers=faulty("shm", plan), close_timeout=0.3) as pair:
        there = pair.right.allocate("there", size, access="read-write")
        here = pair.left.allocate("here", size)
        memoryview(here)[:], memoryview(there)[:] = b"h" * size, b"t" * size
        pair.right.serve("answer", lambda peer, body: body)
        pair.right.serve("wait", lambda peer, body: asyncio.get_running_loop().create_future())
        async with (
            hx.kv.Pool(pair.left, VIEW, access="none") as source,
            hx.kv.Pool(pair.right, VIEW) as target,
        ):
            memoryview(source.regions[0])[:] = b"s" * source.regions[0].size
            made = Program(pair, plan, here, there, (source, target))
            made.remote = await pair.peer.region("there")
            listening = asyncio.ensure_future(made.listen())
            try:
                yield made
                await made.finish()
            finally:
                plan.clear()
                plan.release()
                listening.cancel()


steps = st.tuples(st.sampled_from(WORKS * 2 + ENDS), st.sampled_from([None, 0.001]), st.integers(0, 3))
faults = st.tuples(
    st.sampled_from(sorted(FAULTS)),
    st.integers(1, 4),
    st.sampled_from(["any", "write", "read"]),
    st.sampled_from(get_args(Status)),
)


@pytest.mark.parametrize("loop", sorted(LOOPS))
@settings(
    max_examples=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    wanted=st.lists(steps, min_size=1, max_size=CALLS), planned=st.lists(faults, max_size=3), seed=st.integers(0, 99)
)
def test_the_class_of_an_error_tells_whether_memory_was_touched(
    loop: str, wanted: list[Any], planned: list[Any], seed: int
) -> None:
    plan = FaultPlan(seed)
    for fault, nth, verb, status in planned:
        words: dict[str, Any] = {"every": nth, "count": 2, "verb": verb}
        if fault == "fail":
            words.update(status=status, index=seed % 3)
        FAULTS[fault](plan, words)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: None)  # losses that no task awaits
        async with program(plan) as made:
            for what, timeout, ticks in wanted:
                made.begin(what, timeout)
                for _ in range(ticks):
                    await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hixl_async.engine.peer, "GOODBYE_GRACE", 0.01)
