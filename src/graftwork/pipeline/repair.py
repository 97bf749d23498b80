"""Connects a project to a teacher: its logs, splits, checks and judge, and the log of repaired rows.

The repaired log itself is not read when rows to repair are looked for, so that the same command gives the
same rows however often it is run.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus.build import build_corpus
from graftwork.data.corpus.store import Corpus
from graftwork.data.dedup.paraphrases import find_embedder
from graftwork.data.dedup.repeats import find_repeats
from graftwork.data.ingest.read import find_files
from graftwork.data.repair.acceptance import AcceptanceRules
from graftwork.data.repair.run import plan_repair, run_repair
from graftwork.data.repair.targets import RepairTargets, find_targets
from graftwork.data.repair.teacher import AnswerJournal, Teacher, TeacherClient, open_client
from graftwork.data.settings import DataSettings, RepairSettings
from graftwork.data.split.assignment import assign_splits
from graftwork.data.split.split_state import SPLITS_FILE, read_previous_splits
from graftwork.pipeline.evaluation import open_grading
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.reporter import progress_listener
from graftwork.pipeline.steps.data import audit_context_here
from graftwork.process.http_client import FIRST_PAUSE
from graftwork.process.worker import hold_lock
from graftwork.records.errors import UserMistake
from graftwork.records.repair import RepairOutcome, RepairPlan

REPAIRED_FILE = "repaired.jsonl"
FOLDER = "repair"


class RepairJob(NamedTuple):
    """What a repair is run with. Without `client` the teacher's endpoint is asked."""

    settings: RepairSettings
    out: Path
    client: TeacherClient | None = None
    first_pause: float = FIRST_PAUSE


def default_out(work: OpenProject) -> Path:
    """Next to the first log: where data.logs names a folder, the repaired rows are found there."""
    name = find_files(work.settings.data.logs, root=work.project.root)[0]
    return (work.project.root / name).parent / REPAIRED_FILE


def plan_project_repair(work: OpenProject, job: RepairJob) -> RepairPlan:
    """List the rows to repair, with tokens and cost. Nothing is asked."""
    targets = _find_targets(work, job)
    return plan_repair(targets, job.settings, AnswerJournal(work.project.state / FOLDER))


def repair_project(work: OpenProject, job: RepairJob) -> RepairOutcome:
    """Let the teacher answer, and write the accepted rows. The same command resumes a killed run."""
    teacher_settings = job.settings.teacher
    if teacher_settings is None:
        raise UserMistake(
            "no teacher is named",
            why="the rows need a model that answers them",
            fix="give --teacher URL#MODEL,key=VARIABLE, or set data.repair.teacher",
            where="data.repair.teacher",
        )
    folder = work.project.state / FOLDER
    data = _settings(work, job)
    with hold_lock(folder):
        targets = _find_targets(work, job)
        stopping = threading.Event()
        teacher = Teacher(
            teacher_settings,
            client=job.client or open_client(teacher_settings),
            journal=AnswerJournal(folder),
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


def is_in_logs(work: OpenProject, path: Path) -> bool:
    root = work.project.root
    return _norm(path) in {_norm(root / name) for name in find_files(work.settings.data.logs, root=root)}


def _rules(work: OpenProject, data: DataSettings) -> AcceptanceRules:
    settings = work.settings.evaluate
    if data.repair.judge_at_least is not None and settings.judge is None:
        raise UserMistake(
            "data.repair.judge_at_least needs a judge",
            why="no judge is named under evaluate.judge",
            fix="name one, or leave judge_at_least out",
            where="data.repair.judge_at_least",
        )
    grading = open_grading(work, ())
    context = replace(grading.context(), checks={check.name: check for check in settings.checks})
    return AcceptanceRules(data, context, grading.judge)


def _settings(work: OpenProject, job: RepairJob) -> DataSettings:
    return work.settings.data.model_copy(update={"repair": job.settings})


def _find_targets(work: OpenProject, job: RepairJob) -> RepairTargets:
    data = _settings(work, job)
    corpus = _read_corpus(work, data, _other_logs(work, job.out))
    previous = read_previous_splits(
        work.project.data / SPLITS_FILE,
        keys=corpus.column("line_key"),
        settings=data,
        conversations=corpus.column("later") != 0,
    )
    assignment = assign_splits(corpus, settings=data, embedder=find_embedder(data), previous=previous)
    return find_targets(corpus, assignment, settings=data)


def _other_logs(work: OpenProject, out: Path) -> list[str]:
    root = work.project.root
    names = find_files(work.settings.data.logs, root=root)
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
