"""The messages between the router and D."""

from __future__ import annotations

from dataclasses import dataclass

from support.messages import Record

#: The topic of all notes.
PROGRESS = "progress"


@dataclass(frozen=True)
class Ask(Record):
    """Router to D: continue a sequence."""

    number: int
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Note(Record):
    """D to the router: the next token of a sequence; without a token, that a layer has arrived from P."""

    number: int
    position: int
    """The number of tokens before."""
    token: int | None = None
