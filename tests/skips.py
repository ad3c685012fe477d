"""A pytest plugin: say how to run the skipped tests, or, with ``--no-skips``, count a skip as a failure.

``make test`` loads it.  CI installs all optional packages and passes ``--no-skips``, so that only tests of hardware can be
skipped there.
"""

from __future__ import annotations

import pytest

#: The end of a skip's reason if the machine lacks hardware, which cannot be installed.
HARDWARE = "torch sees no GPU"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if any test is skipped")


def _skipped(config: pytest.Config) -> int:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", ()) if reporter is not None else ()
    return sum(not str(report.longrepr[-1]).endswith(HARDWARE) for report in skipped)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    yield
    if session.config.getoption("--no-skips") and exitstatus == pytest.ExitCode.OK and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = _skipped(config)
    if not count:
        return
    if config.getoption("--no-skips"):
        terminalreporter.write_line(f"{count} skipped, and --no-skips was given: this run has failed", red=True)
    else:
        terminalreporter.write_line(
            f"{count} skipped, for the reasons above; `make optional` installs torch and the demo's model",
            yellow=True,
        )
