"""The router: sends a prompt through P and D, or to the reference, and collects what they have to tell."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fleet import Fleet
from messages import DecodeRequest, GenerateRequest, PrefillRequest, Report, Step, arrivals_topic, tokens_topic
from timeline import Timeline, Track

import hixl_async as hx

Listener = Callable[[int], None]
Answers = dict[str, dict[str, Any]]


def ignore(_number: int) -> None:
    """A listener that does not listen."""


@dataclass
class Run:
    """One prompt with its answer."""

    prompt: list[int]
    asked_ns: int
    """When the router sent the request,"""
    heard_ns: list[int] = field(default_factory=list)
    """and when it heard of each token."""
    steps: list[Step] = field(default_factory=list)
    """The prefill, then one for each further token."""
    reports: dict[str, Report] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def prefill_ns(self) -> int:
        return self.steps[0].end_ns - self.steps[0].start_ns

    @property
    def dispatch_ns(self) -> int:
        """From the request to the start of the prefill."""
        return self.steps[0].start_ns - self.asked_ns

    def heard_after_ns(self, token: int) -> int:
        """From the request until the router heard of a token."""
        return self.heard_ns[token] - self.asked_ns


class Router:
    """Sends requests to the processes of a fleet.

    :param engine: hears of tokens as they are chosen.
    """

    def __init__(self, engine: hx.Engine, fleet: Fleet) -> None:
        self._engine = engine
        self._fleet = fleet
        self._numbers = itertools.count(1)

    async def disaggregated(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        streamed: bool = True,
        bytes_per_second: float | None = None,
        on_token: Listener = ignore,
        on_arrival: Listener = ignore,
    ) -> Run:
        """Lets P prefill and D decode.

        :param streamed: whether P sends each layer as soon as it is there, or all of them at the end.
        :param bytes_per_second: paces the link between them.
        :param on_token: called with each token.
        :param on_arrival: called with each layer that has arrived at D.
        :raises Failed: if one of the processes fails.
        """
        number = next(self._numbers)
        wanted = DecodeRequest(number, len(prompt), max_tokens)
        run = Run(prompt, asked_ns=time.monotonic_ns())
        ticket = await self._fleet.ask("D", "reserve", wanted.body())
        work = PrefillRequest(number, prompt, ticket, streamed, bytes_per_second)
        with self._listen(arrivals_topic(number), lambda note: on_arrival(int(note.payload))):
            ...

    async def alone(self, prompt: list[int], max_tokens: int) -> Run:
        """Lets the reference do all of it."""
