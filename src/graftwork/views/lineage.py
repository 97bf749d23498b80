"""The lineage of a release: a tree for terminals, a drawing for pages."""

from typing import TYPE_CHECKING

from markupsafe import Markup

from graftwork.text.wording import truncate
from graftwork.views.charts import drawing, element, label, path
from graftwork.views.document import Branch, Document, quote

if TYPE_CHECKING:
    from graftwork.registry.project import LineageGraph, LineageNode

LONGEST_FACT = 160


def view_lineage(graph: "LineageGraph") -> Document:
    """The graph as a tree; a node with several parents is expanded once."""
    drawn: set[str] = set()

    def branch(node: "LineageNode", how: str) -> Branch:
        is_new = node.id not in drawn
        drawn.add(node.id)
        below = [branch(other, edge.how) for edge, other in graph.below(node.id)] if is_new else []
        facts = ", ".join(f"{key} {truncate(value, LONGEST_FACT)}" for key, value in node.facts.items())
        edge = f"[dim]{quote(how)}[/] " if how else ""
        return Branch(f"{edge}{node.kind} [bold]{quote(node.name)}[/] [dim]{quote(facts)}[/]", below)

    return Document("Lineage", [branch(graph.nodes[0], "")])


COLUMN_OF = {
    "lines": 0,
    "file": 1,
    "dataset": 2,
    "base": 2,
    "plan": 3,
    "run": 3,
    "report": 4,
    "verdict": 4,
    "release": 5,
}
NAMES = {
    "lines": "log lines",
    "file": "log file",
    "dataset": "dataset",
    "base": "base model",
    "plan": "plan",
    "run": "run",
    "report": "evaluation",
    "verdict": "verdict",
    "release": "release",
}
WIDTH, HEIGHT, GAP_X, GAP_Y = 148.0, 44.0, 34.0, 14.0
MOST_ROWS = 6
ROWS = 3
ROW_OF = {"verdict": 0, "report": 2, "run": 1, "plan": 2, "release": 1, "dataset": 1, "base": 0}


def draw_lineage(graph: "LineageGraph") -> Markup:
    """The release itself and what it was made from; earlier releases are in the table below it."""
    top = graph.nodes[0]
    shown = [node for node in graph.nodes if node.kind != "release" or node is top]
    inside = {node.id for node in _reach(graph, top)}
    columns: dict[int, list[LineageNode]] = {}
    for node in shown:
        if node.id in inside:
            columns.setdefault(COLUMN_OF[node.kind], []).append(node)
    columns = {column: nodes[:MOST_ROWS] for column, nodes in columns.items()}
    places = _place(columns)
    height = max((y for _, y in places.values()), default=0) + HEIGHT + 8
    width = (max(columns) + 1) * (WIDTH + GAP_X) + WIDTH + 4
    parts: list[Markup] = []
    for edge in graph.edges:
        if edge.made in places and edge.of in places:
            parts.append(_draw_edge(places[edge.of], places[edge.made]))
    for node in shown:
        if node.id in places:
            parts += _draw_node(node, *places[node.id])
    aliases = top.facts.get("aliases", "")
    x, y = places[top.id]
    end = x + WIDTH + GAP_X
    parts.append(_draw_edge((x, y), (end, y)))
    parts += _draw_box(end, y, "alias", aliases or "none", strong=bool(aliases))
    described = ", ".join(f"{NAMES[node.kind]} {node.name}" for node in shown if node.id in places)
    return drawing(
        *parts,
        width=width,
        height=height,
        title="Lineage",
        description=f"{described}; aliases: {aliases or 'none'}",
        class_="lineage",
    )


def _reach(graph: "LineageGraph", top: "LineageNode") -> "list[LineageNode]":
    """The nodes below a release, without those of its predecessors."""
    known = {node.id: node for node in graph.nodes}
    found, waiting = {top.id: top}, [top.id]
    while waiting:
        at = waiting.pop()
        for edge in graph.edges:
            if edge.made == at and edge.of not in found and known[edge.of].kind != "release":
                found[edge.of] = known[edge.of]
                waiting.append(edge.of)
    return list(found.values())


def _place(columns: "dict[int, list[LineageNode]]") -> dict[str, tuple[float, float]]:
    """Kinds that occur once have their own row, so that no line crosses a box; others are centered."""
    places = {}
    for column, nodes in columns.items():
        first = max((ROWS - len(nodes)) / 2, 0.0)
        for place, node in enumerate(nodes):
            row = ROW_OF.get(node.kind, first + place)
            places[node.id] = (column * (WIDTH + GAP_X) + 1, row * (HEIGHT + GAP_Y) + 2)
    return places


def _draw_edge(start: tuple[float, float], end: tuple[float, float]) -> Markup:
    x1, y1 = start[0] + WIDTH, start[1] + HEIGHT / 2
    x2, y2 = end[0], end[1] + HEIGHT / 2
    if start[0] >= end[0]:
        # In one column: down the side.
        x1, x2 = start[0] + WIDTH / 2, end[0] + WIDTH / 2
        y1, y2 = (start[1], end[1] + HEIGHT) if start[1] > end[1] else (start[1] + HEIGHT, end[1])
    return path([(x1, y1), (x2, y2)], class_="edge")


def _draw_node(node: "LineageNode", x: float, y: float) -> list[Markup]:
    return _draw_box(x, y, NAMES[node.kind], _short(node), strong=node.kind == "release")


def _draw_box(x: float, y: float, kind: str, name: str, *, strong: bool) -> list[Markup]:
    return [
        element(
            "rect", x=x, y=y, width=WIDTH, height=HEIGHT, rx=8, class_="node strong" if strong else "node"
        ),
        label(kind, x=x + 10, y=y + 17, class_="tick"),
        label(_cut(name), x=x + 10, y=y + 34, class_="name"),
    ]


def _short(node: "LineageNode") -> str:
    if node.kind == "lines":
        return f"{node.facts.get('count', '?')} {node.facts.get('split', '')}"
    if node.kind == "verdict":
        return node.facts.get("decision", node.name)
    return node.name


def _cut(name: str, longest: int = 15) -> str:
    return (
        name
        if len(name) <= longest
        else f"…{name[-longest + 1 :]}"
        if "/" in name
        else f"{name[: longest - 1]}…"
    )
