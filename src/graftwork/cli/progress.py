"""Progress on standard error: a bar on a terminal, plain lines elsewhere."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from graftwork.cli.output import stderr
from graftwork.project.reporter import NullReporter
from graftwork.records.base import Record
from graftwork.text.wording import duration
from graftwork.views.document import quote, safe
from graftwork.views.terminal import print_line, show

PLAIN_SECONDS = 10.0
"""Seconds between two lines of progress in a log file or a pipe, which have no bar."""

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 20
KEPT = 400


class LossTrend:
    """The losses so far, one per step; progress may report the same step many times."""

    def __init__(self) -> None:
        self._losses: dict[float, float] = {}

    def see(self, done: float, detail: dict[str, float | str]) -> None:
        if "loss" in detail:
            self._losses[done] = float(detail["loss"])
            if len(self._losses) > KEPT:
                # Drop every other value of the older half.
                for old in list(self._losses)[: KEPT // 2 : 2]:
                    del self._losses[old]

    @property
    def trend(self) -> str:
        return sparkline([self._losses[step] for step in sorted(self._losses)])


def sparkline(values: Sequence[float], *, width: int = WIDTH) -> str:
    """Values as a row of small bars, each the mean of its part; empty for fewer than two values."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return ""
    count = min(width, len(known))
    edges = [round(place * len(known) / count) for place in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        return BLOCKS[0] * count
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(round((mean - low) / (high - low) * top), top)] for mean in means)


def describe_detail(detail: dict[str, float | str], losses: LossTrend, *, total: float = 0) -> str:
    """The line below the progress bar."""
    shown: list[str] = []
    if "loss" in detail:
        shown.append(f"loss {float(detail['loss']):.3f} {losses.trend}".rstrip())
    if "tokens_per_second" in detail:
        shown.append(f"{float(detail['tokens_per_second']):,.0f} tokens/s")
    if "gradient_norm" in detail:
        shown.append(f"gradient {float(detail['gradient_norm']):.2g}")
    if "memory_gib" in detail:
        shown.append(f"{float(detail['memory_gib']):.1f} GiB")
    if "step_seconds" in detail and "expected_step_seconds" in detail:
        expected = float(detail["expected_step_seconds"])
        shown.append(
            f"{duration(float(detail['step_seconds']))} per step (plan: {duration(expected)}, "
            f"{duration(expected * total)} in total)"
        )
    shown += [f"{value:,} {name}" for name, value in detail.items() if name.endswith("/s")]
    if "subject" in detail:
        shown.append(safe(str(detail["subject"])))
    return ", ".join(shown)


class _Bar(Progress):
    """The bar, and one line of details below it."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text(f"  {self.below}", style="dim", overflow="ellipsis", no_wrap=True)


class RichReporter:
    """A progress bar with the time left, and a table with the result of each step."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        tables: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or stderr
        self._tables = tables
        self._clock = clock
        self._printed_at: float | None = None
        self._trend = LossTrend()
        self._shown: set[object] = set()
        """The texts of the results that were printed, so that remarks do not repeat them."""
        self._bar = _Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def started(self, step: str, title: str) -> None:
        self._clear()
        self._console.print(f"[bold cyan]▸ {step:<9}[/] {title}", highlight=False)
        self._task = self._bar.add_task(title, total=None, count="", left="")

    def unchanged(self, step: str, title: str) -> None:
        self._clear()
        self._console.print(f"[dim]· {step:<9} {title}: up to date[/]", highlight=False)

    def progress(
        self,
        phase: str,
        done: float,
        total: float,
        *,
        seconds_left: float | None,
        detail: dict[str, float | str],
    ) -> None:
        self._trend.see(done, detail)
        count = f"{done:.0f}/{total:.0f}" if total > 1 else ""
        left = f"{duration(seconds_left)} left" if seconds_left is not None else ""
        below = describe_detail(detail, self._trend, total=total)
        if not self._console.is_terminal:
            self._print_plain(" ".join(part for part in (phase, count) if part), left, below)
            return
        if self._task is None:
            self._task = self._bar.add_task(phase, total=None, count="", left="")
        self._bar.below = below
        self._bar.update(
            self._task,
            description=phase,
            completed=done,
            total=total if total > 1 else None,
            count=count,
            left=left,
        )

    def _print_plain(self, *parts: str) -> None:
        """One line every PLAIN_SECONDS; none for short work."""
        now = self._clock()
        if self._printed_at is None:
            self._printed_at = now
        if now - self._printed_at >= PLAIN_SECONDS:
            self._printed_at = now
            self._console.print(Text("  " + ", ".join(part for part in parts if part)), soft_wrap=True)

    def info(self, text: str) -> None:
        if text not in self._shown:
            print_line(self._console, f"  [yellow]![/] {quote(text)}")

    def finished(self, step: str, output: Record, seconds: float) -> None:
        self._clear()
        if self._tables:
            show(self._console, output)
            self._shown.update(value for _, value in output if isinstance(value, str))
        self._console.print(f"[green]✓ {step:<9}[/] [dim]{duration(seconds)}[/]\n", highlight=False)

    def _clear(self) -> None:
        self._trend, self._printed_at, self._bar.below = LossTrend(), None, ""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None


class JsonRemarks(NullReporter):
    """Remarks as lines of JSON on standard error, next to a log in JSON."""

    def info(self, text: str) -> None:
        timestamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"event": "log", "at": timestamp, "level": "info", "message": text}
        print(json.dumps(line, ensure_ascii=False), file=sys.stderr, flush=True)
