"""The table of steps, from logs to a served adapter, and `run_pipeline`, which brings them up to date.

Input: an open project and how far to go. Output: the outputs of the steps. A step whose inputs have not
changed is not done again. What a step does is in `steps/`.
"""

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from graftwork.pipeline.run_plan import (
    PlannedStage,
    describe_remaining,
    gather_facts,
    note_time,
    plan_run,
    planned_training,
    record_stage,
    size_of_logs,
    time_spent,
)
from graftwork.pipeline.step import PipelineStep, StepInputs, StepOutputs, StepWalk, name_inputs
from graftwork.pipeline.steps import data, evaluate, plan, release, train
from graftwork.pipeline.steps.plan import starts_from_main
from graftwork.plan.stages import estimate_stage, stage_parts
from graftwork.process.local_workers import LocalWorkers
from graftwork.process.worker import hold_lock
from graftwork.project.open_project import OpenProject, name_entry, timestamp
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, Stale
from graftwork.records.plan import Plan, RunPlan
from graftwork.records.report import Verdict

if TYPE_CHECKING:
    from graftwork.pipeline.preflight import Preflight

STEPS: tuple[PipelineStep, ...] = (
    # step                needs                    makes
    data.AUDIT,  #        logs                     Audit: what is in the logs, may they be trained on?
    data.PREPARE,  #      logs                     PreparedData: filter, redact, deduplicate, split, render
    plan.STEP,  #         prepare                  Plan: memory, minutes, settings of the run
    train.STEP,  #        prepare, plan            TrainOutcome: an adapter; survives a killed worker
    evaluate.EVALUATE,  # prepare, train           Evaluated: base and adapter answer held-out cases
    evaluate.GATE,  #     train, evaluate          Verdict: deploy, iterate or abort, by rules set before
    release.RELEASE,  #   all of them but audit    Release: content-addressed, with lineage; alias moved
    release.TRY_OUT,  #   evaluate, release        TryOut: served, asked through the official client
    release.REPORT,  #    all but release and try  WrittenReport: one page
)
"""The steps of `graft run`. Each is defined in `steps/` with its inputs, output and identity."""

ONLY_AFTER_DEPLOY = ("release", "try")
WORKER_STEPS = {"train", "evaluate"}
"""Steps that start workers, whose modules are imported while the steps before them run."""
WORKER_MODULES = (
    "graftwork.train.multi_run",
    "graftwork.train.loop",
    "graftwork.train.rollouts.project",
    "graftwork.evaluate.ask.runner",
    "graftwork.model.adapters.peft",
    "graftwork.model.generate.generator",
    "graftwork.engines.constrained",
    "graftwork.http.server",
    "graftwork.engines.process",
    "graftwork.engines.embedded_process",
)
"""Modules that workers import besides libraries. None starts a thread or is the program of a worker."""


def run_pipeline(
    work: OpenProject, *, upto: str | None = None, may_do: Collection[str] | None = None
) -> StepOutputs:
    """Bring everything that `upto` needs up to date, or all steps. With `may_do`, only these steps run; any
    other that is out of date is an error.
    """
    step_names = with_needs(upto) if upto else {step.name for step in STEPS}
    if "plan" in step_names and starts_from_main(work):
        # What this model starts from comes first, and is not done again where nothing has changed.
        goal = "train" if "train" in step_names else "plan"
        run_pipeline(replace(work, asked_model=None), upto=goal, may_do=may_do)
    walk = StepWalk(work)
    outputs = walk.outputs
    with hold_lock(work.project.state / "pipeline"):
        for step in STEPS:
            if step.name not in step_names or (step.name in ONLY_AFTER_DEPLOY and not _may_deploy(outputs)):
                continue
            allowed = may_do is None or step.name in may_do
            trains = allowed and step is train.STEP and not walk.is_fresh(step)
            if trains and "evaluate" in step_names:
                # What would be found only after an hour of training is looked for now.
                _require_ready(work, outputs)
            later = {later_step.name for later_step in STEPS[STEPS.index(step) :]}
            soon = bool(later & WORKER_STEPS & set(step_names))
            walk.take(step, _update(step, work, walk, allowed=allowed, needs_workers=soon))
            if step.name == "plan" and upto is None and not walk.is_fresh(train.STEP):
                # The dataset is known now: a better estimate than the one at the start.
                work.reporter.info(describe_remaining(plan_whole_run(work, outputs=outputs)))
    return outputs


def run_step(work: OpenProject, name: str, outputs: StepOutputs) -> Record:
    """Bring one step up to date, from the given outputs. Changes since then are ignored: a cycle continues
    with the data it began with.
    """
    step = get_step(name)
    walk = StepWalk(work)
    for step_name, output in outputs.outputs.items():
        walk.take(get_step(step_name), output)
    if name == "plan" and starts_from_main(work):
        run_pipeline(replace(work, asked_model=None), upto="train")
    with hold_lock(work.project.state / "pipeline"):
        if step is train.STEP and not walk.is_fresh(step):
            _require_ready(work, outputs)
        return _update(step, work, walk, allowed=True, needs_workers=name in WORKER_STEPS)


def finish_run(work: OpenProject, outputs: StepOutputs) -> StepOutputs:
    """Do the steps after those of `outputs`, which are used as given: train, evaluate, gate, release."""
    done = StepOutputs(dict(outputs.outputs))
    for step in STEPS:
        if step.name in done.outputs or (step.name in ONLY_AFTER_DEPLOY and not _may_deploy(done)):
            continue
        done.outputs[step.name] = run_step(work, step.name, done)
    return done


def _require_ready(work: OpenProject, outputs: StepOutputs) -> None:
    from graftwork.pipeline.preflight import require_ready

    if work.quick:
        # A trial is not gated, and so few cases could prove no rule. Metrics are tried all the same.
        gate = work.project.settings.gate.model_copy(update={"rules": ()})
        settings = work.project.settings.model_copy(update={"gate": gate})
        work = replace(work, project=replace(work.project, settings=settings))
    require_ready(work, outputs, plan_whole_run(work, outputs=outputs))


def get_step(name: str) -> PipelineStep:
    return next(step for step in STEPS if step.name == name)


def plan_whole_run(work: OpenProject, *, outputs: StepOutputs | None = None) -> RunPlan:
    """How long `run_pipeline` is expected to take, stage by stage. Nothing is done.

    `outputs` holds the outputs of the steps that are up to date, where that is already known.
    """
    return plan_run(work, STEPS, only_after_deploy=ONLY_AFTER_DEPLOY, outputs=outputs)


def dry_run(work: OpenProject) -> "Preflight":
    """Everything that can be known before training: the dataset, the plan, and the findings of the checks."""
    from graftwork.pipeline.preflight import run_preflight

    walk = StepWalk(work)
    with hold_lock(work.project.state / "pipeline"):
        for step in (data.AUDIT, data.PREPARE, plan.STEP):
            walk.take(step, _update(step, work, walk, allowed=True))
    return run_preflight(work, walk.outputs, plan_whole_run(work, outputs=walk.outputs))


def _update(
    step: PipelineStep,
    work: OpenProject,
    walk: StepWalk,
    *,
    allowed: bool,
    needs_workers: bool = False,
) -> Record:
    inputs, outputs = walk.inputs_of(step), walk.outputs
    entry = name_entry(work, step.name)
    if (fresh_output := walk.find_fresh(step, inputs)) is not None:
        last_inputs = work.ledger.get(name_inputs(work, step.name))
        if last_inputs is None or last_inputs.fingerprint != inputs.fingerprint:
            _keep_inputs(work, step, inputs)
        work.reporter.unchanged(step.name, step.title)
        return fresh_output
    if not allowed:
        raise Stale(
            f"`{step.name}` is not up to date",
            why="this command only judges existing results",
            fix="`graft status` says what has changed; `graft run` runs the steps that are out of date",
            where=work.model,
        )
    if needs_workers and isinstance(work.place, LocalWorkers):
        work.place.warm_up(further=WORKER_MODULES)
    work.reporter.started(step.name, step.title)
    # What is computed for the stage before it is done; None if nothing can be.
    expected = None
    if step is train.STEP:
        expected = planned_training(outputs.get("plan", Plan))
    else:
        with suppress(GraftError, OSError):  # the step itself says what is wrong
            facts = gather_facts(work, outputs, size=size_of_logs(work))
            seconds = estimate_stage(step.name, facts)
            expected = PlannedStage(seconds=seconds, parts=stage_parts(step.name, facts))
    started_at = time.perf_counter()
    output = step.do(work, outputs)
    took = time.perf_counter() - started_at
    if expected is not None:
        record_stage(work, step.name, expected.seconds, seconds=time_spent(step.name, output, took))
        note_time(work, entry, expected, output=output, seconds=took)
    work.ledger.put(
        entry,
        fingerprint=inputs.fingerprint,
        output=output.model_dump(mode="json"),
        finished_at=timestamp(),
        seconds=took,
    )
    _keep_inputs(work, step, inputs)
    work.reporter.finished(step.name, output, took)
    return output


def _may_deploy(outputs: StepOutputs) -> bool:
    return "gate" not in outputs.outputs or outputs.get("gate", Verdict).decision == "deploy"


def with_needs(name: str) -> set[str]:
    """The step and all that it needs, by name."""
    step = next(step for step in STEPS if step.name == name)
    return {name}.union(*(with_needs(need) for need in step.needs))


def _keep_inputs(work: OpenProject, step: PipelineStep, inputs: StepInputs) -> None:
    """Store the inputs so that `graft status` can name what has changed since."""
    work.ledger.put(
        name_inputs(work, step.name),
        fingerprint=inputs.fingerprint,
        output=dict(inputs.parts),
        finished_at=timestamp(),
        seconds=0.0,
    )
