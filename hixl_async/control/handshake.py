"""The handshake, and what its two state machines have in common: messages in, actions out; no sockets, loop or clock.

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
import secrets
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ..errors import AuthenticationError, HixlError, InvalidArgumentError, ProtocolError
from . import codec, fields
from .identity import Identity
from .process import LocalUser
from .rendezvous import RendezvousName, Scope
from .secret import Secret

__all__ = [
    "HOW_TO_SHARE_A_SECRET",
    "PROTOCOL_VERSION",
    "Action",
    "Established",
    "Handshake",
    "Leg",
    "OpenUnix",
    "Send",
    "Sight",
    "State",
    "apart",
    "same",
]

#: The newest version of the protocol that is spoken here; every hello names the range.
PROTOCOL_VERSION = 1
_OLDEST_VERSION = 1
_MAGIC = "hixl-async"

HOW_TO_SHARE_A_SECRET = (
    "give both sides the same secret=, for example secrets.token_bytes(32) in a file that only they can read"
)


class Leg(Enum):
    """Which of the two sockets."""

    TCP = "tcp"
    UNIX = "unix"


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


class State(Enum):
    NEW = "new"
    HELLO = "hello"  # our hello is out
    OPENING = "opening"  # dialler only: the Unix leg is being opened
    PROVED = "proved"  # dialler only: our proof is out
    ESTABLISHED = "established"


class Handshake:
    """What both sides have in common."""

    _role: ClassVar[str]
    _other: ClassVar[str]

    def __init__(self, identity: Identity, secret: Secret, sight: Sight) -> None:
        self._identity = identity
        self._secret = secret
        self._sight = sight
        self._state = State.NEW
        self._error: HixlError | None = None  # why it failed
        self._transcript: list[bytes] = []
        self._version = 0
        self._detour = ""

    def _fail(self, error: HixlError) -> HixlError:
        self._error = error
        return error

    def _expect(self, *states: State) -> None:
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
        body = fields.body_of(raw, "hello")
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
        fields.text(body, "nonce", fields.HEX64)
        fields.text(body, "network", fields.FINGERPRINT)
        fields.text(body, "directory", fields.FINGERPRINT)
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
        return body

    def _prove(self, kind: str, leg: Leg, body: dict[str, Any]) -> bytes:
        body["identity"] = self._identity._asdict()
        body["started"] = self._sight.started
        body["proof"] = self._proof(self._role, leg, body)
        raw = codec.encode(kind, body, codec.HANDSHAKE_LIMIT)
        self._transcript.append(raw)
        return raw

    def _take_proof(self, leg: Leg, raw: bytes, body: dict[str, Any]) -> Identity:
        proof = fields.text(body, "proof", fields.HEX64)
        fields.text(body, "started", fields.TICKS)
        identity = fields.identity(body)
        if not hmac.compare_digest(proof, self._proof(self._other, leg, body)):
            raise AuthenticationError(
                f"the {self._other} does not know the secret of the {self._role}: {HOW_TO_SHARE_A_SECRET}"
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
            f"{HOW_TO_SHARE_A_SECRET}"
        )

    def _established(self, leg: Leg, identity: Identity, body: Mapping[str, Any]) -> Established:
        self._state = State.ESTABLISHED
        keys = (
            self._secret.tag("seal to listener", *self._transcript),
            self._secret.tag("seal to dialler", *self._transcript),
        )
        return Established(leg, self._version, identity, body["started"], self._detour, keys)


def same(ours: str, theirs: str) -> bool:
    """True if two fingerprints are known and equal."""
    return bool(ours) and ours == theirs


def apart(ours: str, theirs: str) -> str:
    """Return why two sides with these fingerprints of their networks cannot use an abstract Unix socket."""
    if not (ours and theirs):
        side = "the other side" if ours else "this side"
        return f"{side} cannot find out whether both are on one host, because it has no /proc, or one that hides namespaces"
    return "the two sides are on different hosts, or in different network namespaces"


def _versions(oldest: int, newest: int) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
