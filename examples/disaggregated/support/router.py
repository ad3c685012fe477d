"""The router: sends a prompt through P and D, or to the reference, and collects their reports."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import hixl_async as hx

from .fleet import Fleet
from .messages import DecodeRequest, GenerateRequest, PrefillRequest, Report, Step, arrivals_topic, tokens_topic
from .timeline import Timeline, Track
from .tokenizer import TextStream, Tokenizer


def ignore(_number: int) -> None:
    """Ignore a call."""


@dataclass
class Run:
    """A prompt and its answer, with all measurements of the run."""

    prompt: list[int]
    max_tokens: int
    asked_ns: int
    """The time at which the router sent the request,"""
    heard_ns: list[int] = field(default_factory=list)
    """and the times at which it heard of each token."""
    steps: list[Step] = field(default_factory=list)
    """The prefill, then a step for each further token."""
    reports: dict[str, Report] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)


class Router:
    """The dispatch of prompts to the processes of a fleet.

    :param engine: the engine to which they are connected, and which they notify of tokens.
    :param tokenizer: names the tokens in timelines.
    """

    def __init__(self, engine: hx.Engine, fleet: Fleet, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._numbers = itertools.count(1)

    async def introduce(self) -> None:
        """Connect P with D before the first request, so that no request waits for it.

        :raises Failed: if a process fails.
        """
        await self._fleet.together({"P": self._fleet.ask("P", "meet", {"address": self._fleet.address("D")})})

    async def disaggregated(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        streamed: bool = True,
        on_token: Callable[[int], None] = ignore,
        on_arrival: Callable[[int], None] = ignore,
    ) -> Run:
        """Have P prefill and D decode.

        :param streamed: whether P sends a layer as soon as it has computed it, or all of them at the end.
        :param on_token: called with each token, as it is chosen.
        :param on_arrival: called with the number of each layer that has arrived at D.
        :raises Failed: if a process fails.
        """
        number = next(self._numbers)
        run = Run(prompt, max_tokens, asked_ns=time.monotonic_ns())
        to_decode = DecodeRequest(number, len(prompt), max_tokens)
        # Both begin at once: P to compute, D to reserve memory. P asks D for the ticket meanwhile, which allows it to
        # write there.
        to_prefill = PrefillRequest(number, prompt, streamed)
        await self._answer(
            number,
            run,
            {
                "P": self._fleet.ask("P", "prefill", to_prefill.body()),
                "D": self._fleet.ask("D", "decode", to_decode.body()),
            },
            on_token,
            on_arrival,
        )
        _add_transfers(run.timeline)
        self._add_steps(run)
        return run

    async def alone(self, prompt: list[int], max_tokens: int) -> Run:
        """Have the reference do all of it.

        :raises Failed: if it fails.
        """
        number = next(self._numbers)
        run = Run(prompt, max_tokens, asked_ns=time.monotonic_ns())
        request = GenerateRequest(number, prompt, max_tokens)
        asked = {"reference": self._fleet.ask("reference", "generate", request.body())}
        await self._answer(number, run, asked, ignore, ignore)
        return run

    async def _answer(
        self,
        number: int,
        run: Run,
        asked: dict[str, Coroutine[Any, Any, dict[str, Any]]],
        on_token: Callable[[int], None],
        on_arrival: Callable[[int], None],
    ) -> None:
        listening = asyncio.create_task(self._listen(number, run, on_token, on_arrival))
        try:
            answers = await self._fleet.together(asked)
            await (
                listening
            )  # answers and notifications take different paths, so the last notification may still be on its way
        finally:
            listening.cancel()
        for name, body in answers.items():
            run.reports[name] = Report(**body)
            run.timeline.merge(Timeline.from_json(run.reports[name].timeline))

    async def _listen(
        self, number: int, run: Run, on_token: Callable[[int], None], on_arrival: Callable[[int], None]
    ) -> None:
        tokens, arrivals = tokens_topic(number), arrivals_topic(number)
        async with self._engine.notifications() as notes:
            async for note in notes:
                if note.topic == arrivals:
                    on_arrival(int(note.payload))
                elif note.topic == tokens and not note.payload:
                    return
                elif note.topic == tokens:
                    run.heard_ns.append(time.monotonic_ns())
                    run.steps.append(Step.from_json(note.payload))
                    on_token(run.steps[-1].token)

    def _add_steps(self, run: Run) -> None:
        """Add the steps of D."""
        texts = TextStream(self._tokenizer)
        texts.feed(run.steps[0].token)
        for step in run.steps[1:]:
            # Named by the characters that it completes, because many tokens are only a part of one.
            text = texts.feed(step.token) or "\N{HORIZONTAL ELLIPSIS}"
            run.timeline.add("D", Track.DECODE, text, step.start_ns, step.end_ns)


def _add_transfers(timeline: Timeline) -> None:
    """Add a span for each layer's transfer: from its push, or from the arrival of the one before, until it arrived."""
    arrived = {span.args["layer"]: span.end_ns for span in timeline.on(Track.ARRIVAL)}
    free = 0
    for push in timeline.on("push"):
        layer = push.args["layer"]
        start, free = max(push.start_ns, free), arrived[layer]
        timeline.add("P", Track.TRANSFER, f"layer {layer}", start, free, layer=layer)
