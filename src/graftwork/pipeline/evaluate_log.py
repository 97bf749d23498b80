"""What one should know of the log before comparing anybody with it.

In: the graded subjects, and the dataset that the cases are held out of. Out: sentences; none where the log is
no subject. Its answers are those of rows that were found fit to learn from, so it never looks as bad as it
is; and they are the references, so that nothing is told by holding them against these.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from graftwork.evaluate.subjects.log import LOG
from graftwork.evaluate.wording import name_of
from graftwork.files.dataset import iterate_drops
from graftwork.pipeline.steps.data import PreparedData
from graftwork.records.report import SubjectReport

FILTER = "filter"
"""The step of the preparation that judges each row by itself."""
FAULTS = {
    "truncated": "as cut off",
    "failed_status": "as failed",
    "claims_success_but_fails": "as failed",
    "empty": "as empty or a stand-in",
    "placeholder": "as empty or a stand-in",
    "negative_feedback": "for negative feedback",
}


def remark_on_log(scored: Mapping[str, SubjectReport], *, prepared: PreparedData | None) -> tuple[str, ...]:
    """`prepared` is None where the cases are not of the project's own log."""
    log = scored.get(LOG)
    if log is None:
        return ()
    kept = _say_kept(prepared) if prepared is not None else ""
    ungraded = _say_ungraded(log, [one for one in scored.values() if one is not log])
    return tuple(sentence for sentence in (kept, ungraded) if sentence)


def _say_kept(prepared: PreparedData) -> str:
    """Empty where no row was dropped for what its answer is."""
    dataset = prepared.dataset
    if not dataset.dropped.get(FILTER):
        return ""
    codes = Counter(
        drop.reason.partition(":")[0] for drop in iterate_drops(Path(prepared.folder)) if drop.step == FILTER
    )
    why: Counter[str] = Counter()
    for code, count in codes.items():
        if code in FAULTS:
            why[FAULTS[code]] += count
    if not why:
        return ""
    read = max(sum(one.rows for one in dataset.inputs), dataset.kept_after.get("read", 0))
    kept = list(dataset.kept_after.values())[-1] if dataset.kept_after else read
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in why.most_common())
    return (
        f"The log's answers are those of the {kept:,} of {read:,} rows that were kept (dropped: {dropped}), "
        "which flatters it: see `graft data audit`."
    )


def _say_ungraded(log: SubjectReport, others: list[SubjectReport]) -> str:
    graded = {
        name: None
        for one in others
        for name, metric in one.metrics.items()
        if metric.n and metric.kind in ("rate", "score")
    }
    names = [name_of(name) for name in graded if name not in log.metrics]
    if not names:
        return ""
    return f"Not applicable to the log, whose answer is the reference: {', '.join(names)}."
