"""The wheel as a user gets it: built from the source distribution, installed alone, and used as in README.md.

``make wheel`` and ``make wheels`` run these on the files in ``dist/``: WHEEL is the wheel's path, WHEEL_PYTHON the interpreter
that it is for (default: the one that runs the tests).  Without WHEEL they build their own.
"""

from __future__ import annotations

import email
import email.message
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.readme import example

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = os.environ.get("WHEEL_PYTHON") or sys.executable

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without any setting that leads to the source tree."""
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
    """The names of the files in the source distribution that the wheel was built from, without its top folder."""
    (archive,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        return [name.partition("/")[2] for name in tar.getnames()]


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("an empty environment")  # with spaces, as users have them
    succeeded(run(INTERPRETER, "-m", "venv", "--without-pip", folder, cwd=folder))
    interpreter = folder / "bin" / "python"
    target = succeeded(run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder))
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check"]
    succeeded(run(*pip, "install", "--no-index", "--no-deps", wheel, cwd=folder))
    installed = {path.name for path in Path(target.strip()).iterdir()}
    assert {name.split("-")[0] for name in installed} == {"hixl_async"}
    return interpreter


def test_the_example_of_the_readme_runs_as_printed(python: Path, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example(ROOT / "README.md"), encoding="utf-8")
    result = run(python, "-I", "-X", "dev", "-W", "error", "example.py", cwd=tmp_path)
    assert succeeded(result).strip()
    assert result.stderr == ""


def test_it_has_a_home_page(wheel: Path) -> None:
    links = dict(line.split(", ") for line in metadata(wheel).get_all("Project-URL", []))
    assert links.keys() >= {"Homepage", "Source", "Issues", "Changelog"}


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_it_needs_no_other_package(wheel: Path, python: Path, tmp_path: Path) -> None:
    about = metadata(wheel)
    assert [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line] == []
    assert about["Requires-Python"] == ">=3.11"
    assert about["License-Expression"] == "Apache-2.0"
    code = "import sys, hixl_async; print(hixl_async.__version__, 'numpy' in sys.modules, hixl_async.__file__)"
    version, numpy, file = succeeded(run(python, "-I", "-c", code, cwd=tmp_path)).split(maxsplit=2)
    assert (version, numpy) == (about["Version"], "False")
    assert Path(file.strip()).is_relative_to(python.parents[1])


def test_its_command_runs(python: Path, tmp_path: Path) -> None:
    for command in ([python.with_name("hixl-async"), "info"], [python, "-I", "-m", "hixl_async", "info"]):
        shown = succeeded(run(*command, cwd=tmp_path))
        (shm,) = [line for line in shown.splitlines() if line.split()[:1] == ["shm"]]
        assert "allocate" in shm


def test_every_driver_can_be_loaded(python: Path, tmp_path: Path) -> None:
    """Nothing of the source tree is there to fall back on."""
    code = "from hixl_async import drivers; print(*(f'{row.name}={row.problem}' for row in drivers.available()))"
    assert succeeded(run(python, "-I", "-c", code, cwd=tmp_path)).split() == ["faulty=None", "hixl=None", "shm=None"]


def test_it_holds_all_files_of_the_package(wheel: Path, python: Path) -> None:
    """All modules and stubs, the headers for drivers of other packages, and no leftover file."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    package = ROOT / "hixl_async"
    wanted = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.pyi", "*.pxd", "py.typed", "include/*.h")
        for path in package.rglob(pattern)
        if "__pycache__" not in path.parts
    }
    code = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    suffix = succeeded(run(python, "-I", "-c", code, cwd=wheel.parent)).strip()
    extensions = {f"{path.relative_to(ROOT).with_suffix('')}{suffix}" for path in package.rglob("*.pyx")}
    drivers = [*package.glob("drivers/_*.c"), *package.glob("drivers/_*.cpp")]
    extensions |= {f"{path.relative_to(ROOT).with_suffix('')}{suffix}" for path in drivers}
    assert names == wanted | extensions


def test_its_name_states_its_platform(wheel: Path, python: Path) -> None:
    """A wheel that another machine may install is named after the glibc that it needs."""
    code = "import sys; print('cp%d%d' % sys.version_info[:2])"
    tag = succeeded(run(python, "-I", "-c", code, cwd=wheel.parent)).strip()
    platform = "manylinux" if "WHEEL_PYTHON" in os.environ else "linux"
    assert f"-{tag}-{tag}-{platform}_" in wheel.name


def test_it_was_built_from_the_sources_alone(sources: list[str]) -> None:
    """The source distribution has no generated file, and every file that building and testing need."""
    assert [name for name in sources if name.endswith((".so", ".pyc")) or name.startswith("build/")] == []
    assert not [name for name in sources if re.fullmatch(r"hixl_async/(core/\w+|_\w+)\.c", name)]
    needed = {
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "CHANGELOG.md",
        "hixl_async/drivers/shm/link.h",
        "tests/conftest.py",
    }
    assert needed <= set(sources)
