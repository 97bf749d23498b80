"""A week's plan as a Gantt chart in SVG, and as a page with tables of sessions, models and places.

In: a WeekSchedule. Out: markup, or one HTML file without scripts or links to elsewhere.
"""

from datetime import timedelta

from markupsafe import Markup

from graftwork.records.week import ShownSession, WeekSchedule
from graftwork.text.wording import plural
from graftwork.views.svg import Scale, drawing, element, label, line
from graftwork.views.templates import FILTERS, open_templates

LANE, TOP = 34.0, 28.0
HUES = (205, 25, 145, 280, 95, 340, 55, 180, 240)
NARROW = 600
"""Below this width names and days are shortened."""


def render_week(schedule: WeekSchedule) -> str:
    page = open_templates(**FILTERS).get_template("week_page.html.jinja")
    return page.render(week=schedule, chart=draw_week(schedule), legend=draw_legend(schedule))


def _hues(schedule: WeekSchedule) -> dict[str, int]:
    models = dict.fromkeys([m.model for m in schedule.models] + [s.model for s in schedule.sessions])
    return {model: HUES[number % len(HUES)] for number, model in enumerate(models)}


def draw_legend(schedule: WeekSchedule) -> Markup:
    """A square in the color of each model, with its name."""
    return Markup(" ").join(
        element(
            "span",
            element(
                "svg",
                element("rect", width=10, height=10, rx=3, fill=f"hsl({hue} 55% 45%)"),
                width="10",
                height="10",
                viewBox="0 0 10 10",
            ),
            f" {model}",
        )
        for model, hue in _hues(schedule).items()
    )


def draw_week(schedule: WeekSchedule, *, width: float = 980) -> Markup:
    """A Gantt chart: one row for each lane of a place, a bar for each session, one column for each day."""
    order = list(dict.fromkeys([p.place for p in schedule.places] + [s.place for s in schedule.sessions]))
    lanes = {(place, 0) for place in order} | {(s.place, s.lane) for s in schedule.sessions}
    rows = sorted(lanes, key=lambda lane: (order.index(lane[0]), lane[1]))
    left = 84.0 if width < NARROW else 130.0
    height = TOP + LANE * max(len(rows), 1) + 8
    x = Scale(schedule.start.timestamp(), schedule.end.timestamp(), left, width - 4)
    parts = _draw_days(schedule, x, height=height, short=width < NARROW)
    longest, hues = 11 if width < NARROW else 18, _hues(schedule)
    for number, (place, lane) in enumerate(rows):
        y = TOP + number * LANE
        name = place if lane == 0 else f"{place} {lane + 1}"
        shown = name if len(name) <= longest else f"{name[: longest - 1]}…"
        parts.append(label(shown, x=0, y=y + 21, class_="name"))
        parts.append(line(left, y + LANE, width - 4, y + LANE, class_="grid"))
        for session in schedule.sessions:
            if (session.place, session.lane) == (place, lane):
                parts.append(_draw_session(session, hues[session.model], x, y))
    if schedule.start < schedule.now < schedule.end:
        now = x(schedule.now.timestamp())
        parts.append(line(now, TOP - 6, now, height - 4, class_="limit"))
    described = f"{plural(len(schedule.sessions), 'session')} at {plural(len(order), 'place')}"
    return drawing(
        *parts, width=width, height=height, title="The week", description=described, class_="gantt"
    )


def _draw_days(schedule: WeekSchedule, x: Scale, *, height: float, short: bool) -> list[Markup]:
    parts, day = list[Markup](), schedule.start
    while day <= schedule.end:
        begins = x(day.timestamp())
        parts.append(line(begins, TOP - 6, begins, height - 4, class_="grid"))
        if day < schedule.end:
            shown = day.strftime("%a")[:2] if short else day.strftime("%a %d")
            parts.append(label(shown, x=begins + 4, y=16, class_="tick"))
        day += timedelta(days=1)
    return parts


def _draw_session(session: ShownSession, hue: int, x: Scale, y: float) -> Markup:
    start, end = x(session.starts_at.timestamp()), x(session.ends_at.timestamp())
    text = (
        f"{session.model} at {session.place}: {session.starts_at:%a %H:%M} to {session.ends_at:%a %H:%M}, "
        f"{session.train / 60:.1f} h of training"
    )
    bar = element(
        "rect",
        element("title", text),
        x=start,
        y=y + 5,
        width=max(end - start - 1, 2.0),
        height=LANE - 10,
        rx=4,
        fill=f"hsl({hue} 55% {60 if session.fixed else 45}%)",
        class_="by-hand" if session.by_hand else None,
    )
    if end - start < 8 * len(session.model):
        return bar
    middle = (start + end) / 2
    return bar + element(
        "text", session.model, x=middle, y=y + 21, text_anchor="middle", fill="white", font_size="11"
    )
