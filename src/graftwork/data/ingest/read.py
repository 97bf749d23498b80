"""Reads rows into interactions, each with the file and line it came from.

Input: paths, or a block of JSON lines. Output: interactions and faults; a bad row is a fault that names its
origin and never stops the good ones. Does not judge the content. A row has the format that the settings name,
their mapping, or the first that fits. To add a built-in format, write `fits_NAME` and `read_NAME` and enter
them in `FORMATS`; an installed package adds one through the entry points `graftwork.formats`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson
from pydantic import ValidationError

from graftwork.data.ingest import captures
from graftwork.data.ingest import dataset_formats as datasets
from graftwork.data.ingest import log_formats as logs
from graftwork.data.ingest import trace_formats as traces
from graftwork.data.ingest.blocks import FaultCode, LogBlock, ReadFault, RowResult
from graftwork.data.ingest.fields import (
    BadRow,
    name_type,
    open_json,
    parse_object,
    read_each,
    report_bad_row,
    take_object,
)
from graftwork.data.ingest.files import cut_blocks, find_sources
from graftwork.data.ingest.transcripts import TranscriptReader
from graftwork.data.ingest.turns import drop_reasoning
from graftwork.data.settings import DataSettings, FormatName, Mapping, names_file
from graftwork.process.extensions import load_extension
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.redact import redact
from graftwork.text.shape import MOST_VALUES, has_too_many_values


class RowFormat(Protocol):
    """What a format provides; an entry point in `graftwork.formats` names such an object."""

    @property
    def expects(self) -> str:
        """The keys that such a row has, for error messages."""

    def fits(self, row: dict[str, Any], /) -> bool:
        """Whether the row has the keys of this format."""

    def read(self, row: dict[str, Any], origin: Origin, /) -> Sequence[RowResult]:
        """Read a row that fits. Raises `BadRow` that names the key that is wrong, and never its value."""


Fits = Callable[[dict[str, Any]], bool]
ReadRows = Callable[[dict[str, Any], Origin], Interaction | Sequence[RowResult]]


class BuiltInFormat:
    """`keys`: a row that has none of them does not fit. A format without keys is recognized by the beginning
    of a file: no row by itself has it.
    """

    def __init__(
        self,
        expects: str,
        keys: str = "",
        fits: Fits = lambda _row: False,
        read: ReadRows = lambda _row, _origin: (),
    ) -> None:
        self.expects, self.keys = expects, frozenset(keys.split())
        self.fits, self._read = fits, read

    def read(self, row: dict[str, Any], origin: Origin, /) -> Sequence[RowResult]:
        results = self._read(row, origin)
        return [results] if isinstance(results, Interaction) else results


# Tried in this order: a format comes before those that its rows would also fit.
FORMATS: dict[FormatName, BuiltInFormat] = {
    "repaired": BuiltInFormat(
        "a row of `graft data repair`: messages, reply and answered",
        "answered",
        logs.fits_repaired,
        logs.read_repaired,
    ),
    "otlp": BuiltInFormat(
        "a line of OTLP JSON (resourceSpans or resourceLogs), or a span with its attributes",
        " ".join(("resourceSpans resourceLogs batches", *traces.SPAN_KEYS)),
        traces.fits_otlp,
        traces.read_otlp,
    ),
    "mlflow": BuiltInFormat(
        "an MLflow trace with info and data", "info spans", traces.fits_mlflow, traces.read_mlflow
    ),
    "langsmith": BuiltInFormat("a LangSmith run", "run_type", traces.fits_langsmith, traces.read_langsmith),
    "litellm": BuiltInFormat("a LiteLLM log", "call_type", logs.fits_litellm, logs.read_litellm),
    "helicone": BuiltInFormat(
        "a Helicone request with request_body", "request_id", logs.fits_helicone, logs.read_helicone
    ),
    "openai_stored": BuiltInFormat(
        "a stored completion or response with its input", "object", logs.fits_stored, logs.read_stored
    ),
    "claude_code": BuiltInFormat("a file that is a Claude Code transcript"),
    "codex": BuiltInFormat("a file that is a Codex transcript"),
    "langfuse": BuiltInFormat(
        "a Langfuse observation or score",
        "trace_id traceId session_id sessionId observations",
        traces.fits_langfuse,
        traces.read_langfuse,
    ),
    "captured": BuiltInFormat(
        "a capture with request and reply", "request", captures.fits_captured, captures.read_captured
    ),
    "execution": BuiltInFormat(
        "an execution with its output", "execution", logs.fits_execution, logs.read_execution
    ),
    "openai_log": BuiltInFormat(
        "request and response", "response error modelOutput", logs.fits_openai_log, logs.read_openai_log
    ),
    "session": BuiltInFormat(
        "a session with decisions, code_patterns or exchanges",
        " ".join(("session", *logs.SESSION_LISTS)),
        logs.fits_session,
        logs.read_session,
    ),
    "preference": BuiltInFormat(
        "prompt, chosen and rejected",
        "chosen preferred_output",
        datasets.fits_preference,
        datasets.read_preference,
    ),
    "chat": BuiltInFormat("messages", "messages contents steps", datasets.fits_chat, datasets.read_chat),
    "sharegpt": BuiltInFormat(
        "conversations with from and value",
        "conversations conversation",
        datasets.fits_sharegpt,
        datasets.read_sharegpt,
    ),
    "alpaca": BuiltInFormat(
        "instruction and output", "instruction", datasets.fits_alpaca, datasets.read_alpaca
    ),
    "completion": BuiltInFormat(
        "prompt and completion", "prompt question", datasets.fits_completion, datasets.read_completion
    ),
}
_ADVICE = (
    (("role", "content"), "this is one message; put all of a conversation into one row, under `messages`"),
    (("kind", "parts"), "this is one message; put all of a conversation into one row, under `messages`"),
    (("custom_id", "result"), "the result has no request; join them as `request` and `response`"),
)
"""Rows that cannot be read by themselves, by their keys, and what to export instead."""
_EXPECTED = "; ".join(form.expects for form in FORMATS.values())
REQUIRED = ("expects", "fits", "read")


@cache
def load_format(name: str) -> RowFormat:
    """Return the built-in format of this name, or the one that an installed package adds."""
    for format_name, form in FORMATS.items():
        if format_name == name:
            return form
    extension: RowFormat = load_extension("graftwork.formats", name, attributes=REQUIRED)
    return extension


def find_format(row: dict[str, Any]) -> FormatName | None:
    """Return the name of the first built-in format that fits the row, or the rows that it wraps."""
    name = _find_own_format(row)
    wrapped = _find_wrapped(row) if name is None else None
    return name if wrapped is None else _find_own_format(wrapped[1][0])


def _find_own_format(row: dict[str, Any]) -> FormatName | None:
    for name, form in FORMATS.items():
        if not form.keys.isdisjoint(row) and form.fits(row):
            return name
    return None


def _find_wrapped(row: dict[str, Any]) -> tuple[str, list[Any]] | None:
    """Return the only list of objects of a row and its key, if its first object is of a known format."""
    lists = [(key, value) for key, value in row.items() if isinstance(value, list) and value]
    lists = [(key, value) for key, value in lists if isinstance(value[0], dict)]
    return lists[0] if len(lists) == 1 and _find_own_format(lists[0][1][0]) else None


def read_row(row: dict[str, Any], origin: Origin, *, settings: DataSettings) -> Sequence[RowResult]:
    """Read a row: its interactions, and what of it is not an interaction."""
    # Our own rows among the logs of a project are read whatever form the others have.
    if "answered" in row and logs.fits_repaired(row):
        results: Sequence[RowResult] = [logs.read_repaired(row, origin)]
    elif "release" in row and captures.fits_captured(row):
        results = [captures.read_captured(row, origin)]
    elif settings.mapping and settings.mapping.reply and not settings.format:
        results = [datasets.read_mapped(row, origin, mapping=settings.mapping)]
    else:
        results = _read_format(row, origin, settings)
    for medium in _MEDIA:
        mark = f"<{medium}>"
        for key in (medium, f"{medium}s"):
            value = row.get(key)
            # Text under such a key may name a container image; in a conversation about it, the mark stands.
            if (isinstance(value, list | dict) and any(value)) or (value and _mention(results, mark)):
                # Without them, the reply is made up.
                raise BadRow(f"`{key}` holds {medium} files that belong to the turns, and only text is read")
    return apply_reasoning(results, settings)


_MEDIA = ("image", "audio", "video")


def _mention(results: Sequence[RowResult], mark: str) -> bool:
    rows = (result for result in results if isinstance(result, Interaction))
    return any(mark in message.content for row in rows for message in row.messages)


def _read_format(row: dict[str, Any], origin: Origin, settings: DataSettings) -> Sequence[RowResult]:
    """Read a row by the format that is set or fits, or the rows that it wraps."""
    name = settings.format or _find_own_format(row)
    form = load_format(name) if name else None
    if form and (not settings.format or form.fits(row)):
        results, mapping = form.read(row, origin), settings.mapping
        if mapping is None:
            return results
        return [
            datasets.take_mapped(result, row, mapping=mapping) if isinstance(result, Interaction) else result
            for result in results
        ]
    if wrapped := _find_wrapped(row):
        return _read_wrapped(*wrapped, origin, settings)
    for names, advice in _ADVICE:
        if set(names) <= row.keys() and len(row) <= 2 * len(names) + 2:
            raise BadRow(advice)
    if form:
        raise BadRow(f"no row of the format {name} {_name_keys(row)}; expected {form.expects}")
    raise BadRow(
        f"no known shape {_name_keys(row)}; expected one of: {_EXPECTED}; or a mapping in graft.yaml"
    )


def _read_wrapped(key: str, rows: list[Any], origin: Origin, settings: DataSettings) -> Sequence[RowResult]:
    """Read the rows of an object that wraps them, which have its name and their number."""

    def read_item(item: Any) -> Sequence[RowResult]:
        return read_row(take_object(open_json(item), "the row"), origin, settings=settings)

    results: list[RowResult] = []
    for number, (path, read) in enumerate(read_each(rows, key, read_item), start=1):
        if isinstance(read, Exception):
            results.append(report_bad_row(read, origin, path=path))
            continue
        for result in read:
            unnamed = isinstance(result, Interaction) and result.id == str(origin)
            results.append(result.model_copy(update={"id": f"{origin}#{number}"}) if unnamed else result)
    return results


def apply_reasoning(results: Sequence[RowResult], settings: DataSettings) -> Sequence[RowResult]:
    """Leave the reasoning out where the settings say so."""
    if settings.reasoning == "keep":
        return results
    return [
        result.model_copy(
            update={
                "reply": drop_reasoning(result.reply),
                "rejected": None if result.rejected is None else drop_reasoning(result.rejected),
            }
        )
        if isinstance(result, Interaction)
        else result
        for result in results
    ]


def _name_keys(row: dict[str, Any]) -> str:
    # Redacted before it is cut: half a secret is not recognized as one.
    keys = redact(", ".join(sorted(row)[:8])).text
    return f"(keys: {keys[:120] or 'none'})"


def settings_of_file(settings: DataSettings, name: str) -> DataSettings:
    """The settings with the format that `data.formats` names for this log file."""
    form = next((form for pattern, form in settings.formats.items() if names_file(pattern, name)), None)
    if form is None:
        return settings
    if isinstance(form, Mapping):
        return settings.model_copy(update={"format": None, "mapping": form})
    return settings.model_copy(update={"format": form, "mapping": None})


_KEY = re.compile(rb'(?<!\\)"\s*:')
_LENIENT_MARKS = ("NaN", "Infinity", "\\ud", "\\uD")
_LONE_HALF = re.compile("[\ud800-\udfff]")
_DEFAULTS = DataSettings()


HASH_LENGTH = 32


class ReadRow(NamedTuple):
    """One result of a block: an interaction, a fault, or another part of a line. `input_hash` identifies
    the bytes of its row.
    """

    line: int
    input_hash: str
    result: RowResult


def read(
    paths: Iterable[str], *, root: Path = Path(), settings: DataSettings | None = None
) -> Iterator[Interaction | ReadFault]:
    """Yield every row of every file, in order."""
    for name in find_sources(paths, root=root):
        yield from read_file(name, root=root, settings=settings)


def read_file(
    name: str, *, root: Path = Path(), settings: DataSettings | None = None
) -> Iterator[Interaction | ReadFault]:
    """Yield every row of one file. An empty file, or one that cannot be opened, is an error."""
    for block in cut_blocks(name, root=root):
        for row in read_block(block, settings=settings or _DEFAULTS):
            if isinstance(row.result, Interaction | ReadFault):
                yield row.result


class Sample(NamedTuple):
    """Rows of a log, the format of each line, and what could not be read."""

    rows: tuple[Interaction, ...]
    formats: tuple[FormatName | None, ...]
    faults: tuple[ReadFault, ...]
    whole: bool
    """Whether these are all rows."""


MOST_SAMPLED = 20_000


def sample_rows(paths: Iterable[str], *, settings: DataSettings = _DEFAULTS) -> Sample:
    """Read the first rows of a log, with their formats."""
    rows: list[Interaction] = []
    faults: list[ReadFault] = []
    formats: list[FormatName | None] = []
    for name in find_sources(paths, root=Path()):
        for block in cut_blocks(name, root=Path()):
            if block.transcript:
                formats.append(block.transcript)
            else:
                lines = block.data.split(b"\n")
                formats += [find_format(row) for line in lines if (row := parse_object(line))]
            for entry in read_block(block, settings=settings):
                if isinstance(entry.result, ReadFault):
                    faults.append(entry.result)
                elif isinstance(entry.result, Interaction):
                    rows.append(entry.result)
            if len(rows) >= MOST_SAMPLED:
                return Sample(tuple(rows[:MOST_SAMPLED]), tuple(formats), tuple(faults), whole=False)
    return Sample(tuple(rows), tuple(formats), tuple(faults), whole=True)


def hash_line(line: bytes) -> str:
    """Identify a row of a log: the hash of its bytes without surrounding white space."""
    return hashlib.sha256(line.strip()).hexdigest()[:HASH_LENGTH]


def read_block(block: LogBlock, *, settings: DataSettings) -> Iterator[ReadRow]:
    """Yield the rows of one block and the faults of its container, in line order."""
    settings = settings_of_file(settings, block.file)
    faults = sorted(block.faults, key=lambda fault: fault.origin.line, reverse=True)
    lines = block.data.split(b"\n")
    # After the last line end there is nothing, or a row that is still being written.
    is_open = bool(lines[-1].strip())
    offsets = range(len(lines)) if block.offsets is None else block.offsets
    transcript = TranscriptReader(block.transcript) if block.transcript else None
    for offset, data in zip(offsets, lines, strict=False):
        raw = data.strip()
        if not raw or (transcript and transcript.continue_conversation(raw)):
            continue
        line = block.first_line + offset
        while faults and faults[-1].origin.line < line:
            fault = faults.pop()
            yield ReadRow(fault.origin.line, "", fault)
        input_hash = hash_line(raw)
        origin = Origin(file=block.file, line=line)
        for result in _read_line(raw, origin, transcript, settings):
            is_last = is_open and data is lines[-1]
            yield ReadRow(line, input_hash, _mark_unfinished(result) if is_last else result)
    for fault in reversed(faults):
        yield ReadRow(fault.origin.line, "", fault)


def _mark_unfinished(result: RowResult) -> RowResult:
    if not isinstance(result, ReadFault) or result.code == "schema":
        return result
    return result.model_copy(update={"message": f"{result.message}; the file may still be being written"})


def _read_line(
    raw: bytes, origin: Origin, transcript: TranscriptReader | None, settings: DataSettings
) -> Sequence[RowResult]:
    """Read one line; what makes it unreadable becomes a fault."""
    results: Sequence[RowResult]
    try:
        if transcript:
            results = apply_reasoning(transcript.read(raw, origin), settings)
        else:
            results = read_row(_parse_row(raw), origin, settings=settings)
    except (BadRow, ValidationError) as error:
        results = [report_bad_row(error, origin)]
    except _NotJson as error:
        results = [ReadFault(origin=origin, code=error.code, message=str(error))]
    except RecursionError:
        results = [ReadFault(origin=origin, code="parse_error", message="the row is nested too deeply")]
    if transcript and settings.format not in (None, transcript.kind):
        message = f"the file is a transcript of the format {transcript.kind}"
        return [ReadFault(origin=origin, code="schema", message=message)] * len(results)
    return results


class _NotJson(Exception):
    """The row is not JSON that can be read."""

    def __init__(self, code: FaultCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def _parse_row(raw: bytes) -> dict[str, Any]:
    if has_too_many_values(raw):
        raise _NotJson("parse_error", f"the row contains {MOST_VALUES:,} values or more")
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            row = _parse_leniently(raw.decode())
        except UnicodeDecodeError:
            raise _NotJson("encoding", "the row is not UTF-8") from None
        if row is None and b"\0" in raw:
            raise _NotJson("encoding", "the row contains NUL bytes") from None
        if row is None:
            raise _NotJson("parse_error", f"the row is not JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise BadRow(f"the row must be an object, not {name_type(row)}")
    _refuse_repeated_keys(raw, row)
    return row


def _parse_leniently(text: str) -> Any:
    """Parse what the strict parser refuses: NaN, Infinity and lone surrogates.

    The numbers become null, the surrogates the replacement character. None if the row is invalid in another
    way.
    """
    if not any(mark in text for mark in _LENIENT_MARKS):
        return None
    try:
        row = json.loads(text, parse_constant=lambda _name: None)
        return orjson.loads(_LONE_HALF.sub("\ufffd", json.dumps(row, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None


def _refuse_repeated_keys(raw: bytes, row: dict[str, Any]) -> None:
    """Refuse repeated keys, of which the parser silently keeps the last.

    Written again, a row that lost a key has fewer quotes, which is cheap to count. Only where the counts
    differ are keys counted, and only then is the row parsed again.
    """
    try:
        if orjson.dumps(row).count(b'"') == raw.count(b'"'):
            return
    except TypeError:
        pass  # nested too deeply to be written
    if len(_KEY.findall(raw)) == _count_keys(row):
        return

    def refuse(pairs: list[tuple[str, Any]]) -> None:
        earlier: set[str] = set()
        for key, _ in pairs:
            if key in earlier:
                raise BadRow(f"the key `{redact(key).text[:60]}` occurs twice in one object")
            earlier.add(key)

    json.loads(raw, object_pairs_hook=refuse)


def _count_keys(row: dict[str, Any]) -> int:
    count = len(row)
    inside: list[Any] = [row.values()]
    for values in inside:  # grows as it is walked
        for value in values:
            if type(value) is dict:
                count += len(value)
                inside.append(value.values())
            elif type(value) is list:
                inside.append(value)
    return count
