"""Plans: of a run, of serving and of a week; whether they fit a machine, and what was measured there."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.grading.metrics import name_of
from graftwork.plan.serving_question import SLOW_SECONDS, FormRow, ServeAnswer, SpecialistRow, say_seconds
from graftwork.records.base import Figure
from graftwork.records.plan import Considered, FitAnswer, Plan, ProbeFacts, Residual, RunPlan, Strategy
from graftwork.records.week import WeekSchedule
from graftwork.text.wording import duration, figure_text, plural
from graftwork.views.document import Bar, Cell, Document, Gantt, Meter, State, Table, quote

if TYPE_CHECKING:
    from graftwork.evaluate.preflight import MetricTrial
    from graftwork.pipeline.preflight import Preflight
    from graftwork.plan.bases import BaseProposal
    from graftwork.plan.lint.project import Linted
    from graftwork.plan.project import PastResiduals


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


def view_plan(plan: Plan) -> Document:
    viewed = Document("Plan")
    viewed.line(
        f"{plan.method} on [bold]{quote(plan.base)}[/], {plan.dtype}, {plan.device.name} "
        f"({plan.device.threads} threads); certainty: {plan.certainty}"
    )
    figures: dict[str, Figure] = {title: getattr(plan, name) for name, title in NAMES.items()}
    viewed.table(
        ("figure", "planned", "range"),
        [(title, _planned(figure), _spread(figure)) for title, figure in figures.items()],
        right=("planned",),
    )
    if plan.base_note:
        viewed.line(f"[yellow]base:[/] {quote(plan.base_note)}")
    viewed.line(*(f"[dim]{quote(note)}[/]" for note in plan.notes))
    return viewed


BASE_COLUMNS = ("base", "license", "for this task", "memory", "training", "")


def view_bases(proposal: "BaseProposal", *, base: str) -> Document:
    """The bases that were weighed for this log and machine; then the chosen one, and what it can do."""
    viewed = Document("Base")
    viewed.table(
        BASE_COLUMNS,
        [
            (
                quote(f"→ {option.name}" if option.name == proposal.chosen else f"  {option.name}"),
                quote(option.license),
                option.grade,
                f"{option.gib.value:.1f} GiB",
                duration(60 * option.minutes.value),
                quote(option.note),
            )
            for option in proposal.options
        ],
        right=("memory", "training"),
        title=f"bases on {proposal.machine}, planned",
    )
    viewed.line(f"[bold]base {quote(base)}[/]: {quote(proposal.why)}")
    if (option := proposal.option) is not None:
        viewed.line(f"good for: {quote(option.good_for)}", f"not for: {quote(option.not_for)}")
    viewed.line(
        "[dim]other bases: `--base NAME`; for another machine: `--gpu NAME`. The grades are judged by size; "
        "`graft run --quick` measures one in minutes[/]"
    )
    return viewed


def _planned(figure: Figure) -> str:
    return f"{figure_text(figure.value)} {figure.unit}".strip()


def _spread(figure: Figure) -> str:
    return "" if figure.low == figure.high else f"{figure_text(figure.low)} … {figure_text(figure.high)}"


def view_residuals(residuals: Sequence[Residual]) -> Document:
    """Planned and actual figures of a run, and of their parts."""
    viewed = Document("Plan against reality")
    columns = ("figure", "planned", "range", "actual", "error")
    viewed.table(columns, map(_residual, residuals), right=("planned", "actual", "error"))
    return viewed


def _residual(residual: Residual) -> tuple[str, ...]:
    return (
        _name_figure(residual.name),
        _planned(residual.planned),
        _spread(residual.planned),
        f"[{'green' if residual.inside else 'yellow'}]{figure_text(residual.actual)}[/]",
        f"{100 * residual.off:+.0f} %",
    )


def view_run_plan(plan: RunPlan) -> Document:
    """Estimated time of each step and of the whole run."""
    viewed, rows = Document("Run"), list[tuple[str, ...]]()
    for stage in plan.stages:
        figure = stage.seconds
        if figure.value == 0:
            rows.append((stage.stage, "", "", f"[dim]{stage.state}[/]"))
            continue
        state = "" if stage.state == "to do" else stage.state
        spread = f"{duration(figure.low)} … {duration(figure.high)}"
        rows.append((stage.stage, duration(figure.value), spread, state))
    whole = plan.minutes
    spread = f"{duration(60 * whole.low)} … {duration(60 * whole.high)}"
    rows.append(("[bold]whole run[/]", f"[bold]{duration(60 * whole.value)}[/]", spread, ""))
    viewed.table(("step", "planned", "range", ""), rows, right=("planned",))
    if plan.rough:
        viewed.line(
            "[dim]rough estimate from the size of the logs: the dataset is not prepared yet[/]",
        )
    if hint := _how_to_shorten(plan):
        viewed.line(hint)
    return viewed


def view_past(found: "PastResiduals") -> Document:
    """The figures of each run, then the bias over all runs."""
    viewed, rows = Document("Past runs"), list[tuple[str, ...]]()
    if not found.runs:
        viewed.line("no run of this project has finished yet: `graft train` starts one")
        return viewed
    for run in found.runs:
        first = (f"{quote(run.run_id)}\n[dim]{quote(run.recorded_at[:16])}[/]", quote(run.device))
        for residual in run.residuals:
            planned = residual.planned
            if "." in residual.name or planned.low == planned.high == residual.actual:
                # Parts are in the JSON and on the page of the run; exact figures are not estimates.
                continue
            rows.append((*first, *_residual(residual)))
            first = ("", "")
    columns = ("run", "on", "figure", "planned", "range", "actual", "error")
    viewed.table(columns, rows, right=("planned", "error"))
    viewed.table(
        ("bias over past runs", "runs", "median", "range", "within the planned range"),
        [
            (
                _name_figure(bias.figure),
                str(bias.runs),
                f"{100 * bias.off.value:+.0f} %",
                f"{100 * bias.off.low:+.0f} … {100 * bias.off.high:+.0f} %",
                f"{100 * bias.inside.value:.0f} %",
            )
            for bias in found.biases
        ],
        right=("runs",),
    )
    return viewed


def _name_figure(figure: str) -> str:
    whole, _, part = figure.partition(".")
    title = NAMES.get(whole, whole)
    return f"[dim]{title}: {quote(part)}[/]" if part else title


def view_preflight(found: "Preflight") -> Document:
    viewed = Document("Preflight")
    cases = f"{plural(found.cases, 'held-out case')} after the split"
    viewed.line(f"{cases}. {quote(found.power)}".rstrip())
    # The score of each metric on correct answers and on corrupted ones.
    viewed.table(
        ("metric", "cases", "log replies", "corrupted", "constant answer"),
        map(_trial, found.metrics),
        right=("cases",),
    )
    for problem in found.problems:
        mark = "[red]✗[/]" if problem.severity == "error" else "[yellow]![/]"
        why = f": {quote(problem.why)}" if problem.why else ""
        viewed.line(f"{mark} {quote(problem.what)}{why}")
        if problem.fix:
            viewed.line(f"  [dim]fix:[/] {quote(problem.fix)}")
    viewed.add(view_run_plan(found.run))
    if found.errors:
        viewed.line(f"[bold red]not ready[/]: {plural(len(found.errors), 'error')}")
    else:
        viewed.line("[bold green]ready[/]: `graft run` trains, evaluates and gates.")
    return viewed


def _trial(trial: "MetricTrial") -> tuple[str, ...]:
    graded = (trial.own, trial.spoiled, trial.constant)
    shares = ("–" if share is None else f"{100 * share:.1f} %" for share in graded)
    return quote(name_of(trial.name)), str(trial.cases), *shares


LONG_RUN_MINUTES = 240.0
SHORTER = {
    "train": "train.epochs, train.max_rows, train.upper_layers, data.max_tokens",
    "evaluate": "evaluate.max_cases, evaluate.max_new_tokens, data.test",
}
"""Settings that shorten a stage."""


def _how_to_shorten(run: RunPlan) -> str | None:
    """The settings that shorten the longest stage, and the trial that takes minutes."""
    longest = max(run.stages, key=lambda stage: stage.seconds.value, default=None)
    if longest is None or not run.minutes.value:
        return None
    settings = SHORTER.get(longest.stage)
    lower = f"lower {settings} to shorten it; " if settings else ""
    trial = "`graft run --quick` tries a part in minutes"
    if run.minutes.value < LONG_RUN_MINUTES:
        return f"[dim]{lower}{trial}[/]"
    return f"a long run: {lower}{trial}; `graft plan compare` estimates it on other machines"


WAYS_SHOWN, PARTS_SHOWN, SMALLEST_SHOWN = 4, 6, 0.005
LONG_MINUTES = 120.0
PROBE_ADVICE = "`graft plan probe` on the machine, or --trace, makes it more certain"


def view_fit(answer: FitAnswer, *, files: Sequence[Path] = ()) -> Document:
    """Verdict, memory, time, strategy and alternatives on one screen."""
    viewed = Document("Fit")
    mark = "[bold green]✓[/]" if answer.fits else "[bold red]✗[/]"
    viewed.line(f"{mark} [bold]{quote(answer.verdict)}[/]", wrap=False)
    _add_memory(viewed, answer)
    _add_time(viewed, answer)
    viewed.line(
        f"[bold]strategy[/]  {quote(_say_strategy(answer.strategy))}",
        *(f"  [dim]·[/] {quote(reason)}" for reason in answer.reasons),
        wrap=False,
    )
    if not answer.fits and not answer.remedies:
        viewed.line("[red]nothing that was tried makes it fit[/]: method, length, GPUs, smaller models")
    considered = answer.considered
    if len(considered) > WAYS_SHOWN:
        # The last one is of another engine.
        considered = (*considered[: WAYS_SHOWN - 1], considered[-1])
    for title, ways in (("what would make it fit", answer.remedies), ("also considered", considered)):
        figures = ("GiB a GPU", "on the host", "tokens/s")
        viewed.table((title, "", *figures), map(_way, ways), right=figures)
    viewed.line(*(f"written: {quote(path)}" for path in files), wrap=False)
    if answer.certainty == "computed":
        viewed.line(f"[dim]certainty: {answer.certainty}; {PROBE_ADVICE}[/]", wrap=False)
    return viewed


def _add_memory(viewed: Document, answer: FitAnswer) -> None:
    """Parts of the peak memory as bars, scaled to the device."""
    room = max(answer.gpu_gib.value, answer.peak_reserved_gib.value, 1e-9)
    reserved, machine = answer.peak_reserved_gib, answer.question.machine
    rows: list[tuple[Cell, ...]] = [
        (name, short_number(value), "", Meter(value / room, "cyan")) for name, value in _main_parts(answer)
    ]
    colour = "green" if answer.fits else "red"
    rows.append(
        (
            "[bold]all of it[/]",
            f"[bold]{short_number(reserved.value)}[/]",
            _short_spread(reserved),
            Meter(reserved.value / room, colour, f"of {short_number(answer.gpu_gib.value)}"),
        )
    )
    if machine.gpu is not None:
        host, ram = answer.host_gib, machine.ram_gib
        bar = Meter(host.value / ram, "dim", f"of {short_number(ram)}")
        rows.append(("on the host", short_number(host.value), _short_spread(host), bar))
    viewed.table(("memory", "GiB", "range", ""), rows, right=("GiB",))


def _main_parts(answer: FitAnswer) -> list[tuple[str, float]]:
    """The largest parts, the sum of the small ones, and the overhead of the allocator."""
    parts = {name: figure.value for name, figure in answer.parts_gib.items()}
    allocator_gib = parts.pop("allocator", 0.0)
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    main, small = ordered[:PARTS_SHOWN], sum(value for _, value in ordered[PARTS_SHOWN:])
    rest = [("small parts", small), ("allocator", allocator_gib)]
    return [(name, value) for name, value in [*main, *rest] if value >= SMALLEST_SHOWN]


def _add_time(viewed: Document, answer: FitAnswer) -> None:
    unit, of_it = ("hours", 1 / 60) if answer.run_minutes.value >= LONG_MINUTES else ("minutes", 1.0)

    def scale(minutes: Figure) -> Figure:
        return Figure(value=of_it * minutes.value, low=of_it * minutes.low, high=of_it * minutes.high)

    figures = (
        ("tokens per second", answer.tokens_per_second),
        ("seconds per step", answer.step_seconds),
        (f"{unit} an epoch", scale(answer.epoch_minutes)),
        (f"{unit} a run ({answer.steps.value:,.0f} steps)", scale(answer.run_minutes)),
    )
    rows = [(name, short_number(figure.value), _short_spread(figure)) for name, figure in figures]
    if answer.fits:
        # A run that does not fit fails at the start.
        chance = answer.late_oom_chance
        text = "none" if chance.high < 0.001 else f"{100 * chance.value:.1f} %"
        spread = "" if text == "none" else f"{100 * chance.low:.1f} … {100 * chance.high:.1f} %"
        rows.append(("late out-of-memory", text, spread))
    viewed.table(("time", "", "range"), rows, right=("",))


def _way(way: Considered) -> tuple[str | State, ...]:
    return (
        quote(way.name),
        State("fits", "green") if way.fits else State("no", "red"),
        f"{short_number(way.peak_reserved_gib.value)} of {short_number(way.gpu_gib.value)}",
        short_number(way.host_gib.value),
        short_number(way.tokens_per_second.value),
    )


def _say_strategy(strategy: Strategy) -> str:
    """The strategy in one line."""
    titles = {"none": "one GPU", "ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
    checkpointed = f"{plural(strategy.checkpointed_layers, 'layer')} checkpointed"
    parts = [
        titles[strategy.sharding],
        f"weights in {strategy.weights}, {strategy.precision}",
        f"{strategy.micro_tokens:,} tokens at a time × {strategy.accumulation}",
        checkpointed if strategy.checkpointed_layers else "nothing checkpointed",
    ]
    if strategy.streamed is not None:
        parts[-1] = "layers streamed"
    if strategy.offload != "none":
        parts.append(
            f"{strategy.offload} on the host"
            if strategy.offload == "optimizer"
            else "weights and optimizer on the host"
        )
    parts.append("packed" if strategy.packing else "padded")
    return " · ".join(parts)


def _short_spread(figure: Figure) -> str:
    return "" if figure.low == figure.high else f"{short_number(figure.low)} … {short_number(figure.high)}"


def short_number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


STATES = {
    "yes": State("yes", "green"),
    "likely": State("likely", "yellow"),
    "unlikely": State("unlikely", "red"),
    "no": State("no", "red"),
}
SMALL = 0.01
"""Parts below this share are not shown."""


def view_serving(answer: ServeAnswer) -> Document:
    viewed, question = Document("Serving"), answer.question
    mark = "[bold green]✓[/]" if answer.good else "[bold red]✗[/]"
    if answer.good and question.limit_seconds is None and answer.answer_seconds.value >= SLOW_SECONDS:
        mark = "[bold yellow]![/]"
    viewed.line(
        f"{mark} [bold]{quote(answer.verdict)}[/]",
        *(f"  → {quote(advice)}" for advice in answer.advice),
        wrap=False,
    )
    count = f"{question.copies} × " if question.copies > 1 else ""
    extra = f" with {question.adapters} adapters of rank {question.rank}" if question.adapters else ""
    what = f"{count}{quote(question.model)}{extra} on {quote(question.machine.name)}"
    viewed.line(f"[dim]{what}; engine: {question.engine}; certainty: {answer.certainty}[/]")
    viewed.table(("figure", "planned", "range", "of which"), _serving_figures(answer), right=("planned",))
    limited = question.limit_seconds is not None
    columns = ("weights", "format", "memory", "fits", "first token", "each token", "an answer")
    viewed.table(
        (*columns, *(("in time",) if limited else ())),
        [_form(row, limited=limited) for row in answer.quantisations],
        right=("memory", *columns[4:]),
    )
    if question.adapters or question.copies > 1:
        _add_specialists(viewed, answer.specialists)
    viewed.line(*(f"[dim]{quote(note)}[/]" for note in answer.notes), wrap=False)
    return viewed


def _serving_figures(answer: ServeAnswer) -> list[tuple[str, str, str, str]]:
    def seconds(name: str, figure: Figure, of_which: str = "") -> tuple[str, str, str, str]:
        spread = f"{say_seconds(figure.low)} … {say_seconds(figure.high)}"
        return name, say_seconds(figure.value), spread, of_which

    def count(name: str, figure: Figure, unit: str = "") -> tuple[str, str, str, str]:
        spread = "" if figure.low == figure.high else f"{figure.low:,.0f} … {figure.high:,.0f}"
        return name, f"{figure.value:,.0f}{unit}", spread, ""

    def spread(figure: Figure) -> str:
        return f"{_number(figure.low)} … {_number(figure.high)}"

    rows = [
        (
            "memory of each GPU" if answer.question.gpus > 1 else "memory",
            f"{answer.memory_gib.value:.1f} of {answer.available_gib.value:.1f} GiB",
            spread(answer.memory_gib),
            _list_parts(answer.parts_gib, lambda value: f"{value:.1f}"),
        ),
        seconds("first token", answer.first_token_alone_seconds),
    ]
    if answer.question.users > 1:
        rows.append(seconds("… all at once", answer.first_token_seconds))
    rate = answer.tokens_per_second
    rows += [
        seconds("each token", answer.token_seconds),
        seconds("an answer", answer.answer_seconds, _list_parts(answer.parts_seconds, say_seconds)),
        ("all users", f"{_number(rate.value)} tokens/s", spread(rate), ""),
        count("most users that fit", answer.most_users),
    ]
    if answer.most_users_in_time is not None:
        rows.append(count("… and are in time", answer.most_users_in_time))
    return [*rows, count("longest context", answer.longest_context, " tokens")]


def _form(row: FormRow, *, limited: bool) -> list[str | State]:
    latency = row.latency
    cells: list[str | State] = [
        f"[bold]{row.form}[/]" if row.chosen else row.form,
        row.format,
        f"{row.holding.memory_gib.value:.1f} GiB",
        STATES[row.holding.fits],
        say_seconds(latency.first_token_seconds.value),
        say_seconds(latency.token_seconds.value),
        say_seconds(latency.answer_seconds.value),
    ]
    return [*cells, STATES[row.meets_limit]] if limited and row.meets_limit is not None else cells


def _add_specialists(viewed: Document, specialists: tuple[SpecialistRow, ...]) -> None:
    asked = specialists[0].asked
    columns = ("a model", f"× {asked}", "in all", "fit", "an adapter", f"base + {asked}", "fit ")
    viewed.table(
        ("specialists", *columns),
        [
            (
                row.form,
                f"{row.one_model_gib.value:.1f}",
                f"{asked * row.one_model_gib.value:.1f}",
                f"{row.asked_whole_gib.value:.1f}",
                f"[bold]{row.whole_models.value:,.0f}[/]",
                f"{row.one_adapter_gib.value:.2f}",
                f"{row.asked_adapters_gib.value:.1f}",
                f"[bold]{row.adapters.value:,.0f}[/]",
            )
            for row in specialists
        ],
        right=columns,
    )
    viewed.line("[dim]in GiB; in all and base: with cache, workspace and runtime; fit: how many fit[/]")


def _list_parts(parts: dict[str, Figure], say: Callable[[float], str]) -> str:
    """The large parts, largest first."""
    whole = sum(part.value for part in parts.values())
    shown = [(name, part.value) for name, part in parts.items() if part.value > whole * SMALL]
    return ", ".join(f"{name} {say(value)}" for name, value in sorted(shown, key=lambda part: -part[1]))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


PROBE_NAMES = {
    "products_bfloat16_tflops": "products in bfloat16",
    "products_float16_tflops": "products in float16",
    "products_float32_gflops": "products in float32",
    "products_fp8_tflops": "products in 8 bits",
    "memory_gb_s": "memory, read and written",
    "to_device_gb_s": "host to GPU, pinned",
    "from_device_gb_s": "GPU to host, pinned",
    "context_gib": "the context's memory",
    "launch_microseconds": "calling a kernel",
    "disk_write_mb_s": "disk, written through",
    "disk_read_mb_s": "disk, read",
    "tokens_per_second": "training the whole model",
}


def view_probe(facts: ProbeFacts, figures: Mapping[str, Figure], files: Sequence[Path]) -> Document:
    viewed = Document("Probe")
    driver = f", driver {facts.device.driver}" if facts.device.driver else ""
    viewed.line(
        f"[bold]{quote(facts.device.name)}[/]{quote(driver)}, torch {quote(facts.device.torch)}, "
        f"at the sizes of {quote(facts.shape.name)}; certainty: probed, in {facts.seconds:.0f} s"
    )
    viewed.table(
        ("measured", "value", "range"),
        [
            (
                PROBE_NAMES.get(name, name),
                f"{figure_text(figure.value)} {figure.unit}",
                f"{figure_text(figure.low)} … {figure_text(figure.high)}",
            )
            for name, figure in figures.items()
        ],
        right=("value",),
    )
    viewed.line(
        *(
            f"a step of {step.layers} layers and {step.tokens:,} tokens: {1000 * step.seconds:.0f} ms"
            for step in facts.steps
        ),
        *(f"[yellow]left out[/]: {quote(missing)}" for missing in facts.left_out),
        f"[dim]kept in {quote(files[0].parent)}[/]",
    )
    return viewed


SHOWN_CHANGES = 6


def view_week(schedule: WeekSchedule, *, proposal: Document | None = None) -> Document:
    """With the `proposal` that the plan is compared with."""
    viewed = Document(f"Week of {schedule.start:%d %b %Y}")
    first, last = schedule.start.strftime("%a %d %b %Y %H:%M"), schedule.end.strftime("%a %d %b %H:%M")
    missed = f"a gap of {100 * schedule.best_gap:.1f} % by the solver"
    state = missed if schedule.best_bound > schedule.value * (1 + 1e-6) else "optimal"
    cap = f" of ${schedule.cap_usd:.2f}" if schedule.cap_usd is not None else ""
    viewed.line(
        f"[bold]{first} to {last}[/] ({quote(schedule.timezone)}), {schedule.scenario}",
        f"value [bold]{schedule.value:.2f}[/] of 100 points, bound {schedule.best_bound:.2f}: {state}; "
        f"${schedule.cost_usd:.2f}{cap}",
    )
    viewed.add(draw_week(schedule), list_sessions(schedule))
    columns = ("model", "sessions", "hours", "inherited", "learned", "points", "one more hour", "curve")
    viewed.table(
        columns,
        [
            (
                quote(model.model),
                model.sessions,
                f"{model.hours:.1f}",
                f"{model.inherited_hours:.1f}" if model.inherited_hours else "–",
                f"{100 * model.learned_after:.0f} %",
                f"{model.value:.2f}",
                f"+{model.another_hour:.2f}",
                quote(f"half in {model.half_hours:.3g} h, {model.curve}"),
            )
            for model in schedule.models
        ],
        right=columns[1:-1],
    )
    place_columns = ("place", "sessions", "used", "of which training", "left", "cost")
    viewed.table(
        place_columns,
        [
            (
                quote(place.place),
                place.sessions,
                f"{place.used_hours:.1f} of {place.offered_hours:.1f} h",
                f"{place.trained_hours:.1f} h",
                f"{place.left_hours:.1f} h",
                f"${place.cost_usd:.2f}" if place.cost_usd else "–",
            )
            for place in schedule.places
        ],
        right=place_columns[1:],
    )
    scenario_columns = ("scenario", "value", "bound", "gap", "cost", "greedy", "first plan", "seconds")
    viewed.table(
        scenario_columns,
        [
            (
                f"[bold]{found.scenario}[/]" if found.scenario == schedule.scenario else found.scenario,
                f"{found.value:.2f}",
                f"{found.bound:.2f}",
                f"{100 * found.gap:.1f} %",
                f"${found.cost_usd:.2f}",
                f"{found.greedy_value:.2f}" if found.greedy_value is not None else "none",
                f"{found.first_seconds:.2f} s",
                f"{found.seconds:.1f}",
            )
            for found in schedule.scenarios
        ],
        right=scenario_columns[1:],
    )
    viewed.items(
        (f"+{change.gain:.2f} points  {quote(change.change)}" for change in schedule.what_if[:SHOWN_CHANGES]),
        title="What would change it most",
    )
    viewed.items(
        (
            f"{quote(check.assumption)}: this plan is {100 * check.loss:.1f} % below one made for that "
            f"({check.best_scenario})"
            for check in schedule.curve_checks
        ),
        title="If an assumption is wrong",
    )
    viewed.add(proposal)
    viewed.items(map(quote, schedule.assumptions), title="Assumed")
    viewed.items(map(quote, schedule.notes), title="Note")
    return viewed


def draw_week(schedule: WeekSchedule) -> Gantt:
    order = list(dict.fromkeys([p.place for p in schedule.places] + [s.place for s in schedule.sessions]))
    lanes = {(place, 0) for place in order} | {(s.place, s.lane) for s in schedule.sessions}
    models = dict.fromkeys([m.model for m in schedule.models] + [s.model for s in schedule.sessions])
    return Gantt(
        title="The week",
        start=schedule.start,
        end=schedule.end,
        lanes=[_lane(*lane) for lane in sorted(lanes, key=lambda lane: (order.index(lane[0]), lane[1]))],
        names=list(models),
        bars=[
            Bar(
                lane=_lane(session.place, session.lane),
                name=session.model,
                start=session.starts_at.timestamp(),
                end=session.ends_at.timestamp(),
                title=f"{session.model} at {session.place}: {session.starts_at:%a %H:%M} to "
                f"{session.ends_at:%a %H:%M}, {session.train / 60:.1f} h of training",
                done=session.fixed,
                outlined=session.by_hand,
            )
            for session in schedule.sessions
        ],
        now=schedule.now,
    )


def _lane(place: str, lane: int) -> str:
    return f"{place} {lane + 1}" if lane else place


def list_sessions(schedule: WeekSchedule) -> Table:
    inherited = {model.model for model in schedule.models if model.inherited_hours > 0}
    rows = []
    for session in schedule.sessions:
        notes = (
            "kept" if session.fixed else "",
            "start by hand" if session.by_hand and not session.fixed else "",
            "from the main model's adapter" if session.round and session.model in inherited else "",
        )
        rows.append(
            (
                f"{session.starts_at:%a %H:%M} – {session.ends_at:%a %H:%M}",
                quote(session.place),
                quote(session.model),
                f"{session.train / 60:.1f} h",
                f"${session.cost_usd:.2f}" if session.cost_usd else "",
                "; ".join(filter(None, notes)),
            )
        )
    columns = ("when", "place", "model", "training", "cost", "note")
    return Table(columns, rows, right=("training", "cost"))


LINT_MARKS = {"error": "[red]✗[/]", "warning": "[yellow]![/]", "note": "[dim]·[/]"}


def view_lint(linted: "Linted") -> Document:
    viewed = Document("Lint")
    for finding in linted.findings:
        key = f" [dim]({quote(finding.key)})[/]" if finding.key else ""
        source = f", {quote(finding.source)}" if finding.source else ""
        viewed.line(
            f"{LINT_MARKS[finding.severity]} [bold]{quote(finding.what)}[/]",
            f"  [dim]where[/] {quote(finding.where)}{key}",
            f"  [dim]why[/]   {quote(finding.why)}",
            f"  [dim]fix[/]   {quote(finding.fix)}",
            f"  [dim]rule  {finding.rule}{source}[/]",
            wrap=False,
        )
    viewed.line(*(f"[dim]? not checked: {quote(gap)}[/]" for gap in linted.unknown), wrap=False)
    counts = {kind: sum(finding.severity == kind for finding in linted.findings) for kind in LINT_MARKS}
    summary = ", ".join(plural(count, kind) for kind, count in counts.items() if count)
    viewed.line(f"{quote(linted.file)} ({linted.kind}): {summary or 'no problems found'}", wrap=False)
    return viewed
