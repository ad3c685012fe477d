"""The command `hixl-async`: inspect this machine's drivers and limits, and ping an engine.

Exit codes: 0 success; 1 failure (no answer, the peer went down, no driver can be used here); 2 the command line is wrong;
3 refused (secret, domain, user or protocol do not match); 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import logging
import os
import platform
import re
import statistics
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .. import Engine, Peer, __version__, drivers, kv
from ..control.handshake import HOW_TO_SHARE_A_SECRET
from ..engine.arguments import positive_seconds
from ..errors import (
    AuthenticationError,
    HandshakeError,
    HixlError,
    InvalidArgumentError,
    NoRouteError,
    ProtocolError,
    UsageError,
)
from ..types import Access, DriverInfo
from . import probes

__all__ = ["main"]

FAILED, USAGE, REFUSED, INTERRUPTED = 1, 2, 3, 130

#: The service that every engine has.
PING = "hixl.ping"
#: The name of the region, with write access, that `ping` may overwrite; it never touches another.
SCRATCH = "hixl.scratch"
#: The text for a driver without memory of its own.
WRAPPER = "wraps another driver, for tests; see hixl_async.testing"
#: The most characters of a line about a driver.
WIDTH = 100
#: The text that says where the secret comes from.
SECRET = "the secret is read from --secret-file, or from HIXL_ASYNC_SECRET"
#: The most bytes of a ping, which fit into a control message.
MAX_SIZE = 32 << 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    :param argv: the arguments; default: those of the process.
    :return: the exit code.
    """
    options = _parser().parse_args(argv)
    if not options.debug:
        # The engine's warnings are also in the error that follows; one clear line is enough.
        logging.getLogger("hixl_async").addHandler(logging.NullHandler())
    try:
        code = int(options.run(options))
        sys.stdout.flush()  # here, where an error is still handled
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe; Python must not report that when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (HixlError, OSError) as error:
        if options.debug:
            traceback.print_exc()
        # The hint is only for secrets, because domains can differ, too.
        here = f" ({SECRET})" if isinstance(error, AuthenticationError) and HOW_TO_SHARE_A_SECRET in str(error) else ""
        print(f"hixl-async: {error}{here}", file=sys.stderr)
        if isinstance(error, AuthenticationError | HandshakeError | ProtocolError | NoRouteError):
            return REFUSED
        return USAGE if isinstance(error, UsageError) else FAILED


def _parser() -> argparse.ArgumentParser:
    description, _, codes = (__doc__ or "").partition("\n\n")
    # No abbreviations: `--secret x` must be an error, and not the name of a file that the error would show.
    parser = argparse.ArgumentParser(prog="hixl-async", description=description, epilog=codes, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"hixl-async {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and the engine's own warnings")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="versions, drivers, and what this machine's kernel and limits allow")
    info.set_defaults(run=_info)

    ping = commands.add_parser(
        "ping",
        allow_abbrev=False,
        help="connect to a running engine, and time round trips",
        description="Connects to a running engine and times round trips of control messages. The peer's memory is not"
        f" touched, unless it exports a region {SCRATCH!r} with write access: then writes into it are timed too.",
        epilog=f"{SECRET}, never from the command line, which other users can read.",
    )
    ping.add_argument("address", metavar="ADDRESS", help="host:port where the engine listens")
    ping.add_argument("--count", type=_number(1, 1_000_000), default=10, help="round trips (default: 10)")
    ping.add_argument(
        "--size", type=_number(0, MAX_SIZE), default=64, help=f"bytes that each carries, 0 to {MAX_SIZE} (default: 64)"
    )
    ping.add_argument("--secret-file", metavar="FILE", help="file with the engines' shared secret")
    ping.add_argument("--domain", default="default", help="the engine's domain (default: default)")
    ping.add_argument("--driver", metavar="NAME", action="append", help="driver to offer the engine; may be repeated")
    ping.add_argument("--timeout", type=_seconds, default=5.0, help="seconds that each step may take (default: 5)")
    ping.set_defaults(run=_ping)

    sizes = commands.add_parser(
        "capacity",
        allow_abbrev=False,
        help="the memory that a model's KV cache needs",
        description="Computes the KV cache memory of one rank from the shape of a model, and the length and number of its"
        " sequences.",
    )
    for name, default, text in (
        ("layers", None, "attention layers that the rank holds"),
        ("kv-heads", None, "key/value heads of the whole model"),
        ("head-dim", None, "elements per head"),
        ("latent", None, "elements of the latent per token, in place of --kv-heads and --head-dim (MLA)"),
        ("rope", None, "elements of the rotary part per token, with --latent"),
        ("tokens", None, "tokens of a sequence, prompt and answer together"),
        ("sequences", 1, "sequences that are held at a time (default: 1)"),
        ("block-tokens", 16, "tokens per block (default: 16)"),
        ("ranks", 1, "ranks of the tensor parallelism (default: 1)"),
        ("shared", 0, "tokens of a prefix that all sequences have in common (default: 0)"),
        ("window", None, "tokens that a sliding window reaches"),
        ("memory", None, "GiB of memory; also show how many sequences fit"),
    ):
        sizes.add_argument(
            f"--{name}",
            type=_number(0 if name == "shared" else 1, 1 << 40),
            default=default,
            required=name in ("layers", "tokens"),
            help=text,
        )
    sizes.add_argument("--dtype", default="bfloat16", help="element type (default: bfloat16)")
    sizes.set_defaults(run=_capacity)

    for command in (info, ping):
        command.add_argument(
            "--option",
            metavar="DRIVER.KEY=VALUE",
            action="append",
            type=_option,
            default=[],
            help="an option of a driver, such as hixl.hixl_ip=10.0.0.5; may be repeated",
        )
    for command in (info, ping, sizes):
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _option(text: str) -> tuple[str, str, str]:
    driver, _, rest = text.partition(".")
    key, equals, value = rest.partition("=")
    if not driver or not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} does not look like DRIVER.KEY=VALUE")
    return driver, key, value


def _settings(options: argparse.Namespace, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each driver."""
    settings: dict[str, dict[str, Any]] = {name: {} for name in names}
    for driver, key, value in options.option:
        if driver not in settings:
            raise InvalidArgumentError(f"--option {driver}.{key}: the drivers are {', '.join(names)}")
        settings[driver][key] = value
    return settings


def _number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{number} is not in {least}..{most}")
        return number

    parse.__name__ = "number"  # argparse shows this name if the text is not a number
    return parse


def _seconds(text: str) -> float:
    try:
        return positive_seconds("", float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds") from None


# ---- capacity ---------------------------------------------------------------------------------------------------------


def _capacity(options: argparse.Namespace) -> int:
    found = kv.capacity(
        _group(options),
        tokens=options.tokens,
        sequences=options.sequences,
        block_tokens=options.block_tokens,
        ranks=options.ranks,
        shared=options.shared,
    )
    facts = {"blocks": found.blocks[0], **{name: getattr(found, name) for name in found._fields[1:]}}
    if options.memory is not None:
        facts["sequences"] = max(0, (options.memory << 30) - found.shared_bytes) // found.sequence_bytes
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    labels = {
        "nbytes": "memory",
        "sequence_bytes": "each sequence",
        "shared_bytes": "common prefix",
        "sequences": "room for",
    }
    for name, value in facts.items():
        text = f"{value:,} bytes, {value / (1 << 30):.2f} GiB" if name.endswith("bytes") else f"{value:,}"
        _table(
            [(labels.get(name, name), text + (f" sequences in {options.memory} GiB" if name == "sequences" else ""))]
        )
    return 0


def _group(options: argparse.Namespace) -> kv.Group:
    """Return the group of layers that the options describe."""
    attention, latent = (options.kv_heads, options.head_dim), (options.latent, options.rope)
    if None not in attention and latent == (None, None):
        return kv.Group.attention(options.layers, *attention, options.dtype, window=options.window)
    if None not in latent and attention == (None, None) and options.window is None:
        return kv.Group.latent(options.layers, *latent, options.dtype)
    raise InvalidArgumentError(
        "give either --kv-heads and --head-dim, with --window for a sliding window; or --latent and --rope"
    )


# ---- info ------------------------------------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> int:
    settings = _settings(options, drivers.names())
    return 0 if asyncio.run(_show_info(options.json, settings)) else FAILED


async def _show_info(as_json: bool, settings: dict[str, dict[str, Any]]) -> bool:
    """Print the report, and return True if any driver can be used here."""
    facts = {
        "hixl_async": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {platform.machine()})",
        "cython": _cython_version(),
        "uvloop": _installed("uvloop"),
        "kernel": f"{platform.system()} {platform.release()}",
    }
    known = [await _examine(driver, settings.get(driver.name, {})) for driver in drivers.available()]
    findings = probes.findings()
    usable = any(driver.problem is None and not _wraps(driver) for driver, _, _ in known)
    if as_json:
        rows = [{**driver._asdict(), "limits": limits, "facts": about} for driver, limits, about in known]
        print(json.dumps({**facts, "drivers": rows, "machine": [finding._asdict() for finding in findings]}, indent=2))
        return usable
    _table((name, value or "not installed") for name, value in facts.items())
    print("\ndrivers")
    for driver, limits, about in known:
        what = WRAPPER if _wraps(driver) else ", ".join(driver.capabilities)
        text = f"missing: {driver.problem}" if driver.problem else what
        first, *rest = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
        _table([(driver.name, first), *(("", line) for line in rest)])
        _table(("", f"{name.replace('_', ' ')} {value}") for name, value in limits.items())
        _table(("", f"{name}: {value}") for name, value in about.items())
    print("\nmachine")
    for finding in findings:
        mark = "" if finding.state == "ok" else f"{finding.state.upper()}: "
        _table([(finding.name, f"{finding.found}: {mark}{finding.verdict}")])
    return usable


class _Examined(NamedTuple):
    driver: DriverInfo
    limits: dict[str, int]
    facts: dict[str, str]


async def _examine(driver: DriverInfo, settings: dict[str, Any]) -> _Examined:
    """Open a driver, and return its limits and facts, or the reason why it cannot be opened here."""
    if driver.problem is not None or _wraps(driver):
        return _Examined(driver, {}, {})
    engine = Engine(drivers={driver.name: settings})
    limits: dict[str, int] = {}
    try:
        async with engine:
            limits = engine.driver_limits()[driver.name]
    except HixlError as error:
        driver = driver._replace(problem=str(error))
    return _Examined(driver, limits, engine.driver_facts().get(driver.name, {}))


def _wraps(driver: DriverInfo) -> bool:
    return driver.problem is None and not {"allocate", "register"} & set(driver.capabilities)


def _cython_version() -> str | None:
    """Return the version of Cython that compiled the core, from the name of the module in which Cython keeps its types."""
    found = re.fullmatch(r"_cython_(\d+(?:_\w+)*)", type(Engine.write).__module__)
    return found[1].replace("_", ".") if found else None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _table(rows: Iterable[tuple[str, object]]) -> None:
    for name, value in rows:
        print(f"  {name:15}{value}")


# ---- ping ------------------------------------------------------------------------------------------------------------


def _ping(options: argparse.Namespace) -> int:
    secret = _read_secret(options.secret_file) if options.secret_file is not None else None
    asyncio.run(_measure(options, secret, _drivers(options)))
    return 0


def _drivers(options: argparse.Namespace) -> dict[str, dict[str, Any]] | None:
    """Return the drivers that the command line names, also by an option, with their options."""
    names = options.driver or list(dict.fromkeys(driver for driver, _, _ in options.option))
    installed = drivers.names()
    for name in names:
        if name not in installed:
            raise InvalidArgumentError(f"there is no driver {name!r}; installed: {', '.join(installed)}")
    return _settings(options, names) if names else None


def _read_secret(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            secret, mode = file.read().rstrip(b"\r\n"), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise InvalidArgumentError(f"--secret-file {path}: {error.strerror}") from error
    if mode & 0o077:
        print(f"hixl-async: warning: other users may read {path}; protect it by chmod 600", file=sys.stderr)
    return secret


async def _measure(options: argparse.Namespace, secret: bytes | None, chosen: dict[str, dict[str, Any]] | None) -> None:
    async with Engine(
        name=f"hixl-async ping {os.getpid()}",
        domain=options.domain,
        secret=secret,
        drivers=chosen,
        connect_timeout=options.timeout,
        close_timeout=options.timeout,
    ) as engine:
        started = time.perf_counter()
        peer = await engine.connect(options.address)
        connected = time.perf_counter() - started
        control = await _round_trips(peer, options.count, options.size, options.timeout)
        writes = await _writes(engine, peer, options.count, options.size, options.timeout)
        _report(options, peer, connected, control, writes)


async def _round_trips(peer: Peer, count: int, size: int, timeout: float) -> list[float]:
    payload = "." * size
    times = []
    for number in range(count):
        started = time.perf_counter()
        answer = await peer.request(PING, {"number": number, "payload": payload}, timeout=timeout)
        times.append(time.perf_counter() - started)
        if answer != {"number": number, "payload": payload}:
            raise ProtocolError(f"{peer.name!r} answered a ping with another body than it was sent", peer=peer.name)
    return times


async def _writes(engine: Engine, peer: Peer, count: int, size: int, timeout: float) -> list[float] | str:
    """Return the durations of writes into the peer's scratch region in seconds, or the reason why there are none."""
    if not peer.regions.get(SCRATCH, Access.NONE) & Access.WRITE:
        return f"the peer offers no region {SCRATCH!r} to write to"
    if size == 0:
        return "--size is 0"
    remote = await peer.region(SCRATCH, timeout=timeout)
    if len(remote) < size:
        return f"the peer's {SCRATCH!r} has only {len(remote)} bytes"
    # Allocated memory, which every driver can move.
    target, data = remote[:size], engine.allocate("hixl.ping", size)
    times = []
    for _ in range(count):
        started = time.perf_counter()
        await engine.write(data, target, timeout=timeout)
        times.append(time.perf_counter() - started)
    return times


def _report(
    options: argparse.Namespace, peer: Peer, connected: float, control: list[float], writes: list[float] | str
) -> None:
    where = "same host" if peer.same_host else "other host"
    facts: dict[str, Any] = {
        "peer": peer.name,
        "address": peer.address,
        "domain": peer.identity.domain,
        "incarnation": peer.identity.incarnation,
        "same_host": peer.same_host,
        "drivers": list(peer.drivers),
        "regions": {name: str(access) for name, access in sorted(peer.regions.items())},
    }
    if options.json:
        facts |= {
            "connect_us": round(connected * 1e6, 1),
            "round_trip": _summary(control, options.size),
            "write": {"skipped": writes} if isinstance(writes, str) else _summary(writes, options.size),
        }
        print(json.dumps(facts, indent=2))
        return
    _table([("peer", f"{peer.name!r} at {peer.address or options.address}"), ("domain", peer.identity.domain)])
    _table([("incarnation", peer.identity.incarnation)])
    _table([("route", f"{', '.join(peer.drivers)} ({where})")])
    if not facts["regions"]:
        _table([("regions", "none that this engine may use")])
    for number, (name, access) in enumerate(facts["regions"].items()):
        _table([("regions" if number == 0 else "", f"{name}: {access}")])
    _table([("connect", f"{connected * 1e3:.2f} ms"), ("round trip", _sentence(control, options.size))])
    _table([("write", f"not timed: {writes}" if isinstance(writes, str) else _sentence(writes, options.size))])


def _summary(times: list[float], size: int) -> dict[str, float]:
    ordered = [round(seconds * 1e6, 1) for seconds in sorted(times)]
    return {
        "count": len(ordered),
        "bytes": size,
        "min_us": ordered[0],
        "median_us": round(statistics.median(ordered), 1),
        "max_us": ordered[-1],
    }


def _sentence(times: list[float], size: int) -> str:
    summary = _summary(times, size)
    spread = f"median {summary['median_us']:g} us, min {summary['min_us']:g}, max {summary['max_us']:g}"
    return f"{spread} ({summary['count']} times, {size} bytes)"
