"""`graft gate --family`: the whole family answers an integration set through the real endpoint.

Input: an open project with `serve.family`, and a release that is to go live, if any. Output: a verdict with
one rule for each promise: every route, the router, chains, fallbacks, memory and latency. The endpoint is
asked the same cases as it is live, with the new member, and with that member away. A route whose answers are
letter for letter the same has not got worse; one with other answers must not be worse by more than the
margin.
"""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from graftwork.data.project import PreparedData
from graftwork.engines.protocol import EngineJob
from graftwork.evaluate.ask.served_endpoint import EndpointQuestions, ServedAnswer, ask_served, read_health
from graftwork.evaluate.cases import choose_cases, read_case_file
from graftwork.evaluate.live.comparison import choose_metric
from graftwork.evaluate.project import Grading
from graftwork.evaluate.statistics.means import bounded_difference, bounded_mean
from graftwork.files.dataset import read_rows
from graftwork.files.safetensors import read_router, router_path
from graftwork.grading.checks import grade
from graftwork.http.messages import Headers
from graftwork.pipeline.table import run_pipeline
from graftwork.process.machine import process_peak_gib
from graftwork.project.open_project import OpenProject
from graftwork.records.base import fingerprint
from graftwork.records.errors import UserError, WorkerFailed
from graftwork.records.release import Release
from graftwork.records.report import Case, Decision, RuleOutcome, RuleResult, Verdict
from graftwork.registry.index import find_release
from graftwork.registry.project import full_alias, open_store
from graftwork.registry.store import Lease
from graftwork.serve.project import (
    BACKGROUND,
    AdapterFinder,
    open_chain_checks,
    open_checks,
    open_family,
    serve_in_background,
)
from graftwork.serve.settings import FamilyGateSettings, FamilySettings, ServeSettings
from graftwork.train.router import keeps

P95 = 0.95

CHAIN_CASES = 5
"""Number of requests sent to each chain."""
_SWITCH_SECONDS = 120.0
_ROUTE = re.compile(r"(\S+) \((rule \d+|router unsure|router|default)\b(.*)\)")
_AWAY = (" is not loaded", " is not ready")
"""End of the header when the main model answers for another one."""
_REASONS = {
    "deploy": "every route, chain and limit of the family holds",
    "not_enough_evidence": "too few cases to show that no route got worse and that the router is right",
}


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
class FamilyEvidence:
    before: Sequence[RoutedAnswer]
    """The family in its live state; empty if nothing changes."""
    after: Sequence[RoutedAnswer]
    without: Sequence[RoutedAnswer] = ()
    """The same cases while the changed member is away."""
    chains: Mapping[str, Sequence[ServedAnswer]] = field(default_factory=dict)
    memory_gib: float | None = None


def gate_family(work: OpenProject, *, release: str | None = None) -> Verdict:
    """Decide about the family with this release in it; without one, about the family as it is live."""
    settings = work.project.settings.serve
    if settings.family is None:
        raise UserError(
            "this project serves no family",
            why="`graft gate --family` queries the endpoint that `serve.family` describes",
            fix="add `family:` under `serve:`",
            where="serve.family",
        )
    new = None if release is None else find_release(work.releases, release)
    gate = settings.family.gate
    metric = choose_metric(work, gate.metric)
    cases = _choose_cases(work, settings.family)
    live = work.releases.aliases()
    alias = None if new is None else full_alias(work, model=new.model)
    if new is not None and alias is not None:
        open_store(work).verify(new.id)
        if live.get(alias) == new.id:
            new = alias = None
    evidence = _ask_family(work, settings, cases, new=new, alias=alias, metric=metric)
    path = router_path(work.project.state)
    has_router = settings.family.router and path.exists()
    rules = judge_family(
        evidence,
        gate,
        metric=metric,
        targets=[rule.to for rule in settings.family.rules],
        router_accuracy=read_router(path)[1].sure_accuracy.value if has_router else None,
    )
    decision = decide_family(rules)
    failed = [rule.sentence for rule in rules if rule.outcome == "fail"]
    escalated = sum(answer.escalated for answer in evidence.after)
    fallbacks = sum(answer.fallback for answer in evidence.after)
    requests = f"{escalated} of {len(evidence.after)} requests escalated"
    notes = [
        f"{alias} would be {new.id[:12]}" if new is not None else "judged as it is live",
        f"{requests}, {fallbacks} were answered by a fallback",
    ]
    if evidence.memory_gib is not None:
        notes.append(f"engine processes took {evidence.memory_gib:.2f} GiB at most")
    return Verdict(
        decision=decision,
        reason=failed[0] if failed else _REASONS[decision],
        rules=rules,
        report_hash=fingerprint([rule.model_dump(mode="json") for rule in rules]),
        rules_hash=fingerprint(gate.model_dump(mode="json")),
        notes=tuple(notes),
    )


def _choose_cases(work: OpenProject, family: FamilySettings) -> tuple[Case, ...]:
    """Choose the declared cases, or the held-out ones of all models, balanced over the routes."""
    if family.gate.cases is not None:
        path = work.project.root / family.gate.cases
        cases = read_case_file(path, named=work.settings.evaluate.checks)
    else:
        prepared = run_pipeline(work, upto="prepare").get("prepare", PreparedData)
        rows = {
            row.id: row for folder in prepared.folders.values() for row in read_rows(Path(folder), "test")
        }
        cases = choose_cases([rows[key] for key in sorted(rows)], most=None)
    routes: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        routes[model_of_case(work, case)].append(case)
    spread = [
        case for turn in zip_longest(*(routes[name] for name in sorted(routes))) for case in turn if case
    ]
    if not spread:
        raise UserError(
            "there are no cases to ask the family",
            why="the integration set is empty",
            fix="raise data.test, or specify a file under serve.family.gate.cases",
            where="serve.family.gate.cases",
        )
    return tuple(spread[: family.gate.max_cases])


def model_of_case(work: OpenProject, case: Case) -> str:
    """The specialist that has the case's role, or the main model."""
    project = work.project.settings
    for name, model in project.all_models.items():
        if name != project.main_model and keeps(model.keep, group=case.group, domain=case.domain):
            return name
    return project.main_model


def _ask_family(
    work: OpenProject,
    settings: ServeSettings,
    cases: Sequence[Case],
    *,
    new: Release | None,
    alias: str | None,
    metric: str,
) -> FamilyEvidence:
    from graftwork.serve.run import ServedProject

    assert settings.family is not None
    served = dict(work.releases.aliases())
    live = settings.model_copy(update={"port": 0, "capture": False})
    questions = EndpointQuestions(
        settings.family.name,
        max_tokens=min(work.settings.evaluate.max_new_tokens, settings.max_new_tokens_limit),
        at_once=settings.batch_size,
    )
    by_role = any(rule.role for rule in settings.family.rules)
    grades = _Grades(work, metric, {case.id: case for case in cases})

    def role(case: Case) -> Headers:
        is_named = by_role and case.group is not None and case.group.isascii()
        return (("x-graft-role", case.group or ""),) if is_named else ()

    def run(url: str, phase: str) -> list[RoutedAnswer]:
        def note(answered: int) -> None:
            work.reporter.progress(phase, answered, len(cases), seconds_left=None, detail={})

        return grades.of(ask_served(url, cases, questions, headers=role, on_answer=note))

    family, checks = open_family(work, live), open_checks(work, live)
    chain_checks = open_chain_checks(work, live)

    def serve_parts(lease: Lease, job: EngineJob) -> ServedProject:
        """Serve aliases as in `served`, without captures."""
        return ServedProject(
            resolve_aliases=lambda: dict(served),
            find_adapter=AdapterFinder(work, lease, job.template_fingerprint, live),
            family=family,
            checks=checks,
            chain_checks=chain_checks,
        )

    with serve_in_background(work, live, project=serve_parts) as url:
        work.reporter.info(f"the family answers {len(cases)} cases")
        after = run(url, "the family as it is live")
        before: list[RoutedAnswer] = []
        fallback_answers: list[RoutedAnswer] = []
        if new is not None and alias is not None:
            before = after
            served[alias] = new.id
            _await_alias(url, lambda found: found.get(alias) == new.id)
            work.reporter.info(f"the same cases with {new.model} {new.id[:12]}")
            after = run(url, f"the family with {new.id[:12]}")
        # What the engine processes have taken at most; None if the system does not say.
        engine = read_health(url)["engine"]
        pids = {status["pid"] for status in engine.get("replicas", [])} or {engine["pid"]}
        peaks = [process_peak_gib(pid) for pid in pids - {None}]
        measured = [peak for peak in peaks if peak is not None]
        memory_gib = sum(measured) if measured and len(measured) == len(peaks) else None
        chains = {}
        for name in settings.chains:
            chains[name] = ask_served(url, cases[:CHAIN_CASES], questions._replace(model=name))
        if alias is not None and alias != full_alias(work, model=work.project.settings.main_model):
            served.pop(alias)
            _await_alias(url, lambda found: alias not in found)
            work.reporter.info("the cases of that member while it is down")
            member_cases = [
                case for case in cases if new is not None and model_of_case(work, case) == new.model
            ]
            fallback_answers = grades.of(ask_served(url, member_cases, questions, headers=role))
    return FamilyEvidence(
        before=before,
        after=after,
        without=fallback_answers,
        chains=chains,
        memory_gib=memory_gib,
    )


def _await_alias(url: str, holds: Callable[[dict[str, str]], bool]) -> None:
    until = time.monotonic() + _SWITCH_SECONDS
    while time.monotonic() < until:
        if holds(read_health(url)["aliases"]):
            return
        time.sleep(0.1)
    raise WorkerFailed(
        "the endpoint did not take over the new member",
        why=f"it had {_SWITCH_SECONDS:.0f} s; refused: {read_health(url).get('refused')}",
        fix=f"check .graft/serving/{BACKGROUND}/engine.log",
    )


class _Grades:
    """Converts answers of the endpoint to the grades that the verdict needs."""

    def __init__(self, work: OpenProject, metric: str, cases: dict[str, Case]) -> None:
        self._work, self._metric, self._cases = work, metric, cases
        self._context = Grading(work, tuple(cases.values())).context()

    def of(self, answers: Sequence[ServedAnswer]) -> list[RoutedAnswer]:
        graded = []
        for answer in answers:
            case = self._cases[answer.case]
            mark = grade(self._metric, case, answer.text, context=self._context) if answer.answered else 0.0
            member, by = read_route(answer.headers.get("x-graft-route", ""))
            graded.append(
                RoutedAnswer(
                    case=case.id,
                    session=case.session or case.id,
                    expected=model_of_case(self._work, case),
                    member=member,
                    by=by,
                    text=answer.text,
                    grade=None if mark is None else min(max(mark, 0.0), 1.0),
                    seconds=answer.seconds,
                    answered=answer.answered,
                    fallback="x-graft-fallback" in answer.headers,
                    # Not where the large model was over its budget, not ready or failed.
                    escalated=answer.headers.get("x-graft-escalation", "").endswith(" answered"),
                )
            )
        return graded


def read_route(header: str) -> tuple[str, str]:
    """The member and what chose it, from the response header."""
    match = _ROUTE.fullmatch(header)
    if match is None:
        return "", ""
    if match[2] == "router" and match[3].endswith(_AWAY):
        return match[1], "away"
    return match[1], "unsure" if match[2] == "router unsure" else match[2]


def judge_family(
    evidence: FamilyEvidence,
    limits: FamilyGateSettings,
    *,
    metric: str,
    targets: Sequence[str] = (),
    router_accuracy: float | None = None,
) -> tuple[RuleResult, ...]:
    """Judge a family. `targets` are the members that the declared rules lead to; `router_accuracy` is from
    the router's card for the questions it is sure about, None without a router.
    """
    # Each route against itself before the change, on the same cases.
    old = {answer.case: answer for answer in evidence.before}
    routes: defaultdict[str, list[tuple[RoutedAnswer, RoutedAnswer]]] = defaultdict(list)
    for answer in evidence.after:
        if answer.case in old:
            routes[answer.expected].append((old[answer.case], answer))
    return (
        _all_answered("answered", evidence.after),
        *(_compare_route(route, pairs, metric, limits.margin) for route, pairs in sorted(routes.items())),
        *_router_holds(evidence.after, router_accuracy, limits.router_margin),
        *_rules_match(evidence.after, targets),
        *_chains_answer(evidence.chains),
        *([_all_answered("fallback", evidence.without)] if evidence.without else []),
        *_within(evidence, limits),
    )


def decide_family(rules: Iterable[RuleResult]) -> Decision:
    outcomes = {rule.outcome for rule in rules}
    if "fail" in outcomes:
        return "abort"
    return "not_enough_evidence" if "unknown" in outcomes else "deploy"


def _all_answered(name: str, answers: Sequence[RoutedAnswer]) -> RuleResult:
    missing = [answer for answer in answers if not answer.answered]
    what = "requests are answered" if name == "answered" else "requests are answered while the member is away"
    detail = f"; missing: {', '.join(sorted({a.member for a in missing}))}" if missing else ""
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
        sentence=f"{len(answers) - len(missing)} of {len(answers)} {what}{detail}",
    )


def _compare_route(
    route: str, pairs: Sequence[tuple[RoutedAnswer, RoutedAnswer]], metric: str, margin: float
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
        outcome, said = "unknown", f"has {changed} other answers and none can be graded by {metric}"
    else:
        outcome = "pass" if low > -margin else "fail" if high < 0 else "unknown"
        said = f"changed by {value:+.3f} ({low:+.3f} to {high:+.3f}) in {metric}"
    return RuleResult(
        metric=metric,
        rule=f"the route {route} is not worse by {margin:g}",
        kind="guardrail",
        outcome=outcome,
        value=value,
        low=low,
        high=high,
        limit=-margin,
        margin=margin,
        n=len(pairs),
        sentence=f"{route} {said}; {len(pairs)} cases, {changed} with another answer",
    )


def _router_holds(
    answers: Sequence[RoutedAnswer], accuracy: float | None, margin: float
) -> Iterator[RuleResult]:
    if accuracy is None:
        return
    sure = [answer for answer in answers if answer.by == "router"]
    right = [float(answer.member == answer.expected) for answer in sure]
    low, high = bounded_mean(right, [answer.session for answer in sure])
    least = accuracy - margin
    value = math.fsum(right) / len(right) if right else None
    outcome: RuleOutcome = "unknown"
    if value is not None:
        outcome = "pass" if low >= least else "fail" if high < least else "unknown"
    unsure, away = (sum(answer.by == by for answer in answers) for by in ("unsure", "away"))
    accuracy_text = (
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
        sentence=f"the router chose the right model for {accuracy_text}; unsure in {unsure}"
        + (f"; {away} not counted: the chosen model was away" if away else ""),
    )


def _rules_match(answers: Sequence[RoutedAnswer], targets: Sequence[str]) -> Iterator[RuleResult]:
    """A declared rule that shadows all others is a mistake; one that nothing matches may be."""
    counts = Counter(answer.by for answer in answers)
    expected = {answer.expected for answer in answers}
    for number, target in enumerate(targets, 1):
        count = counts[f"rule {number}"]
        takes_all = count == len(answers) and len(expected) > 1
        yield RuleResult(
            metric="rule_matches",
            rule=f"rule {number} (to {target}) matches some requests and not all",
            kind="invariant",
            outcome="fail" if takes_all else "pass",
            value=count / len(answers) if answers else None,
            low=None,
            high=None,
            limit=1.0,
            n=len(answers),
            sentence=f"rule {number} (to {target}) matched {count} of {len(answers)} requests"
            + ("" if count else ": nothing here shows that it can match"),
        )


def _chains_answer(chains: Mapping[str, Sequence[ServedAnswer]]) -> Iterator[RuleResult]:
    for name, answers in sorted(chains.items()):
        answered, total = sum(answer.answered for answer in answers), len(answers)
        problem = next((answer.problem for answer in answers if not answer.answered), "")
        yield RuleResult(
            metric="chain",
            rule=f"the chain {name} answers",
            kind="invariant",
            outcome="pass" if answered == total else "fail",
            value=answered / total if total else None,
            low=None,
            high=None,
            limit=1.0,
            n=total,
            sentence=f"the chain {name} answered {answered} of {total} requests"
            + (f": {problem}" if problem else ""),
        )


def _within(evidence: FamilyEvidence, limits: FamilyGateSettings) -> Iterator[RuleResult]:
    seconds = sorted(answer.seconds for answer in evidence.after if answer.answered)
    p95 = seconds[min(int(P95 * len(seconds)), len(seconds) - 1)] if seconds else None
    for metric, value, limit, unit in (
        ("memory_gib", evidence.memory_gib, limits.max_memory_gib, "GiB of memory in the engine processes"),
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
