"""The handshake, as a state machine for each side: messages in, actions out; no sockets, loop or clock.

::

    dialler                                            listener
       │  TCP   hello   versions, nonce, scope             │
       ├──────────────────────────────────────────────────▶│
       │  TCP   hello   the same; connection, socket       │
       │◀──────────────────────────────────────────────────┤
       │  Unix, if both can see the listener's socket, else TCP:
       │        prove   identity, proof                    │
       ├──────────────────────────────────────────────────▶│
       │        welcome identity, proof                    │
       │◀──────────────────────────────────────────────────┤
       ▼  the transport of the last two messages carries all later messages; the other is closed
       (at any point instead of an answer: refuse  code, text)

H1  A proof is an HMAC-SHA256, keyed with the secret, over all earlier messages on both transports, the identity beside it, the
    transport and the role.  If a message is changed, omitted, repeated, reordered or reflected, the proof is wrong.
H2  Before the other side is authenticated, only versions, random numbers and fingerprints are sent; the dialler's identity is
    the exception, because one side has to begin.
H3  Without a secret the proofs only tie the two transports together.  Then only the Unix transport is served, and the kernel
    must confirm on both sides that the other process belongs to the same user.  Where there can be no address translation, both
    sides must also see the same TCP connection, so that no other user relays it to an engine that was not dialled.
H4  A machine that has failed stays failed, and raises the same error again.
H5  Messages are accepted only in their canonical encoding.
"""

from __future__ import annotations

import errno
import hmac
import re
import secrets
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ..errors import (
    AuthenticationError,
    BusyError,
    ConnectError,
    HixlError,
    InvalidArgumentError,
    ProtocolError,
)
from . import codec
from .identity import Identity, Secret
from .incoming import Incoming, printable
from .process import Credentials, LocalUser
from .rendezvous import RendezvousName, Scope

__all__ = [
    "HOW_TO_SHARE_A_SECRET",
    "PROTOCOL_VERSION",
    "Action",
    "DiallerHandshake",
    "Established",
    "ListenerHandshake",
    "LocalView",
    "OpenUnix",
    "Send",
    "Transport",
    "connection_of",
    "raise_if_refusal",
    "refusal",
]

#: The newest supported version of the protocol; every hello names the range.
PROTOCOL_VERSION = 1
_OLDEST_VERSION = 1
_MAGIC = "hixl-async"
_HEX32 = re.compile(r"[0-9a-f]{32}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_FINGERPRINT = re.compile(r"(?:[0-9a-f]{32})?")
_TICKS = re.compile(r"[0-9]{0,20}")

HOW_TO_SHARE_A_SECRET = (
    "give both sides the same secret=, for example secrets.token_bytes(32) in a file that only they can read"
)


class Transport(Enum):
    """One of the two sockets of a handshake."""

    TCP = "tcp"
    UNIX = "unix"


class LocalView(NamedTuple):
    """The facts that a side knows about itself and the TCP connection."""

    scope: Scope
    user: LocalUser
    #: Our own start time, see `process.start_time`.
    started: str
    #: The two ends of the TCP connection, dialler first; equal on both sides unless the connection is relayed or translated.
    tcp_path: str


class Send(NamedTuple):
    """The action to send a message on a transport."""

    transport: Transport
    message: bytes


class OpenUnix(NamedTuple):
    """The action to connect to a socket, and then to call ``unix_opened`` or ``unix_failed``."""

    name: RendezvousName


class Established(NamedTuple):
    """The last action: to use a transport from now on, and to close the other."""

    transport: Transport
    #: The version of the protocol that both sides speak.
    version: int
    #: The identity of the other side.
    identity: Identity
    #: The start time of that process, as it stated it.
    started: str
    #: Why there is no Unix transport; "" if there is one.
    fallback: str
    #: Keys of the seals of the TCP transport: from dialler to listener, and back.
    keys: tuple[bytes, bytes]


Action: TypeAlias = Send | OpenUnix | Established


class State(Enum):
    NEW = "new"
    HELLO = "hello"  # our hello is out
    OPENING = "opening"  # dialler only: the Unix transport is being opened
    PROVED = "proved"  # dialler only: our proof is out
    ESTABLISHED = "established"


class Handshake:
    """The common part of both sides."""

    _role: ClassVar[str]
    _other: ClassVar[str]

    def __init__(self, identity: Identity, secret: Secret, view: LocalView) -> None:
        self._identity = identity
        self._secret = secret
        self._view = view
        self._state = State.NEW
        self._error: HixlError | None = None  # why it failed
        self._transcript: list[bytes] = []
        self._version = 0
        self._fallback = ""

    def _fail(self, error: HixlError) -> HixlError:
        self._error = error
        return error

    def _expect(self, *states: State) -> None:
        if self._error is not None:
            raise self._error
        if self._state not in states:
            raise self._fail(ProtocolError("a message came out of order"))

    def _own_hello(self, **more: str) -> bytes:
        scope = self._view.scope
        body: dict[str, Any] = {
            "magic": _MAGIC,
            "versions": [_OLDEST_VERSION, PROTOCOL_VERSION],
            "secret": bool(self._secret),
            "nonce": secrets.token_hex(32),
            "network": scope.network,
            "directory": scope.directory,
            **more,
        }
        return codec.encode("hello", body, codec.HANDSHAKE_LIMIT)

    def _take_hello(self, raw: bytes) -> Incoming:
        """Parse a hello, and check the fields that need no other message."""
        message = Incoming.canonical(raw, "hello")
        body = message.body
        if body.get("magic") != _MAGIC:
            raise ProtocolError("the other side is not a hixl_async engine: its hello lacks the magic word")
        match body.get("versions"):
            case [int(oldest), int(newest)] if 0 < oldest <= newest:
                pass
            case _:
                raise ProtocolError("the hello of the other side has no valid range of versions")
        self._version = min(newest, PROTOCOL_VERSION)
        if self._version < max(oldest, _OLDEST_VERSION):
            raise ProtocolError(
                f"no common protocol version: the {self._role} speaks {_versions(_OLDEST_VERSION, PROTOCOL_VERSION)}, "
                f"the {self._other} {_versions(oldest, newest)}; install the same release of hixl_async on both sides"
            )
        # Only now, because the hello of another version may have other fields.
        message.text("nonce", _HEX64)
        message.text("network", _FINGERPRINT)
        message.text("directory", _FINGERPRINT)
        if not isinstance(body.get("secret"), bool):
            raise ProtocolError("the hello of the other side does not say whether it has a secret")
        if body["secret"] and not self._secret:
            raise AuthenticationError(
                f"the {self._other} has a secret and the {self._role} has none: {HOW_TO_SHARE_A_SECRET}"
            )
        if self._secret and not body["secret"]:
            raise AuthenticationError(
                f"the {self._role} has a secret and the {self._other} has none: {HOW_TO_SHARE_A_SECRET}"
            )
        return message

    def _prove(self, kind: str, transport: Transport, body: dict[str, Any]) -> bytes:
        body["identity"] = self._identity._asdict()
        body["started"] = self._view.started
        body["proof"] = self._proof(self._role, transport, body)
        raw = codec.encode(kind, body, codec.HANDSHAKE_LIMIT)
        self._transcript.append(raw)
        return raw

    def _take_proof(self, transport: Transport, raw: bytes, message: Incoming) -> Identity:
        proof = message.text("proof", _HEX64)
        message.text("started", _TICKS)
        identity = Identity.parse(message.body.get("identity"))
        if not hmac.compare_digest(proof, self._proof(self._other, transport, message.body)):
            raise AuthenticationError(
                f"the {self._other} does not know the secret of the {self._role}: {HOW_TO_SHARE_A_SECRET}"
                if self._secret
                else "the two sides saw different handshakes: a message was changed between them"
            )
        if identity.incarnation == self._identity.incarnation:
            raise InvalidArgumentError("transfer to self: this address is the engine's own")
        if identity.domain != self._identity.domain:
            raise AuthenticationError(
                f"the {self._role} belongs to domain {self._identity.domain!r}, "
                f"the {self._other} to domain {identity.domain!r}: pass the same domain= to both"
            )
        self._transcript.append(raw)
        return identity

    def _proof(self, role: str, transport: Transport, body: Mapping[str, Any]) -> str:
        claims = {key: value for key, value in body.items() if key != "proof"}
        return self._secret.tag(
            f"{role} {transport.value}", *self._transcript, codec.encode("claims", claims, codec.HANDSHAKE_LIMIT)
        ).hex()

    def _tcp_error(self) -> AuthenticationError:
        return AuthenticationError(
            f"without a secret only processes of one user on one host are connected, but {self._fallback}; "
            f"{HOW_TO_SHARE_A_SECRET}"
        )

    def _established(self, transport: Transport, identity: Identity, body: Mapping[str, Any]) -> Established:
        self._state = State.ESTABLISHED
        keys = (
            self._secret.tag("seal to listener", *self._transcript),
            self._secret.tag("seal to dialler", *self._transcript),
        )
        return Established(transport, self._version, identity, body["started"], self._fallback, keys)


class DiallerHandshake(Handshake):
    """The dialling side."""

    _role = "dialler"
    _other = "listener"

    def __init__(self, identity: Identity, secret: Secret, view: LocalView) -> None:
        super().__init__(identity, secret, view)
        self._transport: Transport | None = None  # the transport on which we proved ourselves
        self._connection_id = ""

    def start(self) -> list[Action]:
        """Return the first message."""
        self._expect(State.NEW)
        self._state = State.HELLO
        hello = self._own_hello()
        self._transcript.append(hello)
        return [Send(Transport.TCP, hello)]

    def received(self, transport: Transport, raw: bytes) -> list[Action]:
        """Handle a message of the listener, and return the actions that follow.

        :raises AuthenticationError: if one side does not, or cannot, trust the other.
        :raises ProtocolError: if `raw` is not a valid message, comes out of order, or there is no common version.
        :raises InvalidArgumentError: if the other side is this engine itself.
        :raises ConnectError: if the other side refuses for another reason.
        """
        self._expect(State.HELLO, State.PROVED)
        try:
            raise_if_refusal(raw)
            if self._state is State.HELLO and transport is Transport.TCP:
                return self._received_hello(raw)
            if self._state is State.PROVED and transport is self._transport:
                message = Incoming.canonical(raw, "welcome")
                identity = self._take_proof(transport, raw, message)
                return [self._established(transport, identity, message.body)]
            raise ProtocolError("a message came on the wrong transport")
        except HixlError as error:
            raise self._fail(error) from None

    def unix_opened(self, credentials: Credentials) -> list[Action]:
        """Continue on the Unix socket, which was connected.

        :param credentials: the process that listens on the socket.
        :raises AuthenticationError: if there is no secret, and that process is not known to belong to our own user.
        """
        self._expect(State.OPENING)
        if not self._secret and (objection := self._view.user.objection(credentials)):
            raise self._fail(
                AuthenticationError(f"the listener is not the same user: {objection}; {HOW_TO_SHARE_A_SECRET}")
            )
        return self._send_proof(Transport.UNIX)

    def unix_failed(self, error: OSError) -> list[Action]:
        """Continue without the Unix socket, which could not be connected.

        :raises ConnectError: if there is no secret, so that there is no other transport; the listener may be restarting.
        :raises AuthenticationError: if there is no secret, and the socket belongs to another user, who denies access.
        """
        self._expect(State.OPENING)
        reason = f"its Unix socket could not be connected: {error.strerror or error}"
        if not self._secret and error.errno not in (errno.EACCES, errno.EPERM):
            raise self._fail(ConnectError(reason, native=error.errno))
        return self._without_unix(reason)

    def _received_hello(self, raw: bytes) -> list[Action]:
        message = self._take_hello(raw)
        self._connection_id = message.text("connection", _HEX32)
        name = RendezvousName.parse(message.text("socket"))
        self._transcript.append(raw)
        if reason := _why_apart(name, self._view.scope, message.body):
            return self._without_unix(reason)
        self._state = State.OPENING
        return [OpenUnix(name)]

    def _without_unix(self, reason: str) -> list[Action]:
        self._fallback = reason
        if not self._secret:
            raise self._fail(self._tcp_error())
        return self._send_proof(Transport.TCP)

    def _send_proof(self, transport: Transport) -> list[Action]:
        self._state = State.PROVED
        self._transport = transport
        body = {"connection": self._connection_id, "tcp_path": self._view.tcp_path}
        return [Send(transport, self._prove("prove", transport, body))]


class ListenerHandshake(Handshake):
    """The listening side."""

    _role = "listener"
    _other = "dialler"

    def __init__(self, identity: Identity, secret: Secret, view: LocalView, name: RendezvousName) -> None:
        super().__init__(identity, secret, view)
        self._name = name
        self._same_network = False
        #: The id by which the Unix socket is matched with this handshake.
        self.connection_id = secrets.token_hex(16)

    def received(self, transport: Transport, raw: bytes, credentials: Credentials | None = None) -> list[Action]:
        """Handle a message of the dialler, and return the actions that follow.

        :param credentials: the process that connected the Unix transport; None on the TCP transport.
        :raises AuthenticationError: if one side does not, or cannot, trust the other.
        :raises ProtocolError: if `raw` is not a valid message, comes out of order, or there is no common version.
        :raises InvalidArgumentError: if the other side is this engine itself.
        """
        self._expect(State.NEW, State.HELLO)
        try:
            if self._state is State.NEW and transport is Transport.TCP:
                return self._received_hello(raw)
            if self._state is State.HELLO:
                return self._received_proof(transport, raw, credentials)
            raise ProtocolError("a message came on the wrong transport")
        except HixlError as error:
            raise self._fail(error) from None

    def _received_hello(self, raw: bytes) -> list[Action]:
        hello = self._take_hello(raw).body
        self._same_network = _same(self._view.scope.network, hello["network"])
        apart = _why_apart(self._name, self._view.scope, hello)
        self._fallback = apart or "the dialler did not use it"
        if not self._secret and apart:
            raise self._tcp_error()
        answer = self._own_hello(connection=self.connection_id, socket=f"{self._name.kind}:{self._name.token}")
        self._transcript += (raw, answer)
        self._state = State.HELLO
        return [Send(Transport.TCP, answer)]

    def _received_proof(self, transport: Transport, raw: bytes, credentials: Credentials | None) -> list[Action]:
        message = Incoming.canonical(raw, "prove")
        body = message.body
        if message.text("connection", _HEX32) != self.connection_id:
            raise ProtocolError("the proof is for another connection")
        if not isinstance(body.get("tcp_path"), str):
            raise ProtocolError("the proof does not name the TCP connection")
        if not self._secret:
            self._check_same_user(transport, credentials)
        identity = self._take_proof(transport, raw, message)
        if not self._secret and self._same_network and body["tcp_path"] != self._view.tcp_path:
            raise AuthenticationError(
                f"the TCP connection is relayed: the dialler sees {printable(body['tcp_path'])}, "
                f"the listener {self._view.tcp_path}; {HOW_TO_SHARE_A_SECRET}"
            )
        if transport is Transport.UNIX:
            self._fallback = ""
        welcome = self._prove("welcome", transport, {})
        return [Send(transport, welcome), self._established(transport, identity, body)]

    def _check_same_user(self, transport: Transport, credentials: Credentials | None) -> None:
        if transport is Transport.TCP or credentials is None:
            raise self._tcp_error()
        if objection := self._view.user.objection(credentials):
            raise AuthenticationError(f"the dialler is not the same user: {objection}; {HOW_TO_SHARE_A_SECRET}")


_KINDS: dict[str, type[HixlError]] = {
    kind.code: kind for kind in (AuthenticationError, BusyError, ConnectError, InvalidArgumentError, ProtocolError)
}


def refusal(error: HixlError) -> bytes:
    """Return the message that tells the dialler why it was refused."""
    code = error.code if error.code in _KINDS else ConnectError.code
    return codec.encode("refuse", {"code": code, "text": printable(str(error))}, codec.HANDSHAKE_LIMIT)


def raise_if_refusal(raw: bytes) -> None:
    """Raise the error with which the listener refused the dialler, if `raw` is a refusal.

    :raises ProtocolError: also if `raw` is not a message.
    """
    message = codec.decode(raw, codec.HANDSHAKE_LIMIT)
    if message.kind == "refuse":
        text = message.body.get("text")
        kind = _KINDS.get(str(message.body.get("code")), ConnectError)
        raise kind(f"refused: {printable(text) if isinstance(text, str) else 'no reason given'}")


def connection_of(raw: bytes) -> str:
    """Return the id of the handshake to which a message on the Unix socket belongs.

    :raises ProtocolError: if it is not such a message.
    """
    return Incoming.canonical(raw, "prove").text("connection", _HEX32)


def _same(ours: str, theirs: str) -> bool:
    """Return True if two fingerprints are known and equal."""
    return bool(ours) and ours == theirs


def _why_apart(name: RendezvousName, scope: Scope, hello: Mapping[str, Any]) -> str:
    """Return why the two sides cannot meet on a Unix socket, or "" if they can.

    :param scope: our own scope.
    :param hello: the hello of the other side, which has the fingerprints of its scope.
    """
    ours, theirs = (
        (scope.network, hello["network"]) if name.kind == "abstract" else (scope.directory, hello["directory"])
    )
    if _same(ours, theirs):
        return ""
    if not ours and scope.missing:
        return f"this side could not find out whether they share a host: {scope.missing}"
    if not theirs and not hello["network"]:
        return "the other side could not find out its network namespace (it needs /proc)"
    if name.kind == "abstract":
        return "the two sides are on different hosts, or in different network namespaces"
    return "the two sides do not share one unix_dir="


def _versions(oldest: int, newest: int) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
