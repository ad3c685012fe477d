"""The handshake as the dialling side sees it."""

from __future__ import annotations

from ..errors import AuthenticationError, HixlError, ProtocolError
from . import fields
from .handshake import HOW_TO_SHARE_A_SECRET, Action, Handshake, Leg, OpenUnix, Send, Sight, State, apart, same
from .identity import Identity
from .process import Credentials
from .refusal import raise_if_refusal
from .secret import Secret

__all__ = ["DiallerHandshake"]


class DiallerHandshake(Handshake):
    """The dialling side."""

    _role = "dialler"
    _other = "listener"

    def __init__(self, identity: Identity, secret: Secret, sight: Sight) -> None:
        super().__init__(identity, secret, sight)
        self._leg: Leg | None = None  # the leg on which we proved ourselves
        self._connection_id = ""

    def start(self) -> list[Action]:
        """The first message."""
        self._expect(State.NEW)
        self._state = State.HELLO
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
        self._expect(State.HELLO, State.PROVED)
        try:
            raise_if_refusal(raw)
            if self._state is State.HELLO and leg is Leg.TCP:
                return self._received_hello(raw)
            if self._state is State.PROVED and leg is self._leg:
                body = fields.body_of(raw, "welcome")
                identity = self._take_proof(leg, raw, body)
                return [self._established(leg, identity, body)]
            raise ProtocolError("a message came on the wrong leg")
        except HixlError as error:
            raise self._fail(error) from None

    def unix_opened(self, credentials: Credentials) -> list[Action]:
        """The Unix leg is connected to a socket on which the process of `credentials` listens.

        :raises AuthenticationError: if there is no secret, and that process is not known to be our own user's.
        """
        self._expect(State.OPENING)
        if not self._secret and (objection := self._sight.user.objection(credentials)):
            raise self._fail(
                AuthenticationError(f"the listener is not the same user: {objection}; {HOW_TO_SHARE_A_SECRET}")
            )
        return self._send_proof(Leg.UNIX)

    def unix_failed(self, reason: str) -> list[Action]:
        """The Unix leg could not be connected.

        :raises AuthenticationError: if there is no secret, so that nothing else is left.
        """
        self._expect(State.OPENING)
        return self._without_unix(f"its Unix socket could not be reached: {reason}")

    def _received_hello(self, raw: bytes) -> list[Action]:
        body = self._take_hello(raw)
        self._connection_id = fields.text(body, "connection", fields.HEX32)
        name = fields.socket(body)
        self._transcript.append(raw)
        scope = self._sight.scope
        if name.kind == "abstract" and not same(scope.network, body["network"]):
            return self._without_unix(apart(scope.network, body["network"]))
        if name.kind == "directory" and not same(scope.directory, body["directory"]):
            return self._without_unix("the two sides do not share one unix_dir=")
        self._state = State.OPENING
        return [OpenUnix(name)]

    def _without_unix(self, reason: str) -> list[Action]:
        self._detour = reason
        if not self._secret:
            raise self._fail(self._tcp_error())
        return self._send_proof(Leg.TCP)

    def _send_proof(self, leg: Leg) -> list[Action]:
        self._state = State.PROVED
        self._leg = leg
        body = {"connection": self._connection_id, "tcp_path": self._sight.tcp_path}
        return [Send(leg, self._prove("prove", leg, body))]
