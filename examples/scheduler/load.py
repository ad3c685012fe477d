"""Random requests: made, sent, some of them cancelled, and the answers compared."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from support import random_model, simulation, weights
from support.fleet import PROGRAMS
from support.loops import LOOPS
from support.messages import Settings
from support.model import Llama, blocks_needed
from support.worker import BLOCK_TOKENS

import hixl_async as hx

from .process import Process
from .replay import differences
from .router import Planned, Router
from .timeline import Span, draw, overlaps

PROGRAMS.update(P="scheduler.prefill", D="scheduler.decode")

ANSWER = 24  # tokens
GAP, PATIENCE = 0.4, 2.0  # seconds: between two requests on average, and until one is cancelled at the latest
BURST = 6  # requests that come at once before a kill, so that there are enough streams
RANDOM_MODEL = 0.05  # of these times is enough for the tiny model


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    requests: int
    longest: int
    seed: int
    blocks: int
    driver: str
    kill: bool
    faults: bool
    random_model: bool


def fewest_blocks(longest: int) -> int:
    """Return the number of blocks that the longest request needs."""
    return blocks_needed(longest + ANSWER, BLOCK_TOKENS)


def plan(options: Options, vocabulary: int) -> list[Planned]:
    """Return random requests: half of them with one of three beginnings, and a quarter to be cancelled.

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
        length = round(dice.triangular(1, options.longest, 1))
        new = words(options.longest)
        prompt = (dice.choice(beginnings) + new if dice.random() < 0.5 else new)[:length]
        cancel_after = dice.uniform(0, PATIENCE * pace) if number in cancelled else None
        requests.append(
            Planned(number, dice.expovariate(1 / GAP) * pace, prompt, dice.randint(1, ANSWER), cancel_after)
        )
    return requests


def plan_kills(options: Options) -> dict[int, str]:
    """Return the processes to be killed, by the number of the request with which that begins."""
    dice = random.Random(options.seed)
    numbers = sorted(dice.sample(range(options.requests // 2), 2))
    return dict(zip(numbers, dice.sample("PD", 2), strict=True)) if options.kill else {}


async def serve(options: Options) -> bool:
    """Serve random requests, print what happened, and return whether all answers are identical and all blocks free."""
    checkpoint = random_model.load() if options.random_model else weights.load()
    requests = plan(options, checkpoint.config.vocabulary_size)
    faults = options.seed if options.faults else None

    async with hx.Engine("127.0.0.1:0", name="router", drivers=[options.driver]) as engine:
        settings = Settings(
            engine.address, options.driver, next(iter(LOOPS)), options.blocks, options.random_model, faults=faults
        )
        if simulated := simulation.notice(engine, options.driver):
            print(simulated)
        processes = {name: Process(engine, settings, name) for name in ("P", "D")}
        router = Router(processes["P"], processes["D"])
        async with asyncio.TaskGroup() as running:
            for process in processes.values():
                running.create_task(process.run())
            answers = await send(requests, plan_kills(options), router, processes)
            reports = {name: await process.ask("report", {}) for name, process in processes.items()}
            spans = [*router.losses, *[span for process in processes.values() for span in await recorded(process)]]
            for process in processes.values():
                process.leave()

    finished = [(request, answer) for request, answer in zip(requests, answers, strict=True) if answer]
    show(router.lives, spans, reports, {request.number for request, _ in finished})
    for name, process in processes.items():
        if process.starts > 1:
            print(f"{name} was started {process.starts} times.")
    wrong = await compare(Llama(checkpoint.config, checkpoint.weights), finished)
    for line in wrong:
        print(line)
    clean = all(report["free"] == options.blocks and not report["pinned"] for report in reports.values())
    killed = all(process.starts > 1 for process in processes.values()) or not options.kill
    if wrong or not clean or not killed:
        print("DIFFERENT" if wrong else "Blocks are missing." if killed else "A process was not killed.")
        return False
    print(f"IDENTICAL: {len(finished)} answers, each token, each bit of its logits, each byte of keys and values.")
    return True


async def send(
    requests: list[Planned], kills: dict[int, str], router: Router, processes: dict[str, Process]
) -> list[dict[str, Any]]:
    """Send all requests at their times, and return the answers."""
    for process in processes.values():
        await process.address()  # it is there
    async with asyncio.TaskGroup() as tasks:
        answers, killers, together = [], [], 0
        for request in requests:
            await asyncio.sleep(0 if together > 0 else request.delay)
            together -= 1
            answers.append(tasks.create_task(router.answer(request)))
            if request.number in kills:
                together = BURST
                killers.append(tasks.create_task(router.kill(processes[kills[request.number]])))
        await asyncio.wait(answers)
        for killer in killers:
            killer.cancel()  # has found no victim
    return [answer.result() for answer in answers]


async def recorded(process: Process) -> list[Span]:
    """Return the record of a process, which may be too long for one answer."""
    spans: list[Span] = []
    while more := (await process.ask("spans", {"first": len(spans)}))["spans"]:
        spans += [Span(*span) for span in more]
    return spans


def show(lives: dict[int, Span], spans: list[Span], reports: dict[str, Any], finished: set[int]) -> None:
    """Print the timeline, and what was going on at the same time."""
    marks = {"prefill": "#", "arrival": "+", "decode": "d", "preempted": "!", "loss": "*"}
    prefills, arrivals, decodes, preemptions, losses = ([span for span in spans if span.what == what] for what in marks)
    seconds = max(life.last for life in lives.values()) - min(life.first for life in lives.values())
    print(
        f"{seconds:.1f} s; . waits, # P prefills, + layers arrive at D, d D decodes, ! preempted, * sent again, | finished, "
        "x cancelled"
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
        f"requests cancelled, {len(losses)} sent again."
    )
    for name, report in reports.items():
        print(
            f"{name}: {report['reused']} tokens were there already, {report['failed']} transfers failed; "
            f"at the end {report['pool']}"
        )


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
