"""Steps: grade base, adapter, champion and the log's own answers on the same held-out cases; decide.

The gate says deploy, iterate or abort, by the rules in graft.yaml.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from graftwork.data.project import PreparedData
from graftwork.evaluate.ask.worker import GENERATION_FILE
from graftwork.evaluate.cases import (
    choose_worked_example,
    hash_cases,
    read_cases,
    write_cases,
)
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
from graftwork.evaluate.project import (
    Evaluated,
    Grading,
    doubts_about_judge,
    judged_metrics,
    measure_subjects,
    remark_on_log,
    report_on,
)
from graftwork.evaluate.project_subjects import (
    find_champion,
    find_prompt,
    find_trained,
    find_without_repaired,
    hash_case_file,
    read_held_out,
    remark_on_prompts,
    resolve_subject,
    subjects_by_settings,
    with_logged_prompts,
)
from graftwork.evaluate.subjects import (
    CHAMPION,
    LOGGED_PROMPT,
    PROMPTED,
    Asking,
    Lineup,
    NamedSubject,
    Subject,
    parse_subject,
    parse_subjects,
)
from graftwork.files.dataset import read_rows
from graftwork.grading.custom import find_files, hash_own, is_own
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.project.open_project import OpenProject
from graftwork.records.errors import GraftError
from graftwork.records.interaction import Message
from graftwork.records.report import Case, Verdict
from graftwork.records.run import TrainOutcome
from graftwork.train.run_folder import read_steps

QUICK_NOTE = "too little to decide by, and never gated or released; `graft run` trains on all rows"
BASE = "base"
ADAPTER = "adapter"
LOG = "log"
REFERENCES = ("endpoint", "log", "prompt", "logged_prompt")
"""Kinds of subjects that the candidate is measured against and that are not candidates themselves."""


def held_out(work: OpenProject, prepared: PreparedData, *, also: Sequence[str] = ()) -> tuple[Case, ...]:
    """The cases that are held out, as many as the settings allow. `also` names further subjects."""
    cases = read_held_out(work, Path(prepared.folder))
    subjects = (*work.settings.evaluate.subjects, *subjects_by_settings(work), *also)
    return with_logged_prompts(work, cases) if LOGGED_PROMPT in subjects else cases


def worked_example(work: OpenProject, prepared: PreparedData) -> tuple[Message, ...]:
    fields = work.settings.evaluate.fields
    return choose_worked_example(read_rows(Path(prepared.folder), "train"), fields=fields)


def prepare_asking(
    work: OpenProject,
    prepared: PreparedData,
    cases: tuple[Case, ...],
    *,
    subjects: Sequence[str] | None = None,
    shards: int = 1,
) -> Asking:
    """What all subjects share; the prompt of the prompted base only if that is asked."""
    subject_names = subjects
    if subject_names is None:
        subject_names = (*work.settings.evaluate.subjects, *subjects_by_settings(work))
    return Asking(
        put_cases(work, cases),
        example=worked_example(work, prepared),
        prompt=find_prompt(work, prepared) if PROMPTED in subject_names else None,
        shards=shards,
    )


def line_up(work: OpenProject, *, asking: Asking, outcome: TrainOutcome) -> Lineup:
    """Base and adapter; the champion if there is another one; the subjects in the settings; the log."""

    def resolved(subject: NamedSubject) -> Subject:
        return resolve_subject(work, subject, asking=asking, outcome=outcome)

    champion = None
    if find_champion(work, unlike=outcome.adapter_hash) is not None:
        try:
            champion = resolved(parse_subject(CHAMPION))
        except GraftError as trouble:
            # Damaged or of another template: the new one can still be compared with the base.
            work.reporter.info(f"not compared with the champion: {trouble.what}")
    subjects = parse_subjects((*work.settings.evaluate.subjects, *subjects_by_settings(work), LOG))
    further = [subject for subject in subjects if subject.name not in (BASE, ADAPTER, CHAMPION)]
    unrepaired_subjects: tuple[NamedSubject, ...] = ()
    unrepaired = find_without_repaired(work)
    if unrepaired is not None and find_trained(work, unrepaired) is None:
        work.reporter.info(
            f"not compared with {unrepaired}: `graft train --model {unrepaired}` trains it first"
        )
    elif unrepaired is not None:
        # Trained without repaired rows: what the repair was good for is the difference.
        unrepaired_subjects = (parse_subject(f"model:{unrepaired}"),)
    further = [subject for subject in further if subject not in unrepaired_subjects]
    return Lineup(
        baseline=resolved(parse_subject(BASE)),
        candidate=resolved(parse_subject(ADAPTER)),
        champion=champion,
        others=tuple(resolved(subject) for subject in further if subject.kind not in (*REFERENCES, "model")),
        references=tuple(
            resolved(subject)
            for subject in (*unrepaired_subjects, *further)
            if subject.kind in (*REFERENCES, "model")
        ),
    )


def put_cases(work: OpenProject, cases: tuple[Case, ...]) -> Path:
    """Write the file that the workers read the cases from, named by its content."""
    path = work.project.evaluations / f"cases-{hash_cases(cases)[:12]}.jsonl"
    write_cases(path, cases=cases)
    return path


def _evaluate(work: OpenProject, outputs: StepOutputs) -> Evaluated:
    prepared, outcome = outputs.get("prepare", PreparedData), outputs.get("train", TrainOutcome)
    note_rules(work, outcome.run_id, stage="evaluated")
    cases = held_out(work, prepared)
    asking = prepare_asking(work, prepared, cases)
    lineup = line_up(work, asking=asking, outcome=outcome)
    adapter = outcome.adapter_hash
    evaluated = measure_lineup(work, lineup, cases, asking=asking, subject=adapter, prepared=prepared)
    if work.quick:
        rows = f"{work.settings.train.max_rows} rows at most, {len(cases)} cases"
        report = evaluated.report
        remarks = (f"quick trial ({rows}): {QUICK_NOTE}", *report.remarks)
        evaluated = evaluated.model_copy(update={"report": report.model_copy(update={"remarks": remarks})})
    return evaluated.model_copy(update={"champion": _champion_of(work, adapter), "adapter_hash": adapter})


def measure_lineup(
    work: OpenProject,
    lineup: Lineup,
    cases: Sequence[Case],
    *,
    asking: Asking,
    subject: str,
    prepared: PreparedData | None,
) -> Evaluated:
    """Ask and grade every subject, and report. `prepared` is None if the cases are not of the own log."""
    grading = Grading(work, cases)
    scored = measure_subjects(work, lineup, cases=cases, grading=grading)
    report = report_on(
        work,
        lineup,
        cases=cases,
        scored=scored,
        grading=grading,
        subject=subject,
        remarks=(*remark_on_log(scored, prepared=prepared), *remark_on_prompts(work, cases)),
    )
    folders = {subject.name: str(subject.folder) for subject in lineup.all}
    return Evaluated(cases_file=str(asking.cases_file), folders=folders, report=report)


def _champion_of(work: OpenProject, adapter_hash: str) -> str | None:
    """The release that serves at present, unless it is this very adapter."""
    champion = find_champion(work, unlike=adapter_hash)
    return champion.id if champion is not None else None


def _answers_are_there(work: OpenProject, evaluated: Evaluated) -> bool:
    """Return whether the answers exist, and the champion is still the one that was compared with."""
    files = [Path(folder) / GENERATION_FILE for folder in evaluated.folders.values()]
    if not all(path.exists() for path in (*files, Path(evaluated.cases_file))):
        return False
    if not evaluated.adapter_hash:
        return True
    # Promoted, the candidate is the champion itself: then there is nothing to compare.
    return _champion_of(work, evaluated.adapter_hash) in (None, evaluated.champion)


def _evaluation_depends_on(work: OpenProject, _outputs: StepOutputs) -> Any:
    """The settings, and the code of the project's custom metrics, which is next to graft.yaml."""
    settings = work.settings.evaluate
    inputs = settings.model_dump(mode="json")
    own_metrics = [check.metric for check in settings.checks if is_own(check.metric)]
    hashes = {name: hash_own(name, folder=work.project.root) for name in own_metrics}
    for check in settings.checks:
        for name, path in zip(check.files, find_files(check.files, folder=work.project.root), strict=True):
            hashes[name] = sha256(path.read_bytes()).hexdigest()
    inputs = {**inputs, "own": hashes} if hashes else inputs
    inputs = {**inputs, "quick": True} if work.quick else inputs
    if settings.cases is not None:
        inputs = {**inputs, "cases_hash": hash_case_file(work)}
    unrepaired = find_without_repaired(work)
    trained = find_trained(work, unrepaired) if unrepaired is not None else None
    return {**inputs, "without_repaired": trained.adapter_hash} if trained is not None else inputs


def load_cases(evaluated: Evaluated) -> tuple[Case, ...]:
    return read_cases(Path(evaluated.cases_file))


EVALUATE = PipelineStep(
    name="evaluate",
    title="evaluate base and adapter",
    needs=("prepare", "train"),
    makes=Evaluated,
    depends_on=_evaluation_depends_on,
    do=_evaluate,
    identity=lambda evaluated: str(evaluated.report.fingerprint()),
    still_there=_answers_are_there,
)


def _gate(work: OpenProject, outputs: StepOutputs) -> Verdict:
    judged = gather_candidate(work, outputs)
    verdict = decide(judged.report, judged.settings, training=judged.training, around=judged.around)
    return record_verdict(work, outputs, judged, verdict)


def gather_candidate(work: OpenProject, outputs: StepOutputs) -> GateCandidate:
    """Gather the gate's inputs: the report with the champion in it, the rules, how training went."""
    report, outcome = outputs.get("evaluate", Evaluated).report, outputs.get("train", TrainOutcome)
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


def record_verdict(
    work: OpenProject, outputs: StepOutputs, judged: GateCandidate, verdict: Verdict
) -> Verdict:
    """Store the verdict, with a note if the rules changed since. Its evidence is stored: releases prove
    it.
    """
    outcome = outputs.get("train", TrainOutcome)
    keep_report(work, outcome.adapter_hash, judged.report)
    verdict = with_changes(verdict, judged, note_rules(work, outcome.run_id, stage="judged"))
    keep_verdict(work, Path(outcome.adapter_folder), verdict)
    return verdict


def _asks_champion(work: OpenProject) -> bool:
    return "champion" in work.settings.gate.subjects_needed()


def _gate_depends_on(work: OpenProject, outputs: StepOutputs) -> Any:
    rules = {**work.settings.gate.model_dump(mode="json"), "statistics": STATISTICS}
    if judged_metrics(work.settings.gate):
        rules["doubts"] = doubts_about_judge(work)
    if not _asks_champion(work):
        return rules
    champion = look_for_champion(work, adapter_hash=outputs.get("train", TrainOutcome).adapter_hash)
    stand_in = {"instead": champion.instead} if champion.instead else {}
    return {
        "rules": rules,
        "champion": champion.release.id if champion.release is not None else None,
        **stand_in,
    }


GATE = PipelineStep(
    name="gate",
    title="decide by the rules",
    needs=("train", "evaluate"),
    makes=Verdict,
    depends_on=_gate_depends_on,
    do=_gate,
)
