"""A week that runs: what a tick did, how far it is, and what is proposed instead of its plan."""

from typing import TYPE_CHECKING

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


def view_week_status(found: "WeekStatus") -> Document:
    rows = []
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
        [(f"{at:%a %d %b %H:%M}", *map(quote, texts)) for at, *texts in rows],
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
