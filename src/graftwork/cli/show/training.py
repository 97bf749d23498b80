"""Plans and runs as tables."""

from pathlib import Path

from rich.console import Console

from graftwork.cli.show.course import duration
from graftwork.cli.show.tables import print_line, quote, table
from graftwork.records.figure import Figure
from graftwork.records.plan import Plan, Residual, RunPlan
from graftwork.records.run import TrainOutcome
from graftwork.train.run_folder import PAGE

NAMES = {
    "total_parameters": "parameters of the base",
    "trainable_parameters": "trainable parameters",
    "peak_memory_gib": "peak memory",
    "disk_gib": "disk",
    "tokens": "tokens",
    "trained_tokens": "of them trained on",
    "steps": "steps",
    "tokens_per_second": "speed",
    "minutes": "time",
}


def show_plan(console: Console, plan: Plan) -> None:
    print_line(
        console,
        f"{plan.method} on [bold]{quote(plan.base)}[/], {plan.dtype}, {plan.device.name} "
        f"({plan.device.threads} threads); certainty: {plan.certainty}",
    )
    rows = table("figure", "planned", "range", right=("planned",))
    for name, title in NAMES.items():
        figure: Figure = getattr(plan, name)
        spread = "" if figure.low == figure.high else f"{number(figure.low)} … {number(figure.high)}"
        rows.add_row(title, f"{number(figure.value)} {figure.unit}".strip(), spread)
    console.print(rows)
    if plan.base_note:
        print_line(console, f"[yellow]base:[/] {quote(plan.base_note)}")
    for note in plan.notes:
        print_line(console, f"[dim]{quote(note)}[/]")


def show_run_plan(console: Console, plan: RunPlan) -> None:
    """Stage by stage, and all of them; what is up to date takes no time."""
    rows = table("stage of the run", "planned", "range", "", right=("planned",))
    for one in plan.stages:
        figure = one.seconds
        if figure.value == 0:
            rows.add_row(one.stage, "", "", f"[dim]{one.state}[/]")
            continue
        state = "" if one.state == "to do" else one.state
        rows.add_row(
            one.stage, duration(figure.value), f"{duration(figure.low)} … {duration(figure.high)}", state
        )
    whole = plan.minutes
    spread = f"{duration(60 * whole.low)} … {duration(60 * whole.high)}"
    rows.add_row("[bold]whole run[/]", f"[bold]{duration(60 * whole.value)}[/]", spread, "")
    console.print(rows)
    if plan.rough:
        print_line(console, "[dim]rough: from the size of the logs, since the dataset is not prepared yet[/]")


def show_outcome(console: Console, outcome: TrainOutcome) -> None:
    before, after = outcome.validation_loss_before, outcome.validation_loss_after
    held_out = f"; held-out {before:.3f} → {after:.3f}" if before is not None and after is not None else ""
    print_line(
        console,
        f"{outcome.steps} steps, loss {outcome.first_loss:.3f} → {outcome.final_loss:.3f}{held_out}",
    )
    if outcome.restarts:
        same = {True: "[green]to the same bytes[/]", False: "[red]with other bytes[/]", None: "none"}
        print_line(
            console,
            f"restarted {outcome.restarts} time(s); {outcome.replayed_steps} steps were done again, "
            f"{same[outcome.replay_identical]}",
        )
    for line in tell_looks(outcome):
        print_line(console, line)
    print_line(console, "base weights unchanged (hash before and after are the same)")
    show_residuals(console, outcome.residuals)
    for drift in outcome.drifts:
        print_line(console, f"[yellow]beyond the plan:[/] {quote(drift.says)}")
    print_line(console, f"adapter [bold]{outcome.adapter_hash[:12]}[/] in {quote(outcome.adapter_folder)}")
    page = Path(outcome.adapter_folder).parent / PAGE
    if page.exists():
        print_line(console, f"the course of the run: {quote(str(page))}")


def tell_looks(outcome: TrainOutcome) -> list[str]:
    """How often the model was looked at on the way, and when it was best."""
    best = next((look for look in outcome.looks if look.step == outcome.best_step), None)
    if best is None:
        return []
    return [
        f"looked at {len(outcome.looks)} time(s): {best.metric} was best after step {best.step}, "
        f"{best.value:.3f} over {best.cases} case(s)"
    ]


def show_residuals(console: Console, residuals: tuple[Residual, ...]) -> None:
    rows = table(
        "plan against reality", "planned", "range", "came out", "off", right=("planned", "came out", "off")
    )
    for residual in residuals:
        planned = residual.planned
        colour = "green" if residual.inside else "yellow"
        spread = "" if planned.low == planned.high else f"{number(planned.low)} … {number(planned.high)}"
        rows.add_row(
            NAMES.get(residual.name, residual.name),
            f"{number(planned.value)} {planned.unit}".strip(),
            spread,
            f"[{colour}]{number(residual.actual)}[/]",
            f"{100 * residual.off:+.0f} %",
        )
    console.print(rows)


def number(value: float) -> str:
    if value >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


PRINTERS = {"Plan": show_plan, "RunPlan": show_run_plan, "TrainOutcome": show_outcome}
