"""The handshake as the listening side sees it."""

from __future__ import annotations

import secrets

from ..errors import AuthenticationError, HixlError, ProtocolError
from . import fields
from .handshake import HOW_TO_SHARE_A_SECRET, Action, Handshake, Leg, Send, Sight, State, apart, same
from .identity import Identity
from .process import Credentials
from .rendezvous import RendezvousName
from .secret import Secret

__all__ = ["ListenerHandshake"]


class ListenerHandshake(Handshake):
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
        self._expect(State.NEW, State.HELLO)
        try:
            if self._state is State.NEW and leg is Leg.TCP:
                return self._received_hello(raw)
            if self._state is State.HELLO:
                return self._received_proof(leg, raw, credentials)
            raise ProtocolError("a message came on the wrong leg")
        except HixlError as error:
            raise self._fail(error) from None

    def _received_hello(self, raw: bytes) -> list[Action]:
        body = self._take_hello(raw)
        self._same_network = same(self._sight.scope.network, body["network"])
        if self._name.kind == "abstract" and not self._same_network:
            self._detour = apart(self._sight.scope.network, body["network"])
        elif self._name.kind == "directory" and not same(self._sight.scope.directory, body["directory"]):
            self._detour = "the two sides do not share one unix_dir="
        else:
            self._detour = "the dialler did not use it"
            self._unix_possible = True
        if not self._secret and not self._unix_possible:
            raise self._tcp_error()
        hello = self._own_hello(connection=self.connection_id, socket=f"{self._name.kind}:{self._name.token}")
        self._transcript += (raw, hello)
        self._state = State.HELLO
        return [Send(Leg.TCP, hello)]

    def _received_proof(self, leg: Leg, raw: bytes, credentials: Credentials | None) -> list[Action]:
        body = fields.body_of(raw, "prove")
        if fields.text(body, "connection", fields.HEX32) != self.connection_id:
            raise ProtocolError("the proof is for another connection")
        if not isinstance(body.get("tcp_path"), str):
            raise ProtocolError("the proof does not name the TCP connection")
        if not self._secret:
            self._check_same_user(leg, credentials)
        identity = self._take_proof(leg, raw, body)
        if not self._secret and self._same_network and body["tcp_path"] != self._sight.tcp_path:
            raise AuthenticationError(
                f"something relays the TCP connection: the dialler sees {fields.printable(body['tcp_path'])}, "
                f"the listener {self._sight.tcp_path}; {HOW_TO_SHARE_A_SECRET}"
            )
        if leg is Leg.UNIX:
            self._detour = ""
        welcome = self._prove("welcome", leg, {})
        return [Send(leg, welcome), self._established(leg, identity, body)]

    def _check_same_user(self, leg: Leg, credentials: Credentials | None) -> None:
        if leg is Leg.TCP or credentials is None:
            raise self._tcp_error()
        if objection := self._sight.user.objection(credentials):
            raise AuthenticationError(f"the dialler is not the same user: {objection}; {HOW_TO_SHARE_A_SECRET}")
