"""Training runs to look at: their list, one run with its curves and events, and two runs compared.

Input: a project and the id of a run. Output: records. A run whose folder is incomplete is shown as far as it
can be read. Starting a run in the background and stopping one are here too; nothing else changes anything.
"""

import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from graftwork.api.project import PAGE_SIZE, Page, Project, number_page
from graftwork.files.disk import Journal
from graftwork.pipeline.status import RunStatus, describe_run
from graftwork.pipeline.steps.plan import run_id_of
from graftwork.process import worker
from graftwork.process.local_workers import LOG_FILE
from graftwork.project.open_project import OpenProject
from graftwork.records.base import Record
from graftwork.records.errors import UserError, WorkerFailed
from graftwork.records.fleet import Vitals
from graftwork.records.plan import Plan, Residual
from graftwork.records.release import ReleaseEntry
from graftwork.records.run import AnswerExtremes, RunState, TrainingEvaluation, TrainOutcome, TrainStep
from graftwork.store.runs import RunEntry
from graftwork.train import runs
from graftwork.train.rollouts.episodes import read_extremes
from graftwork.train.run_folder import CHECKPOINTS, EVALUATIONS, STEPS
from graftwork.train.runs import POLL_SECONDS, BackgroundRun, Event, Events, StopResult, find_run, read_vitals

LOG_TAIL_BYTES = 16_384
MOST_EVENTS = 200
LAST_BATCHES, SHOWN_ANSWERS = 5, 5
STATES: tuple[RunState, ...] = get_args(RunState)


class RunView(Record):
    """Everything about a run. `missing` names what could not be read."""

    entry: RunEntry
    status: RunStatus
    plan: Plan | None
    outcome: TrainOutcome | None
    steps: tuple[TrainStep, ...]
    looks: tuple[TrainingEvaluation, ...]
    vitals: tuple[Vitals, ...]
    checkpoints: tuple[str, ...]
    log_tail: str
    missing: tuple[str, ...] = ()


class Difference(Record):
    """A value of two runs or releases. `better` is `a`, `b` or empty, where one is better."""

    section: str
    name: str
    a: Any
    b: Any
    better: str = ""
    same: bool = False


class TwoCompared(Record):
    """Two runs, or two releases, side by side."""

    a: RunEntry | ReleaseEntry
    b: RunEntry | ReleaseEntry
    rows: tuple[Difference, ...]


def list_runs(
    project: Project, *, state: str = "", page: int = 1
) -> tuple[Page[RunEntry], dict[RunState, int]]:
    """A page of runs, the newest first; how many there are by their state."""
    chosen = next((known for known in STATES if known == state), None)
    with project.open() as work:
        counts = work.runs.count()
        total = counts.get(chosen, 0) if chosen else sum(counts.values())
        page, pages = number_page(page, total)
        entries = work.runs.list(limit=PAGE_SIZE, offset=(page - 1) * PAGE_SIZE, state=chosen)
        return Page[RunEntry](items=entries, total=total, page=page, pages=pages), counts


def read_run(project: Project, run_id: str) -> RunView:
    with project.open() as work:
        entry = _require_run(work, run_id)
        status = describe_run(entry)
    folder = Path(entry.folder)
    missing = [] if folder.is_dir() else [f"its folder {folder} is gone"]
    steps = read_curve(folder)
    if entry.state == "done" and not steps and not missing:
        missing.append("its journal of steps is gone")
    plan, outcome = _read_plan(entry), _read_outcome(entry)
    checkpoints = (folder / CHECKPOINTS).iterdir() if (folder / CHECKPOINTS).is_dir() else ()
    log_tail = ""
    with suppress(OSError), (folder / LOG_FILE).open("rb") as handle:
        size = handle.seek(0, 2)
        handle.seek(max(size - LOG_TAIL_BYTES, 0))
        text = handle.read().decode(errors="replace")
        log_tail = text.partition("\n")[2] if size > LOG_TAIL_BYTES else text
    if outcome is not None and not Path(outcome.adapter_folder).is_dir():
        missing.append("its adapter is gone; `graft train` trains it again")
    return RunView(
        entry=entry,
        status=status,
        plan=plan,
        outcome=outcome,
        steps=steps,
        looks=_read_evaluations(folder, outcome),
        vitals=read_vitals(folder),
        checkpoints=tuple(sorted(path.name for path in checkpoints if path.is_dir())),
        log_tail=log_tail,
        missing=tuple(missing),
    )


def read_curve(folder: Path, *, after: int = 0) -> tuple[TrainStep, ...]:
    """The steps after a step, in the order of the journal; lines of another version are left out."""
    found = []
    for line in Journal(folder / STEPS).read():
        try:
            step = TrainStep.model_validate(line)
        except ValidationError:
            continue
        if step.step > after:
            found.append(step)
    return tuple(found)


def _read_evaluations(folder: Path, outcome: TrainOutcome | None) -> tuple[TrainingEvaluation, ...]:
    if outcome is not None:
        return outcome.looks
    evaluations = []
    for line in Journal(folder / EVALUATIONS).read():
        with suppress(ValidationError, KeyError):
            evaluations.append(TrainingEvaluation.model_validate(line["evaluation"]))
    return tuple(evaluations)


def read_run_curve(
    project: Project, run_id: str, *, after: int = 0
) -> tuple[tuple[TrainStep, ...], tuple[TrainingEvaluation, ...]]:
    """The steps after this one, and all evaluations during the training."""
    with project.open() as work:
        entry = _require_run(work, run_id)
    folder = Path(entry.folder)
    return read_curve(folder, after=after), _read_evaluations(folder, _read_outcome(entry))


def list_events(project: Project, run_id: str, *, kind: str = "") -> tuple[Event, ...]:
    """The last events of a run, the newest first: messages, alerts, checkpoints, evaluations, output."""
    with project.open() as work:
        entry = _require_run(work, run_id)
    events = [event for event in Events(Path(entry.folder)).new() if not kind or event.kind == kind]
    return tuple(reversed(events[-MOST_EVENTS:]))


def list_answer_extremes(project: Project, run_id: str) -> AnswerExtremes | None:
    """The best and the worst sampled answers of the last batches; None for a run without rewards."""
    with project.open() as work:
        entry = _require_run(work, run_id)
    return read_extremes(Path(entry.folder), most=SHOWN_ANSWERS, batches=LAST_BATCHES)


def compare_runs(project: Project, a: str, b: str) -> TwoCompared:
    """Plan, settings, measured figures and losses of two runs, side by side."""
    with project.open() as work:
        first, second = _require_run(work, a), _require_run(work, b)
    rows = [
        *list_differences("measured", _measured(first), _measured(second)),
        *list_differences(
            "settings", flatten(first.plan.get("train", {})), flatten(second.plan.get("train", {}))
        ),
        *list_differences("plan", _planned(first), _planned(second)),
    ]
    return TwoCompared(a=first, b=second, rows=tuple(rows))


def list_differences(section: str, left: dict[str, Any], right: dict[str, Any]) -> list[Difference]:
    """List every value that at least one of the two has, with both values."""
    differences = []
    for name in dict.fromkeys((*left, *right)):
        a, b, better = left.get(name), right.get(name), ""
        is_ranked = name in LESS_IS_BETTER | MORE_IS_BETTER
        if is_ranked and isinstance(a, int | float) and isinstance(b, int | float) and a != b:
            better = "a" if (a < b) == (name in LESS_IS_BETTER) else "b"
        differences.append(Difference(section=section, name=name, a=a, b=b, same=a == b, better=better))
    return differences


def stop_run(project: Project, run_id: str | None = None) -> StopResult:
    """Ask the running work to stop at its next checkpoint. Does not wait."""
    with project.open() as work:
        return runs.stop_run(work, run_id, wait=False)


def start_in_background(project: Project, command: str = "run", *, plan: bool = False) -> BackgroundRun:
    """Start `graft COMMAND` in a process of its own, and wait until it holds the lock of the project.

    With `plan`, the steps up to the plan run here first: their errors show here, and the run has an id.
    """
    folder = project.folder
    holder = worker.lock_holder(folder.state / "pipeline")
    if holder is not None:
        with project.open() as work:
            current = find_run(work)
        running = current.id if current is not None and current.state == "running" else None
        return BackgroundRun(state="already running", run=running, pid=holder, log=None)
    run = run_id_of(project.plan()) if plan else None
    log = folder.state / "logs" / f"{run or command}.log"
    arguments = [sys.executable, "-m", "graftwork.cli.main", command, "-C", str(folder.root)]
    arguments += ["--model", project.model] if project.model else []
    child = worker.start_detached(arguments, log=log, folder=folder.root)
    pause = threading.Event()
    while child.poll() is None and worker.lock_holder(folder.state / "pipeline") != child.pid:
        pause.wait(POLL_SECONDS)
    if child.returncode:
        last_lines = log.read_text(errors="replace").splitlines()[-12:]
        raise WorkerFailed(
            f"the background process ended at once, with exit code {child.returncode}",
            why="\n".join(last_lines) or "it left no output",
            fix="fix the error above, then run the same command again",
            where=str(log),
        )
    state: Literal["started", "nothing left to do"] = (
        "started" if child.returncode is None else "nothing left to do"
    )
    return BackgroundRun(state=state, run=run, pid=child.pid, log=str(log))


def _require_run(work: OpenProject, run_id: str) -> RunEntry:
    entry = work.runs.get(run_id) or (find_run(work, run_id) if run_id else None)
    if entry is None:
        raise UserError(f"there is no run {run_id}", fix="choose one from the list of runs")
    return entry


def _read_plan(entry: RunEntry) -> Plan | None:
    try:
        return Plan.model_validate(entry.plan)
    except ValidationError:
        return None


def _read_outcome(entry: RunEntry) -> TrainOutcome | None:
    try:
        return TrainOutcome.model_validate(entry.outcome) if entry.outcome is not None else None
    except ValidationError:
        return None


LESS_IS_BETTER = {"final loss", "validation loss", "minutes", "peak memory, GiB", "restarts"}
MORE_IS_BETTER = {"tokens per second"}


def _measured(entry: RunEntry) -> dict[str, Any]:
    outcome = _read_outcome(entry)
    if outcome is None:
        return {"state": entry.state}
    return {
        "state": entry.state,
        "final loss": outcome.final_loss,
        "validation loss": outcome.validation_loss_after,
        "steps": outcome.steps,
        "rows": outcome.rows,
        "minutes": outcome.seconds / 60,
        "tokens per second": outcome.tokens_per_second,
        "peak memory, GiB": outcome.peak_memory_gib,
        "restarts": outcome.restarts,
    }


def _planned(entry: RunEntry) -> dict[str, Any]:
    plan = _read_plan(entry)
    if plan is None:
        return {}
    device = plan.device
    return {
        "base": plan.base,
        "dataset": plan.dataset_hash[:12],
        "device": device.name,
        "planned minutes": plan.minutes.value,
        "planned memory, GiB": plan.peak_memory_gib.value,
        "trainable parameters": plan.trainable_parameters.value,
    }


def flatten(value: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Settings by their path, such as `eval.every`."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= (
            flatten(inner, f"{path}{key}.") if isinstance(inner, dict) and inner else {f"{path}{key}": inner}
        )
    return flat


def residuals_of(view: RunView) -> tuple[Residual, ...]:
    """Plan against reality; empty until the run is done."""
    return view.outcome.residuals if view.outcome is not None else ()
