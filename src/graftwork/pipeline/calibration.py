"""What is known of the project's judge: whether people's labels back its verdict, and so whether it counts.

In: an open project. Out: the calibration that `graft eval calibrate` left, or why a metric of the judge may
not decide anything.
"""

from pathlib import Path

from pydantic import ValidationError

from graftwork.evaluate.gate.settings import GateSettings
from graftwork.evaluate.judge.calibration import JudgeCalibration, Mode
from graftwork.evaluate.settings import JudgeSettings
from graftwork.grading.metrics import JUDGE_PREFERENCE, JUDGE_SCORE
from graftwork.pipeline.evaluation import JUDGED_FOLDER
from graftwork.pipeline.open_project import OpenProject
from graftwork.records.base import fingerprint

MODE_OF: dict[str, Mode] = {JUDGE_SCORE: "pointwise", JUDGE_PREFERENCE: "pairwise"}
"""The mode of the judge that a metric rests on."""


def judge_identity(settings: JudgeSettings, mode: Mode) -> str:
    """A hash of all that decides what the judge says in this mode."""
    decided = settings.model_dump(
        mode="json",
        include={"url", "model", "rubric", "show_reference", "max_answer_characters", "max_tokens"},
    )
    return fingerprint({**decided, "mode": mode})


def find_calibration(work: OpenProject, mode: Mode) -> JudgeCalibration | None:
    """The last calibration of exactly this judge; None if there is none."""
    settings = work.settings.evaluate.judge
    path = calibration_file(work, settings, mode) if settings is not None else None
    if settings is None or path is None or not path.is_file():
        return None
    try:
        found = JudgeCalibration.from_json(path.read_bytes())
    except ValidationError:
        return None
    # What it takes is as graft.yaml has it now.
    return found.model_copy(update={"min_kappa": settings.min_kappa, "min_labels": settings.min_labels})


def doubts_about_judge(work: OpenProject) -> dict[str, str]:
    """For each metric that rests on the judge and that the gate names: why it may not decide."""
    doubts = {}
    for metric in judged_metrics(work.settings.gate):
        found = find_calibration(work, MODE_OF[metric])
        if found is None:
            doubts[metric] = "it was not compared with people's labels yet; `graft eval calibrate` does that"
        elif found.why_not:
            doubts[metric] = found.why_not
    return doubts


def judged_metrics(gate: GateSettings) -> tuple[str, ...]:
    """The metrics of the gate's rules that rest on the judge."""
    named = [rule.metric for rule in gate.rules]
    named += [rule.metric for rule in (gate.primary_rule, gate.win_rule) if rule is not None]
    named += gate.abort_when.worse_on if gate.abort_when is not None else ()
    return tuple(dict.fromkeys(name for name in named if name in MODE_OF))


def calibration_file(work: OpenProject, settings: JudgeSettings, mode: Mode) -> Path:
    return work.project.state / JUDGED_FOLDER / f"calibration-{judge_identity(settings, mode)[:16]}.json"
