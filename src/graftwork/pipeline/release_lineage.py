"""Follows a release down to the log lines that it learned from.

In: an open project and a release. Out: the graph of what it was made of: parent releases, run, plan,
report, verdict, base, dataset, log files, lines. The release is verified first; what is no longer there is
said to be so, and the rest is shown.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from graftwork.files.disk import file_digest
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.releases import open_store
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset, InputFile
from graftwork.records.errors import GraftError
from graftwork.records.release import Release

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


_LONGEST_WAY_BACK = 1000


class _Drawing:
    """A graph that is being drawn; a node that is there already is not drawn twice."""

    def __init__(self) -> None:
        self.nodes: dict[str, LineageNode] = {}
        self.edges: list[LineageEdge] = []

    def node(self, kind: NodeKind, name: str, *, key: str = "", **facts: str) -> str:
        node_id = f"{kind}:{key or name}"
        self.nodes.setdefault(node_id, LineageNode(id=node_id, kind=kind, name=name, facts=facts))
        return node_id

    def edge(self, made: str, of: str, how: str) -> None:
        self.edges.append(LineageEdge(made=made, of=of, how=how))


def trace_release(work: OpenProject, release: Release, *, lines: bool = True) -> LineageGraph:
    """The graph below a release. `lines` reads the dataset's rows for the lines of the log."""
    drawing = _Drawing()
    top = _draw_release(work, drawing, release)
    store = open_store(work)
    dataset = None
    if store.has(release.id):
        made_of = store.get(release.id) / "dataset.json"
        dataset = _read_dataset(made_of)
    _draw_making(work, drawing, release, top, dataset, lines=lines)
    _draw_parents(work, drawing, release, top)
    return LineageGraph(nodes=tuple(drawing.nodes.values()), edges=tuple(drawing.edges))


def _read_dataset(path: Path) -> Dataset | None:
    """None where an imported adapter came without its data, or where another version wrote this otherwise."""
    try:
        return Dataset.from_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _draw_release(work: OpenProject, drawing: _Drawing, release: Release) -> str:
    entry = work.releases.entry(release.id)
    facts = {"model": release.model, "verdict": release.decision, "made": release.created_at}
    facts |= {"version": entry.version} if entry.version else {}
    facts |= {"aliases": ", ".join(entry.aliases)} if entry.aliases else {}
    facts |= {"files": f"collected {entry.collected_at}"} if entry.collected_at else {}
    return drawing.node("release", release.id[:12], key=release.id, **facts)


def _draw_parents(work: OpenProject, drawing: _Drawing, release: Release, made: str) -> None:
    seen = {release.id}
    while release.parent is not None and release.parent not in seen and len(seen) < _LONGEST_WAY_BACK:
        seen.add(release.parent)
        try:
            parent = work.releases.get(release.parent)
        except GraftError:
            lost = drawing.node("release", release.parent[:12], key=release.parent, state="not in this index")
            drawing.edge(made, lost, "took the place of")
            return
        below = _draw_release(work, drawing, parent)
        drawing.edge(made, below, "took the place of")
        _draw_making(work, drawing, parent, below, None, lines=False)
        release, made = parent, below


def _draw_making(
    work: OpenProject, drawing: _Drawing, release: Release, top: str, dataset: Dataset | None, *, lines: bool
) -> None:
    kept = work.runs.get(release.run_id)
    run = drawing.node("run", release.run_id, state=kept.state if kept else "not in this index")
    drawing.edge(top, run, "trained by")
    drawing.edge(
        top, drawing.node("verdict", release.verdict_hash[:12], decision=release.decision), "judged by"
    )
    drawing.edge(top, drawing.node("report", release.report_hash[:12]), "measured by")
    drawing.edge(run, drawing.node("plan", release.plan_hash[:12]), "planned by")
    licence = {"licence": release.licence} if release.licence else {}
    base = drawing.node("base", release.base, revision=release.base_fingerprint[:12], **licence)
    drawing.edge(run, base, "on")
    folder = work.project.datasets / release.dataset_hash
    there = "here" if folder.is_dir() else "its rows are no longer here"
    if dataset is None and lines:
        there = "what it was read from is not known here"
    data = drawing.node("dataset", release.dataset_hash[:12], key=release.dataset_hash, state=there)
    drawing.edge(run, data, "learned from")
    if dataset is not None:
        found = _lines_of(folder, dataset) if lines and folder.is_dir() else {}
        for file in dataset.inputs:
            _draw_file(work, drawing, data, file, found.get(file.file, {}))


def _draw_file(
    work: OpenProject, drawing: _Drawing, data: str, file: InputFile, found: dict[str, list[int]]
) -> None:
    path = work.project.root / file.file
    node = drawing.node(
        "file", file.file, sha256=file.sha256[:12], rows=str(file.rows), state=_state_of(path, file.sha256)
    )
    drawing.edge(data, node, "read from")
    for split, numbers in found.items():
        name = f"{file.file} {split}"
        of = drawing.node("lines", name, split=split, count=str(len(numbers)), lines=to_ranges(numbers))
        drawing.edge(node, of, split)


def _lines_of(folder: Path, dataset: Dataset) -> dict[str, dict[str, list[int]]]:
    """For each file and split the lines that rows were made of."""
    from graftwork.files.dataset import scan_columns

    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for columns in scan_columns(folder, dataset, columns=("file", "line")):
        files, numbers = (columns.batch.column(name).to_pylist() for name in ("file", "line"))
        for file, number in zip(files, numbers, strict=True):
            found[file][columns.split].append(number)
    return found


def _state_of(path: Path, sha256: str) -> str:
    try:
        return "as it was" if file_digest(path) == sha256 else "changed since"
    except OSError:
        return "no longer there"
