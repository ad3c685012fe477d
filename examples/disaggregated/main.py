"""Disaggregated serving, live: a real model prefills in one process and decodes in another, with hixl_async between.

    python examples/disaggregated/main.py

Process P computes the keys and values (K/V) of a prompt. Each layer of them is written into the memory of process D
as soon as it is computed, while P goes on with the next layer. D decodes. A third process, the reference, does all of
that alone, and everything is compared with it: tokens, bits of logits, bytes of K/V.

If you came for the code, begin with prefill.py and decode.py. They are P and D, and use most of hixl_async.

    prefill.py      process P                     decode.py       process D
    main.py         the command line

Everything else is in support/:

    worker.py       shared by the processes       reference.py    the process that works alone
    story.py        the runs, step by step        router.py       sends prompts to P and D
    messages.py     messages between them         fleet.py        starts and ends them
    report.py       printed output                timeline.py     the picture and the trace
    model.py        the model, with weights.py, tokenizer.py and prompts.py; random_model.py is a tiny one for tests
    loops.py        asyncio's loop or uvloop's      simulation.py   notices simulated accelerators
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

try:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as long as modules are imported, Ctrl-C needs no traceback

    import numpy  # noqa: F401 - not used here, but by nearly all that is imported below

    import hixl_async as hx
    from hixl_async import drivers
except ModuleNotFoundError as missing:
    print(f"{missing}. In the root of the repository, run\n    pip install -e '.[demo]'", file=sys.stderr)
    raise SystemExit(2) from None

from support import prompts, random_model, weights
from support.fleet import Failed
from support.loops import LOOPS, run
from support.report import Console, ReaderLeft
from support.story import Options, Question, Story
from support.tokenizer import Tokenizer
from support.weights import Checkpoint, ModelUnavailable

EXIT_CODES = """exit codes:
  0    P and D gave, to the last bit, what a single process gives
  1    they did not, or something failed
  2    the demo could not start: a wrong option, or something is not installed
  130  interrupted by Ctrl-C
"""
IDENTICAL, FAILED, CANNOT_START, INTERRUPTED = 0, 1, 2, 130


class CannotStart(Exception):
    """A missing or wrong setting that the user can change."""


def main() -> int:
    options = _parser().parse_args(namespace=Options())
    console = Console(quiet=options.quiet)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        identical = run(prepare(options, console).tell, options.loop)
        if identical:
            console.line()
            console.result("IDENTICAL: every token, every bit of the logits, every byte of K/V.")
        return IDENTICAL if identical else FAILED
    except (CannotStart, hx.DriverError) as problem:
        console.fail(str(problem))
        return CANNOT_START
    except (Failed, hx.HixlError, OSError) as problem:
        console.fail(f"The demo failed.\n{problem}")
        return FAILED
    except ReaderLeft:
        return FAILED
    except KeyboardInterrupt:
        console.fail("Interrupted. All processes have ended.")
        return INTERRUPTED


def prepare(options: Options, console: Console) -> Story:
    """Check that everything needed is there.

    :raises CannotStart: if there is not.
    """
    console.line(
        "A model prefills in process P; layer by layer, its keys and values (K/V) go to process D, which decodes."
    )
    try:
        checkpoint = load_model(options, console)
        questions = read_questions(options, checkpoint)
        check_driver(options.driver)
        options.out.mkdir(parents=True, exist_ok=True)
    except (ModelUnavailable, ValueError, OSError) as problem:
        raise CannotStart(str(problem)) from problem
    return Story(options, console, checkpoint, questions)


def load_model(options: Options, console: Console) -> Checkpoint:
    """Make the model ready for all processes to map, which takes some seconds the first time.

    :raises ModelUnavailable: if it is not installed.
    :raises OSError: if there is no room for its cache.
    """
    if options.random_model:
        return random_model.load()
    return weights.load(progress=lambda done, what: console.progress("loading the model", f"({done:.0%}: {what})"))


def read_questions(options: Options, checkpoint: Checkpoint) -> list[Question]:
    """The prompts of the command line, or the default ones.

    :raises ValueError: if one is empty or too long, or not UTF-8.
    :raises OSError: if a file cannot be read.
    """
    tokenizer, room = Tokenizer(checkpoint.vocabulary), checkpoint.config.context_length - options.tokens
    texts = [*map(_check_utf8, options.prompt), *map(_read, options.prompt_file)]
    questions = []
    for text in texts or [prompts.SHORT, prompts.LONG]:
        tokens = prompts.encode(tokenizer, text, options.length)
        if len(tokens) > room:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens is too long: with --tokens {options.tokens}, {room} fit"
            )
        questions.append(Question(text, tokens))
    return questions


def check_driver(name: str) -> None:
    """Check that the driver has memory of its own; a missing one fails when it is opened.

    :raises ValueError: if it only wraps others.
    """
    for driver in drivers.available():
        if driver.name == name and driver.problem is None and not {"allocate", "register"} & set(driver.capabilities):
            raise ValueError(f"driver {name!r} only wraps others; the demo puts it around --driver to pace a link")


def _check_utf8(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ValueError(f"--prompt {prompt!a} is not UTF-8") from None
    return prompt


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")  # the end of the last line is not part of the prompt
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {path} is not UTF-8, from byte {error.start} on") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prompt", metavar="TEXT", action="append", default=[], help="ask this; may be given several times")
    add("--prompt-file", metavar="FILE", action="append", default=[], type=Path, help="ask what stands in a file")
    add("--length", metavar="N", type=_whole, help="repeat or cut every prompt to N tokens")
    add("--tokens", metavar="N", type=_positive, default=48, help="generate at most N tokens (%(default)s)")
    add("--driver", metavar="NAME", default=os.environ.get("DRIVER") or "shm", help="hixl_async's driver (%(default)s)")
    add("--loop", choices=list(LOOPS), default=next(iter(LOOPS)), help="event loop (%(default)s)")
    add("--no-pace", dest="pace", action="store_false", help="leave out the runs over a paced link")
    add("--bandwidth", metavar="MB/S", type=_megabytes, help="speed of the paced link (a bit more than P needs)")
    add("--out", metavar="DIR", type=Path, default=Path("demo-output"), help="for picture and trace (./%(default)s)")
    add("--quiet", action="store_true", help="print the result only")
    add("--random-model", action="store_true", help=argparse.SUPPRESS)  # for tests: tiny, and always there
    return parser


def _megabytes(text: str) -> float:
    with suppress(ValueError):
        if 1e3 <= (number := float(text) * 1e6) <= 1e12:
            return number
    raise argparse.ArgumentTypeError(f"must be between 0.001 and 1000000, not {text!r}")


def _whole(text: str) -> int:
    with suppress(ValueError):
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")


def _positive(text: str) -> int:
    with suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")


if __name__ == "__main__":
    sys.exit(main())
