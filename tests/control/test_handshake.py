"""The handshake without sockets: what it accepts, and that nothing else is ever accepted."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hixl_async.control import codec, handshake
from hixl_async.control.handshake import (
    Action,
    DiallerHandshake,
    Established,
    ListenerHandshake,
    OpenUnix,
    Send,
    State,
    Transport,
    raise_if_refusal,
    refusal,
)
from hixl_async.control.identity import Secret
from hixl_async.control.process import Credentials, LocalUser
from hixl_async.control.rendezvous import RendezvousName, Scope
from hixl_async.errors import (
    AuthenticationError,
    ConnectError,
    HixlError,
    InvalidArgumentError,
    PeerDownError,
    ProtocolError,
)

from .machines import ELSEWHERE, HERE, PATH, credentials, dialler, listener, perform
from .sides import SECRET, identity

#: Without the random part, so that the ids of tests are the same in every process.
IDENTITY = identity()._asdict() | {"incarnation": "0" * 32}


class TestSucceeds:
    @pytest.mark.parametrize("secret", [None, SECRET])
    def test_over_unix(self, secret: bytes | None) -> None:
        me, you = identity("me"), identity("you")
        outcome = perform(dialler(secret, me=me), listener(secret, me=you))
        assert outcome.dialler is not None
        assert outcome.listener is not None
        assert outcome.dialler.identity == you
        assert outcome.listener.identity == me
        assert outcome.dialler.transport is outcome.listener.transport is Transport.UNIX
        assert outcome.dialler.fallback == outcome.listener.fallback == ""
        assert outcome.dialler.keys == outcome.listener.keys

    @pytest.mark.parametrize(
        ("scope", "unix", "reason"),
        [(ELSEWHERE, credentials(), "different hosts"), (HERE, "Connection refused", "Connection refused")],
    )
    def test_over_tcp_with_a_secret(self, scope: Scope, unix: Credentials | str, reason: str) -> None:
        outcome = perform(dialler(SECRET, scope=scope), listener(SECRET), unix=unix)
        assert outcome.dialler is not None
        assert outcome.listener is not None
        assert outcome.dialler.transport is outcome.listener.transport is Transport.TCP
        assert reason in outcome.dialler.fallback
        assert outcome.listener.fallback
        assert outcome.dialler.keys == outcome.listener.keys
        assert outcome.dialler.keys[0] != outcome.dialler.keys[1]

    def test_between_users_with_a_secret(self) -> None:
        outcome = perform(dialler(SECRET), listener(SECRET), unix=credentials(0), dialler_seen_as=credentials(1234))
        assert outcome.dialler is not None
        assert outcome.listener is not None

    def test_in_a_shared_directory(self) -> None:
        name = RendezvousName("directory", "d" * 32)
        one, other = Scope("1" * 32, "f" * 32), Scope("2" * 32, "f" * 32)
        outcome = perform(dialler(scope=one, path="nat"), listener(scope=other, name=name))
        assert outcome.dialler is not None
        assert outcome.listener is not None
        assert outcome.listener.transport is Transport.UNIX

    def test_in_a_directory_that_is_not_shared_only_over_tcp(self) -> None:
        name = RendezvousName("directory", "d" * 32)
        for mine in ("", "e" * 32):
            outcome = perform(
                dialler(SECRET, scope=Scope("a" * 32, mine)),
                listener(SECRET, scope=Scope("a" * 32, "f" * 32), name=name),
            )
            assert outcome.dialler is not None
            assert "unix_dir" in outcome.dialler.fallback
            assert outcome.listener is not None
            assert "unix_dir" in outcome.listener.fallback

    def test_two_unknown_scopes_are_not_the_same(self) -> None:
        unknown = Scope("", "", missing="there is no /proc")
        outcome = perform(dialler(SECRET, scope=unknown), listener(SECRET, scope=unknown))
        for established in (outcome.dialler, outcome.listener):
            assert established is not None
            assert established.transport is Transport.TCP
            assert "could not find out" in established.fallback
            assert "/proc" in established.fallback


class TestRefuses:
    @pytest.mark.parametrize(
        ("one", "other", "words"),
        [
            (SECRET, None, "the dialler has a secret and the listener has none"),
            (None, SECRET, "the listener has a secret and the dialler has none"),
        ],
    )
    def test_a_secret_on_one_side_only(self, one: bytes | None, other: bytes | None, words: str) -> None:
        error = perform(dialler(one), listener(other)).listener_error
        assert isinstance(error, AuthenticationError)
        assert words in str(error)
        assert "secret=" in str(error)

    @pytest.mark.parametrize("scope", [HERE, ELSEWHERE])
    def test_another_secret(self, scope: Scope) -> None:
        outcome = perform(dialler(b"one", scope=scope), listener(b"other"))
        assert isinstance(outcome.listener_error, AuthenticationError)
        assert "does not know the secret" in str(outcome.listener_error)
        assert outcome.dialler is None

    def test_a_listener_that_accepts_all_and_does_not_know_the_secret(self) -> None:
        accepting = listener(b"other")
        accepting._take_proof = (  # type: ignore[method-assign]
            lambda transport, raw, body: accepting._transcript.append(raw) or identity()  # type: ignore[func-returns-value]
        )
        outcome = perform(dialler(SECRET), accepting)
        assert outcome.listener is not None
        assert isinstance(outcome.dialler_error, AuthenticationError)

    def test_another_domain(self) -> None:
        outcome = perform(dialler(me=identity(domain="blue")), listener(me=identity(domain="red")))
        assert isinstance(outcome.listener_error, AuthenticationError)
        assert "'red'" in str(outcome.listener_error)
        assert "'blue'" in str(outcome.listener_error)

    @pytest.mark.parametrize("secret", [None, SECRET])
    def test_itself(self, secret: bytes | None) -> None:
        me = identity()
        error = perform(dialler(secret, me=me), listener(secret, me=me)).listener_error
        assert isinstance(error, InvalidArgumentError)
        assert "transfer to self" in str(error)

    def test_tcp_without_a_secret(self) -> None:
        outcome = perform(dialler(scope=ELSEWHERE), listener())
        assert isinstance(outcome.listener_error, AuthenticationError)
        assert "different hosts" in str(outcome.listener_error)
        assert "token_bytes" in str(outcome.listener_error)

    def test_an_unreachable_unix_socket_without_a_secret(self) -> None:
        one = dialler()
        [hello] = one.start()
        [answer] = listener().received(Transport.TCP, sent(hello))
        assert isinstance(one.received(Transport.TCP, sent(answer))[0], OpenUnix)
        with pytest.raises(ConnectError, match="Unix socket could not be connected: Connection refused") as caught:
            one.unix_failed(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
        assert type(caught.value) is ConnectError
        assert caught.value.retryable
        assert caught.value.native == errno.ECONNREFUSED

    @pytest.mark.parametrize("side", ["dialler", "listener"])
    def test_a_scope_that_is_unknown(self, side: str) -> None:
        """The error does not call it another scope."""
        unknown = Scope("", "", "/proc/sys/kernel/random/boot_id: No such file or directory")
        outcome = perform(
            dialler(scope=unknown if side == "dialler" else HERE),
            listener(scope=unknown if side == "listener" else HERE),
        )
        text = str(outcome.listener_error)
        assert isinstance(outcome.listener_error, AuthenticationError)
        assert "different" not in text
        assert ("boot_id: No such file" if side == "listener" else "it needs /proc") in text

    def test_another_user_without_a_secret(self) -> None:
        outcome = perform(dialler(), listener(), dialler_seen_as=credentials(1001))
        assert isinstance(outcome.listener_error, AuthenticationError)
        assert "runs as user 1001, this side as user 1000" in str(outcome.listener_error)
        one, other = dialler(), listener()
        one.received(Transport.TCP, sent(*other.received(Transport.TCP, sent(*one.start()))))
        with pytest.raises(AuthenticationError, match="runs as user 0, this side as user 1000"):
            one.unix_opened(credentials(0))

    def test_tcp_without_a_secret_even_if_the_dialler_insists(self) -> None:
        one, other = dialler(), listener()
        one.received(Transport.TCP, sent(*other.received(Transport.TCP, sent(*one.start()))))
        one._state = State.OPENING
        proof = one._send_proof(Transport.TCP)
        with pytest.raises(AuthenticationError, match="without a secret"):
            other.received(Transport.TCP, sent(*proof))

    def test_a_relayed_tcp_connection_without_a_secret(self) -> None:
        outcome = perform(dialler(path="127.0.0.1 1 > 127.0.0.1 2"), listener())
        assert isinstance(outcome.listener_error, AuthenticationError)
        assert "is relayed" in str(outcome.listener_error)
        assert PATH in str(outcome.listener_error)
        assert perform(dialler(SECRET, path="127.0.0.1 1 > 127.0.0.1 2"), listener(SECRET)).listener is not None

    def test_a_user_that_only_seems_to_be_the_same(self) -> None:
        overflow_user = LocalUser(uid=65534, overflow_uid=65534, all_mapped=False)
        outcome = perform(dialler(), listener(user=overflow_user), dialler_seen_as=credentials(65534))
        assert isinstance(outcome.listener_error, AuthenticationError)
        assert "every user without a name" in str(outcome.listener_error)
        all_mapped_user = overflow_user._replace(all_mapped=True)
        assert perform(dialler(), listener(user=all_mapped_user), dialler_seen_as=credentials(65534)).listener
        assert perform(dialler(), listener(user=overflow_user._replace(uid=7)), dialler_seen_as=credentials(7)).listener

    @pytest.mark.parametrize(("theirs", "words"), [([2, 3], "versions 2 to 3"), ([2, 2], "version 2")])
    def test_other_versions(self, theirs: list[int], words: str) -> None:
        for secret in (None, SECRET):
            hello = edited(sent(*dialler(secret).start()), versions=theirs)
            with pytest.raises(ProtocolError, match=f"listener speaks version 1, the dialler {words}"):
                listener(secret).received(Transport.TCP, hello)

    def test_other_versions_whatever_else_their_hello_says(self) -> None:
        hello = codec.encode("hello", {"magic": "hixl-async", "versions": [7, 9], "greeting": {}})
        with pytest.raises(ProtocolError, match="versions 7 to 9"):
            listener().received(Transport.TCP, hello)

    @pytest.mark.parametrize("versions", [None, [], [1], [1, 2, 3], [0, 1], [2, 1], ["1", "1"], [1.0, 1.0], {"1": 1}])
    def test_a_malformed_version_range(self, versions: object) -> None:
        with pytest.raises(ProtocolError, match="range of versions"):
            listener().received(Transport.TCP, edited(sent(*dialler().start()), versions=versions))

    def test_a_wider_range_is_welcome(self) -> None:
        answer = listener().received(Transport.TCP, edited(sent(*dialler().start()), versions=[1, 9]))
        assert isinstance(answer[0], Send)

    @pytest.mark.parametrize(
        "edit",
        [
            {"magic": "http"},
            {"nonce": ""},
            {"nonce": "A" * 64},
            {"nonce": 7},
            {"nonce": "a" * 65},
            {"network": "x"},
            {"network": None},
            {"directory": ["a" * 32]},
            {"secret": 1},
            {"secret": None},
        ],
        ids=str,
    )
    def test_a_malformed_hello(self, edit: dict[str, object]) -> None:
        with pytest.raises(ProtocolError):
            listener().received(Transport.TCP, edited(sent(*dialler().start()), **edit))

    @pytest.mark.parametrize(
        "edit",
        [
            {"socket": ""},
            {"socket": "abstract:"},
            {"socket": "abstract:../../run/docker.sock"},
            {"socket": "directory:" + "/" * 32},
            {"socket": "file:" + "a" * 32},
            {"connection": "x"},
            {"connection": None},
        ],
        ids=str,
    )
    def test_a_malformed_answer(self, edit: dict[str, object]) -> None:
        one = dialler()
        answer = edited(sent(*listener().received(Transport.TCP, sent(*one.start()))), **edit)
        with pytest.raises(ProtocolError):
            one.received(Transport.TCP, answer)

    @pytest.mark.parametrize(
        "edit",
        [
            {"identity": None},
            {"identity": {}},
            {"identity": {**IDENTITY, "more": 1}},
            {"identity": {**IDENTITY, "name": ""}},
            {"identity": {**IDENTITY, "name": "x" * 129}},
            {"identity": {**IDENTITY, "name": "a\nb"}},
            {"identity": {**IDENTITY, "name": 5}},
            {"identity": {**IDENTITY, "domain": "\x1b[31m"}},
            {"identity": {**IDENTITY, "incarnation": "x"}},
            {"identity": {**IDENTITY, "drivers": "shm"}},
            {"identity": {**IDENTITY, "drivers": ["x"] * 17}},
            {"identity": {**IDENTITY, "drivers": [["x"]]}},
            {"identity": {**IDENTITY, "drivers": [""]}},
            {"started": "-1"},
            {"started": 5},
            {"proof": "0" * 63},
            {"proof": None},
            {"connection": "f" * 32},
            {"tcp_path": 1},
        ],
        ids=str,
    )
    def test_a_malformed_proof(self, edit: dict[str, object]) -> None:
        one, other = dialler(), listener()
        one.received(Transport.TCP, sent(*other.received(Transport.TCP, sent(*one.start()))))
        proof = edited(sent(*one.unix_opened(credentials())), **edit)
        with pytest.raises(ProtocolError):
            other.received(Transport.UNIX, proof, credentials())

    def test_another_spelling(self) -> None:
        hello = sent(*dialler().start())
        for spelling in (hello + b" ", hello.replace(b":", b": ", 1), json.dumps(json.loads(hello), indent=1).encode()):
            with pytest.raises(ProtocolError, match="canonical"):
                listener().received(Transport.TCP, spelling)

    def test_messages_out_of_turn(self) -> None:
        one = dialler()
        with pytest.raises(ProtocolError, match="out of order"):
            one.received(Transport.TCP, b"")
        with pytest.raises(ProtocolError, match="out of order"):
            dialler().unix_opened(credentials())
        with pytest.raises(ProtocolError, match="wrong transport"):
            listener().received(Transport.UNIX, sent(*dialler().start()), credentials())
        with pytest.raises(ProtocolError, match="expected a 'hello', not a 'prove'"):
            listener().received(Transport.TCP, codec.encode("prove", {}))

    def test_a_welcome_on_the_other_transport(self) -> None:
        one, other = dialler(SECRET), listener(SECRET)
        one.received(Transport.TCP, sent(*other.received(Transport.TCP, sent(*one.start()))))
        welcome = other.received(Transport.UNIX, sent(*one.unix_opened(credentials())), credentials())[0]
        with pytest.raises(ProtocolError, match="wrong transport"):
            one.received(Transport.TCP, sent(welcome))

    def test_a_proof_for_the_other_transport(self) -> None:
        one, other = dialler(SECRET), listener(SECRET)
        one.received(Transport.TCP, sent(*other.received(Transport.TCP, sent(*one.start()))))
        proof = sent(*one.unix_opened(credentials()))
        with pytest.raises(AuthenticationError):
            other.received(Transport.TCP, proof)

    def test_everything_after_a_refusal(self) -> None:
        one, other = dialler(), listener()
        with pytest.raises(ProtocolError) as first:
            other.received(Transport.TCP, b"nonsense")
        with pytest.raises(ProtocolError) as second:
            other.received(Transport.TCP, sent(*one.start()))
        assert first.value is second.value

    def test_a_second_handshake_with_the_same_machines(self) -> None:
        one, other = dialler(), listener()
        outcome = perform(one, other)
        with pytest.raises(ProtocolError):
            one.start()
        with pytest.raises(ProtocolError):
            other.received(Transport.UNIX, outcome.messages[2], credentials())


class TestRefusal:
    @pytest.mark.parametrize("kind", [AuthenticationError, ProtocolError, InvalidArgumentError, ConnectError])
    def test_keeps_its_class(self, kind: type[HixlError]) -> None:
        with pytest.raises(kind, match="refused: because") as caught:
            raise_if_refusal(refusal(kind("because")))
        assert type(caught.value) is kind

    def test_of_another_kind_is_a_connect_error(self) -> None:
        with pytest.raises(ConnectError, match="because") as caught:
            raise_if_refusal(refusal(PeerDownError("because")))
        assert type(caught.value) is ConnectError

    @pytest.mark.parametrize("body", [{}, {"code": 5, "text": []}, {"code": ["x"], "text": None}])
    def test_without_text(self, body: dict[str, object]) -> None:
        with pytest.raises(ConnectError, match="no reason given"):
            raise_if_refusal(codec.encode("refuse", body))

    def test_cannot_write_to_terminals(self) -> None:
        with pytest.raises(ConnectError, match=r"refused: \?\[2J$"):
            raise_if_refusal(codec.encode("refuse", {"code": "connect", "text": "\x1b[2J"}))

    def test_of_the_longest_error_fits(self) -> None:
        assert len(refusal(ConnectError('"' * 5000))) < codec.HANDSHAKE_LIMIT
        assert len(refusal(ConnectError("\U0001f40d" * 5000))) < codec.HANDSHAKE_LIMIT


class TestSecret:
    @pytest.mark.parametrize("key", ["text", b"", 5, bytearray()])
    def test_must_be_bytes(self, key: object) -> None:
        with pytest.raises(InvalidArgumentError, match="secret must be bytes") as caught:
            Secret(key)  # type: ignore[arg-type]
        assert "text" not in str(caught.value)

    def test_is_not_shown(self) -> None:
        secret = Secret(b"hidden")
        assert "hidden" not in repr(secret) + str(secret) + f"{secret}"
        assert not hasattr(secret, "__dict__")

    def test_lengths_are_part_of_the_tag(self) -> None:
        secret = Secret(SECRET)
        assert secret.tag("a", b"bc") != secret.tag("ab", b"c") != secret.tag("a", b"b", b"c")


def test_the_longest_identity_fits() -> None:
    me = identity('"' * 128, domain="\\" * 128)._replace(address='"' * 300, drivers=('"' * 32,) * 16)
    assert me.problem() is None
    assert perform(dialler(SECRET, me=me), listener(SECRET, me=me._replace(incarnation="f" * 32))).dialler is not None
    wide = identity("\U0001f40d" * 32)
    assert wide.problem() is None
    assert perform(dialler(me=wide), listener()).dialler is not None
    assert identity("\U0001f40d" * 33).problem() is not None


def test_nothing_is_revealed_before_the_other_side_is_authenticated() -> None:
    me, you = identity("unique-name-me"), identity("unique-name-you")
    messages = perform(dialler(SECRET, me=me), listener(SECRET, me=you)).messages
    assert b"unique-name-you" not in b"".join(messages[:3])
    assert b"unique-name" not in b"".join(messages[:2])


def test_no_secret_is_in_any_message() -> None:
    for scope in (HERE, ELSEWHERE):
        assert SECRET not in b"".join(perform(dialler(SECRET, scope=scope), listener(SECRET)).messages)


# -- attacks

NAMES = ("hello of the dialler", "hello of the listener", "proof", "welcome")


@pytest.mark.parametrize(
    ("secret", "scope"), [(None, HERE), (SECRET, HERE), (SECRET, ELSEWHERE)], ids=["same user", "unix", "tcp"]
)
@pytest.mark.parametrize("which", range(4), ids=NAMES)
def test_every_altered_byte_is_detected(secret: bytes | None, scope: Scope, which: int) -> None:
    length = len(perform(dialler(secret, scope=scope), listener(secret)).messages[which])
    for at in range(length):
        for mask in (0x01, 0x20, 0x80):

            def alter(index: int, raw: bytes, at: int = at, mask: int = mask) -> list[bytes]:
                if index != which or at >= len(raw):
                    return [raw]
                return [raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]]

            outcome = perform(dialler(secret, scope=scope), listener(secret), alter)
            assert outcome.dialler is None
            assert (outcome.listener is None) == (
                which < 3
            )  # the sender of the last message cannot know how it arrives


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("which", range(4), ids=NAMES)
@pytest.mark.parametrize(
    "change",
    [lambda raw: [], lambda raw: [raw[:-1]], lambda raw: [raw + b"}"], lambda raw: [b"", raw]],
    ids=["dropped", "truncated", "lengthened", "preceded"],
)
def test_all_other_damage_is_detected(secret: bytes | None, which: int, change: Callable[[bytes], list[bytes]]) -> None:
    outcome = perform(dialler(secret), listener(secret), lambda index, raw: change(raw) if index == which else [raw])
    assert outcome.dialler is None
    assert (outcome.listener is None) == (which < 3)


@pytest.mark.parametrize(
    ("secret", "scope"), [(None, HERE), (SECRET, HERE), (SECRET, ELSEWHERE)], ids=["same user", "unix", "tcp"]
)
@pytest.mark.parametrize("which", range(4), ids=NAMES)
def test_messages_of_another_handshake_do_not_fit(secret: bytes | None, scope: Scope, which: int) -> None:
    me, you = identity("me"), identity("you")

    def machines() -> tuple[DiallerHandshake, ListenerHandshake]:
        return dialler(secret, me=me, scope=scope), listener(secret, me=you)

    earlier = perform(*machines()).messages
    outcome = perform(*machines(), lambda index, raw: [earlier[which]] if index == which else [raw])
    assert outcome.dialler is None
    assert (outcome.listener is None) == (which < 3)


def test_reflection() -> None:
    """A listener without the secret returns the dialler's own messages."""
    for scope in (HERE, ELSEWHERE):
        one = dialler(SECRET, scope=scope)
        answer = sent(*listener(b"other").received(Transport.TCP, sent(*one.start())))
        actions = one.received(Transport.TCP, answer)
        if isinstance(actions[0], OpenUnix):
            actions = one.unix_opened(credentials())
        [proof] = actions
        assert isinstance(proof, Send)
        body = codec.decode(proof.message).body
        with pytest.raises((AuthenticationError, InvalidArgumentError)):
            one.received(proof.transport, codec.encode("welcome", body))


class Attack(NamedTuple):
    """The delivery of an old message, changed or not, to a machine, over a transport."""

    to: int
    age: int  # 0 is the newest message
    over_unix: bool
    change: tuple[int, int] | None


class Pair:
    """The two machines of one handshake, and the message under way between them."""

    def __init__(self, secret: bytes | None, scope: Scope) -> None:
        self.dialler = dialler(secret, scope=scope)
        self.listener = listener(secret)
        self.under_way: tuple[bool, Send | OpenUnix] | None = None  # to the listener?
        self.react(True, self.dialler.start())

    def react(self, to_listener: bool, actions: list[Action]) -> Established | None:
        for action in actions:
            if isinstance(action, Established):
                return action
            self.under_way = to_listener, action
        return None

    def go_on(self) -> Established | None:
        """Deliver the next message unchanged."""
        if self.under_way is None:
            return None
        (to_listener, what), self.under_way = self.under_way, None
        if isinstance(what, OpenUnix):
            return self.react(True, self.dialler.unix_opened(credentials()))
        return self.deliver(to_listener, what.transport, what.message)

    def deliver(self, to_listener: bool, transport: Transport, raw: bytes) -> Established | None:
        if to_listener:
            seen = credentials() if transport is Transport.UNIX else None
            return self.react(False, self.listener.received(transport, raw, seen))
        return self.react(True, self.dialler.received(transport, raw))


@settings(max_examples=500, deadline=None)
@given(
    secret=st.sampled_from([None, SECRET]),
    scope=st.sampled_from([HERE, ELSEWHERE]),
    moves=st.lists(
        st.integers(0, 1)
        | st.builds(
            Attack,
            st.integers(0, 3),
            st.integers(0, 9),
            st.booleans(),
            st.none() | st.tuples(st.integers(0, 2000), st.integers(1, 255)),
        ),
        max_size=16,
    ),
)
def test_attacks_on_two_handshakes_deceive_no_side(
    secret: bytes | None, scope: Scope, moves: list[int | Attack]
) -> None:
    """A side is established only if exactly one other side has heard and said the same as itself."""
    pairs = [Pair(secret, scope), Pair(secret, scope)]
    said = [pair.under_way[1].message for pair in pairs if pair.under_way and isinstance(pair.under_way[1], Send)]
    for move in moves:
        pair = pairs[move if isinstance(move, int) else move.to % 2]
        to_listener = pair.under_way is not None and pair.under_way[0]
        transport = None
        try:
            if isinstance(move, int):
                established = pair.go_on()
            else:
                to_listener, transport = move.to < 2, Transport.UNIX if move.over_unix else Transport.TCP
                raw = said[-1 - move.age % len(said)]
                if move.change is not None:
                    at = move.change[0] % len(raw)
                    raw = raw[:at] + bytes([raw[at] ^ move.change[1]]) + raw[at + 1 :]
                established = pair.deliver(to_listener, transport, raw)
        except HixlError:
            continue
        if pair.under_way is not None and isinstance(pair.under_way[1], Send):
            said.append(pair.under_way[1].message)
        if established is not None:
            event(f"established at the {'listener' if to_listener else 'dialler'}")
            assert not (secret is None and established.transport is Transport.TCP)
            mine = (pair.listener if to_listener else pair.dialler)._transcript
            theirs = [(one.dialler if to_listener else one.listener)._transcript for one in pairs]
            heard = 3 if to_listener else 4
            assert [other[:heard] for other in theirs].count(mine[:heard]) == 1


def sent(*actions: object) -> bytes:
    """Return the message of the only action."""
    [action] = actions
    assert isinstance(action, Send)
    return action.message


def edited(raw: bytes, **fields: object) -> bytes:
    """Return a message with some fields replaced, in canonical form."""
    message = codec.decode(raw)
    return codec.encode(message.kind, {**message.body, **fields})


def test_protocol_version() -> None:
    assert handshake.PROTOCOL_VERSION == 1
