"""The handshake as two state machines: messages in, actions out.  No sockets, no loop, no clock.

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
       ▼  the leg of the last two messages carries all that follows; the other is closed
       (at any point instead of an answer: refuse  code, text)

H1  A proof is an HMAC-SHA256, keyed with the secret, over everything said before on either leg, the identity beside it,
    the leg and the role.  Whatever is changed, left out, repeated, reordered or reflected, the proof does not fit.
H2  Nothing but versions, random numbers and fingerprints is said before the other side has proved itself; the dialler's
    identity is the exception, since somebody has to begin.
H3  Without a secret the proofs only tie the two legs together; then only the Unix leg is served, the kernel must say on
    both sides that the other process belongs to the same user, and, where no address translation can lie between, both
    must see the same TCP connection, so that no other user relays it to an engine that was not dialled.
H4  A machine that has failed stays failed, and raises the same error again.
H5  Messages are taken in their one canonical spelling only.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from ..errors import AuthenticationError, BusyError, ConnectError, HixlError, InvalidArgumentError, ProtocolError
from . import codec
from .process import Credentials, LocalUser
from .rendezvous import RendezvousName, Scope

__all__ = [
    "PROTOCOL_VERSION",
    "Action",
    "ClientHandshake",
    "Established",
    "Identity",
    "Leg",
    "OpenUnix",
    "Secret",
    "Send",
    "ServerHandshake",
    "Sight",
    "connection_of",
    "refusal",
]

#: The newest version of the protocol that is spoken here; every hello names the range.
PROTOCOL_VERSION = 1
_OLDEST_VERSION = 1
_MAGIC = "hixl-async"

_HEX32 = re.compile(r"[0-9a-f]{32}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_FINGERPRINT = re.compile(r"(?:[0-9a-f]{32})?")
_SOCKET = re.compile(r"(abstract|directory):([0-9a-f]{32})")
_TICKS = re.compile(r"[0-9]{0,20}")

_HOW_TO_SHARE_A_SECRET = (
    "give both sides the same secret=, for example secrets.token_bytes(32) in a file that only they can read"
)


class Leg(Enum):
    """Which of the two sockets."""

    TCP = "tcp"
    UNIX = "unix"


class Identity(NamedTuple):
    """What a side says about itself; other sides that know the secret, or belong to the same user, can say anything."""

    #: Name for people; not unique.
    name: str
    #: The tenant; two sides of different domains refuse each other.
    domain: str
    #: 32 random hexadecimal digits, drawn once per engine: a restarted engine has another one.
    incarnation: str
    #: Where the side listens, as ``host:port``; "" if it only dials.
    address: str
    #: Names of the drivers that it has opened.
    drivers: tuple[str, ...]

    def problem(self) -> str | None:
        """Says what is wrong with the fields, or None."""
        for field, text, least, most in (
            ("name", self.name, 1, 128),
            ("domain", self.domain, 0, 128),
            ("address", self.address, 0, 300),
        ):
            # No control characters: these strings end up in logs and messages.
            if not isinstance(text, str) or not least <= len(text) <= most or not (text.isprintable() or not text):
                return f"{field} must be {least} to {most} printable characters"
        if not isinstance(self.incarnation, str) or not _HEX32.fullmatch(self.incarnation):
            return "incarnation must be 32 hexadecimal digits"
        if len(self.drivers) > 16 or not all(
            isinstance(driver, str) and 1 <= len(driver) <= 32 and driver.isprintable() for driver in self.drivers
        ):
            return "drivers must be at most 16 names of 1 to 32 printable characters"
        return None


class Secret:
    """The shared secret, or its absence, behind a face that never shows it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes | None) -> None:
        """
        :raises InvalidArgumentError: if `key` is neither None nor bytes with something in them.
        """
        if key is not None and (not isinstance(key, (bytes, bytearray)) or not key):
            what = "empty" if isinstance(key, bytes | bytearray) else f"a {type(key).__name__}"
            raise InvalidArgumentError(f"secret must be bytes, not empty, or None; it is {what}")
        self._key = None if key is None else bytes(key)

    def __bool__(self) -> bool:
        return self._key is not None

    def __repr__(self) -> str:
        return "<Secret>" if self else "<no Secret>"

    def tag(self, label: str, *parts: bytes) -> bytes:
        """An HMAC-SHA256 over `label` and `parts`, each with its length."""
        text = b"".join(len(part).to_bytes(4, "big") + part for part in (label.encode(), *parts))
        return hmac.digest(self._key or b"", b"hixl_async control\0" + text, "sha256")


class Sight(NamedTuple):
    """What a side sees of itself and of the TCP connection."""

    scope: Scope
    user: LocalUser
    #: Our own start time, see `process.start_time`.
    started: str
    #: The two ends of the TCP connection, dialler first; equal on both sides unless something lies between them.
    tcp_path: str


class Send(NamedTuple):
    """Action: send this on that leg."""

    leg: Leg
    message: bytes


class OpenUnix(NamedTuple):
    """Action: connect to this socket, then call ``unix_opened`` or ``unix_failed``."""

    name: RendezvousName


class Established(NamedTuple):
    """Action, always the last: use this leg from now on, close the other."""

    leg: Leg
    #: The version of the protocol that both sides speak.
    version: int
    #: Who is at the other end.
    identity: Identity
    #: When that process started, as it says itself.
    started: str
    #: Why there is no Unix leg; "" if there is.
    detour: str
    #: Keys of the seals of the TCP leg: from dialler to listener, and back.
    keys: tuple[bytes, bytes]


Action: TypeAlias = Send | OpenUnix | Established


class _State(Enum):
    NEW = "new"
    HELLO = "hello"  # our hello is out
    OPENING = "opening"  # dialler only: the Unix leg is being opened
    PROVED = "proved"  # dialler only: our proof is out
    ESTABLISHED = "established"
    FAILED = "failed"


class _Handshake:
    """What both sides have in common."""

    _role: str
    _other: str

    def __init__(self, identity: Identity, secret: Secret, sight: Sight) -> None:
        self._identity = identity
        self._secret = secret
        self._sight = sight
        self._state = _State.NEW
        self._error: HixlError | None = None
        self._transcript: list[bytes] = []
        self._version = 0
        self._detour = ""

    def _fail(self, error: HixlError) -> HixlError:
        self._state = _State.FAILED
        self._error = error
        return error

    def _expect(self, *states: _State) -> None:
        if self._error is not None:
            raise self._error
        if self._state not in states:
            raise self._fail(ProtocolError("a message came out of turn"))

    def _own_hello(self, **more: str) -> bytes:
        scope = self._sight.scope
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

    def _take_hello(self, raw: bytes) -> dict[str, Any]:
        """Checks what can be checked at once."""
        body = _decode(raw, "hello")
        if body.get("magic") != _MAGIC:
            raise ProtocolError("the other side is no hixl_async engine: its hello lacks the magic word")
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
        # Only now: another version's hello may look different in all other respects.
        _text(body, "nonce", _HEX64)
        _text(body, "network", _FINGERPRINT)
        _text(body, "directory", _FINGERPRINT)
        if not isinstance(body.get("secret"), bool):
            raise ProtocolError("the hello of the other side does not say whether it has a secret")
        if body["secret"] and not self._secret:
            raise AuthenticationError(
                f"the {self._other} has a secret and the {self._role} has none: {_HOW_TO_SHARE_A_SECRET}"
            )
        if self._secret and not body["secret"]:
            raise AuthenticationError(
                f"the {self._role} has a secret and the {self._other} has none: {_HOW_TO_SHARE_A_SECRET}"
            )
        return body

    def _prove(self, kind: str, leg: Leg, body: dict[str, Any]) -> bytes:
        body["identity"] = self._identity._asdict()
        body["started"] = self._sight.started
        body["proof"] = self._proof(self._role, leg, body)
        raw = codec.encode(kind, body, codec.HANDSHAKE_LIMIT)
        self._transcript.append(raw)
        return raw

    def _take_proof(self, leg: Leg, raw: bytes, body: dict[str, Any]) -> Identity:
        proof = _text(body, "proof", _HEX64)
        _text(body, "started", _TICKS)
        identity = _identity(body.get("identity"))
        if not hmac.compare_digest(proof, self._proof(self._other, leg, body)):
            raise AuthenticationError(
                f"the {self._other} does not know the secret of the {self._role}: {_HOW_TO_SHARE_A_SECRET}"
                if self._secret
                else "the two sides saw different handshakes: something between them changed one"
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

    def _proof(self, role: str, leg: Leg, body: Mapping[str, Any]) -> str:
        claims = {key: value for key, value in body.items() if key != "proof"}
        return self._secret.tag(
            f"{role} {leg.value}", *self._transcript, codec.encode("claims", claims, codec.HANDSHAKE_LIMIT)
        ).hex()

    def _tcp_error(self) -> AuthenticationError:
        return AuthenticationError(
            f"without a secret only processes of one user on one host are connected, but {self._detour}; "
            f"{_HOW_TO_SHARE_A_SECRET}"
        )

    def _established(self, leg: Leg, identity: Identity, body: Mapping[str, Any]) -> Established:
        self._state = _State.ESTABLISHED
        keys = (
            self._secret.tag("seal to listener", *self._transcript),
            self._secret.tag("seal to dialler", *self._transcript),
        )
        return Established(leg, self._version, identity, body["started"], self._detour, keys)


class ClientHandshake(_Handshake):
    """The dialling side."""

    _role = "dialler"
    _other = "listener"

    def __init__(self, identity: Identity, secret: Secret, sight: Sight) -> None:
        super().__init__(identity, secret, sight)
        self._leg: Leg | None = None  # the leg on which we proved ourselves
        self._connection_id = ""

    def start(self) -> list[Action]:
        """The first message."""
        self._expect(_State.NEW)
        self._state = _State.HELLO
        hello = self._own_hello()
        self._transcript.append(hello)
        return [Send(Leg.TCP, hello)]

    def received(self, leg: Leg, raw: bytes) -> list[Action]:
        """Takes one message.

        :raises AuthenticationError: if one side does not, or cannot, trust the other.
        :raises ProtocolError: if `raw` is no valid message, comes out of turn, or there is no common version.
        :raises InvalidArgumentError: if the other side is ourselves.
        :raises ConnectError: if the other side refuses for another reason.
        """
        self._expect(_State.HELLO, _State.PROVED)
        try:
            _raise_refusal(raw)
            if self._state is _State.HELLO and leg is Leg.TCP:
                return self._received_hello(raw)
            if self._state is _State.PROVED and leg is self._leg:
                body = _decode(raw, "welcome")
                identity = self._take_proof(leg, raw, body)
                return [self._established(leg, identity, body)]
            raise ProtocolError("a message came on the wrong leg")
        except HixlError as error:
            raise self._fail(error) from None

    def unix_opened(self, credentials: Credentials) -> list[Action]:
        """The Unix leg is connected to a socket on which the process of `credentials` listens.

        :raises AuthenticationError: if there is no secret, and that process is not known to be our own user's.
        """
        self._expect(_State.OPENING)
        if not self._secret and (objection := self._sight.user.objection(credentials)):
            raise self._fail(
                AuthenticationError(f"the listener is not the same user: {objection}; {_HOW_TO_SHARE_A_SECRET}")
            )
        return self._send_proof(Leg.UNIX)

    def unix_failed(self, reason: str) -> list[Action]:
        """The Unix leg could not be connected.

        :raises AuthenticationError: if there is no secret, so that nothing else is left.
        """
        self._expect(_State.OPENING)
        return self._without_unix(f"its Unix socket could not be reached: {reason}")

    def _received_hello(self, raw: bytes) -> list[Action]:
        body = self._take_hello(raw)
        self._connection_id = _text(body, "connection", _HEX32)
        name = _socket_name(body)
        self._transcript.append(raw)
        scope = self._sight.scope
        if name.kind == "abstract" and not _same(scope.network, body["network"]):
            return self._without_unix("the two sides are on different hosts, or in different network namespaces")
        if name.kind == "directory" and not _same(scope.directory, body["directory"]):
            return self._without_unix("the two sides do not share one unix_dir=")
        self._state = _State.OPENING
        return [OpenUnix(name)]

    def _without_unix(self, reason: str) -> list[Action]:
        self._detour = reason
        if not self._secret:
            raise self._fail(self._tcp_error())
        return self._send_proof(Leg.TCP)

    def _send_proof(self, leg: Leg) -> list[Action]:
        self._state = _State.PROVED
        self._leg = leg
        body = {"connection": self._connection_id, "tcp_path": self._sight.tcp_path}
        return [Send(leg, self._prove("prove", leg, body))]


class ServerHandshake(_Handshake):
    """The listening side."""

    _role = "listener"
    _other = "dialler"

    def __init__(self, identity: Identity, secret: Secret, sight: Sight, name: RendezvousName) -> None:
        super().__init__(identity, secret, sight)
        self._name = name
        self._same_network = False
        self._unix_possible = False
        #: Finds this handshake again when the dialler connects the Unix leg.
        self.connection_id = secrets.token_hex(16)

    def received(self, leg: Leg, raw: bytes, credentials: Credentials | None = None) -> list[Action]:
        """Takes one message.

        :param credentials: of the process that connected the Unix leg; None on the TCP leg.
        :raises AuthenticationError: if one side does not, or cannot, trust the other.
        :raises ProtocolError: if `raw` is no valid message, comes out of turn, or there is no common version.
        :raises InvalidArgumentError: if the other side is ourselves.
        """
        self._expect(_State.NEW, _State.HELLO)
        try:
            if self._state is _State.NEW and leg is Leg.TCP:
                return self._received_hello(raw)
            if self._state is _State.HELLO:
                return self._received_proof(leg, raw, credentials)
            raise ProtocolError("a message came on the wrong leg")
        except HixlError as error:
            raise self._fail(error) from None

    def _received_hello(self, raw: bytes) -> list[Action]:
        body = self._take_hello(raw)
        self._same_network = _same(self._sight.scope.network, body["network"])
        if self._name.kind == "abstract" and not self._same_network:
            self._detour = "the two sides are on different hosts, or in different network namespaces"
        elif self._name.kind == "directory" and not _same(self._sight.scope.directory, body["directory"]):
            self._detour = "the two sides do not share one unix_dir="
        else:
            self._detour = "the dialler did not use it"
            self._unix_possible = True
        if not self._secret and not self._unix_possible:
            raise self._tcp_error()
        hello = self._own_hello(connection=self.connection_id, socket=f"{self._name.kind}:{self._name.token}")
        self._transcript += (raw, hello)
        self._state = _State.HELLO
        return [Send(Leg.TCP, hello)]

    def _received_proof(self, leg: Leg, raw: bytes, credentials: Credentials | None) -> list[Action]:
        body = _decode(raw, "prove")
        if _text(body, "connection", _HEX32) != self.connection_id:
            raise ProtocolError("the proof is for another connection")
        if not isinstance(body.get("tcp_path"), str):
            raise ProtocolError("the proof does not name the TCP connection")
        if not self._secret:
            self._check_same_user(leg, credentials)
        identity = self._take_proof(leg, raw, body)
        if not self._secret and self._same_network and body["tcp_path"] != self._sight.tcp_path:
            raise AuthenticationError(
                f"something relays the TCP connection: the dialler sees {_printable(body['tcp_path'])}, "
                f"the listener {self._sight.tcp_path}; {_HOW_TO_SHARE_A_SECRET}"
            )
        if leg is Leg.UNIX:
            self._detour = ""
        welcome = self._prove("welcome", leg, {})
        return [Send(leg, welcome), self._established(leg, identity, body)]

    def _check_same_user(self, leg: Leg, credentials: Credentials | None) -> None:
        if leg is Leg.TCP or credentials is None:
            raise self._tcp_error()
        if objection := self._sight.user.objection(credentials):
            raise AuthenticationError(f"the dialler is not the same user: {objection}; {_HOW_TO_SHARE_A_SECRET}")


_REFUSALS: dict[str, type[HixlError]] = {
    kind.code: kind for kind in (AuthenticationError, ProtocolError, InvalidArgumentError, BusyError, ConnectError)
}


def refusal(error: HixlError) -> bytes:
    """The message that tells the dialler why it was refused."""
    code = error.code if error.code in _REFUSALS else ConnectError.code
    return codec.encode("refuse", {"code": code, "text": _printable(str(error))}, codec.HANDSHAKE_LIMIT)


def connection_of(raw: bytes) -> str:
    """Which handshake a message on the Unix leg belongs to.

    :raises ProtocolError: if it is no such message.
    """
    return _text(_decode(raw, "prove"), "connection", _HEX32)


def _raise_refusal(raw: bytes) -> None:
    message = codec.decode(raw, codec.HANDSHAKE_LIMIT)
    if message.kind != "refuse":
        return
    text = message.body.get("text")
    kind = _REFUSALS.get(str(message.body.get("code")), ConnectError)
    raise kind(f"refused: {_printable(text) if isinstance(text, str) else 'no reason given'}")


def _decode(raw: bytes, kind: str) -> dict[str, Any]:
    message = codec.decode(raw, codec.HANDSHAKE_LIMIT)
    if message.kind != kind:
        raise ProtocolError(f"expected a {kind!r}, not a {message.kind!r}")
    if codec.encode(*message) != raw:
        raise ProtocolError(f"the {kind!r} is not in its canonical spelling")
    return message.body


def _text(body: Mapping[str, Any], field: str, pattern: re.Pattern[str]) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ProtocolError(f"a message of the handshake lacks a valid {field!r}")
    return value


def _socket_name(body: Mapping[str, Any]) -> RendezvousName:
    kind, token = _text(body, "socket", _SOCKET).split(":")
    return RendezvousName("abstract" if kind == "abstract" else "directory", token)


def _identity(value: object) -> Identity:
    if not isinstance(value, dict) or value.keys() != set(Identity._fields) or not isinstance(value["drivers"], list):
        raise ProtocolError("a message of the handshake lacks a valid 'identity'")
    identity = Identity(**{**value, "drivers": tuple(value["drivers"])})
    if problem := identity.problem():
        raise ProtocolError(f"the identity of the other side is not valid: {problem}")
    return identity


def _same(ours: str, theirs: str) -> bool:
    return bool(ours) and ours == theirs


def _versions(oldest: int, newest: int) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:500])
