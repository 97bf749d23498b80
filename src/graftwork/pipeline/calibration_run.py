"""A judge compared with people's labels, before its verdict may decide anything.

In: an open project: rewards and pairs of its rows, feedback, corrections and reviews. Out: one
JudgeCalibration for each mode of the judge, kept by what decides the judge's replies. Labels go to the judge
without the reference wherever that would be the labelled answer itself.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from graftwork.evaluate.cases import choose_cases, clusters_of
from graftwork.evaluate.judge.calibration import (
    CalibrationTerms,
    JudgeCalibration,
    LabelledAnswer,
    LabelledPair,
    Mode,
    calibrate,
    opinions_of_marks,
    opinions_of_pairs,
)
from graftwork.evaluate.judge.judge import Judge, open_judge
from graftwork.evaluate.settings import JudgeSettings
from graftwork.files.dataset import read_rows
from graftwork.files.disk import make_folder, write_atomic
from graftwork.grading.metrics import Review
from graftwork.pipeline.calibration import calibration_file, judge_identity
from graftwork.pipeline.corrections import list_judge_labels
from graftwork.pipeline.evaluation import JUDGED_FOLDER
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.steps.data import PreparedData
from graftwork.pipeline.table import run_pipeline
from graftwork.records.base import Record
from graftwork.records.correction import JudgeLabel
from graftwork.records.dataset import SPLITS
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

GOOD_FROM = 0.5
"""People's scores are from 0 (bad) to 1 (good)."""


class CalibratedJudge(Record):
    """The judge of graft.yaml, each of its modes with what people's labels say of it."""

    model: str
    modes: tuple[JudgeCalibration, ...]

    @property
    def sufficient(self) -> bool:
        return all(found.sufficient for found in self.modes)


def calibrate_judge(work: OpenProject, *, limit: int | None = None) -> CalibratedJudge:
    """Ask the judge about everything that people labelled. Replies are kept: asking again costs nothing."""
    settings = work.settings.evaluate.judge
    if settings is None:
        raise UserMistake(
            "graft.yaml names no judge",
            why="there is no judge to compare with people's labels",
            fix="name its endpoint under evaluate.judge: {url: https://host/v1, model: NAME}",
            where="evaluate.judge",
        )
    answers, pairs = gather_labels(work)
    chosen = answers[:limit], pairs[:limit]
    folder = work.project.state / JUDGED_FOLDER
    make_folder(folder)
    judge = open_judge(settings, folder=folder)
    found = []
    for mode in settings.modes:
        made = _calibrate_mode(work, judge, settings, mode, *chosen)
        write_atomic(calibration_file(work, settings, mode), made.to_json())
        found.append(made)
    return CalibratedJudge(model=settings.model, modes=tuple(found))


def _calibrate_mode(
    work: OpenProject,
    judge: Judge,
    settings: JudgeSettings,
    mode: Mode,
    answers: list[LabelledAnswer],
    pairs: list[LabelledPair],
) -> JudgeCalibration:
    def report(done: int, total: int) -> None:
        work.reporter.progress("asking the judge", done, total, seconds_left=None, detail={})

    if mode == "pointwise":
        texts = {answer.case.id: answer.text for answer in answers}
        marks = judge.rate_all([answer.case for answer in answers], texts, progress=report)
        opinions, unjudged = opinions_of_marks(answers, marks)
    else:
        verdicts = judge.compare(
            [pair.case for pair in pairs],
            baseline={pair.case.id: pair.other for pair in pairs},
            candidate={pair.case.id: pair.preferred for pair in pairs},
            progress=report,
        )
        opinions, unjudged = opinions_of_pairs(pairs, verdicts)
    terms = CalibrationTerms(
        model=settings.model,
        identity=judge_identity(settings, mode),
        mode=mode,
        confidence=work.settings.evaluate.confidence,
        min_kappa=settings.min_kappa,
        min_labels=settings.min_labels,
    )
    return calibrate(opinions, terms=terms, unjudged=unjudged).model_copy(update={"made_at": timestamp()})


def gather_labels(work: OpenProject) -> tuple[list[LabelledAnswer], list[LabelledPair]]:
    """Rewards, preference pairs, feedback, corrections and reviews, each labelled answer under its own id."""
    prepared = run_pipeline(work, upto="prepare").get("prepare", PreparedData)
    rows = [row for split in SPLITS for row in read_rows(Path(prepared.folder), split)]
    scale = _scale(work)
    answers: list[LabelledAnswer] = []
    pairs: list[LabelledPair] = []
    known: set[tuple[str, str, str]] = set()
    cases = choose_cases(rows) if rows else ()
    clusters = clusters_of(cases)
    for case in cases:
        cluster = clusters.get(case.id, case.id)
        if case.reward is not None and scale.least <= case.reward <= scale.most:
            share = (case.reward - scale.least) / ((scale.most - scale.least) or 1.0)
            answers.append(LabelledAnswer(_blind(case), case.reference, share >= GOOD_FROM, cluster))
        if case.rejected is not None and case.rejected.strip() != case.reference.strip():
            pairs.append(LabelledPair(_blind(case), case.reference, case.rejected, cluster))
            known.add(_name_pair(case.messages, case.reference, case.rejected))
    for number, label in enumerate(_last_labels(list_judge_labels(work))):
        case = _case_of(label, number)
        cluster = label.session or label.item
        answers.append(LabelledAnswer(case, label.answer, label.score >= GOOD_FROM, cluster))
        # An edited row is a pair of the log too, where data.logs names the log of reviews.
        if label.instead_of and _name_pair(label.messages, label.answer, label.instead_of) not in known:
            pairs.append(LabelledPair(case, label.answer, label.instead_of, cluster))
    return answers, pairs


def _last_labels(labels: Iterable[JudgeLabel]) -> list[JudgeLabel]:
    """What each person thought last of each item. People may disagree: each of them is a label."""
    last: dict[tuple[str, str | None], list[JudgeLabel]] = {}
    for label in labels:
        held = last.setdefault((label.item, label.reviewer), [])
        if held and label.at != held[-1].at:
            held.clear()
        held.append(label)
    return [label for held in last.values() for label in held]


def _name_pair(messages: Sequence[Message], preferred: str, other: str) -> tuple[str, str, str]:
    question = next((turn.content for turn in reversed(messages) if turn.role == "user"), "")
    return question, preferred.strip(), other.strip()


def _case_of(label: JudgeLabel, number: int) -> Case:
    origin = Origin(file="labels", line=number + 1)
    name = f"{label.item} {number}"
    return Case(id=name, origin=origin, messages=label.messages, reference="", group=label.group)


def _blind(case: Case) -> Case:
    """Without the reference, which is the very answer that is labelled."""
    return case.model_copy(update={"reference": ""})


def _scale(work: OpenProject) -> Review:
    """The scale of the log's rewards, as a check on reviewer_score states it."""
    for check in work.settings.evaluate.checks:
        if check.metric == "reviewer_score" and isinstance(check.rule, Review):
            return check.rule
    return Review()
