"""`graft gate --family`: the whole family answers an integration set through the real endpoint.

In: an open project with `serve.family`, and a release that is to go live, if any. Out: a verdict. The
endpoint is asked the same cases as it is live, with the new member, and with that member away.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

from graftwork.data.project import PreparedData
from graftwork.engines.protocol import EngineJob
from graftwork.evaluate.ask.served_endpoint import EndpointQuestions, ServedAnswer, ask_endpoint, read_health
from graftwork.evaluate.cases import choose_cases, read_case_file
from graftwork.evaluate.family import (
    ChainTally,
    FamilyEvidence,
    FamilyLimits,
    RoutedAnswer,
    decide_family,
    judge_family,
)
from graftwork.evaluate.live.comparison import choose_metric
from graftwork.evaluate.project import open_grading
from graftwork.files.dataset import read_rows
from graftwork.files.safetensors import read_router, router_path
from graftwork.grading.checks import grade
from graftwork.http.messages import Headers
from graftwork.pipeline.table import run_pipeline
from graftwork.process.machine import process_peak_gib
from graftwork.project.open_project import OpenProject
from graftwork.records.base import fingerprint
from graftwork.records.errors import UserMistake, WorkerFailed
from graftwork.records.release import Release
from graftwork.records.report import Case, Verdict
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
from graftwork.serve.settings import FamilySettings, ServeSettings
from graftwork.train.router import keeps

CHAIN_CASES = 5
"""Requests that each chain is asked."""
_SWITCH_SECONDS = 120.0
_ROUTE = re.compile(r"(\S+) \((rule \d+|router unsure|router|default)\b(.*)\)")
_AWAY = (" is not loaded", " is not ready")
"""How the header ends when the main model answers for another one."""
_REASONS = {
    "deploy": "every route, chain and limit of the family holds",
    "not_enough_evidence": "too few cases to show that no route got worse and that the router is right",
}


def gate_family(work: OpenProject, *, release: str | None = None) -> Verdict:
    """Decide about the family with this release in it; without one, about the family as it is live."""
    settings = work.project.settings.serve
    if settings.family is None:
        raise UserMistake(
            "this project serves no family",
            why="`graft gate --family` asks the endpoint that `serve.family` describes",
            fix="add `family:` under `serve:`",
            where="serve.family",
        )
    new = None if release is None else find_release(work.releases, release)
    asked = settings.family.gate
    metric = choose_metric(work, asked.metric)
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
    limits = FamilyLimits(
        metric=metric,
        margin=asked.margin,
        router_margin=asked.router_margin,
        router_accuracy=read_router(path)[1].sure_accuracy.value if has_router else None,
        max_memory_gib=asked.max_memory_gib,
        max_p95_seconds=asked.max_p95_seconds,
        rules=tuple(rule.to for rule in settings.family.rules),
    )
    rules = judge_family(evidence, limits)
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
        rules_hash=fingerprint(asked.model_dump(mode="json")),
        notes=tuple(notes),
    )


def _choose_cases(work: OpenProject, family: FamilySettings) -> tuple[Case, ...]:
    """The declared cases, or the held-out ones of all models; of each route about as many."""
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
        raise UserMistake(
            "there are no cases to ask the family",
            why="the integration set is empty",
            fix="raise data.test, or name a file under serve.family.gate.cases",
            where="serve.family.gate.cases",
        )
    return tuple(spread[: family.gate.max_cases])


def model_of_case(work: OpenProject, case: Case) -> str:
    """The specialist that keeps the case's role, or the main model."""
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
    live = settings.model_copy(update={"port": 0, "capture": False, "alias_refresh_seconds": 0.2})
    asked = EndpointQuestions(
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

        return grades.of(ask_endpoint(url, cases, asked, headers=role, on_answer=note))

    family, checks = open_family(work, live), open_checks(work, live)
    chain_checks = open_chain_checks(work, live)

    def serve_parts(lease: Lease, job: EngineJob) -> ServedProject:
        """Aliases as `served` has them, and no captures."""
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
        without: list[RoutedAnswer] = []
        if new is not None and alias is not None:
            before = after
            served[alias] = new.id
            _await_alias(url, lambda found: found.get(alias) == new.id)
            work.reporter.info(f"the same cases with {new.model} {new.id[:12]}")
            after = run(url, f"the family with {new.id[:12]}")
        # What the engine processes have taken at most; None where the system does not say.
        engine = read_health(url)["engine"]
        pids = {status["pid"] for status in engine.get("replicas", [])} or {engine["pid"]}
        peaks = [process_peak_gib(pid) for pid in pids - {None}]
        known = [peak for peak in peaks if peak is not None]
        memory_gib = sum(known) if known and len(known) == len(peaks) else None
        chains = {}
        for name in settings.chains:
            answers = ask_endpoint(url, cases[:CHAIN_CASES], asked._replace(model=name))
            problem = next((answer.problem for answer in answers if not answer.answered), "")
            chains[name] = ChainTally(sum(answer.answered for answer in answers), len(answers), problem)
        if alias is not None and alias != full_alias(work, model=work.project.settings.main_model):
            served.pop(alias)
            _await_alias(url, lambda found: alias not in found)
            work.reporter.info("the cases of that member while it is away")
            own = [case for case in cases if new is not None and model_of_case(work, case) == new.model]
            without = grades.of(ask_endpoint(url, own, asked, headers=role))
    return FamilyEvidence(
        before=before,
        after=after,
        without=without,
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
        fix=f"look at .graft/serving/{BACKGROUND}/engine.log",
    )


class _Grades:
    """Turns answers of the endpoint into what the verdict is about."""

    def __init__(self, work: OpenProject, metric: str, cases: dict[str, Case]) -> None:
        self._work, self._metric, self._cases = work, metric, cases
        self._context = open_grading(work, tuple(cases.values())).context()

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
    found = _ROUTE.fullmatch(header)
    if found is None:
        return "", ""
    if found[2] == "router" and found[3].endswith(_AWAY):
        return found[1], "away"
    return found[1], "unsure" if found[2] == "router unsure" else found[2]
