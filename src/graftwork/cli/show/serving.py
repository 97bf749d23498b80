"""What serving will be like, as tables: the verdict first, then what it rests on."""

from collections.abc import Callable

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table
from graftwork.plan.serving.question import SLOW_SECONDS, FormRow, ServeAnswer, SpecialistRow, say_seconds
from graftwork.records.figure import Figure

WORDS = {
    "yes": "[green]yes[/]",
    "likely": "[yellow]likely[/]",
    "unlikely": "[red]unlikely[/]",
    "no": "[red]no[/]",
}
SMALL = 0.01
"""A part below this share is not named."""


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
    held = _list_parts(answer.parts_gib, lambda value: f"{value:.1f}")
    rows.add_row(
        "memory of each card" if answer.question.cards > 1 else "memory",
        f"{answer.memory_gib.value:.1f} of {answer.available_gib.value:.1f} GiB",
        _spread(answer.memory_gib),
        held,
    )
    alone, together = answer.first_token_alone_seconds, answer.first_token_seconds
    rows.add_row("first token", say_seconds(alone.value), _times(alone), "")
    if answer.question.users > 1:
        rows.add_row("… all at once", say_seconds(together.value), _times(together), "")
    rows.add_row("each token", say_seconds(answer.token_seconds.value), _times(answer.token_seconds), "")
    rows.add_row(
        "an answer",
        say_seconds(answer.answer_seconds.value),
        _times(answer.answer_seconds),
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
        "[dim]in GiB; in all and base: with cache, workspace and runtime; fit: how many are held[/]",
    )


def _list_parts(parts: dict[str, Figure], say: Callable[[float], str]) -> str:
    """The parts that matter, the largest first."""
    whole = sum(part.value for part in parts.values())
    shown = [(name, part.value) for name, part in parts.items() if part.value > whole * SMALL]
    return ", ".join(f"{name} {say(value)}" for name, value in sorted(shown, key=lambda one: -one[1]))


def _spread(figure: Figure) -> str:
    return f"{_number(figure.low)} … {_number(figure.high)}"


def _times(figure: Figure) -> str:
    return f"{say_seconds(figure.low)} … {say_seconds(figure.high)}"


def _whole(figure: Figure) -> str:
    return "" if figure.low == figure.high else f"{figure.low:,.0f} … {figure.high:,.0f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
