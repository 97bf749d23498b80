"""Trains the run of a cycle at another place, once: an open job is followed, a finished one is taken.

Which place is chosen is decided in `choose_place`; a planner of the week can take its part there.
"""

from dataclasses import dataclass

from graftwork.cycle.state import CycleState
from graftwork.fleet.control import what_failed
from graftwork.pipeline.fleet_jobs import (
    FleetRequest,
    find_jobs,
    follow,
    planned_there,
    require_done,
    start_run,
    stop,
)
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.run_identity import run_id_of
from graftwork.pipeline.step import StepOutputs
from graftwork.records.fleet import FleetJob
from graftwork.records.plan import Plan
from graftwork.store.cycles import name_cycle
from graftwork.train.run_folder import OUTCOME


@dataclass(frozen=True)
class PlaceChoice:
    """Where the next run trains, and the most that it may cost there."""

    place: str
    gpu: str = ""
    max_usd: float | None = None


def choose_place(work: OpenProject) -> PlaceChoice:
    """The place of the settings. The schedule of a week replaces this choice."""
    cycle = work.settings.cycle
    return PlaceChoice(cycle.place, gpu=cycle.gpu)


def train_at_place(work: OpenProject, made: StepOutputs) -> StepOutputs:
    """Bring the result of the run into its folder here; raises what kept the job from finishing.

    Returns `made` with the plan that was trained: that for the device of the place, whose run has another id.
    """
    if (trained := find_trained(work, made)) is not None:
        return trained
    job = next((job for job in find_jobs(work, made.get("plan", Plan)) if job.is_open), None)
    if job is None:
        choice = choose_place(work)
        request = FleetRequest(place=choice.place, gpu=choice.gpu, max_usd=choice.max_usd)
        # The caps of the fleet are the confirmation: the ledger refuses what could break one.
        job = start_run(work, request, confirm=lambda _quote: True, made=made)
    require_done(work, follow(work, job))
    return _with_plan(work, made, job)


def find_trained(work: OpenProject, made: StepOutputs) -> StepOutputs | None:
    """`made` with the plan that was trained, here or at a place; None: its run is not complete."""
    plan = made.get("plan", Plan)
    if (work.project.runs / run_id_of(plan) / OUTCOME).exists():
        return made
    for job in find_jobs(work, plan):
        if (work.project.runs / job.run_id / OUTCOME).exists():
            return _with_plan(work, made, job)
    return None


def _with_plan(work: OpenProject, made: StepOutputs, job: FleetJob) -> StepOutputs:
    there = planned_there(work, job)
    return StepOutputs({**made.outputs, "plan": there}) if there is not None else made


def stop_jobs(work: OpenProject, cycle: CycleState) -> None:
    """Stop the open jobs of a canceled cycle. The fleet's reconciliation repeats what fails here."""
    plan = _planned_in(work, cycle)
    jobs = find_jobs(work, plan) if plan is not None else []
    for job in jobs:
        if job.is_open and not _trains_in_another(work, cycle, job):
            try:
                stop(work, job, at_once=True)
            except Exception as error:  # whatever a place may raise: the other jobs are stopped all the same
                work.reporter.info(f"job {job.id} at {job.place} is not stopped yet: {what_failed(error)}")
            else:
                work.reporter.info(f"job {job.id} at {job.place} is stopped: the cycle was canceled")


def _planned_in(work: OpenProject, cycle: CycleState) -> Plan | None:
    entry = work.ledger.get(name_cycle(cycle.number, "plan"))
    return Plan.model_validate(entry.output) if entry is not None else None


def _trains_in_another(work: OpenProject, cycle: CycleState, job: FleetJob) -> bool:
    """Whether the cycle that is open now follows this job: the same data and settings are the same run."""
    found = work.cycles.read().open_cycle
    if found is None or found.number == cycle.number:
        return False
    step, plan = found.step("train"), _planned_in(work, found)
    if step is None or step.status == "waiting" or plan is None:
        return False
    return any(known.id == job.id for known in find_jobs(work, plan))
