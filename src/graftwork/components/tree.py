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
    """One node. `id` is the text as written, empty if there is none; `tail` is what follows an outline title
    on its line."""

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
        """The node's name in messages."""
        identifier = self.id or UNNAMED
        return f"{identifier} {self.name}" if self.name else identifier

    def line_of(self, *path: str) -> int:
        """The line of a key, or of the nearest key above it."""
        for length in range(len(path), 0, -1):
            line = self.lines.get(".".join(path[:length]))
            if line is not None:
                return line
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
    """The node as plain data without positions: what two equal trees have in common."""
    return {
        "id": node.id,
        "name": node.name,
        "fields": node.fields,
        "body": node.body,
        "tail": node.tail,
        "children": [content_of(child) for child in node.children],
    }


def same_tree(tree: SpecTree, other: SpecTree) -> bool:
    """Return whether two trees are equivalent, regardless of position and dialect."""
    return content_of(tree.root) == content_of(other.root)


def metadata_of(node: SpecNode) -> dict[str, Any]:
    """The node's keys with those of its `metadata`, which have precedence."""
    inner = node.fields.get("metadata")
    return {**node.fields, **(inner if isinstance(inner, dict) else {})}


def _path_of(node: SpecNode, key: str) -> tuple[str, ...]:
    inner = node.fields.get("metadata")
    return ("metadata", key) if isinstance(inner, dict) and key in inner else (key,)


DESCRIBED = frozenset({"type", "description", "required", "default"})
"""Keys next to `name` in an entry that describes a parameter instead of being one."""


def parameters_of(node: SpecNode, key: str) -> list[Parameter]:
    """`inputs` or `outputs`: a mapping, a list of pairs, names or descriptions, or one type."""
    content, path = metadata_of(node).get(key), _path_of(node, key)
    if isinstance(content, dict):
        return [
            Parameter(name, type_text(value), node.line_of(*path, name)) for name, value in content.items()
        ]
    if isinstance(content, str) and key == "outputs":
        return [Parameter("result", type_text(content), node.line_of(*path))]
    parameters = []
    for number, item in enumerate(content if isinstance(content, list) else []):
        line = node.line_of(*path, str(number))
        if isinstance(item, dict) and isinstance(item.get("name"), str) and DESCRIBED & item.keys():
            parameters.append(Parameter(item["name"], type_text(item.get("type")), line))
        elif isinstance(item, dict):
            parameters += [Parameter(name, type_text(value), line) for name, value in item.items()]
        elif isinstance(item, str):
            name, _, kind = item.partition(":")
            parameters.append(Parameter(name.strip(), type_text(kind), line))
    return parameters


def type_text(value: Any) -> str:
    """Only the type: a description may follow it after a dash, or be a key next to `type`."""
    if isinstance(value, dict) and "type" in value:
        value = value["type"]
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return re.split(r"\s+[-–—]\s+", text, maxsplit=1)[0].strip()


DEPENDENCIES = ("dependencies", "deps", "depends_on")


def dependencies_of(node: SpecNode) -> list[tuple[str, int]]:
    """Dependencies that the node declares, each with its line: a list, a mapping by name, or one name."""
    dependencies = []
    for key in DEPENDENCIES:
        content, path = metadata_of(node).get(key), _path_of(node, key)
        if isinstance(content, dict):
            dependencies += [(name, node.line_of(*path, name)) for name in content]
        elif _is_name(content):
            dependencies.append((str(content), node.line_of(*path)))
        for number, item in enumerate(content if isinstance(content, list) else []):
            if _is_name(item):
                dependencies.append((str(item), node.line_of(*path, str(number))))
    return dependencies


def _is_name(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


REQUIREMENTS = ("test_requirements", "requirements", "tests", "acceptance_criteria")
_TEXT_KEYS = ("text", "description", "requirement")


def requirements_of(node: SpecNode) -> list[tuple[str, int]]:
    """Requirements in the author's words, each with its line, from the node, its metadata or its
    `testing`.
    """
    requirements = []
    for path, content in _requirement_lists(node):
        items = content
        if isinstance(items, dict):
            items = [f"{name}: {value}" for name, value in items.items()]
        for number, item in enumerate(items if isinstance(items, list) else []):
            text = requirement_text(item)
            if text is not None:
                requirements.append((text, node.line_of(*path, str(number))))
    return requirements


def requirement_text(item: Any) -> str | None:
    """An entry as text, or as a mapping that describes itself: {id: R1, text: …}."""
    if isinstance(item, dict):
        item = next((item[key] for key in _TEXT_KEYS if isinstance(item.get(key), str)), None)
    return item if isinstance(item, str) else None


def _requirement_lists(node: SpecNode) -> Iterator[tuple[tuple[str, ...], Any]]:
    for outer in ("testing", "metadata", ""):
        fields = node.fields.get(outer) if outer else node.fields
        for key in REQUIREMENTS:
            if isinstance(fields, dict) and key in fields:
                yield ((outer, key) if outer else (key,)), fields[key]


def unread_fields(node: SpecNode) -> Iterator[tuple[str, int]]:
    """Keys that generation needs, with content that it cannot read: what is expected, and the line."""
    metadata = metadata_of(node)
    for key in ("inputs", "outputs"):
        value = metadata.get(key)
        readable = value is None or isinstance(value, dict | list) or (key == "outputs" and value != "")
        if not readable or (isinstance(value, list) and not all(isinstance(v, dict | str) for v in value)):
            yield f"`{key}` is not read: write names with types", node.line_of(*_path_of(node, key))
    for key in DEPENDENCIES:
        value = metadata.get(key)
        if isinstance(value, bool) or (isinstance(value, list) and not all(map(_is_name, value))):
            yield f"`{key}` is not read: write a list of ids", node.line_of(*_path_of(node, key))
    for path, value in _requirement_lists(node):
        readable = value is None or isinstance(value, dict)
        if not readable and not (isinstance(value, list) and all(map(requirement_text, value))):
            yield f"`{path[-1]}` is not read: write a list of texts", node.line_of(*path)
    if "children" in node.fields and node.fields["children"] not in (None, []):
        line = node.line_of("children")
        yield "`children` is not read: write a list of nodes, each with id and name", line


def snake_case(text: str) -> str:
    """A name as Python writes functions: FileReader and "File reader" are file_reader."""
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    plain = re.sub(r"[^a-z0-9]+", "_", separated.lower()).strip("_")
    return f"_{plain}" if plain[:1].isdigit() else plain


Change = Literal["added", "removed", "changed", "moved"]


class SpecChange(Record):
    kind: Change
    node: str
    name: str
    key: str = ""
    """What changed in the node."""
    old: Any = None
    new: Any = None


def diff_trees(old: SpecTree, new: SpecTree) -> list[SpecChange]:
    """Compare nodes by id. A node with a different parent counts as moved."""
    before, after = _by_id(old), _by_id(new)
    changes = []
    for identifier, (node, parent) in before.items():
        if identifier not in after:
            changes.append(SpecChange(kind="removed", node=identifier, name=node.name))
            continue
        new_node, new_parent = after[identifier]
        if parent != new_parent:
            changes.append(
                SpecChange(
                    kind="moved",
                    node=identifier,
                    name=new_node.name,
                    key="parent",
                    old=parent,
                    new=new_parent,
                )
            )
        old_fields, new_fields = (
            {"name": n.name, "body": n.body, "tail": n.tail, **_flatten(n.fields)} for n in (node, new_node)
        )
        changes += [
            SpecChange(
                kind="changed",
                node=identifier,
                name=new_node.name,
                key=key,
                old=old_fields.get(key),
                new=new_fields.get(key),
            )
            for key in dict.fromkeys((*old_fields, *new_fields))
            if old_fields.get(key) != new_fields.get(key) or (key in old_fields) != (key in new_fields)
        ]
    changes += [
        SpecChange(kind="added", node=identifier, name=node.name)
        for identifier, (node, _) in after.items()
        if identifier not in before
    ]
    return changes


def _by_id(tree: SpecTree) -> dict[str, tuple[SpecNode, str]]:
    """Nodes without an id, or with one that is used twice, are identified by position."""
    by_id: dict[str, tuple[SpecNode, str]] = {}
    waiting = [(tree.root, "", "0")]
    while waiting:
        node, parent, path = waiting.pop(0)
        key = node.id if node.id and node.id not in by_id else f"{node.id}@{path}"
        by_id[key] = (node, parent)
        waiting += [(child, key, f"{path}.{n}") for n, child in enumerate(node.children)]
    return by_id


def _flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            leaves |= _flatten(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves
