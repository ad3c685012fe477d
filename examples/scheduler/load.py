"""Random requests: made, sent, some of them cancelled, and the answers compared."""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from support import random_model, weights
from support.fleet import PROGRAMS, Fleet
from support.loops import LOOPS
from support.messages import Settings
from support.model import Llama, blocks_needed
from support.worker import BLOCK_TOKENS

import hixl_async as hx

from .replay import differences
from .timeline import Span, draw, overlaps

PROGRAMS.update(P="scheduler.prefill", D="scheduler.decode")

LONGEST, ANSWER = 400, 24  # tokens of a prompt, and of an answer
GAP, PATIENCE = 0.4, 2.0  # seconds: between two requests on average, and until one is cancelled at the latest
RANDOM_MODEL = 0.05  # of these times is enough for the tiny model


FEWEST_BLOCKS = blocks_needed(LONGEST + ANSWER, BLOCK_TOKENS)


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    requests: int
    seed: int
    blocks: int
    driver: str
    random_model: bool


class Planned(NamedTuple):
    """A request to come."""

    number: int
    delay: float
    """Seconds after the one before."""
    prompt: list[int]
    max_tokens: int
    cancel_after: float | None
    """Seconds after its start, if it has not ended by then."""


def plan(options: Options, vocabulary: int) -> list[Planned]:
    """Return random requests: of 1 to 400 tokens, half of them with one of three beginnings, and a quarter to be cancelled.

    Short prompts are more frequent than long ones.
    """
    dice = random.Random(options.seed)

    def words(count: int) -> list[int]:
        return [dice.randrange(vocabulary) for _ in range(count)]

    pace = RANDOM_MODEL if options.random_model else 1
    beginnings = [words(dice.randint(32, 160)) for _ in range(3)]
    cancelled = set(dice.sample(range(options.requests), options.requests // 4))
    requests = []
    for number in range(options.requests):
        length = round(dice.triangular(1, LONGEST, 1))
        prompt = (dice.choice(beginnings) + words(LONGEST) if dice.random() < 0.5 else words(LONGEST))[:length]
        cancel_after = dice.uniform(0, PATIENCE * pace) if number in cancelled else None
        requests.append(
            Planned(number, dice.expovariate(1 / GAP) * pace, prompt, dice.randint(1, ANSWER), cancel_after)
        )
    return requests


async def serve(options: Options) -> bool:
    """Serve random requests, print what happened, and return whether all answers are identical and all blocks free."""
    checkpoint = random_model.load() if options.random_model else weights.load()
    requests = plan(options, checkpoint.config.vocabulary_size)
    lives: dict[int, Span] = {}

    async with hx.Engine("127.0.0.1:0", name="router", drivers=[options.driver]) as engine:
        settings = Settings(engine.address, options.driver, next(iter(LOOPS)), options.blocks, options.random_model)
        async with Fleet(engine, settings, "P", "D", tell=print) as fleet:
            await fleet.ask("D", "meet", {"address": fleet.address("P")})

            async def ask(request: Planned) -> dict[str, Any]:
                began = time.monotonic()
                body = {"number": request.number, "prompt": request.prompt, "max_tokens": request.max_tokens}
                answer = asyncio.create_task(fleet.ask("D", "generate", body))
                if not (await asyncio.wait({answer}, timeout=request.cancel_after))[0]:
                    await fleet.ask("D", "cancel", {"number": request.number})
                report = await answer
                lives[request.number] = Span("life", began, time.monotonic(), [request.number])
                return report

            async def ask_all() -> dict[str, Any]:
                asked = []
                for request in requests:
                    await asyncio.sleep(request.delay)
                    asked.append(asyncio.create_task(ask(request)))
                return {"answers": await asyncio.gather(*asked)}

            answers = (await fleet.together({"D": ask_all()}))["D"]["answers"]
            reports = await fleet.together({name: fleet.ask(name, "report", {}) for name in ("P", "D")})
            spans = [span for name in ("P", "D") for span in await recorded(fleet, name)]

    finished = [(request, answer) for request, answer in zip(requests, answers, strict=True) if answer]
    show(lives, spans, reports, {request.number for request, _ in finished})
    wrong = await compare(Llama(checkpoint.config, checkpoint.weights), finished)
    for line in wrong:
        print(line)
    free = all(report["free"] == options.blocks for report in reports.values())
    if wrong or not free:
        print("DIFFERENT" if wrong else "Blocks are missing.")
        return False
    print(f"IDENTICAL: {len(finished)} answers, each token, each bit of its logits, each byte of keys and values.")
    return True


async def recorded(fleet: Fleet, name: str) -> list[Span]:
    """Return the record of a process, which may be too long for one answer."""
    spans: list[Span] = []
    while more := (await fleet.ask(name, "spans", {"first": len(spans)}))["spans"]:
        spans += [Span(*span) for span in more]
    return spans


def show(lives: dict[int, Span], spans: list[Span], reports: dict[str, Any], finished: set[int]) -> None:
    """Print the timeline, and what was going on at the same time."""
    marks = {"prefill": "#", "arrival": "+", "decode": "d", "preempted": "!"}
    prefills, arrivals, decodes, preemptions = ([span for span in spans if span.what == what] for what in marks)
    seconds = max(life.last for life in lives.values()) - min(life.first for life in lives.values())
    print(
        f"{seconds:.1f} s; . waits, # P prefills, + layers arrive at D, d D decodes, ! preempted, | finished, x cancelled"
    )
    for line in draw(lives, marks, spans, {number: "|" if number in finished else "x" for number in lives}):
        print(line)
    print(
        f"{len(decodes)} decode steps, of up to {max((len(span.numbers) for span in decodes), default=0)} sequences. During "
        f"{overlaps(decodes, prefills)} of them P prefilled another one, during {overlaps(decodes, arrivals)} layers of "
        f"another one arrived."
    )
    print(
        f"{len(prefills)} chunks prefilled, {len(preemptions)} preemptions, {len(lives) - len(finished)} of {len(lives)} "
        "requests cancelled."
    )
    for name, report in reports.items():
        print(f"{name}: {report['reused']} tokens were there already; at the end {report['pool']}")


async def compare(model: Llama, finished: list[tuple[Planned, dict[str, Any]]]) -> list[str]:
    """Compute all answers again, in as many threads as there are cores, and return a line for each that differs."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor() as threads:
        results = await asyncio.gather(
            *(
                loop.run_in_executor(threads, differences, model, request.prompt, answer["answer"], answer["kv"])
                for request, answer in finished
            )
        )
    return [
        f"request {request.number} differs in {' and '.join(found)}"
        for (request, _), found in zip(finished, results, strict=True)
        if found
    ]
