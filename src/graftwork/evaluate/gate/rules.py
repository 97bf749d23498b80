"""One rule judged: a limit, a margin against another subject, a gain or saving; and the pairs it compares.

Input: a rule and the report. Output: a RuleResult. A rule that the point estimate keeps and its bound does
not is "unknown", not "fail": more cases would settle it. Margins are one-sided at the report's confidence. A
Pair is the candidate compared with another subject on the same cases; a gain is better whichever way the
metric counts. Pure.
"""

import math
from collections.abc import Mapping, Set
from typing import NamedTuple

from graftwork.evaluate.comparison import cluster_cases, compare, differences_of
from graftwork.evaluate.gate.figures import (
    MIDDLE,
    SUBJECTS,
    Needed,
    all_wrong,
    figure_of,
    find_ungraded,
    find_ungraded_pairs,
    finite,
    graded_cases,
    held_figure,
    measured,
    measurements_for,
    needed_for_limit,
    needed_for_mean,
    say_counts,
    say_like_these,
    say_limit,
    say_pairs_needed,
    say_test,
    say_ungraded,
    say_unmeasured,
    show_difference,
    show_range,
    show_size,
    times_for_percentile,
    times_of,
    write_rule,
)
from graftwork.evaluate.gate.settings import FIGURES, TIMED, Against, GateRule, GateSettings, Primary, Win
from graftwork.evaluate.judge_statistics import compare_by_judge
from graftwork.evaluate.statistics.intervals import fewest_for_quantile
from graftwork.evaluate.statistics.means import Units, make_units
from graftwork.evaluate.subjects import LOG, LOGGED_PROMPT, PROMPTED
from graftwork.grading.metrics import (
    JUDGE_PREFERENCE,
    LATENCY_P95,
    LOWER_IS_BETTER,
    PERPLEXITY,
    name_of,
    show,
    show_points,
)
from graftwork.records.report import (
    Comparison,
    Metric,
    Report,
    RuleKind,
    RuleOutcome,
    RuleResult,
    SubjectReport,
)

SIDE_BY_SIDE = "figures side by side"
BASE = "base"
NAMED: dict[Against, str] = {"log": LOG, "prompt": PROMPTED, "logged_prompt": LOGGED_PROMPT}
"""Subjects that have the same name in every report."""

MEASURED_ONCE = 0.05
"""A figure that is measured once, such as memory, must fall by this share to count as a saving."""


class Surroundings(NamedTuple):
    """Facts besides the report. `no_champion`: nothing is served yet, so the base is used instead."""

    no_champion: bool = False
    champion: str = ""
    """The served release, if the report does not include it."""
    instead: str = ""
    """Why the base replaces the champion, in a sentence, if the reason is not that nothing is served."""
    look: int = 0
    """Which look at these cases this is: later ones may err less (`share_of_look`); 0: see the report."""
    tried: int = 1
    """Adapters that are judged together."""
    doubts: Mapping[str, str] = {}
    """Metrics that may not decide, each with the reason, such as an uncalibrated judge."""


class Pair(NamedTuple):
    """A comparison as gain, with the bounds of the gain. `confidence` is that of the report."""

    comparison: Comparison
    kind: str
    gain: float
    low: float
    high: float
    confidence: float
    ungraded: int = 0
    """Cases that one of the two could not be graded on: each counts in `low` as one that was lost."""
    fewest: int = 0
    """Requests, or sessions, without which no bound of the gain reaches the confidence."""
    worst_p: float = 1.0
    """p of the gain if every ungraded case was lost; that of `seen` if there is none."""
    units: Units | None = None
    """The gain of each session or case; None if grades are unbounded or not known one by one."""

    @property
    def too_few(self) -> bool:
        """So few requests or sessions bound nothing, however similar they are."""
        return (self.comparison.clusters or self.comparison.n) < self.fewest

    @property
    def pairs_for_bound(self) -> int:
        """Pairs like these that give enough requests or sessions for a bound."""
        return math.ceil(self.fewest * self.comparison.n / (self.comparison.clusters or self.comparison.n))

    @property
    def proven_loss(self) -> bool:
        beyond_chance = self.comparison.p_value < 1 - self.confidence
        if self.comparison.test == SIDE_BY_SIDE:
            beyond_chance = not self.low <= 0 <= self.high
        return self.gain < 0 and beyond_chance and not self.too_few


def judge_guardrail(rule: GateRule, *, report: Report, around: Surroundings) -> RuleResult:
    """Non-inferiority: the lower bound of the gain is above minus the margin."""
    subject = find_subject(report, rule.reference, around)
    pair = pair_up(report, rule.metric, with_subject=subject, one_sided=True) if subject is not None else None
    if pair is None:
        why = (
            explain_missing(rule.reference, around)
            if subject is None
            else f"it was not measured on the same cases as {SUBJECTS[rule.reference]}"
        )
        return not_compared(
            rule.metric,
            rule=write_rule(rule),
            kind="guardrail",
            limit=-rule.limit,
            why=why,
            against=rule.reference,
        )
    return judge_margin(
        rule.metric,
        pair=pair,
        margin=rule.limit,
        rule=write_rule(rule),
        subject_name=rule.reference,
        look=max(around.look, 1),
    )


def judge_margin(
    metric: str, *, pair: Pair, margin: float, rule: str, subject_name: str, look: int = 1
) -> RuleResult:
    """A pair against a margin."""
    outcome: RuleOutcome = "unknown" if pair.gain > -margin else "fail"
    if pair.low > -margin and not pair.too_few:
        outcome = "pass"
    needed: Needed | None = None
    # Where a case could not be graded, it is not the number of cases that leaves it open.
    if outcome == "unknown" and not pair.ungraded:
        tail = 1 - pair.confidence
        if pair.too_few:
            needed = Needed(pair.pairs_for_bound)
        elif pair.kind == "number":
            needed = measurements_for(pair.gain, low=pair.low, beyond=-margin, n=pair.comparison.n, tail=tail)
        elif margin < 1:
            needed = needed_for_mean(pair.units, limit=-margin, tail=tail, look=look)
    sign = -1 if lower_is_better(metric) else 1
    size = show_size(metric, margin)
    low, high = (sign * bound for bound in (pair.low, pair.high))
    subject = next((phrase for against, phrase in SUBJECTS.items() if against == subject_name), subject_name)
    return RuleResult(
        metric=metric,
        rule=rule,
        outcome=outcome,
        value=sign * pair.gain,
        low=finite(min(low, high)),
        high=finite(max(low, high)),
        limit=-sign * margin,
        sentence=(
            f"{name_of(metric)}: {say_counts(pair.comparison)} against {subject} "
            f"({show_difference(metric, sign * pair.gain)}), {_say_end(metric, pair, outcome, size, needed)}."
            f"{say_ungraded(pair.ungraded)}"
        ),
        **(needed.fields if needed else {}),
        kind="guardrail",
        against=pair.comparison.baseline,
        margin=margin,
        n=pair.comparison.n,
        p_value=pair.comparison.p_value if pair.comparison.test != SIDE_BY_SIDE else None,
        test=pair.comparison.test,
    )


def _say_end(metric: str, pair: Pair, outcome: RuleOutcome, size: str, needed: Needed | None) -> str:
    if outcome == "fail":
        return f"a loss of more than the margin of {size}"
    if outcome == "unknown" and pair.too_few:
        return f"too few to bound the loss; {say_pairs_needed(metric, needed)}"
    if not math.isfinite(pair.low):
        return "which what was not graded may undo"
    worst = show_difference(metric, (-1 if lower_is_better(metric) else 1) * pair.low)
    if outcome == "pass":
        return f"at worst {worst}, which keeps the margin of {size}"
    return f"at worst {worst}, beyond the margin of {size}; {say_pairs_needed(metric, needed)}"


def not_compared(
    metric: str, *, rule: str, kind: RuleKind, limit: float, why: str, against: str
) -> RuleResult:
    """A comparison that could not be made proves nothing."""
    return RuleResult(
        metric=metric,
        rule=rule,
        outcome="unknown",
        value=None,
        low=None,
        high=None,
        limit=limit,
        sentence=f"{name_of(metric)} was not compared on any case, so nothing can be shown: {why}.",
        kind=kind,
        against=against,
        n=0,
    )


def judge_limit(rule: GateRule, *, report: Report, look: int = 1) -> RuleResult:
    """Compare a limit or an invariant with the candidate's figure."""
    metric = figure_of(report.candidate, rule, sessions=report.sessions)
    ungraded = find_ungraded(report, rule.metric)
    return judge_rule(rule, metric=metric, ungraded=ungraded, sessions=report.sessions, look=look)


def judge_rule(
    rule: GateRule,
    *,
    metric: Metric | None,
    ungraded: Set[str] = frozenset(),
    sessions: Mapping[str, str] | None = None,
    look: int = 1,
) -> RuleResult:
    """Judge one rule by one figure; `ungraded` cases count against it."""
    kind = "invariant" if rule.severity == "invariant" else "limit"
    if metric is None or metric.n == 0:
        return RuleResult(
            metric=rule.metric,
            rule=write_rule(rule),
            outcome="unknown",
            value=None,
            low=None,
            high=None,
            limit=rule.limit,
            sentence=say_unmeasured(rule, len(ungraded)),
            kind=kind,
            n=0,
        )
    outcome: RuleOutcome = "fail"
    worst = held_figure(rule, metric)
    if ungraded and rule.metric in FIGURES:
        # The figure has no known upper bound, so it cannot show that a rule holds.
        worst = math.nan
    elif ungraded:
        # The bound if every case that has no grade was wrong: that may be the answer's fault.
        wrong = 0.0 if rule.wants_more else 1.0
        worst = held_figure(rule, all_wrong(metric, ungraded, wrong=wrong, sessions=sessions or {}))
    if rule.clears(worst):
        outcome = "pass"
    elif rule.clears(metric.value):
        outcome = "unknown"
    too_wide = outcome == "unknown" and not rule.clears(held_figure(rule, metric))
    needed = needed_for_limit(rule, metric, sessions=sessions or {}, look=look) if too_wide else None
    return RuleResult(
        metric=rule.metric,
        rule=write_rule(rule),
        outcome=outcome,
        value=metric.value,
        low=finite(metric.low),
        high=finite(metric.high),
        limit=rule.limit,
        sentence=say_limit(rule, metric, outcome, needed) + say_ungraded(len(ungraded)),
        **(needed.fields if needed else {}),
        kind=kind,
        n=metric.n,
        test=metric.method,
    )


def explain_broken(rule: GateRule, *, report: Report) -> str | None:
    """Why an invariant ends the attempt: its whole interval is on the wrong side. None if it does not."""
    metric = figure_of(report.candidate, rule, sessions=report.sessions)
    if rule.severity != "invariant" or metric is None or metric.n == 0:
        return None
    best = metric.value if rule.held_bound == "value" else metric.high if rule.wants_more else metric.low
    if rule.clears(best):
        return None
    return (
        f"the invariant {write_rule(rule)} is broken: {show(rule.metric, metric.value)} "
        f"({show_range(rule.metric, metric.low, metric.high)})"
    )


def judge_gains(
    report: Report, settings: GateSettings, *, around: Surroundings, adjusted_p: float | None = None
) -> list[RuleResult]:
    """Judge the primary metric and the declared saving, if any."""
    gains: list[RuleResult] = []
    if (primary := settings.primary_rule) is not None:
        gains.append(judge_primary(primary, report=report, around=around, adjusted_p=adjusted_p))
    if (win := settings.win_rule) is not None:
        gains.append(judge_win(win, report=report, around=around))
    if len(gains) == 2:
        # Of two ways to gain the better one counts; the other is reported and not needed.
        rank = {"pass": 2, "unknown": 1, "fail": 0}
        best = max(gains, key=lambda gain: rank[gain.outcome])
        gains = [gain if gain is best else gain.model_copy(update={"must": False}) for gain in gains]
    return gains


def p_of_primary(report: Report, settings: GateSettings, *, around: Surroundings) -> float | None:
    """The p value that Holm's correction over several adapters starts from; None without a primary metric."""
    primary = settings.primary_rule
    subject = find_subject(report, primary.against, around) if primary else None
    pair = pair_up(report, primary.metric, with_subject=subject) if primary and subject else None
    return pair.worst_p if pair is not None else None


def judge_primary(
    primary: Primary, *, report: Report, around: Surroundings, adjusted_p: float | None = None
) -> RuleResult:
    """The one metric on which the candidate must be better."""
    opponent = SUBJECTS[primary.against]
    text = f"{name_of(primary.metric)} better than {opponent}"
    pair = _find(report, primary, around)
    if isinstance(pair, str):
        return not_compared(
            primary.metric, rule=text, kind="primary", limit=0.0, why=pair, against=primary.against
        )
    comparison = pair.comparison
    p = pair.worst_p if adjusted_p is None else max(adjusted_p, pair.worst_p)
    better = pair.gain > 0 and p < 1 - pair.confidence and (not pair.ungraded or pair.low > 0)
    outcome: RuleOutcome = "pass" if better else "unknown" if pair.gain > 0 else "fail"
    too_few = outcome == "unknown" and not pair.ungraded
    tail = (1 - pair.confidence) / 2 / around.tried
    needed = needed_for_mean(pair.units, limit=0.0, tail=tail, look=max(around.look, 1)) if too_few else None
    settles = f"; {say_pairs_needed(primary.metric, needed)}" if needed else ""
    endings: dict[RuleOutcome, str] = {
        "pass": f"better on average over {say_like_these(comparison)}",
        "unknown": f"which may be chance{settles}" if too_few else "which what was not graded may undo",
        "fail": f"so the adapter is not better than {opponent}",
    }
    return RuleResult(
        metric=primary.metric,
        rule=text,
        outcome=outcome,
        value=comparison.difference,
        low=comparison.low,
        high=comparison.high,
        limit=0.0,
        sentence=(
            f"{name_of(primary.metric)}: {say_counts(comparison)} against {opponent} "
            f"({show_points(comparison.difference)}, {say_test(comparison, adjusted=adjusted_p)}), "
            f"{endings[outcome]}.{say_ungraded(pair.ungraded)}"
        ),
        **(needed.fields if needed else {}),
        kind="primary",
        against=comparison.baseline,
        n=comparison.n,
        p_value=comparison.p_value,
        adjusted_p=adjusted_p,
        test=comparison.test,
    )


def judge_win(win: Win, *, report: Report, around: Surroundings) -> RuleResult:
    """The declared saving: its lower bound is above the required one."""
    opponent = SUBJECTS[win.against]
    share = f" by at least {100 * win.by:g} %" if win.by else ""
    less = "less" if lower_is_better(win.metric) else "more"
    text = f"{name_of(win.metric)} {less} than {'that of ' if win.against != 'log' else ''}{opponent}{share}"
    pair = _find(report, win, around)
    if isinstance(pair, str):
        return not_compared(win.metric, rule=text, kind="win", limit=0.0, why=pair, against=win.against)
    # In the metric's unit. One measurement each has no interval, so a small difference is not a saving.
    subject = find_subject(report, win.against, around)
    now = measured(subject, win.metric) if subject is not None else None
    least = MEASURED_ONCE if pair.low == pair.high else 0.0
    comparison, threshold = pair.comparison, max(win.by, least) * (now.value if now is not None else 0.0)
    outcome: RuleOutcome = "unknown" if pair.gain > threshold else "fail"
    if pair.low > threshold and not pair.too_few:
        outcome = "pass"
    needed: Needed | None = None
    if outcome == "unknown" and not pair.ungraded:
        tail = (1 - pair.confidence) / around.tried
        needed = measurements_for(pair.gain, low=pair.low, beyond=threshold, n=comparison.n, tail=tail)
        needed = Needed(pair.pairs_for_bound) if pair.too_few else needed
    sign = -1 if lower_is_better(win.metric) else 1
    size = show_size(win.metric, threshold) if threshold else "nothing"
    endings: dict[RuleOutcome, str] = {
        "pass": f"at the least {show_difference(win.metric, sign * pair.low)}: the saving that was declared",
        "unknown": f"which may be {f'no more than {size}' if threshold else 'no saving at all'}; "
        f"{say_pairs_needed(win.metric, needed)}",
        "fail": f"not the saving of more than {size} that was declared",
    }
    return RuleResult(
        metric=win.metric,
        rule=text,
        outcome=outcome,
        value=comparison.difference,
        low=finite(min(sign * pair.low, sign * pair.high)),
        high=finite(max(sign * pair.low, sign * pair.high)),
        limit=sign * threshold,
        sentence=(
            f"{name_of(win.metric)}: {show_difference(win.metric, comparison.difference)} against {opponent} "
            f"({say_counts(comparison)}), {endings[outcome]}.{say_ungraded(pair.ungraded)}"
        ),
        **(needed.fields if needed else {}),
        kind="win",
        against=comparison.baseline,
        n=comparison.n,
        p_value=comparison.p_value if comparison.test != SIDE_BY_SIDE else None,
        test=comparison.test,
    )


def _find(report: Report, goal: Primary | Win, around: Surroundings) -> Pair | str:
    """The pair, or why there is none. A saving is bounded from below; a gain is tested both ways."""
    subject = find_subject(report, goal.against, around)
    if subject is None:
        return explain_missing(goal.against, around)
    saving = isinstance(goal, Win)
    pair = pair_up(
        report, goal.metric, with_subject=subject, one_sided=saving, tried=around.tried if saving else 1
    )
    return pair or f"it was not measured on the same cases as {SUBJECTS[goal.against]}"


def lower_is_better(name: str) -> bool:
    return name in LOWER_IS_BETTER


def find_subject(report: Report, against: Against, around: Surroundings) -> SubjectReport | None:
    """The subject that the candidate is compared with; None if it did not answer these cases."""
    everyone = (report.baseline, *report.others)
    if against == "champion":
        if around.no_champion and report.champion is None:
            return find_subject(report, "base", around)
        return next((subject for subject in everyone if subject.subject == report.champion), None)
    if against in NAMED:
        return next((subject for subject in everyone if subject.subject == NAMED[against]), None)
    base = next((subject for subject in everyone if subject.subject == BASE), None)
    # A report with one baseline means that one, whatever it is called.
    return base or (report.baseline if report.baseline.subject not in (LOG, report.champion) else None)


def pair_up(
    report: Report, name: str, *, with_subject: SubjectReport, one_sided: bool = False, tried: int = 1
) -> Pair | None:
    """Compare the candidate's metric with the other's; None if one of them was not measured. `one_sided`
    makes each bound hold on its own, as a margin requires. `tried` makes the bounds of this many candidates
    hold together (Bonferroni).
    """
    mine, theirs = measured(report.candidate, name), measured(with_subject, name)
    confidence = mine.confidence if mine is not None else confidence_of(report)
    bounds_at = 1 - (1 - confidence) * (2 if one_sided else 1) / tried
    comparison = _compare(report, with_subject, name, confidence=bounds_at)
    kind = mine.kind if mine is not None else "rate"
    if comparison is None:
        if mine is None or theirs is None or kind != "number" or not (mine.n and theirs.n):
            return None
        # Without pairs the difference can be as small and as large as both intervals allow.
        comparison = Comparison(
            metric=name,
            baseline=with_subject.subject,
            candidate=report.candidate.subject,
            n=min(mine.n, theirs.n),
            wins=0,
            losses=0,
            difference=mine.value - theirs.value,
            low=mine.low - theirs.high,
            high=mine.high - theirs.low,
            p_value=1.0,
            test=SIDE_BY_SIDE,
        )
    if comparison.n == 0:
        return None
    sign = -1 if lower_is_better(name) else 1
    low, high = sorted((sign * comparison.low, sign * comparison.high))
    gain = sign * comparison.difference
    low, high = min(low, gain), max(high, gain)
    worst_p = comparison.p_value
    if ungraded := find_ungraded_pairs(report, name, other=with_subject):
        # What made the grader fail may be what is wrong with the answer.
        worst = _at_worst(report, name, subject=with_subject, ungraded=ungraded, confidence=bounds_at)
        low, worst_p = min(low, worst[0]), max(worst_p, worst[1])
    fewest = 0
    if name in (*TIMED, PERPLEXITY):
        fewest = fewest_for_quantile(MIDDLE, confidence=bounds_at)
    if name == LATENCY_P95:
        fewest = times_for_percentile(confidence)
    units = _units(report, with_subject, name)
    return Pair(comparison, kind, gain, low, high, confidence, len(ungraded), fewest, worst_p, units)


def _units(report: Report, subject: SubjectReport, name: str) -> Units | None:
    sign = -1 if lower_is_better(name) else 1
    mine, theirs = report.candidate.metrics.get(name), subject.metrics.get(name)
    if mine is not None and theirs is not None and mine.scores and mine.kind != "number":
        gains = differences_of(subject, candidate=report.candidate, metric=name)
    else:
        sides = (subject.subject, report.candidate.subject)
        tallies = report.judged if name == JUDGE_PREFERENCE else ()
        graded = next((t.grades for t in tallies if (t.baseline, t.candidate) == sides), {})
        gains = {case: 2 * grade - 1 for case, grade in graded.items() if grade is not None}
    if not gains:
        return None
    clusters = cluster_cases(list(gains), sessions=report.sessions)
    return make_units([sign * gain for gain in gains.values()], clusters)


def _at_worst(
    report: Report, name: str, *, subject: SubjectReport, ungraded: Set[str], confidence: float
) -> tuple[float, float]:
    """The least gain, and its p, if a missing grade is wrong for the candidate and right for the other."""
    sign = -1 if lower_is_better(name) else 1
    mine, theirs = report.candidate.metrics.get(name), subject.metrics.get(name)
    if mine is not None and mine.kind == "number":
        return -math.inf, 1.0
    if mine is not None and theirs is not None:
        wrong, right = (1.0, 0.0) if sign < 0 else (0.0, 1.0)
        mine = all_wrong(mine, ungraded - graded_cases(mine), wrong=wrong, sessions=report.sessions)
        theirs = all_wrong(theirs, ungraded - graded_cases(theirs), wrong=right, sessions=report.sessions)
        report = report.model_copy(
            update={"candidate": report.candidate.model_copy(update={"metrics": {name: mine}})}
        )
        subject = subject.model_copy(update={"metrics": {name: theirs}})
    judged = [
        tally.model_copy(update={"grades": {**tally.grades, **dict.fromkeys(tally.unjudged, 0.0)}})
        if tally.grades
        else tally
        for tally in report.judged
    ]
    comparison = _compare(
        report.model_copy(update={"judged": tuple(judged)}), subject, name, confidence=confidence
    )
    if comparison is None:
        return -1.0, 1.0
    low = min(sign * comparison.low, sign * comparison.high)
    unjudged = 0
    if name == JUDGE_PREFERENCE and not any(tally.grades for tally in judged):
        # What the comparison could not take in, for lack of names, is counted separately.
        sides = (subject.subject, report.candidate.subject)
        unjudged = sum(len(t.unjudged) for t in report.judged if (t.baseline, t.candidate) == sides)
    lost = (low * comparison.n - unjudged) / (comparison.n + unjudged) if comparison.n else -1.0
    return lost, comparison.p_value if lost > 0 else 1.0


def explain_missing(against: Against, around: Surroundings) -> str:
    """Explain why a subject is missing, and how to add it."""
    if against != "champion":
        subject_name = NAMED.get(against, against)
        return f"the {subject_name} was not asked these cases; `graft eval` does that"
    name = f" ({around.champion[:12]})" if around.champion else ""
    return (
        f"the champion{name} was not asked these cases; `graft eval` asks it, and says why where it cannot "
        "(`graft release verify` checks its files)"
    )


def confidence_of(report: Report) -> float:
    return max((metric.confidence for metric in report.candidate.metrics.values()), default=0.95)


def _compare(report: Report, subject: SubjectReport, name: str, *, confidence: float) -> Comparison | None:
    comparisons = compare(
        _only(subject, name),
        candidate=_only(report.candidate, name),
        confidence=confidence,
        sessions=report.sessions,
    )
    if comparisons and comparisons[0].n:
        # First tokens are compared the way whole answers are.
        return comparisons[0].model_copy(update={"metric": name})
    sides = (subject.subject, report.candidate.subject)
    for tally in report.judged if name == JUDGE_PREFERENCE else ():
        if (tally.baseline, tally.candidate) == sides and tally.grades:
            return compare_by_judge(tally, confidence=confidence, sessions=report.sessions)
    # Without scores the report's own comparison is all there is.
    key = (name, subject.subject, report.candidate.subject)
    stored = (c for c in report.comparisons if (c.metric, c.baseline, c.candidate) == key)
    return next(stored, None)


def _only(subject: SubjectReport, name: str) -> SubjectReport:
    """The subject with this one metric: nothing else is compared."""
    times = tuple(times_of(subject, name)) if name in TIMED else ()
    metrics = {name: subject.metrics[name]} if name in subject.metrics and name not in TIMED else {}
    # Where it has no pairs of its own, other timings may not replace them.
    generation = subject.generation.model_copy(
        update={"single_latency_seconds": times, "first_token_seconds": ()}
    )
    return subject.model_copy(update={"metrics": metrics, "generation": generation})
