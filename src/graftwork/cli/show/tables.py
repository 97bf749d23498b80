"""Tables and lines for the terminal, and the escaping of text that comes from logs.

Our own markup is rendered, emoji names are not: a placeholder such as `<REDACTED:email:1>` may contain one.
"""

from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

# Control characters are shown as symbols: logs are not trusted.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# These change the direction of the text that follows.
VISIBLE |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)

FEWEST_LETTERS = 6
"""No column is made narrower than this."""


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
    wanted = [max((cell_len(line) for line in _lines_of(column)), default=0) for column in made.columns]
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


def _lines_of(column: Column) -> list[str]:
    cells = (column.header, *column.cells)
    return [
        line for cell in cells for line in (cell.plain if isinstance(cell, Text) else str(cell)).splitlines()
    ]


def print_line(console: Console, markup: str, *, soft_wrap: bool = False) -> None:
    console.print(to_text(markup), highlight=False, soft_wrap=soft_wrap)


def to_text(markup: str) -> Text:
    return Text.from_markup(markup, emoji=False)


def safe(text: str) -> str:
    """Text with its control characters made visible."""
    return text.translate(VISIBLE)


def quote(text: object) -> str:
    """Text escaped for use in markup, with its control characters made visible."""
    return escape(safe(str(text)))


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"
