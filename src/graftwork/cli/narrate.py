"""Tell a person, or a program, how the work goes: on standard error."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from graftwork.cli.output import stderr
from graftwork.cli.show import show
from graftwork.cli.show.tables import print_line, quote, safe
from graftwork.records.base import Record


class RichNarrator:
    """A progress bar with time left, and each step's result in a table behind it."""

    def __init__(self, console: Console | None = None, *, tables: bool = True) -> None:
        self._console = console or stderr
        self._tables = tables
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, step: str, title: str) -> None:
        self._clear()
        self._console.print(f"[bold cyan]▸ {step:<9}[/] {title}", highlight=False)
        self._task = self._bar.add_task(title, total=None, count="", left="", detail="")

    def unchanged(self, step: str, title: str) -> None:
        self._clear()
        self._console.print(
            f"[dim]· {step:<9} {title}: nothing has changed, not done again[/]", highlight=False
        )

    def progress(
        self,
        phase: str,
        done: float,
        total: float,
        *,
        seconds_left: float | None,
        detail: dict[str, float | str],
    ) -> None:
        if self._task is None:
            self._task = self._bar.add_task(phase, total=None, count="", left="", detail="")
        self._bar.update(
            self._task,
            description=phase,
            completed=done,
            total=total if total > 1 else None,
            count=f"{done:.0f}/{total:.0f}" if total > 1 else "",
            left=f"{_duration(seconds_left)} left" if seconds_left is not None else "",
            detail=_detail(detail),
        )

    def word(self, text: str) -> None:
        print_line(self._console, f"  [yellow]![/] {quote(text)}")

    def finished(self, step: str, output: Record, seconds: float) -> None:
        self._clear()
        if self._tables:
            show(self._console, output)
        self._console.print(f"[green]✓ {step:<9}[/] [dim]{_duration(seconds)}[/]\n", highlight=False)

    def _clear(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def _detail(detail: dict[str, float | str]) -> str:
    shown: list[str] = []
    if "loss" in detail:
        shown.append(f"loss {float(detail['loss']):.3f}")
    if "tokens_per_second" in detail:
        shown.append(f"{float(detail['tokens_per_second']):.0f} tokens/s")
    shown += [f"{value:,} {name}" for name, value in detail.items() if name.endswith("/s")]
    if "subject" in detail:
        shown.append(safe(str(detail["subject"])))
    return ", ".join(shown)
