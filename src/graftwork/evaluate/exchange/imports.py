"""Runs of other tools as one Report that can be shown and compared.

In: files of inspect-ai or lm-eval, and the cases of this project if any. Out: the report, its cases and
answers, and whether they are this project's cases. The marks are the other tool's own; intervals and pairs
are computed as usual.
"""

from collections.abc import Sequence
from pathlib import Path

from graftwork.evaluate.cases import hash_cases
from graftwork.evaluate.comparison import compare
from graftwork.evaluate.exchange.common import ForeignRun, not_as_expected, read_document
from graftwork.evaluate.exchange.inspect_ai import is_inspect, read_inspect
from graftwork.evaluate.exchange.lm_eval import is_lm_eval, read_lm_eval
from graftwork.evaluate.power import what_cases_show
from graftwork.evaluate.report import slice_report
from graftwork.evaluate.score import average, make_metric, sessions_of
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import UserMistake
from graftwork.records.report import Answer, Case, Comparison, Generation, Report, SubjectReport


def read_foreign(path: Path) -> ForeignRun:
    """Recognize the format by the file name, else by its content."""
    if not path.is_file():
        raise UserMistake(
            f"there is no file {path}",
            why="results of other tools are read from files",
            fix="name the log: logs/….eval, or results_….json of lm-eval",
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


CUTS = ("group", "domain", "length")


class ImportedRuns(Record):
    """Results of other tools, read. `same_cases` says that they are this project's own cases."""

    report: Report
    cases: tuple[Case, ...] = ()
    answers: dict[str, tuple[Answer, ...]] = {}
    notes: tuple[str, ...] = ()
    same_cases: bool = False
    why: str = ""
    """Why the gate can, or cannot, decide on it."""


def import_runs(runs: Sequence[ForeignRun], *, own: Sequence[Case] = ()) -> ImportedRuns:
    """The first run is the baseline, the second the candidate; one alone is only shown."""
    if not runs:
        raise UserMistake("there is nothing to import", fix="name at least one file")
    subjects_so_far: list[str] = []
    named_runs = []
    for run in runs:
        # Two runs of one model are two subjects.
        name, number = run.subject, 2
        while name in subjects_so_far:
            name, number = f"{run.subject} ({number})", number + 1
        subjects_so_far.append(name)
        named_runs.append(run.model_copy(update={"subject": name}))
    runs = named_runs
    cases, clashing = _gather_cases(runs)
    same, why = _held_against(cases, own)
    if same:
        # Our ids for cases that are ours.
        ours = {prompt_key(case): case.id for case in own}
        runs = [
            run.model_copy(update={"samples": tuple(s.named(ours[prompt_key(s.case)]) for s in run.samples)})
            for run in runs
        ]
        cases = tuple(own)
    subjects = [_subject_report(run, sessions_of(cases)) for run in runs]
    notes = [f"{run.subject}: {note}" for run in runs for note in run.notes]
    if clashing:
        notes.append(f"{len(clashing)} cases have one id and different prompts, and were not paired.")
    report = _make_report(subjects, cases=cases, source=", ".join(dict.fromkeys(run.tool for run in runs)))
    return ImportedRuns(
        report=report,
        cases=cases,
        answers={run.subject: tuple(sample.answer for sample in run.samples) for run in runs},
        notes=tuple(notes),
        same_cases=same,
        why=why,
    )


def prompt_key(case: Case) -> str:
    """What was asked and what counts as right, whatever it is called."""
    asked = [[message.role, message.content] for message in case.messages]
    return fingerprint([asked, case.reference])


def _make_report(subjects: Sequence[SubjectReport], *, cases: Sequence[Case], source: str) -> Report:
    sessions = sessions_of(cases)
    baseline, candidate = subjects[0], subjects[min(1, len(subjects) - 1)]
    pairs: tuple[Comparison, ...] = ()
    for other in subjects[1:]:
        pairs += tuple(c for c in compare(baseline, candidate=other, sessions=sessions) if c.n)
    graded = next((c for c in pairs if candidate.metrics[c.metric].kind != "number"), None)
    report = Report(
        cases_hash=hash_cases(cases),
        cases=len(cases) or max(m.n for subject in subjects for m in subject.metrics.values()),
        baseline=baseline,
        candidate=candidate,
        comparisons=pairs,
        groups={case.id: case.group for case in cases if case.group is not None},
        sessions=sessions,
        others=tuple(subjects[2:]),
        power=what_cases_show(graded.n, comparison=graded) if graded is not None else None,
        source=source,
    )
    return slice_report(report, cases, by=CUTS)


def _gather_cases(runs: list[ForeignRun]) -> tuple[tuple[Case, ...], set[str]]:
    """All cases, each once. The same id with another prompt is another case, renamed in its run."""
    cases: dict[str, Case] = {}
    clashing: set[str] = set()
    for place, run in enumerate(runs):
        samples = []
        for read in run.samples:
            name, sample = read.case.id, read
            if name in cases and prompt_key(cases[name]) != prompt_key(read.case):
                clashing.add(name)
                sample = read.named(f"{name} ({run.subject})")
            cases.setdefault(sample.case.id, sample.case)
            samples.append(sample)
        runs[place] = run.model_copy(update={"samples": tuple(samples)})
    return tuple(cases.values()), clashing


def _held_against(cases: Sequence[Case], own: Sequence[Case]) -> tuple[bool, str]:
    if not own:
        return False, "Not gated: this project has no evaluation yet whose cases these could be."
    theirs, ours = {prompt_key(case) for case in cases}, {prompt_key(case) for case in own}
    common = len(ours & theirs)
    if theirs == ours and len(ours) == len(own):
        return True, (
            f"These are the {len(own)} cases of this project, so the answers were graded by its own metrics "
            "too and can be held against its other subjects."
        )
    return False, (
        f"Not gated: {common} of this project's {len(own)} cases are among the {len(cases)} imported ones, "
        "and a verdict on other questions says nothing about these."
    )


def _subject_report(run: ForeignRun, sessions: dict[str, str]) -> SubjectReport:
    marks: dict[str, dict[str, list[float | None]]] = {}
    for sample in run.samples:
        for name, mark in sample.scores.items():
            marks.setdefault(name, {}).setdefault(sample.case.id, []).append(mark)
    metrics = {
        name: make_metric(
            name, scores={case: average(given) for case, given in by_case.items()}, sessions=sessions
        )
        for name, by_case in marks.items()
    }
    metrics |= {total.name: total for total in run.totals}
    if not metrics:
        raise UserMistake(
            "the file holds no marks",
            why="without scores there is nothing to show or compare",
            fix="score the run with the other tool first, or import its answers as a subject",
            where=run.file,
        )
    seconds = sum(sample.answer.seconds for sample in run.samples)
    tokens = sum(sample.answer.tokens for sample in run.samples)
    generation = Generation(
        subject=run.subject,
        answers=len(run.samples),
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        single_latency_seconds=(),
        peak_memory_gib=0.0,
        settings=run.settings,
    )
    return SubjectReport(subject=run.subject, metrics=metrics, generation=generation)
