"""What the work tells whoever watches: a terminal, a program, a test.

The doors implement it. The work itself never prints.
"""

from typing import Protocol

from graftwork.records.base import Record


class Reporter(Protocol):
    def started(self, step: str, title: str) -> None: ...

    def unchanged(self, step: str, title: str) -> None:
        """The step has nothing to do: its inputs are those of the last time."""

    def progress(
        self,
        phase: str,
        done: float,
        total: float,
        *,
        seconds_left: float | None,
        detail: dict[str, float | str],
    ) -> None: ...

    def info(self, text: str) -> None:
        """Something worth knowing happened."""

    def finished(self, step: str, output: Record, seconds: float) -> None: ...


class NullReporter:
    """Tells nobody."""

    def started(self, step: str, title: str) -> None: ...

    def unchanged(self, step: str, title: str) -> None: ...

    def progress(
        self,
        phase: str,
        done: float,
        total: float,
        *,
        seconds_left: float | None,
        detail: dict[str, float | str],
    ) -> None: ...

    def info(self, text: str) -> None: ...

    def finished(self, step: str, output: Record, seconds: float) -> None: ...


class ModelReporter(NullReporter):
    """Tells of one model among several: its name before each title, and nothing of what is unchanged."""

    def __init__(self, reporter: Reporter, model: str) -> None:
        self._reporter = reporter
        self._model = model

    def started(self, step: str, title: str) -> None:
        self._reporter.started(step, f"{self._model}: {title}")

    def progress(
        self,
        phase: str,
        done: float,
        total: float,
        *,
        seconds_left: float | None,
        detail: dict[str, float | str],
    ) -> None:
        self._reporter.progress(
            f"{self._model}: {phase}", done, total, seconds_left=seconds_left, detail=detail
        )

    def info(self, text: str) -> None:
        self._reporter.info(f"{self._model}: {text}")

    def finished(self, step: str, output: Record, seconds: float) -> None:
        self._reporter.finished(step, output, seconds)
