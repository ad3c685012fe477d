"""Sections 2 and 13 of what is known about HIXL: what each call answers, in each back-end."""

from __future__ import annotations

from .probe import ALREADY_CONNECTED, COMPLETED, READ, SUCCESS, Hixl


def test_bytes_move_both_ways_over_one_link(pair: tuple[Hixl, Hixl]) -> None:
    here, there = pair
    ours, theirs = here.memory(), there.memory()
    ours.fill(b"to there")
    theirs.fill(b"from there", at=4096)
    assert here.connect(there) == SUCCESS
    assert here.connect(there) == ALREADY_CONNECTED
    assert here.status(here.write(there, ours.addr, theirs.addr, 8)) == (SUCCESS, COMPLETED)
    assert theirs.read(8) == b"to there"
    status, req = here.transfer(there, READ, [(ours.addr + 100, theirs.addr + 4096, 10)])
    assert (status, here.status(req)) == (SUCCESS, (SUCCESS, COMPLETED))
    assert ours.read(10, at=100) == b"from there"
