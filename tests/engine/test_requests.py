"""Requests, posts and the handlers that answer them."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Coroutine
from typing import Any

import pytest
from passes import settle
from puppet import puppet

from hixl_async import (
    BufferTypeError,
    BusyError,
    ClosedError,
    Engine,
    HixlError,
    InvalidArgumentError,
    Peer,
    PeerDownError,
    PeerState,
    RefusedError,
    RemoteError,
    RequestLostError,
    RequestTimeoutError,
    TransferError,
    errors,
)
from hixl_async.control import Incoming
from hixl_async.engine import rpc
from hixl_async.engine.rpc import ANSWER, CROSSING, MAX_HANDLERS
from hixl_async.testing import EnginePair, engine_pair, until


async def test_handlers_that_answer_at_once_and_later(pair: EnginePair) -> None:
    async def later(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"from": peer.name, **body}

    pair.right.serve("now", lambda peer, body: {"double": body["n"] * 2})
    pair.right.serve("later", later)
    pair.right.serve("nothing", lambda peer, body: None)
    assert await pair.peer.request("now", {"n": 4}) == {"double": 8}
    assert await pair.peer.request("later", {"deep": [{"er": None}]}) == {"from": "left", "deep": [{"er": None}]}
    assert await pair.peer.request("nothing", {}) == {}
    answers = await asyncio.gather(*(pair.peer.request("now", {"n": n}) for n in range(100)))
    assert [answer["double"] for answer in answers] == list(range(0, 200, 2))


async def test_posts_and_requests_arrive_in_order(pair: EnginePair) -> None:
    heard: list[int] = []
    pair.right.serve("log", lambda peer, body: heard.append(body["n"]))
    for n in range(50):
        if n % 2:
            pair.peer.post("log", {"n": n})
        else:
            asyncio.ensure_future(pair.peer.request("log", {"n": n}))
            await asyncio.sleep(0)
    await pair.peer.request("log", {"n": 50})
    assert heard == list(range(51))


def _serve_failures(engine: Engine) -> None:
    """Serve two handlers that raise the error that the request names, at once and later."""

    def fail(peer: Peer, body: dict[str, Any]) -> None:
        raise getattr(errors, body["error"])("layer 7 does not exist", peer="third")

    async def fail_later(peer: Peer, body: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        fail(peer, body)

    engine.serve("fail", fail)
    engine.serve("fail-later", fail_later)


async def test_errors_that_refuse_the_request_reach_the_caller_with_their_type(pair: EnginePair) -> None:
    _serve_failures(pair.right)
    for kind in CROSSING[ANSWER]:
        for service in ("fail", "fail-later"):
            with pytest.raises(kind, match="layer 7") as caught:
                await pair.peer.request(service, {"error": kind.__name__})
            assert type(caught.value) is kind
            assert caught.value.peer == "right"
    with pytest.raises(InvalidArgumentError, match="no handler serves 'no-such-service'"):
        await pair.peer.request("no-such-service", {})
    assert await pair.peer.request("hixl.ping", {"still": "up"}) == {"still": "up"}


class Quota(BusyError):
    """An error of the program's own."""


class Unprintable(BusyError):
    def __str__(self) -> str:
        raise ZeroDivisionError


class NoText(BusyError):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Base(BaseException):
    """No Exception."""


class BaseText(BusyError):
    def __str__(self) -> str:
        raise Base


Impostor = type("BusyError", (TransferError,), {})

#: What a handler raises, and what its caller gets.
UNUSUAL_ERRORS = [
    (Quota("too many tokens"), BusyError, "^too many tokens$"),
    (Unprintable("x"), BusyError, "its text is unknown, because ZeroDivisionError was raised"),
    (NoText("x"), BusyError, "its text is unknown, because TypeError was raised"),
    (Impostor("x"), RemoteError, "^TransferError: x$"),
    (BufferTypeError("no bytes"), RemoteError, "^BufferTypeError: no bytes$"),
    (Base("x"), RemoteError, "the handler of 'fail(-later)?' failed at the peer$"),
    (BaseExceptionGroup("x", [KeyboardInterrupt()]), RemoteError, "the handler of 'fail(-later)?' failed at the peer$"),
    (BaseText("x"), BusyError, "its text is unknown, because Base was raised"),
    (GeneratorExit(), RemoteError, "the handler of 'fail(-later)?' failed at the peer"),
    (asyncio.CancelledError(), RemoteError, "the handler of 'fail(-later)?' (failed|was cancelled) at the peer"),
]


@pytest.mark.parametrize(("error", "kind", "text"), UNUSUAL_ERRORS, ids=lambda value: getattr(value, "__name__", None))
async def test_unusual_errors(
    pair: EnginePair, loop_errors: list[dict[str, Any]], error: BaseException, kind: type[HixlError], text: str
) -> None:
    """The caller is answered, and the connection goes on."""

    def fail(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        raise error

    async def fail_later(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        raise error

    pair.right.serve("fail", fail)
    pair.right.serve("fail-later", fail_later)
    for service in ("fail", "fail-later"):
        with pytest.raises(kind, match=text) as caught:
            await pair.peer.request(service, {}, timeout=5)
        assert type(caught.value) is kind
    assert await pair.peer.request("hixl.ping", {"still": "up"}) == {"still": "up"}
    loop_errors.clear()


class Odd(dict[str, Any]):
    def items(self) -> Any:
        raise Base


@pytest.mark.parametrize("later", [False, True])
async def test_an_answer_that_cannot_be_read(pair: EnginePair, loop_errors: list[dict[str, Any]], later: bool) -> None:
    async def answer(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        return Odd(n=1)

    pair.right.serve("odd", answer if later else lambda peer, body: Odd(n=1))
    with pytest.raises(RemoteError, match="the handler of 'odd' failed at the peer$"):
        await pair.peer.request("odd", {}, timeout=5)
    assert isinstance(loop_errors.pop()["exception"], Base)


async def test_work_of_a_handler_that_does_not_let_itself_be_ended(
    pair: EnginePair, loop_errors: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn(asyncio.Future[dict[str, Any]]):
        def cancel(self, msg: Any | None = None) -> bool:
            raise Base

    monkeypatch.setattr(rpc, "MAX_HANDLERS", 0)
    pair.right.serve("stubborn", lambda peer, body: Stubborn())
    with pytest.raises(BusyError):
        await pair.peer.request("stubborn", {}, timeout=5)
    assert [context["message"] for context in loop_errors] == ["the handler of 'stubborn' could not be ended"]
    loop_errors.clear()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("later", [False, True])
def test_a_handler_that_ends_the_program(
    runner: asyncio.Runner, loop_errors: list[dict[str, Any]], error: type[BaseException], later: bool
) -> None:
    """The caller is answered first, and the log says which handler it was."""
    told: list[str] = []

    async def end(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        raise error

    def end_now(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        raise error

    async def main() -> None:
        async with engine_pair() as pair:
            pair.right.serve("end", end if later else end_now)
            session = pair.back._session
            tell = session.tell
            session.tell = lambda kind, body: (told.append(kind), tell(kind, body))  # type: ignore[method-assign,assignment,misc]
            await pair.peer.request("end", {})

    with pytest.raises(error):
        runner.run(main())
    runner.close()
    assert [context["message"] for context in loop_errors] == ["the handler of 'end' failed"]
    loop_errors.clear()
    assert told == ["failure"]


async def test_a_request_whose_handler_never_began_is_answered(
    pair: EnginePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("it was cancelled before it began")

    def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = pair.right.loop.create_task(work)
        task.cancel()
        return task

    monkeypatch.setattr(pair.back._session, "spawn", spawn)
    pair.right.serve("late", handler)
    with pytest.raises(RemoteError, match="the handler of 'late' was cancelled at the peer"):
        await pair.peer.request("late", {}, timeout=5)


async def test_errors_of_the_handlers_own_work_are_remote_errors(pair: EnginePair) -> None:
    """Under their own class they would say of this request what is only true at the peer: say, that this peer is down."""
    _serve_failures(pair.right)
    for name in errors.__all__:
        if getattr(errors, name) in CROSSING[ANSWER]:
            continue
        for service in ("fail", "fail-later"):
            with pytest.raises(RefusedError, match="layer 7") as caught:
                await pair.peer.request(service, {"error": name})
            assert type(caught.value) is RemoteError
            assert caught.value.remote_class == name
            assert str(caught.value).startswith(f"{name}: ") == (name != "RemoteError")
            assert caught.value.peer == "right"


@pytest.mark.parametrize(
    "name", ["TransferError", "PeerLostError", "PeerDownError", "WrongLoopError", "HixlError", "int", "no such class"]
)
async def test_no_import_fails_as_a_transfer_does(engine: Engine, name: str) -> None:
    """Whatever the peer says: asking for a region touches no transfer memory."""
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        actor.say("region.up", id=1, name="kv", size=8, access=3)
        asking = asyncio.ensure_future(engine.peers[0].region("kv"))
        call = (await actor.hear("region.get")).body["call"]
        actor.say("failure", call=call, error=name, message="out of luck")
        with pytest.raises(RefusedError, match="out of luck") as caught:
            await asking
        assert type(caught.value) is RemoteError


@pytest.mark.parametrize(
    "kind", ["raises", "raises later", "answers with a list", "answers with what JSON cannot carry", "is too long"]
)
async def test_broken_handlers(pair: EnginePair, loop_errors: list[dict[str, Any]], kind: str) -> None:
    """Our own handler's fault: the caller hears of it, the loop's exception handler too, and the connection goes on."""

    async def raise_later(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    handlers: dict[str, Any] = {
        "raises": lambda peer, body: {"n": 1 / 0},
        "raises later": raise_later,
        "answers with a list": lambda peer, body: [1, 2],
        "answers with what JSON cannot carry": lambda peer, body: {"n": object()},
        "is too long": lambda peer, body: {"n": "x" * 70_000},
    }
    pair.right.serve("broken", handlers[kind])
    with pytest.raises(RemoteError, match="the handler of 'broken' failed") as caught:
        await pair.peer.request("broken", {})
    if kind.startswith(("answers", "is")):
        caught.match(
            r"its answer must be None or a JSON object of less than 64 KiB \(write larger data into a region.*\): "
        )
    if kind == "is too long":
        caught.match("over the limit of 65536")
    assert "exception" in loop_errors.pop()
    pair.peer.post("broken", {})
    assert await pair.peer.request("hixl.ping", {"n": 1}) == {"n": 1}
    assert len(loop_errors) == (0 if kind.startswith(("answers", "is")) else 1)
    loop_errors.clear()


@pytest.mark.parametrize(
    ("service", "body"),
    [
        ("s", {"n": object()}),
        ("s", {7: 7}),
        ("s", {"n": float("nan")}),
        ("s", {"n": 1 << 70}),
        ("s", {"n": "x" * 70_000}),
        ("s", {"n": "\ud800"}),
        ("s", [1]),
        ("s", None),
        ("", {}),
        (7, {}),
        (None, {}),
    ],
)
async def test_requests_that_cannot_be_sent(pair: EnginePair, service: Any, body: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="^(body must be a JSON object of less than 64 KiB|service must be)"):
        await pair.peer.request(service, body)
    with pytest.raises(InvalidArgumentError):
        pair.peer.post(service, body)
    assert await pair.peer.request("hixl.ping", {"n": 1}) == {"n": 1}
    assert not pair.peer._rpc._waiting


async def test_an_oversized_request_names_the_limit(pair: EnginePair) -> None:
    with pytest.raises(InvalidArgumentError, match=r"write larger data into a region.*over the limit of 65536"):
        await pair.peer.request("hixl.ping", {"n": "x" * 65536})
    assert len((await pair.peer.request("hixl.ping", {"n": "x" * 60_000}))["n"]) == 60_000


async def test_a_request_times_out(pair: EnginePair) -> None:
    never = asyncio.Event()
    cancelled = []

    async def wait(peer: Peer, body: dict[str, Any]) -> None:
        try:
            await never.wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    pair.right.serve("wait", wait)
    with pytest.raises(RequestTimeoutError, match=r"'right' did not answer 'wait' within 0\.01 s"):
        await pair.peer.request("wait", {}, timeout=0.01)
    waiting = asyncio.ensure_future(pair.peer.request("wait", {}))
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not pair.peer._rpc._waiting
    assert not cancelled
    await pair.left.aclose()
    await until(lambda: len(cancelled) == 2)


async def test_the_peer_leaves_during_a_request() -> None:
    async with engine_pair() as pair:
        never = asyncio.Event()
        pair.right.serve("wait", lambda peer, body: never.wait())
        asking = asyncio.ensure_future(pair.peer.request("wait", {}))
        await settle()
        await pair.right.aclose()
        with pytest.raises(RequestLostError, match="'right' left"):
            await asking
        with pytest.raises(PeerDownError):
            pair.peer.post("wait", {})


async def test_a_flood_of_requests_is_bounded(pair: EnginePair) -> None:
    never = asyncio.Event()
    running = 0

    async def wait(peer: Peer, body: dict[str, Any]) -> None:
        nonlocal running
        running += 1
        await never.wait()

    pair.right.serve("wait", wait)
    for _ in range(10):
        pair.peer.post("wait", {})
    asking = [asyncio.ensure_future(pair.peer.request("wait", {}, timeout=30)) for _ in range(MAX_HANDLERS)]
    await until(lambda: sum(task.done() for task in asking) == 10)
    assert running == MAX_HANDLERS
    for task in asking[-10:]:
        with pytest.raises(BusyError, match="being handled already") as caught:
            task.result()
        assert caught.value.retryable
    never.set()
    await asyncio.gather(*asking[:-10])


@pytest.mark.parametrize("lost", [False, True])
async def test_requests_wait_for_their_turn(pair: EnginePair, lost: bool) -> None:
    """At most as many are sent as are handled there at the same time; a waiting caller hears of the end, too."""
    running: list[int] = []
    go = asyncio.Event()

    async def wait(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        running.append(body["n"])
        await go.wait()
        return body

    pair.right.serve("wait", wait)
    numbers = range(2 * MAX_HANDLERS + 10)
    asking = [asyncio.ensure_future(pair.peer.request("wait", {"n": n}, timeout=30)) for n in numbers]
    await until(lambda: len(running) == MAX_HANDLERS)
    with pytest.raises(RequestTimeoutError, match=r"did not answer 'wait' within 0.01 s"):
        await pair.peer.request("wait", {"n": -1}, timeout=0.01)
    if lost:
        await pair.right.aclose()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        sent, unsent = ends[:MAX_HANDLERS], ends[MAX_HANDLERS:]
        assert {type(end) for end in sent} == {RequestLostError}, "a handler may have run"
        assert {type(end) for end in unsent} == {PeerDownError}, "no handler has run"
        assert len(running) == MAX_HANDLERS
    else:
        go.set()
        assert [answer["n"] for answer in await asyncio.gather(*asking)] == list(numbers)


async def test_a_flood_of_posts_to_a_peer_that_does_not_read() -> None:
    """Unsent posts wait up to a limit; then the next one is refused, and requests wait.  No peer is lost because of it."""
    async with Engine("127.0.0.1:0", close_timeout=0.2) as engine, puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        actor.connection._loop.remove_reader(actor.connection._channel.fileno())  # type: ignore[attr-defined]
        sent = 0
        with pytest.raises(BusyError, match="too many messages wait to be sent to") as caught:
            for _ in range(100_000):
                peer.post("anything", {"text": "x" * 1000})
                sent += 1
        assert caught.value.retryable
        asking = asyncio.ensure_future(peer.request("anything", {}, timeout=30))
        with pytest.raises(RequestTimeoutError, match="did not answer 'anything' within 0.01 s"):
            await peer.request("anything", {}, timeout=0.01)
        assert peer.state is PeerState.UP
        actor.connection._loop.add_reader(actor.connection._channel.fileno(), actor.connection._pump)  # type: ignore[attr-defined]
        for _ in range(sent):
            await actor.hear("post")
        call = (await actor.hear("call")).body["call"]
        actor.say("answer", call=call, body={"at": "last"})
        assert await asking == {"at": "last"}


@pytest.mark.parametrize("what", ["requests", "answers", "regions", "news"])
async def test_a_burst_of_own_requests_is_not_a_flood(pair: EnginePair, what: str) -> None:
    """Thousands at once, in one pass of the loop, to a healthy peer that is busy meanwhile."""
    if what == "answers":
        pair.right.serve("echo", lambda peer, body: {"x": "y" * body["n"]})
        asking = [pair.peer.request("echo", {"n": 30_000}, timeout=60) for _ in range(1200)]
        assert {len(answer["x"]) for answer in await asyncio.gather(*asking)} == {30_000}
    elif what == "news":
        for _ in range(40):
            for n in range(400):  # each has a descriptor while it is there
                pair.right.allocate(f"{n}", 8, access="read")
            for region in list(pair.right.regions.values()):
                region.revoke()
        await until(lambda: pair.right.stats().regions == 0)
        pair.right.allocate("last", 8, access="read")
        assert (await pair.peer.region("last")).size == 8
    elif what == "requests":
        answers = await asyncio.gather(*(pair.peer.request("hixl.ping", {"n": n}, timeout=60) for n in range(1500)))
        assert [answer["n"] for answer in answers] == list(range(1500))
    else:
        for n in range(400):
            pair.right.allocate(f"{n}", 8, access="read")
        regions = await asyncio.gather(*(pair.peer.region(f"{n}") for n in range(400)))
        assert [region.name for region in regions] == [f"{n}" for n in range(400)]
        for region in list(pair.right.regions.values()):
            region.revoke()
        await until(lambda: pair.right.stats().regions == 0)
    assert pair.peer.state is PeerState.UP


async def test_services_have_one_handler_each(engine: Engine) -> None:
    engine.serve("mine", lambda peer, body: body)
    with pytest.raises(InvalidArgumentError, match="'mine' is served already"):
        engine.serve("mine", lambda peer, body: body)
    engine.unserve("mine")
    engine.unserve("mine")
    engine.serve("mine", lambda peer, body: body)
    for wrong in ("", "a\nb", "x" * 513, 7, None, [], {}):
        for call in (lambda wrong=wrong: engine.serve(wrong, print), lambda wrong=wrong: engine.unserve(wrong)):
            with pytest.raises(InvalidArgumentError, match="service must be a printable string .*, not "):
                call()
    for handler in (None, "text"):
        with pytest.raises(InvalidArgumentError, match="handler must be a function, not "):
            engine.serve("other", handler)  # type: ignore[arg-type]


async def test_unexpected_answers_are_ignored(engine: Engine) -> None:
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        for kind, body in [
            ("answer", {"call": 99, "body": {}}),
            ("failure", {"call": 99, "error": "RangeError", "message": "?"}),
            ("region.metadata", {"call": 99}),
        ]:
            actor.say(kind, **body)
        asking = asyncio.ensure_future(peer.request("anything", {}))
        call = (await actor.hear("call")).body["call"]
        actor.say("answer", call=call, body={"n": 1})
        actor.say("answer", call=call, body={"n": 2})
        assert await asking == {"n": 1}


async def test_an_answer_of_the_wrong_kind(engine: Engine) -> None:
    """A request is not answered with metadata, whose descriptors would stay open."""
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        asking = asyncio.ensure_future(engine.peers[0].request("anything", {}))
        call = (await actor.hear("call")).body["call"]
        fd = os.memfd_create("stray")
        actor.say("region.metadata", fds=[fd], call=call, body={})
        os.close(fd)
        with pytest.raises(RequestLostError):
            await asking
        await actor.lost


async def test_an_answer_that_comes_with_the_cancellation(pair: EnginePair) -> None:
    """Its descriptors are closed, as the balance sheet shows."""
    region, _ = await pair.region("kv", 4096)
    rpc = pair.peer._rpc
    asking = asyncio.ensure_future(rpc.ask("region.get", {"id": region._number}, answer="region.metadata"))
    answered = rpc.on_answer

    def answer_and_cancel(message: Incoming) -> None:
        answered(message)
        asking.cancel()

    pair.peer._routes[PeerState.UP]["region.metadata"] = answer_and_cancel
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("error", ["HixlError", "Exception", "__name__", "SystemExit", "no such error", "__all__"])
async def test_failures_of_unknown_kinds(engine: Engine, error: str) -> None:
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        asking = asyncio.ensure_future(engine.peers[0].request("anything", {}))
        call = (await actor.hear("call")).body["call"]
        actor.say("failure", call=call, error=error, message="whatever")
        with pytest.raises(HixlError, match="whatever") as caught:
            await asking
        assert type(caught.value) is RemoteError


@pytest.mark.parametrize("end", ["violation", "close"])
async def test_a_handler_that_never_began(engine: Engine, end: str) -> None:
    """Its coroutine is closed; otherwise Python warns that it was never awaited."""
    made: list[Coroutine[Any, Any, None]] = []

    async def handler() -> None:
        raise AssertionError("it begins in a later pass")

    def serve(peer: Peer, body: dict[str, Any]) -> Coroutine[Any, Any, None]:
        made.append(handler())
        if end == "close":
            asyncio.get_running_loop().call_soon(peer._lose, PeerDownError("ended before the handler began"))
        return made[-1]

    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        engine.serve("later", serve)
        actor.say("post", service="later", body={})
        if end == "violation":
            actor.say("nonsense")
        await until(lambda: peer.state is PeerState.DOWN)
        await until(lambda: inspect.getcoroutinestate(made[0]) == inspect.CORO_CLOSED)


async def test_a_handler_may_close_the_connection(pair: EnginePair) -> None:
    async def close(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
        await peer.aclose()
        return {}

    pair.right.serve("close", close)
    with pytest.raises(RequestLostError):
        await pair.peer.request("close", {})
    await until(lambda: pair.right.stats().peers == 0)
    with pytest.raises(ClosedError):
        await pair.back.request("hixl.ping", {})
