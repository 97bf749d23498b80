"""Checks of live answers and of their beginnings, as a project declares them."""

import pytest
import yaml
from registry_samples import PROJECT

from graftwork.evaluate.escalation import write_forecast
from graftwork.evaluate.live.answer_checks import LiveChecks, find_live_checks
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.records.live import (
    EscalationCurve,
    EscalationForecast,
    EscalationOption,
    EscalationPoint,
    MeasuredShare,
)
from graftwork.serve.project import open_checks, with_threshold
from graftwork.serve.settings import EscalateSettings, ServeSettings
from graftwork.text.tool_calls import write_tools

SHARE = MeasuredShare(value=0.2, low=0.1, high=0.3, n=10)
ASKED = [{"role": "user", "content": "[1] We open at nine.\n[2] We close at five.\n\nWhen?"}]


@pytest.fixture
def work(tmp_path):
    (tmp_path / "own.py").write_text("def whole(case, text):\n    return case.reference == ''\n")
    settings = {
        "project": PROJECT,
        "data": {"logs": ["logs.jsonl"]},
        "evaluate": {
            "checks": [
                {"name": "starts", "format": {"starts_with": "{"}},
                {"name": "own", "function": "own.py:whole"},
                {"name": "runs", "function": "own.py:whole", "files": ["own.py"]},
            ]
        },
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as opened:
        yield opened


def test_a_citation_that_does_not_exist_fails_a_live_answer(work):
    live = LiveChecks(work, ["citations_exist"])
    assert live.find_failing(ASKED, '{"answer": "At nine.", "citations": [1]}') is None
    assert live.find_failing(ASKED, '{"answer": "At nine.", "citations": [7]}') == "citations_exist"
    assert live.find_failing(ASKED, '{"answer": "", "refused": true}') is None


def test_an_own_function_sees_no_reference_in_a_live_request(work):
    assert LiveChecks(work, ["own"]).find_failing(ASKED, "anything") is None


def test_a_check_that_runs_calls_is_none_of_live_answers(work):
    assert "own" in find_live_checks(work)
    assert "runs" not in find_live_checks(work)
    with pytest.raises(UserError, match="runs runs calls in the sandbox"):
        LiveChecks(work, ["runs"])


def test_a_beginning_is_judged_by_the_checks_that_can(work):
    live = LiveChecks(work, ["starts", "own", "json_valid"])
    assert live.of_prefixes == ("starts", "json_valid")
    assert live.of_whole_answers == ("own",)
    assert live.judge_prefix(ASKED, "Sure").failing == "starts"
    assert live.judge_prefix(ASKED, "{'").failing == "json_valid"
    assert live.judge_prefix(ASKED, '{"a').is_open


def serving(**escalate):
    return ServeSettings(escalate=EscalateSettings(to="base", **escalate))


def test_streams_by_prefix_without_a_check_that_can_judge_one_are_refused(work):
    with pytest.raises(UserError, match="no check can judge the start of an answer: own"):
        open_checks(work, serving(checks=("own",), stream="prefix"))
    assert open_checks(work, serving(checks=("own", "starts"), stream="prefix")) is not None
    assert open_checks(work, serving(checks=("own",), min_logprob=-1.0, stream="prefix")) is not None


def test_a_call_that_cannot_be_run_fails_whatever_else_is_checked(work):
    checks = open_checks(work, serving(checks=("own",)))
    tool = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
    asked = [{"role": "system", "content": write_tools([tool])}, *ASKED]
    called = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'
    assert checks.find_failing(asked, called.format("count")) is None
    assert checks.find_failing(asked, called.format("delete")) == "tool_calls_valid"
    assert checks.find_failing(ASKED, called.format("delete")) is None


def put_forecast(work, prefix_tokens):
    point = EscalationPoint(threshold=-0.7, escalated=SHARE, quality=SHARE, cost_per_1000=None)
    option = EscalationOption(checks=(), escalated=SHARE, quality=SHARE, cost_per_1000=None)
    curve = EscalationCurve(
        points=(point,),
        chosen=point,
        validation_cases=10,
        validation_escalated=0.2,
        validation_quality=0.5,
        max_rate=0.2,
        prefix_tokens=prefix_tokens,
    )
    figures = dict.fromkeys(
        ("gain_over_small", "gain_low", "gain_high", "loss_to_large", "loss_low", "loss_high"), 0.0
    )
    forecast = EscalationForecast(
        small="adapter", large="log", metric="right", cases=10, chosen=option, options=(option,),
        large_alone=option, curve=curve, **figures,
    )  # fmt: skip
    write_forecast(work.project.state, forecast)


@pytest.mark.parametrize(
    ("chosen_for", "settings", "fits"),
    [
        (None, {}, True),
        (16, {"stream": "prefix", "prefix_tokens": 16}, True),
        (None, {"stream": "prefix"}, False),
        (16, {}, False),
    ],
)
def test_a_threshold_holds_for_the_tokens_that_it_was_chosen_for(work, chosen_for, settings, fits):
    put_forecast(work, chosen_for)
    asked = serving(min_logprob="auto", **settings)
    if fits:
        assert with_threshold(work, asked).escalate.min_logprob == -0.7
    else:
        with pytest.raises(UserError, match="was not chosen for"):
            with_threshold(work, asked)
