"""Established connections: messages, descriptors, and the ways in which they end."""

from __future__ import annotations

import array
import asyncio
import itertools
import os
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from hixl_async.control import Connection, FairScheduler, close_descriptors, codec
from hixl_async.control import channel as channel_module
from hixl_async.control import connection as connection_module
from hixl_async.errors import ClosedError, ConnectError, HixlError, PeerDownError, ProtocolError

from .sides import SECRET, HostFactory, Inbox, elsewhere, is_open, memory, passes, same_file

Pair = tuple[Connection, Connection]


@pytest_asyncio.fixture(params=["unix", "tcp"])
async def pair(
    request: pytest.FixtureRequest, listen: HostFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    """Both ends of a connection, over each kind of transport."""
    host = await listen(secret=SECRET)
    if request.param == "tcp":
        elsewhere(monkeypatch)
    yield await host.pair()


@pytest_asyncio.fixture
async def unix(listen: HostFactory) -> AsyncIterator[Pair]:
    yield await (await listen()).pair()


def sock(connection: Connection) -> socket.socket:
    return connection._channel.sock  # type: ignore[attr-defined,no-any-return]


def shrink(connection: Connection) -> None:
    """Shrink the kernel's buffers for the other side."""
    sock(connection).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)


def send_forever(connection: Connection, body: dict[str, Any], *fds: int) -> None:
    while True:
        connection.send("x", body, fds)
        assert len(connection._queue) <= connection_module._MAX_QUEUED_MESSAGES
        assert connection._queued_bytes <= connection_module._MAX_QUEUED_BYTES
        assert connection._queued_descriptors <= 64


class Base(BaseException):
    """No Exception."""


class Counter:
    """A counter of messages that works on each for some seconds; ``await reached(n)`` waits for the n-th."""

    def __init__(self, connection: Connection, work: float = 0.0) -> None:
        self.messages = 0
        self._work = work
        self._target = 0
        self._reached = asyncio.Event()
        connection.start(self._take, print)

    def _take(self, kind: str, body: dict[str, Any], fds: list[int]) -> None:
        self.messages += 1
        end = time.monotonic() + self._work
        while time.monotonic() < end:
            pass
        if self.messages >= self._target:
            self._reached.set()

    async def reached(self, messages: int) -> None:
        self._target = messages
        self._reached.clear()
        if self.messages < messages:
            await self._reached.wait()


class TestMessages:
    async def test_arrive_in_order_both_ways(self, pair: Pair) -> None:
        inboxes = [Inbox(end) for end in pair]
        for number in range(500):
            for end in pair:
                end.send("n", {"n": number})
        for inbox in inboxes:
            assert [(await inbox.get()).body["n"] for _ in range(500)] == list(range(500))

    async def test_that_came_early_are_delivered_after_start(self, pair: Pair) -> None:
        mine, theirs = pair
        for number in range(200):
            mine.send("n", {"n": number})
        await mine.aclose()
        inbox = Inbox(theirs)
        assert inbox.messages.empty()
        assert [(await inbox.get()).body["n"] for _ in range(200)] == list(range(200))
        assert isinstance(await inbox.lost, PeerDownError)

    async def test_that_came_with_the_end_of_the_handshake_are_delivered(
        self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They may be read from the socket together with it."""

        def greet(connection: Connection) -> None:
            host.mine.append(connection)
            for number in range(3):
                connection.send("n", {"n": number})

        host = await listen(secret=SECRET, on_connection=greet)
        elsewhere(monkeypatch)
        for _ in range(10):
            inbox = Inbox(await host.dial())
            assert [(await inbox.get()).body["n"] for _ in range(3)] == [0, 1, 2]

    async def test_of_every_length(self, pair: Pair) -> None:
        mine, theirs = pair
        inbox = Inbox(theirs)
        room = codec.ESTABLISHED_LIMIT - len(codec.encode("x", {"a": ""}))
        for size in (0, 1, 1000, codec.HANDSHAKE_LIMIT, room - 1, room):
            mine.send("x", {"a": "y" * size})
            assert len((await inbox.get()).body["a"]) == size
        with pytest.raises(ProtocolError, match="over the limit"):
            mine.send("x", {"a": "y" * (room + 1)})
        mine.send("still", {"alive": True})
        assert (await inbox.get()).kind == "still"

    async def test_that_cannot_be_encoded_change_nothing(self, pair: Pair) -> None:
        mine, theirs = pair
        inbox = Inbox(theirs)
        for kind, body in (("X", {}), ("x", {"a": b""}), ("x", {1: 1})):
            with pytest.raises(ProtocolError):
                mine.send(kind, body)  # type: ignore[arg-type]
        mine.send("x", {})
        assert await inbox.get() == ("x", {}, [])

    async def test_are_queued_while_the_other_side_is_slow(self, pair: Pair) -> None:
        mine, theirs = pair
        shrink(mine)
        text = "y" * 10_000
        for number in range(100):
            mine.send("n", {"n": number, "text": text})
        assert mine._queue
        inbox = Inbox(theirs)
        assert [(await inbox.get()).body["n"] for _ in range(100)] == list(range(100))
        assert not mine._queue
        assert mine._queued_bytes == mine._queued_descriptors == 0
        mine.send("after", {})
        assert (await inbox.get()).kind == "after"

    async def test_can_be_answered_from_the_callback(self, pair: Pair) -> None:
        mine, theirs = pair
        answers = Inbox(mine)
        theirs.start(lambda kind, body, fds: theirs.send("echo", body), print)
        for number in range(300):
            mine.send("n", {"n": number})
        assert [(await answers.get()).body["n"] for _ in range(300)] == list(range(300))

    async def test_are_not_delivered_after_the_callback_aborted(self, pair: Pair) -> None:
        mine, theirs = pair
        seen = []
        lost = asyncio.get_running_loop().create_future()

        def abort(kind: str, body: dict[str, Any], fds: list[int]) -> None:
            seen.append(kind)
            theirs.abort(ProtocolError("enough"))

        for _ in range(10):
            mine.send("n", {})
        theirs.start(abort, lost.set_result)
        assert "enough" in str(await lost)
        assert seen == ["n"]


class TestDescriptors:
    async def test_arrive(self, unix: Pair) -> None:
        mine, theirs = unix
        inbox = Inbox(theirs)
        sent = [memory(b"one"), *os.pipe(), memory(b"four")]
        mine.send("take", {"a": 1}, sent)
        kind, body, received = await inbox.get()
        assert (kind, body) == ("take", {"a": 1})
        assert len(received) == 4
        for one, other in zip(sent, received, strict=True):
            assert one != other
            assert same_file(one, other)
            assert not os.get_inheritable(other)
        close_descriptors([*sent, *received])

    async def test_may_be_closed_at_once_also_when_they_wait(self, unix: Pair) -> None:
        mine, theirs = unix
        shrink(mine)
        for number in range(60):
            descriptor = memory(b"%d" % number)
            mine.send("take", {"n": number, "text": "y" * 10_000}, [descriptor])
            os.close(descriptor)
        assert mine._queued_descriptors
        inbox = Inbox(theirs)
        for number in range(60):
            _, body, [descriptor] = await inbox.get()
            assert body["n"] == number
            assert os.pread(descriptor, 10, 0) == b"%d" % number
            os.close(descriptor)

    async def test_belong_to_the_callback_also_if_it_raises(self, unix: Pair) -> None:
        mine, theirs = unix
        taken: list[int] = []
        lost = asyncio.get_running_loop().create_future()

        def fails(kind: str, body: dict[str, Any], fds: list[int]) -> None:
            taken.extend(fds)
            raise ProtocolError("unknown message")

        theirs.start(fails, lost.set_result)
        descriptor = memory()
        mine.send("take", {}, [descriptor])
        assert "unknown message" in str(await lost)
        assert is_open(taken[0])
        close_descriptors([descriptor, *taken])

    async def test_cannot_travel_over_tcp(self, listen: HostFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        host = await listen(secret=SECRET)
        elsewhere(monkeypatch)
        mine, theirs = await host.pair()
        inbox = Inbox(theirs)
        with pytest.raises(ProtocolError, match="different hosts"):
            mine.send("take", {}, [0])
        mine.send("x", {})
        assert (await inbox.get()).kind == "x"

    async def test_can_be_too_many_or_closed(self, unix: Pair) -> None:
        mine, theirs = unix
        inbox = Inbox(theirs)
        closed = memory()
        os.close(closed)
        with pytest.raises(ProtocolError, match="at most 4 descriptors, not 5"):
            mine.send("take", {}, [0] * 5)
        for number in (closed, -1):
            with pytest.raises(ProtocolError, match="not open"):
                mine.send("take", {}, [number])
        mine.send("x", {})
        assert (await inbox.get()).kind == "x"

    async def test_can_be_closed_while_the_queue_is_full(self, unix: Pair) -> None:
        mine, _ = unix
        shrink(mine)
        while not mine._queue:
            mine.send("x", {"text": "y" * 10_000})
        waiting, descriptor = len(mine._queue), memory()
        closed = os.dup(descriptor)
        os.close(closed)
        with pytest.raises(ProtocolError, match="cannot be sent"):
            mine.send("take", {}, [closed, descriptor])
        assert len(mine._queue) == waiting
        os.close(descriptor)

    async def test_that_wait_are_closed_with_the_connection(self, unix: Pair) -> None:
        mine, _ = unix
        shrink(mine)
        descriptor = memory()
        while mine._queued_descriptors < 8:
            mine.send("x", {"text": "y" * 10_000}, [descriptor])
        mine.abort(PeerDownError("enough"))
        os.close(descriptor)  # the no_leaks fixture does the rest

    async def test_of_other_kinds_are_refused(self, unix: Pair, tmp_path: Any) -> None:
        """Closing them could block."""
        mine, theirs = unix
        inbox = Inbox(theirs)
        kept = memory()
        with socket.socket() as lingering:
            mine.send("take", {}, [kept, lingering.fileno()])
        assert "neither memory nor a pipe" in str(await inbox.lost)
        assert inbox.messages.empty()
        os.close(kept)

    async def test_that_are_partly_lost_end_the_connection(self, unix: Pair) -> None:
        mine, theirs = unix
        inbox = Inbox(theirs)
        descriptors = [memory() for _ in range(6)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        sock(mine).sendmsg([codec.encode("x", {})], rights)
        assert "more descriptors than could be received" in str(await inbox.lost)
        close_descriptors(descriptors)

    async def test_when_no_more_can_be_opened_end_the_connection(
        self, unix: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine, theirs = unix
        inbox = Inbox(theirs)
        descriptors = [memory() for _ in range(4)]
        mine.send("take", {}, descriptors)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, hard))
        try:
            error = await inbox.lost
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "more descriptors than could be received" in str(error)
        close_descriptors(descriptors)

    async def test_beside_nonsense_are_closed(self, unix: Pair) -> None:
        mine, theirs = unix
        inbox = Inbox(theirs)
        descriptor = memory()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        sock(mine).sendmsg([b"nonsense"], rights)
        os.close(descriptor)
        assert isinstance(await inbox.lost, ProtocolError)

    async def test_beside_nothing_are_closed(self, unix: Pair) -> None:
        mine, theirs = unix
        inbox = Inbox(theirs)
        descriptor = memory()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        sock(mine).sendmsg([b""], rights)
        os.close(descriptor)
        assert isinstance(await inbox.lost, PeerDownError)

    async def test_beside_too_long_a_message_are_closed(self, unix: Pair) -> None:
        mine, theirs = unix
        inbox = Inbox(theirs)
        descriptor = memory()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        sock(mine).sendmsg([b"x" * (codec.ESTABLISHED_LIMIT + 1)], rights)
        os.close(descriptor)
        assert "over the limit" in str(await inbox.lost)

    async def test_are_closed_fast_or_elsewhere(self, unix: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """A descriptor whose close() blocks does not block the loop."""
        mine, theirs = unix
        inbox = Inbox(theirs)
        closers = []
        closed = threading.Event()
        real = channel_module.close_descriptors

        def close_descriptors(descriptors: Any) -> None:
            descriptors = list(descriptors)
            if descriptors:
                closers.append(threading.current_thread())
                closed.set()
            real(descriptors)

        monkeypatch.setattr(channel_module, "close_descriptors", close_descriptors)
        with socket.socket() as lingering:
            mine.send("take", {}, [lingering.fileno()])
        await inbox.lost
        assert await asyncio.to_thread(closed.wait, 10)
        assert closers[0] is not threading.main_thread()
        closers[0].join()


class TestIsLost:
    async def test_when_the_other_side_closes(self, pair: Pair) -> None:
        mine, theirs = pair
        inbox = Inbox(theirs)
        await mine.aclose()
        error = await inbox.lost
        assert isinstance(error, PeerDownError)
        assert error.peer == theirs.identity.name
        assert "lost" in repr(theirs)
        with pytest.raises(ClosedError, match="is lost"):
            theirs.send("x", {})

    async def test_before_start(self, pair: Pair) -> None:
        mine, theirs = pair
        theirs.abort(PeerDownError("given up"))
        inbox = Inbox(theirs)
        assert not inbox.lost.done()
        assert "given up" in str(await inbox.lost)
        assert isinstance(await Inbox(mine).lost, PeerDownError)

    async def test_when_something_is_sent_after_the_other_side_left(self, pair: Pair) -> None:
        mine, theirs = pair
        inbox = Inbox(mine)
        theirs.abort(PeerDownError("gone"))
        with pytest.raises(ClosedError):
            send_forever(mine, {})
        assert isinstance(await inbox.lost, PeerDownError)

    async def test_after_the_last_message_of_the_other_side(self, pair: Pair) -> None:
        """Also if it closes with unread messages, so that the kernel resets the connection."""
        mine, theirs = pair
        mine.send("unread", {})
        theirs.send("last", {"words": True})
        await theirs.aclose()
        inbox = Inbox(mine)
        if mine.same_host:
            assert (await inbox.get()).kind == "last"
        assert isinstance(await inbox.lost, PeerDownError)

    @pytest.mark.parametrize("what", ["half a message", "messages that mean work"])
    async def test_after_messages_that_take_another_pass(self, pair: Pair, what: str) -> None:
        """The connection was reset, but not all before that is delivered at once; uvloop tells of a reset only once."""
        mine, theirs = pair
        mine.send("unread", {})
        if what == "half a message" and not mine.same_host:  # packets come whole
            sock(theirs).send(b"\0\0\0\x20" + b"half")
        else:
            for _ in range(4):
                theirs.send("last", {"words": True})
        await theirs.aclose()
        await asyncio.sleep(0.01)
        lost = asyncio.get_running_loop().create_future()
        mine.start(lambda *message: time.sleep(0.002), lost.set_result)
        async with asyncio.timeout(10):
            assert isinstance(await lost, PeerDownError)

    async def test_when_nonsense_comes(self, pair: Pair) -> None:
        mine, theirs = pair
        inbox = Inbox(theirs)
        sock(mine).send(b"\0\0\0\x20" + b"nonsense" * 4)
        assert isinstance(await inbox.lost, ProtocolError)
        assert isinstance(await Inbox(mine).lost, PeerDownError)

    async def test_when_the_callback_refuses_a_message(self, pair: Pair) -> None:
        mine, theirs = pair
        lost = asyncio.get_running_loop().create_future()
        error = ProtocolError("unknown kind")

        def refuses(kind: str, body: dict[str, Any], fds: list[int]) -> None:
            raise error

        theirs.start(refuses, lost.set_result)
        mine.send("x", {})
        mine.send("x", {})
        assert await lost is error

    @pytest.mark.parametrize("mistake", [ValueError, asyncio.CancelledError, GeneratorExit, Base])
    async def test_when_the_callback_fails(
        self, pair: Pair, loop_errors: list[dict[str, Any]], mistake: type[BaseException]
    ) -> None:
        mine, theirs = pair
        lost = asyncio.get_running_loop().create_future()

        def fails(kind: str, body: dict[str, Any], fds: list[int]) -> None:
            raise mistake("our own mistake")

        theirs.start(fails, lost.set_result)
        mine.send("x", {})
        assert isinstance(await lost, ProtocolError)
        assert str(loop_errors[0]["exception"]) == "our own mistake"
        loop_errors.clear()

    async def test_when_it_is_aborted(self, pair: Pair) -> None:
        mine, theirs = pair
        inbox, other = Inbox(mine), Inbox(theirs)
        error = ConnectError("no heartbeat")
        mine.abort(error)
        mine.abort(ConnectError("again"))
        assert not inbox.lost.done()
        assert await inbox.lost is error
        assert isinstance(await other.lost, PeerDownError)

    async def test_when_the_other_side_does_not_read(self, pair: Pair) -> None:
        mine, _theirs = pair
        inbox = Inbox(mine)
        with pytest.raises(ClosedError):
            send_forever(mine, {"text": "y" * 1000})
        error = await inbox.lost
        assert isinstance(error, PeerDownError)
        assert "does not read" in str(error)
        assert not mine._queue

    async def test_when_the_other_side_does_not_read_small_messages(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection_module, "_MAX_QUEUED_MESSAGES", 8192)
        mine, _theirs = pair
        shrink(mine)
        inbox = Inbox(mine)
        with pytest.raises(ClosedError):
            send_forever(mine, {})
        assert "does not read" in str(await inbox.lost)

    async def test_when_the_other_side_does_not_take_descriptors(self, unix: Pair) -> None:
        mine, _theirs = unix
        inbox = Inbox(mine)
        shrink(mine)
        descriptor = memory()
        with pytest.raises(ClosedError):
            send_forever(mine, {}, descriptor)
        assert "does not read" in str(await inbox.lost)
        os.close(descriptor)

    async def test_but_its_pidfd_stays_open(self, unix: Pair) -> None:
        mine, theirs = unix
        inbox = Inbox(theirs)
        await mine.aclose()
        await inbox.lost
        assert theirs.pidfd is not None
        pidfd = theirs.pidfd
        assert is_open(pidfd)
        await theirs.aclose()
        assert theirs.pidfd is None
        assert not is_open(pidfd)

    async def test_once(self, pair: Pair) -> None:
        mine, theirs = pair
        told: asyncio.Queue[HixlError] = asyncio.Queue()
        theirs.start(lambda *_: None, told.put_nowait)
        theirs.abort(PeerDownError("one"))
        await mine.aclose()
        await told.get()
        await theirs.aclose()
        await passes(3)
        assert told.empty()

    async def test_silently_if_it_is_closed_first(self, pair: Pair) -> None:
        mine, theirs = pair
        told: list[HixlError] = []
        theirs.start(lambda *_: None, told.append)
        theirs.abort(PeerDownError("one"))
        await theirs.aclose()
        await mine.aclose()
        await passes(3)
        assert not told


class TestCloses:
    async def test_twice_and_twice_at_once(self, pair: Pair) -> None:
        mine, theirs = pair
        await asyncio.gather(mine.aclose(), mine.aclose())
        await mine.aclose()
        with pytest.raises(ClosedError, match="is closed"):
            mine.send("x", {})
        with pytest.raises(ClosedError, match="is closed"):
            mine.start(print, print)
        await theirs.aclose()

    async def test_after_everything_was_sent(self, pair: Pair) -> None:
        mine, theirs = pair
        shrink(mine)
        for number in range(60):
            mine.send("n", {"n": number, "text": "y" * 10_000})
        assert mine._queue
        inbox = Inbox(theirs)
        await asyncio.gather(mine.aclose(), mine.aclose())
        assert [(await inbox.get()).body["n"] for _ in range(60)] == list(range(60))
        await inbox.lost

    async def test_within_bounds_if_the_other_side_does_not_read(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection_module, "_FLUSH_TIMEOUT", 0.05)
        mine, _ = pair
        while mine._queued_bytes < 900_000:
            mine.send("x", {"text": "y" * 10_000})
        loop = asyncio.get_running_loop()
        before = loop.time()
        await mine.aclose()
        assert 0.04 < loop.time() - before < 5

    async def test_at_once_if_the_other_side_is_gone(self, pair: Pair) -> None:
        mine, theirs = pair
        while not mine._queue:
            mine.send("x", {"text": "y" * 10_000})
        closing = asyncio.ensure_future(mine.aclose())
        await theirs.aclose()
        async with asyncio.timeout(0.5):
            await closing

    async def test_at_once_if_the_other_side_left_within_a_message(self, pair: Pair) -> None:
        mine, theirs = pair
        while not mine._queue and mine._channel.flush():
            mine.send("x", {"text": "y" * 60_000})
        theirs.abort(PeerDownError("gone"))
        async with asyncio.timeout(0.5):
            await mine.aclose()
        assert "closed" in repr(mine)

    async def test_also_when_cancelled(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection_module, "_FLUSH_TIMEOUT", 0.05)
        mine, _ = pair
        while not mine._queue:
            mine.send("x", {"text": "y" * 10_000})
        closing = asyncio.ensure_future(mine.aclose())
        await passes(2)
        assert mine._flushed is not None
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert "closed" in repr(mine)

    async def test_warns_if_it_was_not_closed(self, pair: Pair) -> None:
        mine, _ = pair
        # The fixtures close what they hold, so this is another connection over the same kind of channel.
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with pytest.warns(ResourceWarning, match="unclosed <Connection"):
            Connection(
                channel_module.UnixChannel(one),
                mine.identity,
                version=1,
                credentials=None,
                pidfd=os.dup(0),
                fallback="",
                scheduler=FairScheduler(),
            )
        assert other.recv(1) == b""
        other.close()

    async def test_silently_in_the_child_of_a_fork(self, pair: Pair) -> None:
        mine, theirs = pair
        inbox, back = Inbox(theirs), Inbox(mine)
        shrink(mine)
        for _ in range(50):
            mine.send("before", {"text": "y" * 10_000})
        child = os.fork()
        if child == 0:
            try:
                mine.abandon()
                theirs.abandon()
                mine.abandon()
                left = [connection.pidfd for connection in pair] + [sock(connection).fileno() for connection in pair]
                os._exit(0 if left in ([None, None, -1, -1],) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1]) == 0
        mine.send("after", {})
        kinds = [(await inbox.get()).kind for _ in range(51)]
        assert kinds == ["before"] * 50 + ["after"]
        theirs.send("back", {})
        assert (await back.get()).kind == "back"


class TestFlood:
    async def test_is_read_in_portions(self, pair: Pair) -> None:
        """A message that takes longer than the budget of a pass is the last of that pass."""
        mine, theirs = pair
        counter = Counter(theirs, work=0.002)
        loop = asyncio.get_running_loop()
        messages = [0]

        def turn() -> None:
            messages.append(counter.messages)
            if counter.messages < 12:
                loop.call_soon(turn)

        loop.call_soon(turn)
        for _ in range(12):
            mine.send("n", {"text": ""})
        await counter.reached(12)
        await passes(2)
        assert max(after - before for before, after in itertools.pairwise(messages)) == 1

    async def test_does_not_grow_memory(self, pair: Pair) -> None:
        mine, theirs = pair
        counter = Counter(theirs)

        async def flood(messages: int) -> None:
            for _ in range(messages // 100):
                for _ in range(100):
                    mine.send("n", {"text": "y" * 1000})
                await counter.reached(counter.messages + 100)

        await flood(200)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        await flood(3000)
        now, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert now - before < 300_000
        assert peak - before < 2_000_000


async def test_repr_names_the_peer(pair: Pair) -> None:
    mine, theirs = pair
    assert repr(mine).startswith("<Connection to 'listener' over ")
    assert repr(theirs).startswith("<Connection to 'dialler' over ")
    assert SECRET.decode() not in repr(mine) + repr(mine._channel) + repr(vars(mine))
