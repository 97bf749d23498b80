"""Predicts escalation for a project, finds its threshold, and compares live figures with the forecast.

Input: an open project and the subject that is the large model. Output: an `EscalationForecast`,
`EscalationCurve` or `EscalationLive`. Small and large model answer held-out cases; answers that are there
already are not asked for again. For a threshold of log-probabilities the small model answers through the real
endpoint: what is predicted is what is served.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from graftwork.data.project import PreparedData
from graftwork.engines.protocol import BASE
from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.ask.served_endpoint import EndpointQuestions, ServedAnswer, ask_served
from graftwork.evaluate.ask.worker import GENERATION_FILE
from graftwork.evaluate.cases import choose_cases, read_cases
from graftwork.evaluate.commands import EvaluationRequest, evaluate_asked
from graftwork.evaluate.costs import AnswerPrice, costs_of_answers, costs_of_log
from graftwork.evaluate.escalation import (
    Answered,
    LiveRequest,
    PairedCase,
    compare_live,
    forecast,
    make_curve,
    read_forecast,
    write_forecast,
)
from graftwork.evaluate.live.answer_checks import (
    LiveChecks,
    find_live_checks,
    live_context,
    require_live_check,
    with_call_check,
)
from graftwork.evaluate.project import Evaluated, Grading, ask_subject, price_cases
from graftwork.evaluate.project_subjects import resolve_subject
from graftwork.evaluate.report import sessions_of
from graftwork.evaluate.settings import choose_success
from graftwork.evaluate.subjects import LOG, Asking, parse_subjects
from graftwork.files.dataset import read_rows
from graftwork.grading.checks import grade
from graftwork.grading.interface import CannotGrade
from graftwork.pipeline.steps.evaluate import put_cases
from graftwork.pipeline.table import run_pipeline
from graftwork.plan.catalog.prices import find_token_price, index_prices, list_token_prices
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.records.dataset import Split
from graftwork.records.errors import UserError
from graftwork.records.live import EscalationCurve, EscalationForecast, EscalationLive
from graftwork.records.report import Answer, Case, Generation, SubjectReport
from graftwork.registry.project import full_alias
from graftwork.serve.project import serve_in_background
from graftwork.text.tool_calls import TOOLS_MARK

AT_ONCE = 4
FEWEST = 10
"""Fewest validation cases for a threshold that does not rest on chance."""


def choose_threshold(
    work: OpenProject,
    large: str,
    *,
    checks: Sequence[str],
    max_rate: float,
    limit: int | None = None,
    prefix_tokens: int | None = None,
) -> EscalationCurve:
    """Choose on the validation split, show on the test split.

    With `prefix_tokens`, streams are judged by this many tokens; else whole answers are.
    """
    alias = full_alias(work)
    if alias not in work.releases.aliases():
        raise UserError(
            f"{alias} points at no release",
            why="log-probabilities are measured through the endpoint, which serves releases",
            fix="release the adapter first: graft run",
            where="--logprob",
        )
    prepared = run_pipeline(work, upto="prepare").get("prepare", PreparedData)
    cases = {split: _cases(work, prepared, split, limit) for split in ("validation", "test")}
    for split, split_cases in cases.items():
        if len(split_cases) < FEWEST:
            raise UserError(
                f"the {split} split has {len(split_cases)} cases",
                why=f"a threshold needs at least {FEWEST}",
                fix=f"raise data.{split}, or add logs",
                where=f"data.{split}",
            )
    both = (*cases["validation"], *cases["test"])
    answers = _ask_small(work, both, alias)
    grades, costs = _ask_large(work, large, both)
    pairs = _pair_up(work, both, answers, grades, costs, checks=checks, prefix_tokens=prefix_tokens)
    sides = {
        split: [pairs[case.id] for case in split_cases if case.id in pairs]
        for split, split_cases in cases.items()
    }
    if not any(pair.logprob is not None for pair in pairs.values()):
        raise UserError(
            "the engine gives no log-probabilities",
            why="a threshold on them could decide nothing",
            fix="serve with the embedded engine, llamacpp or vllm",
            where="serve.engine",
        )
    curve = make_curve(sides["validation"], sides["test"], max_rate=max_rate)
    return curve.model_copy(update={"prefix_tokens": prefix_tokens})


def _cases(work: OpenProject, prepared: PreparedData, split: Split, limit: int | None) -> tuple[Case, ...]:
    most = limit or work.settings.evaluate.max_cases
    return tuple(price_cases(work, choose_cases(read_rows(Path(prepared.folder), split), most=most)))


def _ask_small(work: OpenProject, cases: Sequence[Case], alias: str) -> dict[str, ServedAnswer]:
    settings = work.project.settings.serve
    live = settings.model_copy(update={"port": 0, "capture": False, "escalate": None})
    questions = EndpointQuestions(
        alias,
        max_tokens=min(work.settings.evaluate.max_new_tokens, settings.max_new_tokens_limit),
        at_once=AT_ONCE,
        logprobs=True,
    )
    with serve_in_background(work, live) as url:
        work.reporter.info(f"{alias} answers {len(cases)} validation and test cases with log-probabilities")
        answers = ask_served(
            url,
            cases,
            questions,
            on_answer=lambda done: work.reporter.progress(
                "log-probabilities", done, len(cases), seconds_left=None, detail={}
            ),
        )
    return {answer.case: answer for answer in answers}


def _ask_large(
    work: OpenProject, name: str, cases: Sequence[Case]
) -> tuple[Mapping[str, float | None], Mapping[str, float | None]]:
    """Grades and costs of the large model's answers."""
    if name == LOG:
        # The log's answers are the references: they count as right everywhere.
        return {case.id: 1.0 for case in cases}, costs_of_log(cases)
    (parsed,) = parse_subjects([name])
    asking = Asking(put_cases(work, tuple(cases)), timed=False)
    subject = resolve_subject(work, parsed, asking=asking, outcome=None)
    ask_subject(work, subject, cases)
    generation = Generation.from_json((subject.folder / GENERATION_FILE).read_bytes())
    by_case: dict[str, list[Answer]] = {}
    for answer in read_answers(subject.folder):
        by_case.setdefault(answer.case_id, []).append(answer)
    price = AnswerPrice(usd_per_hour=work.settings.evaluate.costs.usd_per_hour)
    if parsed.endpoint is not None:
        price = AnswerPrice(tokens=find_token_price(parsed.endpoint.model, index_prices(list_token_prices())))
    context = Grading(work, cases).context()
    metric = choose_success(work.settings.evaluate)
    grades = {
        case.id: grade(metric, case, by_case[case.id][0].text, context=context)
        for case in cases
        if case.id in by_case
    }
    return grades, costs_of_answers(by_case, generation=generation, price=price)


def _pair_up(
    work: OpenProject,
    cases: Sequence[Case],
    answers: Mapping[str, ServedAnswer],
    grades: Mapping[str, float | None],
    costs: Mapping[str, float | None],
    *,
    checks: Sequence[str],
    prefix_tokens: int | None,
) -> dict[str, PairedCase]:
    context = Grading(work, cases).context()
    metric, live = choose_success(work.settings.evaluate), LiveChecks(work, checks, where="--check")
    hourly = work.settings.evaluate.costs.usd_per_hour
    pairs = {}
    for case in cases:
        answer, theirs = answers[case.id], grades.get(case.id)
        if not answer.answered or theirs is None:
            continue
        ours = grade(metric, case, answer.text, context=context)
        if ours is None:
            continue
        messages = [message.model_dump() for message in case.messages]
        is_whole = prefix_tokens is None or len(answer.tokens) <= prefix_tokens
        beginning = None if is_whole else answer.beginning(prefix_tokens or 0)
        pairs[case.id] = PairedCase(
            session=case.session or case.id,
            logprob=answer.mean_logprob_of(prefix_tokens),
            small=min(max(ours, 0.0), 1.0),
            large=min(max(theirs, 0.0), 1.0),
            small_cost=None if hourly is None else hourly / 3600 * answer.seconds / AT_ONCE,
            large_cost=costs.get(case.id),
            fails=_escalates(live, messages, answer.text, beginning),
        )
    return pairs


def _escalates(
    live: LiveChecks, messages: Sequence[Mapping[str, str]], text: str, beginning: str | None
) -> bool:
    """Return whether the endpoint would escalate by a check: by the start of an answer if it is longer."""
    try:
        if beginning is None:
            return live.find_failing(messages, text) is not None
        return live.judge_prefix(messages, beginning).failing is not None
    except CannotGrade:
        # The endpoint counts a check that fails to run as failed.
        return True


def measure_live(work: OpenProject) -> EscalationLive:
    """Requests since the last forecast: how often the large model answered, how well, at what cost."""
    forecast = read_forecast(work.project.state)
    if forecast is None:
        raise UserError(
            "there is no forecast to compare with",
            why="live figures are compared with a forecast",
            fix="graft eval escalation",
            where="--live",
        )
    requests = []
    escalate = work.project.settings.serve.escalate
    models = escalate.models if escalate is not None else ()
    # The forecast's mean cost of the models that answer.
    small, large = forecast.options[0].cost_per_1000, forecast.large_alone.cost_per_1000
    for capture in work.captures.export():
        if capture.at < forecast.made_at:
            continue
        if capture.shadow_of is not None or capture.chain is not None or capture.trace is not None:
            continue
        if capture.disconnected or capture.finish_reason == "error":
            continue
        # Checked are a named model's answers, by its release or escalated from it.
        if (models and capture.model not in models) or capture.model in (BASE, capture.release):
            continue
        if forecast.model not in ("", capture.model):
            continue
        escalated = capture.escalated_from is not None
        cost = None
        if small is not None and not (escalated and large is None):
            cost = (small + (large or 0.0) * escalated) / 1000
        requests.append(
            LiveRequest(
                session=capture.session or capture.id,
                escalated=escalated,
                quality=capture.feedback,
                cost=cost,
            )
        )
    return compare_live(forecast, requests)


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

    `prefix_tokens` predicts streams that are judged by this many tokens (`serve.escalate.stream: prefix`).

    `max_rate` also chooses a threshold of log-probabilities that escalates at most this share of the
    validation cases. The forecast is kept, for `measure_live` and `serve.escalate.min_logprob: auto`.
    """
    for name in checks:
        # Before a model answers: a mistyped name must not cost minutes.
        require_live_check(name, live_context(work), where="--check")
    evaluated = evaluate_asked(work, EvaluationRequest(subjects=(large, small), limit=limit))
    report = evaluated.report
    cases = price_cases(work, read_cases(Path(evaluated.cases_file)))
    deciding = tuple(checks) or find_checks(work, report.candidate)
    if max_rate is None and not deciding:
        raise UserError(
            "there is no check that can decide when the large model answers",
            why="every metric of evaluate.metrics needs the reference answer",
            fix="add a check such as json_valid, a JSON Schema or a function of your own to evaluate.checks",
            where="evaluate.checks",
        )
    if any(TOOLS_MARK in message.content for case in cases for message in case.messages):
        deciding = with_call_check(deciding)
    metric = choose_success(work.settings.evaluate)
    prediction = forecast(
        _answered(work, evaluated, report.candidate, small, cases),
        _answered(work, evaluated, report.baseline, large, cases),
        metric=metric,
        failing=_find_failing(work, evaluated, deciding, prefix_tokens),
        sessions=sessions_of(cases),
    )
    curve = None
    if max_rate is not None:
        curve = choose_threshold(
            work, large, checks=deciding, max_rate=max_rate, limit=limit, prefix_tokens=prefix_tokens
        )
    remarks = prediction.remarks
    if prefix_tokens is not None:
        remarks += (f"streamed answers are judged by their first {prefix_tokens} tokens",)
    prediction = prediction.model_copy(
        update={"curve": curve, "made_at": timestamp(), "model": full_alias(work), "remarks": remarks}
    )
    write_forecast(work.project.state, prediction)
    return prediction


def find_checks(work: OpenProject, small: SubjectReport) -> tuple[str, ...]:
    """Metrics of the evaluation that can be computed from the answer only."""
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
    failing: dict[str, set[str]] = {}
    for name in checks:
        live = LiveChecks(work, [name], where="--check")
        failing[name] = set()
        for answer in answers:
            beginning = None
            if prefix_tokens is not None and answer.tokens > prefix_tokens:
                # Where the tokens of an answer end is not kept: all are taken to be equally long.
                beginning = answer.text[: len(answer.text) * prefix_tokens // answer.tokens]
            case = answer.case_id
            if case in messages and _escalates(live, messages[case], answer.text, beginning):
                failing[name].add(case)
    return failing


def _answered(
    work: OpenProject, evaluated: Evaluated, report: SubjectReport, name: str, cases: Sequence[Case]
) -> Answered:
    if report.subject == LOG:
        return Answered(report, costs_of_log(cases), is_reference=True)
    answers: dict[str, list[Answer]] = {}
    for answer in read_answers(Path(evaluated.folders[report.subject])):
        answers.setdefault(answer.case_id, []).append(answer)
    price = AnswerPrice(usd_per_hour=work.settings.evaluate.costs.usd_per_hour)
    endpoint = parse_subjects([name])[0].endpoint
    if endpoint is not None:
        price = AnswerPrice(tokens=find_token_price(endpoint.model, index_prices(list_token_prices())))
    return Answered(report, costs_of_answers(answers, generation=report.generation, price=price))
