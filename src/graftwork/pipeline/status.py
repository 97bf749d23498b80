"""Which steps are up to date, which are not and since which change, and what doing them takes.

Input: an open project. Output: the state of each step in the order of the pipeline. Reads the logs to hash
them, and does nothing else: asking never starts a step.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from graftwork.evaluate.live.drift import measure_drift
from graftwork.evaluate.live.shadow import summarize_shadow
from graftwork.pipeline import table
from graftwork.pipeline.run_plan import StageTime, read_time
from graftwork.pipeline.step import PipelineStep, StepOutputs, StepWalk
from graftwork.pipeline.steps.plan import starts_from_main
from graftwork.pipeline.table import plan_whole_run
from graftwork.process import clock
from graftwork.process.heartbeat import HealthReport, Patience, assess_health, process_state, read_beat
from graftwork.process.http_client import NoAnswer
from graftwork.process.worker import lock_holder
from graftwork.project.open_project import OpenProject, name_entry
from graftwork.records.base import Figure, Record
from graftwork.records.errors import GraftError, Stale
from graftwork.records.fleet import Beat, Health, Vitals
from graftwork.records.live import PromptDrift, ShadowSummary
from graftwork.records.plan import Plan
from graftwork.records.report import Verdict
from graftwork.serve.captures import CaptureTotals, read_totals
from graftwork.serve.own_endpoint import OwnEndpoint
from graftwork.serve.settings import ServeSettings
from graftwork.store.runs import RunEntry
from graftwork.text.wording import duration
from graftwork.week.follow import WeekStatus, current_week

State = Literal["fresh", "running", "stale", "missing", "not_due", "done"]
"""`done`: it was not compared with its inputs."""


class StepState(Record):
    """A step is running if it is the first open one while another process works on the project. `because`
    says what changed since a stale step was done, or why a step is not due.
    """

    step: str
    title: str
    state: State
    because: tuple[str, ...] = ()
    finished_at: str | None = None
    seconds: float | None = None
    time: StageTime | None = None
    """The last time with its plan, part by part; None if it was done by an earlier version."""
    expected_seconds: float | None = None
    """Expected time of the step: by the plan, or by its last run. None if neither is known."""


def examine_steps(work: OpenProject, *, upto: str | None = None) -> tuple[StepState, ...]:
    """The state of every step that `upto` needs, or of all."""
    names = table.with_needs(upto) if upto else {step.name for step in table.STEPS}
    walk = StepWalk(work)
    return tuple(_examine(work, walk, step) for step in table.STEPS if step.name in names)


def _examine(work: OpenProject, walk: StepWalk, step: PipelineStep) -> StepState:
    name = name_entry(work, step.name)
    entry, plan = work.ledger.get(name), walk.outputs.outputs.get("plan")
    expected = entry.seconds if entry else None
    if step.name == "train" and isinstance(plan, Plan):
        expected = plan.minutes.value * 60
    state: State = "missing"
    because: tuple[str, ...] = ()
    if step.name in table.ONLY_AFTER_DEPLOY and not _says_deploy(walk.outputs):
        state, because = "not_due", ("the gate has not said deploy",)
    elif entry is not None:
        because = walk.take_if_fresh(step)
        state = "stale" if because else "fresh"
    return StepState(
        step=step.name,
        title=step.title,
        state=state,
        because=because,
        finished_at=entry.finished_at if entry else None,
        seconds=entry.seconds if entry else None,
        time=read_time(work, name) if entry else None,
        expected_seconds=expected,
    )


def list_steps(work: OpenProject) -> tuple[StepState, ...]:
    """Return whether every step was done, and when; its inputs are not checked."""
    times = work.ledger.times()
    steps = []
    for step in table.STEPS:
        entry = times.get(name_entry(work, step.name))
        undone: State = "not_due" if step.name in table.ONLY_AFTER_DEPLOY else "missing"
        steps.append(
            StepState(
                step=step.name,
                title=step.title,
                state="done" if entry else undone,
                finished_at=entry.finished_at if entry else None,
                seconds=entry.seconds if entry else None,
            )
        )
    return tuple(steps)


def _says_deploy(outputs: StepOutputs) -> bool:
    verdict = outputs.outputs.get("gate")
    return isinstance(verdict, Verdict) and verdict.decision == "deploy"


def find_running(work: OpenProject, steps: tuple[StepState, ...]) -> tuple[StepState, ...]:
    """The states with the step that another process is doing now: the first that is not up to date."""
    if lock_holder(work.project.state / "pipeline") is None:
        return steps
    running = next((state.step for state in steps if state.state in ("stale", "missing")), None)
    changes = {"state": "running", "because": ()}
    return tuple(state.model_copy(update=changes) if state.step == running else state for state in steps)


def require_fresh(work: OpenProject, *, upto: str, update: str) -> None:
    """Refuse if something that `upto` needs is out of date; `update` is the command that updates it."""
    if starts_from_main(work):
        require_fresh(replace(work, asked_model=None), upto="train", update=update)
    states = examine_steps(work, upto=upto)
    open_ones = [state for state in states if state.state in ("stale", "missing")]
    # Judging takes no time: a step that only has to judge again is not out of date.
    if upto == "gate" and not [state for state in open_ones if state.step != "gate"]:
        return
    if not open_ones:
        return
    names = ", ".join(f"`{state.step}`" for state in open_ones)
    raise Stale(
        f"{names} {'is' if len(open_ones) == 1 else 'are'} not up to date",
        why="; ".join(_explain(state) for state in open_ones if state.step != "gate"),
        fix=f"`{update}` does {'it' if len(open_ones) == 1 else 'them'} first"
        + (f" (about {duration(seconds)})" if (seconds := expect_seconds(open_ones)) else "")
        + "; `graft status` shows every step",
        where=work.model,
    )


def expect_seconds(states: list[StepState] | tuple[StepState, ...]) -> float | None:
    """Total time of these steps; None if a long one is unknown."""
    expected = [state.expected_seconds for state in states if state.expected_seconds is not None]
    unknown = [state.step for state in states if state.expected_seconds is None]
    return None if not expected or {"train", "evaluate"} & set(unknown) else sum(expected)


def _explain(state: StepState) -> str:
    if state.state == "missing":
        return f"`{state.step}` was never done"
    return f"`{state.step}` is stale: {', '.join(state.because)}"


ENDPOINT_SECONDS = 10.0
"""An endpoint on a busy machine answers late; if none listens, that is known at once."""
_MOST_BYTES = 1 << 20


class NextRun(Record):
    """What `graft run` would do now, in order, and how long that takes if known."""

    command: str = "graft run"
    steps: tuple[str, ...]
    seconds: float | None
    minutes: tuple[float, float] | None = None
    """The range of the whole run by its plan."""


class EndpointStatus(Record):
    """`state` is what /health says (ok, starting, down), or off if nothing answers, or other."""

    url: str
    state: str
    aliases: dict[str, str] = {}
    reason: str = ""


class RunStatus(Record):
    """`health` says whether a run that should be working does; None if it is not running."""

    id: str
    state: str
    updated_at: str
    health: Health | None = None
    reason: str = ""
    evidence: tuple[str, ...] = ()
    done: float = 0
    total: float = 0
    doing: str = ""
    seconds_left: float | None = None
    expected_step_seconds: float | None = None
    measured_step_seconds: float | None = None
    expected_minutes: float | None = None
    vitals: Vitals | None = None


class ProjectStatus(Record):
    project: str
    steps: tuple[StepState, ...]
    next: NextRun
    endpoint: EndpointStatus
    runs: tuple[RunStatus, ...]
    aliases: dict[str, str]
    releases: int
    captures: int
    capture_totals: CaptureTotals | None = None
    """What became of all exchanges that were to be captured; None if nothing was served yet."""
    working: bool
    drift: PromptDrift = PromptDrift()
    shadow: ShadowSummary | None = None
    """The challenger of `serve.shadow` against the champion; None if no shadow is set up."""
    week: WeekStatus | None = None
    """The planned week; None if there is none or it is over."""


def project_status(work: OpenProject) -> ProjectStatus:
    steps = find_running(work, examine_steps(work))
    return ProjectStatus(
        project=work.settings.project,
        steps=steps,
        next=next_run(work, steps),
        endpoint=ask_endpoint(work.settings.serve, root=work.project.root),
        runs=tuple(describe_run(run) for run in work.runs.list(limit=10)),
        aliases=work.releases.aliases(),
        releases=len(work.releases.list()),
        captures=work.captures.count(),
        capture_totals=read_totals(work.project.serving),
        working=lock_holder(work.project.state / "pipeline") is not None,
        drift=measure_drift(work),
        shadow=summarize_shadow(work),
        week=current_week(work),
    )


def judge_run(folder: Path, *, expected: float, patience: Patience) -> tuple[HealthReport, Beat | None]:
    """State of the worker in `folder`, by its heartbeat, its lock and its process."""
    beat, holder = read_beat(folder), lock_holder(folder)
    judgment = assess_health(
        beat,
        alive=holder is not None,
        age=clock.seconds_since(beat.moment) if beat is not None else 0.0,
        expected_seconds=expected,
        process_state=process_state(holder) if holder else "",
        patience=patience,
    )
    return judgment, beat


def next_run(work: OpenProject, steps: tuple[StepState, ...]) -> NextRun:
    """What `graft run` would do, and how long that takes."""
    due = [state for state in steps if state.state in ("stale", "missing")]
    try:
        run = plan_whole_run(work) if due else None
    except GraftError:
        run = None  # the base or a log is missing: the run itself says so
    seconds = 60 * run.minutes.value if run is not None else expect_seconds(due)
    return NextRun(
        steps=tuple(state.step for state in due),
        seconds=seconds,
        minutes=None if run is None else (run.minutes.low, run.minutes.high),
    )


def ask_endpoint(settings: ServeSettings, *, root: Path = Path()) -> EndpointStatus:
    """State of the endpoint at the address in graft.yaml, if that is on this machine."""
    endpoint = OwnEndpoint(settings, root=root, admin=True)
    if not endpoint.is_here:
        why = "its address is not fixed on this machine"
        return EndpointStatus(url=endpoint.url, state="unknown", reason=why)
    try:
        with endpoint.send("/health", seconds=ENDPOINT_SECONDS, longest=_MOST_BYTES) as reply:
            return _read_health(endpoint.url, reply.read())
    except NoAnswer:
        why = "nothing answers there; `graft serve` starts it"
        return EndpointStatus(url=endpoint.url, state="off", reason=why)


def _read_health(url: str, body: bytes) -> EndpointStatus:
    try:
        health = json.loads(body)
        state, engine = health["status"], health.get("engine", {})
        reasons = [engine.get("reason") or "", *_list_troubles(engine, health)]
        return EndpointStatus(
            url=url,
            state=state,
            aliases=health.get("aliases", {}),
            reason="; ".join(reason for reason in reasons if reason),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return EndpointStatus(url=url, state="other", reason="something other than graftwork answers there")


def _list_troubles(engine: dict[str, Any], health: dict[str, Any]) -> list[str]:
    """Problems of an endpoint that answers: replicas that are down, releases that it refuses."""
    replicas = engine.get("replicas", [])
    ready = sum(replica["state"] == "ready" for replica in replicas)
    down = [f"{ready} of {len(replicas)} replicas answer"] if 0 < ready < len(replicas) else []
    return [*down, *health.get("refused", {}).values()]


def describe_run(run: RunEntry) -> RunStatus:
    """The run in the store, with its health and progress if it should be working."""
    status = RunStatus(id=run.id, state=run.state, updated_at=run.updated_at)
    if run.state != "running":
        return status
    # Only what is needed: another version may have written the rest of the plan.
    minutes, steps = (Figure.model_validate(run.plan[name]).value for name in ("minutes", "steps"))
    expected = minutes * 60 / max(steps, 1)
    report, beat = judge_run(Path(run.folder), expected=expected, patience=Patience())
    gone = report.health == "gone"
    changes: dict[str, object] = {
        "health": report.health,
        "reason": report.reason + ("; `graft run` resumes from its last checkpoint" if gone else ""),
        "evidence": report.evidence,
        "expected_step_seconds": expected,
        "measured_step_seconds": report.measured_seconds,
        "expected_minutes": minutes,
    }
    if beat is not None:
        changes |= {"done": beat.done, "total": beat.total, "doing": beat.doing}
        changes |= {} if gone else {"seconds_left": beat.seconds_left, "vitals": beat.vitals}
    return status.model_copy(update=changes)
