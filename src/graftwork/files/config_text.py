"""Configuration files as text: YAML and JSON, read under limits.

In: a path, or the text of a file. Out: plain values, and for YAML the nodes that know their lines. Whatever
is wrong is a UserMistake with its line: syntax, a file that refers to itself, aliases that expand to millions
of values, nesting that no reader survives. Every YAML file is read here. Does not know what the keys mean.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from graftwork.files.disk import explain_os_error
from graftwork.records.errors import UserMistake

MOST_BYTES = 1 << 20
"""Of one configuration file. Long ones have a thousand lines."""
MOST_VALUES = 100_000
"""Of one document, with all aliases expanded."""
MOST_LEVELS = 64

_WRONG_VALUE = (ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""What the YAML library raises for a value that cannot be: `!!int x`, `2025-13-40`, `"\\UFFFFFFFF"`."""


class YamlDocument(NamedTuple):
    content: Any
    root: yaml.Node | None
    """None where the document is empty."""


def read_config_text(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file that exists; UserMistake where it is too large or not UTF-8."""
    try:
        with path.open("rb") as handle:
            data = handle.read(most_bytes + 1)
    except OSError as error:
        raise explain_os_error(error, path) from error
    if len(data) > most_bytes:
        raise UserMistake(
            f"{path.name} holds more than {most_bytes >> 20} MiB",
            why="it is read into memory as a whole",
            fix="check whether this is the file that you mean",
            where=str(path),
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserMistake(
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
        raise UserMistake(
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
        raise UserMistake(
            f"this is not valid JSON: {error.msg}", fix="fix this line", where=f"{where}:{error.lineno}"
        ) from error
    except ValueError as error:
        raise UserMistake(
            f"this is not valid JSON: {error}", fix="write the number with fewer digits", where=where
        ) from error
    except RecursionError as error:
        raise _too_deep(where) from error


class _PlainLoader(yaml.SafeLoader):
    """The safe loader, whose every failure is an error of YAML with its place."""

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
            raise UserMistake(
                f"this expands to more than {MOST_VALUES:,} values",
                why="aliases of aliases multiply their values",
                fix="write fewer aliases",
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
            raise UserMistake(
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


def _too_deep(where: str) -> UserMistake:
    return UserMistake(
        f"this is nested deeper than {MOST_LEVELS} levels",
        why="no setting is",
        fix="check the brackets and the indentation",
        where=where,
    )
