"""Predicts escalation for a project: a small and a large model answer the held-out cases.

In: an open project and the subject that is the large model. Out: an `EscalationForecast`. Answers that are
there already are not asked for again.
"""

from collections.abc import Sequence
from pathlib import Path

from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.cases import read_cases
from graftwork.evaluate.costs import AnswerPrice, costs_of_answers, costs_of_log
from graftwork.evaluate.escalation import Answered, forecast
from graftwork.evaluate.score import sessions_of
from graftwork.evaluate.settings import choose_success
from graftwork.evaluate.subjects import LOG, parse_subjects
from graftwork.grading.grade import against_reference
from graftwork.pipeline.answer_checks import grade_context, require_live_check
from graftwork.pipeline.costs import price_cases
from graftwork.pipeline.evaluation import Evaluated
from graftwork.pipeline.evaluation_commands import EvaluationRequest, evaluate_asked
from graftwork.pipeline.open_project import OpenProject
from graftwork.plan.catalog.api_prices import find_token_price, index_prices, list_token_prices
from graftwork.records.errors import UserMistake
from graftwork.records.escalation import EscalationForecast
from graftwork.records.report import Answer, Case, SubjectReport


def predict_escalation(
    work: OpenProject,
    *,
    large: str = LOG,
    small: str = "adapter",
    checks: Sequence[str] = (),
    limit: int | None = None,
) -> EscalationForecast:
    """Without `checks`, every metric of the evaluation that needs no reference."""
    for name in checks:
        # Before a model answers: a mistyped name must not cost minutes.
        require_live_check(name, grade_context(work), where="--check")
    evaluated = evaluate_asked(work, EvaluationRequest(subjects=(large, small), limit=limit))
    report = evaluated.report
    cases = price_cases(work, read_cases(Path(evaluated.cases_file)))
    chosen = tuple(checks) or find_checks(work, report.candidate)
    _require_checks(work, chosen, report.candidate)
    metric = choose_success(work.settings.evaluate)
    return forecast(
        _answered(work, evaluated, report.candidate, small, cases),
        _answered(work, evaluated, report.baseline, large, cases),
        metric=metric,
        checks=chosen,
        sessions=sessions_of(cases),
    )


def find_checks(work: OpenProject, small: SubjectReport) -> tuple[str, ...]:
    """Metrics of the evaluation that can be computed from an answer alone."""
    context = grade_context(work)
    return tuple(
        name
        for name in work.settings.evaluate.metrics
        if name in small.metrics
        and small.metrics[name].kind != "number"
        and small.metrics[name].n
        and not against_reference(name, context)
    )


def _require_checks(work: OpenProject, checks: Sequence[str], small: SubjectReport) -> None:
    for name in checks:
        if name not in small.metrics or small.metrics[name].kind == "number":
            known = ", ".join(find_checks(work, small)) or "none"
            raise UserMistake(
                f"{name} is not a check of this evaluation",
                why=f"metrics that can be computed from an answer alone: {known}",
                fix="name one of them, or add it under evaluate.metrics or evaluate.checks",
                where="--check",
            )
    if not checks:
        raise UserMistake(
            "there is no check that can decide when the large model answers",
            why="every metric of evaluate.metrics needs the reference answer",
            fix="add a check such as json_valid, a JSON Schema or a function of your own to evaluate.checks",
            where="evaluate.checks",
        )


def _answered(
    work: OpenProject, evaluated: Evaluated, report: SubjectReport, named: str, cases: Sequence[Case]
) -> Answered:
    if report.subject == LOG:
        return Answered(report, costs_of_log(cases), is_reference=True)
    answers: dict[str, list[Answer]] = {}
    for answer in read_answers(Path(evaluated.folders[report.subject])):
        answers.setdefault(answer.case_id, []).append(answer)
    price = AnswerPrice(usd_per_hour=work.settings.evaluate.costs.usd_per_hour)
    endpoint = parse_subjects([named])[0].endpoint
    if endpoint is not None:
        price = AnswerPrice(tokens=find_token_price(endpoint.model, index_prices(list_token_prices())))
    return Answered(report, costs_of_answers(answers, generation=report.generation, price=price))
