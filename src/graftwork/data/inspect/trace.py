"""Traces rows and tokens back to the log, and log lines to what became of them.

In: a dataset and `file:line`, a row id, or `split:number[:token]`. Out: the matching rows and drops, and
whether the log line is unchanged (by its SHA-256). Reads columns, never all rows.
"""

import re
from collections.abc import Collection, Iterable
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal, get_args

from graftwork.data.ingest.read import hash_line
from graftwork.data.inspect.rows import TokenDecoder, cut_pieces, find_row_id
from graftwork.files.dataset import fetch_rows, read_manifest, scan_columns, scan_drops
from graftwork.records.base import Record
from graftwork.records.dataset import Drop, Row, Split
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import CaptureOrigin, Origin

COMPRESSED = (".gz", ".zst", ".zstd")
WITHOUT_LINES = (".csv", ".tsv", ".parquet", ".arrow", ".feather")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LogCheck(Record):
    state: Literal["same", "changed", "gone", "not_checked"]
    words: str


def check_line(origin: Origin, *, expected: str, root: Path) -> LogCheck:
    """Read the line again, where the file has lines, and compare."""
    path, suffix = root / origin.file, Path(origin.file).suffix.lower()
    why = ""
    if not expected:
        why = "the dataset holds no hash of the line"
    elif suffix in COMPRESSED:
        why = "the log is compressed"
    elif origin.file == "-" or suffix in WITHOUT_LINES:
        why = "the log has no lines of its own"
    else:
        try:
            line = _read_line(path, origin.line)
            if line is not None and expected in (
                hash_line(line),
                hash_line(line.removeprefix(BYTE_ORDER_MARK)),
            ):
                return LogCheck(state="same", words="the log still says the same")
            with path.open("rb") as handle:
                if handle.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
                    why = "the log is one JSON document"
        except FileNotFoundError:
            return LogCheck(state="gone", words="the log is no longer there")
        except OSError as error:
            why = error.strerror or str(error)
    if why:
        return LogCheck(state="not_checked", words=f"not checked: {why}")
    return LogCheck(state="changed", words="the log has changed")


def read_log_line(origin: Origin, *, root: Path) -> str | None:
    """The line as the log has it now; None where the log is gone or has no lines of its own."""
    suffix = Path(origin.file).suffix.lower()
    if origin.file == "-" or suffix in COMPRESSED or suffix in WITHOUT_LINES:
        return None
    try:
        line = _read_line(root / origin.file, origin.line)
    except OSError:
        return None
    return None if line is None else line.decode(errors="replace").removeprefix("\ufeff").rstrip("\r\n")


def _read_line(path: Path, number: int) -> bytes | None:
    with path.open("rb") as handle:
        return next(islice(handle, number - 1, None), None)


SPLIT_NAMES: tuple[str, ...] = get_args(Split)


class TracedToken(Record):
    """A token of a row. `place` counts from 0; `text` is None without a decoder."""

    place: int
    token: int
    text: str | None
    trained: bool


class RowPlace(Record):
    """The position of a row; `number` counts from 0."""

    split: Split
    number: int
    id: str
    origin: Origin


class TracedRow(Record):
    """A row of the dataset and its log line. The tokens from `trained_from` on are trained on."""

    place: RowPlace
    input_hash: str
    log: LogCheck
    group: str | None
    domain: str | None
    stage: int | None
    weight: float
    tokens: int
    trained_from: int
    token: TracedToken | None = None
    capture: CaptureOrigin | None = None


class TracedDrop(Record):
    """A line that is in no split, the rule that dropped it, and the kept rows that its reason names."""

    drop: Drop
    log: LogCheck
    kept: tuple[RowPlace, ...] = ()


class Trace(Record):
    asked: str
    dataset: str
    rows: tuple[TracedRow, ...]
    drops: tuple[TracedDrop, ...]


def trace(folder: Path, what: str, *, root: Path, decoder: TokenDecoder | None = None) -> Trace:
    """Return everything the dataset knows about `what`. Log files are looked for below `root`."""
    tracer = _Tracer(folder, root, decoder)
    dataset = tracer.dataset
    address = _parse_place(what)
    if address is not None:
        return Trace(asked=what, dataset=dataset.content_hash, rows=(tracer.trace_place(*address),), drops=())
    file, colon, line = what.rpartition(":")
    origins: list[Origin] = []
    if colon and file and line.isdecimal():
        origins = tracer.name_lines(Origin(file=file, line=int(line)))
    rows = tracer.trace_rows(tracer.find_rows(origins))
    drops = tracer.trace_drops(origins)
    if not rows and not drops:
        rows = tracer.trace_rows(find_row_id(folder, dataset, what))
    if not rows and not drops:
        files = ", ".join(file.file for file in dataset.inputs[:3])
        more = " …" if len(dataset.inputs) > 3 else ""
        raise UserMistake(
            f"the dataset knows nothing of {what!r}",
            why=f"no row and no drop of {dataset.content_hash[:12]} came from it; "
            f"it was made of {files}{more}",
            fix="name a line as FILE:LINE, a row by its id, or a place such as train:17 or train:17:203",
        )
    return Trace(asked=what, dataset=dataset.content_hash, rows=tuple(rows), drops=tuple(drops))


def names_token(what: str) -> bool:
    """Whether `what` names a single token."""
    address = _parse_place(what)
    return address is not None and address[2] is not None


def _parse_place(what: str) -> tuple[Split, int, int | None] | None:
    """Parse `train:17` or `train:17:203`: the split, the row, the token."""
    match = re.fullmatch(r"(\w+):(\d+)(?::(\d+))?", what)
    if match is None or match[1] not in SPLIT_NAMES:
        return None
    split = next(name for name in get_args(Split) if name == match[1])
    return split, int(match[2]), int(match[3]) if match[3] else None


class _Tracer:
    """A dataset whose rows and drops are looked up."""

    def __init__(self, folder: Path, root: Path, decoder: TokenDecoder | None) -> None:
        self.dataset = read_manifest(folder)
        self._folder, self._root, self._decoder = folder, root, decoder

    def name_lines(self, line: Origin) -> list[Origin]:
        """Return the line under every name that the dataset has for its file."""
        names = {file.file for file in self.dataset.inputs}
        if line.file in names:
            return [line]
        paths = {(self._root / line.file).resolve(), Path(line.file).resolve()}
        same = [name for name in names if (self._root / name).resolve() in paths]
        ending = [name for name in names if name.endswith(f"/{line.file}")]
        # A name that is not an input is still looked for: drops may name files without rows.
        return [Origin(file=name, line=line.line) for name in sorted(same or ending or [line.file])]

    def find_rows(self, origins: Iterable[Origin]) -> dict[Split, list[int]]:
        """Return the positions of all rows from these lines."""
        wanted = {(origin.file, origin.line) for origin in origins}
        places: dict[Split, list[int]] = {}
        columns = scan_columns(self._folder, self.dataset, columns=("file", "line")) if wanted else ()
        for split, first, batch in columns:
            places.setdefault(split, []).extend(first + offset for offset in _find_lines(batch, wanted))
        return {split: numbers for split, numbers in places.items() if numbers}

    def trace_rows(self, places: dict[Split, list[int]]) -> list[TracedRow]:
        found = fetch_rows(self._folder, self.dataset, places=places)
        return [self._trace_row(row, split, number) for (split, number), row in found.items()]

    def trace_place(self, split: Split, number: int, token: int | None) -> TracedRow:
        row = fetch_rows(self._folder, self.dataset, places={split: [number]}).get((split, number))
        if row is None:
            summary = self.dataset.splits.get(split)
            raise UserMistake(
                f"{split} has no row {number}",
                why=f"it holds {summary.rows if summary else 0} rows, and the first is row 0",
                fix="give a smaller number",
            )
        return self._trace_row(row, split, number, token)

    def _trace_row(self, row: Row, split: Split, number: int, token: int | None = None) -> TracedRow:
        return TracedRow(
            place=RowPlace(split=split, number=number, id=row.id, origin=row.origin),
            input_hash=row.input_hash,
            log=check_line(row.origin, expected=row.input_hash, root=self._root),
            group=row.group,
            domain=row.domain,
            stage=row.stage,
            weight=row.weight,
            tokens=len(row.tokens),
            trained_from=row.trained_from,
            token=None if token is None else self._trace_token(row, token),
            capture=row.capture,
        )

    def _trace_token(self, row: Row, place: int) -> TracedToken:
        if place >= len(row.tokens):
            raise UserMistake(
                f"the row {row.id} has no token {place}",
                why=f"it has {len(row.tokens)} tokens, and the first is token 0",
                fix="give a smaller number",
            )
        text = None
        if self._decoder is not None:
            pieces = cut_pieces(row.tokens, trained_from=row.trained_from, decoder=self._decoder)
            ends = accumulate(len(piece.tokens) for piece in pieces)
            text = next(piece.text for piece, end in zip(pieces, ends, strict=True) if place < end)
        return TracedToken(place=place, token=row.tokens[place], text=text, trained=place >= row.trained_from)

    def trace_drops(self, origins: Collection[Origin]) -> list[TracedDrop]:
        """The drops of these lines, with the kept rows that their reasons name."""
        wanted = {(origin.file, origin.line) for origin in origins}
        columns = ("file", "line", "input_hash", "step", "reason")
        drops: list[Drop] = []
        for batch in scan_drops(self._folder, self.dataset, columns=columns) if wanted else ():
            for offset in _find_lines(batch, wanted):
                value = batch.slice(offset, 1).to_pylist()[0]
                origin = Origin(file=value.pop("file"), line=value.pop("line"))
                drops.append(Drop(origin=origin, **value))
        # File names may contain spaces, so the inputs are searched for.
        files = {
            file.file: re.compile(rf"(?<![\w/.-]){re.escape(file.file)}:(\d+)")
            for file in self.dataset.inputs
        }
        named = {
            drop: [
                Origin(file=file, line=int(match[1]))
                for file, pattern in files.items()
                for match in pattern.finditer(drop.reason)
            ]
            for drop in drops
        }
        places = self.find_rows({origin for lines in named.values() for origin in lines})
        rows = fetch_rows(self._folder, self.dataset, places=places)
        kept = [RowPlace(split=at, number=n, id=row.id, origin=row.origin) for (at, n), row in rows.items()]
        return [
            TracedDrop(
                drop=drop,
                log=check_line(drop.origin, expected=drop.input_hash, root=self._root),
                kept=tuple(place for place in kept if place.origin in named[drop]),
            )
            for drop in drops
        ]


def _find_lines(batch: Any, wanted: Collection[tuple[str, int]]) -> list[int]:
    """Return the offsets of the rows of a batch that have one of these files and lines."""
    import numpy as np

    lines = batch.column("line").to_numpy(zero_copy_only=False)
    offsets = np.flatnonzero(np.isin(lines, [line for _, line in wanted])).tolist()
    return [at for at in offsets if (batch.column("file")[at].as_py(), int(lines[at])) in wanted]
