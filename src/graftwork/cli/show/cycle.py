"""The training cycle and the week on the terminal."""

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console

from graftwork.cli.show.tables import fit_words, print_line, quote, table
from graftwork.cycle.session import CyclePlan, CycleStatus
from graftwork.cycle.state import CycleState, CycleStepState
from graftwork.records.week import ShownSession, WeekSchedule
from graftwork.text.wording import duration

if TYPE_CHECKING:
    from graftwork.week.follow import WeekStatus, WeekTick
    from graftwork.week.project import ComparedProposal

COLOURS = {"promoted": "green", "nothing_new": "dim", "running": "cyan", "failed": "red", "refused": "red"}
STEP_COLOURS = {"done": "green", "running": "cyan", "failed": "red", "skipped": "dim", "waiting": "dim"}


def show_cycle(console: Console, cycle: CycleState) -> None:
    rows = table(
        "step", "state", "took", "result", title=f"cycle {cycle.number} of {cycle.model}: {cycle.cause}"
    )
    for step in cycle.steps:
        colour = STEP_COLOURS[step.status]
        rows.add_row(step.name, f"[{colour}]{step.status}[/]", _took(step), quote(_describe(step)))
    console.print(fit_words(console, rows))
    for given in cycle.approvals:
        why = f": {given.why}" if given.why else ""
        print_line(
            console, f"{quote(given.step)} was approved by {quote(given.who + why)}, {_moment(given.at)}"
        )
    colour = COLOURS.get(cycle.outcome, "yellow")
    reason = f": {quote(cycle.reason)}" if cycle.reason else ""
    print_line(console, f"[{colour}]{cycle.outcome.replace('_', ' ')}[/]{reason}")


def show_status(console: Console, found: CycleStatus) -> None:
    if found.state.open_cycle is not None:
        show_cycle(console, found.state.open_cycle)
    running = f"runs here (process {found.running})" if found.running else "does not run in this folder"
    print_line(console, f"the coordinator of {quote(found.project)} {running}")
    print_line(console, f"next: {quote(found.next)}")
    if found.history:
        rows = table("cycle", "model", "began", "took", "outcome", "reason", right=("cycle",))
        for cycle in found.history:
            took = duration(cycle.finished_at - cycle.started_at) if cycle.finished_at is not None else ""
            colour = COLOURS.get(cycle.outcome, "yellow")
            outcome = f"[{colour}]{cycle.outcome.replace('_', ' ')}[/]"
            began = _moment(cycle.started_at)
            rows.add_row(str(cycle.number), cycle.model, began, took, outcome, quote(cycle.reason))
        console.print(fit_words(console, rows))
    for entry in found.state.log[-5:]:
        text = " ".join(part for part in (entry.action, entry.what) if part)
        why = f" ({entry.why})" if entry.why else ""
        print_line(console, f"{_moment(entry.at)}  {quote(entry.who)}: {quote(text + why)}")


def show_plan(console: Console, plan: CyclePlan) -> None:
    print_line(console, f"due now: {quote(plan.due)}" if plan.due else "no cycle is due now")
    print_line(console, f"next: {quote(plan.next)}")
    if plan.new_rows is not None:
        print_line(console, f"new usable rows: {plan.new_rows:,}")
    if plan.drift is not None:
        print_line(console, f"drift: at least {plan.drift:.0%}")
    states = {state.step: state for state in plan.steps}
    rows = table("step", "state", "because", title=f"a cycle of {plan.models[0]} at {plan.place}")
    for name in plan.cycle_steps:
        known = states.get(name)
        waits = "waits for approval" if name in plan.approve else ""
        because = "; ".join(known.because) if known is not None else ""
        rows.add_row(name, known.state if known is not None else "", quote(waits or because))
    console.print(fit_words(console, rows))
    print_line(console, f"delivered to: {quote(', '.join(plan.deliver)) or 'no serving machine'}")
    print_line(console, f"notices go to: {quote(', '.join(plan.notified)) or 'the terminal only'}")


def _took(step: CycleStepState) -> str:
    if step.started_at is None or step.finished_at is None:
        return ""
    return duration(max(step.finished_at - step.started_at, 0.0))


def _describe(step: CycleStepState) -> str:
    if step.error:
        return f"{step.error.get('what', '')} ({step.failures} failures)"
    return ", ".join(
        f"{name} {_short(value)}" for name, value in step.summary.items() if value not in ("", None)
    )


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))


COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red", "white", "bright_cyan", "bright_green")
SHOWN_CHANGES = 6
FEWEST_CELLS, MOST_CELLS = 42, 168


def show_week(console: Console, schedule: WeekSchedule, proposal: "ComparedProposal | None" = None) -> None:
    _show_head(console, schedule)
    _show_chart(console, schedule)
    _show_sessions(console, schedule)
    _show_models(console, schedule)
    _show_places(console, schedule)
    _show_scenarios(console, schedule)
    _show_changes(console, schedule)
    if proposal is not None:
        _show_proposal(console, proposal)
    for title, texts in (("Assumed", schedule.assumptions), ("Note", schedule.notes)):
        if texts:
            print_line(console, f"\n[bold]{title}[/]")
            for text in texts:
                print_line(console, f"  · {quote(text)}")


def _show_head(console: Console, schedule: WeekSchedule) -> None:
    first, last = schedule.start.strftime("%a %d %b %Y %H:%M"), schedule.end.strftime("%a %d %b %H:%M")
    print_line(console, f"[bold]{first} to {last}[/] ({quote(schedule.timezone)}), {schedule.scenario}")
    missed = f"a gap of {100 * schedule.best_gap:.1f} % by the solver"
    state = missed if schedule.best_bound > schedule.value * (1 + 1e-6) else "optimal"
    cap = f" of ${schedule.cap_usd:.2f}" if schedule.cap_usd is not None else ""
    print_line(
        console,
        f"value [bold]{schedule.value:.2f}[/] of 100 points, bound {schedule.best_bound:.2f}: {state}; "
        f"${schedule.cost_usd:.2f}{cap}",
    )


def _show_chart(console: Console, schedule: WeekSchedule) -> None:
    """One line for each lane of a place; a letter is the model that trains."""
    marks = _marks(schedule)
    lanes = sorted({(s.place, s.lane) for s in schedule.sessions})
    order = [place.place for place in schedule.places]
    lanes.sort(key=lambda lane: (order.index(lane[0]), lane[1]))
    width = max((len(place) for place, _ in lanes), default=0)
    room = max(FEWEST_CELLS, min(MOST_CELLS, console.width - width - 4))
    cells = room // 7 * 7
    length = round((schedule.end - schedule.start).total_seconds() / 60)
    days = [schedule.start + timedelta(days=number) for number in range(7)]
    print_line(console, "")
    header = "".join(day.strftime("%a").ljust(cells // 7) for day in days)
    print_line(console, f"{' ' * width}  [dim]{header}[/]")
    for place, lane in lanes:
        mine = [s for s in schedule.sessions if (s.place, s.lane) == (place, lane)]
        line = "".join(_cell(mine, marks, number, cells, length) for number in range(cells))
        print_line(console, f"{quote(place.ljust(width))}  {line}")
    names = "  ".join(f"[{color}]{letter}[/] {quote(name)}" for name, (letter, color) in marks.items())
    print_line(console, f"{' ' * width}  {names}")


def _marks(schedule: WeekSchedule) -> dict[str, tuple[str, str]]:
    """A letter that no other model has, and a color."""
    made: dict[str, tuple[str, str]] = {}
    for number, model in enumerate(schedule.models):
        used = {letter for letter, _ in made.values()}
        wanted = [*model.model.upper(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
        letter = next((c for c in wanted if c.isalnum() and c not in used), "?")
        made[model.model] = (letter, COLORS[number % len(COLORS)])
    return made


def _cell(
    sessions: list[ShownSession], marks: dict[str, tuple[str, str]], number: int, cells: int, length: int
) -> str:
    begin, end = number * length / cells, (number + 1) * length / cells
    found = max(sessions, key=lambda s: min(s.end, end) - max(s.start, begin), default=None)
    if found is None or min(found.end, end) - max(found.start, begin) < (end - begin) / 2:
        return "[dim]·[/]"
    letter, color = marks[found.model]
    return f"[{color}]{letter}[/]" if not found.fixed else f"[dim {color}]{letter}[/]"


def _show_sessions(console: Console, schedule: WeekSchedule) -> None:
    made = table("when", "place", "model", "training", "cost", "note", right=("training", "cost"))
    for session in schedule.sessions:
        notes = [
            "kept" if session.fixed else "",
            "start by hand" if session.by_hand and not session.fixed else "",
            "from the main model's adapter"
            if session.round
            and any(model.model == session.model and model.inherited_hours > 0 for model in schedule.models)
            else "",
        ]
        made.add_row(
            f"{session.starts_at:%a %H:%M} – {session.ends_at:%a %H:%M}",
            quote(session.place),
            quote(session.model),
            f"{session.train / 60:.1f} h",
            f"${session.cost_usd:.2f}" if session.cost_usd else "",
            "; ".join(filter(None, notes)),
        )
    console.print(fit_words(console, made))


def _show_models(console: Console, schedule: WeekSchedule) -> None:
    columns = ("model", "sessions", "hours", "inherited", "learned", "points", "one more hour", "curve")
    made = table(*columns, right=columns[1:-1])
    for model in schedule.models:
        made.add_row(
            quote(model.model),
            str(model.sessions),
            f"{model.hours:.1f}",
            f"{model.inherited_hours:.1f}" if model.inherited_hours else "–",
            f"{100 * model.learned_after:.0f} %",
            f"{model.value:.2f}",
            f"+{model.another_hour:.2f}",
            quote(f"half in {model.half_hours:.3g} h, {model.curve}"),
        )
    console.print(fit_words(console, made))


def _show_places(console: Console, schedule: WeekSchedule) -> None:
    columns = ("place", "sessions", "used", "of which training", "left", "cost")
    made = table(*columns, right=columns[1:])
    for place in schedule.places:
        made.add_row(
            quote(place.place),
            str(place.sessions),
            f"{place.used_hours:.1f} of {place.offered_hours:.1f} h",
            f"{place.trained_hours:.1f} h",
            f"{place.left_hours:.1f} h",
            f"${place.cost_usd:.2f}" if place.cost_usd else "–",
        )
    console.print(fit_words(console, made))


def _show_scenarios(console: Console, schedule: WeekSchedule) -> None:
    columns = ("scenario", "value", "bound", "gap", "cost", "greedy", "first plan", "seconds")
    made = table(*columns, right=columns[1:])
    for found in schedule.scenarios:
        chosen = found.scenario == schedule.scenario
        made.add_row(
            f"[bold]{found.scenario}[/]" if chosen else found.scenario,
            f"{found.value:.2f}",
            f"{found.bound:.2f}",
            f"{100 * found.gap:.1f} %",
            f"${found.cost_usd:.2f}",
            f"{found.greedy_value:.2f}" if found.greedy_value is not None else "none",
            f"{found.first_seconds:.2f} s",
            f"{found.seconds:.1f}",
        )
    console.print(fit_words(console, made))


def _show_changes(console: Console, schedule: WeekSchedule) -> None:
    if schedule.what_if:
        print_line(console, "[bold]What would change it most[/]")
        for change in schedule.what_if[:SHOWN_CHANGES]:
            print_line(console, f"  +{change.gain:.2f} points  {quote(change.change)}")
    if schedule.curve_checks:
        print_line(console, "\n[bold]If an assumption is wrong[/]")
        for check in schedule.curve_checks:
            print_line(
                console,
                f"  · {quote(check.assumption)}: this plan is {100 * check.loss:.1f} % below "
                f"one made for that ({check.best_scenario})",
            )


def _show_proposal(console: Console, proposal: "ComparedProposal") -> None:
    print_line(console, f"\n[bold]Against[/] {quote(proposal.title)}")
    print_line(
        console,
        f"  {proposal.value:.2f} points ({proposal.scenario}): "
        f"this plan is worth {100 * proposal.ahead:.0f} % more",
    )
    for text in proposal.broken:
        print_line(console, f"  [yellow]![/] the proposal breaks a rule: {quote(text)}")


def show_tick(console: Console, done: "WeekTick") -> None:
    for title in ("ended", "judged", "started", "missed"):
        for text in getattr(done, title):
            print_line(console, f"{title}: {quote(text)}")
    if done.planned_again:
        print_line(console, "the rest of the week was planned again")
    after = f"{done.next_at:%a %d %b %H:%M}" if done.next_at is not None else "nothing is left of the week"
    print_line(console, f"next: {after}")


def show_week_status(console: Console, found: "WeekStatus") -> None:
    rows = table("when", "model", "place", "session")
    for session in found.sessions:
        why = f": {session.why}" if session.why else ""
        job = f" (job {session.job})" if session.job else ""
        rows.add_row(
            f"{session.starts_at:%a %d %b %H:%M}",
            quote(session.model),
            quote(session.place),
            quote(f"{session.state}{why}{job}"),
        )
    for title, sessions in (("due now", found.due), ("planned", found.next)):
        for planned in sessions:
            hand = ", started by hand" if planned.by_hand else ""
            rows.add_row(
                f"{planned.starts_at:%a %d %b %H:%M}",
                quote(planned.model),
                quote(planned.place),
                f"{title}, until {planned.ends_at:%a %H:%M}{hand}",
            )
    console.print(fit_words(console, rows))
