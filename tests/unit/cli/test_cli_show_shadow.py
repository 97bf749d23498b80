"""Shadow traffic on a terminal of 80 columns."""

from io import StringIO

import pytest
from rich.console import Console

from graftwork.records.live import ShadowCheck, ShadowSummary
from graftwork.views.terminal import show

CHECK = ShadowCheck(
    check="json_valid", pairs=60, champion=0.5, challenger=0.9, wins=30, losses=0, ties=30, low=0.1, high=0.7
)


def printed(**fields):
    known = {
        "champion": "a" * 64, "challenger": "b" * 64, "copies": 70, "sessions": 60, "failed": 2,
        "interrupted": 10, "checks": (CHECK,), "confidence": 0.95, "champion_ms": 1200.0,
        "challenger_ms": 900.0,
    }  # fmt: skip
    console = Console(width=80, file=StringIO())
    show(console, ShadowSummary(**{**known, **fields}))
    return console.file.getvalue()


def test_a_comparison_shows_both_shares_and_the_interval_of_their_difference():
    text = printed()
    assert "bbbbbbbbbbbb against aaaaaaaaaaaa: 60 sessions compared" in text
    assert "50.0%" in text
    assert "+40.0 (+10.0 to +70.0)" in text
    assert "better" in text


@pytest.mark.parametrize(
    ("low", "high", "outcome"), [(0.1, 0.2, "better"), (-0.2, -0.1, "worse"), (-1.0, 0.1, "open")]
)
def test_a_check_is_decided_where_its_interval_leaves_zero(low, high, outcome):
    assert CHECK.model_copy(update={"low": low, "high": high}).outcome == outcome
