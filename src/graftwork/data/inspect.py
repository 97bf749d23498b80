"""Shows rows of a dataset, traces them to the log, and compares two datasets.

Rows are shown as text with the trained part marked. A trace leads from `file:line`, a row id or
`split:number[:token]` to the matching rows and drops, and says whether the log line is unchanged (by its
SHA-256); it reads columns, never all rows. A comparison names settings, base, inputs, rows, drops and tokens
that differ; of each row its split, its number there and a hash of what is trained on are in memory.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from graftwork.data.ingest.read import hash_line
from graftwork.files.dataset import fetch_rows, read_manifest, scan_columns, scan_drops
from graftwork.files.disk import explain_os_error
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset, Drop, Row, Split
from graftwork.records.errors import UserError, needs_extra
from graftwork.records.interaction import CaptureOrigin, Origin

if TYPE_CHECKING:
    from tokenizers import Tokenizer


LONGEST_CHARACTER = 4
"""A UTF-8 character has at most four bytes, so at most four tokens."""


class TextPiece(Record):
    """Consecutive tokens and their text."""

    text: str
    tokens: tuple[int, ...]
    trained: bool
    control: bool


class ShownRow(Record):
    """A row with its text; `number` is its position in the split, counted from 0."""

    split: Split
    number: int
    id: str
    origin: Origin
    group: str | None
    tokens: int
    trained_tokens: int
    pieces: tuple[TextPiece, ...]


def show_rows(
    folder: Path,
    *,
    decoder: "TokenDecoder",
    split: Split = "train",
    rows: int = 3,
    row_id: str | None = None,
    by_token: bool = False,
) -> tuple[ShownRow, ...]:
    """Return the first rows of a split, or all rows with one id."""
    dataset = read_manifest(folder)
    if row_id is None:
        size = dataset.splits[split].rows if split in dataset.splits else 0
        numbers_by_split: dict[Split, list[int]] = {split: list(range(min(rows, size)))}
    else:
        numbers_by_split = find_row_id(folder, dataset, row_id)
    fetched = fetch_rows(folder, dataset, places=numbers_by_split)
    if not fetched:
        sizes = ", ".join(f"{name} {summary.rows}" for name, summary in dataset.splits.items())
        if row_id is None:
            raise UserError(
                f"the split {split} has no rows",
                why=f"the dataset contains {sizes} rows",
                fix="use another split",
            )
        raise UserError(
            f"no row has the id {row_id!r}",
            why=f"the dataset {dataset.content_hash[:12]} contains {sizes} rows, and no id starts with this",
            fix="`graft data trace FILE:LINE` shows what became of a line of the log",
        )
    return tuple(
        show_row(row, split=row_split, number=number, decoder=decoder, by_token=by_token)
        for (row_split, number), row in fetched.items()
    )


def show_row(
    row: Row, *, split: Split, number: int, decoder: "TokenDecoder", by_token: bool = False
) -> ShownRow:
    pieces = cut_pieces(row.tokens, trained_from=row.trained_from, decoder=decoder)
    return ShownRow(
        split=split,
        number=number,
        id=row.id,
        origin=row.origin,
        group=row.group,
        tokens=len(row.tokens),
        trained_tokens=len(row.tokens) - row.trained_from,
        pieces=pieces if by_token else join_pieces(pieces),
    )


def cut_pieces(tokens: Sequence[int], *, trained_from: int, decoder: "TokenDecoder") -> tuple[TextPiece, ...]:
    """Return one piece per token; tokens that share a character share a piece."""
    control = decoder.control_tokens
    pieces: list[TextPiece] = []
    waiting: list[int] = []
    for index, (token, text) in enumerate(zip(tokens, decoder.decode_pieces(tokens), strict=True)):
        waiting.append(token)
        if text or index in (trained_from - 1, len(tokens) - 1):
            trained = index >= trained_from
            pieces.append(
                TextPiece(text=text, tokens=tuple(waiting), trained=trained, control=token in control)
            )
            waiting = []
    return tuple(pieces)


def join_pieces(pieces: Sequence[TextPiece]) -> tuple[TextPiece, ...]:
    """Join adjacent pieces with the same flags."""
    joined = []
    for (trained, control), members in groupby(pieces, key=lambda piece: (piece.trained, piece.control)):
        run = list(members)
        joined.append(
            TextPiece(
                text="".join(piece.text for piece in run),
                tokens=tuple(token for piece in run for token in piece.tokens),
                trained=trained,
                control=control,
            )
        )
    return tuple(joined)


def find_row_id(folder: Path, dataset: Dataset, row_id: str) -> dict[Split, list[int]]:
    """Return the positions of the rows with this id, or with the one id that begins with it."""
    exact: dict[Split, list[int]] = {}
    prefixed: dict[str, dict[Split, list[int]]] = {}
    for split, number, candidate in iterate_ids(folder, dataset, lambda item: item.startswith(row_id)):
        if candidate == row_id:
            exact.setdefault(split, []).append(number)
        elif len(prefixed) < 3:
            prefixed.setdefault(candidate, {}).setdefault(split, []).append(number)
    if exact:
        return exact
    if len(prefixed) > 1:
        raise UserError(
            f"several rows begin with {row_id!r}",
            why=f"among them {', '.join(list(prefixed)[:3])}",
            fix="use more characters of the id",
        )
    return next(iter(prefixed.values()), {})


def iterate_ids(
    folder: Path, dataset: Dataset, accept: Callable[[str], bool]
) -> Iterator[tuple[Split, int, str]]:
    for split, first, batch in scan_columns(folder, dataset, columns=("id",)):
        for offset, row_id in enumerate(batch.column(0).to_pylist()):
            if accept(row_id):
                yield split, first + offset, row_id


class TokenDecoder:
    """Decodes with the tokenizer.json of a base model."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> None:
        """Load the tokenizer now, so that errors come before any output."""
        _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        with needs_extra("train", why="tokens cannot be turned back into text without it"):
            from tokenizers import Tokenizer
        try:
            text = self._file.read_text(encoding="utf-8")
        except OSError as error:
            raise explain_os_error(error, self._file) from error
        tokenizer: Tokenizer = Tokenizer.from_str(text)
        return tokenizer

    @cached_property
    def control_tokens(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def decode_pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return what each token adds to the text before it: some tokenizers drop a leading space at the
        beginning only.
        """
        pieces: list[str] = []
        before, start = 0, 0
        for index in range(len(tokens)):
            context = self._decode(tokens[before:start])
            text = self._decode(tokens[before : index + 1])[len(context) :]
            is_cut = text.endswith("\ufffd") and index + 1 - start < LONGEST_CHARACTER
            if is_cut and index + 1 < len(tokens):
                pieces.append("")
                continue
            pieces.append(text)
            before, start = start, index + 1
        return pieces

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


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
        why = "the dataset contains no hash of the line"
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
                return LogCheck(state="same", words="the log line is unchanged")
            with path.open("rb") as handle:
                if handle.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
                    why = "the log is one JSON document"
        except FileNotFoundError:
            return LogCheck(state="gone", words="the log no longer exists")
        except OSError as error:
            why = error.strerror or str(error)
    if why:
        return LogCheck(state="not_checked", words=f"not checked: {why}")
    return LogCheck(state="changed", words="the log has changed")


def read_log_line(origin: Origin, *, root: Path) -> str | None:
    """The line as the log has it now; None if the log is gone or has no lines of its own."""
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


def trace(folder: Path, what: str, *, root: Path, decoder: "TokenDecoder | None" = None) -> Trace:
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
        suffix = " …" if len(dataset.inputs) > 3 else ""
        raise UserError(
            f"the dataset has no record of {what!r}",
            why=f"no row and no drop of {dataset.content_hash[:12]} came from it; "
            f"it was made from {files}{suffix}",
            fix="specify a line as FILE:LINE, a row by its id, or a position such as train:17 or "
            "train:17:203",
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

    def __init__(self, folder: Path, root: Path, decoder: "TokenDecoder | None") -> None:
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
        lines = {(origin.file, origin.line) for origin in origins}
        numbers_by_split: dict[Split, list[int]] = {}
        columns = scan_columns(self._folder, self.dataset, columns=("file", "line")) if lines else ()
        for split, first, batch in columns:
            numbers_by_split.setdefault(split, []).extend(
                first + offset for offset in _find_lines(batch, lines)
            )
        return {split: numbers for split, numbers in numbers_by_split.items() if numbers}

    def trace_rows(self, places: dict[Split, list[int]]) -> list[TracedRow]:
        rows = fetch_rows(self._folder, self.dataset, places=places)
        return [self._trace_row(row, split, number) for (split, number), row in rows.items()]

    def trace_place(self, split: Split, number: int, token: int | None) -> TracedRow:
        row = fetch_rows(self._folder, self.dataset, places={split: [number]}).get((split, number))
        if row is None:
            summary = self.dataset.splits.get(split)
            raise UserError(
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
            raise UserError(
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
        dropped_lines = {(origin.file, origin.line) for origin in origins}
        columns = ("file", "line", "input_hash", "step", "reason")
        drops: list[Drop] = []
        for batch in scan_drops(self._folder, self.dataset, columns=columns) if dropped_lines else ():
            for offset in _find_lines(batch, dropped_lines):
                value = batch.slice(offset, 1).to_pylist()[0]
                origin = Origin(file=value.pop("file"), line=value.pop("line"))
                drops.append(Drop(origin=origin, **value))
        # File names may contain spaces, so the inputs are searched for.
        files = {
            file.file: re.compile(rf"(?<![\w/.-]){re.escape(file.file)}:(\d+)")
            for file in self.dataset.inputs
        }
        lines_by_drop = {
            drop: [
                Origin(file=file, line=int(match[1]))
                for file, pattern in files.items()
                for match in pattern.finditer(drop.reason)
            ]
            for drop in drops
        }
        numbers = self.find_rows({origin for lines in lines_by_drop.values() for origin in lines})
        rows = fetch_rows(self._folder, self.dataset, places=numbers)
        survivors = [
            RowPlace(split=split, number=n, id=row.id, origin=row.origin) for (split, n), row in rows.items()
        ]
        return [
            TracedDrop(
                drop=drop,
                log=check_line(drop.origin, expected=drop.input_hash, root=self._root),
                kept=tuple(survivor for survivor in survivors if survivor.origin in lines_by_drop[drop]),
            )
            for drop in drops
        ]


def _find_lines(batch: Any, wanted_lines: Collection[tuple[str, int]]) -> list[int]:
    """Return the offsets of the rows of a batch that have one of these files and lines."""
    import numpy as np

    lines = batch.column("line").to_numpy(zero_copy_only=False)
    offsets = np.flatnonzero(np.isin(lines, [line for _, line in wanted_lines])).tolist()
    return [
        offset
        for offset in offsets
        if (batch.column("file")[offset].as_py(), int(lines[offset])) in wanted_lines
    ]


SPLITS: tuple[Split, ...] = get_args(Split)
RowKey = tuple[str, int]
"""The id, and which row with this id it is: logs may use one twice."""


class SeenRow(NamedTuple):
    split: Split
    number: int
    content: bytes


def read_row_keys(folder: Path, dataset: Dataset) -> dict[RowKey, SeenRow]:
    rows: dict[RowKey, SeenRow] = {}
    repeats: Counter[str] = Counter()
    names = ("id", "tokens", "trained_from", "weight")
    for split, first, batch in scan_columns(folder, dataset, columns=names):
        lists = batch.column("tokens")
        values, ends = lists.values.to_numpy(), lists.offsets.to_numpy()
        columns = (batch.column(name).to_pylist() for name in ("id", "trained_from", "weight"))
        for index, (row_id, trained_from, weight) in enumerate(zip(*columns, strict=True)):
            digest = hashlib.blake2b(f"{trained_from} {weight}\n".encode(), digest_size=8)
            digest.update(values[ends[index] : ends[index + 1]].tobytes())
            rows[row_id, repeats[row_id]] = SeenRow(split, first + index, digest.digest())
            repeats[row_id] += 1
    return rows


def read_drops(folder: Path, dataset: Dataset) -> dict[str, Counter[tuple[str, int]]]:
    """The dropped lines by the step that drops them."""
    drops: dict[str, Counter[tuple[str, int]]] = {}
    for batch in scan_drops(folder, dataset, columns=("file", "line", "step")):
        values = (batch.column(name).to_pylist() for name in ("file", "line", "step"))
        for file, line, step in zip(*values, strict=True):
            drops.setdefault(step, Counter())[file, line] += 1
    return drops


NAMED = 20
"""Rows named per kind; the rest is counted."""


class ValueChange(Record):
    """A value that differs; None if it is missing."""

    key: str
    before: Any
    after: Any


class NamedRow(Record):
    """A row, with its split before and after."""

    id: str
    origin: Origin
    before: Split | None
    after: Split | None


class RowChanges(Record):
    """`changed` rows are in the same split and rendered differently. The first of each kind are named."""

    same: int
    added: int
    removed: int
    moved: int
    changed: int
    named: dict[str, tuple[NamedRow, ...]] = {}


class InputChanges(Record):
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]


class DropChanges(Record):
    """The drops of one step."""

    before: int
    after: int
    appeared: int
    vanished: int


class SplitTotals(Record):
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0


class SplitChange(Record):
    before: SplitTotals
    after: SplitTotals


class DatasetDiff(Record):
    before: str
    after: str
    same: bool
    made_for: tuple[ValueChange, ...]
    settings: tuple[ValueChange, ...]
    inputs: InputChanges
    rows: RowChanges
    drops: dict[str, DropChanges]
    splits: dict[Split, SplitChange]


_MADE_FOR = ("model", "base", "base_fingerprint", "template_fingerprint", "tokenizer_fingerprint")


def diff_datasets(before: Path, after: Path) -> DatasetDiff:
    old, new = read_manifest(before), read_manifest(after)
    old_files, new_files = ({file.file: file.sha256 for file in dataset.inputs} for dataset in (old, new))
    old_drops, new_drops = read_drops(before, old), read_drops(after, new)
    nothing: Counter[tuple[str, int]] = Counter()
    drops = {}
    for step in dict.fromkeys((*old_drops, *new_drops)):
        was, now = old_drops.get(step, nothing), new_drops.get(step, nothing)
        drops[step] = DropChanges(
            before=was.total(),
            after=now.total(),
            appeared=(now - was).total(),
            vanished=(was - now).total(),
        )
    return DatasetDiff(
        before=old.content_hash,
        after=new.content_hash,
        same=old.content_hash == new.content_hash,
        made_for=_diff_values(*({key: getattr(dataset, key) for key in _MADE_FOR} for dataset in (old, new))),
        settings=_diff_values(dict(_flatten(old.settings)), dict(_flatten(new.settings))),
        inputs=InputChanges(
            added=tuple(sorted(new_files.keys() - old_files.keys())),
            removed=tuple(sorted(old_files.keys() - new_files.keys())),
            changed=tuple(
                sorted(
                    file for file in old_files.keys() & new_files.keys() if old_files[file] != new_files[file]
                )
            ),
        ),
        rows=_diff_rows(before, old, after, new),
        drops=drops,
        splits={
            split: SplitChange(before=_totals(old, split), after=_totals(new, split))
            for split in SPLITS
            if split in old.splits or split in new.splits
        },
    )


def _flatten(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested settings to dotted keys."""
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flatten(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}", inner


def _diff_values(before: dict[str, Any], after: dict[str, Any]) -> tuple[ValueChange, ...]:
    return tuple(
        ValueChange(key=key, before=before.get(key), after=after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    )


def _totals(dataset: Dataset, split: Split) -> SplitTotals:
    summary = dataset.splits.get(split)
    if summary is None:
        return SplitTotals()
    return SplitTotals(rows=summary.rows, tokens=summary.tokens, trained_tokens=summary.trained_tokens)


def _diff_rows(before: Path, old: Dataset, after: Path, new: Dataset) -> RowChanges:
    was, now = read_row_keys(before, old), read_row_keys(after, new)
    common = [key for key in now if key in was]
    moved = [key for key in common if was[key].split != now[key].split]
    changed = [
        key for key in common if was[key].split == now[key].split and was[key].content != now[key].content
    ]
    added, removed = [key for key in now if key not in was], [key for key in was if key not in now]
    examples = {
        "moved": _name(after, new, moved, now, was=was, now=now),
        "changed": _name(after, new, changed, now, was=was, now=now),
        "added": _name(after, new, added, now, was=was, now=now),
        "removed": _name(before, old, removed, was, was=was, now=now),
    }
    return RowChanges(
        same=len(common) - len(moved) - len(changed),
        added=len(added),
        removed=len(removed),
        moved=len(moved),
        changed=len(changed),
        named={kind: rows for kind, rows in examples.items() if rows},
    )


def _name(
    folder: Path,
    dataset: Dataset,
    keys: Sequence[RowKey],
    stand: dict[RowKey, SeenRow],
    *,
    was: dict[RowKey, SeenRow],
    now: dict[RowKey, SeenRow],
) -> tuple[NamedRow, ...]:
    """Read id and origin of the first of these rows from their dataset, where they `stand`."""
    first = sorted(keys, key=lambda key: (SPLITS.index(stand[key].split), stand[key].number))[:NAMED]
    numbers: dict[Split, list[int]] = {}
    for key in first:
        numbers.setdefault(stand[key].split, []).append(stand[key].number)
    rows = fetch_rows(folder, dataset, places=numbers)
    examples = []
    for key in first:
        row = rows[stand[key].split, stand[key].number]
        before, after = (side[key].split if key in side else None for side in (was, now))
        examples.append(NamedRow(id=row.id, origin=row.origin, before=before, after=after))
    return tuple(examples)
