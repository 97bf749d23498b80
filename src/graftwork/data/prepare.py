"""Runs the data stage: audits logs, and prepares one dataset per model from them.

In: settings, the renderer of the base model, folders to work in. Out: an `Audit`, or manifests and dataset
folders: filtered, redacted, deduplicated, split, rendered, and checked for leakage. Rows stay on disk; only
columns of numbers are in memory for all of them.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import orjson

from graftwork.data.audit.lengths import CountTokens
from graftwork.data.audit.report import (
    audit_corpus,
)
from graftwork.data.audit.row_checks import SERVED, TAUGHT, AuditContext
from graftwork.data.corpus.build import Progress, build_corpus
from graftwork.data.corpus.scores import weigh_rows
from graftwork.data.corpus.store import Corpus, JoinedFacts
from graftwork.data.dedup.paraphrases import find_embedder
from graftwork.data.dedup.repeats import Repeats, find_repeats
from graftwork.data.render.dataset import (
    PlacedShard,
    RenderedSegment,
    RenderOptions,
    RowOutcomes,
    assemble,
    count_kept,
    list_dropped,
    render_corpus,
    write_drops,
)
from graftwork.data.render.rows import (
    BY_TEMPLATE,
    SUBSET_SPLITS,
    Renderer,
    apply_system_prompt,
    needs_reasoning_dropped,
)
from graftwork.data.settings import DataSettings, ModelSettings, names_file
from graftwork.data.split.assignment import UNASSIGNED, SplitAssignment, assign_splits, find_unfit_references
from graftwork.data.split.leakage import require_no_leak
from graftwork.data.split.model_subsets import (
    NOT_SELECTED,
    KeptRows,
    ModelSubset,
    find_setting_warnings,
    require_split_key,
    select_subsets,
    summarize_subsets,
)
from graftwork.data.split.split_state import SplitState
from graftwork.files.dataset import DROPS, drops_table
from graftwork.process.cluster.pieces import MapEngine
from graftwork.records.dataset import SPLITS, Audit, Dataset, SubsetSummary
from graftwork.records.errors import AnswerIsNo, UserMistake
from graftwork.records.interaction import Interaction

FEATURES, SHARDS = "sifted", "shards"
MAIN: Mapping[str, ModelSettings] = {"main": ModelSettings()}


class RenderTarget(NamedTuple):
    """The base model that the rows are rendered for."""

    name: str
    fingerprint: str
    renderer: Renderer


class PreparedDataset(NamedTuple):
    dataset: Dataset
    folder: Path
    summary: SubsetSummary


class Preparation(NamedTuple):
    """One dataset per model, the main one first, and warnings about settings that match no row."""

    datasets: list[PreparedDataset]
    warnings: list[str]


class _Kept(NamedTuple):
    """The positions of the rows that are kept, and what is known about them."""

    places: "np.ndarray[Any, np.dtype[np.int64]]"
    facts: KeptRows
    subsets: list[ModelSubset]


class _Decisions(NamedTuple):
    passed: "np.ndarray[Any, Any]"
    repeats: Repeats
    assignment: SplitAssignment
    kept: _Kept
    unfit_references: set[int]
    warnings: list[str]


class PrepareJob(NamedTuple):
    """What to prepare. Log files are named relative to `root`."""

    context: AuditContext
    base: RenderTarget
    work: Path
    out: Path
    root: Path = Path()
    models: Mapping[str, ModelSettings] = MAIN


def prepare(
    job: PrepareJob,
    *,
    on_progress: Progress | None = None,
    processes: int | None = None,
    engine: MapEngine | None = None,
) -> Preparation:
    """Prepare the datasets of all models; by `processes` of this machine if no engine is given."""
    report, engine = on_progress or _ignore_progress, engine or MapEngine(processes=processes)
    features = job.work / FEATURES
    corpus = build_corpus(job.context, folder=features, root=job.root, on_progress=report, engine=engine)
    decided = _decide(corpus, job, report=report)
    options = RenderOptions(
        renderer=job.base.renderer,
        settings=job.context.settings,
        folder=job.work / SHARDS,
        staged=frozenset(name for name, model in job.models.items() if model.curriculum),
    )
    kept = decided.kept
    rendering = render_corpus(
        corpus, kept.places, kept.subsets, options=options, report=report, engine=engine
    )
    report("write", 0, 1)
    made = _write(corpus, decided, rendering, job)
    summaries = summarize_subsets(kept.subsets, kept.facts)
    datasets = [PreparedDataset(*written, summary) for written, summary in zip(made, summaries, strict=True)]
    return Preparation(datasets, decided.warnings)


def prepare_without_logs(job: PrepareJob) -> Preparation:
    """Datasets without rows, for models that learn from prompts of another source alone."""
    job.work.mkdir(parents=True, exist_ok=True)
    settings, renderer, made = job.context.settings, job.base.renderer, []
    with TemporaryDirectory(dir=job.work, prefix=".part-") as scratch:
        drops = Path(scratch) / DROPS
        shard, dropped = write_drops(drops, [drops_table(())])
        for name, model in job.models.items():
            head = Dataset(
                content_hash="",
                base=job.base.name,
                base_fingerprint=job.base.fingerprint,
                template_fingerprint=renderer.template_fingerprint,
                tokenizer_fingerprint=renderer.tokenizer_fingerprint,
                inputs=(),
                splits={},
                kept_after={},
                dropped=dropped,
                drops=shard,
                redactions={},
                settings={**settings.to_manifest(), "model": model.to_manifest()},
                model=name,
            )
            length = settings.pack_tokens or settings.max_tokens
            written = assemble(head, [], drops=drops, scratch=Path(scratch), out=job.out, pack_tokens=length)
            empty = SubsetSummary(
                model=name,
                own=0,
                replayed=0,
                rl=0,
                validation=0,
                test=0,
                stages={},
                without_stage=0,
                rows_an_epoch=0.0,
            )
            made.append(PreparedDataset(*written, empty))
    return Preparation(made, [])


def _decide(corpus: Corpus, job: PrepareJob, *, report: Progress) -> _Decisions:
    """Decide which rows are kept, in which split, for which model, and prove that nothing leaks."""
    settings = job.context.settings
    report("find repeats", 0, 1)
    repeats = find_repeats(corpus, settings=settings)
    report("group and split", 0, 1)
    passed = corpus.column("passed")
    warnings = require_split_key(corpus, passed, settings=settings)
    state = SplitState(job.work, corpus, settings=settings)
    embedder = find_embedder(settings)
    assignment = assign_splits(
        corpus, settings=settings, embedder=embedder, known=state.known, previous=state.previous
    )
    unfit = find_unfit_references(corpus, assignment)
    passed_on = passed & ~_to_mask(unfit, corpus.rows)
    kept = _choose(corpus, repeats, assignment, passed_on, job=job)
    _join_worse_replies(corpus, repeats)
    report("leak check", 0, 1)
    marked = _to_mask(kept.places, corpus.rows)
    require_no_leak(corpus, assignment, marked, settings=settings, embedder=embedder, known=state.known)
    state.store(assignment, marked)
    warnings += find_setting_warnings(kept.facts, settings=settings, models=job.models)
    warnings += [
        f"data.formats: no log file matches {pattern!r}"
        for pattern in settings.formats
        if not any(names_file(pattern, log.file) for log in corpus.inputs)
    ]
    calling = int(corpus.column("calls_tools")[kept.places].sum())
    # A renderer of another package need not know tools.
    if calling and not getattr(job.base.renderer, "writes_tool_calls", False):
        warnings.append(
            f"{calling:,} rows call tools, and the template of {job.base.name} has no form of calls that can "
            "be read back: they are trained as JSON in <tool_call> tags"
        )
    corpus.forget()
    return _Decisions(passed, repeats, assignment, kept, set(unfit.tolist()), warnings)


def _join_worse_replies(corpus: Corpus, repeats: Repeats) -> None:
    """Give each row the worse reply to its prompt."""
    replies = {place: row.reply for place, row in corpus.rows_at(sorted(set(repeats.worse.values())))}
    for place, worse in repeats.worse.items():
        joined = corpus.joined.get(place, JoinedFacts(None, None))
        corpus.joined[place] = joined._replace(rejected=replies[worse])


def _write(
    corpus: Corpus, decided: _Decisions, rendering: list[RenderedSegment], job: PrepareJob
) -> list[tuple[Dataset, Path]]:
    """Write the dataset folder of each model."""
    passed, repeats, assignment, kept, unfit, _ = decided
    refused = {place: reason for block in rendering for place, reason in block.refused.items()}
    _require_some_proven(corpus, kept, refused, job)
    unconfirmed = int(np.isin(corpus.column("unconfirmed")[kept.places], (SERVED, TAUGHT)).sum())
    with TemporaryDirectory(dir=job.work, prefix=".part-") as scratch:
        drops = Path(scratch) / DROPS
        shortened = {place: reason for block in rendering for place, reason in block.shortened.items()}
        each = RowOutcomes(repeats, assignment, refused, shortened, _find_unwanted(kept), unfit)
        shard, dropped = write_drops(drops, list_dropped(corpus, each))
        head = Dataset(
            content_hash="",
            base=job.base.name,
            base_fingerprint=job.base.fingerprint,
            template_fingerprint=job.base.renderer.template_fingerprint,
            tokenizer_fingerprint=job.base.renderer.tokenizer_fingerprint,
            inputs=corpus.inputs,
            splits={},
            kept_after=count_kept(
                passed=passed,
                repeats=repeats,
                assignment=assignment,
                refused=len(refused),
                unfit_references=unfit,
            ),
            dropped=dropped,
            drops=shard,
            redactions=_count_redactions(corpus, passed),
            settings=job.context.settings.to_manifest(),
        )
        made = []
        for subset in kept.subsets:
            placed = [shard for block in rendering for shard in block.placed(subset.name, assignment)]
            _require_rows(placed, job, model=subset.name, after=head.kept_after, unconfirmed=unconfirmed)
            settings = {**head.settings, "model": job.models[subset.name].to_manifest()}
            own = head.model_copy(update={"model": subset.name, "settings": settings})
            length = job.context.settings.pack_tokens or job.context.settings.max_tokens
            made.append(
                assemble(own, placed, drops=drops, scratch=drops.parent, out=job.out, pack_tokens=length)
            )
        return made


def _choose(
    corpus: Corpus,
    repeats: Repeats,
    assignment: SplitAssignment,
    passed: "np.ndarray[Any, Any]",
    *,
    job: PrepareJob,
) -> _Kept:
    places = np.flatnonzero(passed & (repeats.instead < 0) & (assignment.split != UNASSIGNED))
    roles, domains = corpus.labels("group"), corpus.labels("domain")
    weights = weigh_rows(corpus, job.context.settings)
    facts = KeptRows(
        role=roles.numbers[places],
        role_names=roles.names,
        domain=domains.numbers[places],
        domain_names=domains.names,
        stage=corpus.column("stage")[places],
        split=assignment.split[places],
        # By content: the position of a group's first row varies, what it asks does not.
        group=corpus.column("turn")[assignment.group[places]].view(np.int64),
        key=(corpus.column("prompt") * np.uint64(31) + corpus.column("reply"))[places],
        taught=corpus.column("unconfirmed")[places] == TAUGHT,
        weight=None if weights is None else weights[places],
    )
    return _Kept(places, facts, select_subsets(facts, dict(job.models), seed=job.context.settings.seed))


def _find_unwanted(kept: _Kept) -> set[int]:
    """Return the rows that no model selects."""
    wanted = np.zeros(len(kept.places), dtype=np.bool_)
    for subset in kept.subsets:
        wanted |= subset.split != NOT_SELECTED
    return set(kept.places[~wanted].tolist())


def _to_mask(places: "np.ndarray[Any, Any]", rows: int) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    marked = np.zeros(rows, dtype=np.bool_)
    marked[places] = True
    return marked


def _count_redactions(corpus: Corpus, passed: "np.ndarray[Any, Any]") -> dict[str, int]:
    counts: Counter[str] = Counter()
    for first, segment in corpus.by_segment():
        for number, packed in enumerate(corpus.read_columns(segment, ["redactions"])["redactions"]):
            if packed and passed[first + number]:
                counts.update(orjson.loads(packed))
    return dict(sorted(counts.items()))


def _require_some_proven(corpus: Corpus, kept: _Kept, refused: Mapping[int, str], job: PrepareJob) -> None:
    """A row that the template refuses is dropped; a template that refuses all rows is an error."""
    rows = len(kept.places)
    if rows and len(refused) == rows:
        reason, count = Counter(refused.values()).most_common(1)[0]
        raise AnswerIsNo(
            "no row is left to train on",
            why=f"{count} of {rows} rows: {reason}",
            fix=_find_cure(corpus, refused, job),
        )


_MOST_TRIED = 50


def _find_cure(corpus: Corpus, refused: Mapping[int, str], job: PrepareJob) -> str:
    """Return what to change so that rows are no longer refused; the template is tried on some of them."""
    by_template = sorted(place for place, reason in refused.items() if reason.startswith(BY_TEMPLATE))
    if 2 * len(by_template) <= len(refused):
        return "raise data.max_tokens"
    settings = job.context.settings
    rows = [
        row.model_copy(
            update={"messages": apply_system_prompt(row.messages, role=row.group, settings=settings)}
        )
        for _, row in corpus.rows_at(by_template[:_MOST_TRIED])
    ]
    if settings.reasoning == "keep" and needs_reasoning_dropped(rows, job.base.renderer):
        return f"set data.reasoning to drop: then the template of {job.base.name} takes plain answers"
    return "check the base model's template and the order of the turns"


def _require_rows(
    placed: list[PlacedShard], job: PrepareJob, *, model: str, after: Mapping[str, int], unconfirmed: int
) -> None:
    """Refuse to write a dataset in which a requested split is empty."""
    settings = job.context.settings
    shares = {"train": 1.0, "validation": settings.validation, "test": settings.test}
    there = {shard.shard.split for shard in placed}
    wanted = SPLITS if model == next(iter(job.models)) else SUBSET_SPLITS[:1]
    empty = [split for split in wanted if shares[split] > 0 and split not in there]
    if not empty:
        return
    counts = ", ".join(f"{count} after {step}" for step, count in after.items())
    why = f"rows: {counts}"
    fix = (
        "run `graft data audit` to see why rows went; log more, or set the share of a split that you do "
        "not need to 0, or try another data.seed"
    )
    if unconfirmed and "train" not in empty:
        why += f"; {unconfirmed} unconfirmed captured replies are never held out"
        fix = (
            "add logs that no model of yours wrote, send corrections of captured replies to /v1/feedback, or "
            "set data.captures.positive_confirms (for traces: traces_confirm)"
        )
    raise AnswerIsNo(
        f"no row is left for {' and '.join(empty)} of the model {model}",
        why=why,
        fix=fix,
        where=", ".join(settings.logs),
    )


def _ignore_progress(_step: str, _done: int, _total: int) -> None:
    return


class CleanLog:
    """A log without the rows that `prepare` drops before it renders them; row features are in `folder`."""

    def __init__(self, settings: DataSettings, *, folder: Path) -> None:
        context = AuditContext(settings=settings)
        self._corpus = build_corpus(context, folder=folder, on_progress=_ignore_progress)
        repeats = find_repeats(self._corpus, settings=settings)
        self._stays = self._corpus.column("passed").astype(bool) & (repeats.instead < 0)

    def read(self) -> list[Interaction]:
        """The rows that are sound and repeat no other one."""
        return [row for _, row in self._corpus.rows_at(np.flatnonzero(self._stays).tolist())]

    def count_kept(self, settings: DataSettings) -> int:
        """How many of them are left when the log is split by these settings."""
        embedder = find_embedder(settings)
        assignment = assign_splits(self._corpus, settings=settings, embedder=embedder)
        kept = self._stays & (assignment.split != UNASSIGNED)
        return int((kept & ~_to_mask(find_unfit_references(self._corpus, assignment), len(kept))).sum())


def make_counter(renderer: Renderer, *, settings: DataSettings) -> CountTokens:
    """Count the tokens of rows as `prepare` renders them."""

    def count(rows: Sequence[Interaction]) -> list[int]:
        asked = [
            (apply_system_prompt(row.messages, role=row.group, settings=settings), row.reply) for row in rows
        ]
        return [
            renderer.count_tokens(*conversation) if isinstance(row, UserMistake) else len(row.tokens)
            for conversation, row in zip(asked, renderer.render_batch(asked), strict=True)
        ]

    return count


def audit_logs(
    context: AuditContext,
    *,
    folder: Path,
    root: Path = Path(),
    on_progress: Progress | None = None,
    engine: MapEngine | None = None,
    count_tokens: CountTokens | None = None,
) -> Audit:
    """Read the logs, with row features in `folder`, and audit them.

    Without `count_tokens`, the tokens of rows are estimated.
    """
    started = time.perf_counter()
    report = on_progress or (lambda _phase, _done, _total: None)
    corpus = build_corpus(context, folder=folder, root=root, on_progress=report, engine=engine)
    report("find repeats", 0, 1)
    repeated = find_repeats(corpus, settings=context.settings)
    report("group questions", 0, 1)
    embedder = find_embedder(context.settings)
    assignment = assign_splits(corpus, settings=context.settings, embedder=embedder)
    report("look at all rows", 0, 1)
    found = audit_corpus(corpus, repeated, assignment, context=context, count_tokens=count_tokens)
    return found.model_copy(update={"seconds": time.perf_counter() - started})


def audit_files(paths: Iterable[str], settings: DataSettings | None = None, *, root: Path = Path()) -> Audit:
    """Audit files without a project, and without leaving anything behind."""
    named = (settings or DataSettings()).model_copy(update={"logs": tuple(paths)})
    with tempfile.TemporaryDirectory(prefix="graft-audit-") as folder:
        return audit_logs(AuditContext(settings=named), folder=Path(folder), root=root)
