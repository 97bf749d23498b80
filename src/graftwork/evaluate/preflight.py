"""Metrics and rules tried out before anything is trained.

Input: the held-out cases, the settings of evaluation and gate. Output: how every metric grades the log's own
replies, spoiled copies of them and one answer given to everything; and whether each rule can pass and can
fail with this many cases. Pure but for the project's custom metrics, which it calls. Asks no model.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.rules import Surroundings
from graftwork.evaluate.gate.settings import FIGURES, REQUESTS, TIMED, GateRule, GateSettings
from graftwork.evaluate.report import make_metric, make_report, sessions_of
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.evaluate.statistics.intervals import clopper_pearson, first_count, quantile_interval
from graftwork.evaluate.statistics.means import paired_difference
from graftwork.evaluate.subjects import LOG, LOGGED_PROMPT, PROMPTED
from graftwork.grading.answers import parse_object
from graftwork.grading.checks import explain_vacuous, grade
from graftwork.grading.interface import GradeContext
from graftwork.grading.metrics import (
    GRADERS,
    JUDGE_PREFERENCE,
    JUDGE_SCORE,
    LATENCY_P95,
    LOWER_IS_BETTER,
    NOT_REFUSED,
    TASK_SUCCESS,
    TRUNCATED,
    name_of,
    show,
)
from graftwork.records.base import Record
from graftwork.records.report import Case, Generation, Metric, Report, SubjectReport, Verdict
from graftwork.text.wording import plural

COPIES = 10
"""Corrupted copies of every reply, each corrupted in a different way."""
CONSTANTS = 12
"""Replies of the log that are each tried as the answer to everything."""
SAMPLE = 120
"""Cases that the corrupted copies are made from; the log's own replies are graded on all."""
SMALLEST_SAMPLE = 10
CHARACTERS = 1_000_000
"""Total characters of corrupted copies and constant answers: long replies make the sample smaller, so that
the time limit, which depends on the load of the machine, decides nothing.
"""
SECONDS = 6.0
"""Time limit of one metric, half of it for the log's own replies; then it is judged by what was graded so
far.
"""

Severity = Literal["error", "warning"]


class MetricTrial(Record):
    """How a metric grades known correct answers, and known wrong ones."""

    name: str
    cases: int
    """Held-out cases that it grades."""
    own: float | None
    """The mean grade of the log's own replies; None if it grades none of them."""
    spoiled: float | None
    """The mean grade of their corrupted copies."""
    constant: float | None
    """The grade of the best single answer to everything: the score of a model that has learned nothing."""
    constant_answer: str = ""
    failed: int = 0
    why: str = ""
    """Why it grades nothing, or proves nothing; or the grader's error if it failed."""


class Problem(Record):
    """Something that would be found only after training. An error stops the run, a warning does not."""

    severity: Severity
    what: str
    why: str = ""
    fix: str = ""


def try_out(
    cases: Sequence[Case], *, evaluate: EvaluateSettings, gate: GateSettings, context: GradeContext
) -> tuple[tuple[MetricTrial, ...], list[Problem]]:
    """Try every metric on right and wrong answers, every rule on the best and the worst possible adapter.
    Errors come before warnings.
    """
    checks = {check.name: check for check in evaluate.checks}
    context = replace(context, checks={**checks, **context.checks}, failed=[])
    # A judge costs money and minutes: it is not asked for a rehearsal.
    names = [name for name in evaluate.graded_on(cases) if name != JUDGE_SCORE]
    trials = tuple(try_metric(name, cases, context=context) for name in names)
    ruled = _metrics_of_rules(gate)
    relevant = {*ruled, *checks}
    if "metrics" in evaluate.model_fields_set:
        relevant |= set(evaluate.metrics)
    problems = [problem for trial in trials for problem in _judge_metric(trial, gate, relevant=relevant)]
    problems += _judge_rules(cases, evaluate=evaluate, gate=gate, trials=trials)
    return trials, sorted(problems, key=lambda problem: problem.severity != "error")


def try_metric(
    name: str, cases: Sequence[Case], *, context: GradeContext, clock: Callable[[], float] | None = None
) -> MetricTrial:
    """Try one metric on the log's own replies, on their corrupted copies and on constant answers."""
    # A metric that only compares texts takes no longer for what else the machine does; others may wait.
    clock = clock or (time.process_time if name in GRADERS else time.monotonic)
    context = replace(context, failed=[])
    started = clock()

    def mean(
        pairs: Sequence[tuple[Case, str]], *, seconds: float = SECONDS, whole: bool = False
    ) -> tuple[float | None, int]:
        grades = []
        for case, text in pairs:
            if clock() > started + seconds:
                if whole:
                    return None, 0
                break
            if (mark := grade(name, case, text, context=context)) is not None:
                grades.append(mark)
        return (sum(grades) / len(grades) if grades else None), len(grades)

    own_mean, graded = mean([(case, case.reference) for case in cases], seconds=SECONDS / 2)
    failed, why = len(context.failed), context.failed[0].reason if context.failed else ""
    why = why or explain_vacuous(name, cases, graded=graded, context=context)
    letters = sum(len(case.reference) for case in cases) * (COPIES + CONSTANTS)
    fitting = len(cases) * CHARACTERS // max(letters, 1)
    few = cases[:: max(1, len(cases) // min(SAMPLE, max(SMALLEST_SAMPLE, fitting)))]
    spoiled, _ = mean([(case, text) for index, case in enumerate(few) for text in spoil(index, few)])
    # The first cases alone would flatter an answer that is the reply to one of them.
    # Where all replies differ, some of them are tried.
    commonest = Counter(case.reference for case in few).most_common(CONSTANTS)
    constants = {text: mean([(case, text) for case in few], whole=True)[0] for text, _ in commonest}
    best = max(constants, key=lambda text: constants[text] or 0.0, default="")
    return MetricTrial(
        name=name,
        cases=graded,
        own=own_mean,
        spoiled=spoiled,
        constant=constants.get(best),
        constant_answer=best[:80],
        failed=failed,
        why=why,
    )


def spoil(index: int, cases: Sequence[Case]) -> list[str]:
    """Corrupt the reply of a case in ten ways that no metric of correctness should accept."""
    text = cases[index].reference
    different = next(
        (case.reference for case in (*cases[index + 1 :], *cases[:index]) if case.reference != text), "other"
    )
    tokens = text.split()
    document = parse_object(text)
    first = next(iter(document), "") if document else ""
    swapped = (
        json.dumps({**document, first: "something else"}, ensure_ascii=False)
        if document
        else f"not {different}"
    )
    short = (
        json.dumps({key: value for key, value in document.items() if key != first}, ensure_ascii=False)
        if document
        else " ".join(tokens[1:])
    )
    spoiled = [
        "",
        different,
        text[: len(text) // 2],
        " ".join(reversed(tokens)),
        f"Sure! Here it is:\n{different}",
        swapped,
        short,
        text.replace('"', ""),
        "I do not know.",
        "".join(reversed(text)),
    ]
    # A short reply may survive one of them unchanged.
    return [copy for copy in spoiled if copy.strip() != text.strip()][:COPIES]


def _judge_metric(trial: MetricTrial, gate: GateSettings, *, relevant: set[str]) -> list[Problem]:
    """Return what is wrong with a metric on its own. A metric that graft.yaml does not name is not an
    error.
    """
    title = name_of(trial.name)
    if trial.name not in relevant:
        return []
    problem: Problem | None = None
    if trial.failed:
        problem = Problem(
            severity="error",
            what=f"{trial.name} failed on {trial.failed} of the log's own replies",
            why=trial.why,
            fix="fix the function that graft.yaml names under evaluate.checks",
        )
    elif not trial.cases:
        problem = Problem(
            severity="error",
            what=f"{trial.name} grades none of the held-out cases",
            why=trial.why,
            fix=_say_replacement(trial, gate),
        )
    elif trial.name in _metrics_of_rules(gate) and trial.why:
        problem = Problem(
            severity="error",
            what=f"the rule on {trial.name} proves nothing on this log",
            why=trial.why,
            fix=_say_replacement(trial, gate),
        )
    if problem is not None:
        return [problem]
    problems = []
    primary = _is_primary(trial, gate)
    if trial.own is not None and trial.own == trial.spoiled == 1.0:
        problems.append(
            Problem(
                severity="error" if primary else "warning",
                what=f"{title} calls every answer right, spoiled ones too",
                why=f"{COPIES} spoiled copies of each reply got 100 %, as the replies themselves did",
                fix=f"check what {trial.name} compares: it distinguishes nothing",
            )
        )
    if trial.own == 0.0:
        problems.append(
            Problem(
                severity="error" if primary else "warning",
                what=f"{title} calls not one of the log's own replies right",
                why="the adapter learns from such replies, so it will get 0 % too",
                fix=f"check what {trial.name} requires, and compare it with a reply in the log",
            )
        )
    return problems


def _say_replacement(trial: MetricTrial, gate: GateSettings) -> str:
    """What to write instead of a metric that grades nothing, or proves nothing."""
    if _is_primary(trial, gate):
        return _NAME_PRIMARY_METRIC
    if "rules" not in gate.model_fields_set and trial.name in _metrics_of_rules(gate):
        return "write rules that fit this log under gate.rules; `graft init LOG` proposes some"
    return f"take {trial.name} out of graft.yaml, fix what it checks, or log such cases"


def _is_primary(trial: MetricTrial, gate: GateSettings) -> bool:
    return gate.primary_rule is not None and gate.primary_rule.metric == trial.name


_NAME_PRIMARY_METRIC = (
    "name what distinguishes a right answer from a wrong one under gate.primary, such as a check of yours "
    "({name: right, metric: exact, field: KEY} under evaluate.checks); `graft init LOG` proposes one"
)


def _judge_rules(
    cases: Sequence[Case], *, evaluate: EvaluateSettings, gate: GateSettings, trials: Sequence[MetricTrial]
) -> list[Problem]:
    """Try each rule on the best and the worst possible adapter: one must pass, the other fail."""
    by_name = {trial.name: trial for trial in trials}
    best = _verdict(cases, evaluate, gate, trials=by_name, good=True)
    worst = _verdict(cases, evaluate, gate, trials=by_name, good=False)
    problems = []
    for rule, worst_rule in zip(best.rules, worst.rules, strict=False):
        trial = by_name.get(rule.metric)
        if rule.metric == TASK_SUCCESS and trial is None:
            problems.append(_NOTHING_TELLS_RIGHT)
            continue
        if rule.vacuous or (trial is not None and (trial.why or not trial.cases)):
            # Said already, of the metric itself.
            continue
        if rule.outcome != "pass" and rule.must:
            needed = rule.cases_to_decide
            enough = f" (about {needed} of them)" if needed and needed > len(cases) else ""
            fix = f"hold out more rows{enough}: data.test, evaluate.max_cases; or ask for less"
            if rule.metric in REQUESTS:
                fix = f"set evaluate.latency_cases to {needed}" if needed else "raise evaluate.latency_cases"
            problems.append(
                Problem(
                    severity="error",
                    what=f"the rule “{rule.rule}” cannot pass with {plural(len(cases), 'case')}",
                    why=f"even if everything is right: {rule.sentence}",
                    fix=fix,
                )
            )
        elif worst_rule.outcome == "pass" and rule.metric not in FIGURES:
            problems.append(
                Problem(
                    severity="error",
                    what=f"the rule “{rule.rule}” cannot fail",
                    why=f"even if everything is wrong: {worst_rule.sentence}",
                    fix="make the rule stricter, or remove it",
                )
            )
    problems += [
        problem
        for rule in gate.rules
        if (problem := _judge_limit(rule, by_name, cases=len(cases))) is not None
    ]
    return problems


def _judge_limit(rule: GateRule, trials: Mapping[str, MetricTrial], *, cases: int) -> Problem | None:
    """What is doubtful about a limit or a margin, as far as the log shows it."""
    trial = trials.get(rule.metric)
    if trial is None or trial.why or rule.metric in LOWER_IS_BETTER:
        return None
    if rule.is_guardrail:
        needed = first_count(lambda n: paired_difference(0, losses=0, n=n, sided="lower").low > -rule.limit)
        narrow = Problem(
            severity="warning",
            what=f"the margin of {100 * rule.limit:g} points for {name_of(rule.metric)} is narrow for "
            f"{plural(cases, 'case')}",
            why=f"an adapter that is just as good would need {needed} cases to show it",
            fix="hold out more rows (data.test), or allow a wider margin",
        )
        return narrow if needed is not None and needed > trial.cases else None
    title, own_share, constant = name_of(rule.metric), trial.own, trial.constant
    if rule.wants_more and own_share is not None and not rule.clears(own_share):
        return Problem(
            severity="warning",
            what=f"the log itself does not keep {title} {rule.limit:g}: its own replies reach "
            f"{show(rule.metric, own_share)}",
            why="an adapter learns what the log shows",
            fix=f"fix the rows, or require less of {rule.metric}",
        )
    told_apart = trial.spoiled != 1.0 and rule.metric not in _FORM
    if not (rule.wants_more and constant is not None and told_apart):
        return None
    # By the bound that the gate goes by: whether one answer to everything would keep the rule.
    by_bound = rule.held_bound == "lower"
    bound = clopper_pearson(round(constant * trial.cases), n=trial.cases).low if by_bound else constant
    if rule.clears(bound):
        floor = own_share if own_share is not None else 1.0
        if by_bound:
            floor = clopper_pearson(round(floor * trial.cases), n=trial.cases).low
        fix = (
            f"ask for more than {show(rule.metric, constant)} of {rule.metric}"
            if constant < floor
            else f"take the rule out: no limit on {rule.metric} separates the log's own replies from such an "
            "answer"
        )
        return Problem(
            severity="warning",
            what=f"one answer to everything reaches {show(rule.metric, constant)} on {title}, "
            f"and the rule asks for {show(rule.metric, rule.limit)}",
            why=f"a model that has learned nothing would pass it: {trial.constant_answer}",
            fix=fix,
        )
    return None


_FORM = frozenset(
    {
        "json_valid",
        "schema_valid",
        "code_compiles",
        "tool_calls_valid",
        "no_call_where_due",
        "citation_coverage",
        "citations_exist",
        "claims_cited",
        "answered_where_due",
        NOT_REFUSED,
        TRUNCATED,
    }
)
"""Any well-formed answer passes these: that is their purpose."""


_NOTHING_TELLS_RIGHT = Problem(
    severity="error",
    what="nothing says when an answer is right, so no adapter could be deployed",
    why="a deploy needs better answers than the base's, and the metrics only check the form",
    fix="write a check under evaluate.checks, such as {name: right, metric: exact, field: KEY}; "
    "or `primary: none` under gate, to deploy without a gain",
)


def _metrics_of_rules(gate: GateSettings) -> set[str]:
    metrics = {rule.metric for rule in gate.rules}
    return metrics | ({gate.primary_rule.metric} if gate.primary_rule is not None else set())


def _verdict(
    cases: Sequence[Case],
    evaluate: EvaluateSettings,
    gate: GateSettings,
    *,
    trials: Mapping[str, MetricTrial],
    good: bool,
) -> Verdict:
    """Return the gate's verdict on an adapter that gets everything right (or wrong) that the base does
    not.
    """
    candidate = _subject("adapter", cases, evaluate, gate, trials=trials, right=good)
    base, *other_subjects = [
        _subject(name, cases, evaluate, gate, trials=trials, right=not good)
        for name in ("base", LOG, PROMPTED, LOGGED_PROMPT)
    ]
    report: Report = make_report(
        cases, baseline=base, candidate=candidate, settings=evaluate, others=other_subjects
    )
    return decide(report, gate, around=Surroundings(no_champion=True))


def _subject(
    name: str,
    cases: Sequence[Case],
    evaluate: EvaluateSettings,
    gate: GateSettings,
    *,
    trials: Mapping[str, MetricTrial],
    right: bool,
) -> SubjectReport:
    sessions = sessions_of(cases)
    ruled = _metrics_of_rules(gate) | {TRUNCATED}
    metrics: dict[str, Metric] = {}
    for metric in ruled - set(FIGURES):
        trial = trials.get(metric)
        if trial is None and metric not in (TRUNCATED, JUDGE_SCORE, JUDGE_PREFERENCE):
            continue
        mark = float(right) if metric not in LOWER_IS_BETTER else float(not right)
        graded = cases[: trial.cases] if trial is not None else cases
        metrics[metric] = make_metric(
            metric,
            scores={case.id: mark for case in graded},
            confidence=evaluate.confidence,
            sessions=sessions,
        )
    timed = tuple([0.001 if right else 1e6] * min(evaluate.latency_cases, len(cases)))
    figures = {rule.metric for rule in gate.rules} | ({gate.win_rule.metric} if gate.win_rule else set())
    for figure in figures & set(FIGURES):
        # Costs: next to nothing for the best adapter, beyond every limit for the worst.
        value = 1e-9 if right == (figure in LOWER_IS_BETTER) else 1e9
        n = evaluate.max_cases or 1000
        if figure in (LATENCY_P95, *TIMED):
            value, n = timed[0] if timed else value, len(timed)
        low, high = value, value
        if figure in TIMED:
            low, high = quantile_interval(list(timed), quantile=0.5, confidence=evaluate.confidence)
        metrics[figure] = Metric(
            name=figure, kind="number", value=value, low=low, high=high, n=n, confidence=evaluate.confidence
        )
    generation = Generation(
        subject=name,
        answers=len(cases),
        seconds=1,
        tokens_per_second=1e9 if right else 1e-9,
        single_latency_seconds=timed,
        first_token_seconds=timed,
        peak_memory_gib=1e-9 if right else 1e9,
        settings={},
    )
    return SubjectReport(subject=name, metrics=metrics, generation=generation)
