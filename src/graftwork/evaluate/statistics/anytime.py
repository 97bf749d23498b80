"""Tests that may be looked at after every answer, and stopped when they are decided.

Input: wins and losses, or successes of two arms, as they come. Output: the evidence so far, and intervals
that hold at all times at once. Pure; does not know where the traffic comes from.

Each test is a bet against "no difference" that is fair while there is none: the capital starts at 1 and, by
Ville's inequality, reaches 1 / alpha with a chance of at most alpha however often one looks. The bets on
pairs are mixed over every possible effect by Jeffreys' prior, which has a closed form.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from graftwork.evaluate.statistics.intervals import Interval, bisect, log_beta

Side = Literal["candidate", "baseline"]
LARGEST_LOG = 700.0
STEPS = 36
"""Halvings of a search: bounds are good to ten digits."""


@dataclass
class _Bet:
    """Winnings so far and their maximum: once decided, a test stays decided."""

    alpha: float = 0.05
    highest_log: float = field(default=0.0, kw_only=True)
    winner: Side | None = field(default=None, kw_only=True)
    """Who was ahead when the test was decided."""

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, not {self.alpha}")

    @property
    def log_e_value(self) -> float:
        raise NotImplementedError

    @property
    def e_value(self) -> float:
        """The capital of the bet: 20 corresponds to a p of 0.05 at its best."""
        return math.exp(min(self.log_e_value, LARGEST_LOG))

    @property
    def p_value(self) -> float:
        """Valid at any time, however often it was looked at."""
        return math.exp(-max(self.highest_log, 0.0))

    @property
    def decided(self) -> bool:
        return self.winner is not None

    def _note(self, ahead: float) -> None:
        now = self.log_e_value
        self.highest_log = max(self.highest_log, now)
        if self.winner is None and now >= -math.log(self.alpha) and ahead:
            self.winner = "candidate" if ahead > 0 else "baseline"


def share_interval(wins: int, losses: int, *, confidence: float = 0.95) -> Interval:
    """The share of wins, valid at all times: where the bets of `MeanTest` have too little evidence against
    it.
    """
    count = wins + losses
    if not count:
        return Interval(0.0, 1.0)
    mixed = log_beta(wins + 0.5, losses + 0.5) - log_beta(0.5, 0.5)

    def is_excluded(rate: float) -> bool:
        return mixed - _log_chance((wins, losses), (rate, 1 - rate)) >= -math.log(1 - confidence)

    rate_seen = wins / count
    low = bisect(lambda rate: not is_excluded(rate), 0.0, rate_seen, steps=STEPS) if wins else 0.0
    high = bisect(is_excluded, rate_seen, 1.0, steps=STEPS) if losses else 1.0
    return Interval(low, high)


NODES = 64
"""Bets that are made in parallel; a mixture of finitely many is as fair as one of all."""


@dataclass
class MeanTest(_Bet):
    """Two subjects answer the same requests: is the mean difference of their scores 0?

    Takes one difference a session, from -1 to 1, candidate less baseline. Bets of every size on either side
    are mixed by the arcsine prior. Unlike a count of sessions won it cannot be misled by many small gains and
    a few large losses.
    """

    wins: int = field(default=0, kw_only=True)
    losses: int = field(default=0, kw_only=True)
    ties: int = field(default=0, kw_only=True)
    differences: list[float] = field(default_factory=list, kw_only=True)
    """All that was taken in, for the interval."""
    total: float = field(default=0.0, kw_only=True)
    log_capitals: list[float] = field(default_factory=lambda: [0.0] * NODES, kw_only=True)

    def update(self, difference: float) -> None:
        """One more session."""
        if not -1 <= difference <= 1:
            raise ValueError(f"a difference of scores is between -1 and 1, not {difference}")
        self.wins += difference > 0
        self.losses += difference < 0
        self.ties += difference == 0
        self.differences.append(difference)
        if difference:
            capitals = zip(self.log_capitals, _stakes(), strict=True)
            self.log_capitals = [now + math.log1p(stake * difference) for now, stake in capitals]
        self.total += difference
        self._note(self.total)

    @property
    def log_e_value(self) -> float:
        return _log_mean(self.log_capitals)

    def interval(self, confidence: float = 0.95) -> Interval:
        """The mean difference, valid at all times."""
        if not self.differences:
            return Interval(-1.0, 1.0)
        limit, mean_seen = -math.log(1 - confidence), math.fsum(self.differences) / len(self.differences)
        low = bisect(lambda mean: self._log_against(mean) < limit, -1.0, mean_seen, steps=STEPS)
        high = bisect(lambda mean: self._log_against(mean) >= limit, mean_seen, 1.0, steps=STEPS)
        return Interval(low, high)

    def _log_against(self, mean: float) -> float:
        """The capital of the same bets if the mean difference were `mean`."""
        counts = Counter(self.differences)
        # A stake that cannot lose more than all of the capital, whichever side the difference falls to.
        most = 1 / (1 + abs(mean))
        return _log_mean(
            [
                math.fsum(
                    times * math.log1p(stake * most * (value - mean)) for value, times in counts.items()
                )
                for stake in _stakes()
            ]
        )


@lru_cache(maxsize=1)
def _stakes() -> tuple[float, ...]:
    """Chebyshev's nodes: with equal weights they represent the arcsine prior from -1 to 1."""
    return tuple(math.cos((2 * index + 1) * math.pi / (2 * NODES)) for index in range(NODES))


def _log_mean(logs: Sequence[float]) -> float:
    most = max(logs)
    return most + math.log(math.fsum(math.exp(log - most) for log in logs) / len(logs))


Counts = tuple[float, float]
"""Successes and failures; an answer with a score of 0.7 is 0.7 of the one and 0.3 of the other."""


@dataclass
class TwoArms(_Bet):
    """Each request goes to one of two arms: do both succeed equally often?

    How many requests an arm gets, and in which order, does not matter, as long as what an answer was like
    does not decide it. As soon as both arms have new answers, the rates seen before are bet against their
    common mean, which is fair whatever rate the two arms share (Turner, Ly, Grünwald, 2024).

    Marks between 0 and 1 are split between success and failure. What a bet pays is convex in the mark, so it
    pays at most what an answer that succeeds with that chance would: the test of equal means stays fair, and
    is the more cautious the nearer the marks are to the middle.
    """

    baseline: Counts = field(default=(0, 0), kw_only=True)
    candidate: Counts = field(default=(0, 0), kw_only=True)
    baseline_waiting: Counts = field(default=(0, 0), kw_only=True)
    """Those of `baseline` that wait until the other arm has new answers as well."""
    candidate_waiting: Counts = field(default=(0, 0), kw_only=True)
    log_capital: float = field(default=0.0, kw_only=True)

    def update(self, arm: Side, *, successes: float = 0, failures: float = 0) -> None:
        """More answers of one arm."""
        if min(successes, failures) < 0:
            raise ValueError(f"counts cannot be negative: {successes} successes, {failures} failures")
        came = (successes, failures)
        if arm == "candidate":
            self.candidate = _add(self.candidate, came)
            self.candidate_waiting = _add(self.candidate_waiting, came)
        else:
            self.baseline = _add(self.baseline, came)
            self.baseline_waiting = _add(self.baseline_waiting, came)
        if sum(self.baseline_waiting) and sum(self.candidate_waiting):
            self._settle()
        self._note(self.difference)

    def _settle(self) -> None:
        """The bet on the waiting answers, made on what was seen before them."""
        base, new = self.baseline_waiting, self.candidate_waiting
        old_rate = _guess_rate(self.baseline, base)
        new_rate = _guess_rate(self.candidate, new)
        common = (sum(base) * old_rate + sum(new) * new_rate) / (sum(base) + sum(new))
        for counts, rate in ((base, old_rate), (new, new_rate)):
            self.log_capital += counts[0] * math.log(rate / common)
            self.log_capital += counts[1] * math.log((1 - rate) / (1 - common))
        self.baseline_waiting = self.candidate_waiting = (0, 0)

    @property
    def difference(self) -> float:
        """The candidate's rate less the baseline's; 0 before both were asked."""
        if not sum(self.baseline) or not sum(self.candidate):
            return 0.0
        return self.candidate[0] / sum(self.candidate) - self.baseline[0] / sum(self.baseline)

    @property
    def log_e_value(self) -> float:
        return self.log_capital

    @property
    def log_evidence(self) -> float:
        """Another bet against equal rates, which depends only on counts, in whichever order they came."""
        return self._log_against(0.0)

    def interval(self, confidence: float = 0.95) -> Interval:
        """The difference of the rates, valid at all times. It holds for every pair of rates and is therefore
        wider: it may still include 0 when the test, which only has to rule out that both are equal, is
        decided.
        """
        limit, difference = -math.log(1 - confidence), self.difference
        low = bisect(lambda d: self._log_against(d) < limit, -1.0, difference, steps=STEPS)
        high = bisect(lambda d: self._log_against(d) >= limit, difference, 1.0, steps=STEPS)
        return Interval(low, high)

    def _log_against(self, difference: float) -> float:
        """Against the likeliest pair of rates with that difference: fair whichever is true."""
        base, new = self.baseline, self.candidate
        mixed = log_beta(base[0] + 0.5, base[1] + 0.5) + log_beta(new[0] + 0.5, new[1] + 0.5)
        mixed -= 2 * log_beta(0.5, 0.5)

        def falling(rate: float) -> bool:
            """Whether the likelihood falls with the baseline's rate; it is concave, so once only."""
            return _slope(base, rate) + _slope(new, rate + difference) < 0

        rate = bisect(falling, max(0.0, -difference), min(1.0, 1.0 - difference), steps=STEPS)
        shifted = min(max(rate + difference, 0.0), 1.0)
        return mixed - _log_chance(base, (rate, 1 - rate)) - _log_chance(new, (shifted, 1 - shifted))


def _add(counts: Counts, came: Counts) -> Counts:
    return counts[0] + came[0], counts[1] + came[1]


def _guess_rate(counts: Counts, waiting: Counts) -> float:
    """The rate so far without those that wait, with one success and one failure added."""
    successes, failures = counts[0] - waiting[0], counts[1] - waiting[1]
    return (successes + 1) / (successes + failures + 2)


def _slope(counts: Counts, rate: float) -> float:
    won, lost = counts
    rising = won / rate if rate > 0 else math.inf if won else 0.0
    falling = lost / (1 - rate) if rate < 1 else math.inf if lost else 0.0
    return rising - falling


def _log_chance(counts: tuple[float, ...], chances: tuple[float, ...]) -> float:
    """The log of the likelihood of the counts in one order; impossible counts have minus infinity."""
    total = 0.0
    for count, chance in zip(counts, chances, strict=True):
        if count:
            total += count * math.log(chance) if chance > 0 else -math.inf
    return total
