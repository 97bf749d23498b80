"""`graft run --quick --base A --base B`: the same quick trial of several bases, and how they compare.

Input: an open project and the names of two or three bases. Output: a BaseComparison. Every base is trained on
the same rows and answers the same held-out cases, one base after the other; only what its tokenizer and
template make of them differs. The steps of each base have a ledger of their own: a trial that is up to date
is not done again, and the project's own steps and graft.yaml stay as they are.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from graftwork.data.project import PreparedData
from graftwork.evaluate.comparison import compare_with_best, what_cases_show
from graftwork.evaluate.project import Evaluated
from graftwork.evaluate.settings import choose_primary, known_metrics, require_evaluated
from graftwork.grading.metrics import name_of, show_p
from graftwork.pipeline.quick import LAST_STEP, QuickSize, choose_size, shorten
from graftwork.pipeline.run_plan import planned_training, read_time, time_spent
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.table import STEPS, run_pipeline, run_step, with_needs
from graftwork.plan.catalog.bases import find_base_row
from graftwork.plan.stages import add_up
from graftwork.project.init import find_named_base
from graftwork.project.open_project import OpenProject, name_entry
from graftwork.project.settings import OneModel
from graftwork.records.base import Figure, Record
from graftwork.records.errors import NegativeResult, UserError
from graftwork.records.plan import Plan
from graftwork.records.report import Comparison, Metric, SubjectReport
from graftwork.records.run import TrainOutcome
from graftwork.registry.publish import find_licence
from graftwork.text.wording import plural

FEWEST, MOST = 2, 3


class BaseTrial(Record):
    """What a quick trial of one base took and showed."""

    name: str
    """In the catalog, or as graft.yaml would name it."""
    base: str
    """What `base` in graft.yaml would say."""
    license: str | None
    """None if neither the catalog nor its files state one."""
    run_id: str
    planned_minutes: Figure
    minutes: float
    """Of training and evaluation, over all attempts."""
    peak_memory_gib: float
    before: Metric | None
    """The metric of the base itself; None if it could not be measured."""
    after: Metric | None
    """That of its adapter."""
    answers_per_second: float | None
    to_best: Comparison | None = None
    """This adapter less the best one, case by case; None for the best one itself. The intervals of all
    differences hold together at the confidence of graft.yaml.
    """


class BaseComparison(Record):
    """Quick trials of several bases on the same rows and cases, in the order in which they were named."""

    metric: str
    rows: int
    cases: int
    trials: tuple[BaseTrial, ...]
    best: str
    """The name of the base whose adapter has the best figure."""
    alike: tuple[str, ...]
    """Names of bases whose adapters cannot be distinguished from the best one."""
    conclusion: str
    power: str
    """What so few cases can show."""
    take: str
    """What to write into graft.yaml to take the best base."""
    taken: bool
    """Whether graft.yaml has it already."""


def compare_bases(work: OpenProject, names: Sequence[str]) -> BaseComparison:
    metric = _choose_metric(work)
    trials = [_put_on_trial(work, base) for base in _resolve(work, names)]
    _require_different(trials)
    # Every base is planned before the first is trained.
    sizes = [_size_of_trial(trial) for trial in trials]
    size = QuickSize(min(size.rows for size in sizes), min(size.cases for size in sizes))
    datasets = _prepare_same_rows(trials)
    finished = [
        _run_trial(shorten(trial, size), dataset, number=number, of=len(trials))
        for number, (trial, dataset) in enumerate(zip(trials, datasets, strict=True), 1)
    ]
    described = [_describe(trial, outputs, metric) for trial, outputs in zip(trials, finished, strict=True)]
    reports = [outputs.get("evaluate", Evaluated).report for outputs in finished]
    adapters = [
        report.candidate.model_copy(update={"subject": trial.name})
        for trial, report in zip(described, reports, strict=True)
    ]
    _require_figures(adapters, metric)
    settings, sessions = work.project.settings, reports[0].sessions
    confidence = settings.evaluate.confidence
    best, to_best = compare_with_best(adapters, metric=metric, confidence=confidence, sessions=sessions)
    alike = [name for name, pair in to_best.items() if not _differs(pair, confidence)]
    closest = max(to_best.values(), key=lambda pair: pair.p_value)
    base = next(trial.base for trial in described if trial.name == best)
    under = f" (under models.{work.model})" if settings.models else ""
    return BaseComparison(
        metric=metric,
        rows=finished[0].get("train", TrainOutcome).rows,
        cases=reports[0].cases,
        trials=tuple(trial.model_copy(update={"to_best": to_best.get(trial.name)}) for trial in described),
        best=best,
        alike=tuple(alike),
        conclusion=_conclude(best, to_best, alike, metric=metric),
        power=what_cases_show(
            closest.n, comparison=closest, effective=closest.clusters or None, confidence=confidence
        ).sentence,
        take=f"base: {json.dumps(base, ensure_ascii=False)}{under}",
        taken=base == work.settings.base,
    )


def _differs(pair: Comparison, confidence: float) -> bool:
    return pair.adjusted_p is not None and pair.adjusted_p <= 1 - confidence


def _conclude(best: str, to_best: Mapping[str, Comparison], alike: Sequence[str], *, metric: str) -> str:
    parts = [
        f"{best} is better than {name} in {name_of(metric)} ({show_p(pair.adjusted_p or 0.0)})"
        for name, pair in to_best.items()
        if name not in alike
    ]
    if alike:
        cases = plural(min(to_best[name].n for name in alike), "case")
        others = " and ".join(alike)
        parts.append(
            f"{best} cannot be distinguished from {others} with {cases}: let license, time and memory decide"
        )
    return "; ".join(parts)


def _choose_metric(work: OpenProject) -> str:
    """The metric that the gate decides by, or would."""
    evaluate, named = work.settings.evaluate, work.settings.gate.primary
    metric = named if named in known_metrics(evaluate) else choose_primary(evaluate)
    try:
        require_evaluated(metric, evaluate)
    except ValueError as error:
        raise UserError(
            "these bases cannot be compared",
            why=str(error),
            fix="name what makes an answer right under evaluate.checks or evaluate.metrics",
            where="evaluate",
        ) from error
    return metric


def _require_figures(adapters: Sequence[SubjectReport], metric: str) -> None:
    """Which cases a metric applies to may only show when they are graded."""
    unmeasured = [a.subject for a in adapters if metric not in a.metrics or not a.metrics[metric].n]
    if unmeasured:
        raise UserError(
            f"{name_of(metric)} applies to no case of the trial, so the bases cannot be compared",
            why=f"no answer of {' and '.join(unmeasured)} could be graded by it",
            fix="name a metric that grades most cases as gate.primary, and run the same command again: "
            "what was trained is not trained again",
            where="gate.primary",
        )


def _resolve(work: OpenProject, names: Sequence[str]) -> list[str]:
    """The bases as graft.yaml would name them."""
    if not FEWEST <= len(names) <= MOST:
        raise UserError(
            f"--base names {len(names)} of {FEWEST} or {MOST} bases",
            why="a trial compares bases, and more than three take long and are distinguished less surely",
            fix="give --base two or three times; `graft plan catalog bases` lists good ones",
            where="--base",
        )
    otherwise = "give the path of a folder that is one"
    return [find_named_base(name, work.project.root, otherwise=otherwise) for name in names]


def _put_on_trial(work: OpenProject, base: str) -> OpenProject:
    settings = work.project.settings
    if settings.models:
        model: OneModel = settings.models[work.model].model_copy(update={"base": base})
        settings = settings.model_copy(update={"models": {**settings.models, work.model: model}})
    else:
        settings = settings.model_copy(update={"base": base})
    project = replace(work.project, settings=settings)
    return replace(work, project=project, quick=True, base_on_trial=base)


def _require_different(trials: Sequence[OpenProject]) -> None:
    for first, second in combinations(trials, 2):
        if first.base.revision == second.base.revision:
            names = dict.fromkeys((first.settings.base, second.settings.base))
            raise UserError(
                f"the same base is named twice: {' and '.join(names)}",
                why="its two trials would be one and the same run",
                fix="name another base in place of one of them",
                where="--base",
            )


def _size_of_trial(trial: OpenProject) -> QuickSize:
    try:
        return choose_size(trial)
    except NegativeResult as refused:
        raise UserError(
            f"the base {trial.settings.base} does not fit here: {refused.what}",
            why=refused.why,
            fix=f"name a smaller base, or {refused.fix}",
            where="--base",
        ) from refused


def _prepare_same_rows(trials: Sequence[OpenProject]) -> list[PreparedData]:
    """The dataset of each base, without rows that another of them refuses or shortens."""
    from graftwork.data.common_rows import cut_to_common

    prepared = [run_pipeline(trial, upto="prepare").get("prepare", PreparedData) for trial in trials]
    cut = cut_to_common([Path(data.folder) for data in prepared], out=trials[0].project.datasets)
    return [
        data.model_copy(update={"dataset": dataset, "folder": str(folder)})
        for data, (dataset, folder) in zip(prepared, cut, strict=True)
    ]


def _run_trial(trial: OpenProject, data: PreparedData, *, number: int, of: int) -> StepOutputs:
    settings = trial.settings
    trial.reporter.info(
        f"trial {number} of {of}: {settings.base} on {settings.train.max_rows} rows and "
        f"{settings.evaluate.max_cases} cases at most; it is never released"
    )
    outputs = StepOutputs({"prepare": data})
    for step in STEPS:
        if step.name in with_needs(LAST_STEP) and step.name not in outputs.outputs:
            outputs.outputs[step.name] = run_step(trial, step.name, outputs)
    return outputs


def _describe(trial: OpenProject, outputs: StepOutputs, metric: str) -> BaseTrial:
    outcome, evaluated = outputs.get("train", TrainOutcome), outputs.get("evaluate", Evaluated)
    planned = {"train": planned_training(outputs.get("plan", Plan)).seconds}
    seconds = 60 * outcome.minutes
    if (time := read_time(trial, name_entry(trial, "evaluate"))) is not None:
        planned["evaluate"] = time.planned
        seconds += time_spent("evaluate", evaluated, time.seconds)
    base, row = trial.settings.base, find_base_row(trial.settings.base)
    generation = evaluated.report.candidate.generation
    return BaseTrial(
        name=row.name if row is not None else base,
        base=base,
        license=row.license if row is not None else find_licence(Path(trial.base.folder)),
        run_id=outcome.run_id,
        planned_minutes=add_up(planned),
        minutes=seconds / 60,
        peak_memory_gib=outcome.peak_memory_gib,
        before=evaluated.report.baseline.metrics.get(metric),
        after=evaluated.report.candidate.metrics.get(metric),
        answers_per_second=generation.answers / generation.seconds if generation.seconds else None,
    )
