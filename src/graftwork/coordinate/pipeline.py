"""The whole way from logs to a served adapter, on one page.

`STEPS` is the pipeline. Each step stands in a file of its own under `steps/`; here is only their
order, and the rule that nothing is done twice.
"""

import time
from dataclasses import replace

from graftwork.coordinate.lineage import starts_from_main
from graftwork.coordinate.preflight import Preflight, look_ahead, require_ready
from graftwork.coordinate.step import Made, Step
from graftwork.coordinate.steps import audit, evaluate, gate, plan, prepare, release, report, train, try_out
from graftwork.coordinate.workplace import Workplace, now
from graftwork.process import lock
from graftwork.records.base import Record
from graftwork.records.verdict import Verdict

STEPS: tuple[Step, ...] = (
    audit.STEP,  #     what is in the logs, and may it be trained on?
    prepare.STEP,  #   filter, redact, de-duplicate, split, render → a dataset
    plan.STEP,  #      how much memory, how many minutes, said before
    train.STEP,  #     → an adapter, whatever kills the worker
    evaluate.STEP,  #  base and adapter answer the held-out cases
    gate.STEP,  #      deploy, iterate or abort, by rules written beforehand
    release.STEP,  #   content-addressed, with its lineage; champion if the gate says so
    try_out.STEP,  #   served for real, asked through the official client, found in the captures
    report.STEP,  #    one page to show a colleague
)

ONLY_AFTER_DEPLOY = ("release", "try")


def run_pipeline(work: Workplace, *, upto: str | None = None) -> Made:
    """Bring everything up to date that `upto` needs, or all of it."""
    wanted = _with_needs(upto) if upto else {step.name for step in STEPS}
    if "plan" in wanted and starts_from_main(work):
        # What this model goes on from comes first, and is not done again where nothing has changed.
        run_pipeline(replace(work, asked_model=None), upto="train" if "train" in wanted else "plan")
    made, identities = Made({}), dict[str, str]()
    with lock.hold(work.project.state / "pipeline"):
        for step in STEPS:
            if step.name not in wanted or (step.name in ONLY_AFTER_DEPLOY and not _may_deploy(made)):
                continue
            output = _bring_up_to_date(step, work, made, identities, judged="evaluate" in wanted)
            made.outputs[step.name] = output
            identities[step.name] = step.identity(output)
    return made


def dry_run(work: Workplace) -> Preflight:
    """Everything that can be known before training: the dataset, the plan, and what the checks find."""
    made, identities = Made({}), dict[str, str]()
    with lock.hold(work.project.state / "pipeline"):
        for step in (audit.STEP, prepare.STEP, plan.STEP):
            made.outputs[step.name] = output = _bring_up_to_date(step, work, made, identities)
            identities[step.name] = step.identity(output)
    return look_ahead(work, made)


def _bring_up_to_date(
    step: Step, work: Workplace, made: Made, identities: dict[str, str], *, judged: bool = False
) -> Record:
    """`judged` says that what is trained will be evaluated: then it is checked first whether that can be."""
    inputs = step.fingerprint_of(work, made, identities)
    # Each model of a project has its own way; the main one's steps go by their plain names.
    entry = step.name if work.model == work.settings.main_model else f"{step.name}@{work.model}"
    last = work.ledger.get(entry)
    if last is not None and last.fingerprint == inputs:
        output = step.makes.model_validate(last.output)
        if step.still_there(work, output):
            work.narrator.unchanged(step.name, step.title)
            return output
    if judged and step is train.STEP:
        # What would be found only after an hour of training is looked for now.
        require_ready(work, made)
    work.narrator.started(step.name, step.title)
    begun = time.perf_counter()
    output = step.do(work, made)
    seconds = time.perf_counter() - begun
    work.ledger.put(
        entry,
        fingerprint=inputs,
        output=output.model_dump(mode="json"),
        finished_at=now(),
        seconds=seconds,
    )
    work.narrator.finished(step.name, output, seconds)
    return output


def _may_deploy(made: Made) -> bool:
    return "gate" not in made.outputs or made.get("gate", Verdict).decision == "deploy"


def _with_needs(name: str) -> set[str]:
    step = next(step for step in STEPS if step.name == name)
    return {name}.union(*(_with_needs(need) for need in step.needs))
