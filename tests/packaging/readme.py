"""The example of README.md, and a program that runs it with the package that is installed.

::

    python tests/packaging/readme.py README.md
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path


def example(readme: Path) -> str:
    """Return the first Python block."""
    found = re.search(r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found, f"{readme} has no example"
    assert "import hixl_async" in found[1]
    return found[1]


def main() -> int:
    """Run the example in an empty folder, without anything of the source tree on the path; its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "example.py")
        program.write_text(example(Path(sys.argv[1])), encoding="utf-8")
        command = [sys.executable, "-I", "-X", "dev", "-W", "error", str(program)]
        return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
