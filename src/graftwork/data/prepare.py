"""Runs the data stage: audits logs, and prepares one dataset per model from them.

Input: settings, the renderer of the base model, folders to work in. Output: an `Audit`, or manifests and
dataset folders: filtered, redacted, deduplicated, split, rendered, and checked for leakage. Rows stay on
disk; only columns of numbers are in memory for all of them.
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

from graftwork.data.audit.findings import CountTokens
from graftwork.data.audit.report import audit_corpus
from graftwork.data.audit.row_checks import SERVED, TAUGHT, AuditContext
from graftwork.data.corpus.build import Progress, build_corpus, weigh_rows
from graftwork.data.corpus.store import Corpus, JoinedFacts
from graftwork.data.dedup.questions import find_embedder
from graftwork.data.dedup.repeats import find_repeats
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
from graftwork.data.split.assignment import (
    UNASSIGNED,
    SplitAssignment,
    SplitState,
    assign_splits,
    find_unfit_references,
)
from graftwork.data.split.leakage import require_no_leak
from graftwork.data.split.model_subsets import (
    NOT_SELECTED,
    KeptRows,
    find_setting_warnings,
    require_split_key,
    select_subsets,
    summarize_subsets,
)
from graftwork.files.dataset import DROPS, drops_table
from graftwork.process.pieces import MapEngine
from graftwork.records.dataset import SPLITS, Audit, Dataset, SubsetSummary
from graftwork.records.errors import NegativeResult, UserError
from graftwork.records.interaction import Interaction

FEATURES, SHARDS = "sifted", "shards"
MAIN: Mapping[str, ModelSettings] = {"main": ModelSettings()}


class PreparedDataset(NamedTuple):
    dataset: Dataset
    folder: Path
    summary: SubsetSummary


class Preparation(NamedTuple):
    """One dataset per model, the main one first, and warnings about settings that match no row."""

    datasets: list[PreparedDataset]
    warnings: list[str]


class PrepareJob(NamedTuple):
    """What to prepare, and for which base model. Log files are named relative to `root`."""

    context: AuditContext
    base: str
    base_fingerprint: str
    renderer: Renderer
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
    settings, features = job.context.settings, job.work / FEATURES
    corpus = build_corpus(job.context, folder=features, root=job.root, on_progress=report, engine=engine)
    report("find repeats", 0, 1)
    repeats = find_repeats(corpus, settings=settings)
    report("group and split", 0, 1)
    passed = corpus.column("passed")
    warnings = require_split_key(corpus, passed, settings=settings)
    state = SplitState(job.work, corpus, settings=settings)
    embedder = find_embedder(settings)
    assignment = assign_splits(
        corpus, settings=settings, embedder=embedder, earlier=state.earlier, previous=state.previous
    )
    unfit = find_unfit_references(corpus, assignment)
    stays = passed & (repeats.instead < 0) & (assignment.split != UNASSIGNED)
    stays[unfit] = False
    positions = np.flatnonzero(stays)
    rows = _describe_rows(corpus, assignment, positions, settings=settings)
    subsets = select_subsets(rows, dict(job.models), seed=settings.seed)
    worse_replies = {
        position: row.reply for position, row in corpus.rows_at(sorted(set(repeats.worse.values())))
    }
    for position, worse in repeats.worse.items():
        joined = corpus.joined.get(position, JoinedFacts(None, None))
        corpus.joined[position] = joined._replace(rejected=worse_replies[worse])
    report("leak check", 0, 1)
    require_no_leak(corpus, assignment, stays, settings=settings, embedder=embedder, earlier=state.earlier)
    state.store(assignment, stays)
    warnings += find_setting_warnings(rows, settings=settings, models=job.models)
    warnings += _find_job_warnings(corpus, positions, job)
    corpus.forget()
    staged = frozenset(name for name, model in job.models.items() if model.curriculum)
    options = RenderOptions(job.renderer, settings, job.work / SHARDS, staged)
    rendering = render_corpus(corpus, positions, subsets, options=options, report=report, engine=engine)
    report("write", 0, 1)
    refused = {position: reason for block in rendering for position, reason in block.refused.items()}
    if len(positions) and len(refused) == len(positions):
        # A row that the template refuses is dropped; a template that refuses all rows is an error.
        raise _explain_refusals(corpus, refused, job)
    unwanted = np.all([subset.split == NOT_SELECTED for subset in subsets], axis=0)
    outcomes = RowOutcomes(
        repeats=repeats,
        assignment=assignment,
        refused=refused,
        shortened={position: reason for block in rendering for position, reason in block.shortened.items()},
        unwanted=set(positions[unwanted].tolist()),
        unfit_references=set(unfit.tolist()),
    )
    assembled = _write(corpus, outcomes, positions, rendering, job)
    summaries = summarize_subsets(subsets, rows)
    datasets = [
        PreparedDataset(*dataset, summary) for dataset, summary in zip(assembled, summaries, strict=True)
    ]
    return Preparation(datasets, warnings)


def prepare_without_logs(job: PrepareJob) -> Preparation:
    """Datasets without rows, for models that learn only from prompts of another source."""
    job.work.mkdir(parents=True, exist_ok=True)
    datasets = []
    with TemporaryDirectory(dir=job.work, prefix=".part-") as scratch:
        drops = Path(scratch) / DROPS
        shard, dropped = write_drops(drops, [drops_table(())])
        head = _begin_manifest(job, inputs=(), kept_after={}, dropped=dropped, drops=shard, redactions={})
        for name in job.models:
            empty = SubsetSummary(
                model=name,
                own=0,
                replayed=0,
                rl=0,
                validation=0,
                test=0,
                stages={},
                without_stage=0,
                rows_per_epoch=0.0,
            )
            datasets.append(PreparedDataset(*_assemble(job, head, name, [], drops=drops), empty))
    return Preparation(datasets, [])


def _begin_manifest(job: PrepareJob, **stated: Any) -> Dataset:
    """The manifest of every model's dataset, without what is the model's own."""
    renderer = job.renderer
    return Dataset(
        content_hash="",
        base=job.base,
        base_fingerprint=job.base_fingerprint,
        template_fingerprint=renderer.template_fingerprint,
        tokenizer_fingerprint=renderer.tokenizer_fingerprint,
        splits={},
        settings=job.context.settings.to_manifest(),
        **stated,
    )


def _assemble(
    job: PrepareJob, head: Dataset, model: str, placed: list[PlacedShard], *, drops: Path
) -> tuple[Dataset, Path]:
    settings = {**head.settings, "model": job.models[model].to_manifest()}
    manifest = head.model_copy(update={"model": model, "settings": settings})
    length = job.context.settings.pack_tokens or job.context.settings.max_tokens
    return assemble(manifest, placed, drops=drops, scratch=drops.parent, out=job.out, pack_tokens=length)


def _describe_rows(
    corpus: Corpus, assignment: SplitAssignment, positions: "np.ndarray[Any, Any]", *, settings: DataSettings
) -> KeptRows:
    (roles, role_names), (domains, domain_names) = corpus.labels("group"), corpus.labels("domain")
    weights = weigh_rows(corpus, settings)
    return KeptRows(
        role=roles[positions],
        role_names=role_names,
        domain=domains[positions],
        domain_names=domain_names,
        stage=corpus.column("stage")[positions],
        split=assignment.split[positions],
        # By content: the position of a group's first row varies, what it asks does not.
        group=corpus.column("turn")[assignment.group[positions]].view(np.int64),
        key=(corpus.column("prompt") * np.uint64(31) + corpus.column("reply"))[positions],
        taught=corpus.column("unconfirmed")[positions] == TAUGHT,
        weight=None if weights is None else weights[positions],
    )


def _find_job_warnings(corpus: Corpus, positions: "np.ndarray[Any, Any]", job: PrepareJob) -> list[str]:
    warnings = [
        f"data.formats: no log file matches {pattern!r}"
        for pattern in job.context.settings.formats
        if not any(names_file(pattern, log.file) for log in corpus.inputs)
    ]
    calling = int(corpus.column("calls_tools")[positions].sum())
    # A renderer of another package need not know tools.
    if calling and not getattr(job.renderer, "writes_tool_calls", False):
        warnings.append(
            f"{calling:,} rows call tools, and the template of {job.base} has no form of calls that can "
            "be read back: they are trained as JSON in <tool_call> tags"
        )
    return warnings


def _write(
    corpus: Corpus,
    outcomes: RowOutcomes,
    positions: "np.ndarray[Any, Any]",
    rendering: list[RenderedSegment],
    job: PrepareJob,
) -> list[tuple[Dataset, Path]]:
    """Write the dataset folder of each model."""
    passed = corpus.column("passed")
    unconfirmed = int(np.isin(corpus.column("unconfirmed")[positions], (SERVED, TAUGHT)).sum())
    with TemporaryDirectory(dir=job.work, prefix=".part-") as scratch:
        drops = Path(scratch) / DROPS
        shard, dropped = write_drops(drops, list_dropped(corpus, outcomes))
        head = _begin_manifest(
            job,
            inputs=corpus.inputs,
            kept_after=count_kept(passed, outcomes),
            dropped=dropped,
            drops=shard,
            redactions=_count_redactions(corpus, passed),
        )
        datasets = []
        for model in job.models:
            placed = [part for block in rendering for part in block.placed(model, outcomes.assignment)]
            _require_rows(placed, job, model=model, after=head.kept_after, unconfirmed=unconfirmed)
            datasets.append(_assemble(job, head, model, placed, drops=drops))
        return datasets


def _count_redactions(corpus: Corpus, passed: "np.ndarray[Any, Any]") -> dict[str, int]:
    counts: Counter[str] = Counter()
    for first, segment in corpus.by_segment():
        for number, packed in enumerate(corpus.read_columns(segment, ["redactions"])["redactions"]):
            if packed and passed[first + number]:
                counts.update(orjson.loads(packed))
    return dict(sorted(counts.items()))


_MOST_TRIED = 50


def _explain_refusals(corpus: Corpus, refused: Mapping[int, str], job: PrepareJob) -> NegativeResult:
    """Say why all rows are refused, and what to change: the template is tried on some of them."""
    settings = job.context.settings
    reason, count = Counter(refused.values()).most_common(1)[0]
    by_template = sorted(position for position, why in refused.items() if why.startswith(BY_TEMPLATE))
    fix = "raise data.max_tokens"
    if 2 * len(by_template) > len(refused):
        fix = "check the base model's template and the order of the turns"
        rows = [
            row.model_copy(
                update={"messages": apply_system_prompt(row.messages, role=row.group, settings=settings)}
            )
            for _, row in corpus.rows_at(by_template[:_MOST_TRIED])
        ]
        if settings.reasoning == "keep" and needs_reasoning_dropped(rows, job.renderer):
            fix = f"set data.reasoning to drop: then the template of {job.base} takes plain answers"
    return NegativeResult(
        "no row is left to train on", why=f"{count} of {len(refused)} rows: {reason}", fix=fix
    )


def _require_rows(
    placed: list[PlacedShard], job: PrepareJob, *, model: str, after: Mapping[str, int], unconfirmed: int
) -> None:
    """Refuse to write a dataset in which a requested split is empty."""
    settings = job.context.settings
    shares = {"train": 1.0, "validation": settings.validation, "test": settings.test}
    filled = {shard.shard.split for shard in placed}
    required = SPLITS if model == next(iter(job.models)) else SUBSET_SPLITS[:1]
    empty = [split for split in required if shares[split] > 0 and split not in filled]
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
    raise NegativeResult(
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
        stays = self._stays & (assignment.split != UNASSIGNED)
        stays[find_unfit_references(self._corpus, assignment)] = False
        return int(stays.sum())


def make_counter(renderer: Renderer, *, settings: DataSettings) -> CountTokens:
    """Count the tokens of rows as `prepare` renders them."""

    def count(rows: Sequence[Interaction]) -> list[int]:
        prompts = [
            (apply_system_prompt(row.messages, role=row.group, settings=settings), row.reply) for row in rows
        ]
        return [
            renderer.count_tokens(*conversation) if isinstance(row, UserError) else len(row.tokens)
            for conversation, row in zip(prompts, renderer.render_batch(prompts), strict=True)
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
    report = on_progress or _ignore_progress
    corpus = build_corpus(context, folder=folder, root=root, on_progress=report, engine=engine)
    report("find repeats", 0, 1)
    repeated = find_repeats(corpus, settings=context.settings)
    report("group questions", 0, 1)
    embedder = find_embedder(context.settings)
    assignment = assign_splits(corpus, settings=context.settings, embedder=embedder)
    report("check all rows", 0, 1)
    audit = audit_corpus(corpus, repeated, assignment, context=context, count_tokens=count_tokens)
    return audit.model_copy(update={"seconds": time.perf_counter() - started})


def audit_files(paths: Iterable[str], settings: DataSettings | None = None, *, root: Path = Path()) -> Audit:
    """Audit files without a project, and without leaving files."""
    log_settings = (settings or DataSettings()).model_copy(update={"logs": tuple(paths)})
    with tempfile.TemporaryDirectory(prefix="graft-audit-") as folder:
        return audit_logs(AuditContext(settings=log_settings), folder=Path(folder), root=root)
