"""What the endpoint served: captures page by page, and what the last of them amount to.

In: a project, a filter. Out: pages of captures, figures of the traffic. The text of captures is as users and
models wrote it.
"""

from collections import Counter
from collections.abc import Sequence

from graftwork.api.project import PAGE_SIZE, Page, Project, number_page
from graftwork.records.base import Record
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Capture, Feedback
from graftwork.serve.captures import CaptureTotals, read_totals
from graftwork.store.captures import FeedbackStore

MOST_EXCHANGES = 2000


class Traffic(Record):
    """The last exchanges. Shares are None without any."""

    exchanges: int = 0
    since: str | None = None
    until: str | None = None
    by_release: dict[str, int] = {}
    by_day: dict[str, int] = {}
    total_ms: dict[str, float] | None = None
    """Percentiles: p50, p95 and p99."""
    first_token_ms: dict[str, float] | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    escalated: int = 0
    disconnected: int = 0
    cut_off: int = 0
    """Answers that ended because they reached the limit of tokens."""
    failed_checks: dict[str, int] = {}
    arms: dict[str, int] = {}
    """Exchanges of an experiment, by champion and challenger."""


def list_captures(
    project: Project, *, text: str = "", release: str = "", page: int = 1
) -> tuple[Page[Capture], dict[str, int]]:
    """A page of captures, the newest first; those that hold `text`, those of a release.

    Also how many there are of each release.
    """
    with project.open() as work:
        total = work.captures.count(text=text, release=release)
        page, pages = number_page(page, total)
        found = work.captures.page(limit=PAGE_SIZE, offset=(page - 1) * PAGE_SIZE, text=text, release=release)
        shown = Page[Capture](items=found, total=total, page=page, pages=pages)
        return shown, work.captures.count_by_release()


def read_capture(project: Project, capture_id: str) -> tuple[Capture, tuple[Feedback, ...]]:
    """A capture with its feedback."""
    with project.open() as work:
        capture = work.captures.get(capture_id)
        if capture is None:
            raise UserMistake(
                f"there is no capture {capture_id}",
                why="it was deleted, or the id is of another project",
                fix="choose one from the list of captures",
            )
        store = FeedbackStore(work.database, project=work.settings.project)
        return capture, tuple(store.of_capture(capture_id))


def read_traffic(project: Project) -> Traffic:
    """Figures of the last exchanges."""
    with project.open() as work:
        return summarize_traffic(work.captures.page(limit=MOST_EXCHANGES))


def read_capture_totals(project: Project) -> CaptureTotals | None:
    """What became of all exchanges that were to be captured; None where nothing was served yet."""
    return read_totals(project.folder.serving)


def summarize_traffic(captures: Sequence[Capture]) -> Traffic:
    """`captures` are the newest first."""
    if not captures:
        return Traffic()
    first_tokens = [capture.first_token_ms for capture in captures if capture.first_token_ms is not None]
    return Traffic(
        exchanges=len(captures),
        since=captures[-1].at,
        until=captures[0].at,
        by_release=dict(Counter(capture.release for capture in captures).most_common()),
        by_day=dict(sorted(Counter(capture.at[:10] for capture in captures).items())),
        total_ms=_percentiles([capture.total_ms for capture in captures]),
        first_token_ms=_percentiles(first_tokens),
        prompt_tokens=sum(capture.prompt_tokens for capture in captures),
        reply_tokens=sum(capture.reply_tokens for capture in captures),
        escalated=sum(capture.escalated_from is not None for capture in captures),
        disconnected=sum(capture.disconnected for capture in captures),
        cut_off=sum(capture.finish_reason == "length" for capture in captures),
        failed_checks=dict(
            Counter(capture.failed_check for capture in captures if capture.failed_check).most_common()
        ),
        arms=dict(Counter(capture.arm for capture in captures if capture.arm)),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return {f"p{at}": ordered[min(at * len(ordered) // 100, len(ordered) - 1)] for at in (50, 95, 99)}
