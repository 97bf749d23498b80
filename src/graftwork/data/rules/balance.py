"""Groups too small to learn from, and rows that drown the others."""

from collections import Counter
from collections.abc import Iterator

from graftwork.data.log import Log
from graftwork.data.rules.finding import count_rows, make_finding, show_question, show_start
from graftwork.records.audit import Finding
from graftwork.text.compare import content_key

RARE = 10
LARGEST_SHARE = 0.5
SAME_REPLY_SHARE = 0.25
# Below this many rows every share is chance.
ENOUGH_ROWS = 20


def find(log: Log) -> Iterator[Finding]:
    yield from _find_rare_groups(log)
    yield from _find_imbalance(log)


def _find_rare_groups(log: Log) -> Iterator[Finding]:
    logged = {redacted.row.group for redacted in log.rows if redacted.row.group is not None}
    usable = Counter(row.group for row in log.selection.rows)
    rare = sorted(group for group in logged if usable[group] < RARE)
    hits = [(row.origin, f"{row.group}: {show_question(row)}") for row, _ in log.rows if row.group in rare]
    if len(logged) > 1 and hits:
        named = ", ".join(f"{group} {usable[group]}" for group in rare)
        yield make_finding(
            "rare_group",
            "warning",
            hits,
            title=count_rows(len(hits), "belong")
            + f" to groups with fewer than {RARE} usable rows ({named})",
            effect="too few to learn from, and too few to measure",
            fix="log more of these groups, or leave them out of the files under data.logs",
        )


def _find_imbalance(log: Log) -> Iterator[Finding]:
    rows = log.selection.rows
    if len(rows) < ENOUGH_ROWS:
        return
    groups = Counter(row.group for row in rows if row.group is not None)
    if len(groups) > 1:
        name, count = groups.most_common(1)[0]
        if count > LARGEST_SHARE * len(rows):
            yield make_finding(
                "imbalance",
                "info",
                [(row.origin, show_question(row)) for row in rows if row.group == name],
                title=f"{count} of {len(rows)} usable rows belong to {name}",
                effect="the model becomes good at this group at the cost of the others",
                fix="log more of the other groups, or look at the figures of each group in the evaluation",
            )
    replies = Counter(content_key(row.reply) for row in rows)
    key, count = replies.most_common(1)[0]
    if count > SAME_REPLY_SHARE * len(rows):
        yield make_finding(
            "imbalance",
            "info",
            [(row.origin, show_start(row.reply)) for row in rows if content_key(row.reply) == key],
            title=f"{count} of {len(rows)} usable rows have the same reply",
            effect="the model may give this reply where another is right",
            fix="check that the evaluation measures both sides: where this reply is right and where not",
        )
