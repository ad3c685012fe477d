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
