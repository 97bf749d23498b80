"""Configuration files as text: YAML and JSON, read under limits, and changed in place.

Input: a path, or the text of a file. Output: plain values, and for YAML the nodes that know their lines.
Whatever is wrong is a UserError with its line: syntax, a file that refers to itself, aliases that expand to
millions of values, nesting that no reader survives. Every YAML file is read here. Does not know what the keys
mean.

A change of a value keeps comments, order and style; the new text is read again and compared before it counts.
A value behind an alias is not changed: other places share it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from graftwork.files.disk import explain_os_error
from graftwork.records.errors import UserError

MOST_BYTES = 1 << 20
"""Size limit of a configuration file. Long ones have a thousand lines."""
MOST_VALUES = 100_000
"""Limit on the values of one document, with all aliases expanded."""
MOST_LEVELS = 64

_WRONG_VALUE = (ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""Errors of the YAML library for impossible values: `!!int x`, `2025-13-40`, `"\\UFFFFFFFF"`."""


class YamlDocument(NamedTuple):
    content: Any
    root: yaml.Node | None
    """None if the document is empty."""


def read_config_text(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file that exists; UserError if it is too large or not UTF-8."""
    try:
        with path.open("rb") as handle:
            data = handle.read(most_bytes + 1)
    except OSError as error:
        raise explain_os_error(error, path) from error
    if len(data) > most_bytes:
        raise UserError(
            f"{path.name} is larger than {most_bytes >> 20} MiB",
            why="it is read into memory at once",
            fix="check that this is the right file",
            where=str(path),
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path.name} is not UTF-8", why=str(error), fix="save it as UTF-8", where=str(path)
        ) from error


def parse_yaml(text: str, *, where: str) -> YamlDocument:
    """One document, without any object that is not plain data."""
    try:
        loader = _PlainLoader(text)
        root = loader.get_single_node()
        if root is None:
            return YamlDocument(None, None)
        _Bounds(where).require(root)
        return YamlDocument(loader.construct_document(root), root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise UserError(
            f"this is not valid YAML: {getattr(error, 'problem', None) or error}",
            fix="check the indentation and the quotes around this line",
            where=f"{where}:{mark.line + 1}" if mark else where,
        ) from error
    except RecursionError as error:
        raise _too_deep(where) from error


def parse_json(text: str, *, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"this is not valid JSON: {error.msg}", fix="fix this line", where=f"{where}:{error.lineno}"
        ) from error
    except ValueError as error:
        raise UserError(
            f"this is not valid JSON: {error}", fix="write the number with fewer digits", where=where
        ) from error
    except RecursionError as error:
        raise _too_deep(where) from error


class _PlainLoader(yaml.SafeLoader):
    """The safe loader; every failure is a YAML error with its position."""

    def fetch_more_tokens(self) -> None:
        try:
            super().fetch_more_tokens()
        except _WRONG_VALUE as error:
            raise yaml.scanner.ScannerError(None, None, str(error), self.get_mark()) from error

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _WRONG_VALUE as error:
            problem = f"the value does not read as {node.tag.rpartition(':')[2]}: {error}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


class _Bounds:
    """Counts what a document would hold if every alias were written out. Each node is visited once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._counted: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()

    def require(self, root: yaml.Node) -> None:
        values, levels = self._count(root)
        if values > MOST_VALUES:
            raise UserError(
                f"this expands to more than {MOST_VALUES:,} values",
                why="aliases of aliases multiply their values",
                fix="use fewer aliases",
                where=self._where,
            )
        if levels > MOST_LEVELS:
            raise _too_deep(self._where)

    def _count(self, node: yaml.Node) -> tuple[int, int]:
        """The values below and with this node, and the levels of nesting."""
        if not isinstance(node, yaml.CollectionNode):
            return 1, 1
        key = id(node)
        if key in self._counted:
            return self._counted[key]
        if key in self._open:
            raise UserError(
                "this refers to itself",
                why="an alias is inside the value that it names",
                fix="write the value out",
                where=f"{self._where}:{node.start_mark.line + 1}",
            )
        self._open.add(key)
        inner = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
        counts = [self._count(part) for part in inner]
        self._open.discard(key)
        values = 1 + sum(count for count, _ in counts)
        levels = 1 + max((depth for _, depth in counts), default=0)
        self._counted[key] = values, levels
        return values, levels


def _too_deep(where: str) -> UserError:
    return UserError(
        f"this is nested deeper than {MOST_LEVELS} levels",
        why="no setting is that deep",
        fix="check the brackets and the indentation",
        where=where,
    )


Plain = str | int | float | bool | None
INDENT = 2


def set_values(text: str, path: Sequence[str], values: Mapping[str, Plain], *, where: str) -> str:
    """The text with these keys set in the mapping at the path `at`."""
    changed = text
    for key, value in values.items():
        changed = _set(changed, (*path, key), value, where=where)
    expected = below = parse_yaml(text, where=where).content or {}
    for key in path:
        inner = below.get(key)
        below[key] = inner = dict(inner) if isinstance(inner, dict) else {}
        below = inner
    below.update(values)
    if parse_yaml(changed, where=where).content != expected:
        raise UserError(
            f"{'.'.join(path)} cannot be changed in place",
            why="the file is written in a way that this tool does not edit",
            fix="set it manually: " + ", ".join(f"{key}: {_write(value)}" for key, value in values.items()),
            where=where,
        )
    return changed


def _set(text: str, path: Sequence[str], value: Plain, *, where: str) -> str:
    root = parse_yaml(text, where=where).root
    if not isinstance(root, yaml.MappingNode):
        return f"{text}{_block(path, value, 0)}"
    node = root
    for depth, key in enumerate(path):
        child = next((below for name, below in node.value if name.value == key), None)
        if child is None:
            return _add(text, node, path[depth:], value)
        if not _is_within(child, node):
            raise UserError(
                f"{'.'.join(path[: depth + 1])} is an alias",
                why="a change would also change the other places that use it",
                fix=f"write the value out there, then set {'.'.join(path)}: {_write(value)}",
                where=where,
            )
        if depth == len(path) - 1:
            return _replace(text, child, _write(value))
        if not isinstance(child, yaml.MappingNode):
            # `train:` without a value.
            inner = _flow(path[depth + 1 :], value)
            return _replace(
                text, child, inner if child.start_mark.index < child.end_mark.index else f" {inner}"
            )
        node = child
    return text


def _is_within(child: yaml.Node, node: yaml.Node) -> bool:
    """Whether a value is written in its mapping; that of `train:` at the end of the text is empty."""
    start, end = child.start_mark.index, node.end_mark.index
    is_empty = start == child.end_mark.index
    return node.start_mark.index <= start and (start < end or (is_empty and start == end))


def _replace(text: str, node: yaml.Node, new_text: str) -> str:
    return text[: node.start_mark.index] + new_text + text[node.end_mark.index :]


def _add(text: str, node: yaml.MappingNode, path: Sequence[str], value: Plain) -> str:
    """A new key at the end of a mapping; of the document's own, after its last line."""
    if node.flow_style:
        start = node.start_mark.index + 1
        comma = ", " if node.value else ""
        return f"{text[:start]}{path[0]}: {_flow(path[1:], value)}{comma}{text[start:]}"
    column = node.value[0][0].start_mark.column
    last: yaml.Node = node.value[-1][1]
    while isinstance(last, yaml.CollectionNode) and not last.flow_style and last.value:
        inner = last.value[-1]
        last = inner[1] if isinstance(inner, tuple) else inner
    end = last.end_mark.index
    # A block of text ends at the start of the line after it.
    if not (isinstance(last, yaml.ScalarNode) and last.style in ("|", ">")):
        line_end = text.find("\n", end)
        end = len(text) if line_end < 0 else line_end + 1
    lead = "" if text[:end].endswith("\n") else "\n"
    return f"{text[:end]}{lead}{_block(path, value, column)}{text[end:]}"


def _block(path: Sequence[str], value: Plain, column: int) -> str:
    lines = [f"{' ' * (column + INDENT * depth)}{key}:" for depth, key in enumerate(path)]
    return "\n".join(lines) + f" {_write(value)}\n"


def _flow(path: Sequence[str], value: Plain) -> str:
    if not path:
        return _write(value)
    return "{" + f"{path[0]}: {_flow(path[1:], value)}" + "}"


def _write(value: Plain) -> str:
    if isinstance(value, float):
        # YAML 1.1 reads 5e-4 as text: it wants a point.
        text = repr(value)
        mantissa, e, exponent = text.partition("e")
        return text if not e or "." in mantissa else f"{mantissa}.0e{exponent}"
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    return json.dumps(value, ensure_ascii=False)
