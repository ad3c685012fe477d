"""Text of a peer in errors and logs: it can neither forge a line nor control a terminal."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from puppet import Puppet, puppet, stage

from hixl_async import Engine, HandshakeError, HixlError, PeerState
from hixl_async.core.link import EVENT_LINK_DOWN, EVENT_LOG
from hixl_async.testing import EnginePair, until

FORGED = "bad\nWARNING forged\x1b[2J\r\u202e"


def harmless(text: str) -> bool:
    return text.isprintable() and "forged" in text


async def test_the_reason_of_a_failure(engine: Engine) -> None:
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        asking = asyncio.ensure_future(engine.peers[0].request("anything", {}))
        call = (await actor.hear("call")).body["call"]
        actor.say("failure", call=call, error="HixlError", message=FORGED)
        with pytest.raises(HixlError) as caught:
            await asking
        assert harmless(str(caught.value))


async def test_the_reason_of_a_link_that_broke(engine: Engine) -> None:
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        actor.say("link.down", text=FORGED)
        await until(lambda: peer.state is PeerState.DOWN)
        assert harmless(str(peer.error))


async def test_the_reason_of_a_link_that_was_not_made(engine: Engine) -> None:
    async with stage() as theatre:
        connecting = asyncio.ensure_future(engine.connect(theatre.address))
        actor = await theatre.puppets.get()
        actor.start()
        await actor.hear("link")
        actor.say("link.failed", driver="shm", text=FORGED)
        with pytest.raises(HixlError) as caught:
            await connecting
        assert harmless(str(caught.value))


async def test_the_reason_of_a_driver_whose_link_broke(pair: EnginePair) -> None:
    (driver,) = pair.left._drivers.values()
    pair.left._on_event(driver, EVENT_LINK_DOWN, pair.peer._cookie, 0, b"", FORGED.encode())
    await until(lambda: pair.peer.state is PeerState.DOWN)
    assert harmless(str(pair.peer.error))


@pytest.mark.parametrize("status", [0, 5])
async def test_a_line_of_a_driver_for_the_log(engine: Engine, caplog: pytest.LogCaptureFixture, status: int) -> None:
    (driver,) = engine._drivers.values()
    with caplog.at_level(logging.INFO, "hixl_async"):
        engine._on_event(driver, EVENT_LOG, 0, status, b"", FORGED.encode() + b"\xff")
    (record,) = caplog.records
    assert harmless(record.getMessage())
    assert record.levelno == (logging.WARNING if status else logging.INFO)


#: Messages with a name in them, and what it names.
NAMES: list[tuple[str, dict[str, Any]]] = [
    ("region.up", {"id": 1, "name": FORGED, "size": 1, "access": 3}),
    ("region.down", {"id": 1, "name": FORGED}),
    ("call", {"call": 1, "service": FORGED, "body": {}}),
    ("post", {"service": FORGED, "body": {}}),
    ("driver", {"driver": FORGED, "data": ""}),
]


@pytest.mark.parametrize(("kind", "body"), NAMES, ids=[kind for kind, _ in NAMES])
async def test_names_cannot_hold_such_text(
    engine: Engine, caplog: pytest.LogCaptureFixture, kind: str, body: dict[str, Any]
) -> None:
    async with puppet(engine.address) as actor:
        await until(lambda: engine.peers)
        peer = engine.peers[0]
        with caplog.at_level(logging.DEBUG, "hixl_async"):
            actor.say(kind, **body)
            await until(lambda: peer.state is PeerState.DOWN)
        assert "lacks a valid" in str(peer.error)
        assert str(peer.error).isprintable()
        assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.parametrize("kind", ["link", "link.failed"])
async def test_names_of_drivers_before_the_peer_is_up(engine: Engine, kind: str) -> None:
    async with stage() as theatre:
        connecting = asyncio.ensure_future(engine.connect(theatre.address))
        actor: Puppet = await theatre.puppets.get()
        actor.start()
        await actor.hear("link")
        actor.say(kind, driver=FORGED, text="", metadata="")
        with pytest.raises(HandshakeError, match="lacks a valid 'driver'") as caught:
            await connecting
        assert str(caught.value).isprintable()
