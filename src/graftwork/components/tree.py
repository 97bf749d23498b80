"""The typed tree of a specification of either dialect, and what changed between two. No I/O.

A node holds everything that its file says about it: `fields` in the order of the file, `body` the text below
an outline heading. What generation needs (parameters, dependencies, requirements) is derived from them.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from graftwork.records.base import Record

Dialect = Literal["yaml", "outline"]
Level = Literal["error", "warning", "note"]
ROOT_ID = "root"
UNNAMED = "(no id)"


class SpecFinding(Record):
    """Something about a specification that its author should know, with the line it is about."""

    level: Level
    code: str
    node: str
    line: int
    message: str
    fix: str = ""
    file: str = ""


class SpecNode(Record):
    """One node. `id` is the text as written, empty where there is none; `tail` is what follows an outline
    title on its line."""

    id: str
    name: str = ""
    fields: dict[str, Any] = {}
    body: str = ""
    tail: str = ""
    children: tuple["SpecNode", ...] = ()
    line: int = 1
    lines: dict[str, int] = {}
    """The line of each key, by its dotted path."""

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def label(self) -> str:
        """How messages name the node."""
        shown = self.id or UNNAMED
        return f"{shown} {self.name}" if self.name else shown

    def line_of(self, *path: str) -> int:
        """The line of a key, or of the nearest key above it."""
        for length in range(len(path), 0, -1):
            found = self.lines.get(".".join(path[:length]))
            if found is not None:
                return found
        return self.line


class SpecTree(Record):
    dialect: Dialect
    root: SpecNode
    findings: tuple[SpecFinding, ...] = ()
    """What reading the file found."""

    def walk(self) -> Iterator[SpecNode]:
        """Every node, parents before their children, in the order of the file."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def leaves(self) -> list[SpecNode]:
        return [node for node in self.walk() if node.is_leaf]


class Parameter(NamedTuple):
    """A named value with its type as the spec writes it; `line` is where."""

    name: str
    type: str
    line: int


def content_of(node: SpecNode) -> dict[str, Any]:
    """The node as plain data without places: what two equal trees have in common."""
    return {
        "id": node.id,
        "name": node.name,
        "fields": node.fields,
        "body": node.body,
        "tail": node.tail,
        "children": [content_of(child) for child in node.children],
    }


def same_tree(one: SpecTree, other: SpecTree) -> bool:
    """Whether two trees say the same, wherever and in whichever dialect they were written."""
    return content_of(one.root) == content_of(other.root)


def metadata_of(node: SpecNode) -> dict[str, Any]:
    """The node's keys with those of its `metadata`, which have precedence."""
    inner = node.fields.get("metadata")
    return {**node.fields, **(inner if isinstance(inner, dict) else {})}


def _place(node: SpecNode, key: str) -> tuple[str, ...]:
    inner = node.fields.get("metadata")
    return ("metadata", key) if isinstance(inner, dict) and key in inner else (key,)


DESCRIBED = frozenset({"type", "description", "required", "default"})
"""Keys next to `name` in an entry that describes a parameter instead of being one."""


def parameters_of(node: SpecNode, key: str) -> list[Parameter]:
    """`inputs` or `outputs`: a mapping, a list of pairs, names or descriptions, or one type."""
    given, place = metadata_of(node).get(key), _place(node, key)
    if isinstance(given, dict):
        return [
            Parameter(name, type_text(value), node.line_of(*place, name)) for name, value in given.items()
        ]
    if isinstance(given, str) and key == "outputs":
        return [Parameter("result", type_text(given), node.line_of(*place))]
    found = []
    for number, item in enumerate(given if isinstance(given, list) else []):
        line = node.line_of(*place, str(number))
        if isinstance(item, dict) and isinstance(item.get("name"), str) and DESCRIBED & item.keys():
            found.append(Parameter(item["name"], type_text(item.get("type")), line))
        elif isinstance(item, dict):
            found += [Parameter(name, type_text(value), line) for name, value in item.items()]
        elif isinstance(item, str):
            name, _, kind = item.partition(":")
            found.append(Parameter(name.strip(), type_text(kind), line))
    return found


def type_text(value: Any) -> str:
    """The type alone: a description may follow it behind a dash, or be a key next to `type`."""
    if isinstance(value, dict) and "type" in value:
        value = value["type"]
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return re.split(r"\s+[-–—]\s+", text, maxsplit=1)[0].strip()


DEPENDENCIES = ("dependencies", "deps", "depends_on")


def dependencies_of(node: SpecNode) -> list[tuple[str, int]]:
    """What the node says that it uses, each with its line: a list, a mapping by name, or one name."""
    found = []
    for key in DEPENDENCIES:
        given, place = metadata_of(node).get(key), _place(node, key)
        if isinstance(given, dict):
            found += [(name, node.line_of(*place, name)) for name in given]
        elif _is_name(given):
            found.append((str(given), node.line_of(*place)))
        for number, item in enumerate(given if isinstance(given, list) else []):
            if _is_name(item):
                found.append((str(item), node.line_of(*place, str(number))))
    return found


def _is_name(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


REQUIREMENTS = ("test_requirements", "requirements", "tests", "acceptance_criteria")
_TEXT_KEYS = ("text", "description", "requirement")


def requirements_of(node: SpecNode) -> list[tuple[str, int]]:
    """What must hold, in the words of the author, each with its line, below the node, its metadata or its
    `testing`."""
    found = []
    for place, given in _requirement_lists(node):
        items = given
        if isinstance(items, dict):
            items = [f"{name}: {value}" for name, value in items.items()]
        for number, item in enumerate(items if isinstance(items, list) else []):
            text = requirement_text(item)
            if text is not None:
                found.append((text, node.line_of(*place, str(number))))
    return found


def requirement_text(item: Any) -> str | None:
    """An entry in words, or one that describes itself: {id: R1, text: …}."""
    if isinstance(item, dict):
        item = next((item[key] for key in _TEXT_KEYS if isinstance(item.get(key), str)), None)
    return item if isinstance(item, str) else None


def _requirement_lists(node: SpecNode) -> Iterator[tuple[tuple[str, ...], Any]]:
    for outer in ("testing", "metadata", ""):
        given = node.fields.get(outer) if outer else node.fields
        for key in REQUIREMENTS:
            if isinstance(given, dict) and key in given:
                yield ((outer, key) if outer else (key,)), given[key]


def unread_fields(node: SpecNode) -> Iterator[tuple[str, int]]:
    """Keys that generation needs, with content that it cannot read: what is expected, and the line."""
    given = metadata_of(node)
    for key in ("inputs", "outputs"):
        value = given.get(key)
        readable = value is None or isinstance(value, dict | list) or (key == "outputs" and value != "")
        if not readable or (isinstance(value, list) and not all(isinstance(v, dict | str) for v in value)):
            yield f"`{key}` is not read: write names with types", node.line_of(*_place(node, key))
    for key in DEPENDENCIES:
        value = given.get(key)
        if isinstance(value, bool) or (isinstance(value, list) and not all(map(_is_name, value))):
            yield f"`{key}` is not read: write a list of ids", node.line_of(*_place(node, key))
    for place, value in _requirement_lists(node):
        readable = value is None or isinstance(value, dict)
        if not readable and not (isinstance(value, list) and all(map(requirement_text, value))):
            yield f"`{place[-1]}` is not read: write a list of texts", node.line_of(*place)
    if "children" in node.fields and node.fields["children"] not in (None, []):
        line = node.line_of("children")
        yield "`children` is not read: write a list of nodes, each with id and name", line


def snake_case(text: str) -> str:
    """A name as Python writes functions: FileReader and "File reader" are file_reader."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    plain = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
    return f"_{plain}" if plain[:1].isdigit() else plain


Change = Literal["added", "removed", "changed", "moved"]


class SpecChange(Record):
    kind: Change
    node: str
    name: str
    key: str = ""
    """What of a changed node is different."""
    old: Any = None
    new: Any = None


def diff_trees(old: SpecTree, new: SpecTree) -> list[SpecChange]:
    """Nodes are matched by id. A node whose parent is another one is moved."""
    before, after = _by_id(old), _by_id(new)
    changes = []
    for each, (node, parent) in before.items():
        if each not in after:
            changes.append(SpecChange(kind="removed", node=each, name=node.name))
            continue
        other, new_parent = after[each]
        if parent != new_parent:
            changes.append(
                SpecChange(kind="moved", node=each, name=other.name, key="parent", old=parent, new=new_parent)
            )
        one, two = (
            {"name": n.name, "body": n.body, "tail": n.tail, **_flatten(n.fields)} for n in (node, other)
        )
        changes += [
            SpecChange(
                kind="changed", node=each, name=other.name, key=key, old=one.get(key), new=two.get(key)
            )
            for key in dict.fromkeys((*one, *two))
            if one.get(key) != two.get(key) or (key in one) != (key in two)
        ]
    changes += [
        SpecChange(kind="added", node=each, name=node.name)
        for each, (node, _) in after.items()
        if each not in before
    ]
    return changes


def _by_id(tree: SpecTree) -> dict[str, tuple[SpecNode, str]]:
    """Nodes without an id, or with one that is used twice, are known by their place."""
    found: dict[str, tuple[SpecNode, str]] = {}
    waiting = [(tree.root, "", "0")]
    while waiting:
        node, parent, place = waiting.pop(0)
        key = node.id if node.id and node.id not in found else f"{node.id}@{place}"
        found[key] = (node, parent)
        waiting += [(child, key, f"{place}.{n}") for n, child in enumerate(node.children)]
    return found


def _flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            found |= _flatten(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
