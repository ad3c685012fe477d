"""Check hixl_async over HIXL on the NPUs of this machine, and measure it; see docs/ascend.md.

::

    python benchmarks/acceptance.py --devices 0,1                # checks and figures, a minute or two
    python benchmarks/acceptance.py --devices 0,1 --option backend=cs --total 16MiB --json out.json

``benchmarks/ascend_acceptance.sh`` runs it, records versions of software and hardware, and packs the results.  A second process
on the second device owns the targets.  If torch_npu is installed, memory of the NPUs is measured as well as the host's.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import hixl_async as hx
from hixl_async.errors import HixlError
from hixl_async.testing import until

#: Descriptors of one transfer, as in HIXL's own published figures.
BLOCKS = (16 << 10, 128 << 10, 2 << 20)
REPEATS, ROUNDS, SMALL = 5, 200, 4096
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


# -- memory of both kinds


def tensor_on(device: int, size: int) -> Any:
    """Return memory of an NPU, or None if torch_npu has none."""
    try:
        importlib.import_module("torch_npu")
        import torch  # after it: alone it takes seconds, and is of no use

        torch.npu.set_device(device)
        return torch.zeros(size, dtype=torch.uint8, device=f"npu:{device}")
    except Exception as reason:  # torch_npu raises errors of many kinds if it cannot use CANN
        print(f"no memory of an NPU: {type(reason).__name__}: {reason}", file=sys.stderr)
        return None


def regions_of(engine: hx.Engine, device: int, size: int, access: Any) -> tuple[dict[str, hx.Region], Any]:
    regions = {"host": engine.allocate("host", size, access=access)}
    tensor = tensor_on(device, size)
    if tensor is not None:
        regions["device"] = engine.register("device", tensor, access=access)
    return regions, tensor


def fill(region: hx.Region, tensor: Any, seed: bytes) -> None:
    """Fill a region with bytes that depend on `seed`."""
    data = hashlib.shake_128(seed).digest(1 << 20)
    for start in range(0, region.size, len(data)):
        piece = data[: region.size - start]
        if region.device:
            import torch

            tensor[start : start + len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(tensor.device)
        else:
            memoryview(region)[start : start + len(piece)] = piece


def digest(region: hx.Region, tensor: Any) -> str:
    data = bytes(tensor.cpu().numpy()) if region.device else memoryview(region)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# -- the second process


async def target(options: argparse.Namespace) -> None:
    device = options.devices[1]
    async with hx.Engine("127.0.0.1:0", name="target", drivers=drivers(options, device)) as engine:
        regions, tensor = regions_of(engine, device, options.total, "read-write")
        notes = engine.notifications("ping")

        async def answer() -> None:
            async for note in notes:
                engine.notify(note.peer, "pong", note.payload)

        def late(_peer: hx.Peer, _body: dict[str, Any]) -> dict[str, Any]:
            regions["late"] = engine.allocate("late", SMALL, access="read-write")
            return {}

        answering = asyncio.create_task(answer())
        engine.serve("digest", lambda _peer, body: {"digest": digest(regions[body["region"]], tensor)})
        engine.serve("late", late)
        print(engine.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        answering.cancel()


# -- the first one


class Run:
    """The checks and their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.facts: dict[str, Any] = {"options": options.option, "devices": options.devices}
        self.checks: dict[str, str] = {}
        self.figures: list[dict[str, Any]] = []

    async def check(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
            self.checks[name] = "passed"
        except (HixlError, AssertionError, OSError) as error:
            self.checks[name] = f"FAILED: {type(error).__name__}: {error}"
        print(f"  {name:58}{self.checks[name]}", flush=True)

    async def all(self) -> None:
        process = await self._spawn()
        assert process.stdout is not None
        try:
            address = (await process.stdout.readline()).decode().strip()
            if not address:
                raise SystemExit("the second process did not come up; its own message is above")
            await self._measure(address, process)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, __file__, *sys.argv[1:], "--target", stdin=pipe, stdout=pipe
        )

    async def _measure(self, address: str, process: asyncio.subprocess.Process) -> None:
        device = self.options.devices[0]
        async with hx.Engine("127.0.0.1:0", name="initiator", drivers=drivers(self.options, device)) as engine:
            self.facts["library"] = engine.driver_facts()["hixl"]
            if "simulated" in self.facts["library"].get("version", ""):
                print("THE ACCELERATORS ARE SIMULATED: times mean nothing.")
            print(f"  back-end: {self.facts['library'].get('back-end')}")
            began = time.perf_counter()
            self.peer = await engine.connect(address)
            self.facts["connect_ms"] = round((time.perf_counter() - began) * 1e3, 1)
            self.engine = engine
            began = time.perf_counter()
            await engine.allocate("timed", self.options.total).aclose()
            self.facts["allocate_host_ms"] = round((time.perf_counter() - began) * 1e3, 1)
            self.ours, self.tensor = regions_of(engine, device, self.options.total, "none")
            await self.peer.request("hixl.ping", {})  # its regions are offered before its first answer
            for here in self.ours:
                for there in self.peer.regions:
                    await self.check(f"bytes: {here} and the peer's {there}", self._moves(here, there))
            await self.check("notifications", self._notifications)
            await self.check("a small write, one at a time", self._latency)
            await self.check("memory registered while links live", self._late)
            await self.check("a closed region is forgotten", self._forgotten)
            await self.check("a peer that is killed", self._killed(process))

    def _moves(self, here: str, there: str) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            remote = await self.peer.region(there)
            region = self.ours[here]
            for block in BLOCKS:
                rows = [(at, at, block) for at in range(0, region.size - block + 1, block)]
                for verb in ("write", "read"):
                    fill(region, self.tensor, f"{here} {there} {block} {verb}".encode())
                    expected = digest(region, self.tensor)
                    batch = hx.Batch(verb, region, remote, rows)
                    if verb == "read":  # the bytes there were written from here, and have to come back
                        expected = (await self.peer.request("digest", {"region": there}, timeout=60))["digest"]
                    times = []
                    for _ in range(REPEATS):
                        began = time.perf_counter()
                        await self.engine.submit(batch)
                        times.append(time.perf_counter() - began)
                    if verb == "write":
                        got = (await self.peer.request("digest", {"region": there}, timeout=60))["digest"]
                    else:
                        got = digest(region, self.tensor)
                    assert got == expected, f"{verb} of {block} bytes a piece: other bytes than were sent"
                    rate = batch.nbytes / min(times) / 1e9
                    self.figures.append(
                        {"from": here, "to": there, "verb": verb, "block": block, "gb_per_s": round(rate, 2)}
                    )

        return work

    async def _notifications(self) -> None:
        notes = self.engine.notifications("pong")
        times = []
        for number in range(ROUNDS):
            began = time.perf_counter()
            await self.engine.notify(self.peer, "ping", str(number).encode())
            assert (await notes.get()).payload == str(number).encode(), "they came in another order"
            times.append(time.perf_counter() - began)
        self.facts["notify_round_trip_us"] = microseconds(times)

    async def _latency(self) -> None:
        remote, region = await self.peer.region("host"), self.ours["host"]
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            await self.engine.write(region[:SMALL], remote[:SMALL])
            times.append(time.perf_counter() - began)
        self.facts["write_4KiB_us"] = microseconds(times)

    async def _late(self) -> None:
        await self.peer.request("late", {})
        remote = await self.peer.region("late", timeout=30)
        ours = self.engine.allocate("ours", SMALL)
        memoryview(ours)[:] = b"L" * SMALL
        await self.engine.write(ours, remote)
        await self.engine.read(self.ours["host"][:SMALL], remote)
        assert bytes(memoryview(self.ours["host"])[:SMALL]) == b"L" * SMALL
        await ours.aclose()

    async def _forgotten(self) -> None:
        before = self.engine.stats().regions
        await self.engine.allocate("short-lived", SMALL).aclose()
        await until(
            lambda: self.engine.stats().regions <= before,
            timeout=30,
            what="the transport's release of the region",
        )

    def _killed(self, process: asyncio.subprocess.Process) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            remote, region = await self.peer.region("host"), self.ours["host"]
            process.kill()
            began = time.perf_counter()
            try:
                while time.perf_counter() - began < 60:
                    await self.engine.write(region[:SMALL], remote[:SMALL], timeout=30)
            except HixlError:
                self.facts["loss_noticed_ms"] = round((time.perf_counter() - began) * 1e3, 1)
            else:
                raise AssertionError("writes to a killed process go on working")
            await self.engine.drained(region)

        return work


def microseconds(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median": round(statistics.median(ordered) * 1e6, 1),
        "p99": round(ordered[len(ordered) * 99 // 100] * 1e6, 1),
    }


# -- the command


def drivers(options: argparse.Namespace, device: int) -> Any:
    return {"hixl": {"device": device, **dict(option.split("=", 1) for option in options.option)}}


def parse_size(text: str) -> int:
    for unit, size in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * size
    return int(text)


def lines(run: Run) -> Iterator[str]:
    yield ""
    yield f"{'GB/s, blocks of':28}" + "".join(f"{block >> 10:>8} KiB" for block in BLOCKS)
    rows: dict[str, dict[int, float]] = {}
    for figure in run.figures:
        rows.setdefault(f"{figure['verb']} {figure['from']} {figure['to']}", {})[figure["block"]] = figure["gb_per_s"]
    for name, cells in rows.items():
        yield f"{name:28}" + "".join(f"{cells.get(block, float('nan')):>12.2f}" for block in BLOCKS)
    for name in ("connect_ms", "allocate_host_ms", "write_4KiB_us", "notify_round_trip_us", "loss_noticed_ms"):
        yield f"{name:28}{run.facts.get(name)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--devices", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1], metavar="A,B")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="of the hixl driver, on both sides")
    add("--total", type=parse_size, default=128 << 20, metavar="SIZE", help="bytes of each region (128MiB)")
    add("--json", metavar="FILE", help="write all results there as well")
    add("--target", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.target:
        asyncio.run(target(options))
        return 0
    run = Run(options)
    try:
        asyncio.run(run.all())
    except HixlError as error:
        run.checks["the engine comes up"] = f"FAILED: {type(error).__name__}: {error}"
        print(run.checks["the engine comes up"])
    print("\n".join(lines(run)))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"facts": run.facts, "checks": run.checks, "figures": run.figures}, file, indent=2)
    return 0 if all(outcome == "passed" for outcome in run.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
