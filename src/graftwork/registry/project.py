"""The release store of a project: promote and roll back, garbage collection, verdicts, queries and lineage.

A release is verified byte by byte, and its signature if the project trusts a key, before an alias may point
at it. Garbage collection keeps what an alias or a running server needs, and adds unindexed releases that
verify to the index. The lineage leads from a verified release to the log lines that it was trained on; what
no longer exists is marked as such.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, get_args

from pydantic import ValidationError

from graftwork.files.disk import file_digest, read_record
from graftwork.project.open_project import OpenProject, current_user, timestamp
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset, InputFile
from graftwork.records.errors import Busy, GraftError, UserError
from graftwork.records.release import AliasMove, Garbage, Release, ReleaseEntry, ReleaseNote, ReleaseQuery
from graftwork.records.report import Decision, Verdict
from graftwork.registry import index as registry
from graftwork.registry.index import PlannedRollback, reachable_releases, select_retained
from graftwork.registry.manifest import alias_of_model
from graftwork.registry.signatures import (
    SecretKey,
    create_key_pair,
    load_public_key,
    load_secret_key,
    sign_manifest,
)
from graftwork.registry.store import ReleaseStore
from graftwork.text.wording import parse_time


def open_store(work: OpenProject) -> ReleaseStore:
    public_key = work.settings.release.public_key
    key = load_public_key(public_key, root=work.project.root) if public_key else None
    return ReleaseStore.open(work.project.releases, public_key=key)


def full_alias(work: OpenProject, alias: str | None = None, *, model: str | None = None) -> str:
    """The full name of an alias of this model, by default the one that is worked on."""
    settings = work.settings
    name = model or work.model
    # What was released before the project had named models is the main one's.
    owner = name if name in settings.models else settings.main_model
    return alias_of_model(alias or settings.release.alias, model=owner, main=settings.main_model)


def promote_release(
    work: OpenProject,
    name: str,
    *,
    alias: str | None = None,
    reason: str = "",
    force: bool = False,
    who: str = "",
    instead_of: str | None = None,
) -> tuple[Release, str, AliasMove | None]:
    """Point an alias of the release's own model at it. `who` is logged; the user of this process if empty.

    Returns the release, the full alias and the move: None if the alias already pointed there. With
    `instead_of`, Busy is raised if the alias points at a different release by now.
    """
    store = open_store(work)
    with store.shared_lock():
        release = registry.find_release(work.releases, name)
        full = full_alias(work, alias, model=release.model)
        model, slash, _ = full.rpartition("/")
        settings = work.settings
        if slash and (model not in settings.models or model == settings.main_model):
            # An alias named with its model takes releases of that model only.
            raise UserError(
                f"there is no model {model!r} that has aliases of this kind",
                why=f"the models are {', '.join(settings.all_models)}; {settings.main_model} has no prefix",
                fix=f"leave the prefix out: the alias belongs to the model of release {release.id[:12]}",
                where="--alias",
            )
        store.verify(release.id)
        move = registry.promote(
            work.releases,
            release,
            alias=full,
            change=registry.Change(who or current_user(), timestamp(), reason),
            force=force,
            instead_of=instead_of,
        )
    return release, full, move


def rollback_alias(
    work: OpenProject,
    *,
    alias: str | None = None,
    reason: str = "",
    who: str = "",
    planned: PlannedRollback | None = None,
) -> AliasMove:
    """Point an alias of the selected model at the release before the current one.

    `planned` is the rollback that was decided on; Busy is raised if the alias was moved since then.
    """
    full = full_alias(work, alias)
    store = open_store(work)
    with store.shared_lock():
        planned = planned or registry.plan_rollback(work.releases, alias=full)
        store.verify(planned.target)
        change = registry.Change(who or current_user(), timestamp(), reason)
        return registry.rollback(work.releases, alias=full, change=change, planned=planned)


def sign_release(work: OpenProject, release: Release, *, key: SecretKey) -> Path:
    """Sign the manifest of a release. Returns the file of the signature."""
    store = open_store(work)
    comment = f"release:{release.id} time:{timestamp()}"
    return store.sign(release.id, sign_manifest(store.folder(release.id), key=key, comment=comment))


@dataclass(frozen=True, kw_only=True)
class ReleaseEdit:
    """What changes about a release. `secret_key` signs it; `new_key` is the folder of a key to create."""

    version: str | None = None
    tag: Collection[str] = ()
    untag: Collection[str] = ()
    note: str | None = None
    secret_key: Path | None = None
    new_key: Path | None = None


def edit_release(
    work: OpenProject, name: str, changes: ReleaseEdit
) -> tuple[ReleaseEntry, tuple[ReleaseNote, ...], dict[str, str]]:
    """Change the version, tags, signature and notes of a release. Returns it, its notes, and the files of a
    new key pair and of the signature."""
    key = None if changes.secret_key is None else load_secret_key(changes.secret_key)
    release, signed = registry.find_release(work.releases, name), {}
    if changes.version is not None:
        work.releases.set_version(release.id, changes.version)
    if changes.tag:
        work.releases.tag(release.id, changes.tag)
    if changes.untag:
        work.releases.tag(release.id, changes.untag, remove=True)
    if changes.new_key is not None:
        secret_key, public_key = create_key_pair(changes.new_key)
        key, signed = load_secret_key(secret_key), {"secret_key": str(secret_key), "public_key": public_key}
    if key is not None:
        signed["signature"] = str(sign_release(work, release, key=key))
    # Last, for notes stay: after a failure the same command adds no second one.
    if changes.note is not None:
        work.releases.note(release.id, changes.note, who=current_user(), when=timestamp())
    return work.releases.entry(release.id), work.releases.notes(release.id), signed


def roll_back_release(
    work: OpenProject, release_id: str, *, alias: str | None = None, reason: str
) -> AliasMove | None:
    """Roll back from this release; None if the alias points at another one by now, which stays."""
    full = full_alias(work, alias)
    planned = registry.plan_rollback(work.releases, alias=full)
    if planned.live != release_id:
        return None
    try:
        return rollback_alias(work, alias=alias, reason=reason, planned=planned)
    except Busy:
        if work.releases.aliases().get(full) == release_id:
            raise
        return None


DOUBTFUL = "it is not known whether a server uses it"
HELD_LATE = "a server started to use it during garbage collection"


def collect_garbage(
    work: OpenProject, *, dry_run: bool = False, keep_last: int | None = None, keep_days: int | None = None
) -> Garbage:
    """Take away what the project's rules, or the given ones, do not keep."""
    rules = work.settings.release
    days = rules.keep_days if keep_days is None else keep_days
    young_since = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
    reasons: dict[str, str] = {}
    adopted: list[str] = []
    refused: list[str] = []

    def in_use(ids: tuple[str, ...], leased: frozenset[str], doubtful: frozenset[str]) -> set[str]:
        whole, damaged = _find_unindexed(work, ids)
        adopted.extend(release.id for release in whole)
        refused.extend(damaged)
        if not dry_run:
            for release in whole:
                work.releases.add(release)
        entries = work.releases.entries()
        reasons.update(
            select_retained(
                entries,
                reachable=reachable_releases(work.releases.alias_logs().values()),
                leased=leased,
                keep_last=rules.keep_last if keep_last is None else keep_last,
                young_since=young_since,
            )
        )
        reasons.update({id_: DOUBTFUL for id_ in doubtful if id_ not in reasons})
        indexed = {entry.id for entry in entries}
        unused = {id_ for id_ in ids if id_ in indexed and id_ not in reasons}
        if not dry_run:
            # From here on no alias can be moved to them; one that was moved meanwhile spares its release.
            unused = set(work.releases.collect(unused, when=timestamp()))
        return set(ids) - unused

    def stays(remaining: frozenset[str]) -> None:
        for entry in work.releases.entries():
            if entry.collected_at is not None and entry.id in remaining:
                # Marked above or by a collection that was killed, and in use since.
                work.releases.add(work.releases.get(entry.id))
                reasons.setdefault(entry.id, HELD_LATE)

    garbage = open_store(work).collect_garbage(in_use, dry_run=dry_run, stays=stays)
    return garbage.model_copy(
        update={"adopted": tuple(adopted), "refused": tuple(refused), "why_kept": reasons}
    )


def index_releases(work: OpenProject) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add the releases on disk that the index does not know, as after the loss of the database.

    Returns the ids of those that were added, and of those that do not verify.
    """
    whole, damaged = _find_unindexed(work, open_store(work).ids())
    for release in whole:
        work.releases.add(release)
    return tuple(release.id for release in whole), tuple(damaged)


def count_unindexed(work: OpenProject) -> int:
    """Releases on disk that the index does not know; they are not verified."""
    return len(set(open_store(work).ids()) - {entry.id for entry in work.releases.entries()})


def _find_unindexed(work: OpenProject, ids: Iterable[str]) -> tuple[list[Release], list[str]]:
    """Releases in the store but not in the index: whole ones, oldest first, and the ids of damaged ones.

    The index is a new one, or a killed writer left a release; what is not whole was never let in.
    Every byte is read: one that counts among the newest may cost an older one its place.
    """
    store, whole, damaged = open_store(work), list[Release](), list[str]()
    indexed = {entry.id for entry in work.releases.entries()}
    for release_id in ids:
        if release_id in indexed:
            continue
        try:
            release = store.verify_unsigned(release_id)
        except GraftError:
            damaged.append(release_id)
        else:
            if release.project == work.settings.project:
                whole.append(release)
    return sorted(whole, key=lambda release: release.created_at), damaged


VERDICT = "verdict.json"


def read_verdict(work: OpenProject, release: Release) -> Verdict | None:
    promised = next((file.sha256 for file in release.files if file.path == VERDICT), None)
    try:
        body = (open_store(work).folder(release.id) / VERDICT).read_bytes()
        if hashlib.sha256(body).hexdigest() != promised:
            return None
        return Verdict.from_json(body)
    except (OSError, ValidationError):
        return None


def make_query(filters: ReleaseQuery, *, decision: str | None, since: str | None, limit: int) -> ReleaseQuery:
    """Add what has to be parsed. Asks for one more than `limit`, to find out whether there are more."""
    choice = next((option for option in get_args(Decision) if option == decision), None)
    if decision is not None and choice is None:
        raise UserError(
            f"{decision!r} is not a decision",
            fix=f"choose one of {', '.join(get_args(Decision))}",
            where="--decision",
        )
    start = parse_time(since, now=datetime.now(UTC), back=True) if since else None
    if since and start is None:
        raise UserError(
            f"{since!r} is not a time", fix="write it like 2026-03-01, or like 7d, 12h or 2w", where="--since"
        )
    first = start.isoformat(timespec="seconds") if start is not None else None
    return filters.model_copy(
        update={"decision": choice, "since": first, "limit": limit + 1 if limit else None}
    )


NodeKind = Literal["release", "run", "plan", "report", "verdict", "base", "dataset", "file", "lines"]
_SHAPES = {"release": "box", "file": "note", "lines": "plaintext", "dataset": "cylinder"}


class LineageNode(Record):
    """`facts` are short labels."""

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
        by_id = {node.id: node for node in self.nodes}
        return tuple((edge, by_id[edge.of]) for edge in self.edges if edge.made == node_id)


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
    """Numbers as ranges: 1-3, 7, 9-12."""
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
    """A graph that is being drawn; a node that is already there is not drawn twice."""

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
        # An imported adapter came without its data.
        dataset = read_record(Dataset, store.get(release.id) / "dataset.json")
    _draw_making(work, drawing, release, top, dataset, lines=lines)
    child, child_node, visited = release, top, {release.id}
    while child.parent is not None and child.parent not in visited and len(visited) < _LONGEST_WAY_BACK:
        visited.add(child.parent)
        try:
            parent = work.releases.get(child.parent)
        except GraftError:
            lost = drawing.node("release", child.parent[:12], key=child.parent, state="not in this index")
            drawing.edge(child_node, lost, "replaced")
            break
        below = _draw_release(work, drawing, parent)
        drawing.edge(child_node, below, "replaced")
        _draw_making(work, drawing, parent, below, None, lines=False)
        child, child_node = parent, below
    return LineageGraph(nodes=tuple(drawing.nodes.values()), edges=tuple(drawing.edges))


def _draw_release(work: OpenProject, drawing: _Drawing, release: Release) -> str:
    entry = work.releases.entry(release.id)
    facts = {"model": release.model, "verdict": release.decision, "made": release.created_at}
    facts |= {"version": entry.version} if entry.version else {}
    facts |= {"aliases": ", ".join(entry.aliases)} if entry.aliases else {}
    facts |= {"files": f"collected {entry.collected_at}"} if entry.collected_at else {}
    return drawing.node("release", release.id[:12], key=release.id, **facts)


def _draw_making(
    work: OpenProject, drawing: _Drawing, release: Release, top: str, dataset: Dataset | None, *, lines: bool
) -> None:
    run_entry = work.runs.get(release.run_id)
    run = drawing.node("run", release.run_id, state=run_entry.state if run_entry else "not in this index")
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
    data_state = "here" if folder.is_dir() else "its rows are no longer here"
    if dataset is None and lines:
        data_state = "what it was read from is not known here"
    data = drawing.node("dataset", release.dataset_hash[:12], key=release.dataset_hash, state=data_state)
    drawing.edge(run, data, "learned from")
    if dataset is not None:
        line_numbers = _lines_of(folder, dataset) if lines and folder.is_dir() else {}
        for file in dataset.inputs:
            _draw_file(work, drawing, data, file, line_numbers.get(file.file, {}))


def _draw_file(
    work: OpenProject, drawing: _Drawing, data: str, file: InputFile, line_numbers: dict[str, list[int]]
) -> None:
    try:
        is_same = file_digest(work.project.root / file.file) == file.sha256
        state = "as it was" if is_same else "changed since"
    except OSError:
        state = "no longer there"
    node = drawing.node("file", file.file, sha256=file.sha256[:12], rows=str(file.rows), state=state)
    drawing.edge(data, node, "read from")
    for split, numbers in line_numbers.items():
        name = f"{file.file} {split}"
        lines_node = drawing.node(
            "lines", name, split=split, count=str(len(numbers)), lines=to_ranges(numbers)
        )
        drawing.edge(node, lines_node, split)


def _lines_of(folder: Path, dataset: Dataset) -> dict[str, dict[str, list[int]]]:
    """For each file and split the lines that rows were made of."""
    from graftwork.files.dataset import scan_columns

    by_file: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for split, _, batch in scan_columns(folder, dataset, columns=("file", "line")):
        files, numbers = (batch.column(name).to_pylist() for name in ("file", "line"))
        for file, number in zip(files, numbers, strict=True):
            by_file[file][split].append(number)
    return by_file
