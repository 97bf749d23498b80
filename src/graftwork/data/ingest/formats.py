"""Chooses the format of a row: the one that the settings name, their mapping, or the first that fits.

In: a parsed row. Out: its interactions, usually one. Raises `BadRow` with what was expected.
To add a built-in format, write `fits_NAME` and `read_NAME` and enter them in `FORMATS`; an installed
package adds one through the entry points `graftwork.formats`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from graftwork.data.ingest import dataset_formats as datasets
from graftwork.data.ingest import gateway_formats as gateways
from graftwork.data.ingest import log_formats as logs
from graftwork.data.ingest import observation_formats as observations
from graftwork.data.ingest import trace_formats as traces
from graftwork.data.ingest.blocks import ReadFault, RowResult
from graftwork.data.ingest.fields import BadRow, explain, open_json, take_object
from graftwork.data.ingest.turns import drop_reasoning
from graftwork.data.settings import DataSettings, FormatName, Mapping, names_file
from graftwork.process.extensions import load_extension
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.redact import redact


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
        "a LangSmith run", frozenset(("run_type",)), observations.fits_langsmith, observations.read_langsmith
    ),
    "litellm": _BuiltInFormat(
        "a LiteLLM log", frozenset(("call_type",)), gateways.fits_litellm, gateways.read_litellm
    ),
    "helicone": _BuiltInFormat(
        "a Helicone request with request_body",
        frozenset(("request_id",)),
        gateways.fits_helicone,
        gateways.read_helicone,
    ),
    "openai_stored": _BuiltInFormat(
        "a stored completion or response with its input",
        frozenset(("object",)),
        gateways.fits_stored,
        gateways.read_stored,
    ),
    "claude_code": _whole_file("a file that is a Claude Code transcript"),
    "codex": _whole_file("a file that is a Codex transcript"),
    "langfuse": _BuiltInFormat(
        "a Langfuse observation or score",
        frozenset(("trace_id", "traceId", "session_id", "sessionId", "observations")),
        observations.fits_langfuse,
        observations.read_langfuse,
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
