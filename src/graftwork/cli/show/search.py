"""Sweeps over settings and federated rounds as tables."""

from typing import TYPE_CHECKING

from rich.console import Console

from graftwork.cli.show.tables import fit_words, print_line, quote, table

if TYPE_CHECKING:
    from graftwork.pipeline.federated.rounds import Federation, FederationPlan
    from graftwork.pipeline.sweep import SweepResult


def show_sweep(console: Console, result: "SweepResult") -> None:
    budget = (
        f"{result.budget_minutes:g} minutes"
        if result.budget_minutes is not None
        else f"{result.budget_steps} steps"
    )
    where = "" if result.place == "here" else f" at {quote(result.place)}"
    device = f" on {quote(result.device)}" if result.device else ""
    print_line(
        console,
        f"[bold]sweep[/] of {quote(result.model)}{where}{device}: {result.minutes:.1f} minutes trained, "
        f"of a budget of {budget}",
    )
    rows = table(
        "rung",
        "rows",
        "learning rate",
        "rank",
        "batch",
        "loss",
        "minutes",
        "",
        right=("rung", "rows", "learning rate", "rank", "batch", "loss", "minutes"),
    )
    for trial in sorted(result.trials, key=lambda trial: (trial.rung, trial.loss is None, trial.loss or 0.0)):
        best = trial.settings == result.best and trial.loss is not None
        note = quote(f"{trial.state}: {trial.why}") if trial.why else ""
        if not note and trial.settings == result.now:
            note = "graft.yaml"
        rows.add_row(
            str(trial.rung + 1),
            str(trial.rows),
            f"{trial.settings.learning_rate:g}",
            str(trial.settings.rank),
            str(trial.settings.batch_rows),
            "" if trial.loss is None else f"[bold green]{trial.loss:.4f}[/]" if best else f"{trial.loss:.4f}",
            f"{trial.minutes:.1f}",
            note,
        )
    console.print(fit_words(console, rows))
    if result.best is None:
        print_line(console, "[yellow]![/] no trial finished: allow a larger budget")
    elif not result.changes:
        print_line(console, "best: the settings of graft.yaml")
    else:
        changed = ", ".join(f"{key}: {value:g}" for key, value in result.changes.items())
        done = (
            f"written to {quote(result.written_to)}"
            if result.written_to
            else "`--write` sets them in graft.yaml"
        )
        print_line(console, f"best: {quote(changed)}; {done}")


def show_federation_plan(console: Console, plan: "FederationPlan") -> None:
    left = plan.rounds - plan.done
    pull = f", proximal {plan.proximal:g}" if plan.proximal else ""
    print_line(
        console,
        f"[bold]federated[/] training of {quote(plan.model)}: {left} of {plan.rounds} rounds left, "
        f"{plan.quorum} of {len(plan.places)} places needed{pull}",
    )
    rows = table(
        "place", "where", "data there", "rows", "steps", "minutes", "", right=("rows", "steps", "minutes")
    )
    for place in plan.places:
        note = f"[yellow]{quote(place.why_not)}[/]" if place.why_not else "a round"
        figures = (
            ("", "", "") if place.why_not else (str(place.rows), str(place.steps), f"{place.minutes:.1f}")
        )
        rows.add_row(quote(place.name), quote(place.place), quote(place.data), *figures, note)
    console.print(fit_words(console, rows))
    print_line(console, f"about {plan.minutes:.1f} minutes, places at the same time, without evaluation")
    print_line(console, f"an adapter takes {plan.adapter_mb:.2g} MB, to each place and back in every round")
    for line in plan.travels:
        print_line(console, f"  travels  {quote(line)}")
    for line in plan.stays:
        print_line(console, f"  stays    {quote(line)}")


def show_federation(console: Console, done: "Federation") -> None:
    rows = table(
        "round",
        "place",
        "rows",
        "steps",
        "weight",
        "loss there",
        "gate",
        right=("round", "rows", "steps", "weight"),
    )
    for number in done.rounds:
        gate = (number.decision or "").replace("_", " ")
        for place in number.places:
            loss = "" if place.loss is None else f"{place.loss:.4f}"
            before = "" if place.loss_before is None else f"{place.loss_before:.4f} → "
            rows.add_row(
                str(number.number),
                quote(place.name),
                str(place.rows),
                str(place.steps),
                f"{place.weight:.3f}",
                before + loss,
                gate,
            )
            gate = ""
        for name, why in number.left_out.items():
            rows.add_row(
                str(number.number), quote(name), "", "", "", f"[yellow]left out: {quote(why)}[/]", ""
            )
    console.print(fit_words(console, rows))
    print_line(console, f"adapter: {quote(done.adapter)}", soft_wrap=True)
    if done.release:
        print_line(console, f"release it: {quote(done.release)}", soft_wrap=True)


PRINTERS = {
    "SweepResult": show_sweep,
    "FederationPlan": show_federation_plan,
    "Federation": show_federation,
}
