"""Documents on the terminal.

Our own markup is rendered, emoji names are not: a placeholder such as `<REDACTED:email:1>` may contain one.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from graftwork.text.wording import moment
from graftwork.views import document
from graftwork.views.document import Bar, Branch, Cell, Document, Gantt, Meter, State, Timestamp, quote

if TYPE_CHECKING:
    from rich.tree import Tree

    from graftwork.records.base import Record

FEWEST_LETTERS = 6
"""Minimum width of a column."""
WIDE_ENOUGH = 24
"""Width for a column that may fold, below which another form of the table is printed."""
COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red", "white", "bright_cyan", "bright_green")
METER, EIGHTHS = 32, " ▏▎▍▌▋▊▉"
"""The longest bar, and the characters for fractions of a cell."""
FEWEST_CELLS, MOST_CELLS = 42, 168
"""Width of a Gantt chart."""


def show(console: Console, record: "Record") -> None:
    """Print the record as a document, or as JSON if there is no view of it."""
    from graftwork.views import view

    viewed = view(record)
    if viewed is None:
        console.print_json(record.to_json())
    else:
        print_document(console, viewed)


def print_document(console: Console, printed: Document) -> None:
    for part in printed.parts:
        match part:
            case document.Paragraph(text, wrap):
                print_line(console, text, soft_wrap=not wrap)
            case document.Heading(text):
                print_line(console, f"\n[bold]{text}[/]")
            case document.Items(texts):
                for text in texts:
                    print_line(console, f"  · {text}")
            case document.Table():
                console.print(_table(console, part))
            case Gantt():
                _print_gantt(console, part)
            case Branch():
                console.print(_tree(part))


def _table(console: Console, part: document.Table) -> "PlainTable":
    made = table(*part.columns, title=part.title or None, right=tuple(part.right))
    if not part.columns:
        made = PlainTable(
            box=None,
            padding=(0, 2, 0, 0),
            collapse_padding=True,
            show_header=False,
            show_edge=False,
            pad_edge=False,
        )
    if part.tight:
        made.padding = (0, 1, 0, 0)
    for row in part.rows:
        made.add_row(*map(_cell, row))
    for place, column in enumerate(made.columns):
        column.overflow, column.no_wrap = "fold", place in part.no_wrap
    if part.if_narrow is not None:
        # Columns that may fold need no more room than this to stay readable.
        spare = sum(
            max(0, _widest(column) - WIDE_ENOUGH)
            for place, column in enumerate(made.columns)
            if place not in part.no_wrap
        )
        if whole_width(console, made) - spare > console.width:
            return _table(console, part.if_narrow)
    return fit_words(console, made)


def _cell(cell: Cell) -> str:
    if isinstance(cell, State):
        return f"[{cell.tone}]{quote(cell.word)}[/]" if cell.tone else quote(cell.word)
    if isinstance(cell, Meter):
        # To an eighth of a letter.
        whole, rest = divmod(round(min(max(cell.share, 0.0), 1.0) * METER * 8), 8)
        bar = "█" * whole + (EIGHTHS[rest] if rest else "")
        return f"[{cell.tone}]{bar}[/] {cell.text}".rstrip()
    if isinstance(cell, Timestamp):
        position = cell.at
        return quote(position[:16].replace("T", " ")) if isinstance(position, str) else moment(position)
    return f"{cell:,}" if isinstance(cell, int) else cell or ""


def _tree(branch: Branch) -> "Tree":
    from rich.tree import Tree

    tree = Tree(to_text(branch.text))
    tree.children = [_tree(below) for below in branch.below]
    return tree


def _print_gantt(console: Console, chart: Gantt) -> None:
    """One line per lane; a letter identifies what runs."""
    marks: dict[str, tuple[str, str]] = {}
    for number, name in enumerate(chart.names):
        used = {letter for letter, _ in marks.values()}
        letters = [*name.upper(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
        letter = next((c for c in letters if c.isalnum() and c not in used), "?")
        marks[name] = (letter, COLORS[number % len(COLORS)])
    width = max(map(len, chart.lanes), default=0)
    cells = max(FEWEST_CELLS, min(MOST_CELLS, console.width - width - 4)) // 7 * 7
    days = [chart.start + timedelta(days=number) for number in range(7)]
    header = "".join(day.strftime("%a").ljust(cells // 7) for day in days)
    print_line(console, f"\n{' ' * width}  [dim]{header}[/]")
    start, length = chart.start.timestamp(), (chart.end - chart.start).total_seconds()
    for lane in chart.lanes:
        bars = [bar for bar in chart.bars if bar.lane == lane]
        drawn = [
            _mark(bars, marks, start + number * length / cells, start + (number + 1) * length / cells)
            for number in range(cells)
        ]
        print_line(console, f"{quote(lane.ljust(width))}  {''.join(drawn)}")
    names = "  ".join(f"[{color}]{letter}[/] {quote(name)}" for name, (letter, color) in marks.items())
    print_line(console, f"{' ' * width}  {names}")


def _mark(bars: Sequence[Bar], marks: dict[str, tuple[str, str]], begin: float, end: float) -> str:
    """The bar that takes most of this time, if it takes at least half of it."""
    most = max(bars, key=lambda bar: min(bar.end, end) - max(bar.start, begin), default=None)
    if most is None or min(most.end, end) - max(most.start, begin) < (end - begin) / 2:
        return "[dim]·[/]"
    letter, color = marks[most.name]
    return f"[{'dim ' if most.done else ''}{color}]{letter}[/]"


class PlainTable(Table):
    """A table whose cells are markup without emoji."""

    def add_row(self, *renderables: RenderableType | None, **more: Any) -> None:
        super().add_row(*(to_text(cell) if isinstance(cell, str) else cell for cell in renderables), **more)


def table(*columns: str, title: str | None = None, right: tuple[str, ...] = ()) -> PlainTable:
    made = PlainTable(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", header_style="bold", pad_edge=False
    )
    for column in columns:
        made.add_column(to_text(column), justify="right" if column in right else "left", overflow="fold")
    return made


def whole_width(console: Console, made: Table) -> int:
    """The width of the table without any wrapping."""
    return Measurement.get(console, console.options.update(width=100_000), made).maximum


def fit_words(console: Console, made: PlainTable) -> PlainTable:
    """Set column widths so that a narrow console wraps between words.

    If the longest words do not fit next to each other, the longest of them are folded.
    """
    wanted = [_widest(column) for column in made.columns]
    room = console.width - (whole_width(console, made) - sum(wanted))
    if sum(wanted) <= room:
        return made
    narrow = [
        want
        if column.no_wrap
        else max((cell_len(w) for line in _lines_of(column) for w in line.split()), default=0)
        for column, want in zip(made.columns, wanted, strict=True)
    ]
    folded = [place for place, column in enumerate(made.columns) if not column.no_wrap]
    while sum(narrow) > room and (long := [at for at in folded if narrow[at] > FEWEST_LETTERS]):
        narrow[max(long, key=narrow.__getitem__)] -= 1
    if sum(narrow) > room:
        return made  # too narrow: let rich squeeze the columns
    widths = list(narrow)
    # Columns that need the least extra room get it first, so that short cells stay on one line.
    for place in sorted(range(len(widths)), key=lambda at: wanted[at] - widths[at]):
        widths[place] += max(0, min(wanted[place] - widths[place], room - sum(widths)))
    for column, width in zip(made.columns, widths, strict=True):
        column.width = width
    return made


def _widest(column: Column) -> int:
    return max((cell_len(line) for line in _lines_of(column)), default=0)


def _lines_of(column: Column) -> list[str]:
    cells = (column.header, *column.cells)
    return [
        line for cell in cells for line in (cell.plain if isinstance(cell, Text) else str(cell)).splitlines()
    ]


def print_line(console: Console, markup: str, *, soft_wrap: bool = False) -> None:
    console.print(to_text(markup), highlight=False, soft_wrap=soft_wrap)


def to_text(markup: str) -> Text:
    return Text.from_markup(markup, emoji=False)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"
