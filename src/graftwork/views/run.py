"""What came of training: runs, their events, searches, federations, exports and base models."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.records.run import TrainOutcome
from graftwork.text.wording import plural, size
from graftwork.train.run_folder import PAGE
from graftwork.views.document import Cell, Document, State, quote
from graftwork.views.plan import view_residuals

if TYPE_CHECKING:
    from graftwork.model.base import LocalModels, PulledModel, RemovedModels
    from graftwork.pipeline.preflight import RewardCheck
    from graftwork.records.release import ExportedAdapter
    from graftwork.registry.export import MergedAdapter
    from graftwork.train.all_models import ModelResult, TrainedAll
    from graftwork.train.federated import Federation, FederationPlan
    from graftwork.train.runs import BackgroundRun, Event, StopResult
    from graftwork.train.sweep import SweepResult
    from graftwork.train.taskset_export import ExportedTaskset

REPLAYS = {True: "[green]with identical bytes[/]", False: "[red]with different bytes[/]", None: "none"}


def view_outcome(outcome: TrainOutcome) -> Document:
    viewed = Document(f"Run {outcome.run_id}")
    before, after = outcome.validation_loss_before, outcome.validation_loss_after
    held_out = f"; held-out {before:.3f} → {after:.3f}" if before is not None and after is not None else ""
    viewed.line(f"{outcome.steps} steps, loss {outcome.first_loss:.3f} → {outcome.final_loss:.3f}{held_out}")
    # Margins of pairs, or rewards of sampled answers: the first step against the last tenth.
    first = outcome.measures_first
    viewed.table(
        ("measured", "first step", "last steps"),
        [
            (quote(name), f"{first[name]:.4g}" if name in first else "–", f"{value:.4g}")
            for name, value in outcome.measures_last.items()
        ],
        right=("first step", "last steps"),
    )
    if outcome.restarts:
        viewed.line(
            f"restarted {outcome.restarts} time(s); {outcome.replayed_steps} steps repeated, "
            f"{REPLAYS[outcome.replay_identical]}"
        )
    if outcome.skipped_steps:
        viewed.line(
            f"[yellow]{outcome.skipped_steps} step(s) skipped: loss or gradient was not a "
            f"number[/]; the rows of {outcome.repeated_steps} were trained on again later"
        )
    best = next((look for look in outcome.looks if look.step == outcome.best_step), None)
    if best is not None:
        viewed.line(
            f"evaluated {len(outcome.looks)} time(s): {best.metric} was best after step {best.step}, "
            f"{best.value:.3f} over {best.cases} case(s)"
        )
    viewed.line("base weights unchanged (same hash before and after)")
    viewed.add(view_residuals(outcome.residuals))
    viewed.line(f"adapter [bold]{outcome.adapter_hash[:12]}[/] in {quote(outcome.adapter_folder)}")
    page = Path(outcome.adapter_folder).parent / PAGE
    if page.exists():
        viewed.line(f"training curves: {quote(page)}")
    return viewed


def view_background_run(run: "BackgroundRun") -> Document:
    viewed = Document("Background run")
    what = f"run [bold]{run.run}[/]" if run.run else "the project"
    if run.state == "nothing left to do":
        viewed.line(f"{what} is up to date: nothing to do")
        return viewed
    viewed.line(f"{what} {run.state} in the background (process {run.pid})")
    option = f" --run {run.run}" if run.run else ""
    viewed.line(f"  follow:  graft logs -f{option}", "  health:  graft status", "  stop:    graft stop")
    if run.log is not None:
        viewed.line(f"  output:  {quote(run.log)}", wrap=False)
    return viewed


def view_stop(stopped: "StopResult") -> Document:
    viewed = Document("Stopped run")
    if stopped.state == "not running":
        ended = f": run {stopped.run} is {stopped.run_state}" if stopped.run else ""
        viewed.line(f"nothing to stop{ended}")
        return viewed
    done, total = stopped.done or 0.0, stopped.total or 0.0
    progress = f" after step {done:.0f} of {total:.0f}" if total > 1 else ""
    viewed.line(f"{stopped.state}{progress}; run the same command again to resume from the last checkpoint")
    return viewed


EVENT_COLOURS = {"alert": "red", "message": "yellow", "checkpoint": "green", "evaluation": "cyan"}


def mark_up_event(event: "Event") -> str:
    """The time, the kind and the text of an event."""
    when = datetime.fromtimestamp(event.at).strftime("%H:%M:%S")
    colour = EVENT_COLOURS.get(event.kind, "dim")
    return f"[dim]{when}[/] [{colour}]{event.kind:<10}[/] {EVENT_TEXT[event.kind](event.body)}"


def _step(body: dict[str, Any]) -> str:
    speed = body["tokens"] / body["seconds"] if body["seconds"] else 0.0
    # What the objective measured, behind the figures of every run.
    measures = "".join(f", {quote(name)} {value:.3g}" for name, value in body.get("measures", {}).items())
    return (
        f"{body['step']}: loss {body['loss']:.4f}, gradient {body['gradient_norm']:.3g}, "
        f"rate {body['learning_rate']:.2g}, {body['seconds']:.2f} s, {speed:,.0f} tokens/s{measures}"
    )


def _evaluation(body: dict[str, Any]) -> str:
    better = " (best so far)" if body.get("better") else ""
    return f"after step {body['step']}: {quote(body['metric'])} {body['value']:.4f}{better}"


def _alert(body: dict[str, Any]) -> str:
    why = f": {quote(body['why'])}" if body.get("why") else ""
    return f"[bold]{quote(body['what'])}[/]{why}"


DEVICE_FIGURES = {
    "use_percent": "{:.0f} % use",
    "memory_gib": "{:.1f} GiB",
    "temperature_c": "{:.0f} °C",
    "power_watts": "{:.0f} W",
}


def _machine(body: dict[str, Any]) -> str:
    shown = [f"memory {body['memory_gib']:.2f} GiB"]
    if "memory_free_gib" in body:
        shown.append(f"{body['memory_free_gib']:.1f} GiB free")
    if "cpu_cores" in body:
        shown.append(f"{body['cpu_cores']:.1f} cores busy")
    for device in body.get("devices", []):
        figures = [
            text.format(device[name]) for name, text in DEVICE_FIGURES.items() if device.get(name) is not None
        ]
        shown.append(f"device {device['index']}: {', '.join(figures)}")
    return "; ".join(shown)


EVENT_TEXT: dict[str, Callable[[dict[str, Any]], str]] = {
    "step": _step,
    "evaluation": _evaluation,
    "alert": _alert,
    "machine": _machine,
    "message": lambda body: quote(body["message"]),
    "checkpoint": lambda body: f"after step {body['step']} ({quote(body['folder'])})",
    "output": lambda body: quote(body["text"]),
}


STATE_COLOURS = {"trained": "green", "unchanged": "dim", "failed": "red"}


def view_trained_all(trained: "TrainedAll") -> Document:
    viewed = Document(trained.project)
    several = len({model.base for model in trained.models if model.base}) > 1
    columns = ("model", "base", "rows", "steps", "loss on held-out rows", "minutes", "state")
    viewed.table(
        columns if several else (columns[0], *columns[2:]),
        [_trained(model, several=several) for model in trained.models],
        title=quote(trained.project),
        right=("rows", "steps", "minutes"),
    )
    for model in trained.failed:
        error = model.error or {}
        viewed.line(
            f"[red]{quote(model.model)}[/]: {quote(error.get('what', ''))}",
            *(
                f"  [dim]{label:<6}[/]{quote(error[label])}"
                for label in ("why", "fix", "where")
                if error.get(label)
            ),
        )
    viewed.line(f"[dim]{len(trained.models)} models in {trained.seconds / 60:.1f} minutes[/]")
    return viewed


def _trained(model: "ModelResult", *, several: bool) -> tuple[Cell, ...]:
    outcome = model.outcome
    figures: tuple[Cell, ...] = ("", "", "", "")
    if outcome is not None:
        before, after = outcome.validation_loss_before, outcome.validation_loss_after
        if before is None or after is None:
            # Without held-out rows, the losses of the first and the last step.
            before, after = outcome.first_loss, outcome.final_loss
        figures = (outcome.rows, outcome.steps, f"{before:.3f} → {after:.3f}", f"{model.minutes:.1f}")
    start = " from main" if outcome is not None and outcome.started_from else ""
    state = State(f"{model.state}{start}", STATE_COLOURS[model.state])
    return (quote(model.model), *([quote(model.base)] if several else []), *figures, state)


def view_exported(exported: "ExportedAdapter") -> Document:
    viewed = Document("Export")
    viewed.line(f"run [bold]{exported.run_id}[/] as {exported.format} in {quote(exported.folder)}")
    if exported.merged is not None:
        found = exported.merged.agreement
        viewed.line(
            f"[green]verified[/]: {exported.merged.merged_weights} weights merged; on {found.positions} "
            f"reply tokens of {found.rows} held-out rows the logits differ by at most "
            f"{found.largest_difference:.2g} (largest logit {found.largest_logit:.1f}, {found.dtype}), "
            f"the most likely token is the same at {found.same_first:.1%}"
        )
    if exported.gguf:
        gguf = exported.gguf
        viewed.line(
            f"[green]read back[/]: {gguf['tensors']} tensors, {gguf['blocks']} blocks, "
            f"{gguf['elements']:,} weights ({gguf['architecture']})"
        )
    viewed.line(
        *(f"[yellow]![/] {quote(message)}" for message in exported.words),
        "base files unchanged (same hashes before and after)",
        *(f"[dim]{digest[:12]}  {quote(name)}[/]" for name, digest in exported.files.items()),
    )
    return viewed


def view_merged(merged: "MergedAdapter") -> Document:
    viewed = Document("Merged adapter")
    viewed.line(
        f"[bold]{merged.method}[/] of {len(merged.parents)} adapters, rank {merged.rank}, "
        f"{merged.layers} layers, in {quote(merged.folder)}"
    )
    viewed.table(
        ("adapter", "weight", "trained tokens"),
        [(quote(parent.name), f"{parent.weight:.3f}", parent.trained_tokens) for parent in merged.parents],
        right=("weight", "trained tokens"),
    )
    if merged.method == "average":
        viewed.line(f"the rank holds at least {merged.kept:.1%} of the mean change of every layer")
    viewed.line(f"compare it: {quote(merged.evaluate)}")
    return viewed


def view_sweep(result: "SweepResult") -> Document:
    viewed = Document("Sweep")
    is_timed = result.budget_minutes is not None
    budget = f"{result.budget_minutes:g} minutes" if is_timed else f"{result.budget_steps} steps"
    where = "" if result.place == "here" else f" at {quote(result.place)}"
    device = f" on {quote(result.device)}" if result.device else ""
    viewed.line(
        f"[bold]sweep[/] of {quote(result.model)}{where}{device}: {result.minutes:.1f} minutes trained, "
        f"of a budget of {budget}"
    )
    rows: list[tuple[Cell, ...]] = []
    for trial in sorted(result.trials, key=lambda trial: (trial.rung, trial.loss is None, trial.loss or 0.0)):
        note = quote(f"{trial.state}: {trial.why}") if trial.why else ""
        if not note and trial.settings == result.now:
            note = "graft.yaml"
        loss = "" if trial.loss is None else f"{trial.loss:.4f}"
        rows.append(
            (
                str(trial.rung + 1),
                str(trial.rows),
                f"{trial.settings.learning_rate:g}",
                str(trial.settings.rank),
                str(trial.settings.batch_size),
                f"[bold green]{loss}[/]" if loss and trial.settings == result.best else loss,
                f"{trial.minutes:.1f}",
                note,
            )
        )
    columns = ("rung", "rows", "learning rate", "rank", "batch", "loss", "minutes", "")
    viewed.table(columns, rows, right=columns[:-1])
    if result.best is None:
        viewed.line("[yellow]![/] no trial finished: allow a larger budget")
    elif not result.changes:
        viewed.line("best: the settings of graft.yaml")
    else:
        changed = ", ".join(f"{key}: {value:g}" for key, value in result.changes.items())
        hint = "`--write` sets them in graft.yaml"
        done = f"written to {quote(result.written_to)}" if result.written_to else hint
        viewed.line(f"best: {quote(changed)}; {done}")
    return viewed


def view_federation_plan(plan: "FederationPlan") -> Document:
    viewed = Document("Federation")
    pull = f", proximal {plan.proximal:g}" if plan.proximal else ""
    viewed.line(
        f"[bold]federated[/] training of {quote(plan.model)}: {plan.rounds - plan.done} of {plan.rounds} "
        f"rounds left, {plan.quorum} of {len(plan.places)} places needed{pull}"
    )
    viewed.table(
        ("place", "where", "data there", "rows", "steps", "minutes", ""),
        [
            (
                quote(place.name),
                quote(place.place),
                quote(place.data),
                *(
                    ("", "", "", f"[yellow]{quote(place.why_not)}[/]")
                    if place.why_not
                    else (str(place.rows), str(place.steps), f"{place.minutes:.1f}", "a round")
                ),
            )
            for place in plan.places
        ],
        right=("rows", "steps", "minutes"),
    )
    viewed.line(
        f"about {plan.minutes:.1f} minutes, places at the same time, without evaluation",
        f"an adapter takes {plan.adapter_mb:.2g} MB, to each place and back in every round",
        *(f"  travels  {quote(line)}" for line in plan.travels),
        *(f"  stays    {quote(line)}" for line in plan.stays),
    )
    return viewed


def view_federation(done: "Federation") -> Document:
    viewed = Document("Federation")
    rows: list[tuple[Cell, ...]] = []
    for turn in done.rounds:
        number, gate = str(turn.number), (turn.decision or "").replace("_", " ")
        for place in turn.places:
            loss = "" if place.loss is None else f"{place.loss:.4f}"
            before = "" if place.loss_before is None else f"{place.loss_before:.4f} → "
            counts = (str(place.rows), str(place.steps), f"{place.weight:.3f}")
            rows.append((number, quote(place.name), *counts, before + loss, gate))
            gate = ""
        for name, why in turn.left_out.items():
            rows.append((number, quote(name), "", "", "", f"[yellow]left out: {quote(why)}[/]", ""))
    viewed.table(
        ("round", "place", "rows", "steps", "weight", "loss there", "gate"),
        rows,
        right=("round", "rows", "steps", "weight"),
    )
    viewed.line(f"adapter: {quote(done.adapter)}", wrap=False)
    if done.release:
        viewed.line(f"release it: {quote(done.release)}", wrap=False)
    return viewed


def view_pulled(pulled: "PulledModel") -> Document:
    viewed = Document(pulled.name)
    viewed.line(
        f"[bold]{quote(pulled.name)}[/] at {pulled.commit[:12]}: {pulled.files} files, "
        f"{size(pulled.size_bytes)}"
    )
    viewed.line(f"[dim]{quote(pulled.folder)}[/]", wrap=False)
    if pulled.moved_to:
        viewed.line(
            f"[yellow]![/] the revision has moved to {pulled.moved_to[:12]}; this project stays where it is. "
            "`graft model pull --update` moves it."
        )
    return viewed


def view_models(found: "LocalModels") -> Document:
    viewed = Document("Base models")
    viewed.table(
        ("model", "commit", "size", "weights", ""),
        [
            (
                quote(model.name),
                (model.commit or "embedded")[:12],
                size(model.size_bytes),
                "yes" if model.has_weights else "not fetched",
                "used by this project" if model.pinned else "",
            )
            for model in found.models
        ],
        right=("size",),
    )
    if not found.models:
        viewed.line("no base model is on this machine; `graft model pull NAME` fetches one")
    return viewed


def view_removed(removed: "RemovedModels") -> Document:
    viewed = Document("Base models")
    viewed.line(*(f"removed [bold]{quote(name)}[/]" for name in removed.removed), wrap=False)
    viewed.line(f"{size(removed.freed_bytes)} are free again")
    return viewed


MOST_ANSWERS = 40


def view_reward_check(check: "RewardCheck") -> Document:
    viewed = Document("Reward check")
    ungraded = "references are not graded" if check.references else "no prompt has a reference"
    gold = ungraded if check.gold is None else f"references get {check.gold:.2f}"
    rewarded = len({item.name for item in check.rewarded})
    viewed.line(
        f"{check.hacks} hacks on {plural(check.cases, 'prompt')}: {rewarded} rewarded; {gold}; "
        f"{check.seconds_per_answer:.2f} s an answer"
    )
    rows = []
    for item in (*check.gold_failed, *check.rewarded)[:MOST_ANSWERS]:
        parts = [f"{name} {value:.2f}" for name, value in item.parts.items() if value is not None]
        rows.append((quote(item.case), quote(item.name), f"{item.reward:.2f}", quote(", ".join(parts))))
    viewed.table(("prompt", "answer", "reward", "parts"), rows, right=("reward",))
    for (metric, failure), answers in check.failures.items():
        has_reference = any(answer.is_reference for answer in answers)
        which = "of which a reference" if has_reference else "no reference"
        count = plural(len(answers), "answer")
        viewed.line(f"[yellow]{quote(metric)}[/] could not grade {count} ({which}): {quote(failure)}")
    reason = check.reason
    if reason is None:
        viewed.line("[green]the rewards hold[/]")
    else:
        viewed.line(f"[red]the rewards do not hold[/]: {quote(reason.why)}", f"fix: {quote(reason.fix)}")
    return viewed


def view_taskset(exported: "ExportedTaskset") -> Document:
    viewed = Document("Task set")
    rewards = ", ".join(map(quote, exported.rewards))
    viewed.line(f"{exported.tasks} tasks with {rewards}: {quote(exported.folder)}")
    viewed.line(*(f"copied {quote(file)}" for file in exported.files))
    name = quote(exported.name)
    viewed.line(f"next: pip install -e {quote(exported.folder)}, then vf-eval {name} -n 3")
    return viewed
