"""How long each step took next to what was planned for it, part by part.

In: a step, its plan right before it was done, its output. Out: a StageTime in the project's ledger, which
`graft status --json` shows: where a whole run was off, it names the part.
"""

from collections.abc import Mapping

from graftwork.pipeline.evaluation import Evaluated
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.steps.release import TryOut
from graftwork.plan.residuals import TIME
from graftwork.records.base import Figure, Record
from graftwork.records.plan import Plan
from graftwork.records.run import TrainOutcome


class PlannedStage(Record):
    """Before a step is done."""

    seconds: Figure
    parts: dict[str, float] = {}


class StageTime(Record):
    """The last time that a step was done. Parts are seconds; what was not measured apart is absent."""

    seconds: float
    planned: Figure
    planned_parts: dict[str, float] = {}
    parts: dict[str, float] = {}


def planned_training(plan: Plan) -> PlannedStage:
    minutes, head = plan.minutes, f"{TIME}."
    return PlannedStage(
        seconds=Figure(value=60 * minutes.value, low=60 * minutes.low, high=60 * minutes.high, unit="s"),
        parts={
            name.removeprefix(head): 60 * figure.value
            for name, figure in plan.parts.items()
            if name.startswith(head)
        },
    )


def note_time(
    work: OpenProject, entry: str, planned: PlannedStage, *, output: Record, seconds: float
) -> None:
    """Keep it under the name of the step's own entry."""
    found = StageTime(
        seconds=seconds,
        planned=planned.seconds,
        planned_parts=planned.parts,
        parts={name: taken for name, taken in measured_parts(output).items() if taken},
    )
    work.ledger.put(
        _name(entry),
        fingerprint=found.fingerprint(),
        output=found.model_dump(mode="json"),
        finished_at=timestamp(),
        seconds=0.0,
    )


def read_time(work: OpenProject, entry: str) -> StageTime | None:
    found = work.ledger.get(_name(entry))
    try:
        return None if found is None else StageTime.model_validate(found.output)
    except ValueError:
        return None  # of another version


def measured_parts(output: Record) -> Mapping[str, float]:
    """Seconds of what was measured apart."""
    if isinstance(output, TrainOutcome):
        head = f"{TIME}."
        return {
            residual.name.removeprefix(head): 60 * residual.actual
            for residual in output.residual_parts
            if residual.name.startswith(head)
        }
    if isinstance(output, Evaluated):
        return _parts_of_evaluation(output)
    return output.seconds if isinstance(output, TryOut) else {}


def _parts_of_evaluation(output: Evaluated) -> dict[str, float]:
    report = output.report
    subjects = (report.baseline, report.candidate, *report.others)
    made = [subject.generation for subject in subjects if subject.subject != "log"]
    return {
        "load": sum(generation.times.get("load", 0.0) for generation in made),
        "recording": sum(generation.times.get("recording", 0.0) for generation in made),
        "answering": sum(generation.seconds for generation in made),
        "single requests": sum(sum(generation.single_latency_seconds) for generation in made),
    }


def _name(entry: str) -> str:
    return f"{entry}.time"
