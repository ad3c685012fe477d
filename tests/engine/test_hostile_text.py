"""Text of a peer in errors and logs: it can neither forge a line nor control a terminal."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from puppet import Puppet, puppet, stage

from hixl_async import Engine, HixlError, PeerState
from hixl_async.testing import until

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
        with pytest.raises(HixlError, match="lacks a valid 'driver'") as caught:
            await connecting
        assert str(caught.value).isprintable()
