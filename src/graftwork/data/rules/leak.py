"""What a random split would have leaked."""

from collections import Counter
from collections.abc import Iterator

from graftwork.data.log import Log
from graftwork.data.rules.finding import count_rows, make_finding, show_question
from graftwork.records.audit import Finding


def find(log: Log) -> Iterator[Finding]:
    """Rows whose question stands in another row too: dealt one by one, they land on both sides."""
    rows, groups = log.before["conflicting_answers"], log.question_groups
    sizes = Counter(groups)
    hits = sorted(
        (group, row.origin.file, row.origin.line, row)
        for row, group in zip(rows, groups, strict=True)
        if sizes[group] > 1
    )
    expected = expect_leaks(list(sizes.values()), held_out=log.settings.test)
    if not hits or expected < 1:
        return
    yield make_finding(
        "split_leak",
        "warning",
        [(row.origin, show_question(row)) for *_, row in hits],
        title=count_rows(len(hits), "ask what another row asks too")
        + f": a random split would put about {expected:.0f} of them into the test beside a trained twin",
        effect="the evaluation would measure memory and call it skill",
        fix="`graft data prepare` splits by question, never by row; data.question_similarity sets how "
        f"alike ({log.settings.question_similarity})",
    )


def expect_leaks(sizes: list[int], *, held_out: float) -> float:
    """How many held-out rows have a twin outside the test, when each row is dealt by itself."""
    return sum(size * held_out * (1 - held_out ** (size - 1)) for size in sizes)
