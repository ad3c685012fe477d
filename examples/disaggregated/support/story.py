"""The demo's runs, one after another, and its explanations."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

import hixl_async as hx

from . import simulation
from .fleet import Fleet
from .messages import Settings
from .model import blocks_needed
from .report import Column, Console, Typewriter, compare, milliseconds, size, table, timing, traffic
from .router import Router, Run
from .timeline import Timeline, Track, draw
from .tokenizer import Tokenizer
from .weights import Checkpoint
from .worker import BLOCK_TOKENS

PACED_TOKENS = 8  # over the paced link: enough to see how decoding begins
PACED_SHARE = 0.8  # the part of P's time for a layer in which the paced link carries it


class Options(argparse.Namespace):
    """The command line; main.py explains it."""

    prompt: list[str]
    prompt_file: list[Path]
    length: int | None
    tokens: int
    driver: str
    loop: str
    pace: bool
    bandwidth: float | None
    out: Path
    quiet: bool
    random_model: bool


class Question(NamedTuple):
    """A prompt, as text and as tokens."""

    text: str
    tokens: list[int]


class Answers(NamedTuple):
    """Two answers to one question."""

    together: Run
    """By P and D."""
    alone: Run
    """By the reference."""


class Wire(NamedTuple):
    """A paced link."""

    bytes_per_second: float
    layer_ns: float
    """The time that it needs for a layer,"""
    computed_ns: float
    """and the time that P needs to compute one."""

    def exposed_ns(self, layers: int) -> float:
        """Return how long D waits at most after the prefill if K/V are streamed: for the last layer, if the wire is faster."""
        return self.layer_ns + (layers - 1) * max(0.0, self.layer_ns - self.computed_ns)


class Story:
    """One run of the demo.

    :param checkpoint: the model. This process does not run it, but reads and writes its tokens.
    """

    def __init__(
        self, options: Options, console: Console, checkpoint: Checkpoint, questions: Sequence[Question]
    ) -> None:
        self._options = options
        self._console = console
        self._name = "A random model" if options.random_model else "SmolLM2-135M"
        self._layers = checkpoint.config.layers
        self._tokenizer = Tokenizer(checkpoint.vocabulary)
        self._questions = questions
        self._identical = True

    async def tell(self) -> bool:
        """Run the whole demo.

        :return: whether all answers of P and D were the reference's, to the last bit.
        :raises Failed: if one of the processes fails.
        :raises OSError: if the picture or the trace cannot be written.
        """
        paced: list[Run] = []
        link = f"over driver {self._options.driver}"
        async with hx.Engine("127.0.0.1:0", name="router", drivers=[self._options.driver]) as engine:
            if simulated := simulation.notice(engine, self._options.driver):
                self._console.result(simulated)
            settings = self._settings(engine.address)
            self._console.progress("three processes start and map the model")
            async with Fleet(engine, settings, "P", "D", "reference", tell=self._console.notice) as fleet:
                router = await self._meet(engine, fleet)
                answers = [await self._answer(router, question) for question in self._questions]
            longest = max(answers, key=lambda pair: len(pair.together.prompt))
            if self._options.pace:
                wire = self._wire_for(longest.together)
                link = f"over a paced link of {size(wire.bytes_per_second)}/s"
                paced = await self._pace(engine, settings, longest, wire)
        self._console.heading("Files")
        self._draw(paced or [longest.together], link)
        self._write_trace([*(pair.together for pair in answers), *paced])
        return self._identical

    def _settings(self, address: str) -> Settings:
        longest = max(len(question.tokens) for question in self._questions)
        return Settings(
            router=address,
            driver=self._options.driver,
            loop=self._options.loop,
            # Twice what is needed at a time, so that random block tables have something to choose from.
            pool_blocks=2 * blocks_needed(longest + self._options.tokens, BLOCK_TOKENS),
            random_model=self._options.random_model,
        )

    async def _meet(self, engine: hx.Engine, fleet: Fleet) -> Router:
        pids = ", ".join(f"{name} {pid}" for name, pid in fleet.pids().items())
        self._console.line(f"Processes: {pids}; event loop {self._options.loop}, driver {self._options.driver}.")
        router = Router(engine, fleet, self._tokenizer)
        await router.introduce()
        return router

    async def _answer(self, router: Router, question: Question) -> Answers:
        """Let P and D answer while the user reads along, then the reference."""
        console, prompt, tokens = self._console, question.tokens, self._options.tokens
        console.heading(f"A prompt of {len(prompt)} tokens")
        console.paragraphs(question.text, indent="> ")
        console.line()
        typewriter = Typewriter(console, self._tokenizer)
        together = await router.disaggregated(
            prompt, tokens, on_token=typewriter.token, on_arrival=self._arrivals("P prefills")
        )
        typewriter.finish()
        console.progress("the reference does the same, for comparison")
        alone = await router.alone(prompt, tokens)
        together.timeline.title = f"{len(prompt)} tokens, streamed as fast as it goes"
        console.line()
        console.line(
            table(
                ["P and D", "one process"],
                [timing(together), timing(alone)],
                [self._judge("P and D", together, alone)],
                [traffic(together)],
            )
        )
        return Answers(together, alone)

    def _wire_for(self, run: Run) -> Wire:
        """Return the wire that the user wants, or one that carries a layer a bit faster than P computes one."""
        layer_bytes = run.reports["P"].transferred / self._layers
        computed = [span.end_ns - span.start_ns for span in run.timeline.on(Track.COMPUTE) if "layer" in span.args]
        computed_ns = median(computed)
        speed = self._options.bandwidth or layer_bytes / (PACED_SHARE * computed_ns / 1e9)
        return Wire(speed, layer_bytes / speed * 1e9, computed_ns)

    async def _pace(self, engine: hx.Engine, settings: Settings, answers: Answers, wire: Wire) -> list[Run]:
        """Run the longest prompt once more over a slow link, first streamed, then sent after the prefill."""
        console, (together, alone) = self._console, answers
        speed = f"{size(wire.bytes_per_second)}/s"
        console.heading(f"The same {len(together.prompt)} tokens over a paced link of {speed}")
        console.paragraphs(
            "Within one host, keys and values (K/V) travel too fast for a wait to be noticed. So now the link is "
            f"PACED: the copies are real, but each is held back until a wire of {speed} would have delivered it. Such "
            f"a wire needs {milliseconds(wire.layer_ns)} for a layer, and P {milliseconds(wire.computed_ns)} to "
            "compute one. First, K/V are streamed as before; then they are sent after the prefill, and D waits for "
            f"all {self._layers} layers."
        )
        console.line()
        console.progress("P and D start anew, with a paced link between them")
        slow = replace(settings, bytes_per_second=wire.bytes_per_second)
        async with Fleet(engine, slow, "P", "D", tell=console.notice) as fleet:
            router = await self._meet(engine, fleet)
            streamed = await self._paced(router, together.prompt, streamed=True)
            after = await self._paced(router, together.prompt, streamed=False)
        console.line()
        at_most, all_layers = wire.exposed_ns(self._layers), self._layers * wire.layer_ns
        console.line(
            table(
                ["streamed", "after the prefill"],
                [
                    timing(streamed, expected_exposed=f"up to {milliseconds(at_most)}"),
                    timing(after, expected_exposed=milliseconds(all_layers)),
                ],
                [
                    self._judge("streamed over a paced link", streamed, alone),
                    self._judge("after the prefill", after, alone),
                ],
                [traffic(streamed), traffic(after)],
            )
        )
        return [streamed, after]

    async def _paced(self, router: Router, prompt: list[int], *, streamed: bool) -> Run:
        name = "streamed, each layer while P computes the next" if streamed else "sent after the prefill"
        run = await router.disaggregated(
            prompt,
            min(self._options.tokens, PACED_TOKENS),
            streamed=streamed,
            on_arrival=self._arrivals(f"P prefills, K/V are {name}"),
        )
        run.timeline.title = f"K/V {name}"
        return run

    def _arrivals(self, what: str) -> Callable[[int], None]:
        """Show progress: how many layers have arrived at D."""
        self._console.progress(what)
        arrived = count(1)
        return lambda _layer: self._console.progress(what, f"({next(arrived)} of {self._layers} layers are at D)")

    def _judge(self, name: str, run: Run, alone: Run) -> Column:
        """Compare an answer with the reference's; the demo succeeds only if all are equal."""
        comparisons = compare(run, alone)
        for comparison in comparisons:
            if not comparison.identical:
                self._identical = False
                self._console.fail(
                    f"{name}: {comparison.what}: {comparison} from number {comparison.different[0] + 1} on"
                )
        return {comparison.what: str(comparison) for comparison in comparisons}

    def _draw(self, runs: Sequence[Run], link: str) -> None:
        prompt, sent = len(runs[0].prompt), runs[0].reports["P"].transferred
        picture = draw(
            [run.timeline for run in runs],
            title=f"{self._name}: P prefills {prompt} tokens, D decodes",
            subtitle=f"{size(sent)} of keys and values (K/V) in {self._layers} layers, {link}",
            decode_steps=None if self._options.pace else PACED_TOKENS,
        )
        self._save("timeline.svg", picture, "the picture")

    def _write_trace(self, runs: Sequence[Run]) -> None:
        trace = Timeline()
        for run in runs:
            trace.merge(run.timeline)
            trace.add("router", "request", run.timeline.title, run.asked_ns, run.heard_ns[-1], tokens=len(run.steps))
        self._save("trace.json", trace.to_trace(), "all runs, for https://ui.perfetto.dev")

    def _save(self, name: str, content: str, what: str) -> None:
        path = self._options.out / name
        path.write_text(content, encoding="utf-8")
        self._console.line(f"{path}: {what}")
