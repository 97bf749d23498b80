"""Plans, runs, searches and base models on the terminal."""

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from graftwork.model.hub_models import LocalModels, PulledModel, RemovedModels
from graftwork.records.base import Figure
from graftwork.records.plan import Plan, Residual, RunPlan
from graftwork.records.run import TrainOutcome
from graftwork.text.wording import duration
from graftwork.train.run_folder import PAGE
from graftwork.views.document import quote, safe
from graftwork.views.terminal import fit_words, print_line, table

if TYPE_CHECKING:
    from graftwork.records.release import ExportedAdapter
    from graftwork.registry.export import MergedAdapter
    from graftwork.train.many.all_models import ModelResult, TrainedAll
    from graftwork.train.many.federated import Federation, FederationPlan
    from graftwork.train.many.sweep import SweepResult
    from graftwork.train.runs import Event

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


NAMES = {
    "total_parameters": "parameters of the base",
    "trainable_parameters": "trainable parameters",
    "peak_memory_gib": "peak memory",
    "disk_gib": "disk",
    "tokens": "tokens",
    "trained_tokens": "trained tokens",
    "steps": "steps",
    "tokens_per_second": "throughput",
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
    """Estimated time of each step and of the whole run."""
    rows = table("step", "planned", "range", "", right=("planned",))
    for stage in plan.stages:
        figure = stage.seconds
        if figure.value == 0:
            rows.add_row(stage.stage, "", "", f"[dim]{stage.state}[/]")
            continue
        state = "" if stage.state == "to do" else stage.state
        rows.add_row(
            stage.stage, duration(figure.value), f"{duration(figure.low)} … {duration(figure.high)}", state
        )
    whole = plan.minutes
    spread = f"{duration(60 * whole.low)} … {duration(60 * whole.high)}"
    rows.add_row("[bold]whole run[/]", f"[bold]{duration(60 * whole.value)}[/]", spread, "")
    console.print(rows)
    if plan.rough:
        print_line(
            console, "[dim]rough estimate from the size of the logs: the dataset is not prepared yet[/]"
        )


def _show_measures(console: Console, outcome: TrainOutcome) -> None:
    """Margins of pairs, or rewards of sampled answers: the first step against the last tenth."""
    first, last = outcome.measures_first, outcome.measures_last
    if last:
        rows = table("measured", "first step", "last steps", right=("first step", "last steps"))
        for name, value in last.items():
            rows.add_row(quote(name), f"{first[name]:.4g}" if name in first else "–", f"{value:.4g}")
        console.print(rows)


def show_outcome(console: Console, outcome: TrainOutcome) -> None:
    before, after = outcome.validation_loss_before, outcome.validation_loss_after
    held_out = f"; held-out {before:.3f} → {after:.3f}" if before is not None and after is not None else ""
    print_line(
        console,
        f"{outcome.steps} steps, loss {outcome.first_loss:.3f} → {outcome.final_loss:.3f}{held_out}",
    )
    _show_measures(console, outcome)
    if outcome.restarts:
        same = {True: "[green]with identical bytes[/]", False: "[red]with different bytes[/]", None: "none"}
        print_line(
            console,
            f"restarted {outcome.restarts} time(s); {outcome.replayed_steps} steps repeated, "
            f"{same[outcome.replay_identical]}",
        )
    if outcome.skipped_steps:
        print_line(
            console,
            f"[yellow]{outcome.skipped_steps} step(s) skipped: loss or gradient was no number[/]; "
            f"the rows of {outcome.repeated_steps} were trained on again later",
        )
    for line in describe_evaluations(outcome):
        print_line(console, line)
    print_line(console, "base weights unchanged (same hash before and after)")
    show_residuals(console, outcome.residuals)
    print_line(console, f"adapter [bold]{outcome.adapter_hash[:12]}[/] in {quote(outcome.adapter_folder)}")
    page = Path(outcome.adapter_folder).parent / PAGE
    if page.exists():
        print_line(console, f"training curves: {quote(str(page))}")


def describe_evaluations(outcome: TrainOutcome) -> list[str]:
    """How often the model was evaluated during training, and when it was best."""
    best = next((look for look in outcome.looks if look.step == outcome.best_step), None)
    if best is None:
        return []
    return [
        f"evaluated {len(outcome.looks)} time(s): {best.metric} was best after step {best.step}, "
        f"{best.value:.3f} over {best.cases} case(s)"
    ]


def show_residuals(console: Console, residuals: tuple[Residual, ...]) -> None:
    rows = table("figure", "planned", "range", "actual", "error", right=("planned", "actual", "error"))
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


EVENT_COLOURS = {"alert": "red", "message": "yellow", "checkpoint": "green", "evaluation": "cyan"}


def to_markup(event: "Event") -> str:
    """The time, the kind and the text of an event."""
    when = datetime.fromtimestamp(event.at).strftime("%H:%M:%S")
    colour = EVENT_COLOURS.get(event.kind, "dim")
    return f"[dim]{when}[/] [{colour}]{event.kind:<10}[/] {_EVENT_TEXT[event.kind](event.body)}"


def _step(body: dict[str, Any]) -> str:
    speed = body["tokens"] / body["seconds"] if body["seconds"] else 0.0
    return (
        f"{body['step']}: loss {body['loss']:.4f}, gradient {body['gradient_norm']:.3g}, "
        f"rate {body['learning_rate']:.2g}, {body['seconds']:.2f} s, {speed:,.0f} tokens/s"
        f"{_measures(body.get('measures', {}))}"
    )


def _measures(measures: dict[str, float]) -> str:
    """What the objective measured, behind the figures of every run."""
    return "".join(f", {quote(name)} {value:.3g}" for name, value in measures.items())


def _evaluation(body: dict[str, Any]) -> str:
    better = " (best so far)" if body.get("better") else ""
    return f"after step {body['step']}: {quote(body['metric'])} {body['value']:.4f}{better}"


def _alert(body: dict[str, Any]) -> str:
    why = f": {quote(body['why'])}" if body.get("why") else ""
    return f"[bold]{quote(body['what'])}[/]{why}"


def _machine(body: dict[str, Any]) -> str:
    shown = [f"memory {body['memory_gib']:.2f} GiB"]
    if "memory_free_gib" in body:
        shown.append(f"{body['memory_free_gib']:.1f} GiB free")
    if "processor_cores" in body:
        shown.append(f"{body['processor_cores']:.1f} cores busy")
    for device in body.get("devices", []):
        use, taken = device.get("use_percent"), device.get("memory_gib")
        heat, power = device.get("temperature_c"), device.get("power_watts")
        figures = [f"{use:.0f} % use"] if use is not None else []
        figures += [f"{taken:.1f} GiB"] if taken is not None else []
        figures += [f"{heat:.0f} °C"] if heat is not None else []
        figures += [f"{power:.0f} W"] if power is not None else []
        shown.append(f"device {device['index']}: {', '.join(figures)}")
    return "; ".join(shown)


_EVENT_TEXT: dict[str, Callable[[dict[str, Any]], str]] = {
    "step": _step,
    "evaluation": _evaluation,
    "alert": _alert,
    "machine": _machine,
    "message": lambda body: quote(body["message"]),
    "checkpoint": lambda body: f"after step {body['step']} ({quote(body['folder'])})",
    "output": lambda body: quote(body["text"]),
}


STATE_COLOURS = {"trained": "green", "unchanged": "dim", "failed": "red"}


def show_trained_all(console: Console, trained: "TrainedAll") -> None:
    several = len({model.base for model in trained.models if model.base}) > 1
    rows = table(
        "model",
        *(["base"] if several else []),
        "rows",
        "steps",
        "loss on held-out rows",
        "minutes",
        "state",
        title=trained.project,
        right=("rows", "steps", "minutes"),
    )
    for model in trained.models:
        rows.add_row(model.model, *([quote(model.base)] if several else []), *_figures(model), _state(model))
    console.print(rows)
    for model in trained.failed:
        error = model.error or {}
        print_line(console, f"[red]{quote(model.model)}[/]: {quote(str(error.get('what', '')))}")
        for label in ("why", "fix", "where"):
            if error.get(label):
                print_line(console, f"  [dim]{label:<6}[/]{quote(str(error[label]))}")
    print_line(console, f"[dim]{len(trained.models)} models in {trained.seconds / 60:.1f} minutes[/]")


def _figures(model: "ModelResult") -> tuple[str, str, str, str]:
    if model.outcome is None:
        return "", "", "", ""
    outcome = model.outcome
    before, after = outcome.validation_loss_before, outcome.validation_loss_after
    if before is None or after is None:
        # Without held-out rows, the losses of the first and the last step.
        before, after = outcome.first_loss, outcome.final_loss
    return f"{outcome.rows:,}", f"{outcome.steps:,}", f"{before:.3f} → {after:.3f}", f"{model.minutes:.1f}"


def _state(model: "ModelResult") -> str:
    start = " from main" if model.outcome and model.outcome.started_from else ""
    return f"[{STATE_COLOURS[model.state]}]{model.state}{start}[/]"


def show_exported(console: Console, exported: "ExportedAdapter") -> None:
    print_line(console, f"run [bold]{exported.run_id}[/] as {exported.format} in {quote(exported.folder)}")
    if exported.merged is not None:
        found = exported.merged.agreement
        print_line(
            console,
            f"[green]verified[/]: {exported.merged.merged_weights} weights merged; on {found.positions} "
            f"reply tokens of {found.rows} held-out rows the logits differ by at most "
            f"{found.largest_difference:.2g} (largest logit {found.largest_logit:.1f}, {found.dtype}), "
            f"the most likely token is the same at {found.same_first:.1%}",
        )
    if exported.gguf:
        gguf = exported.gguf
        print_line(
            console,
            f"[green]read back[/]: {gguf['tensors']} tensors, {gguf['blocks']} blocks, "
            f"{gguf['elements']:,} weights ({gguf['architecture']})",
        )
    for message in exported.words:
        print_line(console, f"[yellow]![/] {quote(message)}")
    print_line(console, "base files unchanged (same hashes before and after)")
    for name, digest in exported.files.items():
        print_line(console, f"[dim]{digest[:12]}  {quote(name)}[/]")


def show_merged(console: Console, merged: "MergedAdapter") -> None:
    print_line(
        console,
        f"[bold]{merged.method}[/] of {len(merged.parents)} adapters, rank {merged.rank}, "
        f"{merged.layers} layers, in {quote(merged.folder)}",
    )
    rows = table("adapter", "weight", "trained tokens", right=("weight", "trained tokens"))
    for parent in merged.parents:
        learned = "" if parent.trained_tokens is None else f"{parent.trained_tokens:,}"
        rows.add_row(quote(parent.name), f"{parent.weight:.3f}", learned)
    console.print(rows)
    if merged.method == "average":
        print_line(console, f"the rank holds at least {merged.kept:.1%} of the mean change of every layer")
    print_line(console, f"compare it: {quote(merged.evaluate)}")


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


def show_pulled(console: Console, pulled: PulledModel) -> None:
    print_line(
        console,
        f"[bold]{quote(pulled.name)}[/] at {pulled.commit[:12]}: {pulled.files} files, "
        f"{_size(pulled.size_bytes)}",
    )
    print_line(console, f"[dim]{quote(pulled.folder)}[/]", soft_wrap=True)
    if pulled.moved_to:
        print_line(
            console,
            f"[yellow]![/] the revision has moved to {pulled.moved_to[:12]}; this project stays where it is. "
            "`graft model pull --update` moves it.",
        )


def show_models(console: Console, found: LocalModels) -> None:
    if not found.models:
        print_line(console, "no base model is on this machine; `graft model pull NAME` fetches one")
        return
    made = table("model", "commit", "size", "weights", "", right=("size",))
    for model in found.models:
        made.add_row(
            quote(model.name),
            (model.commit or "embedded")[:12],
            _size(model.size_bytes),
            "yes" if model.has_weights else "not fetched",
            "used by this project" if model.pinned else "",
        )
    console.print(fit_words(console, made))


def show_removed(console: Console, removed: RemovedModels) -> None:
    for name in removed.removed:
        print_line(console, f"removed [bold]{quote(name)}[/]", soft_wrap=True)
    print_line(console, f"{_size(removed.freed_bytes)} are free again")


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
