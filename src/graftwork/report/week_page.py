"""A week's plan as a page: a Gantt chart as SVG, and tables of sessions, models and places.

In: a WeekSchedule. Out: one HTML file without scripts or links to elsewhere.
"""

from datetime import timedelta

from markupsafe import Markup

from graftwork.records.week import ShownSession, WeekSchedule
from graftwork.report.svg import drawing, element, label, line
from graftwork.report.templates import FILTERS, open_templates

WIDTH, LEFT, ROW, TOP = 980.0, 110.0, 34.0, 28.0
HUES = (205, 25, 145, 280, 95, 340, 55, 180, 240)


def render_week(schedule: WeekSchedule) -> str:
    page = open_templates(**FILTERS).get_template("week_page.html.jinja")
    return page.render(week=schedule, chart=draw_week(schedule), hues=hues_of(schedule))


def hues_of(schedule: WeekSchedule) -> dict[str, int]:
    return {model.model: HUES[number % len(HUES)] for number, model in enumerate(schedule.models)}


def draw_week(schedule: WeekSchedule) -> Markup:
    """One row for each lane of a place, one column for each day."""
    order = [place.place for place in schedule.places]
    lanes = {(place, 0) for place in order} | {(s.place, s.lane) for s in schedule.sessions}
    rows = sorted(lanes, key=lambda lane: (order.index(lane[0]), lane[1]))
    length = (schedule.end - schedule.start).total_seconds() / 60
    scale = (WIDTH - LEFT) / length
    height = TOP + ROW * len(rows) + 8
    parts: list[Markup] = []
    for day in range(8):
        moment = schedule.start + timedelta(days=day)
        x = LEFT + min(length, day * 1440) * scale
        parts.append(line(x, TOP - 6, x, height - 4, class_="grid"))
        if day < 7:
            parts.append(label(moment.strftime("%a %d"), x=x + 4, y=16, class_="tick"))
    for number, (place, lane) in enumerate(rows):
        y = TOP + number * ROW
        parts.append(label(place if lane == 0 else f"{place} {lane + 1}", x=0, y=y + 20, class_="name"))
        for session in schedule.sessions:
            if (session.place, session.lane) == (place, lane):
                parts.append(_bar(session, hues_of(schedule)[session.model], y=y + 3, scale=scale))
    now = LEFT + (schedule.now - schedule.start).total_seconds() / 60 * scale
    if now > LEFT:
        parts.append(line(now, TOP - 6, now, height - 4, class_="limit"))
    return drawing(
        *parts,
        width=WIDTH,
        height=height,
        title="The week",
        description=f"{len(schedule.sessions)} sessions at {len(order)} places",
    )


def _bar(session: ShownSession, hue: int, *, y: float, scale: float) -> Markup:
    x, width = LEFT + session.start * scale, max(2.0, (session.end - session.start) * scale - 1)
    text = (
        f"{session.model} at {session.place}: {session.starts_at:%a %H:%M} to {session.ends_at:%a %H:%M}, "
        f"{session.train / 60:.1f} h of training"
    )
    shape = element(
        "rect",
        element("title", text),
        x=x, y=y, width=width, height=ROW - 8, rx=3,
        fill=f"hsl({hue} 55% {60 if session.fixed else 45}%)",
    )  # fmt: skip
    if width < 8 * len(session.model):
        return shape
    return shape + element(
        "text", session.model, x=x + width / 2, y=y + 17, text_anchor="middle", fill="white", font_size="11"
    )
