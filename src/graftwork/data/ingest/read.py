"""Reads rows into interactions, each with the file and line it came from.

In: paths, or a block of JSON lines. Out: interactions and faults; a bad row is a fault that names its
origin and never stops the good ones. Does not judge the content. A row has the format that the settings
name, their mapping, or the first that fits. To add a built-in format, write `fits_NAME` and `read_NAME` and
enter them in `FORMATS`; an installed package adds one through the entry points `graftwork.formats`.
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

from graftwork.data.ingest import dataset_formats as datasets
from graftwork.data.ingest import log_formats as logs
from graftwork.data.ingest import trace_formats as traces
from graftwork.data.ingest.blocks import FaultCode, LogBlock, ReadFault, RowResult, SkippedPart, TraceScore
from graftwork.data.ingest.fields import BadRow, explain, name_type, open_json, take_object
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


class _BuiltInFormat(NamedTuple):
    """`keys`: a row that has none of them does not fit."""

    expects: str
    keys: frozenset[str]
    fits: Callable[[dict[str, Any]], bool]
    read: Callable[[dict[str, Any], Origin], Sequence[RowResult]]


def _single(
    expects: str,
    keys: str,
    fits: Callable[[dict[str, Any]], bool],
    read: Callable[[dict[str, Any], Origin], Interaction],
) -> _BuiltInFormat:
    """A format whose rows hold one interaction."""
    return _BuiltInFormat(expects, frozenset(keys.split()), fits, lambda row, origin: [read(row, origin)])


def _whole_file(expects: str) -> _BuiltInFormat:
    """A format that is recognized by the beginning of a file: no row by itself has it."""
    return _BuiltInFormat(expects, frozenset(), lambda _row: False, lambda _row, _origin: [])


# Tried in this order: a format comes before those that its rows would also fit.
FORMATS: dict[FormatName, _BuiltInFormat] = {
    "repaired": _single(
        "a row of `graft data repair`: messages, reply and answered",
        "answered",
        logs.fits_repaired,
        logs.read_repaired,
    ),
    "otlp": _BuiltInFormat(
        "a line of OTLP JSON (resourceSpans or resourceLogs), or a span with its attributes",
        frozenset(("resourceSpans", "resourceLogs", "batches", *traces.SPAN_KEYS)),
        traces.fits_otlp,
        traces.read_otlp,
    ),
    "mlflow": _BuiltInFormat(
        "an MLflow trace with info and data",
        frozenset(("info", "spans")),
        traces.fits_mlflow,
        traces.read_mlflow,
    ),
    "langsmith": _BuiltInFormat(
        "a LangSmith run", frozenset(("run_type",)), traces.fits_langsmith, traces.read_langsmith
    ),
    "litellm": _BuiltInFormat(
        "a LiteLLM log", frozenset(("call_type",)), logs.fits_litellm, logs.read_litellm
    ),
    "helicone": _BuiltInFormat(
        "a Helicone request with request_body",
        frozenset(("request_id",)),
        logs.fits_helicone,
        logs.read_helicone,
    ),
    "openai_stored": _BuiltInFormat(
        "a stored completion or response with its input",
        frozenset(("object",)),
        logs.fits_stored,
        logs.read_stored,
    ),
    "claude_code": _whole_file("a file that is a Claude Code transcript"),
    "codex": _whole_file("a file that is a Codex transcript"),
    "langfuse": _BuiltInFormat(
        "a Langfuse observation or score",
        frozenset(("trace_id", "traceId", "session_id", "sessionId", "observations")),
        traces.fits_langfuse,
        traces.read_langfuse,
    ),
    "captured": _single(
        "a capture with request and reply", "request", logs.fits_captured, logs.read_captured
    ),
    "execution": _single(
        "an execution with its output", "execution", logs.fits_execution, logs.read_execution
    ),
    "openai_log": _single(
        "request and response", "response error modelOutput", logs.fits_openai_log, logs.read_openai_log
    ),
    "session": _BuiltInFormat(
        "a session with decisions, code_patterns or exchanges",
        frozenset(("session", *logs.SESSION_LISTS)),
        logs.fits_session,
        logs.read_session,
    ),
    "preference": _single(
        "prompt, chosen and rejected",
        "chosen preferred_output",
        datasets.fits_preference,
        datasets.read_preference,
    ),
    "chat": _single("messages", "messages contents steps", datasets.fits_chat, datasets.read_chat),
    "sharegpt": _single(
        "conversations with from and value",
        "conversations conversation",
        datasets.fits_sharegpt,
        datasets.read_sharegpt,
    ),
    "alpaca": _single("instruction and output", "instruction", datasets.fits_alpaca, datasets.read_alpaca),
    "completion": _single(
        "prompt and completion", "prompt question", datasets.fits_completion, datasets.read_completion
    ),
}
_ADVICE = (
    (("role", "content"), "this is one message; put all of a conversation into one row, under `messages`"),
    (("kind", "parts"), "this is one message; put all of a conversation into one row, under `messages`"),
    (("custom_id", "result"), "the result stands without its request; join them as `request` and `response`"),
)
"""Rows that cannot be read by themselves, by their keys, and what to export instead."""
_EXPECTED = "; ".join(form.expects for form in FORMATS.values())
REQUIRED = ("expects", "fits", "read")


@cache
def load_format(name: str) -> RowFormat:
    """Return the built-in format of this name, or the one that an installed package adds."""
    for known, form in FORMATS.items():
        if known == name:
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


def _read_wrapped(key: str, rows: list[Any], origin: Origin, settings: DataSettings) -> Sequence[RowResult]:
    """Read the rows of an object that wraps them. One that cannot be read does not stop the others."""
    results: list[RowResult] = []
    for place, item in enumerate(rows):
        try:
            read = read_row(take_object(open_json(item), "the row"), origin, settings=settings)
        except (BadRow, ValidationError) as error:
            message = redact(f"`{key}[{place}]`: {explain(error)}").text
            results.append(ReadFault(origin=origin, code="schema", message=message))
            continue
        for result in read:
            unnamed = isinstance(result, Interaction) and result.id == str(origin)
            results.append(result.model_copy(update={"id": f"{origin}#{place + 1}"}) if unnamed else result)
    return results


def read_row(row: dict[str, Any], origin: Origin, *, settings: DataSettings) -> Sequence[RowResult]:
    """Read a row: its interactions, and what of it is no interaction."""
    results = _read(row, origin, settings)
    _require_text_alone(row, results)
    return apply_reasoning(results, settings)


_MEDIA = ("image", "audio", "video")


def _require_text_alone(row: dict[str, Any], results: Sequence[RowResult]) -> None:
    """Refuse a row with images, audio or video: without them, the reply is made up."""
    for medium in _MEDIA:
        mark = f"<{medium}>"
        for key in (medium, f"{medium}s"):
            value = row.get(key)
            if not value:
                continue
            # Text under such a key may name a container image; in a conversation about it, the mark stands.
            if (isinstance(value, list | dict) and any(value)) or any(
                mark in message.content
                for result in results
                if isinstance(result, Interaction)
                for message in result.messages
            ):
                raise BadRow(f"`{key}` holds {medium} files that belong to the turns, and only text is read")


def apply_reasoning(found: Sequence[RowResult], settings: DataSettings) -> Sequence[RowResult]:
    """Leave the reasoning out where the settings say so."""
    if settings.reasoning == "keep":
        return found
    return [_without_reasoning(result) if isinstance(result, Interaction) else result for result in found]


def to_interactions(row: dict[str, Any], origin: Origin, *, settings: DataSettings) -> list[Interaction]:
    """Return only the interactions of a row."""
    return [result for result in read_row(row, origin, settings=settings) if isinstance(result, Interaction)]


def _read(row: dict[str, Any], origin: Origin, settings: DataSettings) -> Sequence[RowResult]:
    if "answered" in row and logs.fits_repaired(row):
        # Our own rows among the logs of a project, whatever form the others have.
        return [logs.read_repaired(row, origin)]
    if "release" in row and logs.fits_captured(row):
        return [logs.read_captured(row, origin)]
    if settings.mapping and settings.mapping.reply and not settings.format:
        return [datasets.read_mapped(row, origin, mapping=settings.mapping)]
    name = settings.format or _find_own_format(row)
    form = load_format(name) if name else None
    if form and (not settings.format or form.fits(row)):
        return _map_fields(form.read(row, origin), row, settings.mapping)
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


def _map_fields(
    results: Sequence[RowResult], row: dict[str, Any], mapping: Mapping | None
) -> Sequence[RowResult]:
    if mapping is None:
        return results
    return [
        datasets.take_mapped(result, row, mapping=mapping) if isinstance(result, Interaction) else result
        for result in results
    ]


def _name_keys(row: dict[str, Any]) -> str:
    # Redacted before it is cut: half a secret is not recognized as one.
    keys = redact(", ".join(sorted(row)[:8])).text
    return f"(keys: {keys[:120] or 'none'})"


def _without_reasoning(found: Interaction) -> Interaction:
    kept = {"reply": drop_reasoning(found.reply)}
    if found.rejected is not None:
        kept["rejected"] = drop_reasoning(found.rejected)
    return found.model_copy(update=kept)


def settings_of_file(settings: DataSettings, name: str) -> DataSettings:
    """The settings with the format that `data.formats` names for this log file."""
    form = next((form for pattern, form in settings.formats.items() if names_file(pattern, name)), None)
    if form is None:
        return settings
    if isinstance(form, Mapping):
        return settings.model_copy(update={"format": None, "mapping": form})
    return settings.model_copy(update={"format": form, "mapping": None})


__all__ = [
    "FaultCode",
    "ReadFault",
    "ReadRow",
    "SkippedPart",
    "TraceScore",
    "find_files",
    "read",
    "read_block",
    "read_file",
]

_KEY = re.compile(rb'(?<!\\)"\s*:')
_LENIENT_MARKS = (b"NaN", b"Infinity", b"\\ud", b"\\uD")
_LONE_HALF = re.compile("[\ud800-\udfff]")
_DEFAULTS = DataSettings()


HASH_LENGTH = 32


class ReadRow(NamedTuple):
    """One result of a block: an interaction, a fault, or what of a line is neither. `input_hash` identifies
    the bytes of its row.
    """

    line: int
    input_hash: str
    result: RowResult


def find_files(paths: Iterable[str], *, root: Path = Path()) -> tuple[str, ...]:
    return find_sources(paths, root=root)


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


def sample_rows(
    paths: Iterable[str], *, root: Path = Path(), settings: DataSettings = _DEFAULTS, most: int = 20_000
) -> Sample:
    """Read the first rows of a log, with their formats."""
    rows: list[Interaction] = []
    faults: list[ReadFault] = []
    formats: list[FormatName | None] = []
    for name in find_sources(paths, root=root):
        for block in cut_blocks(name, root=root):
            if block.transcript:
                formats.append(block.transcript)
            else:
                lines = block.data.split(b"\n")
                formats += [find_format(row) for line in lines if (row := _parse_object(line))]
            for found in read_block(block, settings=settings):
                if isinstance(found.result, ReadFault):
                    faults.append(found.result)
                elif isinstance(found.result, Interaction):
                    rows.append(found.result)
            if len(rows) >= most:
                return Sample(tuple(rows[:most]), tuple(formats), tuple(faults), whole=False)
    return Sample(tuple(rows), tuple(formats), tuple(faults), whole=True)


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line) if line.strip() else None
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


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
            yield _to_row(faults.pop())
        input_hash = hash_line(raw)
        origin = Origin(file=block.file, line=line)
        results = (
            _read_reply(raw, origin, transcript, settings) if transcript else _read_row(raw, origin, settings)
        )
        for result in results:
            is_last = is_open and data is lines[-1]
            yield ReadRow(line, input_hash, _may_be_unfinished(result) if is_last else result)
    while faults:
        yield _to_row(faults.pop())


def _to_row(fault: ReadFault) -> ReadRow:
    return ReadRow(fault.origin.line, "", fault)


def _read_row(raw: bytes, origin: Origin, settings: DataSettings) -> Sequence[RowResult]:
    if has_too_many_values(raw):
        return [_fault(origin, "parse_error", f"the row holds {MOST_VALUES:,} values or more")]
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        row = _parse_leniently(raw)
        if row is None:
            return [_explain_bad_json(raw, origin, error)]
    if not isinstance(row, dict):
        return [_fault(origin, "schema", f"the row must be an object, and is {name_type(row)}")]

    def read() -> Sequence[RowResult]:
        _refuse_repeated_keys(raw, row)
        return read_row(row, origin, settings=settings)

    return _catch_faults(read, origin)


def _read_reply(
    raw: bytes, origin: Origin, transcript: TranscriptReader, settings: DataSettings
) -> Sequence[RowResult]:
    results = _catch_faults(lambda: apply_reasoning(transcript.read(raw, origin), settings), origin)
    if settings.format in (None, transcript.kind):
        return results
    return [
        _fault(origin, "schema", f"the file is a transcript of the format {transcript.kind}") for _ in results
    ]


def _catch_faults(read: Callable[[], Sequence[RowResult]], origin: Origin) -> Sequence[RowResult]:
    """Turn what makes a row unreadable into a fault."""
    try:
        return read()
    except (BadRow, ValidationError) as error:
        # Keys come from the user and may contain secrets.
        return [_fault(origin, "schema", redact(explain(error)).text)]
    except RecursionError:
        return [_fault(origin, "parse_error", "the row is nested too deeply")]


def _parse_leniently(raw: bytes) -> Any:
    """Parse what the strict parser refuses: NaN, Infinity and lone surrogates.

    The numbers become null, the surrogates the replacement character. None if the row is invalid in another
    way.
    """
    if not any(mark in raw for mark in _LENIENT_MARKS):
        return None
    try:
        row = json.loads(raw.decode(), parse_constant=lambda _name: None)
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
    if len(_KEY.findall(raw)) != _count_keys(row):
        json.loads(raw, object_pairs_hook=_refuse_pairs)


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


def _refuse_pairs(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise BadRow(f"the key `{redact(key).text[:60]}` occurs twice in one object")
        seen.add(key)


def _explain_bad_json(raw: bytes, origin: Origin, error: orjson.JSONDecodeError) -> ReadFault:
    if not _is_utf8(raw):
        return _fault(origin, "encoding", "the row is not UTF-8")
    if b"\0" in raw:
        return _fault(origin, "encoding", "the row holds NUL bytes")
    return _fault(origin, "parse_error", f"the row is not JSON: {error.msg}")


def _may_be_unfinished(result: RowResult) -> RowResult:
    if not isinstance(result, ReadFault) or result.code == "schema":
        return result
    return _fault(result.origin, result.code, f"{result.message}; the file may still be being written")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _fault(origin: Origin, code: FaultCode, message: str) -> ReadFault:
    return ReadFault(origin=origin, code=code, message=message)
