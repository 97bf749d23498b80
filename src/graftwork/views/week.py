"""The week over quotas: which sessions run where and when, and what would change it."""

from graftwork.records.week import WeekSchedule
from graftwork.views.document import Bar, Document, Gantt, Table, quote

SHOWN_CHANGES = 6


def view_week(schedule: WeekSchedule, *, proposal: Document | None = None) -> Document:
    """With the `proposal` that the plan is compared with."""
    viewed = Document(f"Week of {schedule.start:%d %b %Y}")
    first, last = schedule.start.strftime("%a %d %b %Y %H:%M"), schedule.end.strftime("%a %d %b %H:%M")
    missed = f"a gap of {100 * schedule.best_gap:.1f} % by the solver"
    state = missed if schedule.best_bound > schedule.value * (1 + 1e-6) else "optimal"
    cap = f" of ${schedule.cap_usd:.2f}" if schedule.cap_usd is not None else ""
    viewed.line(
        f"[bold]{first} to {last}[/] ({quote(schedule.timezone)}), {schedule.scenario}",
        f"value [bold]{schedule.value:.2f}[/] of 100 points, bound {schedule.best_bound:.2f}: {state}; "
        f"${schedule.cost_usd:.2f}{cap}",
    )
    viewed.add(draw_week(schedule), list_sessions(schedule))
    columns = ("model", "sessions", "hours", "inherited", "learned", "points", "one more hour", "curve")
    viewed.table(
        columns,
        [
            (
                quote(model.model),
                model.sessions,
                f"{model.hours:.1f}",
                f"{model.inherited_hours:.1f}" if model.inherited_hours else "–",
                f"{100 * model.learned_after:.0f} %",
                f"{model.value:.2f}",
                f"+{model.another_hour:.2f}",
                quote(f"half in {model.half_hours:.3g} h, {model.curve}"),
            )
            for model in schedule.models
        ],
        right=columns[1:-1],
    )
    place_columns = ("place", "sessions", "used", "of which training", "left", "cost")
    viewed.table(
        place_columns,
        [
            (
                quote(place.place),
                place.sessions,
                f"{place.used_hours:.1f} of {place.offered_hours:.1f} h",
                f"{place.trained_hours:.1f} h",
                f"{place.left_hours:.1f} h",
                f"${place.cost_usd:.2f}" if place.cost_usd else "–",
            )
            for place in schedule.places
        ],
        right=place_columns[1:],
    )
    scenario_columns = ("scenario", "value", "bound", "gap", "cost", "greedy", "first plan", "seconds")
    viewed.table(
        scenario_columns,
        [
            (
                f"[bold]{found.scenario}[/]" if found.scenario == schedule.scenario else found.scenario,
                f"{found.value:.2f}",
                f"{found.bound:.2f}",
                f"{100 * found.gap:.1f} %",
                f"${found.cost_usd:.2f}",
                f"{found.greedy_value:.2f}" if found.greedy_value is not None else "none",
                f"{found.first_seconds:.2f} s",
                f"{found.seconds:.1f}",
            )
            for found in schedule.scenarios
        ],
        right=scenario_columns[1:],
    )
    viewed.items(
        (f"+{change.gain:.2f} points  {quote(change.change)}" for change in schedule.what_if[:SHOWN_CHANGES]),
        title="What would change it most",
    )
    viewed.items(
        (
            f"{quote(check.assumption)}: this plan is {100 * check.loss:.1f} % below one made for that "
            f"({check.best_scenario})"
            for check in schedule.curve_checks
        ),
        title="If an assumption is wrong",
    )
    viewed.add(proposal)
    viewed.items(map(quote, schedule.assumptions), title="Assumed")
    viewed.items(map(quote, schedule.notes), title="Note")
    return viewed


def draw_week(schedule: WeekSchedule) -> Gantt:
    order = list(dict.fromkeys([p.place for p in schedule.places] + [s.place for s in schedule.sessions]))
    lanes = {(place, 0) for place in order} | {(s.place, s.lane) for s in schedule.sessions}
    models = dict.fromkeys([m.model for m in schedule.models] + [s.model for s in schedule.sessions])
    return Gantt(
        title="The week",
        start=schedule.start,
        end=schedule.end,
        lanes=[_lane(*lane) for lane in sorted(lanes, key=lambda lane: (order.index(lane[0]), lane[1]))],
        names=list(models),
        bars=[
            Bar(
                lane=_lane(session.place, session.lane),
                name=session.model,
                start=session.starts_at.timestamp(),
                end=session.ends_at.timestamp(),
                title=f"{session.model} at {session.place}: {session.starts_at:%a %H:%M} to "
                f"{session.ends_at:%a %H:%M}, {session.train / 60:.1f} h of training",
                done=session.fixed,
                outlined=session.by_hand,
            )
            for session in schedule.sessions
        ],
        now=schedule.now,
    )


def _lane(place: str, lane: int) -> str:
    return f"{place} {lane + 1}" if lane else place


def list_sessions(schedule: WeekSchedule) -> Table:
    inherited = {model.model for model in schedule.models if model.inherited_hours > 0}
    rows = []
    for session in schedule.sessions:
        notes = (
            "kept" if session.fixed else "",
            "start by hand" if session.by_hand and not session.fixed else "",
            "from the main model's adapter" if session.round and session.model in inherited else "",
        )
        rows.append(
            (
                f"{session.starts_at:%a %H:%M} – {session.ends_at:%a %H:%M}",
                quote(session.place),
                quote(session.model),
                f"{session.train / 60:.1f} h",
                f"${session.cost_usd:.2f}" if session.cost_usd else "",
                "; ".join(filter(None, notes)),
            )
        )
    columns = ("when", "place", "model", "training", "cost", "note")
    return Table(columns, rows, right=("training", "cost"))
