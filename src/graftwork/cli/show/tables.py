"""The one look of all tables and lines, and the one way in which text of a log gets into them.

Markup of ours is obeyed, names of emoji are not: a placeholder such as `<REDACTED:email:1>` may hold one.
"""

from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

# What a terminal would obey is shown as its picture: logs are not trusted.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# These turn the direction of what is written behind them.
VISIBLE |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)


class PlainTable(Table):
    """A table whose cells are markup without emoji."""

    def add_row(self, *renderables: RenderableType | None, **more: Any) -> None:
        super().add_row(*(to_text(one) if isinstance(one, str) else one for one in renderables), **more)


def table(*columns: str, title: str | None = None, right: tuple[str, ...] = ()) -> PlainTable:
    made = PlainTable(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", header_style="bold", pad_edge=False
    )
    for column in columns:
        made.add_column(to_text(column), justify="right" if column in right else "left", overflow="fold")
    return made


def print_line(console: Console, markup: str, *, soft_wrap: bool = False) -> None:
    console.print(to_text(markup), highlight=False, soft_wrap=soft_wrap)


def to_text(markup: str) -> Text:
    return Text.from_markup(markup, emoji=False)


def safe(text: str) -> str:
    """Text of a log that a terminal does not obey."""
    return text.translate(VISIBLE)


def quote(text: object) -> str:
    """Text of a log as a part of markup: neither the terminal nor the markup is obeyed."""
    return escape(safe(str(text)))


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"
