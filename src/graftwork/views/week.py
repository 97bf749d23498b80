"""A week that runs: what a tick did, how far it is, and what is proposed instead of its plan."""

import json
import shlex
from typing import TYPE_CHECKING

from graftwork.text.wording import plural
from graftwork.views.document import Document, quote

if TYPE_CHECKING:
    from graftwork.week.follow import WeekStatus, WeekTick
    from graftwork.week.project import ComparedProposal


def view_tick(done: "WeekTick") -> Document:
    viewed = Document("Week")
    for title in ("ended", "judged", "started", "missed"):
        viewed.line(*(f"{title}: {quote(text)}" for text in getattr(done, title)))
    if done.planned_again:
        viewed.line("the rest of the week was planned again")
    after = f"{done.next_at:%a %d %b %H:%M}" if done.next_at is not None else "nothing is left of the week"
    viewed.line(f"next: {after}")
    return viewed


def summarize_week(week: "WeekStatus") -> list[str]:
    """What a person should do about the week now, each line with its command."""
    lines = []
    if week.lost:
        names = ", ".join(f"{session.model} at {session.place}" for session in week.lost)
        lines.append(
            f"[yellow]week: {plural(len(week.lost), 'session')} missed[/] ({quote(names)}): `graft up week` "
            "plans the rest without them and continues"
        )
    for session in week.unreported:
        at = session.starts_at.isoformat()
        missed = {"kind": "missed", "at": at, "place": session.place, "model": session.model}
        event = shlex.quote(json.dumps(missed))
        lines.append(
            f"week: {quote(session.model)} at {quote(session.place)} was to be started by hand on "
            f"{session.starts_at:%a %H:%M}; if it did not run: "
            f"`graft plan week --keep week.json --out week.json --event {quote(event)}`"
        )
    coming = (*week.due, *week.next)
    if coming:
        first = coming[0]
        when = "now" if week.due else f"on {first.starts_at:%a %H:%M}"
        lines.append(
            f"week: {quote(first.model)} at {quote(first.place)} {when}; `graft up week` follows the plan"
        )
    return lines


def view_week_status(found: "WeekStatus") -> Document:
    rows = []
    for missed in found.lost:
        rows.append((missed.starts_at, missed.model, missed.place, "missed: nothing was running to start it"))
    for session in found.sessions:
        why = f": {session.why}" if session.why else ""
        job = f" (job {session.job})" if session.job else ""
        state = f"{session.state}{why}{job}"
        rows.append((session.starts_at, session.model, session.place, state))
    for title, sessions in (("due now", found.due), ("planned", found.next)):
        for planned in sessions:
            hand = ", started by hand" if planned.by_hand else ""
            state = f"{title}, until {planned.ends_at:%a %H:%M}{hand}"
            rows.append((planned.starts_at, planned.model, planned.place, state))
    viewed = Document("Week")
    viewed.table(
        ("when", "model", "place", "session"),
        [(f"{time:%a %d %b %H:%M}", *map(quote, texts)) for time, *texts in rows],
    )
    return viewed


def view_proposal(proposal: "ComparedProposal") -> Document:
    viewed = Document("Proposal")
    viewed.heading(f"Against {quote(proposal.title)}")
    viewed.line(
        f"  {proposal.value:.2f} points ({proposal.scenario}): "
        f"this plan is worth {100 * proposal.ahead:.0f} % more",
        *(f"  [yellow]![/] the proposal breaks a rule: {quote(text)}" for text in proposal.broken),
    )
    return viewed
