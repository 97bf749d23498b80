"""The verdict about a family of models: every route, the router, chains, fallbacks, memory and latency. Pure.

In: what the endpoint answered before and after a member changed. Out: one rule for each promise. A route
whose answers are letter for letter the same has not got worse; one with other answers must not be worse by
more than the margin.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graftwork.evaluate.statistics.bounded import bounded_difference, bounded_mean
from graftwork.records.report import Decision, RuleOutcome, RuleResult

P95 = 0.95


class RoutedAnswer(NamedTuple):
    """One case as the family answered it."""

    case: str
    session: str
    expected: str
    """The model that the case is for."""
    member: str
    """The model that the route chose."""
    by: str
    """What chose it: `rule 2`, `router`, `unsure`, `away` or `default`. With `away`, the main model answered
    because the router's choice could not."""
    text: str
    grade: float | None
    seconds: float
    answered: bool = True
    fallback: bool = False
    escalated: bool = False


@dataclass(frozen=True, kw_only=True)
class FamilyLimits:
    metric: str
    margin: float
    router_margin: float
    router_accuracy: float | None = None
    """Of the router's card, where it is sure; None without a router."""
    max_memory_gib: float | None = None
    max_p95_seconds: float | None = None
    rules: tuple[str, ...] = ()
    """The member that each declared rule leads to."""


class ChainTally(NamedTuple):
    """The requests to one chain: answered, asked, and why the first that failed was not answered."""

    answered: int
    asked: int
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class FamilyEvidence:
    before: Sequence[RoutedAnswer]
    """The family as it is live; empty where nothing changes."""
    after: Sequence[RoutedAnswer]
    without: Sequence[RoutedAnswer] = ()
    """The same cases while the changed member is away."""
    chains: Mapping[str, ChainTally] = field(default_factory=dict)
    """Requests of each chain that were answered, of how many."""
    memory_gib: float | None = None


def judge_family(seen: FamilyEvidence, limits: FamilyLimits) -> tuple[RuleResult, ...]:
    # Each route against itself before the change, on the same cases.
    old = {answer.case: answer for answer in seen.before}
    routes: defaultdict[str, list[tuple[RoutedAnswer, RoutedAnswer]]] = defaultdict(list)
    for answer in seen.after:
        if answer.case in old:
            routes[answer.expected].append((old[answer.case], answer))
    return (
        _all_answered("answered", seen.after),
        *(_compare_route(route, pairs, limits) for route, pairs in sorted(routes.items())),
        *_router_holds(seen.after, limits),
        *_rules_match(seen.after, limits),
        *_chains_answer(seen.chains),
        *([_all_answered("fallback", seen.without)] if seen.without else []),
        *_within(seen, limits),
    )


def decide_family(rules: Iterable[RuleResult]) -> Decision:
    outcomes = {rule.outcome for rule in rules}
    if "fail" in outcomes:
        return "abort"
    return "not_enough_evidence" if "unknown" in outcomes else "deploy"


def _all_answered(name: str, answers: Sequence[RoutedAnswer]) -> RuleResult:
    missing = [answer for answer in answers if not answer.answered]
    what = "requests are answered" if name == "answered" else "requests are answered while the member is away"
    shown = f"; missing: {', '.join(sorted({a.member for a in missing}))}" if missing else ""
    return RuleResult(
        metric=name,
        rule=f"every request is answered ({name})",
        kind="invariant",
        outcome="fail" if missing else "pass" if answers else "unknown",
        value=1 - len(missing) / len(answers) if answers else None,
        low=None,
        high=None,
        limit=1.0,
        n=len(answers),
        sentence=f"{len(answers) - len(missing)} of {len(answers)} {what}{shown}",
    )


def _compare_route(
    route: str, pairs: Sequence[tuple[RoutedAnswer, RoutedAnswer]], limits: FamilyLimits
) -> RuleResult:
    graded = [(b, a) for b, a in pairs if b.grade is not None and a.grade is not None]
    changed = sum(before.text != after.text for before, after in pairs)
    befores = [b.grade or 0.0 for b, _ in graded]
    afters = [a.grade or 0.0 for _, a in graded]
    low, high = bounded_difference(befores, afters, [a.session for _, a in graded])
    value = math.fsum(afters) / len(afters) - math.fsum(befores) / len(befores) if graded else None
    outcome: RuleOutcome
    if not changed:
        outcome, said = "pass", "gives the same answers as before"
    elif value is None:
        outcome, said = "unknown", f"has {changed} other answers and none can be graded by {limits.metric}"
    else:
        outcome = "pass" if low > -limits.margin else "fail" if high < 0 else "unknown"
        said = f"changed by {value:+.3f} ({low:+.3f} to {high:+.3f}) in {limits.metric}"
    return RuleResult(
        metric=limits.metric,
        rule=f"the route {route} is not worse by {limits.margin:g}",
        kind="guardrail",
        outcome=outcome,
        value=value,
        low=low,
        high=high,
        limit=-limits.margin,
        margin=limits.margin,
        n=len(pairs),
        sentence=f"{route} {said}; {len(pairs)} cases, {changed} with another answer",
    )


def _router_holds(answers: Sequence[RoutedAnswer], limits: FamilyLimits) -> Iterator[RuleResult]:
    if limits.router_accuracy is None:
        return
    sure = [answer for answer in answers if answer.by == "router"]
    right = [float(answer.member == answer.expected) for answer in sure]
    low, high = bounded_mean(right, [answer.session for answer in sure])
    least = limits.router_accuracy - limits.router_margin
    value = math.fsum(right) / len(right) if right else None
    outcome: RuleOutcome = "unknown"
    if value is not None:
        outcome = "pass" if low >= least else "fail" if high < least else "unknown"
    unsure, away = (sum(answer.by == by for answer in answers) for by in ("unsure", "away"))
    shown = (
        "no request" if value is None else f"{value:.1%} ({low:.1%} to {high:.1%}) of {len(sure)} requests"
    )
    yield RuleResult(
        metric="router_accuracy",
        rule=f"the router is right in {least:.1%} where it is sure",
        kind="guardrail",
        outcome=outcome,
        value=value,
        low=low,
        high=high,
        limit=least,
        n=len(sure),
        sentence=f"the router chose the right model for {shown}; unsure in {unsure}"
        + (f"; {away} not counted: the chosen model was away" if away else ""),
    )


def _rules_match(answers: Sequence[RoutedAnswer], limits: FamilyLimits) -> Iterator[RuleResult]:
    """A declared rule that takes everything from the others is a mistake; one that nothing matches may be."""
    counts = Counter(answer.by for answer in answers)
    wanted = {answer.expected for answer in answers}
    for number, to in enumerate(limits.rules, 1):
        count = counts[f"rule {number}"]
        takes_all = count == len(answers) and len(wanted) > 1
        yield RuleResult(
            metric="rule_matches",
            rule=f"rule {number} (to {to}) matches some requests and not all",
            kind="invariant",
            outcome="fail" if takes_all else "pass",
            value=count / len(answers) if answers else None,
            low=None,
            high=None,
            limit=1.0,
            n=len(answers),
            sentence=f"rule {number} (to {to}) matched {count} of {len(answers)} requests"
            + ("" if count else ": nothing here shows that it can match"),
        )


def _chains_answer(chains: Mapping[str, ChainTally]) -> Iterator[RuleResult]:
    for name, (answered, asked, problem) in sorted(chains.items()):
        yield RuleResult(
            metric="chain",
            rule=f"the chain {name} answers",
            kind="invariant",
            outcome="pass" if answered == asked else "fail",
            value=answered / asked if asked else None,
            low=None,
            high=None,
            limit=1.0,
            n=asked,
            sentence=f"the chain {name} answered {answered} of {asked} requests"
            + (f": {problem}" if problem else ""),
        )


def _within(seen: FamilyEvidence, limits: FamilyLimits) -> Iterator[RuleResult]:
    seconds = sorted(answer.seconds for answer in seen.after if answer.answered)
    p95 = seconds[min(int(P95 * len(seconds)), len(seconds) - 1)] if seconds else None
    for metric, value, limit, unit in (
        ("memory_gib", seen.memory_gib, limits.max_memory_gib, "GiB of memory in the engine processes"),
        ("latency_p95", p95, limits.max_p95_seconds, "s at the 95th percentile"),
    ):
        if limit is None:
            continue
        outcome: RuleOutcome = "unknown" if value is None else "pass" if value <= limit else "fail"
        yield RuleResult(
            metric=metric,
            rule=f"{metric} at most {limit:g}",
            kind="limit",
            outcome=outcome,
            value=value,
            low=None,
            high=None,
            limit=limit,
            n=len(seconds),
            sentence="not measured" if value is None else f"{value:.2f} {unit}, allowed {limit:g}",
        )
