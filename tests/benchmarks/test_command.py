"""Arguments that cannot be measured, and reports that cannot be written, are refused before anything is measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("numpy")

from rig.command import amount, count, folder, size

from .program import BENCHMARKS, run


def load(script: str) -> ModuleType:
    """Return the module of a script, even if another module has its name."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{script}", BENCHMARKS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line",
    [
        "ladder --sizes 4apples",
        "ladder --sizes 0",
        "ladder --pin 0",
        "ladder --pin 0,99999",
        "ladder --parts wheel",
        "ladder --json /no/such/folder/report.json",
        "streaming --rate 0",
        "streaming --tokens -5",
        "streaming --tokens 0",
        "streaming --block 0",
        "streaming --slack -1",
        "streaming --turns 0",
        "streaming --json /",
        "sweep --tokens 0",
        "sweep --requests 4 0",
        "sweep --slots 0",
        "sweep --flops 0",
        "sweep --flops nan",
        "sweep --flops inf",
        "sweep --ranks 0",
        "side_by_side --only hixl nope",
        "side_by_side --no-such-thing",
        "report --from /no/such/folder",
        "report --remarks /no/such/file",
        "report --out /dev/null",
        "report --to /dev/null/below",
    ],
)
def test_bad_arguments_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, *words = line.split()
    with pytest.raises(SystemExit) as ended:
        load(script).arguments(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err.splitlines()[-1]


def test_good_arguments_are_accepted(tmp_path: Path) -> None:
    assert [size(text) for text in ("8", "4KiB", "128M")] == [8, 4096, 128 << 20]
    assert (count("3"), amount("1e9")) == (3, 1e9)
    assert folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert load("streaming").arguments(["--json", str(tmp_path / "new")]).json == str(tmp_path / "new")
    assert load("streaming").arguments(["--json"]).json == "-"


@pytest.mark.parametrize("script", ["ladder.py", "side_by_side.py"])
def test_without_numpy_it_says_what_to_install(script: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['numpy'] = None\n")
    done = run(script, "--quick", PYTHONPATH=f"{tmp_path}:{BENCHMARKS.parent}")
    assert done.returncode == 1
    assert done.stderr == "the benchmarks need numpy: pip install '.[bench]', in the folder above this one\n"
