"""An OpenAI-compatible server: a router speaks HTTP, process P prefills, and process D decodes.

    python examples/server/main.py --random-model

P pushes the keys and values of each prompt layer by layer into D's memory. D decodes all sequences that are there in batches,
and notifies the router of each token. P and D are started again if they die, and their requests go on where they were.

    main.py         the command line                  serve.py        all parts together
    prefill.py      process P                         router.py       brings requests to P and D
    decode.py       process D                         generation.py   a request on its way
    cache.py        blocks in each state              processes.py    starts P and D, again and again
    messages.py     between router and D              admission.py    how many requests come in
    api.py          the endpoints                     metrics.py      for Prometheus
    parameters.py   what requests may ask for         status.py       for the page, page.html
    conversation.py the messages of a chat            errors.py       in OpenAI's form
    answer.py       answers, whole and streamed       connection.py   clients that leave
    text.py         text, up to a stop string

The policy and the batched model are those of examples/scheduler; the model is that of examples/disaggregated.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# The processes import this folder as a package, and use the modules of both other examples.
sys.path[0] = str(Path(__file__).resolve().parents[1])

FEWEST_BLOCKS = 16


def main() -> int:
    """Run the command line, and return the exit code: 0 after a signal, when all has ended in order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="(%(default)s)")
    add("--port", type=int, default=8000, help="0 for any (%(default)s)")
    add("--blocks", metavar="N", type=int, default=512, help="blocks of 16 tokens in each pool (%(default)s)")
    add("--queue", metavar="N", type=float, default=4, help="how many pools all requests may fill (%(default)s)")
    add("--retries", metavar="N", type=int, default=2, help="of a request whose process dies (%(default)s)")
    add("--driver", metavar="NAME", default=os.environ.get("DRIVER") or "shm", help="(%(default)s)")
    add("--random-model", action="store_true", help="use a tiny model that needs no download")
    options = parser.parse_args()
    if options.blocks < FEWEST_BLOCKS or options.queue <= 0 or options.retries < 0:
        parser.error(f"there must be at least {FEWEST_BLOCKS} blocks, room in the queue, and no fewer than 0 retries")
    try:
        import scheduler.main  # noqa: F401 - sets the paths of modules, for the processes as well
        from support.fleet import Failed
        from support.loops import LOOPS, run
        from support.weights import ModelUnavailable

        import hixl_async as hx
        from server.serve import Options, serve
    except ModuleNotFoundError as missing:
        print(f"{missing}. In the root of the repository, run\n    pip install -e '.[server]'", file=sys.stderr)
        return 2
    try:
        run(lambda: serve(Options(**vars(options))), next(iter(LOOPS)))
    except (Failed, ModelUnavailable, hx.HixlError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
