"""The wheel as a user gets it: built from the source distribution, installed alone, and used as README.md says.

``make wheel`` runs these, on the files in ``dist/`` (WHEEL names the wheel); without WHEEL they build their own.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Without anything that would lead to the source tree."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HIXL_ASYNC"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)


def succeeded(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, f"{result.args}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("WHEEL"):
        return (ROOT / given).resolve()
    folder = tmp_path_factory.mktemp("dist")
    succeeded(run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def sources(wheel: Path) -> list[str]:
    """The files of the source distribution that the wheel was built from, without its own folder."""
    (archive,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return [name.partition("/")[2] for name in tar.getnames()]


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("an empty environment")  # with spaces, as users have them
    venv.create(folder, with_pip=False)
    interpreter = folder / "bin" / "python"
    target = succeeded(run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder))
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check"]
    succeeded(run(*pip, "install", "--no-index", "--no-deps", wheel, cwd=folder))
    installed = {path.name for path in Path(target.strip()).iterdir()}
    assert {name.split("-")[0] for name in installed} == {"hixl_async"}
    return interpreter


def test_the_example_of_the_readme_runs_as_printed(python: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert example, "README.md has no example"
    assert "import hixl_async" in example[1]
    (tmp_path / "example.py").write_text(example[1], encoding="utf-8")
    result = run(python, "-I", "-X", "dev", "-W", "error", "example.py", cwd=tmp_path)
    assert succeeded(result).strip()
    assert result.stderr == ""


def test_it_needs_no_other_package(wheel: Path, python: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line] == []
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    code = "import sys, hixl_async; print(hixl_async.__version__, 'numpy' in sys.modules, hixl_async.__file__)"
    version, numpy, file = succeeded(run(python, "-I", "-c", code, cwd=tmp_path)).split(maxsplit=2)
    assert (version, numpy) == (metadata["Version"], "False")
    assert Path(file.strip()).is_relative_to(python.parents[1])


def test_its_command_runs(python: Path, tmp_path: Path) -> None:
    for command in ([python.with_name("hixl-async"), "info"], [python, "-I", "-m", "hixl_async", "info"]):
        shown = succeeded(run(*command, cwd=tmp_path))
        (shm,) = [line for line in shown.splitlines() if line.split()[:1] == ["shm"]]
        assert "allocate" in shm


def test_every_driver_can_be_loaded(python: Path, tmp_path: Path) -> None:
    """By entry point: nothing of the source tree is there to fall back on."""
    code = "from hixl_async import drivers; print(*(f'{row.name}={row.problem}' for row in drivers.available()))"
    assert succeeded(run(python, "-I", "-c", code, cwd=tmp_path)).split() == ["faulty=None", "hixl=None", "shm=None"]


def test_it_holds_what_the_package_is_made_of(wheel: Path) -> None:
    """All modules and stubs, what out-of-tree drivers compile against, and nothing that was left behind."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "hixl_async"
    wanted = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.pyi", "*.pxd", "py.typed", "include/*.h")
        for path in package.rglob(pattern)
        if "__pycache__" not in path.parts
    }
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    extensions = {f"{path.relative_to(ROOT).with_suffix('')}{suffix}" for path in package.glob("_*.pyx")}
    drivers = [*package.glob("drivers/_*.c"), *package.glob("drivers/_*.cpp")]
    extensions |= {f"{path.relative_to(ROOT).with_suffix('')}{suffix}" for path in drivers}
    assert names == wanted | extensions


def test_it_says_for_whom_it_was_built(wheel: Path) -> None:
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert f"-{tag}-{tag}-linux_" in wheel.name


def test_it_was_built_from_the_sources_alone(sources: list[str]) -> None:
    """Nothing generated travels in the source distribution, and everything that is needed to build and test does."""
    assert [name for name in sources if name.endswith((".so", ".pyc")) or name.startswith("build/")] == []
    assert not [name for name in sources if re.fullmatch(r"hixl_async/_\w+\.c", name)]
    needed = {
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "CHANGELOG.md",
        "hixl_async/drivers/shm/link.h",
        "tests/conftest.py",
    }
    assert needed <= set(sources)
