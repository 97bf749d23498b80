"""Says what would run the skipped tests, and fails a run that skips for a reason that is not on the list.

In: `allowed_skips.txt`, a regular expression per line, with the program or command that enables such tests.
Out: one line at the end; with `pytest --allowed-skips`, exit code 1 and the tests whose reason no line
matches. Works with and without xdist.
"""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

PREFIX = "Skipped: "


def read_allowed(path: Path) -> list[tuple[re.Pattern[str], str]]:
    """The lines that count on this machine, each with what would enable its tests."""
    allowed = []
    for line in path.read_text().splitlines():
        pattern, _, enabler = line.partition(" :: ")
        if pattern.strip() and not line.startswith("#") and not shutil.which(enabler.strip() or "-"):
            allowed.append((re.compile(pattern.strip(), re.DOTALL), enabler.strip()))
    return allowed


class AllowedSkips:
    """A plugin that remembers what was skipped and for which reason."""

    def __init__(self, path: Path, *, enforce: bool) -> None:
        self._allowed = read_allowed(path)
        self._path, self._enforce = path, enforce
        self._enabled_by: Counter[str] = Counter()
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
        enablers = [enabler for pattern, enabler in self._allowed if pattern.fullmatch(reason)]
        if not enablers and self._enforce:
            self._refused[report.nodeid] = reason
        self._enabled_by.update(enabler for enabler in enablers[:1] if enabler)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._enabled_by:
            counts = [f"{enabler} ({count})" for enabler, count in self._enabled_by.most_common()]
            terminalreporter.line(f"skipped tests that would run with {', '.join(counts)}")
        if self._refused:
            terminalreporter.section(f"skipped without a reason of {self._path}", red=True)
            for test, reason in self._refused.items():
                terminalreporter.line(f"{test}: {reason}")
