"""Rows that repeat each other, and rows that contradict each other."""

from collections.abc import Iterator

from graftwork.data.log import Log
from graftwork.data.repeats import find_conflicts
from graftwork.data.rules.finding import Hit, count_rows, make_finding, show_start
from graftwork.records.audit import Finding


def find(log: Log) -> Iterator[Finding]:
    same = _dropped_by(log, "duplicate")
    if same:
        yield make_finding(
            "duplicate",
            "warning",
            same,
            title=count_rows(len(same), "repeat an earlier row"),
            effect="repeated rows are learned by heart, and one that is held out is no test",
            fix="`graft data prepare` keeps the first of each",
        )
    near = _dropped_by(log, "near_duplicate")
    if near:
        yield make_finding(
            "near_duplicate",
            "warning",
            near,
            title=count_rows(len(near), "nearly repeat an earlier row"),
            effect="they weigh in training as if they were different rows",
            fix="`graft data prepare` keeps the first of each; data.near_duplicate sets how alike "
            f"({log.settings.near_duplicate})",
        )
    yield from _find_conflicts(log)


def _find_conflicts(log: Log) -> Iterator[Finding]:
    rows = log.before["conflicting_answers"]
    # All bearers of such a prompt, side by side: rows of one prompt, then of the next.
    conflicts = sorted(
        find_conflicts(rows, keep="drop_all"), key=lambda repeat: (repeat.kept, repeat.position)
    )
    if not conflicts:
        return
    kept = {
        "keep_last": "keeps the reply that was logged last",
        "drop_all": "drops all of them",
        "keep_all": "keeps all of them",
    }[log.settings.conflicts]
    yield make_finding(
        "conflicting_answers",
        "warning",
        [(rows[repeat.position].origin, show_start(rows[repeat.position].reply)) for repeat in conflicts],
        title=count_rows(len(conflicts), "share a prompt with a row that has another reply"),
        effect="the model is pulled both ways and learns neither",
        fix=f"`graft data prepare` {kept} (data.conflicts: {log.settings.conflicts})",
    )


def _dropped_by(log: Log, step: str) -> list[Hit]:
    return [(drop.origin, drop.reason) for drop in log.selection.drops if drop.step == step]
