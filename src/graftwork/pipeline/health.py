"""How a project stands: each step, what a run would do, each run, the endpoint, and what is live.

In: an open workplace. Out: a Standing. Changes nothing; the endpoint is asked only on this machine.
"""

import json
import os
import urllib.request
from pathlib import Path

from graftwork.pipeline.freshness import StepState, examine_steps, expect_seconds
from graftwork.pipeline.pipeline import plan_whole_run
from graftwork.pipeline.workplace import Workplace
from graftwork.process import clock, lock
from graftwork.process.heartbeat import read_beat
from graftwork.process.http_client import HttpClient, NoAnswer
from graftwork.process.judge import Judgement, Patience, judge
from graftwork.process.state import process_state
from graftwork.records.base import Record
from graftwork.records.errors import GraftError
from graftwork.records.job import Beat, Health, Vitals
from graftwork.records.plan import Plan
from graftwork.serve.settings import ServeSettings, is_loopback
from graftwork.store.runs import RunEntry

ENDPOINT_SECONDS = 2.0
_MOST_BYTES = 1 << 20


class Next(Record):
    """What `graft run` would do now, in order, and how long that takes where it is known."""

    command: str = "graft run"
    steps: tuple[str, ...]
    seconds: float | None
    minutes: tuple[float, float] | None = None
    """The range of the whole run by its plan."""


class EndpointStanding(Record):
    """`state` is what /health says (ok, starting, down), or off where nothing answers, or other."""

    url: str
    state: str
    aliases: dict[str, str] = {}
    reason: str = ""


class RunStanding(Record):
    """`health` says whether a run that should work does; None for one that does not run."""

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


class Standing(Record):
    project: str
    steps: tuple[StepState, ...]
    next: Next
    endpoint: EndpointStanding
    runs: tuple[RunStanding, ...]
    aliases: dict[str, str]
    releases: int
    captures: int
    working: bool


def standing(work: Workplace) -> Standing:
    patience = Patience.of(work.settings.train.run.alerts.patience_seconds)
    steps = examine_steps(work)
    return Standing(
        project=work.settings.project,
        steps=steps,
        next=_foresee(work, steps),
        endpoint=ask_endpoint(work.settings.serve),
        runs=tuple(_run(run, patience) for run in work.runs.list(limit=10)),
        aliases=work.releases.aliases(),
        releases=len(work.releases.list()),
        captures=work.captures.count(),
        working=lock.holder_of(work.project.state / "pipeline") is not None,
    )


def expected_step_seconds(plan: Plan) -> float:
    """What the plan expects one step to take."""
    return plan.minutes.value * 60 / max(plan.steps.value, 1)


def judge_run(folder: Path, *, expected: float, patience: Patience) -> tuple[Judgement, Beat | None]:
    """How the worker in `folder` is now, by its heartbeat, its lock and its process."""
    beat, holder = read_beat(folder), lock.holder_of(folder)
    judgement = judge(
        beat,
        alive=holder is not None,
        age=clock.seconds_since(beat.moment) if beat is not None else 0.0,
        expected_seconds=expected,
        process_state=process_state(holder) if holder else "",
        patience=patience,
    )
    return judgement, beat


def _foresee(work: Workplace, steps: tuple[StepState, ...]) -> Next:
    due = [state for state in steps if state.state in ("stale", "missing")]
    try:
        run = plan_whole_run(work) if due else None
    except GraftError:
        run = None  # the base or a log is missing: the run itself says so
    seconds = 60 * run.minutes.value if run is not None else expect_seconds(due)
    return Next(
        steps=tuple(state.step for state in due),
        seconds=seconds,
        minutes=None if run is None else (run.minutes.low, run.minutes.high),
    )


def ask_endpoint(settings: ServeSettings) -> EndpointStanding:
    """How the endpoint is where graft.yaml says that it listens, if that is on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    if not is_loopback(host) or settings.port == 0:
        return EndpointStanding(url=url, state="unknown", reason="its address is not fixed on this machine")
    request = urllib.request.Request(f"{url}/health")
    key = os.environ.get(settings.api_key_env or "", "").strip()
    if key:
        request.add_header("authorization", f"Bearer {key}")
    # No proxy of the environment: it could not reach this machine.
    client = HttpClient(longest=_MOST_BYTES, proxies=False)
    try:
        with client.send(request, seconds=ENDPOINT_SECONDS) as reply:
            return _read_health(url, reply.read())
    except NoAnswer:
        return EndpointStanding(url=url, state="off", reason="nothing answers there; `graft serve` starts it")


def _read_health(url: str, body: bytes) -> EndpointStanding:
    try:
        said = json.loads(body)
        state, engine = said["status"], said.get("engine", {})
        return EndpointStanding(
            url=url, state=state, aliases=said.get("aliases", {}), reason=engine.get("reason") or ""
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return EndpointStanding(url=url, state="other", reason="something else than graftwork answers there")


def _run(run: RunEntry, patience: Patience) -> RunStanding:
    shown = RunStanding(id=run.id, state=run.state, updated_at=run.updated_at)
    if run.state != "running":
        return shown
    plan = Plan.model_validate(run.plan)
    found, beat = judge_run(Path(run.folder), expected=expected_step_seconds(plan), patience=patience)
    gone = found.health == "gone"
    changes: dict[str, object] = {
        "health": found.health,
        "reason": found.reason + ("; `graft run` goes on from its last checkpoint" if gone else ""),
        "evidence": found.evidence,
        "expected_step_seconds": expected_step_seconds(plan),
        "measured_step_seconds": found.measured_seconds,
        "expected_minutes": plan.minutes.value,
    }
    if beat is not None:
        changes |= {"done": beat.done, "total": beat.total, "doing": beat.doing}
        changes |= {} if gone else {"seconds_left": beat.seconds_left, "vitals": beat.vitals}
    return shown.model_copy(update=changes)
