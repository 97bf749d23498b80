"""May these logs be trained on as they are? The first thing that a curious user asks.

In: paths and settings. Out: an `Audit`: every kind of fault with its count, its rows, an example
without secrets, what it does to training, and the setting that mends it. Needs no project, no
model and no tokenizer.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from graftwork.data.log import Log, read_log
from graftwork.data.rules import balance, leak, outcome, private, repeats, reply, unreadable, unusable
from graftwork.data.settings import DataSettings
from graftwork.records.audit import Audit, LengthSummary

RULES = (unusable, unreadable, reply, outcome, private, repeats, leak, balance)
_WEIGHT = {"blocker": 0, "warning": 1, "info": 2}


def audit(paths: Iterable[str], settings: DataSettings | None = None, *, root: Path = Path()) -> Audit:
    """Read, look through every rule, and answer. The gravest findings come first."""
    started = time.perf_counter()
    log = read_log(paths, settings=settings or DataSettings(), root=root)
    findings = sorted(
        (finding for rule in RULES for finding in rule.find(log)),
        key=lambda finding: (_WEIGHT[finding.severity], -finding.count),
    )
    rows = [redacted.row for redacted in log.rows]
    return Audit(
        files=log.files,
        rows=len(rows) + len(log.faults),
        readable=len(rows),
        usable=len(log.selection.rows),
        fit_to_train=not any(finding.severity == "blocker" for finding in findings),
        findings=tuple(findings),
        groups=_count_groups(log),
        prompt_length=_summarise([sum(len(message.content) for message in row.messages) for row in rows]),
        reply_length=_summarise([len(row.reply) for row in rows]),
        seconds=time.perf_counter() - started,
    )


def _count_groups(log: Log) -> dict[str, int]:
    counts = Counter(redacted.row.group for redacted in log.rows if redacted.row.group is not None)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _summarise(lengths: Sequence[int]) -> LengthSummary:
    if not lengths:
        return LengthSummary(smallest=0, median=0, p95=0, largest=0)
    ordered = sorted(lengths)
    return LengthSummary(
        smallest=ordered[0],
        median=int(statistics.median(ordered)),
        p95=ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        largest=ordered[-1],
    )
