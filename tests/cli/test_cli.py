"""The command line as a user has it: real processes, exit codes, one clear line per error."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hixl_async
from hixl_async import drivers
from hixl_async.cli import commands as cli
from hixl_async.types import DriverInfo
from tests.hixlsim.build import build

SECRET = "a secret of nineteen"
SERVER = Path(__file__).with_name("server.py")


def hixl(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hixl_async", *arguments],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def failed(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Assert that a command ended with `code` after one clear line."""
    assert result.returncode == code, result
    assert result.stdout == ""
    assert result.stderr.startswith("hixl-async: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def malformed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Assert that a command line is refused with the usage, and return the message."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: hixl-async" in err
    return err


class Server:
    """An engine in a process of its own."""

    def __init__(self, *regions: str, secret: str | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), *regions],
            env={**os.environ, **({"HIXL_ASYNC_SECRET": secret} if secret is not None else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the server ended"
        return line

    def memory(self, region: str) -> bytes:
        """Return the contents of one of its regions."""
        assert self.process.stdin is not None
        self.process.stdin.write(region + "\n")
        self.process.stdin.flush()
        return bytes.fromhex(self._line())

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate(timeout=30)
        assert self.process.returncode == 0


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*regions: str, secret: str | None = None) -> Server:
        servers.append(Server(*regions, secret=secret))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def unused_address() -> Iterator[str]:
    """An address on which no process listens, or can begin to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


# ---- info ------------------------------------------------------------------------------------------------------------


def test_info_shows_versions_drivers_and_the_machine() -> None:
    result = hixl("info")
    assert result.returncode == 0
    assert result.stderr == ""
    for word in (hixl_async.__version__, "python", "cython", "kernel", "shm", "allocate", "memfd seals", "open files"):
        assert word in result.stdout


def test_info_as_json() -> None:
    facts = json.loads(hixl("info", "--json").stdout)
    assert facts["hixl_async"] == hixl_async.__version__
    assert facts["cython"][:1].isdigit()
    (shm,) = [driver for driver in facts["drivers"] if driver["name"] == "shm"]
    assert shm["problem"] is None
    assert "allocate" in shm["capabilities"]
    assert set(shm["limits"]) == {"descriptors", "notification_bytes", "inline_bytes"}
    assert all(limit > 0 for limit in shm["limits"].values())
    assert {finding["state"] for finding in facts["machine"]} <= {"ok", "limited", "missing"}
    for finding in facts["machine"]:
        assert finding["verdict"]


def test_info_says_why_a_driver_is_missing(tmp_path: Path) -> None:
    """A package may bring a driver whose library is missing; it is listed all the same."""
    package = tmp_path / "fabric-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fabric\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[hixl_async.drivers]\nfabric = no_such_module_at_all:DRIVER\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = hixl("info", env={"PYTHONPATH": path})
    assert result.returncode == 0, "shm can still be used"
    (line,) = [line for line in result.stdout.splitlines() if line.split()[:1] == ["fabric"]]
    assert "missing: " in line
    assert "no_such_module_at_all" in line


def test_info_says_why_a_driver_cannot_be_opened() -> None:
    facts = json.loads(hixl("info", "--json", env={"ASCEND_HOME_PATH": "/no/such/toolkit"}).stdout)
    (faulty,) = [driver for driver in facts["drivers"] if driver["name"] == "faulty"]
    assert faulty["problem"] is None
    (driver,) = [driver for driver in facts["drivers"] if driver["name"] == "hixl"]
    if driver["problem"] is None:
        pytest.skip("this machine has CANN")
    assert "install CANN" in driver["problem"]
    assert "/no/such/toolkit/lib64/libcann_hixl.so" in driver["problem"]
    assert driver["limits"] == driver["facts"] == {}


@pytest.mark.parametrize("without", [(), ("batch", "connect_async", "capability")])
def test_info_shows_the_abilities_of_a_drivers_library(without: tuple[str, ...]) -> None:
    root = build(without=without)
    result = hixl("info", env={"ASCEND_HOME_PATH": str(root)})
    assert result.returncode == 0
    assert f"library: {root}/lib64/libcann_hixl.so" in result.stdout
    assert f"version: {'9.0.0' if without else '9.2.0'}-simulated" in result.stdout
    assert f"asynchronous connect: {'no' if without else 'yes'}" in result.stdout
    assert f"batch query: {'no' if without else 'yes'}" in result.stdout
    assert "listens at: 127.0.0.1:" in result.stdout


def test_info_shows_the_library_although_it_cannot_be_started() -> None:
    root = build()
    result = hixl("info", "--json", env={"ASCEND_HOME_PATH": str(root), "HIXLSIM_FAULTS": "init=207001"})
    (driver,) = [driver for driver in json.loads(result.stdout)["drivers"] if driver["name"] == "hixl"]
    assert "start of driver 'hixl'" in driver["problem"]
    assert driver["facts"]["library"] == f"{root}/lib64/libcann_hixl.so"
    assert "listens at" not in driver["facts"]


def test_info_with_options_of_a_driver(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--option", "hixl.LocalCommRes=" + '{"version": "1.3"}', "--option", "hixl.hixl_ip=127.0.0.2")
    result = hixl("info", *arguments, env={"ASCEND_HOME_PATH": str(build())})
    assert "back-end: cs, by LocalCommRes" in result.stdout
    assert "listens at: 127.0.0.2:" in result.stdout
    failed(hixl("info", "--option", "hixxl.device=1"), 2, "--option hixxl.device", "hixl, shm")
    for text in ("hixl", "hixl=1", "hixl.device", ".device=1", "hixl.=1"):
        assert "does not look like DRIVER.KEY=VALUE" in malformed(capsys, "info", "--option", text)


def test_info_fails_where_no_driver_can_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drivers, "available", lambda: [DriverInfo("shm", (), "the library is gone")])
    assert cli.main(["info"]) == 1
    assert "missing: the library is gone" in capsys.readouterr().out


def test_info_fails_where_there_is_only_a_wrapper(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drivers, "available", lambda: [DriverInfo("faulty", ("cancel",), None)])
    assert cli.main(["info"]) == 1
    assert cli.WRAPPER in capsys.readouterr().out


def test_info_breaks_long_reasons_into_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drivers, "available", lambda: [DriverInfo("far", (), "not there: " + "/some/where, " * 50)])
    cli.main(["info"])
    assert all(len(line) < 130 for line in capsys.readouterr().out.splitlines())


# ---- ping ------------------------------------------------------------------------------------------------------------


def test_ping_shows_the_peer_and_times_it(serve: Callable[..., Server]) -> None:
    server = serve("kv:64:read-write", "hidden:64:none")
    result = hixl("ping", server.address, "--count", "3")
    assert (result.returncode, result.stderr) == (0, "")
    for word in ("'pinged'", server.address, "default", "shm (same host)", "kv: read-write", "round trip", "median"):
        assert word in result.stdout
    assert "hidden" not in result.stdout
    assert "not timed" in result.stdout
    assert server.memory("kv") == b"\xa5" * 64, "a user's region was touched"


def test_ping_as_json(serve: Callable[..., Server]) -> None:
    server = serve("kv:64:read")
    facts = json.loads(hixl("ping", server.address, "--json", "--count", "4", "--size", "1000").stdout)
    assert (facts["peer"], facts["address"], facts["domain"]) == ("pinged", server.address, "default")
    assert (facts["same_host"], facts["drivers"], facts["regions"]) == (True, ["shm"], {"kv": "read"})
    assert len(facts["incarnation"]) == 32
    trips = facts["round_trip"]
    assert (trips["count"], trips["bytes"]) == (4, 1000)
    assert 0 < trips["min_us"] <= trips["median_us"] <= trips["max_us"]
    assert "hixl.scratch" in facts["write"]["skipped"]


def test_ping_carries_as_many_bytes_as_it_reports(serve: Callable[..., Server]) -> None:
    server = serve()
    for size in (0, cli.MAX_SIZE):
        facts = json.loads(hixl("ping", server.address, "--json", "--count", "1", "--size", str(size)).stdout)
        assert facts["round_trip"]["bytes"] == size


def test_ping_writes_into_a_scratch_region_only(serve: Callable[..., Server]) -> None:
    server = serve("kv:64:read-write", "hixl.scratch:64:write")
    facts = json.loads(hixl("ping", server.address, "--json", "--size", "40").stdout)
    assert (facts["write"]["count"], facts["write"]["bytes"]) == (10, 40)
    assert server.memory("hixl.scratch") == bytes(40) + b"\xa5" * 24
    assert server.memory("kv") == b"\xa5" * 64


def test_ping_over_another_driver(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(build()))
    with monkeypatch.context() as server_alone:
        server_alone.setenv("HIXL_ASYNC_DRIVERS", "hixl")
        server = serve("hixl.scratch:64:write")
    facts = json.loads(hixl("ping", server.address, "--json", "--driver", "hixl").stdout)
    assert facts["drivers"] == ["hixl"]
    assert facts["write"]["count"] == 10
    assert server.memory("hixl.scratch") == bytes(64)
    failed(hixl("ping", server.address), 3, "no driver reaches")
    facts = json.loads(hixl("ping", server.address, "--json", "--option", "hixl.hixl_ip=127.0.0.2").stdout)
    assert facts["drivers"] == ["hixl"]
    failed(
        hixl("ping", server.address, "--option", "hixl.hixl_ip=192.0.2.1"), 1, "hixl_ip=192.0.2.1", "no such address"
    )
    failed(hixl("ping", server.address, "--driver", "shm", "--option", "hixl.device=1"), 2, "the drivers are shm")


@pytest.mark.parametrize(
    ("region", "size", "reason"),
    [("hixl.scratch:64:read", 8, "no region"), ("hixl.scratch:64:write", 65, "only 64 bytes")],
)
def test_ping_leaves_an_unsuitable_scratch_region_alone(
    serve: Callable[..., Server], region: str, size: int, reason: str
) -> None:
    server = serve(region)
    facts = json.loads(hixl("ping", server.address, "--json", "--size", str(size)).stdout)
    assert reason in facts["write"]["skipped"]
    assert server.memory("hixl.scratch") == b"\xa5" * 64


def test_ping_with_a_secret(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(secret=SECRET)
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(SECRET + "\n")
    for result in (
        hixl("ping", server.address, "--secret-file", str(file)),
        hixl("ping", server.address, env={"HIXL_ASYNC_SECRET": SECRET}),
    ):
        assert (result.returncode, result.stderr) == (0, "")
        assert SECRET not in result.stdout
    file.chmod(0o644)
    result = hixl("ping", server.address, "--secret-file", str(file))
    assert result.returncode == 0
    assert "other users may read" in result.stderr


def test_ping_with_the_wrong_secret_is_refused(serve: Callable[..., Server]) -> None:
    server = serve(secret=SECRET)
    failed(hixl("ping", server.address), 3, server.address, "--secret-file")
    failed(hixl("ping", server.address, env={"HIXL_ASYNC_SECRET": "some other secret"}), 3, "--secret-file")


def test_secrets_are_not_taken_from_the_command_line(unused_address: str) -> None:
    result = hixl("ping", unused_address, "--secret", SECRET)
    assert result.returncode == 2
    assert "unrecognized arguments" in result.stderr


def test_ping_with_another_domain_is_refused(serve: Callable[..., Server]) -> None:
    result = hixl("ping", serve().address, "--domain", "elsewhere")
    failed(result, 3, "'elsewhere'", "'default'")
    assert "secret" not in result.stderr


def test_ping_without_a_listener(unused_address: str) -> None:
    failed(hixl("ping", unused_address), 1, unused_address, "refused")


def test_ping_of_something_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        failed(hixl("ping", f"127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.3"), 1, "0.3 s")


def test_ping_of_something_else() -> None:
    def greet() -> None:
        with server.accept()[0] as client:
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            client.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=greet)
        thread.start()
        failed(hixl("ping", f"127.0.0.1:{server.getsockname()[1]}"), 3)
        thread.join()


def test_ping_of_a_stopped_engine(serve: Callable[..., Server]) -> None:
    server = serve()
    server.process.send_signal(signal.SIGSTOP)
    failed(hixl("ping", server.address, "--timeout", "0.3"), 1, server.address)


def test_ping_of_an_engine_that_dies() -> None:
    server = Server()
    pinging = subprocess.Popen(
        [sys.executable, "-m", "hixl_async", "ping", server.address, "--count", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_until_connected(pinging)
    server.process.kill()
    server.process.communicate()
    out, err = pinging.communicate(timeout=50)
    failed(subprocess.CompletedProcess([], pinging.returncode, out, err), 1, "'pinged'")


def test_interrupted_ping(serve: Callable[..., Server]) -> None:
    server = serve()
    command = [sys.executable, "-m", "hixl_async", "ping", server.address, "--count", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as pinging:
        try:
            _wait_until_connected(pinging)
            pinging.send_signal(signal.SIGINT)
            assert pinging.communicate(timeout=50) == ("", "")
        finally:
            pinging.kill()
    assert pinging.returncode == 130


def _wait_until_connected(process: subprocess.Popen[str]) -> None:
    """Return when the process maps memory of a link, and so is past the handshake."""
    while "memfd:hixl_async" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None, process.communicate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["not-an-address"], "host:port"),
        (["127.0.0.1:99999"], "0..65535"),
        (["127.0.0.1:1", "--secret-file", "/does/not/exist"], "--secret-file /does/not/exist: No such file"),
        (["127.0.0.1:1", "--secret-file", "/"], "--secret-file /: Is a directory"),
        (["127.0.0.1:1", "--driver", "nope"], "there is no driver 'nope'; installed: "),
        (["127.0.0.1:1", "--option", "nope.device=1"], "there is no driver 'nope'"),
        (["127.0.0.1:1", "--driver", "faulty"], "wraps another"),
    ],
)
def test_unusable_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert cli.main(["ping", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("hixl-async: ")
    assert words in err


def test_a_malformed_number_is_shown_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("abc", "0", "nan", "1e400"):
        message = malformed(capsys, "ping", "127.0.0.1:1", "--timeout", text)
        assert f"argument --timeout: {text!r} is not a positive number of seconds" in message


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["ping"],
        ["ping", "127.0.0.1:1", "--count", "0"],
        ["ping", "127.0.0.1:1", "--count", "many"],
        ["ping", "127.0.0.1:1", "--size", "-1"],
        ["ping", "127.0.0.1:1", "--size", str(cli.MAX_SIZE + 1)],
        ["ping", "127.0.0.1:1", "--timeout", "0"],
        ["ping", "127.0.0.1:1", "--timeout", "nan"],
    ],
)
def test_malformed_command_lines(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    malformed(capsys, *arguments)


def test_debug_shows_the_traceback(unused_address: str) -> None:
    for arguments in (["--debug", "ping", unused_address], ["ping", unused_address, "--debug"]):
        result = hixl(*arguments)
        assert result.returncode == 1
        assert "Traceback (most recent call last)" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("hixl-async: ")


def test_output_without_a_reader() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "hixl_async", "info"], stdout=writer, stderr=subprocess.PIPE, timeout=50, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


# ---- capacity ----

LLAMA = ("capacity", "--layers", "80", "--kv-heads", "8", "--head-dim", "128")


def test_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LLAMA, "--ranks", "8", "--tokens", "4096", "--sequences", "64", "--memory", "16"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["blocks 16,384", "memory 10,737,418,240 bytes, 10.00 GiB"]
    assert lines[-1] == "room for 102 sequences in 16 GiB"


def test_capacity_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--layers", "61", "--latent", "512", "--rope", "64", "--dtype", "bf16")
    assert cli.main(["capacity", *model, "--tokens", "4096", "--shared", "2048", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "blocks": 256,
        "nbytes": 287_834_112,
        "sequence_bytes": 143_917_056,
        "shared_bytes": 143_917_056,
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["capacity", "--layers", "2", "--kv-heads", "8", "--tokens", "9"], "either --kv-heads and --head-dim"),
        ([*LLAMA, "--tokens", "9", "--latent", "5", "--rope", "5"], "either --kv-heads and --head-dim"),
        ([*LLAMA, "--tokens", "9", "--shared", "10"], "shared must be at most 9"),
        ([*LLAMA, "--tokens", "9", "--dtype", "int9"], "dtype 'int9' is not known"),
    ],
)
def test_capacity_of_nothing_known(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_version_and_help() -> None:
    assert hixl("--version").stdout.strip() == f"hixl-async {hixl_async.__version__}"
    text = hixl("--help").stdout
    assert "info" in text
    assert "ping" in text
    assert "Exit codes" in text
