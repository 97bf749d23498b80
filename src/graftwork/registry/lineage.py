"""Where a release comes from, as a graph: releases, runs, datasets, files, lines. Pure.

In: nodes and edges, put together by whoever knows the stores. Out: the graph as a record, and as a text for
Graphviz. An edge leads from what was made to what it was made of.
"""

import json
from collections.abc import Iterable
from typing import Literal

from graftwork.records.base import Record

NodeKind = Literal["release", "run", "plan", "report", "verdict", "base", "dataset", "file", "lines"]
_SHAPES = {"release": "box", "file": "note", "lines": "plaintext", "dataset": "cylinder"}


class LineageNode(Record):
    """`facts` are what can be said of it in few words."""

    id: str
    kind: NodeKind
    name: str
    facts: dict[str, str] = {}


class LineageEdge(Record):
    made: str
    of: str
    how: str


class LineageGraph(Record):
    """The first node is the release that was asked for."""

    nodes: tuple[LineageNode, ...]
    edges: tuple[LineageEdge, ...]

    def below(self, node_id: str) -> tuple[tuple[LineageEdge, LineageNode], ...]:
        """What a node was made of."""
        known = {node.id: node for node in self.nodes}
        return tuple((edge, known[edge.of]) for edge in self.edges if edge.made == node_id)


def to_dot(graph: LineageGraph) -> str:
    """The graph as Graphviz reads it: `dot -Tsvg` draws it."""
    lines = ["digraph lineage {", "  rankdir=LR;", '  node [fontname="sans-serif"];']
    for node in graph.nodes:
        facts = [f"{key}: {value}" for key, value in node.facts.items()]
        label = _quote("\n".join((f"{node.kind} {node.name}", *facts)))
        lines.append(f"  {_quote(node.id)} [label={label}, shape={_SHAPES.get(node.kind, 'ellipse')}];")
    lines += [
        f"  {_quote(edge.made)} -> {_quote(edge.of)} [label={_quote(edge.how)}];" for edge in graph.edges
    ]
    return "\n".join((*lines, "}")) + "\n"


def to_ranges(numbers: Iterable[int]) -> str:
    """Numbers in few words: 1-3, 7, 9-12."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _quote(text: str) -> str:
    # JSON's escapes are those of Graphviz, but for letters beyond ASCII, which stay as they are.
    return json.dumps(text, ensure_ascii=False)
