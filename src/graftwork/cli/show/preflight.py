"""What is known before training: metrics tried out, problems, and how long each stage takes."""

from rich.console import Console

from graftwork.cli.show.tables import percent, print_line, quote, table
from graftwork.cli.show.training import show_run_plan
from graftwork.grading.metrics import name_of, plural
from graftwork.pipeline.preflight import Preflight


def show_preflight(console: Console, found: Preflight) -> None:
    print_line(console, f"{plural(found.cases, 'held-out case')}. {quote(found.power)}".rstrip())
    show_trials(console, found)
    for problem in found.problems:
        mark = "[red]✗[/]" if problem.severity == "error" else "[yellow]![/]"
        why = f": {quote(problem.why)}" if problem.why else ""
        print_line(console, f"{mark} {quote(problem.what)}{why}")
        if problem.fix:
            print_line(console, f"  [dim]fix:[/] {quote(problem.fix)}")
    show_run_plan(console, found.run)
    if found.errors:
        print_line(console, f"[bold red]not ready[/]: {plural(len(found.errors), 'error')}")
    else:
        print_line(console, "[bold green]ready[/]: `graft run` trains, evaluates and decides.")


def show_trials(console: Console, found: Preflight) -> None:
    """What each metric says of answers that are known to be right, and of those known to be wrong."""
    if not found.metrics:
        return
    rows = table("metric", "cases", "log's own", "spoiled", "one answer to all", right=("cases",))
    for trial in found.metrics:
        graded = (trial.own, trial.spoiled, trial.constant)
        cells = ("–" if share is None else percent(share) for share in graded)
        rows.add_row(quote(name_of(trial.name)), str(trial.cases), *cells)
    console.print(rows)
