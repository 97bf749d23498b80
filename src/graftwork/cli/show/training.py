"""Plans and runs as tables."""

from rich.console import Console

from graftwork.cli.show.tables import table
from graftwork.records.figure import Figure
from graftwork.records.plan import Plan, Residual
from graftwork.records.run import TrainOutcome

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
    console.print(
        f"{plan.method} on [bold]{plan.base}[/], {plan.dtype}, {plan.device.name} "
        f"({plan.device.threads} threads); certainty: {plan.certainty}",
        highlight=False,
    )
    rows = table("figure", "planned", "range", right=("planned",))
    for name, title in NAMES.items():
        figure: Figure = getattr(plan, name)
        spread = "" if figure.low == figure.high else f"{number(figure.low)} … {number(figure.high)}"
        rows.add_row(title, f"{number(figure.value)} {figure.unit}".strip(), spread)
    console.print(rows)
    for note in plan.notes:
        console.print(f"[dim]{note}[/]", highlight=False)


def show_outcome(console: Console, outcome: TrainOutcome) -> None:
    before, after = outcome.validation_loss_before, outcome.validation_loss_after
    held_out = f"; held-out {before:.3f} → {after:.3f}" if before is not None and after is not None else ""
    console.print(
        f"{outcome.steps} steps, loss {outcome.first_loss:.3f} → {outcome.final_loss:.3f}{held_out}",
        highlight=False,
    )
    if outcome.restarts:
        same = {True: "[green]to the same bytes[/]", False: "[red]with other bytes[/]", None: "none"}
        console.print(
            f"restarted {outcome.restarts} time(s); {outcome.replayed_steps} steps were done again, "
            f"{same[outcome.replay_identical]}",
            highlight=False,
        )
    console.print("base weights unchanged (hash before and after are the same)", highlight=False)
    show_residuals(console, outcome.residuals)
    console.print(
        f"adapter [bold]{outcome.adapter_hash[:12]}[/] in {outcome.adapter_folder}", highlight=False
    )


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


PRINTERS = {"Plan": show_plan, "TrainOutcome": show_outcome}
