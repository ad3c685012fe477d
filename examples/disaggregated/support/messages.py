"""The messages between the processes of the demo: small records that travel as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Record:
    """A record that travels as the body of a request, or as the bytes of a notification."""

    def body(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.body())

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Settings(Record):
    """The settings that a process gets when it is started."""

    router: str
    """Address of main.py's engine."""
    driver: str
    loop: str
    pool_blocks: int
    """The number of blocks of keys and values that its memory can hold."""
    random_model: bool
    bytes_per_second: float | None = None
    """The limit of the process's writes to others; None: no limit."""
    faults: int | None = None
    """The seed of faults: some writes are late, some overtake others, a few fail; None: no faults."""


@dataclass(frozen=True)
class PrefillRequest(Record):
    """Router to P: compute the keys and values of a prompt, and bring them to D."""

    run: int
    prompt: list[int]
    streamed: bool
    """Send each layer as soon as it is computed; if not, all of them after the prefill."""


@dataclass(frozen=True)
class DecodeRequest(Record):
    """Router to D: decode, with the keys and values that arrive from P."""

    run: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class GenerateRequest(Record):
    """Router to the reference: do all of it alone."""

    run: int
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Step(Record):
    """One run of the model. It ends with the choice of a token."""

    token: int
    logits: str
    """A digest of the logits: equal only if all their bits are."""
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Report(Record):
    """The answer of a process when its part of a run is done."""

    kv: list[str]
    """A digest of the prompt's keys and values for each layer, in the order of the tokens."""
    blocks: list[int]
    """The block table: where in the process's memory they lie."""
    timeline: str
    """See `Timeline.to_json`."""
    transfers: int = 0
    """The number of transfers that the process started,"""
    transferred: int = 0
    """and the number of bytes that they moved."""


# Topics of notifications. A run has topics of its own, because many may be under way at once.


def tokens_topic(run: int) -> str:
    """To the router: each `Step`, as JSON; nothing, after the last one."""
    return f"run {run}: tokens"


def arrivals_topic(run: int) -> str:
    """D to the router: the number of each layer that has arrived, for the progress line."""
    return f"run {run}: arrivals"
