"""Evaluations to look at: the report, the verdict, and cases page by page, two subjects side by side.

Input: a project, a filter. Output: records. What is read from files is kept until another evaluation is done,
so that ten thousand cases are parsed once.
"""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Literal, NamedTuple

from graftwork.api.project import Project, cut_page
from graftwork.data.project import PreparedData
from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.cases import read_cases
from graftwork.evaluate.escalation import read_forecast
from graftwork.evaluate.project import Evaluated, savings_of
from graftwork.evaluate.project_subjects import find_trained
from graftwork.evaluate.subjects import CHAMPION, NamedSubject, parse_subject, parse_subjects
from graftwork.model.base import is_ready
from graftwork.project.open_project import OpenProject, name_entry
from graftwork.records.base import Record
from graftwork.records.dataset import Audit
from graftwork.records.errors import GraftError, NegativeResult, UserError
from graftwork.records.interaction import Savings, find_question
from graftwork.records.live import EscalationForecast
from graftwork.records.report import Answer, Case, Report, SubjectReport, Verdict
from graftwork.registry.index import find_release

KEPT = 2
MOST_RUNS = 1000
"""Runs that a subject is looked for in, the newest first."""
OUTSIDE = frozenset({"endpoint", "folder"})
"""Kinds of subjects that are outside the project."""
LESS_IS_BETTER = frozenset({"truncated"})

Outcome = Literal["won", "lost", "both_right", "both_wrong", "same", "ungraded"]


class EvaluationView(Record):
    """The last evaluation that the gate decides on, and its verdict. `missing` names deleted parts."""

    evaluated: Evaluated
    finished_at: str
    verdict: Verdict | None
    missing: tuple[str, ...] = ()


class CaseQuery(Record):
    """A query for cases: which ones, which two subjects, which metric. Empty values mean the default or
    all.
    """

    left: str = ""
    right: str = ""
    metric: str = ""
    outcome: str = ""
    part: str = ""
    """CUT:PART, as in `group:billing`."""
    text: str = ""
    page: int = 1


class CaseLine(Record):
    """A case in the list."""

    id: str
    question: str
    group: str | None
    outcome: Outcome
    left: float | None
    right: float | None


class CasePage(Record):
    cases: tuple[CaseLine, ...]
    subjects: tuple[str, ...]
    metrics: tuple[str, ...]
    parts: tuple[str, ...]
    outcomes: dict[Outcome, int]
    query: CaseQuery
    total: int
    page: int
    pages: int


class CaseAnswer(Record):
    """What one subject answered, with its scores."""

    subject: str
    text: str | None
    seconds: float | None
    tokens: int | None
    cut_off: bool
    scores: dict[str, float | None]


class CaseView(Record):
    """A case with the answers of all subjects; before and after it, its neighbours in the list."""

    case: Case
    answers: tuple[CaseAnswer, ...]
    before: str | None
    after: str | None
    place: int
    total: int


class _Loaded(NamedTuple):
    """An evaluation as it was read from files."""

    evaluated: Evaluated
    cases: tuple[Case, ...]
    answers: dict[str, dict[str, Answer]]
    missing: tuple[str, ...]


_loaded: OrderedDict[tuple[str, ...], _Loaded] = OrderedDict()
"""The last evaluations that were read, by identity."""
_lock = threading.Lock()


def read_evaluation(project: Project) -> EvaluationView | None:
    """None if nothing has been evaluated yet."""
    with project.open() as work:
        times = work.ledger.times().get(name_entry(work, "evaluate"))
        judged = work.ledger.get(name_entry(work, "gate"))
    loaded = _load(project)
    if loaded is None or times is None:
        return None
    verdict, missing = None, loaded.missing
    try:
        verdict = Verdict.model_validate(judged.output) if judged is not None else None
    except ValueError:
        missing = (*missing, "the verdict was written by another version of graftwork")
    return EvaluationView(
        evaluated=loaded.evaluated, finished_at=times.finished_at, verdict=verdict, missing=missing
    )


class SubjectOrigin(Record):
    """The run that trained a subject and the release of the same adapter; empty where there is none."""

    run: str = ""
    release: str = ""
    version: str = ""


def trace_subjects(project: Project) -> dict[str, SubjectOrigin]:
    """Where each subject of the last evaluation comes from; base, log and endpoints are left out."""
    loaded = _load(project)
    if loaded is None:
        return {}
    with project.open() as work:
        found = {
            subject.subject: _trace_subject(work, parse_subject(subject.subject), loaded.evaluated)
            for subject in subjects_of(loaded.evaluated.report)
        }
    return {name: origin for name, origin in found.items() if origin is not None}


def _trace_subject(work: OpenProject, subject: NamedSubject, evaluated: Evaluated) -> SubjectOrigin | None:
    adapter, run, release = "", None, None
    try:
        if subject.kind == "adapter":
            adapter = evaluated.adapter_hash
        elif subject.kind == "run":
            run = work.runs.get(subject.which)
        elif subject.kind == "model":
            trained = find_trained(work, subject.which)
            adapter = trained.adapter_hash if trained is not None else ""
        elif subject.kind == "release":
            # The alias may have moved since.
            measured = evaluated.champion if subject.which == CHAMPION else None
            release = find_release(work.releases, measured or subject.which)
    except GraftError:
        return None
    if run is not None and run.outcome is not None:
        adapter = str(run.outcome.get("adapter_hash", ""))
    if release is not None:
        adapter = release.adapter_hash
    elif adapter:
        release = next((item for item in work.releases.list() if item.adapter_hash == adapter), None)
    if run is None and adapter:
        runs = work.runs.list(limit=MOST_RUNS)
        run = next((entry for entry in runs if (entry.outcome or {}).get("adapter_hash") == adapter), None)
    if run is None and release is None:
        return None
    version = work.releases.entry(release.id).version if release is not None else None
    return SubjectOrigin(
        run=run.id if run is not None else "",
        release=release.id if release is not None else "",
        version=version or "",
    )


def list_cases(project: Project, query: CaseQuery) -> CasePage:
    """A page of cases: losses first, then wins, then what both got wrong."""
    loaded = _require(project)
    lines, query = _select(loaded, query)
    report = loaded.evaluated.report
    outcomes: dict[Outcome, int] = {}
    for line in lines:
        outcomes[line.outcome] = outcomes.get(line.outcome, 0) + 1
    if query.outcome:
        lines = [line for line in lines if line.outcome == query.outcome]
    shown = cut_page(lines, query.page)
    return CasePage(
        cases=shown.items,
        subjects=tuple(subject.subject for subject in subjects_of(report)),
        metrics=metrics_of(report),
        parts=parts_of(report),
        outcomes=outcomes,
        query=query,
        total=shown.total,
        page=shown.page,
        pages=shown.pages,
    )


def read_case(project: Project, case_id: str, query: CaseQuery) -> CaseView:
    loaded = _require(project)
    case = next((case for case in loaded.cases if case.id == case_id), None)
    if case is None:
        raise UserError(
            f"there is no case {case_id}",
            why="the last evaluation did not include it, or its cases were removed",
            fix="choose one from the list of cases",
        )
    lines, query = _select(loaded, query)
    ids = [line.id for line in lines if not query.outcome or line.outcome == query.outcome]
    place = ids.index(case_id) if case_id in ids else -1
    answers = []
    for subject in subjects_of(loaded.evaluated.report):
        answer = loaded.answers.get(subject.subject, {}).get(case_id)
        answers.append(
            CaseAnswer(
                subject=subject.subject,
                text=answer.text if answer else None,
                seconds=answer.seconds if answer else None,
                tokens=answer.tokens if answer else None,
                cut_off=answer is not None and answer.finish_reason == "length",
                scores={name: metric.scores.get(case_id) for name, metric in subject.metrics.items()},
            )
        )
    return CaseView(
        case=case,
        answers=tuple(answers),
        before=ids[place - 1] if place > 0 else None,
        after=ids[place + 1] if 0 <= place < len(ids) - 1 else None,
        place=place + 1,
        total=len(ids),
    )


def read_savings(project: Project) -> Savings | None:
    """What the model would save a month, by the last audit and dataset; None if they or the base are not
    there yet. Nothing is run or fetched.
    """
    with project.open() as work:
        audited = work.ledger.get("audit")
        prepared = work.ledger.get(name_entry(work, "prepare"))
        if (
            audited is None
            or prepared is None
            or not is_ready(work.settings.base, project_folder=project.root)
        ):
            return None
        try:
            audit = Audit.model_validate(audited.output)
            dataset = PreparedData.model_validate(prepared.output).dataset
        except ValueError:
            return None
        return savings_of(work, audit, dataset)


def read_escalation(project: Project) -> EscalationForecast | None:
    """The last forecast of escalation; None if there is none."""
    return read_forecast(project.folder.state)


def require_known_subject(project: Project, text: str) -> None:
    """Refuse a URL or a folder that graft.yaml does not name, before cases or keys are sent there."""
    subject = parse_subject(text)
    if subject.kind not in OUTSIDE or subject in parse_subjects(project.settings.evaluate.subjects):
        return
    raise NegativeResult(
        "a URL or a folder can only be evaluated here if graft.yaml lists it",
        why="it would receive held-out cases and a key, or files would be loaded from it",
        fix="add it to evaluate.subjects, or run the command in a terminal",
        where="evaluate.subjects",
    )


def subjects_of(report: Report) -> tuple[SubjectReport, ...]:
    """Baseline, candidate, then the others, each once."""
    named = {subject.subject: subject for subject in (report.baseline, report.candidate, *report.others)}
    return tuple(named.values())


def metrics_of(report: Report) -> tuple[str, ...]:
    """Metrics that grade each answer."""
    return tuple(
        dict.fromkeys(
            name
            for subject in (report.candidate, report.baseline)
            for name, metric in subject.metrics.items()
            if metric.kind in ("rate", "score") and metric.scores
        )
    )


def parts_of(report: Report) -> tuple[str, ...]:
    return tuple(
        f"{cut}:{part}" for cut, parts in report.cuts.items() for part in sorted(set(parts.values()))
    )


_ORDER: dict[Outcome, int] = {
    "lost": 0,
    "won": 1,
    "both_wrong": 2,
    "same": 3,
    "both_right": 4,
    "ungraded": 5,
}


def _select(loaded: _Loaded, query: CaseQuery) -> tuple[list[CaseLine], CaseQuery]:
    """The cases in order, before the filter by outcome, and the query with its defaults filled in."""
    report = loaded.evaluated.report
    subjects = {subject.subject: subject for subject in subjects_of(report)}
    metrics = metrics_of(report)
    query = query.model_copy(
        update={
            "left": query.left if query.left in subjects else report.baseline.subject,
            "right": query.right if query.right in subjects else report.candidate.subject,
            "metric": query.metric if query.metric in metrics else (metrics[0] if metrics else ""),
        }
    )
    left, right = (subjects[name].metrics.get(query.metric) for name in (query.left, query.right))
    cut, _, part = query.part.partition(":")
    inside = report.cuts.get(cut, {}) if query.part else {}
    wanted = query.text.casefold()
    lines = []
    for case in loaded.cases:
        if query.part and inside.get(case.id) != part:
            continue
        texts = [case.id, *(turn.content for turn in case.messages)]
        texts += [book[case.id].text for book in loaded.answers.values() if case.id in book]
        if wanted and not any(wanted in text.casefold() for text in texts):
            continue
        before = left.scores.get(case.id) if left else None
        after = right.scores.get(case.id) if right else None
        lines.append(
            CaseLine(
                id=case.id,
                question=find_question(case.messages),
                group=case.group,
                outcome=_outcome(before, after, less=query.metric in LESS_IS_BETTER),
                left=before,
                right=after,
            )
        )
    lines.sort(key=lambda line: _ORDER[line.outcome])
    return lines, query


def _outcome(before: float | None, after: float | None, *, less: bool) -> Outcome:
    if before is None or after is None:
        return "ungraded"
    if less:
        before, after = -before, -after
    if after != before:
        return "won" if after > before else "lost"
    if less:
        return "both_right" if after == 0 else "both_wrong"
    return "both_right" if after >= 1 else "both_wrong" if after <= 0 else "same"


def _require(project: Project) -> _Loaded:
    loaded = _load(project)
    if loaded is None:
        raise UserError("nothing has been evaluated yet", fix="run `graft eval`, or `graft run`")
    if not loaded.cases:
        raise UserError(
            "the cases of the last evaluation were removed",
            why="; ".join(loaded.missing),
            fix="run `graft eval` again",
        )
    return loaded


def _load(project: Project) -> _Loaded | None:
    with project.open() as work:
        name = name_entry(work, "evaluate")
        times = work.ledger.times().get(name)
        if times is None:
            return None
        key = (str(project.root), name, times.fingerprint, times.finished_at)
        with _lock:
            known = _loaded.get(key)
        if known is not None and not known.missing:
            return known
        entry = work.ledger.get(name)
    if entry is None:
        return None
    try:
        evaluated = Evaluated.model_validate(entry.output)
    except ValueError:
        raise UserError(
            "the last evaluation was written by another version of graftwork",
            fix="run `graft eval` again",
        ) from None
    missing = []
    cases: tuple[Case, ...] = ()
    try:
        cases = tuple(read_cases(Path(evaluated.cases_file)))
    except (GraftError, OSError, ValueError):
        missing.append(f"the cases in {evaluated.cases_file} cannot be read")
    answers: dict[str, dict[str, Answer]] = {}
    for subject, folder in evaluated.folders.items():
        try:
            found = read_answers(Path(folder))
        except (GraftError, OSError, ValueError):
            found = []
        if not found:
            missing.append(f"the answers of {subject} are gone")
        book = answers.setdefault(subject, {})
        for answer in found:
            if answer.repeat == 0 or answer.case_id not in book:
                book[answer.case_id] = answer
    loaded = _Loaded(evaluated, cases, answers, tuple(missing))
    with _lock:
        _loaded[key] = loaded
        while len(_loaded) > KEPT:
            _loaded.popitem(last=False)
    return loaded
