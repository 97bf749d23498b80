"""Progress events for a terminal, a program or a test.

The command line, the page and the worker implement it. The work itself never prints.
"""

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from graftwork.records.base import MIB, Record


class Reporter(Protocol):
    def started(self, step: str, title: str) -> None: ...

    def unchanged(self, step: str, title: str) -> None:
        """The step has nothing to do: its inputs are unchanged."""

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
    """Discards all events."""

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
    """Reports one model among several: prefixes titles with its name and omits what is unchanged."""

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


ENOUGH_SECONDS = 2.0
"""Before that the measured rate is unreliable."""


class ProgressUnit(NamedTuple):
    name: str
    size: int


UNITS = {
    "read and sift": ProgressUnit("MiB", MIB),
    "hacks": ProgressUnit("components", 1),
    "components": ProgressUnit("components", 1),
    "mutation score": ProgressUnit("components", 1),
    **{f"stage {stage}: answers": ProgressUnit("answers", 1) for stage in (1, 2, 3, 4)},
}
"""Units of phases that do not count rows."""


def progress_listener(
    reporter: Reporter, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int], None]:
    """A listener for `phase, done, total` that adds the rate and the time left."""
    began: dict[str, tuple[float, int]] = {}
    last: dict[str, int] = {}

    def report(phase: str, done: int, total: int) -> None:
        if done < last.get(phase, done):
            # The phase begins again, with other work.
            del began[phase]
        last[phase] = done
        start, first = began.setdefault(phase, (clock(), done))
        seconds = clock() - start
        rate = (done - first) / seconds if seconds > 0 else 0.0
        is_steady = rate > 0 and seconds >= ENOUGH_SECONDS
        unit = UNITS.get(phase, ProgressUnit("rows", 1))
        reporter.progress(
            phase,
            done / unit.size,
            total / unit.size,
            seconds_left=(total - done) / rate if is_steady else None,
            detail={f"{unit.name}/s": round(rate / unit.size, 1)} if is_steady else {},
        )

    return report
