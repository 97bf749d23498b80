"""The YAML dialect: nested mappings with id, name, metadata and children.

In: text. Out: a tree. A scalar is a number or a truth value only if YAML writes it back the same way; `1.10`,
`yes` and dates stay text, so that nothing is lost and the id 1.10 is not 1.1.
"""

import sys
from typing import Any

import yaml

from graftwork.components.spec.tree import Dialect, SpecFinding, SpecNode, SpecTree
from graftwork.files.config_text import parse_yaml
from graftwork.records.errors import UserMistake

DIALECT: Dialect = "yaml"
_READ_AS = {
    "int": "a number",
    "float": "a number, and 1.10 is the number 1.1",
    "bool": "true or false",
    "timestamp": "a date",
}
_OWN = ("id", "name", "body", "tail", "children")


class _Reader:
    def __init__(self) -> None:
        self.findings: list[SpecFinding] = []

    def report(self, code: str, node: yaml.Node, message: str, *, about: str = "") -> None:
        line = node.start_mark.line + 1
        self.findings.append(SpecFinding(level="warning", code=code, node=about, line=line, message=message))

    def node(self, given: yaml.Node) -> SpecNode:
        pairs = self._pairs(given)
        own = {key: value for key, value in pairs.items() if key in _OWN and self._is_own(key, value)}
        identifier, name = self._text(own.get("id")), self._text(own.get("name"))
        kind = own["id"].tag.rpartition(":")[2] if "id" in own else "str"
        if kind != "str":
            read = _READ_AS.get(kind, "another value")
            message = f"the id {identifier} is not quoted: YAML reads {read}"
            self.report("id_not_quoted", own["id"], message, about=identifier)
        lines: dict[str, int] = {}
        fields = {}
        for key, value in pairs.items():
            if key not in own:
                fields[key] = self._plain(value, (key,), lines)
        children = own.get("children")
        return SpecNode(
            id=identifier,
            name=name,
            fields=fields,
            body=self._text(own.get("body")),
            tail=self._text(own.get("tail")),
            children=tuple(self.node(child) for child in children.value) if children is not None else (),
            line=given.start_mark.line + 1,
            lines=lines,
        )

    def _is_own(self, key: str, value: yaml.Node) -> bool:
        """Keys of a tree that hold something else stay fields: `children: 3`."""
        if key == "children":
            is_list = isinstance(value, yaml.SequenceNode)
            return is_list and all(isinstance(item, yaml.MappingNode) for item in value.value)
        return isinstance(value, yaml.ScalarNode) and value.tag != "tag:yaml.org,2002:null"

    def _pairs(self, node: yaml.Node) -> dict[str, yaml.Node]:
        found: dict[str, yaml.Node] = {}
        seen: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = self._key(key_node)
            if key in found and not self._is_merged(seen[key], node):
                self.report("key_twice", key_node, f"the key {key} occurs twice; the last one counts")
            found[key], seen[key] = value, key_node
        return found

    def _is_merged(self, key: yaml.Node, mapping: yaml.Node) -> bool:
        """Whether `<<` brought the key: it is written before the mapping, and may be given again."""
        return bool(key.start_mark.index < mapping.start_mark.index)

    def _key(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        raise UserMistake(
            "a key of this mapping is a list or a mapping",
            why="a specification has names as keys",
            fix="write a plain name before the colon",
            where=f"line {node.start_mark.line + 1}",
        )

    def _text(self, node: yaml.Node | None) -> str:
        return str(node.value) if isinstance(node, yaml.ScalarNode) else ""

    def _plain(self, node: yaml.Node, place: tuple[str, ...], lines: dict[str, int]) -> Any:
        lines[".".join(place)] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            pairs = self._pairs(node)
            return {key: self._plain(value, (*place, key), lines) for key, value in pairs.items()}
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*place, str(n)), lines) for n, item in enumerate(node.value)]
        return plain_scalar(str(node.value), node.tag.rpartition(":")[2])


def plain_scalar(text: str, kind: str) -> Any:
    """The value, or the text itself where writing the value would give other text."""
    if kind == "null":
        return None
    if kind == "bool" and text in ("true", "false"):
        return text == "true"
    if kind not in ("int", "float"):
        return text
    try:
        number = int(text) if kind == "int" else float(text)
    except ValueError:
        return text
    return number if repr(number) == text else text


def read_yaml_tree(text: str, *, where: str) -> SpecTree:
    """UserMistake with its line where this is no YAML or no tree."""
    document = parse_yaml(text, where=where)
    if not isinstance(document.root, yaml.MappingNode):
        raise UserMistake("this is no mapping", fix="begin with id, name and children", where=where)
    reader = _Reader()
    try:
        root = reader.node(document.root)
    except UserMistake as error:
        raise UserMistake(
            error.what, why=error.why, fix=error.fix, where=f"{where}: {error.where}"
        ) from error
    return SpecTree(dialect=DIALECT, root=root, findings=tuple(reader.findings))


def write_yaml_tree(tree: SpecTree) -> str:
    return _dump(_to_plain(tree.root))


def write_fields(fields: dict[str, Any]) -> str:
    return _dump(fields)


def _to_plain(node: SpecNode) -> dict[str, Any]:
    plain: dict[str, Any] = {"id": node.id} if node.id else {}
    if node.name:
        plain["name"] = node.name
    plain |= node.fields
    if node.tail:
        plain["tail"] = node.tail
    if node.body:
        plain["body"] = node.body
    if node.children:
        plain["children"] = [_to_plain(child) for child in node.children]
    return plain


def _dump(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)


class _Dumper(yaml.SafeDumper):
    """Writes every value out: aliases say nothing in a specification."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # A block keeps lines readable; what it cannot hold, or what would look like a fence, is quoted.
    style = ("|" if _fits_block(text) else '"') if "\n" in text or "```" in text or "~~~" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _fits_block(text: str) -> bool:
    if "```" in text or "~~~" in text or text[0].isspace() or text.endswith("\n\n"):
        return False
    return all(line.isprintable() and line == line.rstrip() for line in text.split("\n"))


_Dumper.add_representer(str, _write_text)
