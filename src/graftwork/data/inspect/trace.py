"""Traces rows and tokens back to the log, and log lines to what became of them.

In: a dataset and `file:line`, a row id, or `split:number[:token]`. Out: the matching rows and drops, and
whether the log line is unchanged (by its SHA-256). Reads columns, never all rows.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from graftwork.data.ingest.read import hash_line
from graftwork.data.inspect.rows import TokenDecoder, cut_pieces, find_row_id
from graftwork.files.dataset import fetch_rows, read_manifest, scan_columns, scan_drops
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset, Drop, Row, Split
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
    path = root / origin.file
    hindrance = _find_hindrance(origin, expected=expected)
    if hindrance is not None:
        return LogCheck(state="not_checked", words=f"not checked: {hindrance}")
    try:
        line = _read_line(path, origin.line)
        if line is not None and _has_hash(line, expected):
            return LogCheck(state="same", words="the log still says the same")
        if _is_array(path):
            return LogCheck(state="not_checked", words="not checked: the log is one JSON document")
    except FileNotFoundError:
        return LogCheck(state="gone", words="the log is no longer there")
    except OSError as error:
        return LogCheck(state="not_checked", words=f"not checked: {error.strerror or error}")
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


def _find_hindrance(origin: Origin, *, expected: str) -> str | None:
    suffix = Path(origin.file).suffix.lower()
    if not expected:
        return "the dataset holds no hash of the line"
    if suffix in COMPRESSED:
        return "the log is compressed"
    if origin.file == "-" or suffix in WITHOUT_LINES:
        return "the log has no lines of its own"
    return None


def _has_hash(line: bytes, expected: str) -> bool:
    return expected in (hash_line(line), hash_line(line.removeprefix(BYTE_ORDER_MARK)))


def _read_line(path: Path, number: int) -> bytes | None:
    with path.open("rb") as handle:
        return next(islice(handle, number - 1, None), None)


def _is_array(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


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


class _RowAddress(NamedTuple):
    split: Split
    number: int
    token: int | None


@dataclass(frozen=True)
class _Tracer:
    folder: Path
    dataset: Dataset
    root: Path
    decoder: TokenDecoder | None


def trace(folder: Path, what: str, *, root: Path, decoder: TokenDecoder | None = None) -> Trace:
    """Return everything the dataset knows about `what`. Log files are looked for below `root`."""
    dataset = read_manifest(folder)
    tracer = _Tracer(folder, dataset, root, decoder)
    asked = _parse_place(what)
    rows: list[TracedRow]
    drops: list[TracedDrop] = []
    if asked is not None:
        rows = [_trace_place(tracer, asked)]
    else:
        origin = _parse_origin(what)
        origins = _same_file(dataset, origin, root=root) if origin else []
        rows = _trace_places(tracer, _find_origins(tracer, origins))
        drops = _trace_drops(tracer, origins)
        if not rows and not drops:
            rows = _trace_places(tracer, find_row_id(folder, dataset, what))
    if not rows and not drops:
        raise _not_found(dataset, what)
    return Trace(asked=what, dataset=dataset.content_hash, rows=tuple(rows), drops=tuple(drops))


def names_token(what: str) -> bool:
    """Whether `what` names a single token."""
    asked = _parse_place(what)
    return asked is not None and asked.token is not None


def _parse_place(what: str) -> _RowAddress | None:
    """Parse `train:17` or `train:17:203`."""
    match = re.fullmatch(r"(\w+):(\d+)(?::(\d+))?", what)
    if match is None or match[1] not in SPLIT_NAMES:
        return None
    split = next(name for name in get_args(Split) if name == match[1])
    return _RowAddress(split, int(match[2]), int(match[3]) if match[3] else None)


def _parse_origin(what: str) -> Origin | None:
    file, colon, line = what.rpartition(":")
    return Origin(file=file, line=int(line)) if colon and file and line.isdecimal() else None


def _same_file(dataset: Dataset, asked: Origin, *, root: Path) -> list[Origin]:
    """Return the line under every name that the dataset has for its file."""
    names = {file.file for file in dataset.inputs}
    if asked.file in names:
        return [asked]
    paths = {(root / asked.file).resolve(), Path(asked.file).resolve()}
    same = [name for name in names if (root / name).resolve() in paths]
    ending = [name for name in names if name.endswith(f"/{asked.file}")]
    # A name that is not an input is still looked for: drops may name files without rows.
    return [Origin(file=name, line=asked.line) for name in sorted(same or ending or [asked.file])]


def _find_origins(tracer: _Tracer, origins: Iterable[Origin]) -> dict[Split, list[int]]:
    """Return the positions of all rows from these lines."""
    wanted = {(origin.file, origin.line) for origin in origins}
    lines = {line for _, line in wanted}
    places: dict[Split, list[int]] = {}
    if not wanted:
        return places
    for split, first, batch in scan_columns(tracer.folder, tracer.dataset, columns=("file", "line")):
        for offset in _offsets_of(batch.column("line"), lines):
            origin = (batch.column("file")[offset].as_py(), batch.column("line")[offset].as_py())
            if origin in wanted:
                places.setdefault(split, []).append(first + offset)
    return places


def _offsets_of(column: Any, values: Collection[int]) -> list[int]:
    import numpy as np

    numbers = column.to_numpy(zero_copy_only=False)
    return [int(offset) for offset in np.flatnonzero(np.isin(numbers, list(values)))]


def _trace_place(tracer: _Tracer, asked: _RowAddress) -> TracedRow:
    found = fetch_rows(tracer.folder, tracer.dataset, places={asked.split: [asked.number]})
    row = found.get((asked.split, asked.number))
    if row is None:
        summary = tracer.dataset.splits.get(asked.split)
        raise UserMistake(
            f"{asked.split} has no row {asked.number}",
            why=f"it holds {summary.rows if summary else 0} rows, and the first is row 0",
            fix="give a smaller number",
        )
    return _trace_row(tracer, row, split=asked.split, number=asked.number, token=asked.token)


def _trace_places(tracer: _Tracer, places: dict[Split, list[int]]) -> list[TracedRow]:
    found = fetch_rows(tracer.folder, tracer.dataset, places=places)
    return [_trace_row(tracer, row, split=at, number=number) for (at, number), row in found.items()]


def _trace_row(
    tracer: _Tracer, row: Row, *, split: Split, number: int, token: int | None = None
) -> TracedRow:
    return TracedRow(
        place=RowPlace(split=split, number=number, id=row.id, origin=row.origin),
        input_hash=row.input_hash,
        log=check_line(row.origin, expected=row.input_hash, root=tracer.root),
        group=row.group,
        domain=row.domain,
        stage=row.stage,
        weight=row.weight,
        tokens=len(row.tokens),
        trained_from=row.trained_from,
        token=None if token is None else _trace_token(row, token, decoder=tracer.decoder),
        capture=row.capture,
    )


def _trace_token(row: Row, place: int, *, decoder: TokenDecoder | None) -> TracedToken:
    if place >= len(row.tokens):
        raise UserMistake(
            f"the row {row.id} has no token {place}",
            why=f"it has {len(row.tokens)} tokens, and the first is token 0",
            fix="give a smaller number",
        )
    text = None
    if decoder is not None:
        end = 0
        for piece in cut_pieces(row.tokens, trained_from=row.trained_from, decoder=decoder):
            end += len(piece.tokens)
            if place < end:
                text = piece.text
                break
    return TracedToken(place=place, token=row.tokens[place], text=text, trained=place >= row.trained_from)


def _trace_drops(tracer: _Tracer, origins: Collection[Origin]) -> list[TracedDrop]:
    drops = list(_find_drops(tracer, origins))
    named = {drop: _named_in(drop.reason, tracer.dataset) for drop in drops}
    places = _find_origins(tracer, {origin for origins in named.values() for origin in origins})
    rows = fetch_rows(tracer.folder, tracer.dataset, places=places)
    kept = [RowPlace(split=at, number=n, id=row.id, origin=row.origin) for (at, n), row in rows.items()]
    return [
        TracedDrop(
            drop=drop,
            log=check_line(drop.origin, expected=drop.input_hash, root=tracer.root),
            kept=tuple(place for place in kept if place.origin in named[drop]),
        )
        for drop in drops
    ]


def _find_drops(tracer: _Tracer, origins: Collection[Origin]) -> Iterable[Drop]:
    wanted = {(origin.file, origin.line) for origin in origins}
    columns = ("file", "line", "input_hash", "step", "reason")
    for batch in scan_drops(tracer.folder, tracer.dataset, columns=columns) if wanted else ():
        for offset in _offsets_of(batch.column("line"), {line for _, line in wanted}):
            value = batch.slice(offset, 1).to_pylist()[0]
            if (value["file"], value["line"]) in wanted:
                origin = Origin(file=value.pop("file"), line=value.pop("line"))
                yield Drop(origin=origin, **value)


def _named_in(reason: str, dataset: Dataset) -> list[Origin]:
    """Return the lines that a reason names. File names may contain spaces, so the inputs are searched for."""
    return [
        Origin(file=file.file, line=int(match[1]))
        for file in dataset.inputs
        for match in re.finditer(rf"(?<![\w/.-]){re.escape(file.file)}:(\d+)", reason)
    ]


def _not_found(dataset: Dataset, what: str) -> UserMistake:
    files = ", ".join(file.file for file in dataset.inputs[:3])
    more = " …" if len(dataset.inputs) > 3 else ""
    return UserMistake(
        f"the dataset knows nothing of {what!r}",
        why=f"no row and no drop of {dataset.content_hash[:12]} came from it; it was made of {files}{more}",
        fix="name a line as FILE:LINE, a row by its id, or a place such as train:17 or train:17:203",
    )
