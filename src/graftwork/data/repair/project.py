"""Connects a project to a teacher: its logs, splits, checks and judge, and the log of repaired rows.

The repaired log itself is not read when rows to repair are looked for, so that the same command gives the
same rows however often it is run.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus.build import build_corpus
from graftwork.data.corpus.store import Corpus
from graftwork.data.dedup.questions import find_embedder
from graftwork.data.dedup.repeats import find_repeats
from graftwork.data.ingest.files import find_sources
from graftwork.data.project import audit_context_here
from graftwork.data.repair.run import (
    JOURNAL_FILE,
    AcceptanceRules,
    RepairTargets,
    Teacher,
    TeacherClient,
    find_targets,
    longest_row,
    open_client,
    plan_repair,
    run_repair,
)
from graftwork.data.settings import DataSettings, RepairSettings, TeacherSettings
from graftwork.data.split.assignment import SPLITS_FILE, assign_splits, read_previous_splits
from graftwork.engines.embedded import EMBEDDED
from graftwork.engines.interface import EngineSource
from graftwork.engines.llamacpp import DEFAULT_PRECISION, LLAMACPP, serving_threads
from graftwork.engines.local import EngineChild
from graftwork.evaluate.project import Grading
from graftwork.evaluate.project_subjects import find_device
from graftwork.evaluate.subjects import parse_subject
from graftwork.model.base import find_base
from graftwork.plan.catalog.prices import find_token_price, index_prices, list_token_prices
from graftwork.process.asking import ReplyJournal
from graftwork.process.http_client import FIRST_PAUSE
from graftwork.process.worker import hold_lock
from graftwork.project.open_project import OpenProject
from graftwork.project.reporter import progress_listener
from graftwork.records.dataset import RepairOutcome, RepairPlan
from graftwork.records.errors import UserError
from graftwork.text.options import apply_options

REPAIRED_FILE = "repaired.jsonl"
FOLDER = "repair"
ENGINE_PREFIX = "engine:"


class RepairJob(NamedTuple):
    """What a repair is run with. Without `client` the teacher's endpoint is asked."""

    settings: RepairSettings
    out: Path
    client: TeacherClient | None = None
    first_pause: float = FIRST_PAUSE


def default_out(work: OpenProject) -> Path:
    """Next to the first log: where data.logs names a folder, the repaired rows are found there."""
    name = find_sources(work.settings.data.logs, root=work.project.root)[0]
    return (work.project.root / name).parent / REPAIRED_FILE


def plan_project_repair(work: OpenProject, job: RepairJob) -> RepairPlan:
    """List the rows to repair, with tokens and cost. Nothing is asked."""
    settings, basis = with_prices(job.settings)
    targets = _find_targets(work, job)
    journal = ReplyJournal(work.project.state / FOLDER / JOURNAL_FILE)
    plan = plan_repair(targets, settings, journal, longest=longest_row(work.settings.data))
    return plan.model_copy(update={"price": basis})


def repair_project(work: OpenProject, job: RepairJob) -> RepairOutcome:
    """Let the teacher answer, and write the accepted rows. The same command resumes a killed run."""
    teacher_settings = with_prices(job.settings)[0].teacher
    if teacher_settings is None:
        raise UserError(
            "no teacher is configured",
            why="the rows need a model to answer them",
            fix="give --teacher URL#MODEL,key=VARIABLE or engine:llamacpp#BASE, or set data.repair.teacher",
            where="data.repair.teacher",
        )
    folder = work.project.state / FOLDER
    data = _settings(work, job)
    with hold_lock(folder), _open_teacher(work, teacher_settings, job.client) as client:
        targets = _find_targets(work, job)
        stopping = threading.Event()
        teacher = Teacher(
            teacher_settings,
            client=client,
            journal=ReplyJournal(folder / JOURNAL_FILE),
            wait=stopping.wait,
            first_pause=job.first_pause,
        )
        listener = progress_listener(work.reporter)
        outcome = run_repair(
            targets,
            teacher=teacher,
            rules=_rules(work, data),
            out=job.out,
            stopping=stopping,
            on_progress=lambda done, total: listener("ask the teacher", done, total),
        )
        corpus = _read_corpus(work, data, [*_other_logs(work, job.out), str(job.out)])
        usable = corpus.column("passed").astype(bool) & (find_repeats(corpus, settings=data).step == 0)
    return outcome.model_copy(
        update={"in_logs": is_in_logs(work, job.out), "usable_after": int(usable.sum())}
    )


def revise_repair(
    settings: RepairSettings,
    teacher: str | None,
    roles: Sequence[str],
    samples: int | None,
    limits: Mapping[str, float | None],
) -> RepairSettings:
    """The settings with a different teacher, more roles to add rows for, and limits of the teacher."""
    limits = {name: value for name, value in limits.items() if value is not None}
    values = settings.teacher.model_dump(mode="json") if settings.teacher is not None else None
    if teacher is not None and teacher.startswith(ENGINE_PREFIX) and "#" in teacher:
        engine, _, base = teacher.removeprefix(ENGINE_PREFIX).partition("#")
        values = {**(values or {}), "url": None, "api_key_env": None, "engine": engine, "model": base}
    elif teacher is not None:
        endpoint = parse_subject(teacher).endpoint if "#" in teacher else None
        if endpoint is None:
            raise UserError(
                f"{teacher!r} is not a valid teacher",
                why="a teacher is the address of an endpoint and a model, or an engine and a base",
                fix="write it as https://host/v1#model,key=NAME_OF_THE_VARIABLE or engine:llamacpp#BASE",
                where="--teacher",
            )
        names = {"url", "model", "api_key_env", "concurrency"}
        values = {**(values or {}), **endpoint.model_dump(mode="json", include=names), "engine": None}
    if limits and values is None:
        # A dry run with prices needs no teacher yet.
        values = {"url": "http://not-named-yet", "model": "not-named-yet"}
    changes = {
        "teacher": {**values, **limits} if values is not None else None,
        "augment": [*settings.augment, *roles],
        "samples": samples or settings.samples,
    }
    names_of_options = {"requests_per_minute": "rate"}
    return apply_options(settings, changes, command="graft data repair", options=names_of_options)


def with_prices(settings: RepairSettings) -> tuple[RepairSettings, str]:
    """The settings with the teacher's prices, and where these are from: stated, or from the catalog."""
    teacher = settings.teacher
    if teacher is None:
        return settings, ""
    per_million = "a million tokens in and ${:g} out"
    if teacher.price_in is not None and teacher.price_out is not None:
        return settings, f"${teacher.price_in:g} {per_million.format(teacher.price_out)}, as stated"
    if teacher.engine is not None:
        priced = teacher.model_copy(update={"price_in": 0.0, "price_out": 0.0})
        return settings.model_copy(update={"teacher": priced}), "$0: the engine runs on this machine"
    listed = find_token_price(teacher.model, index_prices(list_token_prices()))
    if listed is None:
        if teacher.max_cost is not None:
            raise UserError(
                "max_cost needs prices",
                why=f"`graft plan catalog api_prices` has no price for {teacher.model}",
                fix="set price_in and price_out, or add the model to an api_prices.csv of your own",
                where="data.repair.teacher.max_cost",
            )
        return settings, ""
    prices = {
        "price_in": listed.usd_per_million_input,
        "price_out": listed.usd_per_million_output,
    }
    stated = {name: value for name in prices if (value := getattr(teacher, name)) is not None}
    used = teacher.model_copy(update={**prices, **stated})
    basis = f"${used.price_in:g} {per_million.format(used.price_out)} ({listed.source}, {listed.dated})"
    return settings.model_copy(update={"teacher": used}), basis


@contextmanager
def _open_teacher(
    work: OpenProject, settings: TeacherSettings, client: TeacherClient | None
) -> Iterator[TeacherClient]:
    if client is not None or settings.engine is None:
        yield client or open_client(settings)
        return
    name, _, precision = settings.engine.partition("/")
    base = find_base(settings.model, project_folder=work.project.root, weights=True)
    on_llamacpp = name == LLAMACPP
    source = EngineSource(
        base_folder=Path(base.folder),
        device="cpu" if on_llamacpp else find_device(),
        precision=precision or (DEFAULT_PRECISION if on_llamacpp else "bfloat16"),
        threads=serving_threads(work.settings.train.threads) if on_llamacpp else work.settings.train.threads,
        fingerprint=base.revision,
    )
    child = EngineChild(
        name if on_llamacpp else EMBEDDED, source, folder=work.project.state / FOLDER / "engine"
    )
    with closing(child):
        yield child


def is_in_logs(work: OpenProject, path: Path) -> bool:
    root = work.project.root
    return _norm(path) in {_norm(root / name) for name in find_sources(work.settings.data.logs, root=root)}


def _rules(work: OpenProject, data: DataSettings) -> AcceptanceRules:
    settings = work.settings.evaluate
    if data.repair.judge_at_least is not None and settings.judge is None:
        raise UserError(
            "data.repair.judge_at_least needs a judge",
            why="no judge is configured under evaluate.judge",
            fix="specify one, or leave judge_at_least out",
            where="data.repair.judge_at_least",
        )
    grading = Grading(work, ())
    context = grading.context()
    return AcceptanceRules(data, context, grading.judge)


def _settings(work: OpenProject, job: RepairJob) -> DataSettings:
    return work.settings.data.model_copy(update={"repair": job.settings})


def _find_targets(work: OpenProject, job: RepairJob) -> RepairTargets:
    data = _settings(work, job)
    corpus = _read_corpus(work, data, _other_logs(work, job.out))
    previous = read_previous_splits(
        work.project.data / SPLITS_FILE, keys=corpus.column("line_key"), settings=data
    )
    assignment = assign_splits(corpus, settings=data, embedder=find_embedder(data), previous=previous)
    return find_targets(corpus, assignment, settings=data)


def _other_logs(work: OpenProject, out: Path) -> list[str]:
    root = work.project.root
    names = find_sources(work.settings.data.logs, root=root)
    return [name for name in names if _norm(root / name) != _norm(out)]


def _read_corpus(work: OpenProject, data: DataSettings, logs: Sequence[str]) -> Corpus:
    """The rows of these logs, with features of their own: those of the project stay as they are."""
    context: AuditContext = audit_context_here(work.project)
    context = replace(context, settings=data.model_copy(update={"logs": tuple(logs)}))
    folder = work.project.state / FOLDER / "sifted"
    listener = progress_listener(work.reporter)
    return build_corpus(context, folder=folder, root=work.project.root, on_progress=listener)


def _norm(path: Path) -> str:
    return os.path.normpath(path.absolute())
