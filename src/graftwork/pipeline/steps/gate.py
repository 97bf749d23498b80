"""Step: deploy, iterate or abort, by the rules in graft.yaml."""

from pathlib import Path
from typing import Any

from graftwork.evaluate.gate.advice import Training
from graftwork.evaluate.gate.decide import STATISTICS, GateCandidate, decide
from graftwork.evaluate.gate.project import (
    Champion,
    find_better_run,
    keep_report,
    keep_verdict,
    look_for_champion,
    note_rules,
    surroundings_of,
    with_champion,
    with_changes,
)
from graftwork.evaluate.project import Evaluated, doubts_about_judge, judged_metrics
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.project.open_project import OpenProject
from graftwork.records.report import Verdict
from graftwork.records.run import TrainOutcome
from graftwork.train.run_folder import read_steps


def _do(work: OpenProject, made: StepOutputs) -> Verdict:
    judged = gather(work, made)
    verdict = decide(judged.report, judged.settings, training=judged.training, around=judged.around)
    return finish(work, made, judged, verdict)


def gather(work: OpenProject, made: StepOutputs) -> GateCandidate:
    """All that the gate looks at: the report with the champion in it, the rules, how training went."""
    report, outcome = made.get("evaluate", Evaluated).report, made.get("train", TrainOutcome)
    champion = Champion(None)
    if _asks_champion(work):
        champion = look_for_champion(work, adapter_hash=outcome.adapter_hash)
    folder = work.project.runs / outcome.run_id
    steps = tuple(read_steps(folder)) if Path(folder).is_dir() else ()
    return GateCandidate(
        report=with_champion(work, report, champion.release),
        settings=work.settings.gate,
        training=Training(outcome, steps, good=find_better_run(work, outcome, report)),
        around=surroundings_of(champion)._replace(doubts=doubts_about_judge(work)),
    )


def finish(work: OpenProject, made: StepOutputs, judged: GateCandidate, verdict: Verdict) -> Verdict:
    """The verdict, with a note where the rules changed since. What was judged is kept: releases prove it."""
    outcome = made.get("train", TrainOutcome)
    keep_report(work, outcome.adapter_hash, judged.report)
    noted = note_rules(work, outcome.run_id, stage="judged")
    verdict = with_changes(verdict, judged, noted)
    keep_verdict(work, Path(outcome.adapter_folder), verdict)
    return verdict


def _asks_champion(work: OpenProject) -> bool:
    return "champion" in work.settings.gate.subjects_needed()


def _depends_on(work: OpenProject, made: StepOutputs) -> Any:
    rules = {**work.settings.gate.model_dump(mode="json"), "statistics": STATISTICS}
    if judged_metrics(work.settings.gate):
        rules["doubts"] = doubts_about_judge(work)
    if not _asks_champion(work):
        return rules
    found = look_for_champion(work, adapter_hash=made.get("train", TrainOutcome).adapter_hash)
    stand_in = {"instead": found.instead} if found.instead else {}
    return {"rules": rules, "champion": found.release.id if found.release is not None else None, **stand_in}


STEP = PipelineStep(
    name="gate",
    title="decide by the rules",
    needs=("train", "evaluate"),
    makes=Verdict,
    depends_on=_depends_on,
    do=_do,
)
