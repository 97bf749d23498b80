"""Fails a run in which a test was skipped for a reason that is not on a list.

In: `pytest --allowed-skips FILE`, a regular expression a line. Out: exit code 1 and the tests with their
reasons, where none of the lines matches. Works with and without xdist.
"""

import re
import shutil
from pathlib import Path

import pytest

PREFIX = "Skipped: "


def read_allowed(path: Path) -> list[re.Pattern[str]]:
    """The lines that count on this machine."""
    allowed = []
    for line in path.read_text().splitlines():
        pattern, _, program = line.partition(" :: ")
        if pattern.strip() and not line.startswith("#") and not (program and shutil.which(program.strip())):
            allowed.append(re.compile(pattern.strip(), re.DOTALL))
    return allowed


class AllowedSkips:
    """A plugin that remembers what was skipped and for which reason."""

    def __init__(self, path: Path) -> None:
        self._allowed = read_allowed(path)
        self._path = path
        self._refused: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = text.removeprefix(PREFIX)
        if not any(pattern.fullmatch(reason) for pattern in self._allowed):
            self._refused[report.nodeid] = reason

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._refused:
            terminalreporter.section(f"skipped without a reason of {self._path}", red=True)
            for test, reason in self._refused.items():
                terminalreporter.line(f"{test}: {reason}")
