"""Routers and shadow traffic: who answers which request, and how well."""

from graftwork.records.live import ShadowCheck, ShadowSummary
from graftwork.records.routing import TrainedRouter
from graftwork.views.document import Document, State, quote

MARKS = {
    "better": State("better", "bold green"),
    "worse": State("worse", "bold red"),
    "open": State("not decided", "dim"),
}


def view_router(trained: TrainedRouter) -> Document:
    viewed, card = Document("Router"), trained.card
    viewed.table(
        ("held-out questions", "share", "95 % interval", "of"),
        [
            (name, f"{share.value:.1%}", f"{share.low:.1%} to {share.high:.1%}", str(share.n))
            for name, share in (
                ("right, likeliest model", card.accuracy),
                ("right where it is sure", card.sure_accuracy),
                (f"unsure, answered by {quote(card.main)}", card.unsure),
            )
        ],
    )
    chosen = sorted({name for counts in card.confusion.values() for name in counts})
    viewed.table(
        ("question of", *map(quote, chosen)),
        [
            (quote(truth), *(str(counts.get(name, "·")) for name in chosen))
            for truth, counts in card.confusion.items()
        ],
    )
    viewed.line(
        f"threshold {card.threshold:.2f}, chosen on {card.chosen_on} validation questions for "
        f"{card.target:.0%}; calibration error {card.calibration_error:.3f}; "
        f"{trained.milliseconds:.2f} ms a decision"
    )
    viewed.line(f"written to {quote(trained.path)}", wrap=False)
    return viewed


def view_shadow(found: ShadowSummary) -> Document:
    viewed = Document("Shadow")
    names = f"{quote(found.challenger[:12])} against {quote(found.champion[:12]) or 'no champion'}"
    counts = f"{found.copies:,} copies, {found.failed:,} failed, {found.interrupted:,} interrupted"
    viewed.line(f"shadow: {names}: {found.sessions:,} sessions compared ({counts})", wrap=False)
    if found.sessions and found.checks:
        heads = ("users got", "shadow", "difference", "pairs")
        viewed.table(
            ("check", *heads, ""),
            [(quote(check.check), *_figures(check), MARKS[check.outcome]) for check in found.checks],
            right=heads,
        )
        viewed.line(
            f"[dim]differences in points, {found.confidence:.0%} for all checks together, valid at any time; "
            f"median answer {_time(found.champion_ms)} and {_time(found.challenger_ms)}[/]",
            wrap=False,
        )
    viewed.line(*(f"[yellow]![/] {quote(remark)}" for remark in found.remarks), wrap=False)
    return viewed


def _figures(check: ShadowCheck) -> tuple[str, str, str, int]:
    if check.champion is None or check.challenger is None:
        return "–", "–", "–", 0
    ahead = 100 * (check.challenger - check.champion)
    interval = f"{100 * check.low:+.1f} to {100 * check.high:+.1f}"
    return f"{check.champion:.1%}", f"{check.challenger:.1%}", f"{ahead:+.1f} ({interval})", check.pairs


def _time(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds / 1000:.2f} s"
