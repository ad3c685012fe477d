"""Layer by layer over a paced link: the part of a KV cache's transfer that is left when the computation is over.

::

    python benchmarks/streaming.py
    python benchmarks/streaming.py --quick --json -

A prefill process computes a prompt's layers (it waits as long as a device would) and pushes each as soon as it is done;
a decode process receives them.  Both processes are real, and the link is shared memory that the driver `faulty` slows down
to `--rate`.  Computing a layer takes `--slack` times as long as its transfer, so that a stream can hide all but the last
one.  The floor is one layer's transfer, measured in the same turns over the same link.

The JSON (schema 2): schema, benchmark ("streaming"), started, seconds, arguments, commit, machine, versions as of
ladder.py; rate, in bytes per second; slack; tokens; and figures as of ladder.py, with part "streaming", the model as case, and

    level "layer"      one layer's transfer, awaited: the floor
    level "exposed"    from the end of the computation until the last layer is there
    level "whole"      the same without streaming, calculated: one layer's transfer times the layers
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

from rig import table
from rig.blocks import Series
from rig.carriers import Load, OneSided, one_sided
from rig.command import add_json_choice, add_loop_choice, amount, count, loops, publish
from rig.figure import Figure, compare
from rig.machine import heading, preamble
from rig.pair import run_loop
from rig.prefill import run_requests
from rig.shapes import SHAPES, Shape

from hixl_async import Batch
from hixl_async.kv import BlockTable, Plan
from hixl_async.testing import FaultPlan, faulty

MODELS = ("Llama-3-70B", "DeepSeek-V3")
RANKS = 8
CALCULATED = "whole (calculated)"
LEGEND = {
    "layer": "one layer's transfer, awaited: the floor",
    "exposed": "from the end of the computation until the last layer is there",
    CALCULATED: "not measured: one layer's transfer times the layers, which is the wait without streaming",
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Measure the part of a KV cache's transfer that is left when the computation is over."
    )
    add = parser.add_argument
    add_json_choice(parser)
    add("--quick", action="store_true", help="a short prompt, few turns")
    add_loop_choice(parser)
    add("--models", nargs="+", choices=SHAPES, default=list(MODELS), metavar="MODEL", help=f"of {', '.join(SHAPES)}")
    add("--tokens", type=count, help="of the prompt (4096)")
    add("--block", type=count, default=16, help="tokens in a block (16)")
    add("--rate", type=amount, default=1e9, help="bytes per second of the link (1e9)")
    add("--slack", type=amount, default=1.25, help="computing a layer takes so many times its transfer (1.25)")
    add("--turns", type=count, help="requests of each model, one after another (12)")
    return parser.parse_args(argv)


async def measure(shape: Shape, loop: str, options: argparse.Namespace, tokens: int, turns: int) -> list[Figure]:
    """Measure one model's requests, and one layer's transfer between them."""
    load = Load(shape.group(RANKS), options.block, tokens, slots=1, loop=loop)
    plan = FaultPlan(seed=1).bandwidth(options.rate)
    single, exposed, whole = Series("layer", 1), Series("exposed", 1), Series("whole", 1)
    async with one_sided(load, drivers=faulty("shm", plan)) as carrier:
        seconds = options.slack * statistics.median([await _one_layer(carrier, load) for _ in range(5)]) / 1e9
        for turn in range(-1, turns):  # the first turn is a warm-up in which the bytes are verified
            alone = await _one_layer(carrier, load)
            (course,) = await run_requests(carrier, 1, shape.layers, 1, seconds, check=turn < 0)
            if turn >= 0:
                single.nanoseconds.append(alone)
                exposed.nanoseconds.append(course.exposed)
                whole.nanoseconds.append(alone * shape.layers)
    return list(
        compare(
            [single, exposed, whole],
            part="streaming",
            loop=loop,
            case=shape.name,
            verb="write",
            nbytes=load.layer_bytes,
        )
    )


async def _one_layer(carrier: OneSided, load: Load) -> int:
    """Transfer the blocks of one layer in one batch, as a stream posts them; nanoseconds."""
    order = list(range(load.blocks))
    here, there = BlockTable(order[::2] + order[1::2]), BlockTable(order)
    plan = Plan(load.view, load.view, here, there, (0, load.blocks * load.block_tokens))
    local, remote = carrier.pool.regions[0], await carrier.peer.region("target")
    parts = [(local[ours.offset :], remote[theirs.offset :], runs) for ours, theirs, runs in plan.layer(0)]
    batch = Batch.strided("write", parts)
    start = perf_counter_ns()
    await carrier.pool.engine.submit(batch)
    return perf_counter_ns() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; the exit code."""
    options = arguments(argv)
    tokens = options.tokens or (512 if options.quick else 4096)
    turns = options.turns or (3 if options.quick else 12)
    report = preamble("streaming", sys.argv[1:] if argv is None else argv)
    report.update(rate=options.rate, slack=options.slack, tokens=tokens)
    began = time.monotonic()
    figures = []
    for loop in loops(options.loop):
        for model in options.models:
            print(f"{loop}: {model} ...", file=sys.stderr, flush=True)
            figures += run_loop(measure(SHAPES[model], loop, options, tokens, turns), loop)
    report["seconds"] = round(time.monotonic() - began, 1)
    report["figures"] = [figure.as_json() for figure in figures]
    publish(report, [*heading(report), *render(report)], options.json)
    return 0


def render(report: dict[str, Any]) -> Iterator[str]:
    """Yield the tables."""
    yield ""
    yield f"A link of {report['rate'] / 1e9:g} GB/s; ranks: {RANKS}."
    slack = report.get("slack", 1.25)
    yield f"Computing is simulated: for each layer a thread sleeps {slack:g} times as long as the layer's transfer takes."
    yield ""
    yield from (f"  {level:18}  {text}" for level, text in LEGEND.items())
    figures = [Figure.from_json(figure) for figure in report["figures"]]
    yield from table.render([replace(one, level=CALCULATED if one.level == "whole" else one.level) for one in figures])


if __name__ == "__main__":
    sys.exit(main())
