"""Answers of the planner as tables: fit, serving, probe, past residuals, preflight."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from graftwork.cli.show.training import NAMES, number, show_run_plan
from graftwork.grading.metrics import name_of
from graftwork.plan.serving.question import SLOW_SECONDS, FormRow, ServeAnswer, SpecialistRow, say_seconds
from graftwork.records.base import Figure
from graftwork.records.plan import Considered, FitAnswer, ProbeFacts, RunPlan, Strategy
from graftwork.text.wording import plural
from graftwork.views.document import quote
from graftwork.views.terminal import PlainTable, percent, print_line, table

if TYPE_CHECKING:
    from graftwork.pipeline.preflight import Preflight
    from graftwork.pipeline.run_plan import PastResiduals

BAR = 32
WAYS_SHOWN, PARTS_SHOWN, SMALLEST_SHOWN = 4, 6, 0.005
LONG_MINUTES = 120.0
EIGHTHS = " ▏▎▍▌▋▊▉"
ADVICE = {
    "computed": "`graft plan probe` on the machine, or --trace, makes it more certain",
    "traced": "",
    "probed": "",
}


def show_fit(console: Console, answer: FitAnswer, *, files: Sequence[Path] = ()) -> None:
    """Verdict, memory, time, strategy and alternatives on one screen."""
    mark = "[bold green]✓[/]" if answer.fits else "[bold red]✗[/]"
    print_line(console, f"{mark} [bold]{escape(answer.verdict)}[/]", soft_wrap=True)
    console.print(_memory(answer))
    console.print(_time(answer))
    print_line(console, f"[bold]strategy[/]  {escape(say_strategy(answer.strategy))}", soft_wrap=True)
    for reason in answer.reasons:
        print_line(console, f"  [dim]·[/] {escape(reason)}", soft_wrap=True)
    if answer.remedies:
        console.print(_ways("what would make it fit", answer.remedies))
    elif not answer.fits:
        print_line(
            console, "[red]nothing that was tried makes it fit[/]: method, length, cards, smaller models"
        )
    if answer.considered:
        console.print(_ways("also considered", shown(answer.considered)))
    for path in files:
        print_line(console, f"written: {escape(str(path))}", soft_wrap=True)
    if note := ADVICE[answer.certainty]:
        print_line(console, f"[dim]certainty: {answer.certainty}; {note}[/]", soft_wrap=True)


def _memory(answer: FitAnswer) -> PlainTable:
    """Parts of the peak memory as bars, scaled to the device."""
    room = max(answer.card_gib.value, answer.peak_reserved_gib.value, 1e-9)
    rows = table("memory", "GiB", "range", "", right=("GiB",))
    for name, value in main_parts(answer):
        rows.add_row(name, short_number(value), "", f"[cyan]{bar(value / room)}[/]")
    reserved, card = answer.peak_reserved_gib, answer.card_gib
    colour = "green" if answer.fits else "red"
    alone = answer.question.machine.gpu is None
    rows.add_row(
        "[bold]all of it[/]",
        f"[bold]{short_number(reserved.value)}[/]",
        spread(reserved),
        f"[{colour}]{bar(reserved.value / room)}[/] of {short_number(card.value)}",
    )
    if not alone:
        ram = answer.question.machine.ram_gib
        rows.add_row(
            "on the host",
            short_number(answer.host_gib.value),
            spread(answer.host_gib),
            f"[dim]{bar(min(answer.host_gib.value / ram, 1.0))}[/] of {short_number(ram)}",
        )
    return rows


def main_parts(answer: FitAnswer) -> list[tuple[str, float]]:
    """The largest parts, the sum of the small ones, and the overhead of the allocator."""
    parts = {name: figure.value for name, figure in answer.parts_gib.items()}
    beyond = parts.pop("allocator", 0.0)
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    main, small = ordered[:PARTS_SHOWN], sum(value for _, value in ordered[PARTS_SHOWN:])
    rest = [("small parts", small), ("allocator", beyond)]
    return [(name, value) for name, value in [*main, *rest] if value >= SMALLEST_SHOWN]


def _time(answer: FitAnswer) -> PlainTable:
    rows = table("time", "", "range", right=("",))
    unit, of_it = ("hours", 1 / 60) if answer.run_minutes.value >= LONG_MINUTES else ("minutes", 1.0)
    for name, figure in (
        ("tokens a second", answer.tokens_per_second),
        ("seconds a step", answer.step_seconds),
        (f"{unit} an epoch", _multiply(answer.epoch_minutes, of_it)),
        (f"{unit} a run ({answer.steps.value:,.0f} steps)", _multiply(answer.run_minutes, of_it)),
    ):
        rows.add_row(name, short_number(figure.value), spread(figure))
    if answer.fits:
        # A run that does not fit fails at the start.
        chance = answer.late_oom_chance
        text = "none" if chance.high < 0.001 else f"{100 * chance.value:.1f} %"
        rows.add_row("late out-of-memory", text, "" if text == "none" else _percents(chance))
    return rows


def _multiply(figure: Figure, factor: float) -> Figure:
    return Figure(value=factor * figure.value, low=factor * figure.low, high=factor * figure.high)


def _percents(figure: Figure) -> str:
    return f"{100 * figure.low:.1f} … {100 * figure.high:.1f} %"


def shown(ways: Sequence[Considered]) -> list[Considered]:
    """The first few and the last one, which is of another engine."""
    return list(ways) if len(ways) <= WAYS_SHOWN else [*ways[: WAYS_SHOWN - 1], ways[-1]]


def _ways(title: str, ways: Sequence[Considered]) -> PlainTable:
    rows = table(
        title, "", "GiB a card", "on the host", "tokens/s", right=("GiB a card", "on the host", "tokens/s")
    )
    for way in ways:
        peak = f"{short_number(way.peak_reserved_gib.value)} of {short_number(way.card_gib.value)}"
        rows.add_row(
            escape(way.name),
            "[green]fits[/]" if way.fits else "[red]no[/]",
            peak,
            short_number(way.host_gib.value),
            short_number(way.tokens_per_second.value),
        )
    return rows


def say_strategy(strategy: Strategy) -> str:
    """The strategy in one line."""
    titles = {"none": "one card", "ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
    parts = [
        titles[strategy.sharding],
        f"weights in {strategy.weights}, {strategy.precision}",
        f"{strategy.micro_tokens:,} tokens at a time × {strategy.accumulation}",
        f"{plural(strategy.checkpointed_layers, 'layer')} checkpointed"
        if strategy.checkpointed_layers
        else "nothing checkpointed",
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


def bar(share: float) -> str:
    """A bar of up to BAR cells, to an eighth of one."""
    eighths = round(min(max(share, 0.0), 1.0) * BAR * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (EIGHTHS[rest] if rest else "")


def spread(figure: Figure) -> str:
    return "" if figure.low == figure.high else f"{short_number(figure.low)} … {short_number(figure.high)}"


def short_number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


WORDS = {
    "yes": "[green]yes[/]",
    "likely": "[yellow]likely[/]",
    "unlikely": "[red]unlikely[/]",
    "no": "[red]no[/]",
}
SMALL = 0.01
"""Parts below this share are not shown."""


def show_serving(console: Console, answer: ServeAnswer) -> None:
    question = answer.question
    mark = "[bold green]✓[/]" if answer.good else "[bold red]✗[/]"
    if answer.good and question.limit_seconds is None and answer.answer_seconds.value >= SLOW_SECONDS:
        mark = "[bold yellow]![/]"
    print_line(console, f"{mark} [bold]{quote(answer.verdict)}[/]", soft_wrap=True)
    for advice in answer.advice:
        print_line(console, f"  → {quote(advice)}", soft_wrap=True)
    count = f"{question.copies} × " if question.copies > 1 else ""
    extra = f" with {question.adapters} adapters of rank {question.rank}" if question.adapters else ""
    what = f"{count}{quote(question.model)}{extra} on {quote(question.machine.name)}"
    print_line(console, f"[dim]{what}; engine: {question.engine}; certainty: {answer.certainty}[/]")
    _show_figures(console, answer)
    _show_forms(console, answer)
    if question.adapters or question.copies > 1:
        _show_specialists(console, answer.specialists)
    for note in answer.notes:
        print_line(console, f"[dim]{quote(note)}[/]", soft_wrap=True)


def _show_figures(console: Console, answer: ServeAnswer) -> None:
    rows = table("figure", "planned", "range", "of which", right=("planned",))
    memory_parts = _list_parts(answer.parts_gib, lambda value: f"{value:.1f}")
    rows.add_row(
        "memory of each card" if answer.question.cards > 1 else "memory",
        f"{answer.memory_gib.value:.1f} of {answer.available_gib.value:.1f} GiB",
        _spread(answer.memory_gib),
        memory_parts,
    )
    alone, together = answer.first_token_alone_seconds, answer.first_token_seconds
    rows.add_row("first token", say_seconds(alone.value), _seconds_range(alone), "")
    if answer.question.users > 1:
        rows.add_row("… all at once", say_seconds(together.value), _seconds_range(together), "")
    rows.add_row(
        "each token", say_seconds(answer.token_seconds.value), _seconds_range(answer.token_seconds), ""
    )
    rows.add_row(
        "an answer",
        say_seconds(answer.answer_seconds.value),
        _seconds_range(answer.answer_seconds),
        _list_parts(answer.parts_seconds, say_seconds),
    )
    rows.add_row(
        "all users",
        f"{_number(answer.tokens_per_second.value)} tokens/s",
        _spread(answer.tokens_per_second),
        "",
    )
    rows.add_row("most users that fit", f"{answer.most_users.value:,.0f}", _whole(answer.most_users), "")
    if answer.most_users_in_time is not None:
        in_time = answer.most_users_in_time
        rows.add_row("… and are in time", f"{in_time.value:,.0f}", _whole(in_time), "")
    rows.add_row(
        "longest context", f"{answer.longest_context.value:,.0f} tokens", _whole(answer.longest_context), ""
    )
    console.print(rows)


def _show_forms(console: Console, answer: ServeAnswer) -> None:
    limited = answer.question.limit_seconds is not None
    columns = ("weights", "format", "memory", "fits", "first token", "each token", "an answer")
    rows = table(*columns, *(("in time",) if limited else ()), right=("memory", *columns[4:]))
    for row in answer.quantisations:
        rows.add_row(*_form_cells(row, limited=limited))
    console.print(rows)


def _form_cells(row: FormRow, *, limited: bool) -> list[str]:
    latency = row.latency
    cells = [
        f"[bold]{row.form}[/]" if row.chosen else row.form,
        row.format,
        f"{row.holding.memory_gib.value:.1f} GiB",
        WORDS[row.holding.fits],
        say_seconds(latency.first_token_seconds.value),
        say_seconds(latency.token_seconds.value),
        say_seconds(latency.answer_seconds.value),
    ]
    return [*cells, WORDS[row.meets_limit]] if limited and row.meets_limit is not None else cells


def _show_specialists(console: Console, specialists: tuple[SpecialistRow, ...]) -> None:
    asked = specialists[0].asked
    columns = ("a model", f"× {asked}", "in all", "fit", "an adapter", f"base + {asked}", "fit ")
    rows = table("specialists", *columns, right=columns)
    for row in specialists:
        rows.add_row(
            row.form,
            f"{row.one_model_gib.value:.1f}",
            f"{asked * row.one_model_gib.value:.1f}",
            f"{row.asked_whole_gib.value:.1f}",
            f"[bold]{row.whole_models.value:,.0f}[/]",
            f"{row.one_adapter_gib.value:.2f}",
            f"{row.asked_adapters_gib.value:.1f}",
            f"[bold]{row.adapters.value:,.0f}[/]",
        )
    console.print(rows)
    print_line(
        console,
        "[dim]in GiB; in all and base: with cache, workspace and runtime; fit: how many fit[/]",
    )


def _list_parts(parts: dict[str, Figure], say: Callable[[float], str]) -> str:
    """The large parts, largest first."""
    whole = sum(part.value for part in parts.values())
    shown = [(name, part.value) for name, part in parts.items() if part.value > whole * SMALL]
    return ", ".join(f"{name} {say(value)}" for name, value in sorted(shown, key=lambda part: -part[1]))


def _spread(figure: Figure) -> str:
    return f"{_number(figure.low)} … {_number(figure.high)}"


def _seconds_range(figure: Figure) -> str:
    return f"{say_seconds(figure.low)} … {say_seconds(figure.high)}"


def _whole(figure: Figure) -> str:
    return "" if figure.low == figure.high else f"{figure.low:,.0f} … {figure.high:,.0f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


PROBE_NAMES = {
    "products_bfloat16_tflops": "products in bfloat16",
    "products_float16_tflops": "products in float16",
    "products_float32_gflops": "products in float32",
    "products_fp8_tflops": "products in 8 bits",
    "memory_gb_s": "memory, read and written",
    "to_device_gb_s": "host to card, pinned",
    "from_device_gb_s": "card to host, pinned",
    "context_gib": "the context's memory",
    "launch_microseconds": "calling a kernel",
    "disk_write_mb_s": "disk, written through",
    "disk_read_mb_s": "disk, read",
    "tokens_per_second": "training the whole model",
}


def show_probe(
    console: Console, facts: ProbeFacts, figures: Mapping[str, Figure], files: Sequence[Path]
) -> None:
    driver = f", driver {facts.device.driver}" if facts.device.driver else ""
    print_line(
        console,
        f"[bold]{quote(facts.device.name)}[/]{quote(driver)}, torch {quote(facts.device.torch)}, "
        f"at the sizes of {quote(facts.shape.name)}; certainty: probed, in {facts.seconds:.0f} s",
    )
    rows = table("measured", "value", "range", right=("value",))
    for name, figure in figures.items():
        rows.add_row(
            PROBE_NAMES.get(name, name),
            f"{number(figure.value)} {figure.unit}",
            f"{number(figure.low)} … {number(figure.high)}",
        )
    console.print(rows)
    for step in facts.steps:
        print_line(
            console,
            f"a step of {step.layers} layers and {step.tokens:,} tokens: {1000 * step.seconds:.0f} ms",
        )
    for missing in facts.left_out:
        print_line(console, f"[yellow]left out[/]: {quote(missing)}")
    print_line(console, f"[dim]kept in {quote(files[0].parent)}[/]")


def show_past(console: Console, found: "PastResiduals") -> None:
    """The figures of each run, then the bias over all runs."""
    if not found.runs:
        print_line(console, "no run of this project has finished yet: `graft train` starts one")
        return
    rows = table("run", "on", "figure", "planned", "range", "actual", "error", right=("planned", "error"))
    for run in found.runs:
        first = (f"{quote(run.run_id)}\n[dim]{quote(run.recorded_at[:16])}[/]", quote(run.device))
        for residual in run.residuals:
            planned = residual.planned
            if "." in residual.name or planned.low == planned.high == residual.actual:
                # Parts are in the JSON and on the page of the run; exact figures are no estimates.
                continue
            colour = "green" if residual.inside else "yellow"
            rows.add_row(
                *first,
                NAMES.get(residual.name, residual.name),
                f"{number(planned.value)} {planned.unit}".strip(),
                f"{number(planned.low)} … {number(planned.high)}",
                f"[{colour}]{number(residual.actual)}[/]",
                f"{100 * residual.off:+.0f} %",
            )
            first = ("", "")
    console.print(rows)
    biases = table(
        "bias over past runs", "runs", "median", "range", "within the planned range", right=("runs",)
    )
    for bias in found.biases:
        biases.add_row(
            _title(bias.figure),
            str(bias.runs),
            f"{100 * bias.off.value:+.0f} %",
            f"{100 * bias.off.low:+.0f} … {100 * bias.off.high:+.0f} %",
            f"{100 * bias.inside.value:.0f} %",
        )
    console.print(biases)


def _title(figure: str) -> str:
    whole, _, part = figure.partition(".")
    title = NAMES.get(whole, whole)
    return f"[dim]{title}: {quote(part)}[/]" if part else title


def show_preflight(console: Console, found: "Preflight") -> None:
    cases = f"{plural(found.cases, 'held-out case')} after the split"
    print_line(console, f"{cases}. {quote(found.power)}".rstrip())
    show_trials(console, found)
    for problem in found.problems:
        mark = "[red]✗[/]" if problem.severity == "error" else "[yellow]![/]"
        why = f": {quote(problem.why)}" if problem.why else ""
        print_line(console, f"{mark} {quote(problem.what)}{why}")
        if problem.fix:
            print_line(console, f"  [dim]fix:[/] {quote(problem.fix)}")
    show_run_plan(console, found.run)
    if hint := _how_to_shorten(found.run):
        print_line(console, hint)
    if found.errors:
        print_line(console, f"[bold red]not ready[/]: {plural(len(found.errors), 'error')}")
    else:
        print_line(console, "[bold green]ready[/]: `graft run` trains, evaluates and gates.")


LONG_RUN_MINUTES = 240.0
SHORTER = {
    "train": "fewer train.epochs or a smaller data.max_tokens",
    "evaluate": "a smaller evaluate.max_new_tokens or data.test",
}
"""Settings that shorten a stage."""


def _how_to_shorten(run: RunPlan) -> str | None:
    """What shortens a run of many hours: the settings of its longest stage, or another machine."""
    longest = max(run.stages, key=lambda stage: stage.seconds.value, default=None)
    if longest is None or run.minutes.value < LONG_RUN_MINUTES:
        return None
    here = SHORTER.get(longest.stage)
    elsewhere = "`graft plan compare` estimates it on other machines"
    return f"a long run: {here} shortens it here; {elsewhere}" if here else f"a long run: {elsewhere}"


def show_trials(console: Console, found: "Preflight") -> None:
    """The score of each metric on correct answers and on corrupted ones."""
    if not found.metrics:
        return
    rows = table("metric", "cases", "log replies", "corrupted", "constant answer", right=("cases",))
    for trial in found.metrics:
        graded = (trial.own, trial.spoiled, trial.constant)
        cells = ("–" if share is None else percent(share) for share in graded)
        rows.add_row(quote(name_of(trial.name)), str(trial.cases), *cells)
    console.print(rows)
