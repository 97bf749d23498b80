"""Whether sessions keep every rule of a week. Written apart from the planners, to check what they return.

Input: the problem of one scenario, what has happened, sessions. Output: what is broken, as text; empty:
nothing. Sessions that are fixed are facts: they are held to no rule, and count in all of them.
"""

import itertools
from collections.abc import Iterable, Sequence

from graftwork.records.week import Session
from graftwork.week.problem import (
    WeekModel,
    WeekPlace,
    WeekProblem,
    WeekState,
    cost_of,
    quota_left,
    window_use,
)

CENT = 0.005
HOURS_SLACK = 1e-6


def check_week(problem: WeekProblem, state: WeekState, sessions: Iterable[Session]) -> list[str]:
    """Return every broken rule."""
    listed = sorted(sessions, key=lambda session: (session.start, session.place, session.lane))
    listed_facts = {_key(session) for session in listed if session.fixed}
    real = {_key(session) for session in state.fixed}
    broken = [f"fixed session changed: {key}" for key in sorted(listed_facts ^ real)]
    for provider in problem.places:
        broken += _check_place(problem, state, provider, [s for s in listed if s.place == provider.name])
    for model in problem.models:
        broken += _check_model(problem, state, model, listed)
    names = {provider.name for provider in problem.places}, {model.name for model in problem.models}
    broken += [f"{s.model} at {s.place}: unknown" for s in listed if s.place not in names[0]]
    broken += [f"{s.model} at {s.place}: unknown" for s in listed if s.model not in names[1]]
    planned = [session for session in listed if not session.fixed]
    added = cost_of(problem, planned)
    spent = max(cost_of(problem, state.fixed), state.spent_usd)
    if problem.cap_usd is not None and added and spent + added > problem.cap_usd + CENT:
        broken.append(f"spending: {spent + added:.2f} of {problem.cap_usd:.2f} dollars")
    return broken


def _key(session: Session) -> tuple[str, str, int, int, int]:
    return session.place, session.model, session.start, session.end, session.train


def _check_place(
    problem: WeekProblem, state: WeekState, provider: WeekPlace, sessions: Sequence[Session]
) -> list[str]:
    broken = []
    for session in sessions:
        if not session.fixed:
            broken += [
                f"{_name(session)}: {text}" for text in _check_session(problem, state, provider, session)
            ]
    for session in sessions:
        at_once = sum(overlapping.start <= session.start < overlapping.end for overlapping in sessions)
        if not session.fixed and at_once > provider.lanes:
            broken.append(f"{_name(session)}: {at_once} sessions at once, {provider.lanes} possible")
    planned = [session for session in sessions if not session.fixed]
    # What fixed sessions used is subtracted from the quota already.
    for quota in quota_left(provider, state)[0]:
        for period in quota:
            used = sum(max(0, min(s.end, period.end) - max(s.start, period.start)) for s in planned)
            if used > period.minutes:
                broken.append(f"{provider.name}: {used} of {period.minutes} minutes in a quota period")
    for rolling in provider.rolling:
        facts = window_use(provider, state, rolling.window)
        plans = [(s.start, s.end) for s in planned]
        edges = {edge for start, end in (*facts, *plans) for edge in (start, end - rolling.window)}
        for edge in sorted(edges):
            window = (edge, edge + rolling.window)
            added = sum(_shared(span, window) for span in plans)
            used = added + sum(_shared(span, window) for span in facts)
            # Facts alone may have broken it; a plan must not add to that.
            if used > rolling.minutes and added:
                broken.append(f"{provider.name}: {used} of {rolling.minutes} minutes within {rolling.window}")
    return broken


def _check_session(
    problem: WeekProblem, state: WeekState, provider: WeekPlace, session: Session
) -> list[str]:
    broken = []
    length = session.end - session.start
    if session.start < state.now or session.end > problem.length:
        broken.append(f"not between now ({state.now}) and the end of the week ({problem.length})")
    if not any(start <= session.start and session.end <= end for start, end in provider.open):
        broken.append("the place is closed")
    if any(session.start < end and session.end > start for start, end in state.closed.get(provider.name, ())):
        broken.append("the place is not available")
    if provider.starts is not None and not any(
        start <= session.start < end for start, end in provider.starts
    ):
        broken.append("nobody is present to start it")
    if provider.longest is not None and length > provider.longest:
        broken.append(f"{length} minutes, {provider.longest} possible")
    if session.train < provider.shortest:
        broken.append(f"{session.train} minutes of training, {provider.shortest} at least")
    if length != session.train + provider.setup + 2 * provider.transfer:
        broken.append("its length is not set-up, training and transfers")
    if provider.speed_of(session.model) <= 0:
        broken.append("this model cannot be trained there")
    if not 0 <= session.lane < provider.lanes:
        broken.append(f"lane {session.lane} of {provider.lanes}")
    return broken


def _check_model(
    problem: WeekProblem, state: WeekState, model: WeekModel, sessions: Sequence[Session]
) -> list[str]:
    own_sessions = [session for session in sessions if session.model == model.name]
    planned = [session for session in own_sessions if not session.fixed]
    broken = []
    for earlier, later in itertools.pairwise(own_sessions):
        if later.start < earlier.end and not (later.fixed and earlier.fixed):
            broken.append(f"{_name(later)}: another session of the model has not ended")
        if later.round < earlier.round and not later.fixed:
            broken.append(f"{_name(later)}: round {later.round} after round {earlier.round}")
    hours = sum(problem.place(s.place).speed_of(s.model) * s.train / 60 for s in own_sessions)
    if hours < model.least_hours - HOURS_SLACK:
        broken.append(f"{model.name}: {hours:.2f} hours, {model.least_hours:.2f} at least")
    if planned and model.most_hours is not None and hours > model.most_hours + HOURS_SLACK:
        broken.append(f"{model.name}: {hours:.2f} hours, {model.most_hours:.2f} at most")
    if model.deadline is not None:
        late = [s for s in planned if s.end + model.gate > model.deadline]
        broken += [f"{_name(session)}: after the deadline" for session in late]
    for parent in (problem.model(name) for name in model.after):
        broken += _check_after(state, parent, planned, sessions)
    if model.inherits is not None:
        broken += _check_handover(state, problem.model(model.inherits), planned, sessions)
    return broken


def _check_after(
    state: WeekState, parent: WeekModel, planned: Sequence[Session], sessions: Sequence[Session]
) -> list[str]:
    """All sessions of the parent, and its gate, come first; there is at least one, or there were hours
    before.
    """
    first = [session for session in sessions if session.model == parent.name]
    failed = state.failed_gates.get(parent.name)
    good = [s for s in first if failed is None or s.end > failed]
    broken = []
    for session in planned:
        if not good and (failed is not None or parent.done_hours <= 0):
            broken.append(f"{_name(session)}: {parent.name} was not trained before it")
        for earlier in first:
            if session.start < earlier.end + parent.gate:
                broken.append(f"{_name(session)}: before {parent.name} and its gate")
    return broken


def _check_handover(
    state: WeekState, parent: WeekModel, planned: Sequence[Session], sessions: Sequence[Session]
) -> list[str]:
    """A session of a round comes after the parent's sessions of earlier rounds."""
    failed = state.failed_gates.get(parent.name)
    broken = []
    for session in planned:
        needed = [s for s in sessions if s.model == parent.name and s.round < session.round]
        if failed is not None and session.round and not any(earlier.end > failed for earlier in needed):
            broken.append(f"{_name(session)}: {parent.name} failed its gate and was not trained since")
        for earlier in needed:
            if session.start < earlier.end + parent.gate:
                broken.append(f"{_name(session)}: before {parent.name} and its gate")
    return broken


def _shared(span: tuple[int, int], window: tuple[int, int]) -> int:
    return max(0, min(span[1], window[1]) - max(span[0], window[0]))


def _name(session: Session) -> str:
    return f"{session.model} at {session.place}, minute {session.start}"
