"""What `graft eval` and `graft gate` run beyond the steps of the pipeline.

Evaluations of other subjects or cases, which the gate does not see; results of other tools in and out; all
models judged together; the choice of the checkpoint that the next training session starts from; and the gate
for an engine, whose verdict is kept by the adapter and the engine's name, version and precision.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from graftwork.data.project import PreparedData
from graftwork.engines.settings import EngineSettings
from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.cases import draw_cases, hash_cases, read_case_file, read_cases
from graftwork.evaluate.comparison import compare, wear_of
from graftwork.evaluate.foreign_runs import (
    Answers,
    ForeignRun,
    ImportedEvaluation,
    SubjectExport,
    import_runs,
    not_as_expected,
    read_document,
    write_json,
)
from graftwork.evaluate.gate.decide import GateCandidate, decide, decide_all, next_start
from graftwork.evaluate.gate.project import (
    comparable,
    describe_engine,
    find_report,
    keep_engine_verdict,
    keep_report,
    look_for_champion,
    read_report,
    surroundings_of,
    with_champion,
)
from graftwork.evaluate.inspect_ai import is_inspect, read_inspect, write_inspect
from graftwork.evaluate.lm_eval import is_lm_eval, read_lm_eval, write_lm_eval
from graftwork.evaluate.project import (
    PAGE,
    Evaluated,
    ask_everybody,
    forget_subjects,
    put_page,
)
from graftwork.evaluate.project_subjects import resolve_subject
from graftwork.evaluate.report import score, sessions_of, slice_report
from graftwork.evaluate.subjects import CHAMPION, Asking, Lineup, NamedSubject, parse_subject, parse_subjects
from graftwork.files.disk import write_atomic
from graftwork.grading.interface import GradeContext
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.evaluate import (
    ADAPTER,
    BASE,
    EVALUATE,
    LOG,
    REFERENCES,
    gather_candidate,
    held_out,
    line_up,
    measure_lineup,
    prepare_asking,
    put_cases,
    record_verdict,
    worked_example,
)
from graftwork.pipeline.table import run_pipeline
from graftwork.project.open_project import OpenProject, name_entry, timestamp
from graftwork.project.reporter import ModelReporter
from graftwork.records import errors
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import UserError
from graftwork.records.report import Case, NextStart, Report, SubjectReport, Verdict
from graftwork.records.run import TrainOutcome
from graftwork.registry.index import find_release
from graftwork.registry.project import open_store
from graftwork.version import __version__
from graftwork.views.evaluation_page import EvaluationPage, render_evaluation

Format = Literal["inspect", "lm-eval"]

WORST_FIRST = (errors.EXIT_ABORT, errors.EXIT_ITERATE, errors.EXIT_NOT_ENOUGH_EVIDENCE)

MOST_RUNS = 10_000

GATED = ("llamacpp",)
"""Engines other than the embedded one that can answer the held-out cases."""


@dataclass(frozen=True)
class EvaluationRequest:
    """The user's request; without any option, the evaluation is the pipeline's own."""

    subjects: tuple[str, ...] = ()
    cases: Path | None = None
    limit: int | None = None
    shards: int = 1
    again: bool = False

    @property
    def stands_beside(self) -> bool:
        """Whether it is separate from the evaluation that the gate decides on."""
        return bool(self.subjects) or self.cases is not None or self.limit is not None


def evaluate_asked(work: OpenProject, request: EvaluationRequest) -> Evaluated:
    if not request.stands_beside:
        if request.shards > 1 or request.again:
            # The answers for the pipeline's evaluation, in several processes or again.
            outputs = run_pipeline(work, upto="train")
            prepared, outcome = outputs.get("prepare", PreparedData), outputs.get("train", TrainOutcome)
            cases = held_out(work, prepared)
            asking = prepare_asking(work, prepared, cases, shards=request.shards)
            lineup = line_up(work, asking=asking, outcome=outcome)
            if request.again:
                work.ledger.forget(name_entry(work, EVALUATE.name))
                forget_subjects(lineup, cases)
            ask_everybody(work, lineup, cases)
        return put_page(work, run_pipeline(work, upto=EVALUATE.name).get(EVALUATE.name, Evaluated))
    subjects = parse_subjects(request.subjects)
    # Read first: a mistake in the file shall not cost a training.
    checks = work.settings.evaluate.checks
    file_cases = read_case_file(request.cases, named=checks) if request.cases is not None else None
    trained = not subjects or any(subject.name == ADAPTER for subject in subjects)
    outputs = run_pipeline(work, upto="train" if trained else "prepare")
    prepared = outputs.get("prepare", PreparedData)
    cases = draw_cases(file_cases or held_out(work, prepared, also=request.subjects), most=request.limit)
    asking = prepare_asking(work, prepared, cases, subjects=request.subjects or None, shards=request.shards)
    candidate = outputs.get("train", TrainOutcome) if trained else None
    lineup = _line_up(work, subjects, asking=asking, outcome=candidate)
    if request.again:
        forget_subjects(lineup, cases)
    evaluated = measure_lineup(
        work,
        lineup,
        cases,
        asking=asking,
        subject=lineup.candidate.identity,
        # The answers in a user's own file are not a log.
        prepared=prepared if file_cases is None else None,
    )
    name = fingerprint([hash_cases(cases), [subject.name for subject in lineup.all]])[:12]
    write_atomic(work.project.evaluations / f"asked-{name}.json", evaluated.to_json())
    return put_page(work, evaluated, separate=True)


def _line_up(
    work: OpenProject, requested: tuple[NamedSubject, ...], *, asking: Asking, outcome: TrainOutcome | None
) -> Lineup:
    """The first is the baseline, the second the candidate; a single one is measured against the log."""
    if not requested:
        assert outcome is not None
        return line_up(work, asking=asking, outcome=outcome)
    if len(requested) == 1:
        if requested[0].name == LOG:
            raise UserError(
                "the log alone cannot be compared",
                why="its answers are the reference for the other subjects",
                fix="use another subject too: --subject log --subject base",
                where="--subject",
            )
        requested = (*parse_subjects([LOG]), *requested)
    subjects = [resolve_subject(work, subject, asking=asking, outcome=outcome) for subject in requested]
    remaining = list(zip(requested[2:], subjects[2:], strict=True))
    return Lineup(
        baseline=subjects[0],
        candidate=subjects[1],
        champion=next((subject for name, subject in remaining if name.name == CHAMPION), None),
        others=tuple(s for n, s in remaining if n.kind not in REFERENCES and n.name != CHAMPION),
        references=tuple(s for n, s in remaining if n.kind in REFERENCES),
    )


def import_evaluation(work: OpenProject, files: Sequence[Path]) -> ImportedEvaluation:
    """Read, compare, store and report. The first file is the baseline, the second the candidate."""
    runs = [read_foreign(path) for path in files]
    last = last_evaluation(work)
    own_cases = (
        read_cases(Path(last.cases_file)) if last is not None and Path(last.cases_file).is_file() else ()
    )
    imported, cases, answers = import_runs(runs, own_cases=own_cases)
    report = imported.report
    if imported.same_cases:
        report = _grade_by_our_metrics(work, report, answers, own_cases)
        # Another candidate was measured on this project's cases.
        cases_hash = report.cases_hash
        texts = [answer.text for answer in answers[report.candidate.subject]]
        subject = f"imported:{fingerprint(texts)}"
        looks = work.looks.log(cases_hash, subject=subject, when=timestamp())
        report = report.model_copy(update={"looks": looks})
        wear = wear_of(
            report,
            candidates=work.looks.candidates(cases_hash),
            look=work.looks.position(cases_hash, subject=subject),
        )
        report = report.model_copy(update={"wear": wear})
    path = work.project.page_of(PAGE, work.model)
    path = path.with_stem(f"{path.stem}-imported")
    page = EvaluationPage(
        project=work.settings.project,
        report=report,
        cases=cases,
        answers=answers,
        notes=(imported.why, *imported.notes),
    )
    write_atomic(path, render_evaluation(page))
    imported = imported.model_copy(update={"report": report, "page": str(path)})
    write_atomic(work.project.evaluations / f"imported-{report.fingerprint()[:12]}.json", imported.to_json())
    return imported


def read_foreign(path: Path) -> ForeignRun:
    """Recognize the format by the file name, else by its content."""
    if not path.is_file():
        raise UserError(
            f"there is no file {path}",
            why="results of other tools are read from files",
            fix="specify the log: logs/….eval, or results_….json of lm-eval",
            where=str(path),
        )
    if path.suffix == ".eval":
        return read_inspect(path)
    if path.suffix == ".jsonl":
        return read_lm_eval(path)
    document = read_document(path)
    if is_inspect(document):
        return read_inspect(path)
    if is_lm_eval(document):
        return read_lm_eval(path)
    raise not_as_expected(
        "neither inspect-ai nor lm-eval wrote this file",
        why="it has neither `eval` and `status` nor `results`",
        where=str(path),
    )


def export_evaluation(
    work: OpenProject, *, form: Format, out: Path, subjects: Sequence[str] = ()
) -> dict[str, list[str]]:
    """The project's last evaluation: the files of one log, or of one folder of results, for each subject."""
    last = last_evaluation(work)
    if last is None:
        raise UserError(
            "there is no evaluation to export",
            why="this project was not evaluated yet",
            fix="run `graft eval` first",
            where=str(work.project.root),
        )
    by_name = {s.subject: s for s in (last.report.baseline, last.report.candidate, *last.report.others)}
    unknown = [name for name in subjects if name not in by_name]
    if unknown:
        raise UserError(
            f"the evaluation has no subject {unknown[0]}",
            why=f"it has: {', '.join(by_name)}",
            fix="use one of these, or none for all",
            where="--subject",
        )
    cases, when = read_cases(Path(last.cases_file)), timestamp()
    written: dict[str, list[str]] = {}
    for name in subjects or by_name:
        export = SubjectExport(
            task=work.settings.project,
            cases=cases,
            subject=by_name[name],
            answers=read_answers(Path(last.folders[name])),
            cases_hash=last.report.cases_hash,
            when=when,
            version=__version__,
        )
        if form == "inspect":
            folder = export.folder.strip(".") or "model"
            content = {f"{export.date}_{folder}.json": write_json(write_inspect(export), indent=1)}
        else:
            content = write_lm_eval(export)
        for file, text in content.items():
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(out / file, text)
        written[name] = [str(out / file) for file in content]
    return written


def last_evaluation(work: OpenProject) -> Evaluated | None:
    """Return the evaluation that the gate would decide on; None before the first one."""
    entry = work.ledger.get(name_entry(work, EVALUATE.name))
    return Evaluated.model_validate(entry.output) if entry is not None else None


def _grade_by_our_metrics(
    work: OpenProject, report: Report, answers: Answers, cases: Sequence[Case]
) -> Report:
    """Grade by our metrics in addition to theirs: the questions are the same, so the grades can be
    compared.
    """
    # No judge: reading a file sends no requests.
    settings = work.settings.evaluate.model_copy(update={"judge": None})

    def graded(subject: SubjectReport) -> SubjectReport:
        subject_answers = answers[subject.subject]
        if {answer.case_id for answer in subject_answers} != {case.id for case in cases}:
            return subject
        context = GradeContext(fields=settings.fields, folder=work.project.root)
        ours = score(
            cases, answers=subject_answers, generation=subject.generation, settings=settings, context=context
        )
        graded_metrics = {name: metric for name, metric in ours.metrics.items() if metric.scores}
        return subject.model_copy(update={"metrics": {**graded_metrics, **subject.metrics}})

    baseline, candidate = graded(report.baseline), graded(report.candidate)
    other_subjects = tuple(graded(subject_report) for subject_report in report.others)
    candidates = [subject for subject in (candidate, *other_subjects) if subject.subject != baseline.subject]
    pairs = [
        pair
        for subject in candidates
        for pair in compare(baseline, candidate=subject, sessions=sessions_of(cases))
        if pair.n
    ]
    changed = {
        "baseline": baseline,
        "candidate": candidate,
        "others": other_subjects,
        "comparisons": tuple(pairs),
    }
    return slice_report(report.model_copy(update=changed), cases, by=settings.slices)


class GatedAll(Record):
    """All models of a project, the main one first."""

    project: str
    verdicts: dict[str, Verdict]

    @property
    def exit_code(self) -> int:
        """Exit code of the worst verdict: 0 only if all may be deployed."""
        codes = {verdict.exit_code for verdict in self.verdicts.values()}
        return next((code for code in WORST_FIRST if code in codes), errors.EXIT_DONE)


def gate_all(work: OpenProject, *, may_do: Collection[str] | None = None) -> GatedAll:
    """Bring every model up to date as far as its gate, by the allowed steps, and judge them together."""
    works: dict[str, OpenProject] = {}
    outputs: dict[str, StepOutputs] = {}
    judged: dict[str, GateCandidate] = {}
    for name in work.project.settings.all_models:
        works[name] = replace(work, asked_model=name, reporter=ModelReporter(work.reporter, name))
        outputs[name] = run_pipeline(works[name], upto="gate", may_do=may_do)
        judged[name] = gather_candidate(works[name], outputs[name])
    verdicts = {
        name: record_verdict(works[name], outputs[name], judged[name], verdict)
        for name, verdict in decide_all(judged).items()
    }
    for name, verdict in verdicts.items():
        # Replaces the uncorrected verdict: a release uses this one.
        ledger, entry = works[name].ledger, name_entry(works[name], "gate")
        last, output = ledger.get(entry), verdict.model_dump(mode="json")
        if last is not None and last.output != output:
            ledger.put(
                entry,
                fingerprint=last.fingerprint,
                output=output,
                finished_at=timestamp(),
                seconds=last.seconds,
            )
    return GatedAll(project=work.project.settings.project, verdicts=verdicts)


def judge_session(work: OpenProject, *, may_do: Collection[str] | None = None) -> NextStart:
    """Bring the model up to date as far as its evaluation, then compare with the start of the session."""
    outputs = run_pipeline(work, upto="evaluate", may_do=may_do)
    report, outcome = outputs.get("evaluate", Evaluated).report, outputs.get("train", TrainOutcome)
    judged_report = find_report(work, outcome.adapter_hash)
    if (
        judged_report is None
        or not comparable(judged_report, report)
        or judged_report.candidate != report.candidate
    ):
        # What the gate judged is the same with the champion in it, and stays.
        keep_report(work, outcome.adapter_hash, report)
    start = next_start(
        _report_before(work, report, outcome),
        report,
        work.settings.gate,
        # Both over the validation rows of this session: at its start and at its end.
        loss_before=outcome.validation_loss_before,
        loss_after=outcome.validation_loss_after,
    )
    adapter, folder = outcome.adapter_hash, outcome.adapter_folder
    if start.start != "this":
        adapter = outcome.started_from or ""
        folder = find_adapter(work, adapter) if adapter else ""
    return start.model_copy(update={"adapter_hash": adapter, "adapter_folder": folder})


def find_adapter(work: OpenProject, adapter_hash: str) -> str:
    """Return the folder of an adapter of a run or a release; empty if neither has it."""
    for run in work.runs.list(limit=MOST_RUNS):
        if run.outcome is None or run.outcome.get("adapter_hash") != adapter_hash:
            continue
        # A run that was cleared away leaves its record: the folder is looked for elsewhere then.
        if Path(adapter_folder := str(run.outcome["adapter_folder"])).is_dir():
            return adapter_folder
    store = open_store(work)
    for release in work.releases.list():
        if release.adapter_hash == adapter_hash and store.has(release.id):
            return str(store.get(release.id))
    folder = (work.project.root / (work.settings.train.start_from or "")).expanduser()
    return str(folder) if work.settings.train.start_from and Path(folder).is_dir() else ""


def _report_before(work: OpenProject, report: Report, outcome: TrainOutcome) -> Report:
    if outcome.started_from is None:
        return report.model_copy(update={"candidate": report.baseline})
    candidates = [find_report(work, outcome.started_from)]
    for release in work.releases.list():
        if release.adapter_hash == outcome.started_from:
            candidates.append(read_report(work, release))
    available = [report for report in candidates if report is not None]
    if available:
        # Of several the one that was asked the same cases in the same way.
        return next((before for before in available if comparable(before, report)), available[0])
    raise UserError(
        f"the adapter that this session started from ({outcome.started_from[:12]}) was never evaluated here",
        why="a session is judged by what it changed on the same cases",
        fix="run `graft gate` before each session to keep its report; or evaluate that adapter with "
        "`graft eval --subject adapter:FOLDER`",
        where=work.model,
    )


def gate_engine(
    work: OpenProject,
    engine: EngineSettings,
    *,
    release: str | None = None,
    may_do: Collection[str] | None = None,
) -> Verdict:
    """Ask the held-out cases through the engine and decide; about the last adapter by default."""
    if engine.kind not in GATED:
        raise UserError(
            f"the gate does not support the engine {engine.kind}",
            why=f"held-out cases can be answered by {', '.join(GATED)}",
            fix="evaluate it as an endpoint, `graft eval --subject URL#model`, and serve it with "
            "`serve.require_gate_for_engine: false`",
            where="--engine",
        )
    outputs = run_pipeline(work, upto="train" if release is None else "prepare", may_do=may_do)
    prepared = outputs.get("prepare", PreparedData)
    outcome = outputs.get("train", TrainOutcome) if release is None else None
    cases = held_out(work, prepared)
    asking = Asking(put_cases(work, cases), example=worked_example(work, prepared))
    subject_name = ADAPTER if release is None else f"release:{release}"
    through_engine = parse_subject(f"engine:{engine.kind}/{engine.precision}@{subject_name}")
    candidate = resolve_subject(work, through_engine, asking=asking, outcome=outcome)
    lineup = Lineup(
        baseline=resolve_subject(work, parse_subject(BASE), asking=asking, outcome=outcome),
        candidate=candidate,
        # The same weights as they were evaluated, to see what the engine changes.
        others=(resolve_subject(work, parse_subject(subject_name), asking=asking, outcome=outcome),),
    )
    # Weights on another engine must pass this gate and their own: no second chance, no further look.
    adapter_hash = (
        outcome.adapter_hash
        if outcome is not None
        else find_release(work.releases, release or "").adapter_hash
    )
    evaluated = measure_lineup(work, lineup, cases, asking=asking, subject=adapter_hash, prepared=prepared)
    champion = look_for_champion(work, adapter_hash=adapter_hash)
    report = with_champion(work, evaluated.report, champion.release)
    verdict = decide(report, work.settings.gate, around=surroundings_of(champion))
    verdict = verdict.model_copy(
        update={"notes": (f"judged as served by {describe_engine(engine)}", *verdict.notes)}
    )
    keep_engine_verdict(work, adapter_hash, engine, verdict)
    return verdict
