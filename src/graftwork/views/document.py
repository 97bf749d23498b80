"""A result as a plain document, which the terminal and the pages print.

Every text is markup: `[bold]…[/]`, and `dim`, `green`, `yellow`, `red` or `cyan`. What comes from logs,
models and people goes through `quote`, which escapes its brackets and makes control characters visible.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from rich.markup import escape

# Control characters are shown as symbols: logs are not trusted.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# These change the direction of the text that follows.
VISIBLE |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)


def safe(text: str) -> str:
    """Text with its control characters made visible."""
    return text.translate(VISIBLE)


def quote(text: object) -> str:
    """Text escaped for use in markup, with its control characters made visible."""
    shown = safe(str(text))
    body = shown.rstrip("\\")
    # Backslashes are escaped before a tag only: the empty one makes those at the end exact wherever they are.
    end = "\\" * 2 * (len(shown) - len(body))
    return escape(body) + (f"{end}[none][/]" if end else "")


class State(NamedTuple):
    """A word for a state; `tone` is green, yellow, red, cyan, dim or nothing."""

    word: str
    tone: str = ""


class Timestamp(NamedTuple):
    """A time, in seconds since 1970 or as ISO text."""

    at: float | str


class Meter(NamedTuple):
    """A bar proportional to its share of 1, followed by a text."""

    share: float
    tone: str
    text: str = ""


Cell = str | int | State | Timestamp | Meter | None


class Name(str):
    """A column of names: pages do not change their case."""


@dataclass
class Table:
    columns: Sequence[str]
    """Without columns, a grid without a head."""
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    right: Collection[str] = ()
    """The columns of numbers."""
    no_wrap: Collection[int] = ()
    tight: bool = False
    """One space between columns, not two."""
    links: Sequence[str] = ()
    """Where the page of `graft ui` has more about each row."""
    if_narrow: "Table | None" = None
    """Printed if the table itself is too wide; columns that fold are then narrowed."""


class Paragraph(NamedTuple):
    text: str
    wrap: bool = True
    """False for text to copy, paths above all: a terminal prints it as one line."""


class Heading(NamedTuple):
    text: str


class Items(NamedTuple):
    texts: Sequence[str]


class Bar(NamedTuple):
    """A span of a Gantt chart, in seconds since 1970."""

    lane: str
    name: str
    start: float
    end: float
    title: str
    done: bool = False
    outlined: bool = False


@dataclass
class Gantt:
    """A row for each lane, a bar for each span, a column for each day."""

    title: str
    start: datetime
    end: datetime
    lanes: Sequence[str]
    names: Sequence[str]
    """Names of the bars, each with its own color."""
    bars: Sequence[Bar]
    now: datetime | None = None


class Branch(NamedTuple):
    """A node of a tree with what is below it."""

    text: str
    below: Sequence["Branch"]


class Drawing(NamedTuple):
    """A chart that only pages show, as SVG."""

    draw: Callable[[], Any]


Part = Table | Paragraph | Heading | Items | Gantt | Branch | Drawing


@dataclass
class Document:
    title: str = ""
    parts: list[Part] = field(default_factory=list)

    def line(self, *texts: str, wrap: bool = True) -> None:
        self.parts += [Paragraph(text, wrap) for text in texts]

    def heading(self, text: str) -> None:
        self.parts.append(Heading(text))

    def items(self, texts: Iterable[str], *, title: str = "") -> None:
        """A list under its title; nothing if the list is empty."""
        listed = list(texts)
        if listed:
            self.parts += [*([Heading(title)] if title else []), Items(listed)]

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Cell]],
        *,
        right: Collection[str] = (),
        title: str = "",
    ) -> None:
        """A table; nothing if it has no rows."""
        if listed := list(rows):
            self.parts.append(Table(columns, listed, title, right))

    def add(self, *parts: "Part | Document | None") -> None:
        """Add parts, or those of another document; nothing for None."""
        for part in parts:
            if isinstance(part, Document):
                self.parts += part.parts
            elif part is not None:
                self.parts.append(part)
