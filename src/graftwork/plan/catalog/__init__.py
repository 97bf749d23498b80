"""Facts that come with the package, dated and with a source a row; and a team's own rows over them.

A table is a file of the package, and a team's own file of that name over it. Input: its name, what its
columns are, and a folder of the team's own files. Output: its rows, each knowing its file and line. What the
columns mean is known to `hardware.py`, `models.py` and `prices.py`.
"""

import csv
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from graftwork.records.errors import UserError

SHIPPED = Path(__file__).parent / "data"
OVERLAY_VARIABLE = "GRAFT_CATALOG"
ALIAS_SEPARATOR = ";"
_FILLERS = re.compile(r"\b(nvidia|geforce|tesla|quadro|graphics|card|gpu|amd|intel|processor)\b")

Built = TypeVar("Built")


class CatalogRow(NamedTuple):
    """One line of a file, as text by column."""

    file: Path
    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def number(self, column: str, *, above: float | None = None) -> float:
        """Parse a cell as a number: not below 0, and more than `above`."""
        value = self.number_or_none(column)
        if value is None or (above is not None and value <= above):
            limit = f" above {above:g}" if above is not None else ""
            raise self.mistake(column, rule=f"must be a number{limit}")
        return value

    def number_or_none(self, column: str) -> float | None:
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not 0 <= value < float("inf"):
            raise self.mistake(column, rule="must be a number that is not negative")
        return value

    def whole(self, column: str) -> int:
        value = self.number(column, above=0)
        if value != int(value):
            raise self.mistake(column, rule="must be a whole number")
        return int(value)

    def yes(self, column: str) -> bool:
        text = self.text(column).lower()
        if text not in {"true", "false"}:
            raise self.mistake(column, rule="must be true or false")
        return text == "true"

    def names(self, column: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.text(column).split(ALIAS_SEPARATOR) if part.strip())

    def mistake(self, column: str, *, rule: str) -> UserError:
        return UserError(
            f"{self.file.name}, line {self.line}: `{column}` {rule}, and is {self.text(column)!r}",
            why="one wrong figure makes every answer wrong",
            fix=f"correct `{column}` in that line",
            where=f"{self.file}:{self.line}",
        )

    def values(self, columns: "ColumnParsers") -> dict[str, Any]:
        """Values by column; empty optional ones are left out."""
        filled = {column: read for column, read in columns.optional.items() if self.text(column)}
        return {column: read(self, column) for column, read in (columns.needed | filled).items()}

    def build(self, make: Callable[[dict[str, Any]], Built], columns: "ColumnParsers") -> Built:
        """Build a record with `make`; an invalid one is reported with its location."""
        try:
            return make(self.values(columns))
        except ValidationError as refused:
            first = refused.errors()[0]
            column = str(first["loc"][0]) if first["loc"] else ""
            raise self.mistake(column, rule=f"is refused ({first['msg'].lower()})") from refused


def above_zero(row: CatalogRow, column: str) -> float:
    return row.number(column, above=0)


text, number, whole, yes, names = (
    CatalogRow.text, CatalogRow.number, CatalogRow.whole, CatalogRow.yes, CatalogRow.names,
)  # fmt: skip
SOURCE = {"source": text, "dated": text}


class ColumnParsers(NamedTuple):
    """Required and optional columns of a table's file, with their parsers; and the key of its rows."""

    needed: dict[str, Callable[[CatalogRow, str], Any]]
    optional: dict[str, Callable[[CatalogRow, str], Any]]
    key: tuple[str, ...]


def read_table(name: str, columns: ColumnParsers, *, overlay: Path | None = None) -> tuple[CatalogRow, ...]:
    """The rows of the package, without those that the team's own replace, then the team's."""
    rows = _read(SHIPPED / f"{name}.csv", columns)
    stated = os.environ.get(OVERLAY_VARIABLE)
    folder = overlay or (Path(stated).expanduser() if stated else None)
    if folder is None:
        return rows
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}",
            why="it was specified as the folder of your own catalog",
            fix=f"create it, or leave {OVERLAY_VARIABLE} and `--catalog` out",
            where=str(folder),
        )
    own_file = folder / f"{name}.csv"
    if not own_file.exists():
        return rows
    theirs = _read(own_file, columns)
    replaced = {row_key(row, columns) for row in theirs}
    return (*(row for row in rows if row_key(row, columns) not in replaced), *theirs)


def list_rows(
    name: str, make: Callable[[dict[str, Any]], Built], columns: ColumnParsers, *, overlay: Path | None
) -> tuple[Built, ...]:
    return tuple(row.build(make, columns) for row in read_table(name, columns, overlay=overlay))


def row_key(row: CatalogRow, columns: ColumnParsers) -> tuple[str, ...]:
    """The key of a row, normalized."""
    return tuple(normalize(row.text(column)) for column in columns.key)


def normalize(name: str) -> str:
    """Normalize a name: case, spaces, dashes, the maker's name, "GB"."""
    bare = _FILLERS.sub(" ", name.lower().replace("_", " "))
    plain = re.sub(r"[^a-z0-9.]", "", bare)
    return re.sub(r"(?<=\d)gi?b(?![a-z])", "", plain)


def _read(file: Path, columns: ColumnParsers) -> tuple[CatalogRow, ...]:
    rows = []
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines, restkey="")
        _check_header(file, list(reader.fieldnames or ()), columns)
        for cells in reader:
            row = CatalogRow(file, reader.line_num, {k: (v or "").strip() for k, v in cells.items() if k})
            if "" in cells:
                raise row.mistake("", rule="has more cells than the header names")
            if not any(row.cells.values()):
                continue
            for column in columns.needed:
                if not row.text(column):
                    raise row.mistake(column, rule="must be given")
            try:
                date.fromisoformat(row.text("dated"))
            except ValueError as wrong:
                raise row.mistake("dated", rule="must be a day such as 2026-08-22") from wrong
            rows.append(row)
    return tuple(rows)


def _check_header(file: Path, header: list[str], columns: ColumnParsers) -> None:
    missing = [column for column in columns.needed if column not in header]
    unknown = [column for column in header if column not in columns.needed | columns.optional]
    if not missing and not unknown:
        return
    wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which is unknown"
    raise UserError(
        f"{file.name}, line 1: the header {wrong}",
        why="columns are found by their names",
        fix=f"specify them: {','.join(columns.needed)}; and where you know it: {','.join(columns.optional)}",
        where=f"{file}:1",
    )


Thing = TypeVar("Thing")


def find_named(name: str, things: Mapping[str, tuple[Thing, Iterable[str]]], *, kind: str, fix: str) -> Thing:
    """Find a row by its name or an alias; otherwise raise an error that suggests the nearest ones."""
    title_by_name: dict[str, str] = {}
    for title, (_, aliases) in things.items():
        title_by_name[normalize(title)] = title
        for alias in aliases:
            title_by_name.setdefault(normalize(alias), title)
    match = title_by_name.get(normalize(name))
    if match is not None and normalize(name):
        return things[match][0]
    near = difflib.get_close_matches(normalize(name), title_by_name, n=4, cutoff=0.5)
    names = list(dict.fromkeys(title_by_name[key] for key in near))
    listed = f"did you mean {' or '.join(names)}? Otherwise " if names else ""
    raise UserError(
        f"the catalog has no {kind} {name!r}",
        why="its figures are needed",
        fix=f"{listed}{fix.removeprefix('or ')}; `graft plan catalog` lists what is known",
        where=name,
    )
