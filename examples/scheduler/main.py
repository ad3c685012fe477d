"""A continuous-batching scheduler: many requests at once, prefilled in one process and decoded in another.

    python examples/scheduler/main.py --requests 20 --seed 1 --kill

Random prompts arrive at random times, some with a beginning in common, and some are cancelled. Process P prefills them in
chunks, process D continues all sequences that have arrived in one batch, while layers of others arrive. If one of the two is
killed, it is started again, and its requests are sent again. In the end, this process computes every answer again, alone and
at once, and compares tokens, logits, and keys and values, to the last bit.

    policy.py       what you may want to copy: which requests go on, what is computed next, and who gives way
    cache.py        blocks, and those of earlier prompts that are kept; it belongs to the policy
    records.py      what the policy and the model exchange        compute.py      the thread that computes
    model.py        the batched model                             prefill.py      process P
    main.py         the command line                              decode.py       process D
    load.py         random requests                               replay.py       the comparison
    router.py       sends requests, if necessary again            process.py      starts P or D, if necessary again
    timeline.py     the picture                                   report.py       the end of P and D
    loss.py         what a request survives
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]
# The processes import the scheduler as a package, and the model from the other example.
PATHS = [str(EXAMPLES), str(EXAMPLES / "disaggregated")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*PATHS, os.environ.get("PYTHONPATH")]))
# Read when numpy is first imported: several threads of BLAS would not add in the same order each time.
os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

IDENTICAL, FAILED, INTERRUPTED = 0, 1, 130  # exit codes


def main() -> int:
    """Run the command line, and return the exit code: 0 only if all answers are identical and all blocks are free."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", metavar="N", type=int, default=20, help="the number of requests (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (%(default)s)")
    parser.add_argument("--blocks", metavar="N", type=int, default=56, help="blocks in each pool (%(default)s)")
    parser.add_argument("--longest", metavar="N", type=int, default=400, help="tokens of a prompt (%(default)s)")
    parser.add_argument(
        "--driver", metavar="NAME", default=os.environ.get("DRIVER") or "shm", help="hixl_async's driver (%(default)s)"
    )
    parser.add_argument("--kill", action="store_true", help="kill P and D in the midst of streams, once each")
    parser.add_argument("--faults", action="store_true", help="make transfers late, mix them up, and let some fail")
    parser.add_argument("--random-model", action="store_true", help="use a tiny model that needs no download")
    options = parser.parse_args()

    from support.fleet import Failed, Silent
    from support.loops import LOOPS, run
    from support.weights import ModelUnavailable

    import hixl_async as hx
    from scheduler.load import Options, fewest_blocks, serve
    from scheduler.loss import cause

    if options.requests < (fewest := 10 if options.kill else 1):
        parser.error(f"--requests must be at least {fewest}")
    if options.longest < 1:
        parser.error("--longest must be at least 1")
    if options.blocks < (fewest := fewest_blocks(options.longest)):
        parser.error(f"--blocks: the longest request needs {fewest} blocks")
    code = FAILED
    try:
        if run(lambda: serve(Options(**vars(options))), next(iter(LOOPS))):
            code = IDENTICAL
    except* (Failed, Silent, ModelUnavailable, hx.HixlError) as problems:
        print(cause(problems), file=sys.stderr)
    except* KeyboardInterrupt:
        code = INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
