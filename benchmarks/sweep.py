"""Prefill and decode in two processes: prompts of 512 to 4096 tokens, 1 to 32 of them at once, one-sided and two-sided.

::

    python benchmarks/sweep.py                               # about two minutes
    python benchmarks/sweep.py --quick --json -
    python benchmarks/sweep.py --model DeepSeek-V3 --tokens 1024 --requests 1 8 --carriers hixl_async sockets

All requests of a case arrive at once.  The prefill process computes one after another, layer by layer (it waits as long
as a device of `--flops` would), and hands each layer over when it is done.  There are blocks for `--slots` requests, and a
request that is not transferred yet delays others.  The carriers take turns.  `hixl_async`:
KV streams, one-sided.  `sockets`: gathered, sent with sock_sendall, received with sock_recv_into, scattered.  `gloo`: the
same with torch.distributed.  The first request of every case is verified byte by byte (CRC-32 of each layer).

The JSON (schema 2): schema, benchmark ("sweep"), started, seconds, arguments, commit, machine, versions as of ladder.py;
model, ranks, flops, missing ({carrier: how to install it}) and

    cases   a list of:
        loop, carrier, tokens, requests
        layer_bytes     of one request on one rank
        layer_seconds   of the computation
        turns           a list, one per turn, of:
            opening_ns      until the computation of a request could begin, median over requests
            latency_ns      of a layer's transfer: from computed to landed, median over layers and requests
            exposed_ns      from the end of a request's computation until it is all there, median over requests
            first_token_ns  from the arrival until decoding can begin (TTFT), median over requests
            last_token_ns   the same, of the slowest request
            tokens_per_s    prefill throughput: all tokens, until the last request is there
            cpu_s_per_GB    of both processes
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from rig.blocks import estimate
from rig.carriers import CARRIERS, Carrier, Load
from rig.command import add_json_choice, add_loop_choice, amount, count, loops, publish
from rig.machine import heading, preamble
from rig.pair import run_loop
from rig.prefill import run_requests
from rig.shapes import SHAPES, Shape
from rig.table import align, digits, nbytes, seconds

MISSING = {"gloo": ("torch", "pip install torch (a build for CPUs will do)")}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prefill and decode in two processes, one-sided and two-sided.")
    add = parser.add_argument
    add_json_choice(parser)
    add_loop_choice(parser, "best")
    add("--quick", action="store_true", help="a small model, two cases, few turns")
    add("--model", choices=SHAPES, help="default: Llama-3-8B")
    add(
        "--carriers",
        nargs="+",
        choices=CARRIERS,
        default=list(CARRIERS),
        metavar="NAME",
        help=f"of {', '.join(CARRIERS)}",
    )
    add("--tokens", nargs="+", type=count, metavar="N", help="of each prompt (512 1024 2048 4096)")
    add("--requests", nargs="+", type=count, metavar="N", help="at once (1 2 4 8 16 32)")
    add("--ranks", type=count, default=8, help="tensor parallelism; one rank is measured (8)")
    add("--block", type=count, default=16, help="tokens in a block (16)")
    add("--flops", type=amount, default=150e12, help="of each rank's device, for 2-byte elements (150e12)")
    add("--slots", type=count, default=4, help="requests whose blocks are taken at any time (4)")
    add("--turns", type=count, help="of each case (3)")
    return parser.parse_args(argv)


async def measure(
    shape: Shape, loop: str, tokens: int, counts: Sequence[int], carriers: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure all counts of requests for prompts of one length, with the carriers in turn."""
    load = Load(shape.group(options.ranks), options.block, tokens, min(options.slots, max(counts)), loop)
    pause = shape.layer_seconds(tokens, options.ranks, options.flops)
    cases = []
    async with contextlib.AsyncExitStack() as stack:
        there = [await stack.enter_async_context(CARRIERS[name](load)) for name in carriers]
        for carrier in there:
            await run_requests(carrier, 1, shape.layers, load.slots, pause, check=True)
        for count in counts:
            turns: dict[str, list[dict[str, float]]] = {carrier.name: [] for carrier in there}
            for turn in range(options.turns):
                for step in range(len(there)):
                    carrier = there[(turn + step) % len(there)]
                    turns[carrier.name].append(await _turn(carrier, load, count, pause))
            cases += [
                {
                    "loop": loop,
                    "carrier": carrier.name,
                    "tokens": tokens,
                    "requests": count,
                    "layer_bytes": load.layer_bytes,
                    "layer_seconds": pause,
                    "turns": turns[carrier.name],
                }
                for carrier in there
            ]
    return cases


async def _turn(carrier: Carrier, load: Load, count: int, pause: float) -> dict[str, float]:
    cpu = carrier.cpu_ns()
    courses = await run_requests(carrier, count, load.layers, load.slots, pause)
    cpu = carrier.cpu_ns() - cpu
    first = [course.first_token for course in courses]
    return {
        "opening_ns": statistics.median(course.opening for course in courses),
        "latency_ns": statistics.median(one for course in courses for one in course.latencies),
        "exposed_ns": statistics.median(course.exposed for course in courses),
        "first_token_ns": statistics.median(first),
        "last_token_ns": max(first),
        "tokens_per_s": load.tokens * count / max(first) * 1e9,
        "cpu_s_per_GB": cpu / (load.nbytes * count),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; the exit code."""
    options = arguments(argv)
    shape = SHAPES[options.model or ("SmolLM2-135M" if options.quick else "Llama-3-8B")]
    lengths = options.tokens or ((512,) if options.quick else (512, 1024, 2048, 4096))
    counts = options.requests or ((1, 3) if options.quick else (1, 2, 4, 8, 16, 32))
    options.turns = options.turns or (2 if options.quick else 3)
    report = preamble("sweep", sys.argv[1:] if argv is None else argv)
    report.update(model=shape.name, ranks=options.ranks, flops=options.flops, missing={})
    for name, (module, install) in MISSING.items():
        if name in options.carriers and find_spec(module) is None:
            report["missing"][name] = install
    carriers = [name for name in options.carriers if name not in report["missing"]]
    if not carriers:
        raise SystemExit("no carrier is installed: " + "; ".join(report["missing"].values()))
    began = time.monotonic()
    cases = []
    for loop in loops(options.loop):
        for tokens in lengths:
            print(f"{loop}: {tokens} tokens ...", file=sys.stderr, flush=True)
            cases += run_loop(measure(shape, loop, tokens, counts, carriers, options), loop)
    report["seconds"] = round(time.monotonic() - began, 1)
    report["cases"] = cases
    publish(report, [*heading(report), *render(report)], options.json)
    return 0


def render(report: dict[str, Any]) -> Iterator[str]:
    """Yield a table per event loop."""
    for name, install in report["missing"].items():
        yield f"{name}: not installed: {install}"
    yield ""
    device = f"{report['flops'] / 1e12:g} TFLOP/s" if "flops" in report else "its speed"
    yield f"Computing is simulated: a thread sleeps as long as a device of {device} would take, so it uses no CPU time."
    yield "hixl_async reserves blocks before a request is computed (opened in), asks the decode process for blocks, and opens a"
    yield "stream meanwhile; the two-sided carriers write to memory that was allocated before the run."
    for loop in dict.fromkeys(case["loop"] for case in report["cases"]):
        yield ""
        yield f"{report['model']}, one of {report['ranks']} ranks; medians over turns ({loop})"
        head = "tokens, requests, a layer, computed in, carrier, opened in, layer latency, exposed, TTFT, slowest, tokens/s"
        rows = [[*head.split(", "), "CPU s/GB"]]
        for case in (case for case in report["cases"] if case["loop"] == loop):
            found = {key: estimate([turn[key] for turn in case["turns"]]).median for key in case["turns"][0]}
            rows.append(
                [
                    str(case["tokens"]),
                    str(case["requests"]),
                    nbytes(case["layer_bytes"]),
                    seconds(case["layer_seconds"] * 1e9),
                    case["carrier"],
                    seconds(found["opening_ns"]) if "opening_ns" in found else "",
                    *(seconds(found[key]) for key in ("latency_ns", "exposed_ns", "first_token_ns", "last_token_ns")),
                    f"{found['tokens_per_s']:,.0f}",
                    digits(found["cpu_s_per_GB"]),
                ]
            )
        yield from align(rows)


if __name__ == "__main__":
    sys.exit(main())
