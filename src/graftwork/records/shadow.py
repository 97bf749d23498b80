"""What copies of live requests say about a challenger, check by check."""

from graftwork.records.base import Record


class ShadowCheck(Record):
    """One check on the pairs of answers that both have a grade for."""

    check: str
    pairs: int
    champion: float | None
    """The mean grade of its own answers; None where there is no pair."""
    challenger: float | None
    wins: int
    """Sessions in which the challenger's answer was better."""
    losses: int
    ties: int
    low: float
    """Challenger less champion, valid at any time and for all checks together."""
    high: float

    @property
    def outcome(self) -> str:
        return "better" if self.low > 0 else "worse" if self.high < 0 else "open"


class ShadowSummary(Record):
    """Copies that a challenger answered of requests that a champion was asked."""

    champion: str
    challenger: str
    copies: int
    """Copies that were asked, with those that failed and those that were interrupted."""
    sessions: int
    """Sessions that are compared: each counts once."""
    failed: int
    """Copies without an answer; they count as wrong."""
    interrupted: int
    """Copies that made way for users; they are not compared."""
    checks: tuple[ShadowCheck, ...]
    confidence: float
    champion_ms: float | None = None
    """Median time of an answer."""
    challenger_ms: float | None = None
    remarks: tuple[str, ...] = ()
