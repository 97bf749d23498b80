"""What exporters share: files that are written row by row, options and the record of an export, turns in
common forms.

Input: rows whose tool calls are <tool_call> blocks in the text. Output: JSONL, JSON and Parquet files with
their row counts, the rows that a format cannot hold by reason, and text, calls and tool definitions separated
where that loses nothing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

import orjson

from graftwork.data.ingest.fields import BadRow
from graftwork.records.base import Record
from graftwork.records.dataset import Row, Split
from graftwork.records.interaction import Message, Origin
from graftwork.text.shape import has_too_many_values
from graftwork.text.tool_calls import ANY_ARGUMENTS, TextAndCalls, ToolCall, write_tools

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


ROWS_AT_ONCE = 1024
ROWS_PER_FILE = 200_000


class TableSize(NamedTuple):
    """`in_memory` is the size of the rows in Arrow, `on_disk` that of the files."""

    rows: int
    in_memory: int
    on_disk: int


class ParquetShards:
    """Parquet files of bounded size, named `stem-00000-of-00003.parquet` when their number is known."""

    def __init__(
        self, folder: Path, stem: str, *, schema: "pa.Schema", rows_per_file: int = ROWS_PER_FILE
    ) -> None:
        self._folder = folder
        self._stem = stem
        self._schema = schema
        self._rows_per_file = rows_per_file
        self._waiting: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[int] = []
        self._in_memory = 0
        self._on_disk = 0

    def add(self, value: dict[str, Any]) -> None:
        self._waiting.append(value)
        if len(self._waiting) >= min(ROWS_AT_ONCE, self._rows_per_file):
            self._flush()

    def finish(self) -> list[tuple[str, int]]:
        """Write the last rows. Returns the final file names with their row counts."""
        self._flush()
        self.close()
        files = []
        for number, rows in enumerate(self._rows):
            name = f"{self._stem}-{number:05d}-of-{len(self._rows):05d}.parquet"
            path = self._path(number).replace(self._folder / name)
            self._on_disk += path.stat().st_size
            files.append((name, rows))
        return files

    def size(self) -> TableSize:
        return TableSize(sum(self._rows), self._in_memory, self._on_disk)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting:
            return
        table = pa.Table.from_pylist(self._waiting, schema=self._schema)
        self._waiting = []
        if self._rows and self._rows[-1] >= self._rows_per_file:
            self.close()
        if self._writer is None:
            path = self._path(len(self._rows))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
            self._rows.append(0)
        self._writer.write_table(table)
        self._rows[-1] += table.num_rows
        self._in_memory += table.nbytes

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._stem}-{number:05d}.parquet"


NAMED = 20


class LeftOut(Record):
    """Rows that the format cannot hold, and the first of them."""

    why: str
    rows: int
    first: tuple[Origin, ...]


class Sink:
    """The folder that an export fills. A file appears with its first row."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, int] = {}
        self.added = 0
        self._tables: dict[str, ParquetShards] = {}
        self._handles: dict[str, IO[bytes]] = {}
        self._left_out: dict[str, tuple[int, list[Origin]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            handle.close()
        for shards in self._tables.values():
            shards.close()

    def add_line(self, name: str, value: dict[str, Any]) -> None:
        """Write a row to a JSONL file."""
        self._handle(name).write(orjson.dumps(value) + b"\n")
        self._count(name)

    def add_item(self, name: str, value: dict[str, Any]) -> None:
        """Write an item to a file that is a JSON array; `close_arrays` ends it."""
        self._handle(name).write((b",\n" if name in self.rows else b"[\n") + orjson.dumps(value))
        self._count(name)

    def close_arrays(self) -> None:
        for name, handle in self._handles.items():
            if name.endswith(".json"):
                handle.write(b"\n]\n")

    def add_record(self, stem: str, value: dict[str, Any], *, schema: "pa.Schema") -> None:
        """Write a row to the Parquet files named `stem`; `close_tables` gives them their final names."""
        if stem not in self._tables:
            self._tables[stem] = ParquetShards(self.folder, stem, schema=schema)
        self._tables[stem].add(value)
        self.added += 1

    def close_tables(self) -> dict[str, TableSize]:
        """Close the tables. Returns the size of each."""
        sizes = {}
        for stem, shards in self._tables.items():
            for name, rows in shards.finish():
                self.rows[name] = rows
            sizes[stem] = shards.size()
        return sizes

    def _count(self, name: str) -> None:
        self.rows[name] = self.rows.get(name, 0) + 1
        self.added += 1

    def leave_out(self, row: Row, *, why: str) -> None:
        rows, first = self._left_out.get(why, (0, []))
        self._left_out[why] = (rows + 1, [*first, row.origin] if len(first) < NAMED else first)

    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(
            LeftOut(why=why, rows=rows, first=tuple(first))
            for why, (rows, first) in sorted(self._left_out.items())
        )

    def _handle(self, name: str) -> IO[bytes]:
        if name not in self._handles:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handles[name] = path.open("wb")
        return self._handles[name]


EXPORT_FILE = "graftwork.json"


class ExportOptions(Record):
    """`name` is the name of the dataset at its destination: OWNER/slug on Kaggle, s3://bucket/prefix for
    SageMaker, a plain name elsewhere.
    """

    name: str | None = None
    title: str | None = None
    license: str | None = None


class ExportedFile(Record):
    """`rows` is None for a file that describes the others."""

    file: str
    rows: int | None
    sha256: str


class ExportRecord(Record):
    """Which dataset was exported, the files, and what the format could not hold."""

    format: str
    dataset: str
    base: str
    template_fingerprint: str
    splits: dict[Split, int]
    rows: int
    preference_rows: int
    files: tuple[ExportedFile, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]


OPENS, CLOSES = "<tool_call>", "</tool_call>"


class Conversation(NamedTuple):
    """Messages, and separately the functions that may be called: name, description, parameters."""

    messages: tuple[Message, ...]
    functions: tuple[dict[str, Any], ...] = ()


def split_calls(content: str) -> TextAndCalls:
    """Split off the calls at the end of a turn; calls elsewhere stay text."""
    whole = TextAndCalls(content, ())
    text, calls = content.rstrip(), list[ToolCall]()
    while text.endswith(CLOSES):
        before, opened, block = text.removesuffix(CLOSES).rpartition(OPENS)
        try:
            call = _read_json(block) if opened else None
        except ValueError:
            call = None
        if not isinstance(call, dict) or not call.keys() <= {"id", "name", "arguments"}:
            return whole
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return whole
        calls.insert(0, ToolCall(name, arguments))
        text = before.rstrip()
    return TextAndCalls(text, tuple(calls)) if calls and OPENS not in text else whole


def split_tools(messages: Sequence[Message]) -> Conversation:
    """Remove the tool definitions from the system prompt if writing them again gives the same text."""
    if not messages or messages[0].role != "system" or "<tools>" not in messages[0].content:
        return Conversation(tuple(messages))
    system = messages[0].content
    try:
        block = system.partition("<tools>\n")[2].partition("\n</tools>")[0]
        listed = [_read_json(line) for line in block.split("\n")]
        functions = []
        for tool in listed:
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return Conversation(tuple(messages))
            described = {key: function[key] for key in ("name", "description", "strict") if function.get(key)}
            parameters = function.get("parameters", function.get("input_schema"))
            functions.append({**described, "parameters": parameters or ANY_ARGUMENTS})
        before, block_text, after = system.partition(write_tools(listed))
    except ValueError:
        return Conversation(tuple(messages))
    if not block_text or not functions:
        return Conversation(tuple(messages))
    remaining = f"{before.rstrip()}{after}"
    system_turn = (Message(role="system", content=remaining),) if remaining.strip() else ()
    return Conversation((*system_turn, *messages[1:]), tuple(functions))


def plain(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def prompt_and_replies(row: Row) -> dict[str, Any]:
    """Separate the reply, or the two of a pair, from the turns before: trainers train only on the reply."""
    prompt = [plain(message) for message in row.messages]
    if row.rejected is None:
        return {"prompt": prompt, "completion": [assistant(row.reply)]}
    return {"prompt": prompt, "chosen": [assistant(row.reply)], "rejected": [assistant(row.rejected)]}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read_json(text: str) -> Any:
    """Parse JSON that can be written again without loss: no NaN, no lone surrogates."""

    def refuse(constant: str) -> NoReturn:
        raise BadRow(f"{constant} is not JSON")

    if has_too_many_values(text):
        raise BadRow("contains too many values")
    try:
        value = json.loads(text, parse_constant=refuse)
        write_json(value).encode()
    except RecursionError:
        raise BadRow("nested too deeply") from None
    return value
