"""The durable state of the coordinator, and every change of it as a pure function.

Input: a state and a moment. Output: the next state. A step is claimed before it is done, and only the claim
that was given last may report its end: a coordinator that was thought dead cannot overwrite what another one
did.
"""

from typing import Any, Literal, NamedTuple

from graftwork.cycle.settings import NoticeKind
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, UserError

FORMAT = 1
ATTEMPTS = 5
"""Attempts at a step before the cycle fails."""
MOST_ENTRIES = 200
"""Entries of the log of people's decisions that are kept."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 30.0, 3600.0
"""Pause after a failure of a step; it doubles with each further one."""

StepStatus = Literal["waiting", "running", "done", "skipped", "failed"]
OPEN_STATUS: frozenset[StepStatus] = frozenset({"waiting", "running"})
CycleOutcome = Literal[
    "running", "promoted", "rolled_back", "not_promoted", "nothing_new", "refused", "failed", "canceled"
]


class Superseded(GraftError):
    """Another coordinator has taken over the step, or the cycle was canceled."""

    def __init__(self, step: str) -> None:
        super().__init__(
            f"this coordinator no longer owns the step {step}",
            why="another coordinator took it over after a silence, or the cycle was canceled",
            fix="nothing is lost: the other coordinator has the state",
        )


class CycleStepState(Record):
    """One step of a cycle. `token` counts the claims: only the newest may report."""

    name: str
    status: StepStatus = "waiting"
    token: int = 0
    holder: str = ""
    place: str = ""
    """Host and folder of the holder: a coordinator that starts there knows that the holder is gone."""
    until: float = 0.0
    """The end of the holder's lease."""
    failures: int = 0
    not_before: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    summary: dict[str, Any] = {}
    error: dict[str, Any] = {}


class Approval(Record):
    step: str
    who: str
    at: float
    why: str = ""


class Notice(Record):
    """Something that people are notified of. It stays in the outbox until it is delivered."""

    id: str
    """The same notice has the same id, however often it is delivered."""
    kind: NoticeKind
    project: str = ""
    cycle: int
    at: float
    what: str
    why: str = ""
    fix: str = ""
    tries: int = 0
    not_before: float = 0.0


class LogEntry(Record):
    """Who paused, resumed, canceled or approved what."""

    at: float
    who: str
    action: str
    what: str = ""
    why: str = ""


class CycleState(Record):
    number: int
    model: str
    cause: str
    version: str
    """Version of graftwork that began the cycle; a later version continues with the same steps."""
    started_at: float
    finished_at: float | None = None
    outcome: CycleOutcome = "running"
    reason: str = ""
    steps: tuple[CycleStepState, ...]
    approvals: tuple[Approval, ...] = ()
    asked: tuple[str, ...] = ()
    """Steps whose approval was requested."""

    @property
    def is_open(self) -> bool:
        return self.outcome == "running"

    def step(self, name: str) -> CycleStepState | None:
        return next((step for step in self.steps if step.name == name), None)

    def summary(self, name: str) -> dict[str, Any]:
        step = self.step(name)
        return step.summary if step is not None and step.status == "done" else {}

    @property
    def current(self) -> CycleStepState | None:
        """The first step that is not done."""
        return next((step for step in self.steps if step.status in OPEN_STATUS), None)


class CoordinatorState(Record):
    """Everything that the coordinator of a project remembers; finished cycles are stored separately."""

    format: int = FORMAT
    paused: LogEntry | None = None
    queue: tuple[str, ...] = ()
    """Models whose cycle comes next."""
    queue_cause: str = ""
    cycle: CycleState | None = None
    """The open cycle, or the last one."""
    consecutive_failures: int = 0
    rows_counted: int = 0
    """Usable rows when the last cycle collected them."""
    served_until: float = 0.0
    """Times of the schedule up to here have been served."""
    spend_month: str = ""
    spend_share: float = 0.0
    """The largest share of the month's cap that a notice was sent for."""
    alerts: dict[str, int] = {}
    """How many alerts of a run have become notices."""
    outbox: tuple[Notice, ...] = ()
    log: tuple[LogEntry, ...] = ()

    @property
    def open_cycle(self) -> CycleState | None:
        return self.cycle if self.cycle is not None and self.cycle.is_open else None


class Holder(NamedTuple):
    """A coordinator: its name, and the host and folder that only it may work in."""

    name: str
    place: str


def start_schedule(state: CoordinatorState, *, now: float) -> CoordinatorState:
    """From the first start on, dates of the schedule are due."""
    return state if state.served_until else state.model_copy(update={"served_until": now})


def begin(
    state: CoordinatorState, *, model: str, cause: str, now: float, steps: tuple[str, ...], version: str
) -> CoordinatorState:
    """Open the next cycle. Without effect if one is already open: two coordinators may both see it due."""
    if state.open_cycle is not None:
        return state
    number = state.cycle.number + 1 if state.cycle is not None else 1
    # A claim of the last cycle must not hold in this one, so that tokens are counted on.
    last_token = max((step.token for step in state.cycle.steps), default=0) if state.cycle is not None else 0
    cycle = CycleState(
        number=number,
        model=model,
        cause=cause,
        version=version,
        started_at=now,
        steps=tuple(CycleStepState(name=name, token=last_token) for name in steps),
    )
    queue = state.queue[1:] if state.queue[:1] == (model,) else state.queue
    return state.model_copy(update={"cycle": cycle, "served_until": now, "queue": queue})


def enqueue(state: CoordinatorState, models: tuple[str, ...], *, cause: str) -> CoordinatorState:
    """Ask for a cycle of each of these models, unless they wait already."""
    new = tuple(model for model in models if model not in state.queue)
    return state.model_copy(update={"queue": (*state.queue, *new), "queue_cause": cause})


def request(
    state: CoordinatorState, models: tuple[str, ...], entry: LogEntry, *, cause: str
) -> CoordinatorState:
    """A person asks for a cycle of each of these models; it begins when the open one has ended."""
    why = f", {entry.why}" if entry.why else ""
    return _logged(enqueue(state, models, cause=f"{cause} of {entry.who}{why}"), entry)


def claim(
    state: CoordinatorState, step: str, holder: Holder, *, now: float, lease: float
) -> tuple[CoordinatorState, int | None]:
    """Take the step, and the token of the claim; None if another coordinator has it."""
    cycle = state.open_cycle
    current = cycle.current if cycle is not None else None
    if current is None or current.name != step or not is_free(current, holder.place, now):
        return state, None
    token = current.token + 1
    claimed = current.model_copy(
        update={
            "status": "running",
            "token": token,
            "holder": holder.name,
            "place": holder.place,
            "until": now + lease,
            "started_at": current.started_at if current.started_at is not None else now,
        }
    )
    return _with_step(state, claimed), token


def is_free(step: CycleStepState, here: str, now: float) -> bool:
    """Whether a coordinator at this place may take the step."""
    return step.status == "waiting" or step.until <= now or step.place == here


def renew(state: CoordinatorState, step: str, token: int, *, now: float, lease: float) -> CoordinatorState:
    return _with_step(state, require_held(state, step, token).model_copy(update={"until": now + lease}))


def complete(
    state: CoordinatorState, step: str, token: int, *, now: float, summary: dict[str, Any]
) -> CoordinatorState:
    current = require_held(state, step, token)
    done = current.model_copy(
        update={"status": "done", "finished_at": now, "summary": summary, "error": {}, "failures": 0}
    )
    return _with_step(state, done)


def skip(state: CoordinatorState, step: str, *, why: str, now: float) -> CoordinatorState:
    cycle = state.open_cycle
    current = cycle.step(step) if cycle is not None else None
    if current is None or current.status != "waiting":
        return state
    update = {"status": "skipped", "finished_at": now, "summary": {"why": why}}
    return _with_step(state, current.model_copy(update=update))


def postpone(state: CoordinatorState, step: str, token: int, *, until: float, why: str) -> CoordinatorState:
    """Release the step: it is checked again later, and this is not a failure."""
    update = {"status": "waiting", "not_before": until, "until": 0.0, "summary": {"why": why}}
    return _with_step(state, require_held(state, step, token).model_copy(update=update))


def reopen(state: CoordinatorState, claimed: str, token: int, *, first: str, why: str) -> CoordinatorState:
    """Do the step `first` and all after it again, on behalf of who holds a later one: its files are
    missing.
    """
    require_held(state, claimed, token)
    cycle = state.open_cycle
    assert cycle is not None
    names = [cycle_step.name for cycle_step in cycle.steps]
    reopened = set(names[names.index(first) :])
    steps = tuple(
        cycle_step.model_copy(
            update={"status": "waiting", "until": 0.0, "summary": {"why": why}, "finished_at": None}
        )
        if cycle_step.name in reopened and cycle_step.status != "waiting"
        else cycle_step
        for cycle_step in cycle.steps
    )
    return state.model_copy(update={"cycle": cycle.model_copy(update={"steps": steps})})


def retry_pause(failures: int) -> float:
    """Seconds to wait after this many failures in a row: twice as long each time."""
    return float(min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 40), LONGEST_PAUSE_SECONDS))


def fail(
    state: CoordinatorState,
    step: str,
    token: int,
    *,
    now: float,
    error: dict[str, Any],
    may_pass: bool,
) -> CoordinatorState:
    """Note the failure: another attempt after a pause if it may pass, else the end of the cycle."""
    current = require_held(state, step, token)
    failures = current.failures + 1
    if may_pass and failures < ATTEMPTS:
        update = {
            "status": "waiting",
            "failures": failures,
            "not_before": now + retry_pause(failures),
            "until": 0.0,
            "error": error,
        }
        return _with_step(state, current.model_copy(update=update))
    update = {"status": "failed", "failures": failures, "finished_at": now, "error": error}
    state = _with_step(state, current.model_copy(update=update))
    attempts = f" after {failures} attempts" if failures > 1 else ""
    return finish(state, "failed", reason=f"{step} failed{attempts}: {error.get('what', 'a bug')}", now=now)


def finish(state: CoordinatorState, outcome: CycleOutcome, *, reason: str, now: float) -> CoordinatorState:
    cycle = state.open_cycle
    if cycle is None:
        return state
    ended = cycle.model_copy(update={"outcome": outcome, "reason": reason, "finished_at": now})
    failed = state.consecutive_failures + 1 if outcome == "failed" else 0
    return state.model_copy(update={"cycle": ended, "consecutive_failures": failed})


def pause(state: CoordinatorState, entry: LogEntry) -> CoordinatorState:
    """The running step ends; no other one begins."""
    return _logged(state.model_copy(update={"paused": entry}), entry)


def resume(state: CoordinatorState, entry: LogEntry) -> CoordinatorState:
    return _logged(state.model_copy(update={"paused": None, "consecutive_failures": 0}), entry)


def cancel(state: CoordinatorState, entry: LogEntry) -> CoordinatorState:
    """End the open cycle; the coordinator that works on it stops at a safe point."""
    cycle = state.open_cycle
    if cycle is None:
        raise UserError("no cycle is open", why="there is nothing to cancel", fix="graft up status")
    why = f": {entry.why}" if entry.why else ""
    ended = finish(state, "canceled", reason=f"canceled by {entry.who}{why}", now=entry.at)
    return _logged(ended, entry)


def approve(state: CoordinatorState, step: str, entry: LogEntry) -> CoordinatorState:
    """Note who allowed the step. A step that is done cannot be approved any more."""
    cycle = state.open_cycle
    if cycle is None:
        raise UserError("no cycle is open", why="there is nothing to approve", fix="graft up status")
    waiting_step = cycle.step(step)
    if waiting_step is None or waiting_step.status not in OPEN_STATUS:
        open_names = ", ".join(open_step.name for open_step in cycle.steps if open_step.status in OPEN_STATUS)
        raise UserError(
            f"{step!r} is not an open step of cycle {cycle.number}",
            why=f"open steps: {open_names or 'none'}",
            fix="use one of these",
            where="STEP",
        )
    approval = Approval(step=step, who=entry.who, at=entry.at, why=entry.why)
    approved = cycle.model_copy(update={"approvals": (*cycle.approvals, approval)})
    return _logged(state.model_copy(update={"cycle": approved}), entry)


def ask_approval(state: CoordinatorState, step: str, notice: Notice) -> CoordinatorState:
    """Notify people once that a step waits for them."""
    cycle = state.open_cycle
    if cycle is None or step in cycle.asked:
        return state
    updated = cycle.model_copy(update={"asked": (*cycle.asked, step)})
    return post_notices(state.model_copy(update={"cycle": updated}), (notice,))


def post_notices(state: CoordinatorState, notices: tuple[Notice, ...]) -> CoordinatorState:
    """Add notices to the outbox, each once."""
    posted_ids = {notice.id for notice in state.outbox}
    new = tuple(notice for notice in notices if notice.id not in posted_ids)
    return state.model_copy(update={"outbox": (*state.outbox, *new)}) if new else state


def settle_notice(state: CoordinatorState, sent: Notice, *, retry_at: float | None) -> CoordinatorState:
    """Remove a delivered notice; or note a try that failed, with the moment of the next one."""
    # A later notice may have the same id: a step that is done again can fail for the first time again.
    key = (sent.id, sent.at)
    outbox = tuple(
        notice.model_copy(update={"tries": notice.tries + 1, "not_before": retry_at or 0.0})
        if (notice.id, notice.at) == key
        else notice
        for notice in state.outbox
        if (notice.id, notice.at) != key or retry_at is not None
    )
    return state.model_copy(update={"outbox": outbox})


def require_held(state: CoordinatorState, step: str, token: int) -> CycleStepState:
    """Return the step, if this claim of it is the newest one and its cycle is open; else raise Superseded."""
    cycle = state.open_cycle
    current = cycle.step(step) if cycle is not None else None
    if current is None or current.status != "running" or current.token != token:
        raise Superseded(step)
    return current


def _with_step(state: CoordinatorState, changed: CycleStepState) -> CoordinatorState:
    assert state.cycle is not None
    steps = tuple(changed if step.name == changed.name else step for step in state.cycle.steps)
    return state.model_copy(update={"cycle": state.cycle.model_copy(update={"steps": steps})})


def _logged(state: CoordinatorState, entry: LogEntry) -> CoordinatorState:
    return state.model_copy(update={"log": (*state.log, entry)[-MOST_ENTRIES:]})
