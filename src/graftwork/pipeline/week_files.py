"""Files of a week's plan: the plan itself, its page, its calendar; and a proposal made by hand.

In: a schedule, paths. Out: files; what a proposal is worth on the same objective, and which rules it breaks.
"""

from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

from pydantic import ValidationError

from graftwork.files.disk import write_atomic
from graftwork.pipeline.week import WeekRequest, week_as_it_is, write_schedule
from graftwork.plan.week.calendar import minutes_since
from graftwork.plan.week.checker import check_week
from graftwork.plan.week.ical import calendar_text
from graftwork.plan.week.problem import WeekProblem, as_scenario, scenarios_of
from graftwork.plan.week.score import score
from graftwork.project.load import ProjectFolder
from graftwork.records.base import Record
from graftwork.records.errors import UserMistake
from graftwork.records.week import DAYS, Scenario, Session, WeekSchedule, parse_moment
from graftwork.report.week_page import render_week


class ProposedSession(Record):
    """A session as people plan it: `mon 08:00`, four hours."""

    place: str
    model: str
    start: str
    hours: float


class WeekProposal(Record):
    title: str
    sessions: tuple[ProposedSession, ...]


class ComparedProposal(Record):
    """The proposal on the objective of the plan."""

    title: str
    sessions: int
    value: float
    cost_usd: float
    scenario: Scenario
    broken: tuple[str, ...]
    plan_value: float
    ahead: float
    """By which the plan is worth more, as a share of the proposal."""


def write_files(schedule: WeekSchedule, *, out: Path | None, html: Path | None, ical: Path | None) -> None:
    if out is not None:
        write_schedule(out, schedule)
    if html is not None:
        write_atomic(html, render_week(schedule))
    if ical is not None:
        write_atomic(ical, calendar_text(schedule))


def compare_proposal(
    project: ProjectFolder, asked: WeekRequest, schedule: WeekSchedule, path: Path
) -> ComparedProposal:
    """The best that the proposal is worth in any scenario whose order it keeps."""
    try:
        proposal = WeekProposal.from_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserMistake(
            f"{path} is not a proposal",
            why=str(error).splitlines()[0],
            fix="write it as examples/week/proposal.json",
            where="--compare",
        ) from error
    problem, state = week_as_it_is(project, asked)
    plain = [_session(problem, session) for session in proposal.sessions]
    best: ComparedProposal | None = None
    for scenario in scenarios_of(problem):
        own = as_scenario(problem, scenario)
        sessions = [_in_round(own, session, scenario) for session in plain]
        worth = score(own, sessions)
        made = ComparedProposal(
            title=proposal.title,
            sessions=len(sessions),
            value=worth.value,
            cost_usd=worth.cost_usd,
            scenario=scenario,
            broken=tuple(check_week(own, state, sessions)),
            plan_value=schedule.value,
            ahead=schedule.value / worth.value - 1 if worth.value > 0 else 0.0,
        )
        if best is None or (len(made.broken), -made.value) < (len(best.broken), -best.value):
            best = made
    if best is None:
        raise UserMistake(f"{path} has no sessions", where="--compare")
    return best


def _session(problem: WeekProblem, proposed: ProposedSession) -> Session:
    place = problem.place(proposed.place)
    problem.model(proposed.model)
    try:
        moment = parse_moment(proposed.start)
    except ValueError as error:
        raise UserMistake(str(error), fix="write it as `mon 08:00`", where="--compare") from error
    zone = ZoneInfo(problem.timezone)
    first = problem.start.astimezone(zone)
    day = first.date() + timedelta(days=((moment.day or 0) - first.weekday()) % len(DAYS))
    local = datetime.combine(day, datetime.min.time(), tzinfo=zone) + timedelta(minutes=moment.minute)
    start = minutes_since(problem.start, local)
    length = round(proposed.hours * 60)
    return Session(
        place=place.name, model=proposed.model, start=start, end=start + length,
        train=max(0, length - place.overhead),
    )  # fmt: skip


def _in_round(problem: WeekProblem, session: Session, scenario: Scenario) -> Session:
    heir = problem.model(session.model).inherits is not None
    return session.model_copy(update={"round": 1}) if heir and scenario == "sequential" else session
