"""The outline dialect: a title line, then numbered headings `*1 Title`, `*1**2 Title`, with prose below.

In: text. Out: a tree; written back, an outline has the bytes that it was read from. Fields that an outline
has no place for are in a fenced block `spec` directly below a heading. Stars in prose and in fenced code are
no headings. Headings of stars without numbers are numbered in order, if the file has no others.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from graftwork.components.spec.tree import ROOT_ID, Dialect, SpecFinding, SpecNode, SpecTree
from graftwork.components.spec.yaml_tree import read_yaml_tree, write_fields
from graftwork.records.errors import UserMistake

DIALECT: Dialect = "outline"
NUMBERED = re.compile(r"^(?P<stars>\*[0-9]{1,9}(?:\*{1,99}[0-9]{1,9})*)[ \t](?P<rest>.*)$", re.DOTALL)
UNNUMBERED = re.compile(r"^(?P<stars>\*{1,9})[ \t]+(?P<rest>\S.*)$", re.DOTALL)
_PART = re.compile(r"(\*+)([0-9]+)")
_FENCE = re.compile(r"^\s{0,3}(```+|~~~+)")
_BLOCK_START, _BLOCK_END = "```spec\n", "```\n"
UNTITLED = "untitled"
MOST_DEPTH = 24


class _Heading(NamedTuple):
    number: int
    """The line, from 0."""
    path: tuple[int, ...]
    rest: str


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
        elif not fence and (found := pattern.match(line.removesuffix("\n"))):
            yield number, found


def is_outline(text: str) -> bool:
    """Numbered headings, or headings at two levels of stars: Markdown writes no `** text` lists."""
    lines = split_lines(text)
    if any(True for _ in find_headings(lines, NUMBERED)):
        return True
    depths = [len(found["stars"]) for _, found in find_headings(lines, UNNUMBERED)]
    return bool(depths) and depths[0] == 1 and 2 in depths


def read_outline(text: str, *, where: str) -> SpecTree:
    lines = split_lines(text)
    findings: list[SpecFinding] = []
    headings = [_Heading(n, _path_of(found["stars"], where, n + 1), found["rest"])
                for n, found in find_headings(lines, NUMBERED)]  # fmt: skip
    if not headings:
        headings = _number_in_order(lines, findings)
    ends = [*(heading.number for heading in headings[1:]), len(lines)]
    first = headings[0].number if headings else len(lines)
    root = _read_root(lines[:first], where=where)
    nodes = [
        (heading, _read_node(heading, "".join(lines[heading.number + 1 : end]), where=where))
        for heading, end in zip(headings, ends, strict=True)
    ]
    findings += _check_numbers(headings)
    return SpecTree(dialect=DIALECT, root=_nest(root, nodes), findings=tuple(findings))


def _path_of(stars: str, where: str, line: int) -> tuple[int, ...]:
    parts = _PART.findall(stars)
    if len(parts) > MOST_DEPTH:
        raise UserMistake(
            f"the heading is {len(parts)} levels deep", fix="nest less", where=f"{where}:{line}"
        )
    return tuple(int(number) for _, number in parts)


def _number_in_order(lines: list[str], findings: list[SpecFinding]) -> list[_Heading]:
    counters: list[int] = []
    headings = []
    for number, found in find_headings(lines, UNNUMBERED):
        depth = min(len(found["stars"]), len(counters) + 1)
        counters = [*counters[: depth - 1], (counters[depth - 1] if len(counters) >= depth else 0) + 1]
        headings.append(_Heading(number, tuple(counters), found["rest"]))
    if headings:
        message = "the headings have no numbers: they were numbered in order"
        line = headings[0].number + 1
        findings.append(SpecFinding(level="note", code="numbered", node=ROOT_ID, line=line, message=message))
    return headings


def _check_numbers(headings: list[_Heading]) -> Iterator[SpecFinding]:
    last: tuple[int, ...] = ()
    for heading in headings:
        path, line = heading.path, heading.number + 1
        label = ".".join(map(str, path))
        fits = len(path) <= len(last) + 1 and path[:-1] == last[: len(path) - 1]
        before = last[len(path) - 1] if fits and len(last) >= len(path) else 0
        if not fits:
            message = "the heading above it is not its parent; it is placed below the nearest one"
            yield SpecFinding(level="warning", code="misplaced", node=label, line=line, message=message)
        elif path[-1] != before + 1:
            message = f"the number {path[-1]} follows {before}"
            yield SpecFinding(level="note", code="number_gap", node=label, line=line, message=message)
        last = path


def _read_root(lines: list[str], *, where: str) -> SpecNode:
    title = lines[0] if lines else ""
    return _read_text(title.removesuffix("\n"), "".join(lines[1:]), expected=ROOT_ID, where=where, line=1)


def _read_node(heading: _Heading, body: str, *, where: str) -> SpecNode:
    expected = ".".join(map(str, heading.path))
    return _read_text(heading.rest, body, expected=expected, where=where, line=heading.number + 1)


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
    """`expected` is the id by the number of the heading."""
    name, tail = split_title(title)
    if not body.startswith(_BLOCK_START):
        return SpecNode(id=expected, name=name, tail=tail, body=body, line=line)
    block, separator, rest = body.removeprefix(_BLOCK_START).partition("\n" + _BLOCK_END)
    if not separator:
        raise UserMistake(
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
        body=str(exact.get("body", rest)),
        fields=fields | (inner_fields if isinstance(inner_fields, dict) else {}),
        line=line,
        lines={key: number + line + 1 for key, number in inner.lines.items()},
    )


def _nest(root: SpecNode, nodes: list[tuple[_Heading, SpecNode]]) -> SpecNode:
    """Each heading below the last one before it with fewer numbers."""
    open_: list[tuple[int, SpecNode, list[SpecNode]]] = [(0, root, [])]

    def close(depth: int) -> None:
        while len(open_) > 1 and open_[-1][0] >= depth:
            _, node, children = open_.pop()
            open_[-1][2].append(node.model_copy(update={"children": tuple(children)}))

    for heading, node in nodes:
        close(len(heading.path))
        open_.append((len(heading.path), node, []))
    close(0 if len(open_) == 1 else 1)
    return root.model_copy(update={"children": tuple(open_[0][2])})


def write_outline(tree: SpecTree) -> str:
    """UserMistake for a single node: an outline is known by its headings."""
    if tree.root.is_leaf:
        raise UserMistake(
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
    """Children with the numbers that their own ids end with where those rise, else counted."""
    found, last = [], 0
    for child in node.children:
        end = child.id.rpartition(".")[2]
        number = int(end) if end.isascii() and end.isdigit() and len(end) < 9 else 0
        last = number if number > last and str(number) == end else last + 1
        found.append((last, child))
    return found


def _write_node(node: SpecNode, path: tuple[int, ...], *, is_last: bool) -> str:
    title, exact = node.name + node.tail, dict[str, Any]()
    expected = ".".join(map(str, path)) or ROOT_ID
    if split_title(title) != (node.name, node.tail) or "\n" in title or not _is_title(title, path):
        exact |= {"name": node.name, "tail": node.tail}
        title = _as_title(node.name)
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
    return line + (_BLOCK_START + write_fields(block) + _BLOCK_END if block else "") + body


def _is_title(title: str, path: tuple[int, ...]) -> bool:
    """The first line of a file must not look like a heading, nor be left out."""
    return bool(path) or not (NUMBERED.match(title) or _FENCE.match(title))


def _as_title(name: str) -> str:
    """A line that can stand for a name which cannot be a heading itself."""
    return re.sub(r"[\[\]*`~\s]+", " ", name).strip() or UNTITLED


def _is_plain_body(body: str, *, is_last: bool) -> bool:
    """Whether text below a heading is read back as it is: no headings, no open fence, no block of ours."""
    if body.startswith(_BLOCK_START) or not (is_last or not body or body.endswith("\n")):
        return False
    lines = split_lines(body if not body or body.endswith("\n") else body + "\n")
    found = [number for number, _ in find_headings([*lines, "*1 end\n"], NUMBERED)]
    return found == [len(lines)]
