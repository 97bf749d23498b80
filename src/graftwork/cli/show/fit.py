"""An answer of fit for people: the verdict, then memory by parts, time, how it is set, what else there is."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from graftwork.cli.show.tables import PlainTable, print_line, table
from graftwork.records.base import Figure
from graftwork.records.fit import Considered, FitAnswer, Strategy

BAR = 32
WAYS_SHOWN, PARTS_SHOWN, SMALLEST_SHOWN = 4, 6, 0.005
LONG_MINUTES = 120.0
EIGHTHS = " ▏▎▍▌▋▊▉"
ADVICE = {
    "computed": "`graft plan probe` on the machine itself, or --trace, makes it surer",
    "traced": "",
    "probed": "",
}


def show_fit(console: Console, answer: FitAnswer, *, files: Sequence[Path] = ()) -> None:
    """Everything that a person wants to know, on one screen."""
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
    """Parts of the peak as bars of one length: the card."""
    room = max(answer.card_gib.value, answer.peak_reserved_gib.value, 1e-9)
    rows = table("memory", "GiB", "range", "", right=("GiB",))
    for name, value in main_parts(answer):
        rows.add_row(name, number(value), "", f"[cyan]{bar(value / room)}[/]")
    reserved, card = answer.peak_reserved_gib, answer.card_gib
    colour = "green" if answer.fits else "red"
    alone = answer.question.machine.gpu is None
    rows.add_row(
        "[bold]all of it[/]",
        f"[bold]{number(reserved.value)}[/]",
        spread(reserved),
        f"[{colour}]{bar(reserved.value / room)}[/] of {number(card.value)}",
    )
    if not alone:
        ram = answer.question.machine.ram_gib
        rows.add_row(
            "on the host",
            number(answer.host_gib.value),
            spread(answer.host_gib),
            f"[dim]{bar(min(answer.host_gib.value / ram, 1.0))}[/] of {number(ram)}",
        )
    return rows


def main_parts(answer: FitAnswer) -> list[tuple[str, float]]:
    """The largest parts, the small ones together, and last what the allocator rounds up."""
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
        (f"{unit} an epoch", _times(answer.epoch_minutes, of_it)),
        (f"{unit} a run ({answer.steps.value:,.0f} steps)", _times(answer.run_minutes, of_it)),
    ):
        rows.add_row(name, number(figure.value), spread(figure))
    if answer.fits:
        # What does not fit runs out at once, not late.
        chance = answer.late_oom_chance
        said = "none" if chance.high < 0.001 else f"{100 * chance.value:.1f} %"
        rows.add_row("chance to run out late", said, "" if said == "none" else _percents(chance))
    return rows


def _times(figure: Figure, factor: float) -> Figure:
    return Figure(value=factor * figure.value, low=factor * figure.low, high=factor * figure.high)


def _percents(figure: Figure) -> str:
    return f"{100 * figure.low:.1f} … {100 * figure.high:.1f} %"


def shown(ways: Sequence[Considered]) -> list[Considered]:
    """The first few; the last one too, which is another engine's."""
    return list(ways) if len(ways) <= WAYS_SHOWN else [*ways[: WAYS_SHOWN - 1], ways[-1]]


def _ways(title: str, ways: Sequence[Considered]) -> PlainTable:
    rows = table(
        title, "", "GiB a card", "on the host", "tokens/s", right=("GiB a card", "on the host", "tokens/s")
    )
    for way in ways:
        peak = f"{number(way.peak_reserved_gib.value)} of {number(way.card_gib.value)}"
        rows.add_row(
            escape(way.name),
            "[green]fits[/]" if way.fits else "[red]no[/]",
            peak,
            number(way.host_gib.value),
            number(way.tokens_per_second.value),
        )
    return rows


def say_strategy(strategy: Strategy) -> str:
    """How it is set, in one line."""
    titles = {"none": "one card", "ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
    words = [
        titles[strategy.sharding],
        f"weights in {strategy.weights}, {strategy.precision}",
        f"{strategy.micro_tokens:,} tokens at a time × {strategy.accumulation}",
        f"{strategy.checkpointed_layers} layers checkpointed"
        if strategy.checkpointed_layers
        else "nothing checkpointed",
    ]
    if strategy.offload != "none":
        words.append(
            f"{strategy.offload} on the host"
            if strategy.offload == "optimizer"
            else "weights and optimizer on the host"
        )
    words.append("packed" if strategy.packing else "padded")
    return " · ".join(words)


def bar(share: float) -> str:
    """A bar of up to BAR cells, to an eighth of one."""
    eighths = round(min(max(share, 0.0), 1.0) * BAR * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (EIGHTHS[rest] if rest else "")


def spread(figure: Figure) -> str:
    return "" if figure.low == figure.high else f"{number(figure.low)} … {number(figure.high)}"


def number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


PRINTERS = {"FitAnswer": show_fit}
