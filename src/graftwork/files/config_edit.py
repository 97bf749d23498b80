"""Changes values in the text of a YAML file; comments, order and style stay as they are.

In: the text, a path of keys and a plain value. Out: the new text, which is read again and compared before it
counts. A value behind an alias is not changed: other places share it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from graftwork.files.config_text import parse_yaml
from graftwork.records.errors import UserMistake

Plain = str | int | float | bool | None
INDENT = 2


def set_values(text: str, at: Sequence[str], values: Mapping[str, Plain], *, where: str) -> str:
    """The text with these keys set in the mapping at the path `at`."""
    changed = text
    for key, value in values.items():
        changed = _set(changed, (*at, key), value, where=where)
    expected = parse_yaml(text, where=where).content or {}
    _put(expected, at, values)
    if parse_yaml(changed, where=where).content != expected:
        raise UserMistake(
            f"{'.'.join(at)} cannot be changed in place",
            why="the file is written in a way that this tool does not edit",
            fix="set it by hand: " + ", ".join(f"{key}: {_write(value)}" for key, value in values.items()),
            where=where,
        )
    return changed


def _put(content: dict[str, Any], at: Sequence[str], values: Mapping[str, Plain]) -> None:
    for key in at:
        below = content.get(key)
        content[key] = below = dict(below) if isinstance(below, dict) else {}
        content = below
    content.update(values)


def _set(text: str, path: Sequence[str], value: Plain, *, where: str) -> str:
    root = parse_yaml(text, where=where).root
    if not isinstance(root, yaml.MappingNode):
        return f"{text}{_block(path, value, 0)}"
    node = root
    for depth, key in enumerate(path):
        found = next((below for name, below in node.value if name.value == key), None)
        if found is None:
            return _add(text, node, path[depth:], value)
        if not _is_within(found, node):
            raise UserMistake(
                f"{'.'.join(path[: depth + 1])} is an alias",
                why="a change would also change the other places that use it",
                fix=f"write the value out there, then set {'.'.join(path)}: {_write(value)}",
                where=where,
            )
        if depth == len(path) - 1:
            return _replace(text, found, _write(value))
        if not isinstance(found, yaml.MappingNode):
            # `train:` without a value.
            inner = _flow(path[depth + 1 :], value)
            return _replace(
                text, found, inner if found.start_mark.index < found.end_mark.index else f" {inner}"
            )
        node = found
    return text


def _is_within(found: yaml.Node, node: yaml.Node) -> bool:
    """Whether a value is written in its mapping; that of `train:` at the end of the text is empty."""
    start, end = found.start_mark.index, node.end_mark.index
    is_empty = start == found.end_mark.index
    return node.start_mark.index <= start and (start < end or (is_empty and start == end))


def _replace(text: str, node: yaml.Node, written: str) -> str:
    return text[: node.start_mark.index] + written + text[node.end_mark.index :]


def _add(text: str, node: yaml.MappingNode, path: Sequence[str], value: Plain) -> str:
    """A new key at the end of a mapping; of the document's own, after its last line."""
    if node.flow_style:
        begin = node.start_mark.index + 1
        comma = ", " if node.value else ""
        return f"{text[:begin]}{path[0]}: {_flow(path[1:], value)}{comma}{text[begin:]}"
    first = node.value[0][0]
    column = first.start_mark.column
    last = node.value[-1][1]
    end = _line_end(text, last, column)
    lead = "" if text[:end].endswith("\n") else "\n"
    return f"{text[:end]}{lead}{_block(path, value, column)}{text[end:]}"


def _line_end(text: str, node: yaml.Node, column: int) -> int:
    """Behind the last line that belongs to the node."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    end = text.find("\n", node.end_mark.index)
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        # A block of text ends at the start of the line behind it.
        return node.end_mark.index
    return len(text) if end < 0 else end + 1


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
