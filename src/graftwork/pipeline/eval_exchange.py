"""Evaluations out to other tools, and their results in.

In: files of inspect-ai or lm-eval; or the last evaluation of this project. Out: an imported evaluation
beside the project's own; or files that the other tool reads. What is imported never takes the place of
what the gate decides on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from graftwork import __version__
from graftwork.evaluate.cases import read_cases
from graftwork.evaluate.compare import compare
from graftwork.evaluate.exchange.exported import Export, write_json
from graftwork.evaluate.exchange.imported import Imported, import_runs
from graftwork.evaluate.exchange.inspect_write import write_inspect
from graftwork.evaluate.exchange.lm_eval_write import write_lm_eval
from graftwork.evaluate.exchange.read import read_foreign
from graftwork.evaluate.score import score, sessions_of
from graftwork.evaluate.slices import slice_report
from graftwork.evaluate.subjects.book import read_answers
from graftwork.evaluate.wear import wear_of
from graftwork.files.disk import write_atomic
from graftwork.grading import GradeContext
from graftwork.pipeline.evaluate_run import Evaluated
from graftwork.pipeline.evaluation_page import page_name
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import UserMistake
from graftwork.records.report import Case, Report, SubjectReport
from graftwork.report.evaluation_page import EvaluationPage, render_evaluation

Format = Literal["inspect", "lm-eval"]


class ImportedEvaluation(Record):
    """What was read, where its page lies, and whether it is about this project's cases."""

    report: Report
    same_cases: bool
    why: str
    notes: tuple[str, ...] = ()
    page: str = ""


class Exported(Record):
    format: str
    files: tuple[str, ...]
    subjects: tuple[str, ...]


def import_evaluation(work: OpenProject, files: Sequence[Path]) -> ImportedEvaluation:
    """Read, compare, keep and draw. The first file is the baseline, the second the candidate."""
    runs = [read_foreign(path) for path in files]
    last = last_evaluation(work)
    own = read_cases(Path(last.cases_file)) if last is not None and Path(last.cases_file).is_file() else ()
    imported = import_runs(runs, own=own)
    if imported.same_cases:
        imported = _log_look(work, _grade_by_our_metrics(work, imported, own))
    path = work.project.root / f"{page_name(work)}-imported.html"
    page = EvaluationPage(
        project=work.settings.project,
        report=imported.report,
        cases=imported.cases,
        answers=imported.answers,
        notes=(imported.why, *imported.notes),
    )
    write_atomic(path, render_evaluation(page))
    evaluation = ImportedEvaluation(
        report=imported.report,
        same_cases=imported.same_cases,
        why=imported.why,
        notes=imported.notes,
        page=str(path),
    )
    kept = work.project.evaluations / f"imported-{imported.report.fingerprint()[:12]}.json"
    write_atomic(kept, evaluation.to_json())
    return evaluation


def export_evaluation(
    work: OpenProject, *, form: Format, out: Path, subjects: Sequence[str] = ()
) -> Exported:
    """The project's last evaluation: one log, or one folder of results, for each subject."""
    last = last_evaluation(work)
    if last is None:
        raise UserMistake(
            "there is no evaluation to export",
            why="this project was not evaluated yet",
            fix="run `graft eval` first",
            where=str(work.project.root),
        )
    known = {one.subject: one for one in (last.report.baseline, last.report.candidate, *last.report.others)}
    unknown = [name for name in subjects if name not in known]
    if unknown:
        raise UserMistake(
            f"the evaluation has no subject {unknown[0]}",
            why=f"it has: {', '.join(known)}",
            fix="name one of these, or none for all",
            where="--subject",
        )
    cases, when = read_cases(Path(last.cases_file)), timestamp()
    written: list[str] = []
    for name in subjects or known:
        export = Export(
            task=work.settings.project,
            cases=cases,
            subject=known[name],
            answers=read_answers(Path(last.folders[name])),
            cases_hash=last.report.cases_hash,
            when=when,
            version=__version__,
        )
        written += _write(export, form=form, out=out)
    return Exported(format=form, files=tuple(written), subjects=tuple(subjects or known))


def last_evaluation(work: OpenProject) -> Evaluated | None:
    """What the gate would decide on; None before the first one."""
    step = "evaluate" if work.model == work.settings.main_model else f"evaluate@{work.model}"
    entry = work.ledger.get(step)
    return Evaluated.model_validate(entry.output) if entry is not None else None


def _write(export: Export, *, form: Format, out: Path) -> list[str]:
    files = write_lm_eval(export)
    if form == "inspect":
        name = files.results_name.removeprefix("results_").removesuffix(".json")
        path = out / f"{name}_{files.folder}.json"
        content = {path: write_json(write_inspect(export), indent=1)}
    else:
        folder = out / files.folder
        content = {
            folder / files.results_name: write_json(files.results, indent=2),
            folder / files.samples_name: "".join(write_json(sample) + "\n" for sample in files.samples),
        }
    for path, text in content.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return [str(path) for path in content]


def _grade_by_our_metrics(work: OpenProject, imported: Imported, own: Sequence[Case]) -> Imported:
    """Our metrics beside theirs: the questions are the same, so the grades can be compared."""
    # No judge: to read a file asks nobody anything.
    settings = work.settings.evaluate.model_copy(update={"judge": None})
    report = imported.report

    def graded(subject: SubjectReport) -> SubjectReport:
        answers = imported.answers[subject.subject]
        if {answer.case_id for answer in answers} != {case.id for case in own}:
            return subject
        context = GradeContext(fields=settings.fields, folder=work.project.root)
        ours = score(own, answers=answers, generation=subject.generation, settings=settings, context=context)
        kept = {name: metric for name, metric in ours.metrics.items() if metric.scores}
        return subject.model_copy(update={"metrics": {**kept, **subject.metrics}})

    baseline, candidate = graded(report.baseline), graded(report.candidate)
    others = tuple(graded(one) for one in report.others)
    candidates = [one for one in (candidate, *others) if one.subject != baseline.subject]
    pairs = [
        pair
        for one in candidates
        for pair in compare(baseline, candidate=one, sessions=sessions_of(own))
        if pair.n
    ]
    changed = {"baseline": baseline, "candidate": candidate, "others": others, "comparisons": tuple(pairs)}
    report = report.model_copy(update=changed)
    sliced = slice_report(own, report=report, by=settings.slices)
    report = report.model_copy(update={"slices": sliced.figures, "cuts": sliced.cuts})
    return imported.model_copy(update={"report": report})


def _log_look(work: OpenProject, imported: Imported) -> Imported:
    """Whoever measured it: another candidate was looked at on this project's cases."""
    report = imported.report
    said = imported.answers[report.candidate.subject]
    subject = f"imported:{fingerprint([answer.text for answer in said])}"
    looks = work.looks.log(report.cases_hash, subject=subject, when=timestamp())
    report = report.model_copy(update={"looks": looks})
    wear = wear_of(
        report,
        candidates=work.looks.candidates(report.cases_hash),
        look=work.looks.position(report.cases_hash, subject=subject),
    )
    return imported.model_copy(update={"report": report.model_copy(update={"wear": wear})})
