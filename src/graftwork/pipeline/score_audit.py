"""`graft data audit --scores`: the quality scores of logs, by file and together.

In: paths, or the project's logs. Out: an audit of each file that has scores, and of all.
"""

from collections.abc import Sequence
from pathlib import Path

from graftwork.data.ingest.read import find_files, read_file
from graftwork.data.settings import DataSettings
from graftwork.grading.score_audit import ScoreAudit, ScoredReply, audit_scores, scored
from graftwork.records.base import Record
from graftwork.records.interaction import Interaction


class LogScores(Record):
    file: str
    rows: int
    audit: ScoreAudit | None
    """None if no row has a score."""


class LogScoresAudit(Record):
    files: tuple[LogScores, ...]
    whole: ScoreAudit | None

    @property
    def usable(self) -> bool:
        return self.whole is not None and self.whole.usable


def audit_logs(
    paths: Sequence[str], *, root: Path = Path(), settings: DataSettings | None = None
) -> LogScoresAudit:
    """Rows of every status count: what failed must have lower scores."""
    found: list[LogScores] = []
    everything: list[ScoredReply] = []
    for name in find_files(paths, root=root):
        results = read_file(name, root=root, settings=settings)
        rows = [row for row in results if isinstance(row, Interaction)]
        replies = scored(rows)
        audit = audit_scores(replies) if replies else None
        found.append(LogScores(file=name, rows=len(rows), audit=audit))
        everything += replies
    return LogScoresAudit(files=tuple(found), whole=audit_scores(everything) if everything else None)
