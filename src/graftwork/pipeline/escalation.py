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
from graftwork.files.escalation import write_forecast
from graftwork.grading.interface import CannotGrade
from graftwork.pipeline.answer_checks import (
    LiveChecks,
    find_live_checks,
    grade_context,
    require_live_check,
    with_call_check,
)
from graftwork.pipeline.costs import price_cases
from graftwork.pipeline.escalation_curve import ThresholdSearch, choose_threshold
from graftwork.pipeline.evaluation import Evaluated
from graftwork.pipeline.evaluation_commands import EvaluationRequest, evaluate_asked
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.releases import full_alias
from graftwork.plan.catalog.api_prices import find_token_price, index_prices, list_token_prices
from graftwork.records.errors import UserMistake
from graftwork.records.report import Answer, Case, SubjectReport
from graftwork.records.routing import EscalationForecast
from graftwork.text.tool_calls import TOOLS_MARK


def predict_escalation(
    work: OpenProject,
    *,
    large: str = LOG,
    small: str = "adapter",
    checks: Sequence[str] = (),
    limit: int | None = None,
    max_rate: float | None = None,
    prefix_tokens: int | None = None,
) -> EscalationForecast:
    """Without `checks`, every metric of the evaluation that needs no reference.

    `prefix_tokens` predicts streams that are judged by so many tokens (`serve.escalate.stream: prefix`).

    `max_rate` also chooses a threshold of log-probabilities that escalates at most this share of the
    validation cases. The forecast is kept, for `measure_live` and `serve.escalate.min_logprob: auto`.
    """
    for name in checks:
        # Before a model answers: a mistyped name must not cost minutes.
        require_live_check(name, grade_context(work), where="--check")
    evaluated = evaluate_asked(work, EvaluationRequest(subjects=(large, small), limit=limit))
    report = evaluated.report
    cases = price_cases(work, read_cases(Path(evaluated.cases_file)))
    chosen = tuple(checks) or find_checks(work, report.candidate)
    if max_rate is None and not chosen:
        raise _nothing_decides()
    if any(TOOLS_MARK in message.content for case in cases for message in case.messages):
        chosen = with_call_check(chosen)
    metric = choose_success(work.settings.evaluate)
    found = forecast(
        _answered(work, evaluated, report.candidate, small, cases),
        _answered(work, evaluated, report.baseline, large, cases),
        metric=metric,
        failing=_find_failing(work, evaluated, chosen, prefix_tokens),
        sessions=sessions_of(cases),
    )
    curve = None
    if max_rate is not None:
        search = ThresholdSearch(large, chosen, max_rate, limit, prefix_tokens)
        curve = choose_threshold(work, search)
    remarks = found.remarks
    if prefix_tokens is not None:
        remarks += (f"streamed answers are judged by their first {prefix_tokens} tokens",)
    found = found.model_copy(
        update={"curve": curve, "made_at": timestamp(), "model": full_alias(work), "remarks": remarks}
    )
    write_forecast(work.project.state, found)
    return found


def find_checks(work: OpenProject, small: SubjectReport) -> tuple[str, ...]:
    """Metrics of the evaluation that can be computed from an answer alone."""
    live = set(find_live_checks(work))
    return tuple(
        name
        for name in work.settings.evaluate.metrics
        if name in live
        and name in small.metrics
        and small.metrics[name].kind != "number"
        and small.metrics[name].n
    )


def _find_failing(
    work: OpenProject, evaluated: Evaluated, checks: Sequence[str], prefix_tokens: int | None
) -> dict[str, set[str]]:
    """The cases that each check escalates, judged as the endpoint judges: without a reference."""
    messages = {
        case.id: [message.model_dump() for message in case.messages]
        for case in read_cases(Path(evaluated.cases_file))
    }
    answers = list(read_answers(Path(evaluated.folders[evaluated.report.candidate.subject])))
    found: dict[str, set[str]] = {}
    for name in checks:
        live = LiveChecks(work, [name], where="--check")
        found[name] = {
            answer.case_id
            for answer in answers
            if answer.case_id in messages
            and _escalates(live, messages[answer.case_id], answer, prefix_tokens)
        }
    return found


def _escalates(
    live: LiveChecks, messages: Sequence[dict[str, str]], answer: Answer, prefix_tokens: int | None
) -> bool:
    try:
        if prefix_tokens is None or answer.tokens <= prefix_tokens:
            return live.find_failing(messages, answer.text) is not None
        # Where the tokens of an answer end is not kept: all are taken to be equally long.
        beginning = answer.text[: len(answer.text) * prefix_tokens // answer.tokens]
        return live.judge_prefix(messages, beginning).failing is not None
    except CannotGrade:
        # The endpoint counts a check that fails to run as failed.
        return True


def _nothing_decides() -> UserMistake:
    return UserMistake(
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
