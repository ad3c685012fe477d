"""The two state machines of the handshake, connected without sockets."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from typing import Any

from hixl_async.control.handshake import (
    Action,
    DiallerHandshake,
    Established,
    ListenerHandshake,
    LocalView,
    OpenUnix,
    Send,
    Transport,
)
from hixl_async.control.identity import Secret
from hixl_async.control.process import Credentials, LocalUser
from hixl_async.control.rendezvous import RendezvousName, Scope
from hixl_async.errors import HixlError

from .sides import identity

HERE = Scope("a" * 32, "")
ELSEWHERE = Scope("b" * 32, "")
USER = LocalUser(uid=1000, overflow_uid=65534, all_mapped=True)
NAME = RendezvousName("abstract", "c" * 32)
PATH = "127.0.0.1 40000 > 127.0.0.1 18515"


def view(scope: Scope = HERE, user: LocalUser = USER, path: str = PATH) -> LocalView:
    return LocalView(scope, user, "12345", path)


def dialler(secret: bytes | None = None, *, me: Any = None, **options: Any) -> DiallerHandshake:
    return DiallerHandshake(me or identity("dialler"), Secret(secret), view(**options))


def listener(
    secret: bytes | None = None, *, me: Any = None, name: RendezvousName = NAME, **options: Any
) -> ListenerHandshake:
    return ListenerHandshake(me or identity("listener"), Secret(secret), view(**options), name)


def credentials(uid: int = 1000) -> Credentials:
    return Credentials(pid=77, uid=uid, gid=1000)


Tamper = Callable[[int, bytes], list[bytes]]


@dataclasses.dataclass
class Outcome:
    """The outcome of a handshake on both sides: established, failed, or waiting for a message that never came."""

    dialler: Established | None = None
    listener: Established | None = None
    dialler_error: HixlError | None = None
    listener_error: HixlError | None = None
    messages: list[bytes] = dataclasses.field(default_factory=list)


def perform(
    one: DiallerHandshake,
    other: ListenerHandshake,
    tamper: Tamper = lambda _, raw: [raw],
    *,
    unix: Credentials | str = credentials(),  # noqa: B008
    dialler_seen_as: Credentials | None = None,
) -> Outcome:
    """Run both machines until neither has anything to say.

    :param tamper: turns the n-th message into those that arrive in its place.
    :param unix: whom the dialler finds on the Unix socket, or why it cannot connect.
    """
    outcome = Outcome()
    to_listener: list[tuple[Transport, bytes]] = []
    to_dialler: list[tuple[Transport, bytes]] = []

    def act(actions: list[Action], out: list[tuple[Transport, bytes]]) -> Established | None:
        for action in actions:
            if isinstance(action, Established):
                return action
            if isinstance(action, OpenUnix):
                more = (
                    one.unix_failed(OSError(errno.ECONNREFUSED, unix))
                    if isinstance(unix, str)
                    else one.unix_opened(unix)
                )
                return act(more, out)
            assert isinstance(action, Send)
            out += [(action.transport, raw) for raw in tamper(len(outcome.messages), action.message)]
            outcome.messages.append(action.message)
        return None

    act(one.start(), to_listener)
    while to_listener or to_dialler:
        if to_listener:
            transport, raw = to_listener.pop(0)
            seen = (dialler_seen_as or credentials()) if transport is Transport.UNIX else None
            try:
                outcome.listener = act(other.received(transport, raw, seen), to_dialler) or outcome.listener
            except HixlError as error:
                outcome.listener_error = error
        else:
            transport, raw = to_dialler.pop(0)
            try:
                outcome.dialler = act(one.received(transport, raw), to_listener) or outcome.dialler
            except HixlError as error:
                outcome.dialler_error = error
    return outcome
