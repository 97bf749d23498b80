"""Specifications in YAML, outlines, JSON Schema and OpenAPI: recognized by content and read into a tree.

Input: paths or text. Output: trees, or UserError with the reason and the line. Free text is refused, never
guessed at. A tree is written back as YAML or as an outline.

YAML: nested mappings with id, name, metadata and children. A scalar is a number or a truth value only if YAML
writes it back the same way; `1.10`, `yes` and dates stay text, so that nothing is lost and 1.10 is not 1.1.

Outline: a title line, then numbered headings `*1 Title`, `*1**2 Title`, with prose below; written back, it
has the bytes that it was read from. Fields that an outline has no place for are in a fenced block `spec`
directly below a heading. Stars in prose and in fenced code are not headings. Headings of stars without
numbers are numbered in order, if the file has no others.

JSON Schema and OpenAPI: one leaf for each operation or definition, with inputs and outputs; examples of a
schema are requirements that can be run.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from graftwork.components.tree import ROOT_ID, Dialect, SpecFinding, SpecNode, SpecTree, snake_case
from graftwork.files.config_text import parse_yaml, read_config_text
from graftwork.records.errors import UserError

YAML: Dialect = "yaml"
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
        node_keys = {key: value for key, value in pairs.items() if key in _OWN and self._is_own(key, value)}
        identifier, name = self._text(node_keys.get("id")), self._text(node_keys.get("name"))
        kind = node_keys["id"].tag.rpartition(":")[2] if "id" in node_keys else "str"
        if kind != "str":
            read = _READ_AS.get(kind, "another value")
            message = f"the id {identifier} is not quoted: YAML reads {read}"
            self.report("id_not_quoted", node_keys["id"], message, about=identifier)
        lines: dict[str, int] = {}
        fields = {
            key: self._plain(value, (key,), lines) for key, value in pairs.items() if key not in node_keys
        }
        children = node_keys.get("children")
        return SpecNode(
            id=identifier,
            name=name,
            fields=fields,
            body=self._text(node_keys.get("body")),
            tail=self._text(node_keys.get("tail")),
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
        values: dict[str, yaml.Node] = {}
        key_nodes: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(
                    "a key of this mapping is a list or a mapping",
                    why="a specification has names as keys",
                    fix="write a plain name before the colon",
                    where=f"line {key_node.start_mark.line + 1}",
                )
            key = str(key_node.value)
            # Whether `<<` brought the key: it is written before the mapping, and may be given again.
            if key in values and key_nodes[key].start_mark.index >= node.start_mark.index:
                self.report("key_twice", key_node, f"the key {key} occurs twice; the last one counts")
            values[key], key_nodes[key] = value, key_node
        return values

    def _text(self, node: yaml.Node | None) -> str:
        return str(node.value) if isinstance(node, yaml.ScalarNode) else ""

    def _plain(self, node: yaml.Node, path: tuple[str, ...], lines: dict[str, int]) -> Any:
        lines[".".join(path)] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            pairs = self._pairs(node)
            return {key: self._plain(value, (*path, key), lines) for key, value in pairs.items()}
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*path, str(n)), lines) for n, item in enumerate(node.value)]
        return plain_scalar(str(node.value), node.tag.rpartition(":")[2])


def plain_scalar(text: str, kind: str) -> Any:
    """Return the value, or the text itself if writing the value would give other text."""
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
    """Raises UserError with the line if this is not YAML or not a tree."""
    document = parse_yaml(text, where=where)
    if not isinstance(document.root, yaml.MappingNode):
        raise UserError("this is not a mapping", fix="begin with id, name and children", where=where)
    reader = _Reader()
    try:
        root = reader.node(document.root)
    except UserError as error:
        raise UserError(error.what, why=error.why, fix=error.fix, where=f"{where}: {error.where}") from error
    return SpecTree(dialect=YAML, root=root, findings=tuple(reader.findings))


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
    """Writes every value out: aliases have no meaning in a specification."""

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


OUTLINE: Dialect = "outline"
NUMBERED = re.compile(r"^(?P<stars>\*[0-9]{1,9}(?:\*{1,99}[0-9]{1,9})*)[ \t](?P<rest>.*)$", re.DOTALL)
UNNUMBERED = re.compile(r"^(?P<stars>\*{1,9})[ \t]+(?P<rest>\S.*)$", re.DOTALL)
_PART = re.compile(r"(\*+)([0-9]+)")
_FENCE = re.compile(r"^\s{0,3}(```+|~~~+)")
_BLOCK_START, _BLOCK_END = "```spec\n", "```\n"
UNTITLED = "untitled"
MOST_DEPTH = 24


Heading = tuple[int, tuple[int, ...], str]
"""The line from 0, the numbers, and the title."""


def split_lines(text: str) -> list[str]:
    """Lines with their ends; only a line feed ends a line, so that nothing else is changed."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def find_headings(lines: list[str], pattern: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
    """Headings outside of fenced code, with their line from 0."""
    fence = ""
    for number, line in enumerate(lines):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif fence and mark and mark[1].startswith(fence):
            fence = ""
        elif not fence and (match := pattern.match(line.removesuffix("\n"))):
            yield number, match


def is_outline(text: str) -> bool:
    """Numbered headings, or headings at two levels of stars: Markdown writes no `** text` lists."""
    lines = split_lines(text)
    if any(True for _ in find_headings(lines, NUMBERED)):
        return True
    depths = [len(match["stars"]) for _, match in find_headings(lines, UNNUMBERED)]
    return bool(depths) and depths[0] == 1 and 2 in depths


def read_outline(text: str, *, where: str) -> SpecTree:
    lines = split_lines(text)
    findings: list[SpecFinding] = []
    headings: list[Heading] = []
    for number, heading in find_headings(lines, NUMBERED):
        path = tuple(int(part) for _, part in _PART.findall(heading["stars"]))
        if len(path) > MOST_DEPTH:
            what = f"the heading is {len(path)} levels deep"
            raise UserError(what, fix="nest less", where=f"{where}:{number + 1}")
        headings.append((number, path, heading["rest"]))
    if not headings:
        headings = _number_in_order(lines, findings)
    ends = [*(number for number, _, _ in headings[1:]), len(lines)]
    first = headings[0][0] if headings else len(lines)
    title = lines[0].removesuffix("\n") if first else ""
    root = _read_text(title, "".join(lines[1:first]), expected=ROOT_ID, where=where, line=1)
    nodes = []
    for (number, path, title_text), end in zip(headings, ends, strict=True):
        body, expected = "".join(lines[number + 1 : end]), ".".join(map(str, path))
        nodes.append(
            (len(path), _read_text(title_text, body, expected=expected, where=where, line=number + 1))
        )
    findings += _check_numbers(headings)
    return SpecTree(dialect=OUTLINE, root=_nest(root, nodes), findings=tuple(findings))


def _number_in_order(lines: list[str], findings: list[SpecFinding]) -> list[Heading]:
    counters: list[int] = []
    headings: list[Heading] = []
    for number, match in find_headings(lines, UNNUMBERED):
        depth = min(len(match["stars"]), len(counters) + 1)
        counters = [*counters[: depth - 1], (counters[depth - 1] if len(counters) >= depth else 0) + 1]
        headings.append((number, tuple(counters), match["rest"]))
    if headings:
        message = "the headings have no numbers: they were numbered in order"
        line = headings[0][0] + 1
        findings.append(SpecFinding(level="note", code="numbered", node=ROOT_ID, line=line, message=message))
    return headings


def _check_numbers(headings: list[Heading]) -> Iterator[SpecFinding]:
    last: tuple[int, ...] = ()
    for number, path, _ in headings:
        line, label = number + 1, ".".join(map(str, path))
        fits = len(path) <= len(last) + 1 and path[:-1] == last[: len(path) - 1]
        before = last[len(path) - 1] if fits and len(last) >= len(path) else 0
        if not fits:
            message = "the heading above it is not its parent; it is placed below the nearest one"
            yield SpecFinding(level="warning", code="misplaced", node=label, line=line, message=message)
        elif path[-1] != before + 1:
            message = f"the number {path[-1]} follows {before}"
            yield SpecFinding(level="note", code="number_gap", node=label, line=line, message=message)
        last = path


def split_title(title: str) -> tuple[str, str]:
    """The name, and what follows it: groups in brackets and spaces at the end of the line."""
    end = len(title.rstrip())
    while title[:end].endswith("]"):
        start = title.rfind("[", 0, end)
        if start < 0 or "]" in title[start : end - 1]:
            break
        end = len(title[:start].rstrip())
    return title[:end], title[end:]


def _read_text(title: str, body: str, *, expected: str, where: str, line: int) -> SpecNode:
    """Read the text; `expected` maps the number of a heading to the id."""
    name, tail = split_title(title)
    if not body.startswith(_BLOCK_START):
        return SpecNode(id=expected, name=name, tail=tail, body=body, line=line)
    block, separator, remaining_body = body.removeprefix(_BLOCK_START).partition("\n" + _BLOCK_END)
    if not separator:
        raise UserError(
            "the fenced block `spec` is not closed", fix="close it with ```", where=f"{where}:{line + 1}"
        )
    inner = read_yaml_tree(block + "\n", where=f"{where}:{line + 2}").root
    fields = dict(inner.fields)
    exact = fields.pop("exact", None)
    exact = exact if isinstance(exact, dict) else {}
    inner_fields = exact.get("fields")
    return SpecNode(
        id=inner.id or ("" if "id" in exact else expected),
        name=str(exact.get("name", name)),
        tail=str(exact.get("tail", tail)),
        body=str(exact.get("body", remaining_body)),
        fields=fields | (inner_fields if isinstance(inner_fields, dict) else {}),
        line=line,
        lines={key: number + line + 1 for key, number in inner.lines.items()},
    )


def _nest(root: SpecNode, nodes: list[tuple[int, SpecNode]]) -> SpecNode:
    """Nest each heading below the last one before it with fewer numbers. `nodes` are paired with those
    numbers.
    """
    open_: list[tuple[int, SpecNode, list[SpecNode]]] = [(0, root, [])]

    def close(depth: int) -> None:
        while len(open_) > 1 and open_[-1][0] >= depth:
            _, node, children = open_.pop()
            open_[-1][2].append(node.model_copy(update={"children": tuple(children)}))

    for depth, node in nodes:
        close(depth)
        open_.append((depth, node, []))
    close(0 if len(open_) == 1 else 1)
    return root.model_copy(update={"children": tuple(open_[0][2])})


def write_outline(tree: SpecTree) -> str:
    """Raises UserError for a single node: an outline is recognized by its headings."""
    if tree.root.is_leaf:
        raise UserError(
            "a tree of one node has no outline form",
            why="an outline is recognized by its numbered headings",
            fix="convert it to yaml",
        )
    waiting: list[tuple[tuple[int, ...], SpecNode]] = [((), tree.root)]
    parts: list[str] = []
    while waiting:
        path, node = waiting.pop()
        waiting += [((*path, number), child) for number, child in _numbered(node)][::-1]
        parts.append(_write_node(node, path, is_last=not waiting))
    return "".join(parts)


def _numbered(node: SpecNode) -> list[tuple[int, SpecNode]]:
    """Children with the numbers that their own ids end with if those ascend, else counted."""
    numbered, last = [], 0
    for child in node.children:
        end = child.id.rpartition(".")[2]
        number = int(end) if end.isascii() and end.isdigit() and len(end) < 9 else 0
        last = number if number > last and str(number) == end else last + 1
        numbered.append((last, child))
    return numbered


def _write_node(node: SpecNode, path: tuple[int, ...], *, is_last: bool) -> str:
    title, exact = node.name + node.tail, dict[str, Any]()
    expected = ".".join(map(str, path)) or ROOT_ID
    # The first line of a file must not look like a heading, nor be left out.
    looks_numbered = not path and (NUMBERED.match(title) or _FENCE.match(title))
    if split_title(title) != (node.name, node.tail) or "\n" in title or looks_numbered:
        exact |= {"name": node.name, "tail": node.tail}
        # A line that can stand for a name which cannot be a heading itself.
        title = re.sub(r"[\[\]*`~\s]+", " ", node.name).strip() or UNTITLED
    body = node.body
    if not _is_plain_body(body, is_last=is_last):
        exact["body"], body = node.body, ""
    block = dict(node.fields)
    if node.id and node.id != expected:
        block = {"id": node.id, **block}
    elif not node.id:
        exact["id"] = ""
    if "exact" in node.fields:
        exact["fields"] = {"exact": node.fields["exact"]}
    if exact:
        block["exact"] = exact
    if not path and not (title or block or body):
        return ""
    stars = "".join("*" * depth + str(number) for depth, number in enumerate(path, 1))
    line = f"{stars} {title}\n" if path else f"{title}\n"
    return line + (_BLOCK_START + _dump(block) + _BLOCK_END if block else "") + body


def _is_plain_body(body: str, *, is_last: bool) -> bool:
    """Return whether text below a heading is read back unchanged: no headings, no open fence, no `spec`
    block.
    """
    if body.startswith(_BLOCK_START) or not (is_last or not body or body.endswith("\n")):
        return False
    lines = split_lines(body if not body or body.endswith("\n") else body + "\n")
    headings = [number for number, _ in find_headings([*lines, "*1 end\n"], NUMBERED)]
    return headings == [len(lines)]


ENDINGS = (".tiki", ".yaml", ".yml", ".outline")
_MEANT_AS_YAML = re.compile(r"^(?:id|name|children|metadata)[ \t]*:", re.M)
_MARKDOWN = re.compile(r"^#{1,6}[ \t]+\S", re.M)
_TREE_KEYS = frozenset({"id", "name", "children", "metadata", "stages"})


def read_spec(path: Path) -> SpecTree:
    """The tree of a file."""
    return parse_spec(read_config_text(path), where=str(path))


def parse_spec(text: str, *, where: str) -> SpecTree:
    if is_outline(text):
        return read_outline(text, where=where)
    try:
        content = parse_yaml(text, where=where).content
    except UserError as error:
        if len(_MEANT_AS_YAML.findall(text)) > 1:
            raise
        raise _free_text(text, where=where, why=f"it is not YAML ({error.what})") from error
    if is_schema(content):
        raise UserError(
            "this is an OpenAPI document or a JSON Schema",
            why="its leaves need ids that cases can name",
            fix="write a specification from it: `graft spec convert FILE --to yaml --out NAME.tiki`",
            where=where,
        )
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "empty" if content is None else "plain text"
        why = f"its YAML is {kind}, not a mapping"
        raise _free_text(text, where=where, why=why, is_yaml=isinstance(content, list))
    if not _TREE_KEYS & content.keys():
        keys = ", ".join(str(key) for key in list(content)[:6])
        raise _free_text(
            text,
            where=where,
            why=f"none of its keys ({keys}) is id, name, children or metadata",
            is_yaml=True,
        )
    return read_yaml_tree(text, where=where)


def is_schema(content: Any) -> bool:
    """Whether a document is an OpenAPI document or a JSON Schema: `convert` makes a tree of it."""
    if not isinstance(content, dict) or "children" in content:
        return False
    if {"openapi", "swagger"} & content.keys() and isinstance(content.get("paths"), dict):
        return True
    defines = {"properties", "$defs", "definitions"} & content.keys()
    return bool({"$schema", "$defs"} & content.keys() and defines)


def write_spec(tree: SpecTree, dialect: Dialect) -> str:
    return write_outline(tree) if dialect == "outline" else _dump(_to_plain(tree.root))


def _free_text(text: str, *, where: str, why: str, is_yaml: bool = False) -> UserError:
    if not text.strip():
        description = "the file is empty"
    else:
        headings = len(_MARKDOWN.findall(text))
        description = "YAML without a tree" if is_yaml else "free text"
        if headings and not is_yaml:
            description += f" with {headings} Markdown heading{'s' if headings > 1 else ''}"
    return UserError(
        f"this is not a specification: {description}",
        why=f"it has no numbered headings (*1, *1**1), and {why}",
        fix="write a YAML tree with id, name and children, or an outline of numbered headings",
        where=where,
    )


_METHODS = ("get", "put", "post", "delete", "patch", "head", "options")
_SCHEMA = re.compile(r"""(?:^|[{,])\s*["']?(?:openapi|swagger|\$schema|\$defs)["']?\s*:""", re.M)


def read_any(path: Path) -> SpecTree:
    """A specification, or the tree of an OpenAPI document or a JSON Schema."""
    text = read_config_text(path)
    return parse_any(text, where=str(path))


def parse_any(text: str, *, where: str) -> SpecTree:
    if not _SCHEMA.search(text):
        return parse_spec(text, where=where)
    content = parse_yaml(text, where=where).content
    if not is_schema(content):
        return parse_spec(text, where=where)
    return from_openapi(content) if "paths" in content else from_json_schema(content, where=where)


def from_openapi(document: dict[str, Any]) -> SpecTree:
    """Operations grouped by the first part of their path."""
    info = document.get("info") if isinstance(document.get("info"), dict) else {}
    groups: dict[str, list[SpecNode]] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items() if isinstance(item, dict) else ():
            if method in _METHODS and isinstance(operation, dict):
                group = str(path).strip("/").partition("/")[0] or "root"
                groups.setdefault(group, []).append(_operation(document, str(path), method, operation))
    children = []
    for number, (group, leaves) in enumerate(groups.items(), 1):
        numbered = [leaf.model_copy(update={"id": f"{number}.{n}"}) for n, leaf in enumerate(leaves, 1)]
        children.append(SpecNode(id=str(number), name=group, children=tuple(numbered)))
    root = SpecNode(
        id="0",
        name=str((info or {}).get("title") or "Api"),
        fields={"version": str((info or {}).get("version") or "")},
        children=tuple(children),
    )
    return SpecTree(dialect="yaml", root=root)


def _operation(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> SpecNode:
    inputs: dict[str, str] = {}
    for reference in operation.get("parameters") or ():
        parameter = _resolve(document, reference)
        inputs[snake_case(str(parameter.get("name", "")))] = _type(
            document, parameter.get("schema") or parameter
        )
    body = _schema_of(_resolve(document, operation.get("requestBody") or {}))
    if body is not None:
        inputs["body"] = _type(document, body)
    answers = operation.get("responses") if isinstance(operation.get("responses"), dict) else {}
    good: Any = next((value for code, value in (answers or {}).items() if str(code).startswith("2")), {})
    result = _schema_of(_resolve(document, good))
    name = str(operation.get("operationId") or f"{method} {path}")
    return SpecNode(
        id="",
        name=name,
        fields={
            "metadata": {
                "description": str(operation.get("summary") or operation.get("description") or name),
                "inputs": inputs,
                "outputs": {"result": _type(document, result) if result is not None else "none"},
            },
            "operation": f"{method.upper()} {path}",
        },
    )


def from_json_schema(document: dict[str, Any], *, where: str) -> SpecTree:
    """One leaf for each definition: a function that checks or builds such a value."""
    defined = document.get("$defs") or document.get("definitions") or {}
    if not isinstance(defined, dict):
        raise UserError("the definitions of this schema are not a mapping", fix="check $defs", where=where)
    title = str(document.get("title") or "Schema")
    schemas = {**({title: document} if "properties" in document else {}), **defined}
    leaves = [
        SpecNode(
            id=f"1.{number}",
            name=f"validate {name}",
            fields={
                "metadata": {
                    "description": str(schema.get("description") or f"Whether a value is a valid {name}"),
                    "inputs": {"value": _type(document, schema)},
                    "outputs": {"valid": "bool"},
                },
                "schema": _plain(schema),
                **_examples(name, schema),
            },
        )
        for number, (name, schema) in enumerate(schemas.items(), 1)
        if isinstance(schema, dict)
    ]
    group = SpecNode(id="1", name="Validation", children=tuple(leaves))
    return SpecTree(dialect="yaml", root=SpecNode(id="0", name=title, children=(group,)))


def _examples(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Examples are valid by definition: each is a requirement that states a call."""
    listed = schema.get("examples")
    examples = [
        *(listed if isinstance(listed, list) else []),
        *([schema["example"]] if "example" in schema else []),
    ]
    function = snake_case(f"validate {name}")
    calls = [f"{function}({json.dumps(_plain(value))}) == true" for value in examples]
    return {"requirements": calls} if calls else {}


def _plain(value: Any) -> Any:
    """Plain data; what YAML reads as dates becomes text."""
    return json.loads(json.dumps(value, default=str))


def _resolve(document: dict[str, Any], value: Any) -> dict[str, Any]:
    """Follow references within the document, a few steps at most."""
    for _ in range(8):
        reference = value.get("$ref") if isinstance(value, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = document
        for part in reference[2:].split("/"):
            target = (
                target.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(target, dict) else {}
            )
        value = target
    return value if isinstance(value, dict) else {}


def _schema_of(holder: dict[str, Any]) -> dict[str, Any] | None:
    content = holder.get("content")
    if isinstance(content, dict):
        media: Any = content.get("application/json") or next(iter(content.values()), {})
        return (
            media.get("schema") if isinstance(media, dict) and isinstance(media.get("schema"), dict) else None
        )
    return holder.get("schema") if isinstance(holder.get("schema"), dict) else None


def _type(document: dict[str, Any], schema: Any, depth: int = 0) -> str:
    """The type in the words that specifications use."""
    resolved = _resolve(document, schema)
    if depth > 4 or not resolved:
        return "any"
    if isinstance(resolved.get("enum"), list):
        return " | ".join(repr(value) if isinstance(value, str) else str(value) for value in resolved["enum"])
    kind = resolved.get("type")
    if isinstance(kind, list):
        return " | ".join(str(name) for name in kind)
    if kind == "array":
        return f"list({_type(document, resolved.get('items') or {}, depth + 1)})"
    if kind == "object" or "properties" in resolved:
        return "map"
    return str(kind) if kind else "any"
